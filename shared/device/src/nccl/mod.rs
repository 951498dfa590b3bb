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
//!   the threads of those that have begun, and for calls, which then give up: NCCL must not be at work while its library is being
//!   torn down.
//! - A captured graph with collectives in it must be dropped before its communicator is closed.
//!
//! NCCL must not be asked by several threads at once to enqueue for one GPU. A lock per GPU, held by every call that enqueues until
//! NCCL has launched, sees to that within a process. A call that has not come so far after two milliseconds waits for its peer to
//! connect, and lets others go first: as long as NCCL launches nothing for it there is nothing to keep apart, a communicator's state
//! may be polled beside calls for others, and a peer that never comes must not cost more than its own pair. The order between threads
//! is the caller's in any case, so one thread for each GPU is the way to use this; threads in no order are for communicators of
//! pairs, whose kernels find room side by side. (`NCCL_LAUNCH_ORDER_IMPLICIT`, off by default, would ask for an order.)
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
pub use ends::{STUCK_EXIT_CODE, exit_stuck, num_communicators};
pub use error::{NcclError, Result};
pub use handle::{Abort, Aborting};
pub use library::{Nccl, UniqueId, forbid_multicast};
pub use operation::{Group, Summable};
