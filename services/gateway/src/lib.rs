//! The only service that knows text: OpenAI-compatible HTTP and gRPC Chat.
//!
//! Knows: OpenAI's APIs, conversations (by way of `format`), and one router. Must not know: where tokens are computed,
//! workers, KV caches. Stateless unless [`store`] is configured: every request carries its whole conversation.
//!
//! One request, in the order of the files: [`chat::lower`] (or that of [`completions`], [`responses`]) reads the body
//! into a [`plan::ChatPlan`]; `service` renders it and starts one generation an answer through `router_link`;
//! [`turn::Turn`] reads the tokens of one answer into pieces, [`stop`] strings found; `answers` merges the answers; the
//! writers of each API turn pieces into chunks, events or one whole body; `http` and `grpc` are the rim.
//!
//! Start with [`run`].

pub mod answers;
pub mod auth;
pub mod calendar;
pub mod caller;
pub mod chat;
pub mod choices;
pub mod completions;
pub mod config;
pub mod constraint;
mod delivery;
pub mod error;
mod grpc;
mod http;
pub mod ids;
pub mod logprobs;
mod metrics;
pub mod params;
pub mod plan;
pub mod quota;
pub mod responses;
mod router_link;
mod run;
pub mod served_model;
mod service;
pub mod stop;
pub mod store;
pub mod turn;
pub mod usage;

pub use config::Config;
pub use run::{GatewayError, run};
