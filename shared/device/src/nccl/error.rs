//! What can go wrong between us and NCCL.

use std::time::Duration;

use crate::error::DeviceError;

/// Result of anything that talks to NCCL.
pub type Result<T> = std::result::Result<T, NcclError>;

/// What a caller may have to act on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NcclError {
    /// NCCL is not installed, or not where the loader looks: install it, or set `LD_LIBRARY_PATH`.
    #[error("no NCCL library: {reason}")]
    LibraryMissing {
        /// Every name that was tried, with the loader's answer.
        reason: String,
    },
    /// The library lacks something that is needed here, by its version or by a missing symbol.
    #[error("NCCL at {path} cannot be used: {reason}")]
    LibraryUnusable {
        /// The file.
        path: String,
        /// What it lacks.
        reason: String,
    },
    /// NVLink multicast is not switched off in this process's environment.
    #[error("NCCL may use NVLink multicast: start the process with NCCL_NVLS_ENABLE=0 (it is {value})")]
    Multicast {
        /// The variable's value, or `not set`.
        value: String,
    },
    /// NCCL refused a call, or reports the failure of an earlier one through it. The communicator is to be aborted.
    #[error("{call} failed: {code}: {detail}")]
    Call {
        /// The NCCL function.
        call: &'static str,
        /// NCCL's words for the code.
        code: String,
        /// NCCL's last message in this process, which may be of another call.
        detail: String,
    },
    /// A call did not finish in time: a peer does not take part. The communicator is to be aborted.
    #[error("{call} has not finished after {} ms", waited.as_millis())]
    Timeout {
        /// The NCCL function.
        call: &'static str,
        /// How long it was waited for.
        waited: Duration,
    },
    /// A communicator could not be ended within the bound: the process should exit.
    #[error("{call} does not return after {} ms; this process must exit", waited.as_millis())]
    Stuck {
        /// What does not return.
        call: &'static str,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The communicator is aborted or closed, or is being so right now.
    #[error("the communicator has ended")]
    Ended,
    /// No such peer, or oneself.
    #[error("rank {rank} of {ranks} has no peer {peer}")]
    NoSuchPeer {
        /// The rank that asked.
        rank: u32,
        /// Ranks of the communicator.
        ranks: u32,
        /// The rank asked for.
        peer: u32,
    },
    /// The bytes are not those of a unique id.
    #[error("a unique id has 128 bytes, not {found}")]
    UniqueIdLength {
        /// Bytes given.
        found: usize,
    },
    /// The driver, or lengths that do not agree.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
