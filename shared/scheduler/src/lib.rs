//! Continuous batching as pure state machines: admission, reservation, step plans.
//!
//! Knows: sequences, their pages, and what the next step shall do. Must not know: clocks (time comes in as an argument), threads, async,
//! engines, sockets. Start with [`plan::StepPlan`], the contract with the engine.

pub mod plan;
