//! The forward pass and sampling, tokens in and tokens out.
//!
//! Knows: models, ranks, collectives, kernels. Must not know: requests, tickets, sockets, clocks, any chat format.
//! Start with [`Engine`]: one rank's side of a step. [`group::EngineGroup`] runs all ranks of an instance,
//! [`cpu::build_group`] starts one on the CPU, `cuda::build_group` (feature `cuda`) one on a GPU.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod driver;
pub mod fault;
pub mod group;
mod kv_slice;
mod link;
pub mod roofline;
pub mod sampling;
mod simd;
#[cfg(feature = "cuda")]
pub mod sweep;
mod vector;

use std::ops::Range;
use std::sync::Arc;

#[cfg(feature = "cuda")]
pub use kernels::KvPort;
use kv::KvSlice;
use scheduler::plan::{StepOutput, StepPlan};
use types::PageId;

/// A cache on a device; in a build without devices there is none.
#[cfg(not(feature = "cuda"))]
#[derive(Debug, Clone)]
pub enum KvPort {}

/// One rank. All methods are called from the rank's own thread, in the same order on every rank of the group.
///
/// A step is launched and collected apart: a device engine runs ahead of the host, which reads step `n` while `n + 1` computes
/// (`RowTokens::LastSampled`). At most two steps are in flight. The CPU engine computes in `launch`.
///
/// A step with masks (`StepRow::mask`) runs ahead as well and waits for them only to sample: at the latest when it is collected, or when the
/// next one is launched. By then the caller has collected all earlier steps, whose tokens the masks depend on.
pub trait Engine: Send {
    /// Starts a step. Returns once the work is enqueued (CPU: done).
    ///
    /// # Errors
    /// [`EngineError`]; after one that is fatal the rank may only be dropped.
    fn launch(&mut self, plan: &Arc<StepPlan>) -> Result<(), EngineError>;

    /// Waits for the oldest step in flight; its keys and values are in the cache then. The first rank of an attention group (all ranks are
    /// one unless the layout has data parallelism) yields tokens and logits of that group's rows; all other rows are there without them.
    ///
    /// # Errors
    /// [`EngineError`].
    fn collect(&mut self) -> Result<StepOutput, EngineError>;

    /// Copies one slice of this rank's KV cache out. `page` is the physical page; `out` has `slice.head_count * KvLayout::head_bytes()` bytes.
    ///
    /// # Errors
    /// [`EngineError::KvSlice`] if the slice is not on this rank.
    fn export_kv(&self, slice: &KvSlice, page: PageId, out: &mut [u8]) -> Result<(), EngineError>;

    /// Writes one slice into this rank's KV cache; the reverse of [`Engine::export_kv`].
    ///
    /// # Errors
    /// [`EngineError::KvSlice`] if the slice is not on this rank or `bytes` has another length.
    fn import_kv(&mut self, slice: &KvSlice, page: PageId, bytes: &[u8]) -> Result<(), EngineError>;

    /// This rank's cache, for whoever moves pages beside the steps; `None` if it is in host memory.
    fn kv_port(&self) -> Option<KvPort> {
        None
    }
}

/// Told from inside a step, on each rank's own thread, when rows marked `publish_kv` have their keys and values of some layers in the cache.
/// May block: that is the back-pressure of a slow link on prefill.
pub trait KvListener: Send + Sync {
    /// `layers` are model layers, in ascending batches, each layer once a step; `kv` reads this rank's cache.
    fn layers_ready(&self, rank: u32, plan: &StepPlan, layers: Range<u32>, kv: &dyn KvReader);
}

/// Read access to one rank's cache, during [`KvListener::layers_ready`] and [`group::EngineGroup::read_kv`].
pub trait KvReader {
    /// As [`Engine::export_kv`].
    ///
    /// # Errors
    /// [`EngineError::KvSlice`].
    fn export_kv(&self, slice: &KvSlice, page: PageId, out: &mut [u8]) -> Result<(), EngineError>;
}

/// What can go wrong in an engine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The model cannot be run in this layout or mode.
    #[error("engine setup: {0}")]
    Setup(String),
    /// The model cannot be spread over ranks as asked.
    #[error(transparent)]
    Layout(#[from] model::ShardError),
    /// The checkpoint is damaged.
    #[error(transparent)]
    Load(#[from] model::CheckpointError),
    /// A plan that contradicts the engine's state or limits: a bug of its maker.
    #[error("step {step} cannot be run: {reason}")]
    Plan {
        /// The plan's number.
        step: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// A slice of KV that is not on this rank, or bytes of the wrong length.
    #[error("kv slice {slice:?} does not fit rank {rank}: {reason}")]
    KvSlice {
        /// The slice.
        slice: KvSlice,
        /// The rank.
        rank: u32,
        /// What does not fit.
        reason: String,
    },
    /// There is no usable GPU, or it refused or failed an operation.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Gpu(#[from] kernels::KernelError),
    /// A rank's thread is gone.
    #[error("rank {rank} stopped: {reason}")]
    RankLost {
        /// The rank.
        rank: u32,
        /// Why, as far as known.
        reason: String,
    },
}

impl types::Classify for EngineError {
    fn class(&self) -> types::ErrorClass {
        types::ErrorClass::Fatal
    }
}
