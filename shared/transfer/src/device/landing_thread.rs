//! The thread of one GPU that moves batches out of senders' staging and into pages.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use device::{Event, SharedMemory, Stream};
use kernels::{KvDirection, KvKernels, KvMove, KvMoving, KvPort, KvTable};
use types::KvLayout;

use super::piece;
use crate::config::TransferConfig;
use crate::data::{BATCH_SLICES_MAX, Batch, DataCounters, DataError, Stage, Taken, Taking};

/// Batches under way at a time: one is moved while another is scattered.
const SLOTS: usize = 4;

/// A batch, and the staging that it lies in.
pub(super) struct Job {
    pub(super) source: SharedMemory,
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
        let stream = port.device.stream()?;
        let slot_bytes = config.batch_bytes_max as usize;
        let worker = Worker {
            rank,
            layout,
            kernels: KvKernels::load(&port.device)?,
            slots: stream.allocate::<u8>(SLOTS * slot_bytes)?.share(),
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
    stream: Stream,
    kernels: KvKernels,
    /// Where batches from other GPUs come to lie: [`SLOTS`] places.
    slots: SharedMemory,
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
    moving: KvMoving,
    start: Event,
    moved: Event,
    batch: Batch,
    bytes: usize,
    /// Open until the copy is over.
    _source: SharedMemory,
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
            while self.under_way.front().is_some_and(|oldest| oldest.moving.is_done()) {
                self.end_oldest();
            }
        }
    }

    fn begin(&mut self, Job { source, taking }: Job) {
        let Taking { batch, bytes, pages, done } = taking;
        let Some(pages) = pages else { return done(Taken::Whole) };
        while self.free.is_empty() {
            self.end_oldest();
        }
        let pieces: Result<Vec<_>, DataError> = batch
            .slices
            .iter()
            .zip(pages)
            .map(|(staged, page)| piece(&self.port, &self.layout, self.rank, &staged.slice, page))
            .collect();
        match pieces.and_then(|pieces| self.enqueue(&source, &batch, bytes, pieces)) {
            Ok((slot, moving, start, moved)) => {
                self.under_way.push_back(UnderWay { slot, moving, start, moved, batch, bytes, _source: source, done });
            }
            Err(error) => {
                // Part of it may have been enqueued. What cannot be waited for is a broken stream, which runs nothing.
                let _ = self.stream.synchronize();
                done(Taken::Failed(error));
            }
        }
    }

    fn enqueue(
        &mut self,
        source: &SharedMemory,
        batch: &Batch,
        bytes: usize,
        pieces: Vec<(u64, usize)>,
    ) -> Result<(usize, KvMoving, Event, Event), DataError> {
        let slot = *self.free.last().expect("`begin` waits for one");
        if bytes > self.slot_bytes {
            return Err(DataError(format!("a batch of {bytes} bytes, batch_bytes_max is {} here", self.slot_bytes)));
        }
        let mut table = match self.tables.pop() {
            Some(table) => table,
            None => KvTable::new(&self.stream, BATCH_SLICES_MAX)?,
        };
        table.fill(pieces)?;
        let offset = slot * self.slot_bytes;
        let start = self.stream.record()?;
        // SAFETY: `source` is kept open in `UnderWay` until the copy is over, and its sender leaves these bytes alone until it hears LANDED; the
        // slot is this batch's own.
        unsafe { self.stream.copy_shared((&self.slots, offset), (source, batch.offset as usize), bytes) }?;
        let moved = self.stream.record()?;
        let (direction, checksums, blocks) = (KvDirection::Scatter, batch.is_checked, self.blocks);
        let work = KvMove { direction, staging: &self.slots, offset, checksums, blocks };
        // SAFETY: the slot is this batch's own until it ends. The pages are in the state Landing: they belong to no sequence that a step reads
        // or writes, and to no other ticket, until the ticket's terminal arrival, which waits for this batch.
        let moving = unsafe { work.enqueue(&self.kernels, &self.stream, table) }?;
        self.free.pop();
        Ok((slot, moving, start, moved))
    }

    fn end_oldest(&mut self) {
        let Some(oldest) = self.under_way.pop_front() else { return };
        let UnderWay { slot, moving, start, moved, batch, bytes, done, .. } = oldest;
        let scattered = moving.event().clone();
        self.free.push(slot);
        let table = match moving.wait() {
            Ok(table) => table,
            Err(error) => return done(Taken::Failed(error.into())),
        };
        if let (Ok(moving_us), Ok(scatter_us)) = (moved.elapsed_us(&start), scattered.elapsed_us(&moved)) {
            self.counters.passed(Stage::Move, bytes, moving_us);
            self.counters.passed(Stage::Scatter, bytes, scatter_us);
        }
        let mut taken = Taken::Whole;
        if batch.is_checked {
            let differs = batch.slices.iter().zip(table.checksums()).find(|(staged, found)| staged.checksum != **found);
            self.counters.compared(batch.slices.len(), differs.is_some());
            if let Some((staged, _)) = differs {
                taken = Taken::Corrupt(staged.slice);
            }
        }
        self.tables.push(table);
        done(taken);
    }
}
