//! Continuous batching as pure state machines: admission, reservation, step plans.
//!
//! Knows: sequences, their pages, and what the next step shall do. Must not know: clocks (time comes in as an argument), threads, async,
//! engines, sockets. Effects go out as values: each call appends the actions that the caller must carry out.
//!
//! Start with [`plan::StepPlan`], the contract with the engine; then [`ticket`] (the life of a reservation) and
//! [`decode::DecodeScheduler`]; [`prefill::PrefillScheduler`] is the other side of a transfer.

mod config;
pub mod decode;
mod in_flight;
pub mod mask;
mod numbers;
pub mod plan;
pub mod prefill;
mod recent;
pub mod sequence;
pub mod ticket;

pub use config::InvalidConfig;
pub use decode::{DecodeAction, DecodeConfig, DecodeCounts, DecodeScheduler, Refusal, Reservation, ReserveRequest};
pub use in_flight::StepMismatch;
pub use mask::{MaskFailure, MaskPromise, PendingMask};
pub use prefill::{
    PrefillAction, PrefillConfig, PrefillCounts, PrefillOutcome, PrefillRefusal, PrefillRequest, PrefillScheduler,
    PrefillStep, PromptGone, TransferEnd,
};
pub use sequence::SequenceSpec;
pub use ticket::{AbortReason, Gone, Outcome, Phase, Taken, TicketError};
