//! One rank's KV cache as seen by whoever moves pages beside the steps.

use std::ops::Range;

use device::{Device, SharedMemory};

use crate::error::{Checker, Result};

/// The pools of one rank, and their device. Clones are the same memory.
#[derive(Clone, Debug)]
pub struct KvPort {
    /// Where the cache is.
    pub device: Device,
    /// Layers of full attention.
    pub full: KvPool,
    /// Layers of sliding-window attention.
    pub window: KvPool,
}

/// The pages of one group on one rank: `[page][layer][kv head][bytes of a head]`.
#[derive(Clone, Debug)]
pub struct KvPool {
    /// All pages.
    pub memory: SharedMemory,
    /// Layers of the group.
    pub layers: usize,
    /// KV heads of the rank.
    pub kv_heads: usize,
    /// Bytes of one head in one layer of a page, keys and values: a multiple of 16.
    pub head_bytes: usize,
}

impl KvPool {
    /// Pages.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.memory.len().checked_div(self.layers * self.kv_heads * self.head_bytes).unwrap_or(0)
    }

    /// Where some heads of a layer lie in a page: their address, and their bytes.
    ///
    /// # Errors
    /// `Size` for a page, a layer or heads that are not there.
    pub fn piece(&self, page: usize, layer: usize, heads: Range<usize>) -> Result<(u64, usize)> {
        let check = Checker("kv piece");
        check.room("pages", page + 1, self.pages())?;
        check.room("layers", layer + 1, self.layers)?;
        check.room("kv heads", heads.end, self.kv_heads)?;
        let first = ((page * self.layers + layer) * self.kv_heads + heads.start) * self.head_bytes;
        let bytes = heads.len() * self.head_bytes;
        Ok((self.memory.address(first..first + bytes), bytes))
    }
}
