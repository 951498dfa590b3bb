//! The words that every crate shares: ids, requests, sampled tokens, layouts, error classes, made-up numbers.
//!
//! Knows: what a request *is*. Must not know: how it travels (`wire`), where its KV lives (`kv`), how it is
//! computed (`engine`), or any text format (`format`). No I/O, no clock.
//!
//! Start with [`request::GenerateRequest`].

pub mod error;
pub mod event;
pub mod ids;
pub mod layout;
pub mod random;
pub mod request;
pub mod slots;
pub mod token;
pub mod worker;

pub use error::{Classify, ErrorClass};
pub use event::{DecodeEvent, Finished, GenerateEvent, PrefillEvent, TokenRun, Usage};
pub use ids::{Incarnation, PageId, PeerId, RequestId, SlotId, TicketId, WorkerId};
pub use layout::{KvDtype, KvLayout, KvLayoutMismatch, ModelFingerprint, PageGroup, ParallelLayout, Role};
pub use random::SplitMix64;
pub use request::{CacheSalt, Constraint, GenerateRequest, InvalidRequest, Sampling};
pub use slots::{DpGroup, SlotGroups, UnevenSlots};
pub use token::{FinishReason, SampledToken, TokenId, TokenLogprob, TokenMask};
pub use worker::{KvEndpoint, Load, PagePoolLoad, Ticket, WorkerDescription, WorkerReport, WorkerState};
