//! The protobuf surface: generated code, conversions to [`types`], errors to gRPC status and back.
//!
//! Knows: how every word of `types` is written in protobuf, and which gRPC status says what. Must not know: what a service does
//! with a request. Messages stop here: a service converts at its edge, once, and works with `types` from there on.
//!
//! Start with [`pb`] (the messages and services), [`mod@convert`] (both directions) and [`status`].

pub mod client;
pub mod convert;
pub mod deadline;
pub mod server;
pub mod status;
pub mod trace;

/// Generated from `proto/damask/v1`: see the comments there.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]
pub mod pb {
    tonic::include_proto!("damask.v1");
}

pub use convert::InvalidMessage;

/// Largest message accepted, in bytes: a prompt of 131,072 tokens is under 400 kB, and there is room for logit biases and
/// what comes later.
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;
