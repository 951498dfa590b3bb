//! Decode's half: opens the sender's staging, measures each pair, and hands batches to the thread of the GPU that they go to.

use std::collections::BTreeMap;
use std::sync::Arc;

use device::nccl::UniqueId;
use device::{DeviceBuffer, SharedMemory};
use kernels::KvPort;
use types::KvLayout;

use super::landing_thread::{Job, LandingThread, Source};
use super::link::{Link, PROBE_BYTES, PROBES};
use super::setup::{Setup, StagingHandle};
use super::{offer, pairs};
use crate::config::TransferConfig;
use crate::data::{
    DataCounters, DataError, DataOffer, LaneSides, PairRate, Path, ReceiveData, ReceiveDataLane, Taken, Taking,
};

/// The caches of a decode worker's ranks.
pub struct DeviceReceive {
    offer: DataOffer,
    config: TransferConfig,
    ports: Vec<KvPort>,
    threads: Arc<Vec<LandingThread>>,
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
        let offer = offer(config.transport, &ports)?;
        let start = |(rank, port): (usize, &KvPort)| {
            LandingThread::start(rank as u32, port.clone(), layout.clone(), config, Arc::clone(counters))
        };
        let threads = ports.iter().enumerate().map(start).collect::<Result<Vec<_>, _>>()?;
        let (config, counters) = (config.clone(), Arc::clone(counters));
        Ok(Self { offer, config, ports, threads: Arc::new(threads), counters })
    }

    /// Opens a way out of one rank's staging to one of our GPUs, and measures it.
    fn open_pair(
        &self,
        path: Path,
        handle: &StagingHandle,
        ids: &mut impl Iterator<Item = UniqueId>,
        port: &KvPort,
    ) -> Result<(Source, u32), DataError> {
        let bytes = handle.bytes as usize;
        let probe_bytes = PROBE_BYTES.min(bytes);
        let mut target = port.device.stream()?.allocate::<u8>(probe_bytes)?;
        let source = match path {
            Path::Ipc => {
                let stream = port.device.stream()?;
                Source::Ipc { memory: SharedMemory::import(&port.device, &handle.handle, bytes)?, stream }
            }
            Path::Nccl => {
                let id = ids.next().ok_or_else(|| DataError("a pair without a communicator".into()))?;
                Source::Nccl { link: Arc::new(Link::join(port, &id, false, &self.config)?), bytes }
            }
        };
        let mut best_us = f64::INFINITY;
        for _ in 0..PROBES {
            best_us = best_us.min(probe(&source, &mut target)?);
        }
        Ok((source, (probe_bytes as f64 / best_us) as u32))
    }

    fn check_rate(&self, sides: &LaneSides<'_>, rate: &PairRate) -> Result<(), DataError> {
        let PairRate { sender_rank, receiver_rank, mb_per_s, .. } = *rate;
        let floor = self.config.min_gb_per_s;
        if mb_per_s >= floor.saturating_mul(1_000) {
            return Ok(());
        }
        let slow =
            format!("rank {sender_rank} to rank {receiver_rank}: {mb_per_s} MB/s, transfer.min_gb_per_s is {floor}");
        if self.config.allow_slow {
            tracing::warn!(peer = %sides.peer, "kv data path is slow: {slow}");
            return Ok(());
        }
        Err(DataError(slow + " (transfer.allow_slow lets it be)"))
    }
}

/// Microseconds that it takes to fill `target`.
fn probe(source: &Source, target: &mut DeviceBuffer<u8>) -> Result<f64, DataError> {
    let (stream, bytes) = (source.stream(), target.len());
    let start = stream.record()?;
    match source {
        Source::Ipc { memory, stream } => {
            let target = target.shared();
            // SAFETY: both live until the event below has passed; nothing else knows the target, and what the sender writes to its staging
            // meanwhile does not matter: nobody looks at the bytes.
            unsafe { stream.copy_shared((&target, 0), (memory, 0), bytes) }?;
        }
        Source::Nccl { link, .. } => link.receive(target, 0, bytes)?,
    }
    let end = stream.record()?;
    end.wait()?;
    Ok(end.elapsed_us(&start)?)
}

impl ReceiveData for DeviceReceive {
    fn offer(&self) -> DataOffer {
        self.offer.clone()
    }

    fn open(
        &self,
        sides: &LaneSides<'_>,
        setup: &[u8],
    ) -> Result<(Arc<dyn ReceiveDataLane>, Vec<PairRate>), DataError> {
        let pairs = pairs(sides);
        let by_nccl = pairs.iter().filter(|(sender, receiver)| sides.paths.pair(*sender, *receiver) == Path::Nccl);
        let setup = Setup::decode(setup, sides.sender.tp as usize, by_nccl.count())?;
        let mut ids = setup.communicators.iter().copied();
        let (mut sources, mut rates) = (BTreeMap::new(), Vec::new());
        for pair @ (sender_rank, receiver_rank) in pairs {
            let path = sides.paths.pair(sender_rank, receiver_rank);
            let (handle, port) = (&setup.staging[sender_rank as usize], &self.ports[receiver_rank as usize]);
            let (source, mb_per_s) = self.open_pair(path, handle, &mut ids, port)?;
            let rate = PairRate { sender_rank, receiver_rank, path, mb_per_s };
            self.counters.measured(sides.peer, rate);
            self.check_rate(sides, &rate)?;
            sources.insert(pair, source);
            rates.push(rate);
        }
        Ok((Arc::new(DeviceReceiveLane { sources, threads: Arc::clone(&self.threads) }), rates))
    }
}

struct DeviceReceiveLane {
    /// By the sender's rank, then the receiver's.
    sources: BTreeMap<(u32, u32), Source>,
    threads: Arc<Vec<LandingThread>>,
}

impl ReceiveDataLane for DeviceReceiveLane {
    fn take(&self, taking: Taking) {
        let (sender, receiver) = (taking.batch.sender_rank, taking.batch.receiver_rank);
        let (first, bytes) = (taking.batch.offset as usize, taking.bytes);
        let fits = |source: &&Source| first.checked_add(bytes).is_some_and(|end| end <= source.bytes());
        match self.sources.get(&(sender, receiver)).filter(fits) {
            Some(source) => self.threads[receiver as usize].send(Job { source: source.clone(), taking }),
            None => (taking.done)(Taken::Failed(DataError(format!("bytes {first} + {bytes} are not in staging")))),
        }
    }

    fn close(&self) {
        for source in self.sources.values() {
            if let Source::Nccl { link, .. } = source {
                link.abort();
            }
        }
    }
}
