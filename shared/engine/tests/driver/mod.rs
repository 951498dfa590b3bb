//! Drives an engine group without a scheduler: hands out pages, drops those that left the window, makes plans.
//! Shared by the engine's tests, its bench and the fixture runner.
#![allow(dead_code, reason = "each of its users needs a part")]

use std::collections::BTreeMap;
use std::sync::Arc;

use engine::cpu::{CpuOptions, Numerics, build_group};
use engine::group::{EngineGroup, KvWrite};
use kv::KvSlice;
use model::Checkpoint;
use scheduler::mask::{MaskPromise, PendingMask};
use scheduler::plan::{PageDelta, RowOutputKind, RowTokens, SlotBinding, StepOutput, StepPlan, StepRow};
use types::{KvDtype, KvLayout, PageGroup, PageId, ParallelLayout, Sampling, SlotId, TokenId};

/// One row of a step.
pub(crate) struct Row {
    pub(crate) slot: u32,
    pub(crate) tokens: RowTokens,
    pub(crate) output: RowOutputKind,
    pub(crate) publish_kv: bool,
    pub(crate) mask: Option<Arc<PendingMask>>,
}

impl Row {
    pub(crate) fn new(slot: u32, tokens: &[TokenId], output: RowOutputKind) -> Self {
        Self { slot, tokens: RowTokens::Known(tokens.to_vec()), output, publish_kv: false, mask: None }
    }

    /// The token sampled in the step before; samples the next one.
    pub(crate) fn decode(slot: u32) -> Self {
        Self { slot, tokens: RowTokens::LastSampled, output: RowOutputKind::Sample, publish_kv: false, mask: None }
    }

    /// The same, to be sampled under a mask.
    pub(crate) fn masked(self, promise: &MaskPromise) -> Self {
        Self { mask: Some(Arc::clone(promise.pending())), ..self }
    }
}

/// A slot in use.
#[derive(Default)]
pub(crate) struct Sequence {
    /// Positions in the cache.
    pub(crate) len: u32,
    pub(crate) full: Vec<PageId>,
    /// Logical index of the first page of `window`.
    pub(crate) window_first: u32,
    pub(crate) window: Vec<PageId>,
}

/// A group, its free pages and its sequences.
pub(crate) struct Driver {
    pub(crate) group: EngineGroup,
    pub(crate) sequences: BTreeMap<u32, Sequence>,
    window_tokens: u32,
    free: [Vec<PageId>; 2],
    plan: StepPlan,
}

/// f32 throughout, pages of 16 positions, room for 48 sequences and 32,000 positions.
pub(crate) fn options(layout: ParallelLayout) -> CpuOptions {
    CpuOptions {
        layout,
        numerics: Numerics::F32,
        kv_dtype: KvDtype::F32,
        page_tokens: 16,
        full_pages: 2000,
        window_pages: 2000,
        max_slots: 48,
        max_step_tokens: 4096,
        publish_layers: None,
        masked_tokens: Vec::new(),
        probe: None,
    }
}

impl Driver {
    pub(crate) fn new(options: CpuOptions) -> Self {
        let checkpoint = Arc::new(Checkpoint::embedded_nano());
        let pages = [options.full_pages, options.window_pages];
        let group = build_group(checkpoint, options, None, Arc::new(|_| {})).expect("nano runs in this layout");
        Self::over(group, pages)
    }

    pub(crate) fn over(group: EngineGroup, pages: [u32; 2]) -> Self {
        // Descending, so that the pages of a sequence are not in order of their numbers.
        let free = pages.map(|pages| (0..pages).map(PageId).collect());
        let window_tokens = group.kv_layout().window;
        Self { group, sequences: BTreeMap::new(), window_tokens, free, plan: StepPlan::default() }
    }

    /// Binds a slot in the next step.
    pub(crate) fn bind(&mut self, slot: u32, prompt: &[TokenId], sampling: Sampling) {
        self.sequences.insert(slot, Sequence::default());
        let sampling = Arc::new(sampling);
        self.plan.bind.push(SlotBinding { slot: SlotId(slot), sampling, prompt: prompt.into(), generated: Vec::new() });
    }

    /// Ends a sequence: its slot is unbound in the next step, its pages are free at once.
    pub(crate) fn end(&mut self, slot: u32) {
        let sequence = self.sequences.remove(&slot).expect("the slot is bound");
        self.free[0].extend(sequence.full);
        self.free[1].extend(sequence.window);
        self.plan.unbind.push(SlotId(slot));
    }

    /// Gives a sequence pages up to position `end`, and drops window pages that the query at `position` does not see.
    pub(crate) fn grow(&mut self, slot: u32, position: u32, end: u32) {
        let page_tokens = self.group.kv_layout().page_tokens;
        let sequence = self.sequences.get_mut(&slot).expect("the slot is bound");
        let pages = end.div_ceil(page_tokens);
        let append = |free: &mut Vec<PageId>, have: u32| -> Vec<PageId> {
            (have..pages).map(|_| free.pop().expect("the pool has room for the test")).collect()
        };
        let full = append(&mut self.free[0], sequence.full.len() as u32);
        let first = ((position + 1).saturating_sub(self.window_tokens) / page_tokens).max(sequence.window_first);
        let dropped = ((first - sequence.window_first) as usize).min(sequence.window.len());
        let left: Vec<PageId> = sequence.window.drain(..dropped).collect();
        sequence.window_first = first;
        let window = append(&mut self.free[1], first + sequence.window.len() as u32);
        self.free[1].splice(0..0, left); // reused last
        sequence.full.extend(&full);
        sequence.window.extend(&window);
        let slot = SlotId(slot);
        self.plan.pages.push(PageDelta { slot, group: PageGroup::Full, first_page: 0, append: full });
        self.plan.pages.push(PageDelta { slot, group: PageGroup::Window, first_page: first, append: window });
    }

    /// Launches a step.
    pub(crate) fn launch(&mut self, rows: Vec<Row>) {
        for row in rows {
            let position = self.sequences[&row.slot].len;
            let end = position + row.tokens.len() as u32;
            self.grow(row.slot, position, end);
            self.sequences.get_mut(&row.slot).expect("the slot is bound").len = end;
            let Row { slot, tokens, output, publish_kv, mask } = row;
            self.plan.rows.push(StepRow { slot: SlotId(slot), position, tokens, output, publish_kv, mask });
        }
        let step = self.plan.step + 1;
        let plan = std::mem::replace(&mut self.plan, StepPlan { step, ..StepPlan::default() });
        self.group.launch(Arc::new(plan)).expect("no rank is lost");
    }

    /// Launches a step and waits for it.
    pub(crate) fn step(&mut self, rows: Vec<Row>) -> StepOutput {
        self.launch(rows);
        self.group.collect().expect("no rank is lost")
    }
}

/// Takes the most probable token.
pub(crate) fn greedy() -> Sampling {
    Sampling { temperature: 0.0, ..Sampling::default() }
}

/// Copies all pages of a slot from one group to another, head by head, as a transfer would.
pub(crate) fn copy_kv(from: &Driver, to: &Driver, slot: u32) {
    let layouts = [from.group.kv_layout(), to.group.kv_layout()];
    let (source, target) = (&from.sequences[&slot], &to.sequences[&slot]);
    let rank_of = |layout: &KvLayout, head: u32| head / (layout.kv_heads / layout.tp);
    for (group, source, target) in
        [(PageGroup::Full, &source.full, &target.full), (PageGroup::Window, &source.window, &target.window)]
    {
        for &layer in layouts[0].layers(group) {
            for head_start in 0..layouts[0].kv_heads {
                for page in 0..source.len().min(target.len()) {
                    let slice = KvSlice { group, layer, page: page as u32, head_start, head_count: 1 };
                    let read = from.group.export_kv(rank_of(layouts[0], head_start), vec![(slice, source[page])]);
                    let bytes = read.expect("the slice is on this rank").remove(0);
                    let write = KvWrite { slice, page: target[page], bytes };
                    to.group
                        .import_kv(rank_of(layouts[1], head_start), vec![write])
                        .expect("the slice is on this rank");
                }
            }
        }
    }
}
