//! Drives an engine group without a scheduler: hands out pages, drops those that left the window, makes plans. For
//! measurements and tests, which say themselves what each step does.

use std::collections::BTreeMap;
use std::sync::Arc;

use scheduler::mask::{MaskPromise, PendingMask};
use scheduler::plan::{PageDelta, RowOutputKind, RowTokens, SlotBinding, StepOutput, StepPlan, StepRow};
use types::{PageGroup, PageId, Sampling, SlotGroups, SlotId, TokenId};

use crate::EngineError;
use crate::group::EngineGroup;

/// One row of a step.
#[derive(Debug)]
pub struct Row {
    /// Whose.
    pub slot: u32,
    /// What goes in.
    pub tokens: RowTokens,
    /// What comes out.
    pub output: RowOutputKind,
    /// Whether the KV listener is told of it.
    pub publish_kv: bool,
    /// What may be sampled.
    pub mask: Option<Arc<PendingMask>>,
}

impl Row {
    /// Tokens that are known.
    #[must_use]
    pub fn new(slot: u32, tokens: &[TokenId], output: RowOutputKind) -> Self {
        Self { slot, tokens: RowTokens::Known(tokens.to_vec()), output, publish_kv: false, mask: None }
    }

    /// The token sampled in the step before; samples the next one.
    #[must_use]
    pub fn decode(slot: u32) -> Self {
        Self { slot, tokens: RowTokens::LastSampled, output: RowOutputKind::Sample, publish_kv: false, mask: None }
    }

    /// The same, to be sampled under a mask.
    #[must_use]
    pub fn masked(self, promise: &MaskPromise) -> Self {
        Self { mask: Some(Arc::clone(promise.pending())), ..self }
    }
}

/// A slot in use.
#[derive(Debug, Default)]
pub struct Sequence {
    /// Positions in the cache.
    pub len: u32,
    /// Its pages of the full group.
    pub full: Vec<PageId>,
    /// Logical index of the first page of `window`.
    pub window_first: u32,
    /// Its pages of the window group.
    pub window: Vec<PageId>,
}

/// A group, its free pages and its sequences.
pub struct Driver {
    /// The ranks.
    pub group: EngineGroup,
    /// Slots in use.
    pub sequences: BTreeMap<u32, Sequence>,
    /// Which slot is in which attention group.
    pub slots: SlotGroups,
    window_tokens: u32,
    /// Of each attention group.
    free: Vec<[Vec<PageId>; 2]>,
    plan: StepPlan,
}

impl Driver {
    /// `pages` are those of the group's full and window pools, all of them free. For layouts without data parallelism.
    ///
    /// # Panics
    /// Never: any number of slots is one attention group's.
    #[must_use]
    pub fn over(group: EngineGroup, pages: [u32; 2]) -> Self {
        Self::over_groups(group, pages, SlotGroups::new(u32::MAX, 1).expect("all slots are one group's"))
    }

    /// With `pages` in each attention group, and the slots of the group's options.
    #[must_use]
    pub fn over_groups(group: EngineGroup, pages: [u32; 2], slots: SlotGroups) -> Self {
        // Descending, so that the pages of a sequence are not in order of their numbers.
        let free = slots.groups().map(|_| pages.map(|pages| (0..pages).map(PageId).collect())).collect();
        let window_tokens = group.kv_layout().window;
        Self { group, sequences: BTreeMap::new(), slots, window_tokens, free, plan: StepPlan::default() }
    }

    /// Binds a slot in the next step.
    pub fn bind(&mut self, slot: u32, prompt: &[TokenId], sampling: Sampling) {
        self.sequences.insert(slot, Sequence::default());
        let sampling = Arc::new(sampling);
        self.plan.bind.push(SlotBinding { slot: SlotId(slot), sampling, prompt: prompt.into(), generated: Vec::new() });
    }

    /// Ends a sequence: its slot is unbound in the next step, its pages are free at once.
    ///
    /// # Panics
    /// If the slot is not bound.
    pub fn end(&mut self, slot: u32) {
        let sequence = self.sequences.remove(&slot).expect("the slot is bound");
        let [full, window] = &mut self.free[self.slots.of(SlotId(slot)).0 as usize];
        full.extend(sequence.full);
        window.extend(sequence.window);
        self.plan.unbind.push(SlotId(slot));
    }

    /// Gives a sequence pages up to position `end`, and drops window pages that the query at `position` does not see.
    ///
    /// # Errors
    /// [`EngineError::Setup`] when the pools are used up.
    ///
    /// # Panics
    /// If the slot is not bound.
    pub fn grow(&mut self, slot: u32, position: u32, end: u32) -> Result<(), EngineError> {
        let page_tokens = self.group.kv_layout().page_tokens;
        let sequence = self.sequences.get_mut(&slot).expect("the slot is bound");
        let pages = end.div_ceil(page_tokens);
        let append = |free: &mut Vec<PageId>, have: u32| -> Result<Vec<PageId>, EngineError> {
            let used_up = || EngineError::Setup(format!("no page is free for position {end} of slot {slot}"));
            (have..pages).map(|_| free.pop().ok_or_else(used_up)).collect()
        };
        let [free_full, free_window] = &mut self.free[self.slots.of(SlotId(slot)).0 as usize];
        let full = append(free_full, sequence.full.len() as u32)?;
        let first = ((position + 1).saturating_sub(self.window_tokens) / page_tokens).max(sequence.window_first);
        let dropped = ((first - sequence.window_first) as usize).min(sequence.window.len());
        let left: Vec<PageId> = sequence.window.drain(..dropped).collect();
        sequence.window_first = first;
        let window = append(free_window, first + sequence.window.len() as u32)?;
        free_window.splice(0..0, left); // reused last
        sequence.full.extend(&full);
        sequence.window.extend(&window);
        let slot = SlotId(slot);
        self.plan.pages.push(PageDelta { slot, group: PageGroup::Full, first_page: 0, append: full });
        self.plan.pages.push(PageDelta { slot, group: PageGroup::Window, first_page: first, append: window });
        Ok(())
    }

    /// Launches a step.
    ///
    /// # Errors
    /// [`EngineError::RankLost`]; [`EngineError::Setup`] when the pools are used up.
    ///
    /// # Panics
    /// If a row's slot is not bound.
    pub fn launch(&mut self, rows: Vec<Row>) -> Result<(), EngineError> {
        for row in rows {
            let position = self.sequences[&row.slot].len;
            let end = position + row.tokens.len() as u32;
            self.grow(row.slot, position, end)?;
            self.sequences.get_mut(&row.slot).expect("its length was just read").len = end;
            let Row { slot, tokens, output, publish_kv, mask } = row;
            self.plan.rows.push(StepRow { slot: SlotId(slot), position, tokens, output, publish_kv, mask });
        }
        let step = self.plan.step + 1;
        let plan = std::mem::replace(&mut self.plan, StepPlan { step, ..StepPlan::default() });
        self.group.launch(Arc::new(plan))
    }

    /// Launches a step and waits for it.
    ///
    /// # Errors
    /// As [`Self::launch`].
    pub fn step(&mut self, rows: Vec<Row>) -> Result<StepOutput, EngineError> {
        self.launch(rows)?;
        self.group.collect()
    }
}

/// Takes the most probable token.
#[must_use]
pub fn greedy() -> Sampling {
    Sampling { temperature: 0.0, ..Sampling::default() }
}
