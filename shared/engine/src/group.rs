//! All ranks of one instance: a thread each, commanded in the same order.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use kv::KvSlice;
use scheduler::plan::{StepOutput, StepPlan};
use types::{KvLayout, PageId};

use crate::fault::Fault;
use crate::{Engine, EngineError, KvPort, KvReader};

/// Commands that may wait at a rank. Two steps in flight are four; the rest leaves KV transfers some room. A full queue makes callers wait.
const QUEUE: usize = 16;

/// One slice of KV to be written, with its physical page on the receiving side.
#[derive(Debug, Clone)]
pub struct KvWrite {
    /// Which part of which sequence.
    pub slice: KvSlice,
    /// The physical page.
    pub page: PageId,
    /// `slice.head_count * KvLayout::head_bytes()` bytes.
    pub bytes: Vec<u8>,
}

/// Reads a rank's cache, on the rank's own thread.
pub type ReadKv = dyn Fn(u32, &dyn KvReader) + Send + Sync;

enum Command {
    Launch(Arc<StepPlan>),
    Collect,
    Read(Arc<ReadKv>),
    Export { slices: Vec<(KvSlice, PageId)>, reply: SyncSender<Result<Vec<Vec<u8>>, EngineError>> },
    Import { writes: Vec<KvWrite>, reply: SyncSender<Result<(), EngineError>> },
}

/// The ranks of one instance. Methods may be called from any thread; steps are collected in the order of launches.
///
/// A rank whose engine fails in a step, or panics, takes the group with it: every later call, and every call that waits, yields
/// [`EngineError::RankLost`].
pub struct EngineGroup {
    ranks: Vec<SyncSender<Command>>,
    threads: Vec<JoinHandle<()>>,
    /// From the first rank of each attention group.
    outputs: Mutex<Vec<Receiver<StepOutput>>>,
    /// Held while one command goes to all ranks, so that all get the commands in one order whoever calls.
    broadcast: Mutex<()>,
    kv_layout: KvLayout,
    kv_ports: Option<Vec<KvPort>>,
    fault: Arc<Fault>,
}

impl EngineGroup {
    /// Starts `ranks` threads named `NAME-rank-N` and builds an engine on each, all at once. `fault` is the group's, shared with whatever
    /// collectives the engines use.
    ///
    /// # Errors
    /// The first error of a constructor; [`EngineError::RankLost`] if one panics.
    pub fn start<E: Engine>(
        name: &str,
        ranks: u32,
        kv_layout: KvLayout,
        fault: Arc<Fault>,
        construct: impl Fn(u32) -> Result<E, EngineError> + Send + Sync + 'static,
    ) -> Result<Self, EngineError> {
        let construct = Arc::new(construct);
        let (ready, built) = sync_channel(ranks as usize);
        let mut outputs = Vec::new();
        let head_bytes = kv_layout.head_bytes();
        let mut group = Self {
            ranks: Vec::new(),
            threads: Vec::new(),
            outputs: Mutex::default(),
            broadcast: Mutex::new(()),
            kv_layout,
            kv_ports: None,
            fault: fault.clone(),
        };
        for rank in 0..ranks {
            let (commands, inbox) = sync_channel(QUEUE);
            let (construct, ready, fault) = (construct.clone(), ready.clone(), fault.clone());
            let output = rank.is_multiple_of(group.kv_layout.tp).then(|| {
                let (output, outlet) = sync_channel(QUEUE);
                outputs.push(outlet);
                output
            });
            let worker = RankThread { rank, inbox, output, head_bytes, fault };
            let thread = std::thread::Builder::new()
                .name(format!("{name}-rank-{rank}"))
                .spawn(move || worker.run(&*construct, ready))
                .map_err(|error| EngineError::Setup(format!("cannot start the thread of rank {rank}: {error}")))?;
            group.ranks.push(commands);
            group.threads.push(thread);
        }
        drop(ready);
        group.outputs = Mutex::new(outputs);
        // A constructor that fails leaves the other ranks idle; dropping the group then ends and joins them.
        let mut built = built.iter().collect::<Result<Vec<_>, EngineError>>()?;
        fault.check()?;
        built.sort_by_key(|(rank, _)| *rank);
        group.kv_ports = built.into_iter().map(|(_, port)| port).collect();
        Ok(group)
    }

    /// Number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// How the KV cache lies in memory.
    #[must_use]
    pub const fn kv_layout(&self) -> &KvLayout {
        &self.kv_layout
    }

    /// Each rank's cache, for whoever moves pages beside the steps; `None` if they are in host memory.
    #[must_use]
    pub fn kv_ports(&self) -> Option<&[KvPort]> {
        self.kv_ports.as_deref()
    }

    /// Has every rank start a step, after the steps launched before. Returns without waiting for the step.
    ///
    /// # Errors
    /// [`EngineError::RankLost`].
    pub fn launch(&self, plan: Arc<StepPlan>) -> Result<(), EngineError> {
        self.send_all(|| Command::Launch(plan.clone()))
    }

    /// Waits for the oldest step that was launched and not collected, and yields what the first ranks of the attention groups computed, each
    /// for its own rows.
    ///
    /// # Errors
    /// [`EngineError::RankLost`], also when the step itself failed.
    pub fn collect(&self) -> Result<StepOutput, EngineError> {
        self.send_all(|| Command::Collect)?;
        // Nothing panics while it holds this lock; were it so, the receivers would be as good as before.
        let outputs = self.outputs.lock().unwrap_or_else(PoisonError::into_inner);
        let mut whole = StepOutput::default();
        for (rank, output) in (0..).step_by(self.kv_layout.tp as usize).zip(&*outputs) {
            let part = output.recv().map_err(|_| self.fault.error(rank))?;
            if rank == 0 { whole = part } else { fill_in(&mut whole, part) }
        }
        Ok(whole)
    }

    /// Has every rank call `read` with its number and its cache, behind the steps launched before and ahead of those launched after. Returns
    /// without waiting for it.
    ///
    /// # Errors
    /// [`EngineError::RankLost`].
    pub fn read_kv(&self, read: Arc<ReadKv>) -> Result<(), EngineError> {
        self.send_all(|| Command::Read(Arc::clone(&read)))
    }

    /// Copies slices out of one rank's cache, between steps; one buffer a slice.
    ///
    /// # Errors
    /// [`EngineError::KvSlice`] for the first slice that is not on this rank; [`EngineError::RankLost`].
    pub fn export_kv(&self, rank: u32, slices: Vec<(KvSlice, PageId)>) -> Result<Vec<Vec<u8>>, EngineError> {
        let (reply, answer) = sync_channel(1);
        self.send(rank, Command::Export { slices, reply })?;
        answer.recv().map_err(|_| self.fault.error(rank))?
    }

    /// Writes slices into one rank's cache, between steps.
    ///
    /// # Errors
    /// [`EngineError::KvSlice`] for the first slice that is not on this rank or has another length (those before it are written);
    /// [`EngineError::RankLost`].
    pub fn import_kv(&self, rank: u32, writes: Vec<KvWrite>) -> Result<(), EngineError> {
        let (reply, answer) = sync_channel(1);
        self.send(rank, Command::Import { writes, reply })?;
        answer.recv().map_err(|_| self.fault.error(rank))?
    }

    /// Lets the ranks finish what was commanded, and joins their threads. Dropping the group does the same.
    ///
    /// # Errors
    /// [`EngineError::RankLost`] if one was lost.
    pub fn shutdown(mut self) -> Result<(), EngineError> {
        self.join();
        self.fault.check()
    }

    fn send_all(&self, command: impl Fn() -> Command) -> Result<(), EngineError> {
        let _broadcast = self.broadcast.lock().unwrap_or_else(PoisonError::into_inner);
        (0..self.ranks()).try_for_each(|rank| self.send(rank, command()))
    }

    fn send(&self, rank: u32, command: Command) -> Result<(), EngineError> {
        self.fault.check()?;
        self.ranks[rank as usize].send(command).map_err(|_| self.fault.error(rank))
    }

    fn join(&mut self) {
        self.ranks.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join(); // a panic was caught in the thread and recorded in `fault`
        }
    }
}

impl Drop for EngineGroup {
    fn drop(&mut self) {
        self.join();
    }
}

/// Takes over the rows that another attention group has computed; in its own output all others are empty.
fn fill_in(whole: &mut StepOutput, part: StepOutput) {
    assert_eq!((whole.step, whole.rows.len()), (part.step, part.rows.len()), "all ranks run the same plans");
    for (row, computed) in whole.rows.iter_mut().zip(part.rows) {
        if computed.sampled.is_some() || computed.failure.is_some() || !computed.logits.is_empty() {
            *row = computed;
        }
    }
}

/// What the thread of a rank needs.
struct RankThread {
    rank: u32,
    inbox: Receiver<Command>,
    /// The way to `collect`, from a rank that is the first of its attention group.
    output: Option<SyncSender<StepOutput>>,
    head_bytes: usize,
    fault: Arc<Fault>,
}

impl RankThread {
    fn run<E: Engine>(
        self,
        construct: &dyn Fn(u32) -> Result<E, EngineError>,
        ready: SyncSender<Result<(u32, Option<KvPort>), EngineError>>,
    ) {
        self.fault.register(self.rank);
        // Held beyond a panic: whoever sees this end of the channel gone finds the fault tripped.
        let mut ready = Some(ready);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let mut engine = match construct(self.rank) {
                Ok(engine) => engine,
                Err(error) => {
                    let reason = error.to_string();
                    if let Some(ready) = ready.take() {
                        let _ = ready.send(Err(error)); // nobody listens once another rank has failed
                    }
                    return Err(reason);
                }
            };
            if let Some(ready) = ready.take() {
                let _ = ready.send(Ok((self.rank, engine.kv_port()))); // as above
            }
            // The engine outlives a panic: when it is dropped, which may wake other ranks, they shall find the cause.
            let served = catch_unwind(AssertUnwindSafe(|| self.serve(&mut engine)));
            let served = served.map_err(|panic| panicked(&*panic)).and_then(|served| served.map_err(|e| e.to_string()));
            served.inspect_err(|reason| self.fault.trip(self.rank, reason.clone()))
        }));
        if let Err(reason) = outcome.unwrap_or_else(|panic| Err(panicked(&*panic))) {
            self.fault.trip(self.rank, reason);
        }
    }

    /// Carries out commands until the group is dropped or a step fails.
    fn serve<E: Engine>(&self, engine: &mut E) -> Result<(), EngineError> {
        while let Ok(command) = self.inbox.recv() {
            match command {
                Command::Launch(plan) => engine.launch(&plan)?,
                Command::Collect => {
                    let output = engine.collect()?;
                    if let Some(channel) = &self.output
                        && channel.send(output).is_err()
                    {
                        return Ok(()); // the group is being dropped
                    }
                }
                Command::Read(read) => read(self.rank, &Cache(&*engine)),
                Command::Export { slices, reply } => {
                    let _ = reply.send(self.export(engine, &slices)); // the caller may have given up
                }
                Command::Import { writes, reply } => {
                    let written =
                        writes.iter().try_for_each(|write| engine.import_kv(&write.slice, write.page, &write.bytes));
                    let _ = reply.send(written); // as above
                }
            }
        }
        Ok(())
    }

    fn export<E: Engine>(&self, engine: &E, slices: &[(KvSlice, PageId)]) -> Result<Vec<Vec<u8>>, EngineError> {
        let copy = |(slice, page): &(KvSlice, PageId)| {
            let mut bytes = vec![0; slice.head_count as usize * self.head_bytes];
            engine.export_kv(slice, *page, &mut bytes)?;
            Ok(bytes)
        };
        slices.iter().map(copy).collect()
    }
}

/// A rank's cache between steps.
struct Cache<'a, E>(&'a E);

impl<E: Engine> KvReader for Cache<'_, E> {
    fn export_kv(&self, slice: &KvSlice, page: PageId, out: &mut [u8]) -> Result<(), EngineError> {
        self.0.export_kv(slice, page, out)
    }
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("panicked: {}", text.unwrap_or("no message"))
}

#[cfg(test)]
mod tests;
