//! A rank's part of a communicator.

use std::ffi::CString;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytemuck::Pod;
use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t};

use super::abi::{IN_PROGRESS, SUCCESS};
use super::ends::CallUnderWay;
use super::error::{NcclError, Result};
use super::handle::{Abort, Aborting, Handle};
use super::library::{Nccl, UniqueId, multicast_is_off};
use super::operation::{Group, Operation, Place, Summable};
use crate::driver::Device;
use crate::memory::{View, ViewMut};
use crate::stream::Stream;

/// How long the abort of a communicator that could not be made is waited for.
const ABORT_BOUND: Duration = Duration::from_secs(5);

/// `NCCL_CONFIG_UNDEF_INT`: NCCL chooses.
const UNDEFINED: i32 = i32::MIN;

/// What a communicator is made with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommunicatorConfig {
    /// Most thread blocks of a kernel, each of which takes a share of a multiprocessor while it runs or waits; without it, NCCL
    /// chooses by the links.
    pub max_ctas: Option<u32>,
    /// What NCCL's log and profilers call it.
    pub name: String,
    /// How long all ranks may take to meet.
    pub init_timeout: Duration,
    /// How long one call may take to be enqueued. The first between two ranks includes connecting, for which both must call.
    pub call_timeout: Duration,
}

impl Default for CommunicatorConfig {
    fn default() -> Self {
        Self {
            max_ctas: None,
            name: "damask".into(),
            init_timeout: Duration::from_secs(60),
            call_timeout: Duration::from_secs(30),
        }
    }
}

/// One rank's end of a communicator on one GPU. Ended by [`abort`](Self::abort) or [`close`](Self::close); dropping an open one
/// aborts it in the background and logs that.
///
/// It may be shared between threads: one that watches the peers can abort it while another waits in a call, which then returns
/// `Ended`.
pub struct Communicator {
    handle: Arc<Handle>,
    device: Device,
    place: Place,
    config: CommunicatorConfig,
}

impl Communicator {
    /// Joins the communicator named `id` as `rank` of `ranks`, each on a GPU of its own. Blocks until all have joined.
    ///
    /// # Errors
    /// `Timeout` if not all came within `init_timeout`, `Call` with NCCL's reason, those of [`Nccl::load`], `Multicast`. What was
    /// begun has been aborted then; `Stuck` if that did not return.
    ///
    /// # Panics
    /// If `rank` is not below `ranks`.
    pub fn init(device: &Device, id: &UniqueId, ranks: u32, rank: u32, config: &CommunicatorConfig) -> Result<Self> {
        let _under_way = CallUnderWay::begin(); // until its end has begun, should it fail
        let communicator = Self::start(device, id, ranks, rank, config)?;
        match communicator.ready() {
            Ok(()) => Ok(communicator),
            Err(error) => Err(communicator.failed(error)),
        }
    }

    /// As [`Self::init`], but does not wait for the other ranks: [`Self::ready`] does, and an abort ends its wait.
    ///
    /// # Errors
    /// As for [`Self::init`], but for `Timeout`.
    ///
    /// # Panics
    /// If the rank is not below `ranks`.
    pub fn start(device: &Device, id: &UniqueId, ranks: u32, rank: u32, config: &CommunicatorConfig) -> Result<Self> {
        assert!(rank < ranks, "rank {rank} of {ranks}");
        let _under_way = CallUnderWay::begin(); // until its end has begun, should it fail
        let nccl = Nccl::load()?;
        multicast_is_off()?;
        let name = CString::new(config.name.replace('\0', " ")).unwrap_or_default();
        let mut settings = settings(config, &name);
        let mut raw: ncclComm_t = std::ptr::null_mut();
        let (num_ranks, rank_idx) = (ranks as i32, rank as i32);
        let turn = issuing(device)?;
        // SAFETY: `raw` is a plain out-pointer, `settings` begins with its own size and version, and the name lives on.
        let code =
            unsafe { (nccl.api.comm_init_rank_config)(&raw mut raw, num_ranks, id.raw(), rank_idx, &raw mut settings) };
        drop(turn);
        if raw.is_null() {
            return Err(nccl.failure("ncclCommInitRankConfig", code));
        }
        let communicator = Self {
            handle: Arc::new(Handle::new(&nccl.api, raw, name)),
            device: device.clone(),
            place: Place { rank, ranks },
            config: config.clone(),
        };
        match code {
            SUCCESS | IN_PROGRESS => Ok(communicator),
            code => Err(communicator.failed(nccl.failure("ncclCommInitRankConfig", code))),
        }
    }

    /// Waits until all ranks have joined, within `init_timeout`.
    ///
    /// # Errors
    /// `Timeout` or `Call`, after which the communicator is to be aborted; `Ended`.
    pub fn ready(&self) -> Result<()> {
        // Ranks that meet launch nothing: others go on meanwhile.
        self.handle.call("ncclCommInitRankConfig", self.config.init_timeout, || Ok(()), |_, _| IN_PROGRESS)
    }

    /// Aborts what could not be made.
    fn failed(self, error: NcclError) -> NcclError {
        match self.abort(ABORT_BOUND) {
            Abort::Returned { .. } => error,
            Abort::Stuck => NcclError::Stuck { call: "ncclCommAbort", waited: ABORT_BOUND },
        }
    }

    /// This rank.
    #[must_use]
    pub const fn rank(&self) -> u32 {
        self.place.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub const fn ranks(&self) -> u32 {
        self.place.ranks
    }

    /// Sends `view` to `peer`, which receives as many bytes.
    ///
    /// # Errors
    /// `NoSuchPeer`; `Ended`; `Call` or `Timeout`, after which the communicator is to be aborted.
    pub fn send<T: Pod>(&self, stream: &Stream, view: View<'_, T>, peer: u32) -> Result<()> {
        self.enqueue(&Operation::send(self.place, stream, view, peer)?)
    }

    /// Receives into `view` what `peer` sends.
    ///
    /// # Errors
    /// As for [`Self::send`].
    pub fn recv<T: Pod>(&self, stream: &Stream, view: ViewMut<'_, T>, peer: u32) -> Result<()> {
        self.enqueue(&Operation::recv(self.place, stream, view, peer)?)
    }

    /// Replaces `view` by the sum over all ranks. Ranks add in an order of NCCL's, the same on each.
    ///
    /// # Errors
    /// As for [`Self::send`].
    pub fn all_reduce<T: Summable>(&self, stream: &Stream, view: ViewMut<'_, T>) -> Result<()> {
        self.enqueue(&Operation::all_reduce(stream, view))
    }

    /// Writes the `mine` of every rank to `all`, `[ranks, mine]`.
    ///
    /// # Errors
    /// `Device` with `Length` if `all` is not `ranks` times `mine`; else as for [`Self::send`].
    pub fn all_gather<T: Pod>(&self, stream: &Stream, mine: View<'_, T>, all: ViewMut<'_, T>) -> Result<()> {
        self.enqueue(&Operation::all_gather(self.place, stream, mine, all)?)
    }

    /// Sums `all`, `[ranks, mine]`, over the ranks and writes this rank's part of the sum to `mine`.
    ///
    /// # Errors
    /// As for [`Self::all_gather`].
    pub fn reduce_scatter<T: Summable>(&self, stream: &Stream, all: View<'_, T>, mine: ViewMut<'_, T>) -> Result<()> {
        self.enqueue(&Operation::reduce_scatter(self.place, stream, all, mine)?)
    }

    /// Replaces `view` by that of `root`.
    ///
    /// # Errors
    /// As for [`Self::send`].
    pub fn broadcast<T: Pod>(&self, stream: &Stream, view: ViewMut<'_, T>, root: u32) -> Result<()> {
        self.enqueue(&Operation::broadcast(self.place, stream, view, root)?)
    }

    /// Enqueues the sends and receives that `fill` adds as one, so that they progress together: each may wait for any other.
    /// Those with one peer run in the order in which they were added. Nothing is enqueued if `fill` fails.
    ///
    /// # Errors
    /// Those of `fill`; else as for [`Self::send`].
    pub fn group<'a>(&self, fill: impl FnOnce(&mut Group<'a>) -> Result<()>) -> Result<()> {
        let mut group = Group::new(self.place);
        fill(&mut group)?;
        if group.operations.is_empty() {
            return Ok(());
        }
        group.operations.iter().for_each(|operation| self.assert_own(operation));
        self.handle.call(
            "ncclGroupEnd",
            self.config.call_timeout,
            || issuing(&self.device),
            // SAFETY: `call` found the communicator open and keeps others away; its device is the streams', and current.
            |api, comm| unsafe { group.issue(api, comm) },
        )
    }

    /// What NCCL has noticed by itself since. A peer that died on the same node is not among it.
    ///
    /// # Errors
    /// `Call`, after which the communicator is to be aborted; `Ended`.
    pub fn check(&self) -> Result<()> {
        self.handle.check()
    }

    /// Ends it now, whatever is under way, so that its kernels leave the device; from any thread, also while another one waits
    /// in a call. Waits no longer than `timeout`. Receives that were under way have written anything or nothing.
    pub fn abort(&self, timeout: Duration) -> Abort {
        self.begin_abort().wait(timeout)
    }

    /// As [`Self::abort`], for somebody else to wait for, or nobody.
    pub fn begin_abort(&self) -> Aborting {
        self.handle.begin_abort(self.prepare())
    }

    /// Ends it after what is under way, together with the peers. Past `timeout` it is aborted instead.
    ///
    /// # Errors
    /// `Timeout` or `Call` if it had to be aborted, `Stuck` if that has not returned after another `timeout`.
    pub fn close(self, timeout: Duration) -> Result<()> {
        self.handle.close(timeout, self.prepare())
    }

    fn enqueue(&self, operation: &Operation) -> Result<()> {
        self.assert_own(operation);
        self.handle.call(
            operation.name(),
            self.config.call_timeout,
            || issuing(&self.device),
            // SAFETY: `call` found the communicator open and keeps others away; its device is the stream's, and current.
            |api, comm| unsafe { operation.issue(api, comm) },
        )
    }

    fn assert_own(&self, operation: &Operation) {
        let (own, other) = (self.device.ordinal(), operation.stream().device_shared().ordinal);
        assert!(own == other, "a stream of device {other} for a communicator of device {own}");
    }

    /// What the thread that ends the communicator does first. It then holds the device, so that the context outlives the end.
    fn prepare(&self) -> impl FnOnce() -> Device + Send + use<> {
        let device = self.device.clone();
        move || {
            // A context that cannot be made current is lost, and NCCL will say so or not care.
            let _ = device.shared.bind();
            device
        }
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Place { rank, ranks } = self.place;
        let device = self.device.ordinal();
        f.debug_struct("Communicator").field("rank", &rank).field("ranks", &ranks).field("device", &device).finish()
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.handle.abandon(self.prepare()) {
            let Place { rank, ranks } = self.place;
            tracing::warn!(name = self.config.name, rank, ranks, "an open communicator was dropped: aborting it");
        }
    }
}

fn settings(config: &CommunicatorConfig, name: &CString) -> ncclConfig_t {
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: 0xcafe_beef,
        version: 22_800,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: config.max_ctas.map_or(UNDEFINED, |ctas| ctas.clamp(1, 64) as i32),
        netName: std::ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: name.as_ptr(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
    }
}

/// A turn to call NCCL for a GPU, whose context is made current. By the GPU's ordinal: contexts of one ordinal are the same whoever opened it.
fn issuing(device: &Device) -> Result<MutexGuard<'static, ()>> {
    static LOCKS: Mutex<Vec<&'static Mutex<()>>> = Mutex::new(Vec::new());
    let ordinal = device.ordinal() as usize;
    let mut locks = LOCKS.lock().unwrap_or_else(PoisonError::into_inner);
    while locks.len() <= ordinal {
        // As many as there are GPUs, for the life of the process.
        locks.push(Box::leak(Box::default()));
    }
    let lock = locks[ordinal];
    drop(locks);
    let turn = lock.lock().unwrap_or_else(PoisonError::into_inner);
    device.shared.bind()?;
    Ok(turn)
}
