//! KV transfer between processes: the transport contract, and what implements it.
//!
//! Knows: how the parts of a ticket travel from a prefill worker to a decode worker, and how both sides come to agree that a transfer
//! is over. Must not know: schedulers, page tables, engines, gRPC, or where sockets come from (they are handed in as streams).
//!
//! Start with [`contract`]: the life of a ticket as both sides see it. [`framed`] is the implementation over byte streams,
//! [`data`] what may lie beside it, [`fault`] a decorator that injects faults, [`lanes`] keeps one connection for each peer.

pub mod config;
pub mod contract;
pub mod data;
#[cfg(feature = "cuda")]
pub mod device;
pub mod error;
pub mod fault;
pub mod frame;
pub mod framed;
pub mod lanes;

pub use config::{HoldAt, TransferConfig, TransportChoice};
pub use contract::{
    Arrival, ArrivalEvent, ArrivalSink, ArrivalSlot, BatchTimes, Carries, CommitReply, EndCause, FirstToken, Part,
    Receipt, ReceiveTransport, Revoked, SendLane, SendTicket, SendTransport, SinkClosed,
};
pub use error::{AbortReason, LossCause, TransferError};
pub use lanes::Lanes;
