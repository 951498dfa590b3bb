//! One group's pages on one rank, as kernels address them.

use device::{DeviceBuffer, Stream, Swizzle, TensorMap, View};

use crate::error::{Checker, Result};

/// Rows of the cache that one copy of the tensor engine takes: pages hold a multiple of it.
pub(crate) const TILE_TOKENS: usize = 32;
/// The head dimension that the attention kernels are built for.
pub(crate) const HEAD_DIM: usize = 64;

/// Element type of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvFormat {
    /// 2 bytes.
    Bf16,
    /// 1 byte, unscaled: `model::E4M3`.
    E4M3,
}

impl KvFormat {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::E4M3 => 1,
        }
    }
}

/// The pages of one page group on one rank: `[page][layer][kv head][K, V][token][head_dim]`, the layout of `types::KvLayout`.
#[derive(Debug)]
pub struct KvCache {
    /// The memory of all pages.
    pub pool: DeviceBuffer<u8>,
    /// Its elements.
    pub format: KvFormat,
    /// Layers of the group.
    pub layers: usize,
    /// KV heads of this rank.
    pub kv_heads: usize,
    /// Positions of a page.
    pub page_tokens: usize,
}

impl KvCache {
    /// Memory for `pages` pages.
    ///
    /// # Errors
    /// `Dimension` unless pages hold a multiple of 32 positions, `Device` without memory.
    pub fn new(
        stream: &Stream,
        format: KvFormat,
        pages: usize,
        layers: usize,
        kv_heads: usize,
        page_tokens: usize,
    ) -> Result<Self> {
        let holds = page_tokens > 0 && page_tokens.is_multiple_of(TILE_TOKENS);
        Checker("kv cache").dimension("page tokens", page_tokens, "a multiple of 32", holds)?;
        let page = layers * kv_heads * 2 * page_tokens * HEAD_DIM * format.bytes();
        Ok(Self { pool: stream.allocate(pages * page)?, format, layers, kv_heads, page_tokens })
    }

    /// Rows of `head_dim` values in a page.
    pub(crate) const fn page_rows(&self) -> usize {
        self.layers * self.layer_rows()
    }

    /// Rows of one layer in a page.
    pub(crate) const fn layer_rows(&self) -> usize {
        self.kv_heads * 2 * self.page_tokens
    }

    /// Rows of all pages.
    pub(crate) const fn rows(&self) -> usize {
        self.pool.len() / self.row_bytes()
    }

    const fn row_bytes(&self) -> usize {
        HEAD_DIM * self.format.bytes()
    }

    /// All rows, copied `box_rows` at a time, swizzled by a row's bytes.
    pub(crate) fn tensor_map(&self, stream: &Stream, box_rows: usize) -> Result<TensorMap> {
        let (pool, width) = (stream.input(&self.pool.view()), self.row_bytes());
        let swizzle = match self.format {
            KvFormat::Bf16 => Swizzle::Bytes128,
            KvFormat::E4M3 => Swizzle::Bytes64,
        };
        Ok(TensorMap::bytes(pool, [self.rows(), width], width, [box_rows as u32, width as u32], swizzle)?)
    }
}

/// Physical pages of several sequences, in the order of positions.
#[derive(Debug, Clone, Copy)]
pub struct PageTable<'a> {
    /// `[sequences, width]`. Every page that a kernel reaches through a position must exist in the cache.
    pub pages: View<'a, i32>,
    /// Entries a sequence.
    pub width: usize,
    /// Logical page of each sequence's first entry, `[sequences]`; `None`: 0. Window groups drop pages in front.
    pub first_page: Option<View<'a, i32>>,
}

impl PageTable<'_> {
    pub(crate) fn check(&self, check: Checker, sequences: usize) -> Result<()> {
        check.dimension("table width", self.width, "at least 1", self.width > 0)?;
        check.room("page table", sequences * self.width, self.pages.len())?;
        match &self.first_page {
            Some(first) => check.room("first page", sequences, first.len()),
            None => Ok(()),
        }
    }
}
