//! One rank's KV cache: pages of both groups, and the page tables of its attention group's slots, on the device. Slots are numbered
//! within the attention group.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

use device::{Device, DeviceBuffer, PinnedBuffer, Stream, View};
use kernels::{KvCache, KvFormat, KvPool, KvPort, PageTable, UnpackKv};
use kv::KvSlice;
use model::{ModelConfig, ShardPlan};
use scheduler::plan::PageDelta;
use types::{KvDtype, KvLayout, PageGroup, PageId};

use super::pinned_ring::PinnedRing;
use super::random_weights::RandomTensors;
use super::rank::Gpu;
use super::{CudaOptions, HEAD_DIM};
use crate::kv_slice::locate;
use crate::{EngineError, KvReader};

/// Imports under way at a time.
const IMPORTS: usize = 32;

/// Pages and tables of one group.
pub(crate) struct Group {
    pub(crate) cache: KvCache,
    /// `[slots, width]`: the physical page of each logical one. Entries beyond `held` are stale.
    table: DeviceBuffer<i32>,
    /// Logical pages that each slot holds.
    held: Vec<Range<usize>>,
    pages: usize,
}

impl Group {
    fn new(
        stream: &Stream,
        layers: usize,
        kv_heads: usize,
        pages: u32,
        width: usize,
        options: &CudaOptions,
    ) -> Result<Self, EngineError> {
        let (slots, pages) = ((options.max_slots / options.layout.dp) as usize, pages as usize);
        // A slot and a page for the rows of a step in which the group has none.
        let idle = usize::from(options.layout.dp > 1);
        let cache = KvCache::new(
            stream,
            format(options.kv_dtype),
            pages + idle,
            layers,
            kv_heads,
            options.page_tokens as usize,
        )?;
        let mut table = stream.zeros((slots + idle) * width)?;
        if idle > 0 {
            stream.copy_from_host(table.slice_mut(slots * width..slots * width + 1), &[pages as i32])?;
        }
        Ok(Self { cache, table, held: vec![0..0; slots], pages })
    }
}

/// Elements of an allowed type.
fn format(dtype: KvDtype) -> KvFormat {
    match dtype {
        KvDtype::Bf16 => KvFormat::Bf16,
        KvDtype::Fp8 => KvFormat::E4M3,
        KvDtype::F32 => unreachable!("`check` refuses a cache of f32"),
    }
}

/// Where prefill attention finds one layer of a sequence.
pub(crate) struct PrefillPages<'a> {
    pub(crate) cache: &'a KvCache,
    pub(crate) layer: usize,
    pub(crate) pages: View<'a, i32>,
    /// Logical page of the first of `pages`.
    pub(crate) first_page: usize,
}

/// Room for one layer of one sequence in bf16, as prefill attention reads it, beside a cache in E4M3.
struct Widened {
    cache: KvCache,
    /// 0, 1, 2, ..
    pages: DeviceBuffer<i32>,
}

impl Widened {
    fn new(stream: &Stream, pages: usize, kv_heads: usize, page_tokens: usize) -> Result<Self, EngineError> {
        let numbers: Vec<i32> = (0..pages as i32).collect();
        let cache = KvCache::new(stream, KvFormat::Bf16, pages, 1, kv_heads, page_tokens)?;
        Ok(Self { cache, pages: stream.upload(&numbers)? })
    }
}

/// The cache of a rank.
pub(crate) struct RankCache {
    pub(crate) full: Group,
    pub(crate) window: Group,
    widened: Option<Widened>,
    /// Logical pages that a sequence may have.
    width: usize,
    layout: KvLayout,
    config: ModelConfig,
    plan: ShardPlan,
    imports: BTreeMap<usize, PinnedRing<u8>>,
    exports: RefCell<BTreeMap<usize, PinnedBuffer<u8>>>,
}

impl RankCache {
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(crate) fn new(
        stream: &Stream,
        config: &ModelConfig,
        plan: &ShardPlan,
        options: &CudaOptions,
        filler: Option<RandomTensors>,
    ) -> Result<Self, EngineError> {
        let layout = super::kv_layout(config, options);
        let width = options.max_context_tokens.div_ceil(options.page_tokens) as usize;
        let group =
            |group, pages| Group::new(stream, layout.layers(group).len(), plan.kv_heads.len(), pages, width, options);
        let (kv_heads, page_tokens) = (plan.kv_heads.len(), options.page_tokens as usize);
        let widens = options.kv_dtype == KvDtype::Fp8;
        let widened = widens.then(|| Widened::new(stream, width, kv_heads, page_tokens)).transpose()?;
        let mut cache = Self {
            widened,
            full: group(PageGroup::Full, options.full_pages)?,
            window: group(PageGroup::Window, options.window_pages)?,
            width,
            layout: layout.clone(),
            config: config.clone(),
            plan: plan.clone(),
            imports: BTreeMap::new(),
            exports: RefCell::default(),
        };
        for group in [&mut cache.full, &mut cache.window] {
            // Fresh memory may hold NaNs. Attention never reads an unwritten position, but a weight of zero times a NaN
            // in the same tile would not be zero.
            stream.fill_zero(group.cache.pool.view_mut())?;
        }
        if let Some(mut random) = filler {
            for group in [&mut cache.full, &mut cache.window] {
                random.fill_cache(group.cache.format, group.cache.pool.view_mut())?;
            }
        }
        Ok(cache)
    }

    pub(crate) const fn group(&self, group: PageGroup) -> &Group {
        match group {
            PageGroup::Full => &self.full,
            PageGroup::Window => &self.window,
        }
    }

    pub(crate) const fn group_mut(&mut self, group: PageGroup) -> &mut Group {
        match group {
            PageGroup::Full => &mut self.full,
            PageGroup::Window => &mut self.window,
        }
    }

    /// The pools, for whoever moves pages beside the steps.
    pub(crate) fn port(&self, device: Device) -> KvPort {
        let head_bytes = self.layout.head_bytes();
        let pool = |Group { cache, .. }: &Group| KvPool {
            memory: cache.pool.shared(),
            layers: cache.layers,
            kv_heads: cache.kv_heads,
            head_bytes,
        };
        KvPort { device, full: pool(&self.full), window: pool(&self.window) }
    }

    /// Forgets a slot's tables.
    pub(crate) fn forget(&mut self, slot: usize) {
        self.full.held[slot] = 0..0;
        self.window.held[slot] = 0..0;
    }

    /// Changes the table of `slot`, the delta's within the attention group. The new entries are written by a small copy on `stream`, which the
    /// driver takes from the caller's memory at once.
    ///
    /// # Errors
    /// [`EngineError::Plan`] for pages or positions that do not exist, [`EngineError::Gpu`].
    pub(crate) fn apply(
        &mut self,
        stream: &Stream,
        step: u64,
        slot: usize,
        delta: &PageDelta,
    ) -> Result<(), EngineError> {
        let width = self.width;
        let group = self.group_mut(delta.group);
        let fail = |reason: String| Err(EngineError::Plan { step, reason });
        if let Some(page) = delta.append.iter().find(|page| page.0 as usize >= group.pages) {
            return fail(format!("{page:?} is beyond the {} pages of group {}", group.pages, delta.group));
        }
        let held = &mut group.held[slot];
        held.start = held.start.max(delta.first_page as usize);
        let end = held.end.max(held.start);
        held.end = end + delta.append.len();
        if held.end > width {
            let (slot, pages) = (delta.slot.0, held.end);
            return fail(format!("slot {slot} would have {pages} pages, max_context_tokens allows {width}"));
        }
        if delta.append.is_empty() {
            return Ok(());
        }
        let entries: Vec<i32> = delta.append.iter().map(|page| page.0 as i32).collect();
        let at = slot * width + end;
        Ok(stream.copy_from_host(group.table.slice_mut(at..at + entries.len()), &entries)?)
    }

    /// Whether `positions` of a slot have pages in a group.
    pub(crate) fn covers(&self, slot: usize, group: PageGroup, positions: &Range<usize>) -> bool {
        let (held, page_tokens) = (&self.group(group).held[slot], self.layout.page_tokens as usize);
        held.start * page_tokens <= positions.start && positions.end <= held.end * page_tokens
    }

    /// One layer of a slot's sequence as prefill attention takes it, for queries that see keys `visible`. Widens those if
    /// the cache is E4M3; only one such layer at a time.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(crate) fn for_prefill(
        &mut self,
        gpu: &Gpu,
        group: PageGroup,
        layer: usize,
        slot: usize,
        visible: Range<usize>,
    ) -> Result<PrefillPages<'_>, EngineError> {
        let (first, page_tokens) = (slot * self.width, self.layout.page_tokens as usize);
        let Group { cache, table, .. } = match group {
            PageGroup::Full => &self.full,
            PageGroup::Window => &self.window,
        };
        let Some(widened) = &mut self.widened else {
            let pages = table.slice(first..first + self.width);
            return Ok(PrefillPages { cache, layer, pages, first_page: 0 });
        };
        let (first_page, end_page) = (visible.start / page_tokens, visible.end.div_ceil(page_tokens));
        let pages = table.slice(first + first_page..first + end_page);
        UnpackKv { cache, layer, pages, out: &mut widened.cache }.enqueue(&gpu.kernels, &gpu.stream)?;
        let pages = widened.pages.slice(..end_page - first_page);
        Ok(PrefillPages { cache: &widened.cache, layer: 0, pages, first_page })
    }

    /// A group's cache for writing, and the tables of all slots.
    pub(crate) fn split(&mut self, group: PageGroup) -> (&mut KvCache, PageTable<'_>) {
        let width = self.width;
        let Group { cache, table, .. } = self.group_mut(group);
        (cache, PageTable { pages: table.view(), width, first_page: None })
    }

    /// The same for reading.
    pub(crate) fn read(&self, group: PageGroup) -> (&KvCache, PageTable<'_>) {
        let Group { cache, table, .. } = self.group(group);
        (cache, PageTable { pages: table.view(), width: self.width, first_page: None })
    }

    /// Copies a slice out, behind what is enqueued on `stream`, and waits for it.
    ///
    /// # Errors
    /// As [`crate::Engine::export_kv`], and [`EngineError::Gpu`].
    pub(crate) fn export(
        &self,
        stream: &Stream,
        slice: &KvSlice,
        page: PageId,
        out: &mut [u8],
    ) -> Result<(), EngineError> {
        let range = self.place(slice, page, out.len())?;
        let mut buffers = self.exports.borrow_mut();
        let buffer = match buffers.remove(&range.len()) {
            Some(buffer) => buffer,
            None => PinnedBuffer::zeros(stream, range.len())?,
        };
        let len = range.len();
        let source = self.group(slice.group).cache.pool.slice(range);
        let buffer = stream.download_into(source, buffer)?.wait()?;
        out.copy_from_slice(&buffer);
        buffers.insert(len, buffer);
        Ok(())
    }

    /// Writes a slice, behind what is enqueued on `stream`. Returns once the bytes are taken.
    ///
    /// # Errors
    /// As [`crate::Engine::import_kv`], and [`EngineError::Gpu`].
    pub(crate) fn import(
        &mut self,
        stream: &Stream,
        slice: &KvSlice,
        page: PageId,
        bytes: &[u8],
    ) -> Result<(), EngineError> {
        let range = self.place(slice, page, bytes.len())?;
        let group = match slice.group {
            PageGroup::Full => &mut self.full,
            PageGroup::Window => &mut self.window,
        };
        let ring = self.imports.entry(range.len()).or_insert_with(|| PinnedRing::new(range.len(), IMPORTS));
        let dst = group.cache.pool.slice_mut(range);
        ring.upload(stream, dst, |buffer| buffer.copy_from_slice(bytes))
    }

    /// Where a slice of `bytes` bytes lies in its group's pool.
    fn place(&self, slice: &KvSlice, page: PageId, bytes: usize) -> Result<Range<usize>, EngineError> {
        let group = self.group(slice.group);
        let place = || -> Result<Range<usize>, String> {
            let (layer, heads) = locate(&self.config, &self.plan, &self.layout, slice, bytes)?;
            if page.0 as usize >= group.pages {
                return Err(format!("page {} is beyond the pool's {}", page.0, group.pages));
            }
            let first = (page.0 as usize * group.cache.layers + layer) * group.cache.kv_heads;
            let head_len = 2 * group.cache.page_tokens * HEAD_DIM * group.cache.format.bytes();
            Ok((first + heads.start) * head_len..(first + heads.end) * head_len)
        };
        place().map_err(|reason| EngineError::KvSlice { slice: *slice, rank: self.plan.rank as u32, reason })
    }
}

/// Reads the cache on a stream of its own, beside the layers that still compute.
pub(crate) struct CacheReader<'a> {
    pub(crate) cache: &'a RankCache,
    pub(crate) stream: &'a Stream,
}

impl KvReader for CacheReader<'_> {
    fn export_kv(&self, slice: &KvSlice, page: PageId, out: &mut [u8]) -> Result<(), EngineError> {
        self.cache.export(self.stream, slice, page, out)
    }
}
