//! KV pages: pools, typed page states, page tables, and the exact set of slices that a transfer sends.
//!
//! Knows: which page belongs to whom and in which state. Must not know: bytes, devices, clocks, I/O.
//!
//! Start with [`page_pool`] (the states of a page), then [`sequence`] (the pages of one sequence), then [`page_map`] (what travels
//! between two workers, in units of [`KvSlice`]). [`prefix_cache`] keeps pages of prompts for others that begin alike.

pub mod cached_page;
pub mod landing;
pub mod page_map;
pub mod page_pool;
pub mod prefix_cache;
pub mod sequence;
pub mod shape;
pub mod slice;

pub use cached_page::{CachedPage, PageReader};
pub use landing::{Incomplete, Landing};
pub use page_map::{PageMap, PageMapError, SliceError};
pub use page_pool::{NoPages, PagePool, PagePools, Pages, PoolCounts};
pub use prefix_cache::{Context, PrefixCache, PrefixCounts, Start};
pub use sequence::{
    LandError, LandingPages, PageDemand, PageTable, PageTables, SequencePages, SequenceReserve, TableDelta,
};
pub use shape::PageShape;
pub use slice::KvSlice;
