//! One rank's KV cache: page memory of both groups and the page tables of all slots.

use std::ops::Range;

use half::bf16;
use kv::KvSlice;
use model::E4M3;
use scheduler::plan::PageDelta;
use types::{KvDtype, KvLayout, PageGroup, PageId};

use super::attention::HEAD_DIM;
use crate::simd::{LANES, V};
use crate::vector::widen;

/// An element of the cache.
pub(crate) trait KvElement: Copy + bytemuck::Pod {
    const ZERO: Self;
    fn from_f32(x: f32) -> Self;
    fn load(lanes: &[Self; LANES]) -> V;
}

impl KvElement for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }

    #[inline(always)]
    fn load(lanes: &[Self; LANES]) -> V {
        *lanes
    }
}

impl KvElement for bf16 {
    const ZERO: Self = Self::ZERO;

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }

    #[inline(always)]
    fn load(lanes: &[Self; LANES]) -> V {
        widen(lanes)
    }
}

impl KvElement for E4M3 {
    const ZERO: Self = Self(0);

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }

    #[inline(always)]
    fn load(lanes: &[Self; LANES]) -> V {
        let values = Self::values();
        lanes.map(|lane| values[usize::from(lane.0)])
    }
}

/// Pages of one group: `[page][layer of the group][kv head of the rank][K, V][token][head_dim]`.
pub(crate) struct PagePool<E> {
    data: Vec<E>,
    pages: usize,
    layers: usize,
    heads: usize,
    page_tokens: usize,
}

impl<E: KvElement> PagePool<E> {
    fn new(pages: usize, layers: usize, heads: usize, page_tokens: usize) -> Self {
        let data = vec![E::ZERO; pages * layers * heads * 2 * page_tokens * HEAD_DIM];
        Self { data, pages, layers, heads, page_tokens }
    }

    pub(crate) const fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// Elements of one head of one layer in one page.
    const fn head_len(&self) -> usize {
        2 * self.page_tokens * HEAD_DIM
    }

    /// Where a range of heads lies; heads are counted over the rank's own.
    fn heads(&self, page: PageId, layer: usize, heads: Range<usize>) -> Range<usize> {
        let first = (page.0 as usize * self.layers + layer) * self.heads;
        (first + heads.start) * self.head_len()..(first + heads.end) * self.head_len()
    }

    /// Keys and values of one head of one layer in one page, each `[page_tokens][head_dim]`.
    #[inline(always)]
    pub(crate) fn head(&self, page: PageId, layer: usize, head: usize) -> (&[[E; HEAD_DIM]], &[[E; HEAD_DIM]]) {
        let (keys_and_values, _) = self.data[self.heads(page, layer, head..head + 1)].as_chunks::<HEAD_DIM>();
        keys_and_values.split_at(self.page_tokens)
    }

    fn write(&mut self, page: PageId, layer: usize, head: usize, token: usize, key: &[f32], value: &[f32]) {
        let range = self.heads(page, layer, head..head + 1);
        let (keys, values) = self.data[range].split_at_mut(self.page_tokens * HEAD_DIM);
        for (out, x) in [(keys, key), (values, value)] {
            for (out, x) in out[token * HEAD_DIM..(token + 1) * HEAD_DIM].iter_mut().zip(x) {
                *out = E::from_f32(*x);
            }
        }
    }
}

/// The pages of one slot in one group, in the order of positions.
#[derive(Debug, Clone, Default)]
pub(crate) struct PageTable {
    /// Logical index of the first page that is still held.
    first_page: usize,
    pages: Vec<PageId>,
}

impl PageTable {
    fn apply(&mut self, delta: &PageDelta) {
        let first_page = delta.first_page as usize;
        if first_page > self.first_page {
            self.pages.drain(..(first_page - self.first_page).min(self.pages.len()));
            self.first_page = first_page;
        }
        self.pages.extend_from_slice(&delta.append);
    }

    /// The physical page that holds logical page `page`.
    #[inline(always)]
    pub(crate) fn page(&self, page: usize) -> PageId {
        self.pages[page - self.first_page]
    }

    /// Whether all of `positions` have a page.
    pub(crate) fn covers(&self, positions: &Range<usize>, page_tokens: usize) -> bool {
        self.first_page * page_tokens <= positions.start
            && positions.end <= (self.first_page + self.pages.len()) * page_tokens
    }
}

/// Both pools in one element type, with the tables of all slots.
pub(crate) struct KvPool<E> {
    full: PagePool<E>,
    window: PagePool<E>,
    /// `[slot][group]`.
    tables: Vec<[PageTable; 2]>,
}

impl<E: KvElement> KvPool<E> {
    pub(crate) fn new(layout: &KvLayout, full_pages: u32, window_pages: u32, max_slots: u32) -> Self {
        let heads = (layout.kv_heads / layout.tp) as usize;
        let pool = |pages: u32, group| {
            PagePool::new(pages as usize, layout.layers(group).len(), heads, layout.page_tokens as usize)
        };
        Self {
            full: pool(full_pages, PageGroup::Full),
            window: pool(window_pages, PageGroup::Window),
            tables: vec![Default::default(); max_slots as usize],
        }
    }

    pub(crate) fn pool(&self, group: PageGroup) -> &PagePool<E> {
        match group {
            PageGroup::Full => &self.full,
            PageGroup::Window => &self.window,
        }
    }

    pub(crate) fn table(&self, slot: usize, group: PageGroup) -> &PageTable {
        &self.tables[slot][group as usize]
    }

    /// Changes a slot's table. The pages must exist.
    pub(crate) fn apply(&mut self, delta: &PageDelta) {
        self.tables[delta.slot.0 as usize][delta.group as usize].apply(delta);
    }

    /// Stores key and value of one head at `position` of a slot's sequence.
    #[expect(clippy::too_many_arguments, reason = "the address of one vector in a five-dimensional cache")]
    pub(crate) fn store(
        &mut self,
        slot: usize,
        group: PageGroup,
        layer: usize,
        head: usize,
        position: usize,
        key: &[f32],
        value: &[f32],
    ) {
        let pool = match group {
            PageGroup::Full => &mut self.full,
            PageGroup::Window => &mut self.window,
        };
        let page = self.tables[slot][group as usize].page(position / pool.page_tokens);
        pool.write(page, layer, head, position % pool.page_tokens, key, value);
    }
}

/// The cache of a rank in the element type chosen at start.
pub(crate) enum KvCache {
    F32(KvPool<f32>),
    Bf16(KvPool<bf16>),
    Fp8(KvPool<E4M3>),
}

/// Calls a method on the pool inside, whatever its element type.
macro_rules! each_dtype {
    ($cache:expr, $pool:ident => $body:expr) => {
        match $cache {
            KvCache::F32($pool) => $body,
            KvCache::Bf16($pool) => $body,
            KvCache::Fp8($pool) => $body,
        }
    };
}
pub(crate) use each_dtype;

impl KvCache {
    pub(crate) fn new(layout: &KvLayout, full_pages: u32, window_pages: u32, max_slots: u32) -> Self {
        match layout.dtype {
            KvDtype::F32 => Self::F32(KvPool::new(layout, full_pages, window_pages, max_slots)),
            KvDtype::Bf16 => Self::Bf16(KvPool::new(layout, full_pages, window_pages, max_slots)),
            KvDtype::Fp8 => Self::Fp8(KvPool::new(layout, full_pages, window_pages, max_slots)),
        }
    }

    pub(crate) fn forget(&mut self, slot: usize) {
        each_dtype!(self, pool => pool.tables[slot] = Default::default());
    }

    /// # Errors
    /// What is wrong with the delta.
    pub(crate) fn apply(&mut self, delta: &PageDelta) -> Result<(), String> {
        each_dtype!(self, pool => {
            let pages = pool.pool(delta.group).pages;
            if let Some(page) = delta.append.iter().find(|page| page.0 as usize >= pages) {
                return Err(format!("{page:?} is beyond the {pages} pages of group {}", delta.group));
            }
            if delta.slot.0 as usize >= pool.tables.len() {
                return Err(format!("slot {} does not exist", delta.slot.0));
            }
            pool.apply(delta);
            Ok(())
        })
    }

    /// Whether `positions` of a slot have pages in a group.
    pub(crate) fn covers(&self, slot: usize, group: PageGroup, positions: &Range<usize>) -> bool {
        each_dtype!(self, pool => pool.table(slot, group).covers(positions, pool.pool(group).page_tokens))
    }

    /// The bytes of a slice, for reading. `heads` are counted over the rank's own, `layer` over those of the group.
    pub(crate) fn bytes(
        &self,
        slice: &KvSlice,
        layer: usize,
        heads: Range<usize>,
        page: PageId,
    ) -> Result<&[u8], String> {
        each_dtype!(self, pool => {
            let pool = pool.pool(slice.group);
            check_page(page, pool.pages)?;
            Ok(bytemuck::cast_slice(&pool.data[pool.heads(page, layer, heads)]))
        })
    }

    /// As [`KvCache::bytes`], for writing.
    pub(crate) fn bytes_mut(
        &mut self,
        slice: &KvSlice,
        layer: usize,
        heads: Range<usize>,
        page: PageId,
    ) -> Result<&mut [u8], String> {
        each_dtype!(self, pool => {
            let pool = match slice.group {
                PageGroup::Full => &mut pool.full,
                PageGroup::Window => &mut pool.window,
            };
            check_page(page, pool.pages)?;
            let range = pool.heads(page, layer, heads);
            Ok(bytemuck::cast_slice_mut(&mut pool.data[range]))
        })
    }
}

fn check_page(page: PageId, pages: usize) -> Result<(), String> {
    if (page.0 as usize) < pages { Ok(()) } else { Err(format!("page {} is beyond the pool's {pages}", page.0)) }
}

#[cfg(test)]
mod tests {
    use types::SlotId;

    use super::*;

    fn delta(first_page: u32, append: &[u32]) -> PageDelta {
        let append = append.iter().map(|page| PageId(*page)).collect();
        PageDelta { slot: SlotId(0), group: PageGroup::Window, first_page, append }
    }

    #[test]
    fn a_table_drops_pages_that_left_the_window_and_appends() {
        let mut table = PageTable::default();
        table.apply(&delta(0, &[7, 3, 9]));
        assert_eq!(table.page(2), PageId(9));
        table.apply(&delta(2, &[4]));
        assert_eq!((table.page(2), table.page(3)), (PageId(9), PageId(4)));
        assert!(table.covers(&(32..64), 16));
        assert!(!table.covers(&(31..64), 16));
        assert!(!table.covers(&(32..65), 16));
    }

    #[test]
    fn a_table_may_begin_past_the_first_page() {
        // After a transfer the window group starts where the window does.
        let mut table = PageTable::default();
        table.apply(&delta(5, &[1, 2]));
        assert_eq!(table.page(6), PageId(2));
        assert!(table.covers(&(80..112), 16));
    }
}
