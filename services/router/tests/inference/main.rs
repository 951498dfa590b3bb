//! A router in this process, with scripted workers in runtimes of their own, over real loopback gRPC.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod faults;
mod refusals;
mod requests;
mod stand;
mod workers;
