//! The thread of one GPU that moves batches out of senders' staging and into pages.

use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use device::{DeviceBuffer, Event, SharedMemory, Stream};
use kernels::{KvDirection, KvKernels, KvMove, KvMoving, KvPort, KvTable};
use types::{KvLayout, PageId};

use super::link::Link;
use super::open_pairs::PairEnd;
use super::piece;
use super::slots::{Owner, SLOTS, Slots};
use crate::config::TransferConfig;
use crate::data::{BATCH_SLICES_MAX, Batch, BatchOrder, BatchOutcome, DataCounters, DataError, Stage, StagedSlice};

/// The way out of the staging of one rank of a sender.
#[derive(Clone)]
pub(super) enum Source {
    /// It is mapped here. Streams of this pair: `moves` for copies to staging, `scatters` from there.
    Ipc { memory: SharedMemory, moves: Stream, scatters: Stream },
    /// It is sent, so many bytes at most.
    Nccl { link: Arc<Link>, bytes: usize, scatters: Stream },
}

impl PairEnd for Source {
    fn abort(&self) {
        if let Self::Nccl { link, .. } = self {
            link.abort();
        }
    }
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
    pub(super) fn moves(&self) -> &Stream {
        match self {
            Self::Ipc { moves, .. } => moves,
            Self::Nccl { link, .. } => &link.stream,
        }
    }

    /// Where its scatters run, each behind its move: not on a stream of all sources, on which one that waits would hold up the others.
    fn scatters(&self) -> &Stream {
        match self {
            Self::Ipc { scatters, .. } | Self::Nccl { scatters, .. } => scatters,
        }
    }

    /// The outcome of a batch that failed. What is sent and not received stays in the way of the next batch.
    pub(super) fn failed(&self, error: DataError) -> BatchOutcome {
        match self {
            Self::Ipc { .. } => BatchOutcome::Failed(error),
            Self::Nccl { link, .. } => {
                link.abort();
                BatchOutcome::Broken(error)
            }
        }
    }
}

/// A batch, and where it comes from.
pub(super) struct Job {
    /// Tells lanes apart.
    pub(super) lane: u64,
    pub(super) source: Source,
    pub(super) order: BatchOrder,
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
        let buffer = stream.allocate::<u8>(SLOTS * slot_bytes)?;
        let worker = Worker {
            rank,
            layout,
            kernels: KvKernels::load(&port.device)?,
            staging: buffer.shared(),
            buffer,
            slot_bytes,
            slots: Slots::new(),
            tables: Vec::new(),
            under_way: Vec::new(),
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
        if let Some(Job { order, .. }) = refused {
            (order.done)(BatchOutcome::Failed(DataError("the landing thread has ended".into())));
        }
    }
}

impl Drop for LandingThread {
    fn drop(&mut self) {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner).take();
        // The thread itself may let go of a lane last, and ends when it is back in its loop.
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join(); // what it was moving is over either way
        }
    }
}

struct Worker {
    rank: u32,
    port: KvPort,
    layout: KvLayout,
    /// For what is allocated here.
    stream: Stream,
    kernels: KvKernels,
    /// Where batches come to lie: [`SLOTS`] places.
    buffer: DeviceBuffer<u8>,
    /// The same memory.
    staging: SharedMemory,
    slot_bytes: usize,
    slots: Slots<Job>,
    tables: Vec<KvTable>,
    /// Those of one source oldest first; whichever is done ends.
    under_way: Vec<UnderWay>,
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
    done: Box<dyn FnOnce(BatchOutcome) + Send>,
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
                Ok(job) => self.take(job),
                Err(TryRecvError::Disconnected) if self.under_way.is_empty() => return,
                // Copies take tens of microseconds: waiting for one by sleeping would take longer.
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => std::thread::yield_now(),
            }
            for done in self.under_way.extract_if(.., |batch| batch.is_done()).collect::<Vec<_>>() {
                self.end(done);
            }
            while let Some((slot, job)) = self.slots.begin() {
                self.begin(slot, job);
            }
        }
    }

    fn take(&mut self, job: Job) {
        let waits_for_sender = matches!(job.source, Source::Nccl { .. });
        // What would have been fetched is left there; what is sent must be received, so that the two ends stay in step.
        if job.order.pages.is_none() && !waits_for_sender {
            return (job.order.done)(BatchOutcome::Whole);
        }
        self.slots.push(Owner { lane: job.lane, waits_for_sender }, job);
    }

    fn begin(&mut self, slot: usize, Job { source, order, .. }: Job) {
        let BatchOrder { batch, bytes, pages, done } = order;
        let moved = self.enqueue_move(&source, &batch, bytes, slot);
        let scattered = moved.and_then(|(start, moved)| {
            let scatter = pages.map(|pages| self.enqueue_scatter(&source, &batch, &pages, &moved, slot)).transpose()?;
            Ok((start, moved, scatter))
        });
        match scattered {
            Ok((start, moved, scatter)) => {
                self.under_way.push(UnderWay { slot, scatter, start, moved, batch, bytes, source, done });
            }
            Err(error) => {
                let outcome = source.failed(error);
                // Part of it may have been enqueued. What cannot be waited for is a broken stream, which runs nothing; what waited for the sender has
                // been aborted.
                let _ = source.moves().synchronize();
                let _ = source.scatters().synchronize();
                self.slots.end(slot);
                done(outcome);
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
        let stream = source.moves();
        let start = stream.record()?;
        match source {
            Source::Ipc { memory, .. } => {
                // SAFETY: `source` is kept open in `UnderWay` until the copy is over, and its sender leaves these bytes alone until it hears
                // LANDED; the slot is this batch's own, and whoever had it has ended.
                unsafe { stream.copy_shared((&self.staging, offset), (memory, batch.offset as usize), bytes) }?;
            }
            Source::Nccl { link, .. } => link.receive(&mut self.buffer, offset, bytes)?,
        }
        Ok((start, stream.record()?))
    }

    fn enqueue_scatter(
        &mut self,
        source: &Source,
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
        let stream = source.scatters();
        stream.wait(moved)?;
        let (direction, checksums, blocks) = (KvDirection::Scatter, batch.is_checked, self.blocks);
        let work = KvMove { direction, staging: &self.staging, offset: slot * self.slot_bytes, checksums, blocks };
        // SAFETY: the slot is this batch's own until it ends. The pages are in the state Landing: they belong to no sequence that a step reads
        // or writes, and to no other ticket, until the ticket's terminal arrival, which waits for this batch.
        Ok(unsafe { work.enqueue(&self.kernels, stream, table) }?)
    }

    fn end(&mut self, batch: UnderWay) {
        let UnderWay { slot, scatter, start, moved, batch, bytes, source, done } = batch;
        let outcome = self.wait(scatter, &start, &moved, &batch, bytes);
        self.slots.end(slot);
        match (outcome, &source) {
            (Err(error), _) => done(source.failed(error)),
            (Ok(_), Source::Nccl { link, .. }) if link.is_aborted() => {
                done(BatchOutcome::Broken(DataError("the communicator was aborted".into())));
            }
            (Ok(outcome), _) => done(outcome),
        }
    }

    fn wait(
        &mut self,
        scatter: Option<KvMoving>,
        start: &Event,
        moved: &Event,
        batch: &Batch,
        bytes: usize,
    ) -> Result<BatchOutcome, DataError> {
        let Some(scatter) = scatter else {
            moved.wait()?;
            return Ok(BatchOutcome::Whole);
        };
        let scattered = scatter.event().clone();
        let table = scatter.wait()?;
        self.counters.passed(Stage::Move, bytes, moved.elapsed_us(start)?);
        self.counters.passed(Stage::Scatter, bytes, scattered.elapsed_us(moved)?);
        let mut outcome = BatchOutcome::Whole;
        if batch.is_checked {
            let differs = batch.slices.iter().zip(table.checksums()).find(|(staged, found)| staged.checksum != **found);
            self.counters.compared(batch.slices.len(), differs.is_some());
            if let Some((staged, _)) = differs {
                outcome = BatchOutcome::Corrupt(staged.slice);
            }
        }
        self.tables.push(table);
        Ok(outcome)
    }
}

impl UnderWay {
    fn is_done(&self) -> bool {
        self.scatter.as_ref().map_or_else(|| self.moved.is_done(), KvMoving::is_done)
    }
}
