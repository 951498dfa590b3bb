//! KV pages: pools, typed page states, page tables.
//!
//! Knows: which page belongs to whom and in which state. Must not know: bytes, devices, clocks, I/O.
//! Start with [`slice::KvSlice`], the unit that travels between workers.

pub mod slice;

pub use slice::KvSlice;
