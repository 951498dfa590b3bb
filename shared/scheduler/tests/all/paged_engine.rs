//! An engine for tests: a page holds, for each layer and head, the tokens of its positions. The next token is a hash of what attention
//! would read through the page tables, so a page that is reused too early, sent wrongly or not at all changes the output.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use kv::{KvSlice, PageMap, PageShape, PageTables};
use scheduler::plan::{PageDelta, RowFailure, RowOutput, RowOutputKind, RowTokens, StepOutput, StepPlan};
use types::{DpGroup, KvLayout, PageGroup, PageId, SlotGroups, SlotId, TokenId};

use crate::sampled;

pub(crate) const VOCAB: u32 = 61;
const UNWRITTEN: TokenId = u32::MAX;

/// The token that follows `tokens`: full layers see all of them, window layers the last `window`.
pub(crate) fn next_token(tokens: &[TokenId], layout: &KvLayout) -> TokenId {
    let window = tokens.len().saturating_sub(layout.window as usize);
    hash(tokens, &tokens[window..])
}

fn hash(full: &[TokenId], window: &[TokenId]) -> TokenId {
    let mix = |state: u64, token: &TokenId| (state ^ u64::from(*token)).wrapping_mul(0x0100_0000_01b3);
    let state = full.iter().fold(0xcbf2_9ce4_8422_2325, mix);
    let state = window.iter().fold(state ^ 0x5555, mix);
    (state >> 33) as u32 % VOCAB
}

#[derive(Debug, Default)]
struct Slot {
    full: Vec<PageId>,
    window_first: u32,
    window: Vec<PageId>,
    /// Token sampled, and in which step.
    sampled: Option<(u64, TokenId)>,
    cached: Option<u32>,
}

pub(crate) struct PagedEngine {
    layout: KvLayout,
    shape: PageShape,
    groups: SlotGroups,
    slots: BTreeMap<SlotId, Slot>,
    /// `[layer of the group][head][position in page]` of each page.
    pages: HashMap<(DpGroup, PageGroup, PageId), Vec<TokenId>>,
    next_step: u64,
    /// Slots whose logits are no numbers.
    pub(crate) broken: BTreeSet<SlotId>,
    pub(crate) rows_run: u64,
    pub(crate) last_sampled_rows: u64,
}

impl PagedEngine {
    /// Attention groups have the same page numbers, and nothing else in common.
    pub(crate) fn new(groups: SlotGroups) -> Self {
        let layout = crate::layout(1);
        Self {
            shape: PageShape::of(&layout),
            layout,
            groups,
            slots: BTreeMap::new(),
            pages: HashMap::new(),
            next_step: 0,
            broken: BTreeSet::new(),
            rows_run: 0,
            last_sampled_rows: 0,
        }
    }

    /// With one attention group, whatever the number of slots.
    pub(crate) fn undivided() -> Self {
        Self::new(SlotGroups::new(u32::MAX, 1).expect("all slots are one group's"))
    }

    pub(crate) fn execute(&mut self, plan: &StepPlan) -> StepOutput {
        assert_eq!(plan.step, self.next_step, "steps count up by one");
        self.next_step += 1;
        for slot in &plan.unbind {
            assert!(self.slots.remove(slot).is_some(), "{slot:?} ends without having begun");
        }
        for binding in &plan.bind {
            assert!(self.slots.insert(binding.slot, Slot::default()).is_none(), "{:?} begins twice", binding.slot);
        }
        for delta in &plan.pages {
            self.apply(delta);
        }
        let by_group = plan.rows.is_sorted_by_key(|row| self.groups.of(row.slot));
        assert!(by_group, "rows of one attention group follow each other");
        let slots: BTreeSet<SlotId> = plan.rows.iter().map(|row| row.slot).collect();
        assert_eq!(slots.len(), plan.rows.len(), "one row a slot");
        assert!(!plan.rows.is_empty(), "a step computes something");
        let rows = plan.rows.iter().map(|row| {
            self.rows_run += 1;
            let (step, row_slot) = (plan.step, row.slot);
            let slot = self.slots.get(&row.slot).expect("rows are of bound slots");
            let tokens = match &row.tokens {
                RowTokens::Known(tokens) => tokens.clone(),
                RowTokens::LastSampled => {
                    let (sampled_in, token) = slot.sampled.expect("a token was sampled");
                    assert_eq!(sampled_in + 1, step, "the last sampled token is of the step before");
                    self.last_sampled_rows += 1;
                    vec![token]
                }
            };
            let end = row.position + tokens.len() as u32;
            assert!(slot.cached.is_none_or(|cached| cached == row.position), "positions go on without a gap");
            for (position, token) in (row.position..end).zip(tokens) {
                self.write(row_slot, position, token);
            }
            let samples = row.output == RowOutputKind::Sample;
            let failure = if row.mask.as_ref().is_some_and(|mask| mask.wait().is_err()) {
                Some(RowFailure::NothingAllowed)
            } else {
                self.broken.contains(&row_slot).then_some(RowFailure::NotANumber)
            };
            let failure = failure.filter(|_| samples);
            let token = (samples && failure.is_none()).then(|| self.sample(row_slot, end));
            let slot = self.slots.get_mut(&row_slot).expect("looked up above");
            slot.cached = Some(end);
            if row.output == RowOutputKind::Sample {
                // A row that fails leaves something as well: a step behind it may be planned already.
                slot.sampled = Some((step, token.unwrap_or(0)));
            }
            RowOutput { slot: row_slot, sampled: token.map(sampled), failure, logits: Vec::new() }
        });
        StepOutput { step: plan.step, rows: rows.collect() }
    }

    fn apply(&mut self, delta: &PageDelta) {
        let slot = self.slots.get_mut(&delta.slot).expect("pages go to bound slots");
        if delta.group == PageGroup::Full {
            assert_eq!(delta.first_page, 0);
            slot.full.extend(&delta.append);
            return;
        }
        let gone = (delta.first_page - slot.window_first) as usize;
        slot.window.drain(..gone.min(slot.window.len()));
        slot.window_first = delta.first_page;
        slot.window.extend(&delta.append);
    }

    fn cell(&self, layer_idx: usize, head: u32, offset: u32) -> usize {
        ((layer_idx as u32 * self.layout.kv_heads + head) * self.layout.page_tokens + offset) as usize
    }

    fn page_mut(&mut self, on: DpGroup, group: PageGroup, page: PageId) -> &mut Vec<TokenId> {
        let cells = self.layout.layers(group).len() as u32 * self.layout.kv_heads * self.layout.page_tokens;
        self.pages.entry((on, group, page)).or_insert_with(|| vec![UNWRITTEN; cells as usize])
    }

    fn physical(&self, slot: SlotId, group: PageGroup, position: u32) -> PageId {
        let slot = &self.slots[&slot];
        let page = position / self.layout.page_tokens;
        let found = match group {
            PageGroup::Full => slot.full.get(page as usize),
            PageGroup::Window => page.checked_sub(slot.window_first).and_then(|i| slot.window.get(i as usize)),
        };
        *found.unwrap_or_else(|| panic!("no {group} page for position {position}"))
    }

    fn write(&mut self, slot: SlotId, position: u32, token: TokenId) {
        for group in PageGroup::ALL {
            let page = self.physical(slot, group, position);
            for layer_idx in 0..self.layout.layers(group).len() {
                for head in 0..self.layout.kv_heads {
                    let cell = self.cell(layer_idx, head, position % self.layout.page_tokens);
                    self.page_mut(self.groups.of(slot), group, page)[cell] = token;
                }
            }
        }
    }

    /// What layer 0, head 0 of the group reads, checked to be the same in all layers and heads.
    fn read(&self, slot: SlotId, group: PageGroup, positions: Range<u32>) -> Vec<TokenId> {
        let read_one = |position: u32| {
            let page = &self.pages[&(self.groups.of(slot), group, self.physical(slot, group, position))];
            let offset = position % self.layout.page_tokens;
            let at = |layer_idx, head| page[self.cell(layer_idx, head, offset)];
            for layer_idx in 0..self.layout.layers(group).len() {
                for head in 0..self.layout.kv_heads {
                    assert_eq!(at(layer_idx, head), at(0, 0), "{group} layer {layer_idx} head {head} at {position}");
                }
            }
            assert_ne!(at(0, 0), UNWRITTEN, "{group} at {position} was never written");
            at(0, 0)
        };
        positions.map(read_one).collect()
    }

    fn sample(&self, slot: SlotId, end: u32) -> TokenId {
        let full = self.read(slot, PageGroup::Full, 0..end);
        let window = self.read(slot, PageGroup::Window, end.saturating_sub(self.shape.window)..end);
        hash(&full, &window)
    }

    fn slice_cells(&self, slice: &KvSlice) -> Vec<usize> {
        let layers = self.layout.layers(slice.group);
        let layer_idx =
            layers.iter().position(|layer| *layer == slice.layer).expect("the slice's layer is of its group");
        let of_head = |head| (0..self.layout.page_tokens).map(move |offset| (head, offset));
        slice.heads().flat_map(of_head).map(|(head, offset)| self.cell(layer_idx, head, offset)).collect()
    }

    /// The bytes of a slice: `[head][position in page]`.
    pub(crate) fn read_slice(&self, on: DpGroup, tables: &PageTables, slice: &KvSlice) -> Vec<TokenId> {
        let page = tables.physical(slice).expect("slices that are ready have a page");
        let page = &self.pages[&(on, slice.group, page)];
        self.slice_cells(slice).into_iter().map(|cell| page[cell]).collect()
    }

    pub(crate) fn write_slice(&mut self, on: DpGroup, tables: &PageTables, slice: &KvSlice, tokens: &[TokenId]) {
        let page = tables.physical(slice).expect("expected slices have a page");
        for (cell, token) in self.slice_cells(slice).into_iter().zip(tokens) {
            self.page_mut(on, slice.group, page)[cell] = *token;
        }
    }

    /// The bytes of a slice of this context, without an engine that has computed it.
    pub(crate) fn slice_of(&self, map: &PageMap, context: &[TokenId], slice: &KvSlice) -> Vec<TokenId> {
        assert_eq!(map.context_tokens() as usize, context.len());
        let first = slice.page * self.layout.page_tokens;
        let of_page = (first..first + self.layout.page_tokens).map(|i| context.get(i as usize).copied());
        let page: Vec<TokenId> = of_page.map(|token| token.unwrap_or(UNWRITTEN)).collect();
        page.repeat(slice.head_count as usize)
    }
}
