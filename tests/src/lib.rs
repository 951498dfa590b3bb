//! End-to-end runners: the harness that starts the real stack, and what several runners share.
//!
//! The runners themselves are in `tests/tests`: `fixtures` (numbers), `chat` (answers over HTTP through four processes), `edges` and `load`
//! (lengths, many requests, cancellation), `constrained` (answers under grammars), `sim` (the simulated fleet).

pub mod cases;
pub mod monolith;
pub mod router;
pub mod sim_net;
pub mod stack;
