//! What every service stands on: config, logs, metrics, traces, admin server, tasks, network.
//!
//! Knows: how a process starts, reports on itself, talks over sockets and ends. Must not know: requests, tokens,
//! protobuf messages or models; a service's own settings live beside the code that they configure.
//!
//! Start with [`tasks::Tasks`] (what runs and how it ends) and [`net::Network`] (everything that leaves the process).

pub mod admin;
pub mod config;
pub mod logs;
pub mod metrics;
pub mod net;
pub mod shutdown;
pub mod tasks;
pub mod traces;

pub use config::{ConfigError, Problems, Validate};
pub use metrics::Metrics;
pub use net::{Address, Listener, Network, Socket};
pub use shutdown::Shutdown;
pub use tasks::{TaskFailure, Tasks};
