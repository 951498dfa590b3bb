//! Checkpoints on disk: both layouts, one file or several, and everything that can be wrong with them.

mod corruption;
mod identity;
mod layouts;
mod refusals;
mod support;
