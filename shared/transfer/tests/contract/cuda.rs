//! The data paths between GPUs, with both ends in this process. Without a GPU each test says that it was skipped.

#[path = "../../../device/tests/skip/mod.rs"]
mod skip;

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ::device::{Device, DeviceError, Stream};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use kernels::{KvPool, KvPort};
use kv::KvSlice;
use skip::skip;
use transfer::TransportChoice;
use transfer::data::DataCounters;
use transfer::device::{DeviceReceive, DeviceSend};
use transfer::fault::FaultPlan;
use types::{KvLayout, PageGroup, PageId};

use crate::data::{Caches, PAGES, rank_of};
use crate::support::{Options, World, piped_with_data};

/// `None`, with a printed reason, where there are fewer GPUs than `count`, or no kernels.
fn devices(count: u32) -> Option<Vec<Device>> {
    if !kernels::AVAILABLE {
        skip(count, "built without nvcc");
        return None;
    }
    let open = (0..count).map(Device::open).collect::<Result<Vec<_>, _>>();
    match open {
        Ok(devices) => Some(devices),
        Err(DeviceError::Unavailable { reason }) => {
            skip(count, reason);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

struct DeviceCache {
    layout: KvLayout,
    streams: Vec<Stream>,
    ports: Vec<KvPort>,
    /// `[rank][group]`, which own the memory.
    pools: Vec<[Mutex<::device::DeviceBuffer<u8>>; 2]>,
}

impl DeviceCache {
    fn new(layout: &KvLayout, groups: u32, device: &Device) -> Self {
        let kv_heads = (layout.kv_heads / layout.tp) as usize;
        let (mut streams, mut ports, mut pools) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..groups * layout.tp {
            let stream = device.stream().unwrap();
            let pool = |group: PageGroup| {
                let layers = layout.layers(group).len();
                let bytes = PAGES as usize * layers * kv_heads * layout.head_bytes();
                let mut buffer = stream.allocate::<u8>(bytes).unwrap();
                stream.fill_bytes(buffer.view_mut(), 0xee).unwrap();
                (KvPool { memory: buffer.shared(), layers, kv_heads, head_bytes: layout.head_bytes() }, buffer)
            };
            let ((full, full_buffer), (window, window_buffer)) = (pool(PageGroup::Full), pool(PageGroup::Window));
            stream.synchronize().unwrap();
            ports.push(KvPort { device: device.clone(), full, window });
            pools.push([Mutex::new(full_buffer), Mutex::new(window_buffer)]);
            streams.push(stream);
        }
        Self { layout: layout.clone(), streams, ports, pools }
    }

    /// The rank, of the last attention group, the pool's number and the bytes of a slice.
    fn place(&self, slice: &KvSlice, page: PageId) -> (usize, usize, std::ops::Range<usize>) {
        let (rank, heads) = (rank_of(&self.layout, slice), (self.layout.kv_heads / self.layout.tp) as usize);
        let layers = self.layout.layers(slice.group);
        let layer = layers.iter().position(|layer| *layer == slice.layer).unwrap();
        let head = slice.head_start as usize % heads;
        let first = ((page.0 as usize * layers.len() + layer) * heads + head) * self.layout.head_bytes();
        let group = if slice.group == PageGroup::Full { 0 } else { 1 };
        let rank = self.ports.len() - self.layout.tp as usize + rank as usize;
        (rank, group, first..first + self.layout.head_bytes())
    }
}

struct DeviceCaches {
    sender: Arc<DeviceCache>,
    receiver: Arc<DeviceCache>,
    damaged: Mutex<HashSet<KvSlice>>,
}

impl Caches for DeviceCaches {
    fn sender_layout(&self) -> &KvLayout {
        &self.sender.layout
    }

    fn write_sender(&self, slice: &KvSlice, page: PageId, bytes: &[u8]) {
        let (rank, group, place) = self.sender.place(slice, page);
        let mut pool = self.sender.pools[rank][group].lock().unwrap();
        let stream = &self.sender.streams[rank];
        stream.copy_from_host(pool.slice_mut(place), bytes).unwrap();
        stream.synchronize().unwrap();
    }

    fn read_receiver(&self, slice: &KvSlice, page: PageId) -> Vec<u8> {
        let (rank, group, place) = self.receiver.place(slice, page);
        let pool = self.receiver.pools[rank][group].lock().unwrap();
        self.receiver.streams[rank].download(pool.slice(place)).unwrap()
    }

    fn receiver_bytes(&self) -> Vec<u8> {
        let pools = self.receiver.pools.iter().zip(&self.receiver.streams).flat_map(|(pools, stream)| {
            pools.iter().flat_map(|pool| stream.download(pool.lock().unwrap().view()).unwrap()).collect::<Vec<u8>>()
        });
        pools.collect()
    }

    fn damaged(&self) -> &Mutex<HashSet<KvSlice>> {
        &self.damaged
    }
}

fn world(mut options: Options, choice: TransportChoice, gpus: u32, plan: Option<FaultPlan>) -> Option<World> {
    let devices = devices(gpus)?;
    options.config.transport = choice;
    let options = &options;
    let sender = Arc::new(DeviceCache::new(&options.sender_layout, 1, &devices[0]));
    let receiver = Arc::new(DeviceCache::new(&options.receiver_layout, options.groups, devices.last()?));
    let (config, counters) = (&options.config, Arc::new(DataCounters::default()));
    let send = DeviceSend::new(sender.ports.clone(), &options.sender_layout, config, &counters).unwrap();
    let receive = DeviceReceive::new(receiver.ports.clone(), &options.receiver_layout, config, &counters).unwrap();
    let caches = Arc::new(DeviceCaches { sender, receiver, damaged: Mutex::default() });
    Some(piped_with_data(options, Arc::new(send), Arc::new(receive), caches, plan))
}

pub(crate) fn over_ipc(options: Options) -> BoxFuture<'static, Option<World>> {
    async move { world(options, TransportChoice::Ipc, 1, None) }.boxed()
}

pub(crate) fn over_ipc_between_gpus(options: Options) -> BoxFuture<'static, Option<World>> {
    async move { world(options, TransportChoice::Ipc, 2, None) }.boxed()
}

pub(crate) fn over_ipc_to_a_group(options: Options) -> BoxFuture<'static, Option<World>> {
    over_ipc_between_gpus(Options { groups: 2, ..options })
}

/// Both ends are in this process: kernels of one test's communicators, which wait for each other, and another test's allocations, which wait for
/// all kernels, would lock each other out. Between processes each side only waits for the other one.
///
/// A world gives its turn back before the tasks of its runtime are dropped, and with them its communicators: these are waited for here.
async fn alone() -> tokio::sync::OwnedMutexGuard<()> {
    static TURN: std::sync::LazyLock<Arc<tokio::sync::Mutex<()>>> = std::sync::LazyLock::new(Arc::default);
    let turn = Arc::clone(&TURN).lock_owned().await;
    let ended = async {
        while ::device::nccl::num_communicators() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), ended).await.expect("the world before ends its communicators");
    turn
}

async fn alone_over_nccl(options: Options, plan: Option<FaultPlan>) -> Option<World> {
    if let Err(error) = ::device::nccl::Nccl::load() {
        skip(2, error);
        return None;
    }
    let turn = alone().await;
    let world = world(options, TransportChoice::Nccl, 2, plan)?;
    Some(World { _turn: Some(turn), ..world })
}

/// Each pair of ranks has a communicator of its own, so it does not matter that all ranks of a side share a GPU here.
pub(crate) fn over_nccl(options: Options) -> BoxFuture<'static, Option<World>> {
    alone_over_nccl(options, None).boxed()
}

pub(crate) fn faulty(options: Options, plan: FaultPlan) -> BoxFuture<'static, Option<World>> {
    async move { world(options, TransportChoice::Ipc, 1, Some(plan)) }.boxed()
}

pub(crate) fn faulty_over_nccl(options: Options, plan: FaultPlan) -> BoxFuture<'static, Option<World>> {
    alone_over_nccl(options, Some(plan)).boxed()
}
