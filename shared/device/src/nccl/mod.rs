//! NCCL: communicators that cannot hang the process.
//!
//! NCCL by itself says nothing when a peer on the same node dies: its kernels wait for ever, and so does whoever waits for them.
//! So everything here is bounded. Communicators are non-blocking and polled up to a deadline; ending one happens on a thread of
//! its own, for which the caller waits a stated time and no longer. Learning of a death is the caller's part (heartbeats).
//!
//! Rules that the caller keeps:
//! - An operation is *enqueued*: it runs on the stream, and only when the peer has enqueued its counterpart. The first one
//!   between two ranks also connects them, for which both must call: warm every pair up once, from all ranks.
//! - All ranks enqueue the operations of one communicator, and of communicators that share GPUs, in one order.
//! - When a peer is lost, **every** survivor aborts. If [`Communicator::abort`] answers [`Abort::Stuck`], the process must exit,
//!   by [`exit_stuck`]: its streams may never finish, and dropping them would wait for that.
//! - A communicator is closed, aborted or dropped, each of which takes half a second, before the process exits. The exit waits for
//!   those that have begun: NCCL must not be at work while its library is being torn down.
//! - A captured graph with collectives in it must be dropped before its communicator is closed.
//!
//! NCCL must not be called from several threads at once for one GPU. A lock per GPU, taken by every call that enqueues, sees to
//! that within a process; the order between threads is still the caller's, so one thread for each GPU is the way to use this.
//!
//! Enqueuing takes the calling thread some 56 us, since NCCL starts a thread for each non-blocking call: few large transfers.
//! docs/results/kv-transport-h200.md has the measurements.
//!
//! NVLink multicast (NVLS) stays off: `NCCL_NVLS_ENABLE=0` is the only switch that NCCL has, it belongs to the process, and no
//! communicator is made without it. See [`forbid_multicast`].

mod abi;
mod communicator;
mod ends;
mod error;
mod handle;
mod library;
mod operation;

pub use communicator::{Communicator, CommunicatorConfig};
pub use ends::{STUCK_EXIT_CODE, exit_stuck};
pub use error::{NcclError, Result};
pub use handle::{Abort, Aborting};
pub use library::{Nccl, UniqueId, forbid_multicast};
pub use operation::{Group, Summable};
