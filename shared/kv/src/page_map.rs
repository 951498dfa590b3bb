//! What a transfer must send: the exact set of slices for one context, one sender layout and one receiver layout.

use std::ops::Range;

use types::{Classify, ErrorClass, KvLayout, KvLayoutMismatch, PageGroup};

use crate::shape::PageShape;
use crate::slice::KvSlice;

/// Two layouts between which nothing can be sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PageMapError {
    /// The layouts differ in more than `tp`.
    #[error(transparent)]
    Layout(#[from] KvLayoutMismatch),
    /// Heads do not divide evenly among ranks, or a size is 0.
    #[error("kv layout has {field} = {value}: {reason}")]
    Invalid {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: u32,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A context of no tokens has no KV.
    #[error("context is empty")]
    EmptyContext,
}

impl Classify for PageMapError {
    fn class(&self) -> ErrorClass {
        ErrorClass::Caller
    }
}

/// A slice that does not belong to a transfer, or came twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SliceError {
    /// The layer is not one of the group's.
    #[error("layer {layer} does not belong to group {group}")]
    UnknownLayer {
        /// Group named.
        group: PageGroup,
        /// Layer named.
        layer: u32,
    },
    /// The page holds nothing that the receiver needs.
    #[error("page {page} of group {group} is outside of {first}..{end}")]
    PageOutOfRange {
        /// Group named.
        group: PageGroup,
        /// Page named.
        page: u32,
        /// First page expected.
        first: u32,
        /// End of the pages expected.
        end: u32,
    },
    /// The heads are not one of the cuts between a rank of the sender and a rank of the receiver.
    #[error("heads {first}..{end} are not a cut between the two layouts")]
    UnknownHeads {
        /// First head named.
        first: u32,
        /// End of the heads named.
        end: u32,
    },
    /// The slice had arrived before.
    #[error("slice arrived twice: {slice:?}")]
    Duplicate {
        /// The slice.
        slice: KvSlice,
    },
}

impl Classify for SliceError {
    fn class(&self) -> ErrorClass {
        ErrorClass::Caller
    }
}

/// Heads that lie on one rank of the sender and on one rank of the receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    sender_rank: u32,
    receiver_rank: u32,
    first: u32,
    count: u32,
}

/// The slices of one transfer. Both sides compute it from the same three inputs, so nothing about it is guessed from what arrives.
///
/// Full layers send every page; window layers send only the pages that hold the last `window - 1` positions. Each page is cut where the
/// heads of a sender rank and of a receiver rank intersect.
#[derive(Debug, Clone)]
pub struct PageMap {
    layout: KvLayout,
    context_tokens: u32,
    cuts: Vec<Cut>,
    full_pages: Range<u32>,
    window_pages: Range<u32>,
}

impl PageMap {
    /// The map for a context of `context_tokens` positions.
    ///
    /// # Errors
    /// [`PageMapError`] when the layouts differ in more than `tp`, are not sound themselves, or the context is empty.
    pub fn new(sender: &KvLayout, receiver: &KvLayout, context_tokens: u32) -> Result<Self, PageMapError> {
        receiver.check_peer(sender)?;
        check_layout(sender)?;
        check_layout(receiver)?;
        if context_tokens == 0 {
            return Err(PageMapError::EmptyContext);
        }
        let mut cuts = Vec::new();
        for sender_rank in 0..sender.tp {
            for receiver_rank in 0..receiver.tp {
                let (ours, theirs) = (sender.rank_heads(sender_rank), receiver.rank_heads(receiver_rank));
                let (first, end) = (ours.start.max(theirs.start), ours.end.min(theirs.end));
                if first < end {
                    cuts.push(Cut { sender_rank, receiver_rank, first, count: end - first });
                }
            }
        }
        let shape = PageShape::of(receiver);
        Ok(Self {
            layout: receiver.clone(),
            context_tokens,
            cuts,
            full_pages: shape.context_pages(PageGroup::Full, context_tokens),
            window_pages: shape.context_pages(PageGroup::Window, context_tokens),
        })
    }

    /// Positions of the context.
    #[must_use]
    pub fn context_tokens(&self) -> u32 {
        self.context_tokens
    }

    /// Logical pages of a group that are sent.
    #[must_use]
    pub fn pages(&self, group: PageGroup) -> Range<u32> {
        match group {
            PageGroup::Full => self.full_pages.clone(),
            PageGroup::Window => self.window_pages.clone(),
        }
    }

    /// Number of slices of the transfer.
    #[must_use]
    pub fn num_slices(&self) -> u32 {
        PageGroup::ALL.iter().map(|group| self.slices_of_group(*group)).sum()
    }

    /// Every slice, in the order of [`Self::index`].
    pub fn slices(&self) -> impl Iterator<Item = KvSlice> + '_ {
        PageGroup::ALL.into_iter().flat_map(move |group| {
            self.layout.layers(group).iter().flat_map(move |layer| {
                self.pages(group).flat_map(move |page| self.cuts.iter().map(move |cut| slice(group, *layer, page, cut)))
            })
        })
    }

    /// The slices that sender rank `sender_rank` can send once its keys and values of `layers` (model layers) at `positions` are in the
    /// cache, those of earlier positions being there already: the pages that `positions` completes. A page that a chunk leaves
    /// unfinished is sent with the chunk that ends it (or the context), so over the chunks of a prompt each slice comes exactly once.
    pub fn ready_slices(
        &self,
        sender_rank: u32,
        layers: Range<u32>,
        positions: Range<u32>,
    ) -> impl Iterator<Item = KvSlice> + '_ {
        let merged = layers.filter_map(move |layer| self.group_of(layer).map(|group| (layer, group)));
        merged.flat_map(move |(layer, group)| {
            let done = self.completed_pages(positions.clone());
            let pages = self.pages(group);
            (pages.start.max(done.start)..pages.end.min(done.end)).flat_map(move |page| {
                let cuts = self.cuts.iter().filter(move |cut| cut.sender_rank == sender_rank);
                cuts.map(move |cut| slice(group, layer, page, cut))
            })
        })
    }

    /// The dense number of a slice, in `0 .. num_slices()`.
    ///
    /// # Errors
    /// [`SliceError`] naming what does not belong to this transfer.
    pub fn index(&self, slice: &KvSlice) -> Result<u32, SliceError> {
        let (group, layer, page) = (slice.group, slice.layer, slice.page);
        let layer_idx =
            self.layout.layers(group).binary_search(&layer).map_err(|_| SliceError::UnknownLayer { group, layer })?;
        let pages = self.pages(group);
        if !pages.contains(&page) {
            return Err(SliceError::PageOutOfRange { group, page, first: pages.start, end: pages.end });
        }
        let cut_idx = self.cut_idx(slice)?;
        let base = if group == PageGroup::Full { 0 } else { self.slices_of_group(PageGroup::Full) };
        let page_idx = layer_idx as u32 * pages.len() as u32 + (page - pages.start);
        Ok(base + page_idx * self.cuts.len() as u32 + cut_idx as u32)
    }

    /// The receiver's rank that holds a slice's heads.
    ///
    /// # Errors
    /// [`SliceError::UnknownHeads`] when the heads are no cut of this transfer.
    pub fn receiver_rank(&self, slice: &KvSlice) -> Result<u32, SliceError> {
        self.cut_idx(slice).map(|cut_idx| self.cuts[cut_idx].receiver_rank)
    }

    /// The sender's rank that holds a slice's heads.
    ///
    /// # Errors
    /// [`SliceError::UnknownHeads`] when the heads are no cut of this transfer.
    pub fn sender_rank(&self, slice: &KvSlice) -> Result<u32, SliceError> {
        self.cut_idx(slice).map(|cut_idx| self.cuts[cut_idx].sender_rank)
    }

    /// Bytes of a slice.
    #[must_use]
    pub fn slice_bytes(&self, slice: &KvSlice) -> usize {
        slice.head_count as usize * self.layout.head_bytes()
    }

    /// Bytes of the whole transfer.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        let pages = PageGroup::ALL.iter().map(|group| self.layout.layers(*group).len() * self.pages(*group).len());
        pages.sum::<usize>() as u64 * u64::from(self.layout.kv_heads) * self.layout.head_bytes() as u64
    }

    /// The slice of a dense number below `num_slices()`.
    pub(crate) fn slice_at(&self, index: u32) -> Option<KvSlice> {
        let full = self.slices_of_group(PageGroup::Full);
        let (group, rest) = if index < full { (PageGroup::Full, index) } else { (PageGroup::Window, index - full) };
        let num_cuts = self.cuts.len() as u32;
        let pages = self.pages(group);
        let (page_idx, cut_idx) = (rest / num_cuts, rest % num_cuts);
        let num_pages = pages.len() as u32;
        let layer = *self.layout.layers(group).get(page_idx.checked_div(num_pages)? as usize)?;
        Some(slice(group, layer, pages.start + page_idx % num_pages, &self.cuts[cut_idx as usize]))
    }

    fn slices_of_group(&self, group: PageGroup) -> u32 {
        (self.layout.layers(group).len() * self.pages(group).len() * self.cuts.len()) as u32
    }

    fn group_of(&self, layer: u32) -> Option<PageGroup> {
        PageGroup::ALL.into_iter().find(|group| self.layout.layers(*group).binary_search(&layer).is_ok())
    }

    fn cut_idx(&self, slice: &KvSlice) -> Result<usize, SliceError> {
        let found = self.cuts.binary_search_by_key(&slice.head_start, |cut| cut.first);
        found.ok().filter(|cut_idx| self.cuts[*cut_idx].count == slice.head_count).ok_or(SliceError::UnknownHeads {
            first: slice.head_start,
            end: slice.head_start.saturating_add(slice.head_count),
        })
    }

    /// Pages whose last position of this context lies in `positions`.
    fn completed_pages(&self, positions: Range<u32>) -> Range<u32> {
        let complete_at = |tokens: u32| {
            if tokens >= self.context_tokens {
                self.context_tokens.div_ceil(self.layout.page_tokens)
            } else {
                tokens / self.layout.page_tokens
            }
        };
        complete_at(positions.start)..complete_at(positions.end)
    }
}

fn slice(group: PageGroup, layer: u32, page: u32, cut: &Cut) -> KvSlice {
    KvSlice { group, layer, page, head_start: cut.first, head_count: cut.count }
}

fn check_layout(layout: &KvLayout) -> Result<(), PageMapError> {
    let sizes = [
        ("page_tokens", layout.page_tokens),
        ("window", layout.window),
        ("kv_heads", layout.kv_heads),
        ("head_dim", layout.head_dim),
        ("tp", layout.tp),
    ];
    if let Some((field, value)) = sizes.into_iter().find(|(_, value)| *value == 0) {
        return Err(PageMapError::Invalid { field, value, reason: "must be at least 1" });
    }
    if !layout.kv_heads.is_multiple_of(layout.tp) {
        return Err(PageMapError::Invalid { field: "tp", value: layout.tp, reason: "does not divide kv_heads" });
    }
    let ascending = |layers: &[u32]| layers.is_sorted_by(|a, b| a < b);
    if !ascending(&layout.full_layers) || !ascending(&layout.window_layers) {
        let value = (layout.full_layers.len() + layout.window_layers.len()) as u32;
        return Err(PageMapError::Invalid { field: "layers", value, reason: "must be listed in ascending order" });
    }
    Ok(())
}
