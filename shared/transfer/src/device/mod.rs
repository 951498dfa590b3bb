//! Data paths between GPUs: CUDA IPC, on one card or two, and NCCL between two. (Feature `cuda`.)
//!
//! By IPC the receiver's copy engine fetches a batch from the sender's staging, which takes no multiprocessor on either side. By NCCL the sender
//! sends when it has announced, and the receiver receives when it has heard so, into staging of its own. Either way it scatters from there.
//!
//! Pairs are opened one after another. For one by NCCL the receiver makes the name of its communicator when it is about to join it, and not before: behind
//! each name there is a thread and a socket, which stay until both ends have joined.
//!
//! Each side is built from the [`KvPort`]s of its ranks. Work runs on streams of its own, beside the steps: at the sender on the thread of the rank
//! whose layers are complete, at the receiver on one thread for each GPU.
#![allow(unsafe_code)] // memory that the other side's process or engine shares is addressed here: each use says why nobody else touches it

mod landing_thread;
mod link;
mod open_pairs;
mod receive;
mod send;
mod setup;
mod slots;

use device::nccl::Nccl;
use kernels::{KvPool, KvPort};
use kv::KvSlice;
use types::{KvLayout, PageGroup, PageId};

use crate::config::{TransferConfig, TransportChoice};
use crate::data::{DataError, DataOffer, LaneSides};

pub use receive::DeviceReceive;
pub use send::DeviceSend;

impl From<kernels::KernelError> for DataError {
    fn from(error: kernels::KernelError) -> Self {
        Self(error.to_string())
    }
}

impl From<device::DeviceError> for DataError {
    fn from(error: device::DeviceError) -> Self {
        Self(error.to_string())
    }
}

/// What the ranks behind `ports` can do.
fn offer(config: &TransferConfig, ports: &[KvPort]) -> Result<DataOffer, DataError> {
    let choice = config.transport;
    let gpus = ports.iter().map(|port| port.device.uuid()).collect::<Result<_, _>>()?;
    let nccl = match choice {
        TransportChoice::Auto | TransportChoice::Nccl => Nccl::load().map_or_else(
            |error| {
                tracing::info!(%error, "no nccl for kv");
                0
            },
            Nccl::version,
        ),
        TransportChoice::Host | TransportChoice::Ipc => 0,
    };
    Ok(DataOffer { choice, host: host_id(), gpus, nccl, batch_bytes_max: config.batch_bytes_max })
}

/// Pairs of ranks that hold the same heads, by the sender's rank, then the receiver's, which are those of all its attention groups.
fn pairs(sides: &LaneSides<'_>) -> Vec<(u32, u32)> {
    let receivers = 0..sides.paths.receivers();
    let all = (0..sides.sender.tp).flat_map(|sender| receivers.clone().map(move |receiver| (sender, receiver)));
    let share = |(sender, receiver): &(u32, u32)| {
        let theirs = sides.sender.rank_heads(*sender);
        let ours = sides.receiver.rank_heads(*receiver % sides.receiver.tp);
        ours.start.max(theirs.start) < ours.end.min(theirs.end)
    };
    all.filter(share).collect()
}

/// Tells this host, in this boot, from others.
fn host_id() -> u128 {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = boot.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).unwrap_or(0)
}

/// The address and bytes of a slice in the cache of `rank`.
fn piece(
    port: &KvPort,
    layout: &KvLayout,
    rank: u32,
    slice: &KvSlice,
    page: PageId,
) -> Result<(u64, usize), DataError> {
    let pool: &KvPool = match slice.group {
        PageGroup::Full => &port.full,
        PageGroup::Window => &port.window,
    };
    let misplaced = |what: &str| DataError(format!("{slice:?} is not on rank {rank}: {what}"));
    let layer = layout.layers(slice.group).binary_search(&slice.layer).map_err(|_| misplaced("its layer"))?;
    let (own, heads) = (layout.rank_heads(rank % layout.tp), slice.heads());
    if heads.start < own.start || heads.end > own.end {
        return Err(misplaced("its heads"));
    }
    let heads = (heads.start - own.start) as usize..(heads.end - own.start) as usize;
    Ok(pool.piece(page.0 as usize, layer, heads)?)
}
