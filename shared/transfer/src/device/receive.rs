//! Decode's half: opens the sender's staging, measures each pair, and hands batches to the thread of the GPU that they go to.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use device::nccl::UniqueId;
use device::{DeviceBuffer, SharedMemory};
use kernels::KvPort;
use types::{KvLayout, PeerId};

use super::landing_thread::{Job, LandingThread, Source};
use super::link::{Link, PROBE_BYTES, PROBES};
use super::open_pairs::{OpenPairs, Pair};
use super::setup::{self, StagingHandle};
use super::{offer, pairs};
use crate::config::TransferConfig;
use crate::data::{
    BatchOrder, BatchOutcome, DataCounters, DataError, DataOffer, LaneSides, PairRate, Path, ReceiveData,
    ReceiveDataLane,
};

/// The caches of a decode worker's ranks.
pub struct DeviceReceive {
    offer: DataOffer,
    worker: Arc<Worker>,
    next_lane: AtomicU64,
}

/// What all lanes share.
struct Worker {
    config: TransferConfig,
    ports: Vec<KvPort>,
    threads: Vec<LandingThread>,
    counters: Arc<DataCounters>,
}

impl DeviceReceive {
    /// Starts a thread for each of `ports`; `ports[n]` is the cache of rank `n`.
    ///
    /// # Errors
    /// [`DataError`] if a device refuses a stream, memory or the kernels, or the system a thread.
    pub fn new(
        ports: Vec<KvPort>,
        layout: &KvLayout,
        config: &TransferConfig,
        counters: &Arc<DataCounters>,
    ) -> Result<Self, DataError> {
        let offer = offer(config, &ports)?;
        let start = |(rank, port): (usize, &KvPort)| {
            LandingThread::start(rank as u32, port.clone(), layout.clone(), config, Arc::clone(counters))
        };
        let threads = ports.iter().enumerate().map(start).collect::<Result<Vec<_>, _>>()?;
        let (config, counters) = (config.clone(), Arc::clone(counters));
        let worker = Arc::new(Worker { config, ports, threads, counters });
        Ok(Self { offer, worker, next_lane: AtomicU64::new(0) })
    }
}

impl ReceiveData for DeviceReceive {
    fn offer(&self) -> DataOffer {
        self.offer.clone()
    }

    fn open(&self, sides: &LaneSides<'_>, setup: &[u8]) -> Result<Arc<dyn ReceiveDataLane>, DataError> {
        let path = |(sender, receiver): Pair| ((sender, receiver), sides.paths.pair(sender, receiver));
        Ok(Arc::new(DeviceReceiveLane {
            id: self.next_lane.fetch_add(1, Ordering::Relaxed),
            peer: sides.peer.clone(),
            staging: setup::decode(setup, sides.sender.tp as usize)?,
            paths: pairs(sides).into_iter().map(path).collect(),
            sources: OpenPairs::default(),
            worker: Arc::clone(&self.worker),
        }))
    }
}

struct DeviceReceiveLane {
    id: u64,
    peer: PeerId,
    staging: Vec<StagingHandle>,
    paths: Vec<(Pair, Path)>,
    sources: OpenPairs<Source>,
    worker: Arc<Worker>,
}

impl DeviceReceiveLane {
    /// Opens the way of one pair, and measures it, in megabytes a second.
    fn open_pair(&self, pair: Pair, path: Path, join: &dyn Fn(Bytes)) -> Result<u32, DataError> {
        let (handle, port) = (&self.staging[pair.0 as usize], &self.worker.ports[pair.1 as usize]);
        let bytes = handle.bytes as usize;
        let probe_bytes = PROBE_BYTES.min(bytes);
        let mut target = port.device.stream()?.allocate::<u8>(probe_bytes)?;
        let scatters = port.device.urgent_stream()?;
        let source = match path {
            Path::Ipc => {
                let (memory, moves) =
                    (SharedMemory::import(&port.device, &handle.handle, bytes)?, port.device.stream()?);
                let source = Source::Ipc { memory, moves, scatters };
                self.sources.add(pair, source.clone())?;
                source
            }
            Path::Nccl => {
                let id = UniqueId::new()?;
                join(Bytes::copy_from_slice(id.as_bytes()));
                let link = Arc::new(Link::join(port, &id, false, &self.worker.config)?);
                let source = Source::Nccl { link: Arc::clone(&link), bytes, scatters };
                // Within reach of `close` before the sender is waited for.
                self.sources.add(pair, source.clone())?;
                link.ready()?;
                source
            }
        };
        let mut best_us = f64::INFINITY;
        for _ in 0..PROBES {
            best_us = best_us.min(self.probe(&source, &mut target)?);
        }
        Ok((probe_bytes as f64 / best_us) as u32)
    }

    /// Microseconds that it takes to fill `target`.
    fn probe(&self, source: &Source, target: &mut DeviceBuffer<u8>) -> Result<f64, DataError> {
        let (stream, bytes) = (source.moves(), target.len());
        let start = stream.record()?;
        match source {
            Source::Ipc { memory, moves, .. } => {
                let target = target.shared();
                // SAFETY: both live until the event below has passed; nothing else knows the target, and what the sender writes to its staging
                // meanwhile does not matter: nobody looks at the bytes.
                unsafe { moves.copy_shared((&target, 0), (memory, 0), bytes) }?;
                let end = stream.record()?;
                end.wait()?; // for this side's copy engine, and nobody else
                Ok(end.elapsed_us(&start)?)
            }
            Source::Nccl { link, .. } => {
                link.receive(target, 0, bytes)?;
                let (end, bound) = (stream.record()?, self.worker.config.setup_timeout());
                if !end.passes_within(bound) {
                    link.abort();
                    return Err(DataError(format!("nothing was sent within {bound:?} (transfer.setup_timeout_ms)")));
                }
                if link.is_aborted() {
                    return Err(DataError("the communicator was aborted".into()));
                }
                Ok(end.elapsed_us(&start)?)
            }
        }
    }

    fn check_rate(&self, rate: &PairRate) -> Result<(), DataError> {
        let PairRate { sender_rank, receiver_rank, mb_per_s, .. } = *rate;
        let floor = self.worker.config.min_gb_per_s;
        if mb_per_s >= floor.saturating_mul(1_000) {
            return Ok(());
        }
        let slow =
            format!("rank {sender_rank} to rank {receiver_rank}: {mb_per_s} MB/s, transfer.min_gb_per_s is {floor}");
        if self.worker.config.allow_slow {
            tracing::warn!(peer = %self.peer, "kv data path is slow: {slow}");
            return Ok(());
        }
        Err(DataError(slow + " (transfer.allow_slow lets it be)"))
    }
}

impl ReceiveDataLane for DeviceReceiveLane {
    fn connect(&self, join: &dyn Fn(Bytes)) -> Result<Vec<PairRate>, DataError> {
        let mut rates = Vec::new();
        for (pair @ (sender_rank, receiver_rank), path) in &self.paths {
            let mb_per_s = self.open_pair(*pair, *path, join)?;
            let rate = PairRate { sender_rank: *sender_rank, receiver_rank: *receiver_rank, path: *path, mb_per_s };
            self.worker.counters.measured(&self.peer, rate);
            self.check_rate(&rate)?;
            rates.push(rate);
        }
        Ok(rates)
    }

    fn take(&self, order: BatchOrder) {
        let pair @ (_, receiver) = (order.batch.sender_rank, order.batch.receiver_rank);
        let (first, bytes) = (order.batch.offset as usize, order.bytes);
        let Some(source) = self.sources.get(pair) else {
            return (order.done)(BatchOutcome::Failed(DataError(format!("ranks {pair:?} share no heads"))));
        };
        if first.checked_add(bytes).is_none_or(|end| end > source.bytes()) {
            let error = DataError(format!("bytes {first} + {bytes} are not in staging"));
            return (order.done)(source.failed(error));
        }
        self.worker.threads[receiver as usize].send(Job { lane: self.id, source, order });
    }

    fn close(&self) {
        self.sources.close();
    }
}
