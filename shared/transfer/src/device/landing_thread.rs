//! The thread of one GPU that moves batches out of senders' staging and into pages.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use device::{DeviceBuffer, Event, SharedMemory, Stream};
use kernels::{KvDirection, KvKernels, KvMove, KvMoving, KvPort, KvTable};
use types::{KvLayout, PageId};

use super::link::Link;
use super::piece;
use crate::config::TransferConfig;
use crate::data::{BATCH_SLICES_MAX, Batch, DataCounters, DataError, Stage, StagedSlice, Taken, Taking};

/// Batches under way at a time: one is moved while another is scattered.
const SLOTS: usize = 4;

/// The way out of the staging of one rank of a sender.
#[derive(Clone)]
pub(super) enum Source {
    /// It is mapped here. The stream runs the copies of this pair.
    Ipc { memory: SharedMemory, stream: Stream },
    /// It is sent, so many bytes at most.
    Nccl { link: Arc<Link>, bytes: usize },
}

impl Source {
    /// Bytes of the sender's staging.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Ipc { memory, .. } => memory.len(),
            Self::Nccl { bytes, .. } => *bytes,
        }
    }

    /// Where its moves run.
    pub(super) fn stream(&self) -> &Stream {
        match self {
            Self::Ipc { stream, .. } => stream,
            Self::Nccl { link, .. } => &link.stream,
        }
    }
}

/// A batch, and where it comes from.
pub(super) struct Job {
    pub(super) source: Source,
    pub(super) taking: Taking,
}

/// The way to the thread. Dropping it ends the thread behind what was sent.
pub(super) struct LandingThread {
    jobs: Mutex<Option<Sender<Job>>>,
    thread: Option<JoinHandle<()>>,
}

impl LandingThread {
    pub(super) fn start(
        rank: u32,
        port: KvPort,
        layout: KvLayout,
        config: &TransferConfig,
        counters: Arc<DataCounters>,
    ) -> Result<Self, DataError> {
        let stream = port.device.urgent_stream()?;
        let slot_bytes = config.batch_bytes_max as usize;
        let slots = stream.allocate::<u8>(SLOTS * slot_bytes)?;
        let worker = Worker {
            rank,
            layout,
            kernels: KvKernels::load(&port.device)?,
            staging: slots.shared(),
            slots,
            slot_bytes,
            free: (0..SLOTS).collect(),
            tables: Vec::new(),
            under_way: VecDeque::new(),
            blocks: config.copy_blocks,
            stream,
            port,
            counters,
        };
        let (jobs, inbox) = channel();
        let thread = std::thread::Builder::new().name(format!("kv-land-{rank}")).spawn(move || worker.run(&inbox));
        let thread = thread.map_err(|error| DataError(format!("cannot start the landing thread: {error}")))?;
        Ok(Self { jobs: Mutex::new(Some(jobs)), thread: Some(thread) })
    }

    /// Never blocks.
    pub(super) fn send(&self, job: Job) {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let refused = match jobs.as_ref() {
            Some(jobs) => jobs.send(job).err().map(|refused| refused.0),
            None => Some(job),
        };
        if let Some(Job { taking, .. }) = refused {
            (taking.done)(Taken::Failed(DataError("the landing thread has ended".into())));
        }
    }
}

impl Drop for LandingThread {
    fn drop(&mut self) {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // what it was moving is over either way
        }
    }
}

struct Worker {
    rank: u32,
    port: KvPort,
    layout: KvLayout,
    /// Scatters; moves have streams of their own, so that the next batch moves meanwhile.
    stream: Stream,
    kernels: KvKernels,
    /// Where batches come to lie: [`SLOTS`] places.
    slots: DeviceBuffer<u8>,
    /// The same memory.
    staging: SharedMemory,
    slot_bytes: usize,
    free: Vec<usize>,
    tables: Vec<KvTable>,
    /// Oldest first; they end in this order.
    under_way: VecDeque<UnderWay>,
    blocks: u32,
    counters: Arc<DataCounters>,
}

struct UnderWay {
    slot: usize,
    /// `None` for bytes that go nowhere.
    scatter: Option<KvMoving>,
    start: Event,
    moved: Event,
    batch: Batch,
    bytes: usize,
    /// Open until the move is over.
    source: Source,
    done: Box<dyn FnOnce(Taken) + Send>,
}

impl Worker {
    fn run(mut self, inbox: &Receiver<Job>) {
        loop {
            let next = if self.under_way.is_empty() {
                inbox.recv().map_err(|_| TryRecvError::Disconnected)
            } else {
                inbox.try_recv()
            };
            match next {
                Ok(job) => self.begin(job),
                // Copies take tens of microseconds: waiting for one by sleeping would take longer.
                Err(TryRecvError::Empty) => std::thread::yield_now(),
                Err(TryRecvError::Disconnected) if self.under_way.is_empty() => return,
                Err(TryRecvError::Disconnected) => self.end_oldest(),
            }
            while self.under_way.front().is_some_and(|oldest| oldest.is_done()) {
                self.end_oldest();
            }
        }
    }

    fn begin(&mut self, Job { source, taking }: Job) {
        let Taking { batch, bytes, pages, done } = taking;
        // What would have been fetched is left there; what is sent must be received, so that the two ends stay in step.
        if pages.is_none() && matches!(source, Source::Ipc { .. }) {
            return done(Taken::Whole);
        }
        while self.free.is_empty() {
            self.end_oldest();
        }
        let slot = *self.free.last().expect("one was waited for");
        let moved = self.enqueue_move(&source, &batch, bytes, slot);
        let scattered = moved.and_then(|(start, moved)| {
            let scatter = pages.map(|pages| self.enqueue_scatter(&batch, &pages, &moved, slot)).transpose()?;
            Ok((start, moved, scatter))
        });
        match scattered {
            Ok((start, moved, scatter)) => {
                self.free.pop();
                self.under_way.push_back(UnderWay { slot, scatter, start, moved, batch, bytes, source, done });
            }
            Err(error) => {
                // Part of it may have been enqueued. What cannot be waited for is a broken stream, which runs nothing.
                let _ = source.stream().synchronize();
                let _ = self.stream.synchronize();
                done(Taken::Failed(error));
            }
        }
    }

    fn enqueue_move(
        &mut self,
        source: &Source,
        batch: &Batch,
        bytes: usize,
        slot: usize,
    ) -> Result<(Event, Event), DataError> {
        if bytes > self.slot_bytes {
            return Err(DataError(format!("a batch of {bytes} bytes, batch_bytes_max is {} here", self.slot_bytes)));
        }
        let offset = slot * self.slot_bytes;
        let stream = source.stream();
        let start = stream.record()?;
        match source {
            Source::Ipc { memory, .. } => {
                // SAFETY: `source` is kept open in `UnderWay` until the copy is over, and its sender leaves these bytes alone until it hears
                // LANDED; the slot is this batch's own, and whoever had it has ended.
                unsafe { stream.copy_shared((&self.staging, offset), (memory, batch.offset as usize), bytes) }?;
            }
            Source::Nccl { link, .. } => link.receive(&mut self.slots, offset, bytes)?,
        }
        Ok((start, stream.record()?))
    }

    fn enqueue_scatter(
        &mut self,
        batch: &Batch,
        pages: &[PageId],
        moved: &Event,
        slot: usize,
    ) -> Result<KvMoving, DataError> {
        let place =
            |(staged, page): (&StagedSlice, &PageId)| piece(&self.port, &self.layout, self.rank, &staged.slice, *page);
        let pieces = batch.slices.iter().zip(pages).map(place).collect::<Result<Vec<_>, _>>()?;
        let mut table = match self.tables.pop() {
            Some(table) => table,
            None => KvTable::new(&self.stream, BATCH_SLICES_MAX)?,
        };
        table.fill(pieces)?;
        self.stream.wait(moved)?;
        let (direction, checksums, blocks) = (KvDirection::Scatter, batch.is_checked, self.blocks);
        let work = KvMove { direction, staging: &self.staging, offset: slot * self.slot_bytes, checksums, blocks };
        // SAFETY: the slot is this batch's own until it ends. The pages are in the state Landing: they belong to no sequence that a step reads
        // or writes, and to no other ticket, until the ticket's terminal arrival, which waits for this batch.
        Ok(unsafe { work.enqueue(&self.kernels, &self.stream, table) }?)
    }

    fn end_oldest(&mut self) {
        let Some(oldest) = self.under_way.pop_front() else { return };
        let UnderWay { slot, scatter, start, moved, batch, bytes, source, done } = oldest;
        let outcome = self.wait(scatter, &start, &moved, &batch, bytes);
        self.free.push(slot);
        match (outcome, &source) {
            (Err(error), _) => done(Taken::Failed(error)),
            (Ok(_), Source::Nccl { link, .. }) if link.is_aborted() => {
                done(Taken::Failed(DataError("the communicator was aborted".into())));
            }
            (Ok(taken), _) => done(taken),
        }
    }

    fn wait(
        &mut self,
        scatter: Option<KvMoving>,
        start: &Event,
        moved: &Event,
        batch: &Batch,
        bytes: usize,
    ) -> Result<Taken, DataError> {
        let Some(scatter) = scatter else {
            moved.wait()?;
            return Ok(Taken::Whole);
        };
        let scattered = scatter.event().clone();
        let table = scatter.wait()?;
        self.counters.passed(Stage::Move, bytes, moved.elapsed_us(start)?);
        self.counters.passed(Stage::Scatter, bytes, scattered.elapsed_us(moved)?);
        let mut taken = Taken::Whole;
        if batch.is_checked {
            let differs = batch.slices.iter().zip(table.checksums()).find(|(staged, found)| staged.checksum != **found);
            self.counters.compared(batch.slices.len(), differs.is_some());
            if let Some((staged, _)) = differs {
                taken = Taken::Corrupt(staged.slice);
            }
        }
        self.tables.push(table);
        Ok(taken)
    }
}

impl UnderWay {
    fn is_done(&self) -> bool {
        self.scatter.as_ref().map_or_else(|| self.moved.is_done(), KvMoving::is_done)
    }
}
