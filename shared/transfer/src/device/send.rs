//! Prefill's half: gathers pages into staging on the sender's GPU, from where the receiver copies.

use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use device::nccl::UniqueId;
use device::{DeviceBuffer, Event, SharedMemory, Stream};
use kernels::{KvDirection, KvKernels, KvMove, KvMoving, KvPort, KvTable};
use kv::KvSlice;
use types::{KvLayout, PageId};

use super::link::{Link, PROBE_BYTES, PROBES};
use super::open_pairs::{OpenPairs, Pair};
use super::setup::{self, StagingHandle};
use super::{offer, pairs, piece};
use crate::config::TransferConfig;
use crate::data::{
    BATCH_SLICES_MAX, Batch, DataCounters, DataError, DataOffer, Gathering, LaneSides, Path, SendData, SendDataLane,
    Stage,
};
use crate::framed::staging_bytes;

/// The caches of a prefill worker's ranks.
pub struct DeviceSend {
    offer: DataOffer,
    config: TransferConfig,
    ranks: Arc<Vec<Rank>>,
    /// Staging of lanes that are closed. It is used again and never freed: the other side may still have it open.
    spare: Spare,
}

type Spare = Arc<Mutex<Vec<Vec<DeviceBuffer<u8>>>>>;

struct Rank {
    port: KvPort,
    layout: KvLayout,
    blocks: u32,
    /// Gathers, which are short: beside a forward pass they need not wait for room.
    stream: Stream,
    kernels: KvKernels,
    tables: Mutex<Vec<KvTable>>,
    counters: Arc<DataCounters>,
}

impl DeviceSend {
    /// `ports[n]` is the cache of rank `n`.
    ///
    /// # Errors
    /// [`DataError`] if a device refuses a stream or the kernels.
    pub fn new(
        ports: Vec<KvPort>,
        layout: &KvLayout,
        config: &TransferConfig,
        counters: &Arc<DataCounters>,
    ) -> Result<Self, DataError> {
        let offer = offer(config, &ports)?;
        let rank = |port: KvPort| -> Result<Rank, DataError> {
            Ok(Rank {
                layout: layout.clone(),
                blocks: config.copy_blocks,
                stream: port.device.urgent_stream()?,
                kernels: KvKernels::load(&port.device)?,
                tables: Mutex::default(),
                counters: Arc::clone(counters),
                port,
            })
        };
        let ranks = ports.into_iter().map(rank).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { offer, config: config.clone(), ranks: Arc::new(ranks), spare: Spare::default() })
    }

    fn staging(&self) -> Result<Vec<DeviceBuffer<u8>>, DataError> {
        if let Some(spare) = lock(&self.spare).pop() {
            return Ok(spare);
        }
        let bytes = staging_bytes(&self.config, self.ranks.len());
        Ok(self.ranks.iter().map(|rank| rank.stream.allocate(bytes)).collect::<Result<_, _>>()?)
    }
}

impl SendData for DeviceSend {
    fn offer(&self) -> DataOffer {
        self.offer.clone()
    }

    fn open(&self, sides: &LaneSides<'_>) -> Result<(Arc<dyn SendDataLane>, Vec<u8>), DataError> {
        let buffers = self.staging()?;
        let staging: Vec<SharedMemory> = buffers.iter().map(DeviceBuffer::shared).collect();
        let handle = |memory: &SharedMemory| -> Result<StagingHandle, DataError> {
            Ok(StagingHandle { handle: memory.export()?, bytes: memory.len() as u64 })
        };
        let handles = staging.iter().map(handle).collect::<Result<Vec<_>, _>>()?;
        let by_nccl = |(sender, receiver): &Pair| sides.paths.pair(*sender, *receiver) == Path::Nccl;
        let by_nccl = pairs(sides).into_iter().filter(by_nccl).collect();
        let (ranks, spare, config) = (Arc::clone(&self.ranks), Arc::clone(&self.spare), self.config.clone());
        let lane = DeviceSendLane { ranks, staging, buffers, spare, config, by_nccl, links: OpenPairs::default() };
        Ok((Arc::new(lane), setup::encode(&handles)))
    }
}

struct DeviceSendLane {
    ranks: Arc<Vec<Rank>>,
    staging: Vec<SharedMemory>,
    buffers: Vec<DeviceBuffer<u8>>,
    spare: Spare,
    config: TransferConfig,
    by_nccl: Vec<Pair>,
    links: OpenPairs<Arc<Link>>,
}

impl SendDataLane for DeviceSendLane {
    fn connect(&self, joins: Receiver<Bytes>) -> Result<(), DataError> {
        for pair @ (sender, _) in &self.by_nccl {
            let name = joins.recv().map_err(|_| DataError("the receiver names no communicator".into()))?;
            let (port, staging) = (&self.ranks[*sender as usize].port, &self.buffers[*sender as usize]);
            let link = Arc::new(Link::join(port, &UniqueId::from_bytes(&name)?, true, &self.config)?);
            self.links.add(*pair, Arc::clone(&link))?;
            link.ready()?;
            for _ in 0..PROBES {
                link.send(staging, 0, PROBE_BYTES.min(staging.len()))?;
            }
        }
        Ok(())
    }

    fn gather(
        &self,
        rank: u32,
        offset: usize,
        slices: &[(KvSlice, PageId)],
        checksums: bool,
    ) -> Result<Box<dyn Gathering>, DataError> {
        let (ranks, index) = (Arc::clone(&self.ranks), rank as usize);
        let (here, staging) = (&ranks[index], &self.staging[index]);
        let mut table = here.table()?;
        let pieces: Result<Vec<_>, _> =
            slices.iter().map(|(slice, page)| piece(&here.port, &here.layout, rank, slice, *page)).collect();
        table.fill(pieces?)?;
        let start = here.stream.record()?;
        let work = KvMove { direction: KvDirection::Gather, staging, offset, checksums, blocks: here.blocks };
        // SAFETY: port and staging live as long as this lane, which the gathering's caller holds until it has waited. Pages do not change until
        // then: `SendTicket::pages` asks that of its caller. The ring gives these bytes of staging to this batch alone.
        let moving = unsafe { work.enqueue(&here.kernels, &here.stream, table) }?;
        Ok(Box::new(DeviceGathering { ranks, index, start, moving, checksums }))
    }

    /// By IPC, the receiver comes for it.
    fn announced(&self, batch: &Batch, bytes: usize) -> Result<(), DataError> {
        let link = self.links.get((batch.sender_rank, batch.receiver_rank));
        // It was gathered before it was announced, so the send need not wait for another stream.
        link.map_or(Ok(()), |link| link.send(&self.buffers[batch.sender_rank as usize], batch.offset as usize, bytes))
    }

    fn close(&self) {
        self.links.close();
    }
}

impl Drop for DeviceSendLane {
    fn drop(&mut self) {
        lock(&self.spare).push(std::mem::take(&mut self.buffers));
    }
}

impl Rank {
    fn table(&self) -> Result<KvTable, DataError> {
        let spare = lock(&self.tables).pop();
        Ok(spare.map_or_else(|| KvTable::new(&self.stream, BATCH_SLICES_MAX), Ok)?)
    }
}

struct DeviceGathering {
    ranks: Arc<Vec<Rank>>,
    index: usize,
    start: Event,
    moving: KvMoving,
    checksums: bool,
}

impl Gathering for DeviceGathering {
    fn is_done(&self) -> bool {
        self.moving.is_done()
    }

    fn wait(self: Box<Self>) -> Result<Vec<u32>, DataError> {
        let Self { ranks, index, start, moving, checksums } = *self;
        let (rank, end) = (&ranks[index], moving.event().clone());
        let table = moving.wait()?;
        rank.counters.passed(Stage::Gather, table.bytes(), end.elapsed_us(&start)?);
        let sums = if checksums { table.checksums().to_vec() } else { Vec::new() };
        lock(&rank.tables).push(table);
        Ok(sums)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
