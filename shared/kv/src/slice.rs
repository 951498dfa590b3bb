//! The unit of KV transfer: some heads of one layer in one logical page of one sequence.

use std::ops::Range;

use types::PageGroup;

/// Addresses KV by names that mean the same on both sides; physical pages are looked up on each side in its own tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KvSlice {
    /// Page group, which decides the set of layers.
    pub group: PageGroup,
    /// Model layer (0-based over all layers).
    pub layer: u32,
    /// Index of the page in the sequence: it holds positions `page * page_tokens ..`.
    pub page: u32,
    /// First KV head, counted over the whole model.
    pub head_start: u32,
    /// Number of heads; all lie on one rank of the sender and on one rank of the receiver.
    pub head_count: u32,
}

impl KvSlice {
    /// The heads, counted over the whole model.
    #[must_use]
    pub const fn heads(&self) -> Range<u32> {
        self.head_start..self.head_start + self.head_count
    }
}
