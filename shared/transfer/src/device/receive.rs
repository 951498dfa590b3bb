//! Decode's half: opens the sender's staging, measures each pair, and hands batches to the thread of the GPU that they go to.

use std::sync::Arc;

use device::{SharedMemory, Stream};
use kernels::KvPort;
use types::KvLayout;

use super::landing_thread::{Job, LandingThread};
use super::offer;
use super::setup::{StagingHandle, decode};
use crate::config::TransferConfig;
use crate::data::{
    DataCounters, DataError, DataOffer, LaneSides, PairRate, ReceiveData, ReceiveDataLane, Taken, Taking,
};

/// Bytes that are copied to measure a pair.
const PROBE_BYTES: usize = 64 << 20;

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

    /// Opens one rank's staging on one of our GPUs and copies out of it.
    fn measure(
        &self,
        handle: &StagingHandle,
        stream: &Stream,
        probe_bytes: usize,
    ) -> Result<(SharedMemory, u32), DataError> {
        let staging = SharedMemory::import(&stream.device(), &handle.handle, handle.bytes as usize)?;
        let target = stream.allocate::<u8>(probe_bytes)?.share();
        let mut best_us = f64::INFINITY;
        for _ in 0..3 {
            let start = stream.record()?;
            // SAFETY: both live until the event below has passed; nothing else knows the target, and what the sender writes to its staging
            // meanwhile does not matter: nobody looks at the bytes.
            unsafe { stream.copy_shared((&target, 0), (&staging, 0), probe_bytes) }?;
            let end = stream.record()?;
            end.wait()?;
            best_us = best_us.min(end.elapsed_us(&start)?);
        }
        Ok((staging, (probe_bytes as f64 / best_us) as u32))
    }
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
        let handles = decode(setup, sides.sender.tp as usize)?;
        let (mut sources, mut rates) = (Vec::new(), Vec::new());
        for (sender_rank, handle) in (0_u32..).zip(&handles) {
            for (receiver_rank, port) in (0_u32..).zip(&self.ports) {
                let (ours, theirs) = (sides.receiver.rank_heads(receiver_rank), sides.sender.rank_heads(sender_rank));
                if ours.start.max(theirs.start) >= ours.end.min(theirs.end) {
                    sources.push(None);
                    continue;
                }
                let probe_bytes = PROBE_BYTES.min(handle.bytes as usize);
                let (staging, mb_per_s) = self.measure(handle, &port.device.stream()?, probe_bytes)?;
                sources.push(Some(staging));
                let path = sides.paths.pair(sender_rank, receiver_rank);
                let rate = PairRate { sender_rank, receiver_rank, path, mb_per_s };
                self.counters.measured(sides.peer, rate);
                rates.push(rate);
                let floor = self.config.min_gb_per_s;
                if mb_per_s < floor.saturating_mul(1_000) {
                    let slow = format!(
                        "rank {sender_rank} to rank {receiver_rank}: {mb_per_s} MB/s, transfer.min_gb_per_s is {floor}"
                    );
                    if !self.config.allow_slow {
                        return Err(DataError(slow + " (transfer.allow_slow lets it be)"));
                    }
                    tracing::warn!(peer = %sides.peer, "kv data path is slow: {slow}");
                }
            }
        }
        let threads = Arc::clone(&self.threads);
        Ok((Arc::new(DeviceReceiveLane { sources, receivers: self.ports.len(), threads }), rates))
    }
}

struct DeviceReceiveLane {
    /// `[sender rank][receiver rank]`: the sender's staging, opened on the receiver's GPU.
    sources: Vec<Option<SharedMemory>>,
    receivers: usize,
    threads: Arc<Vec<LandingThread>>,
}

impl ReceiveDataLane for DeviceReceiveLane {
    fn take(&self, taking: Taking) {
        let (sender, receiver) = (taking.batch.sender_rank as usize, taking.batch.receiver_rank as usize);
        let source = self.sources.get(sender * self.receivers + receiver).and_then(Option::as_ref);
        let (first, bytes) = (taking.batch.offset as usize, taking.bytes);
        let fits = |source: &&SharedMemory| first.checked_add(bytes).is_some_and(|end| end <= source.len());
        match source.filter(fits) {
            Some(source) => self.threads[receiver].send(Job { source: source.clone(), taking }),
            None => (taking.done)(Taken::Failed(DataError(format!("bytes {first} + {bytes} are not in staging")))),
        }
    }

    fn close(&self) {}
}
