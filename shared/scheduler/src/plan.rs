//! What one step of the engine shall do: the only thing that passes from a scheduler to an engine.
//!
//! Page tables live in the engine, by slot, and change by deltas: a plan carries the pages that are new, not the tables. The same plan goes to
//! every rank, since page numbers are the same on all of them.

use std::sync::Arc;

use types::{PageGroup, PageId, Sampling, SlotId, TokenId};

use crate::mask::PendingMask;

/// One step: changes to slots first, then the rows.
#[derive(Debug, Clone, Default)]
pub struct StepPlan {
    /// Counts up by one a step; names the step in logs.
    pub step: u64,
    /// Slots that end: their tables and sampling state are forgotten.
    pub unbind: Vec<SlotId>,
    /// Slots that begin.
    pub bind: Vec<SlotBinding>,
    /// New pages, and pages that left the window.
    pub pages: Vec<PageDelta>,
    /// What to compute, one entry a sequence, at most one for each slot.
    pub rows: Vec<StepRow>,
}

/// A sequence takes a slot.
#[derive(Debug, Clone)]
pub struct SlotBinding {
    /// The slot, free until now.
    pub slot: SlotId,
    /// How to draw its tokens.
    pub sampling: Arc<Sampling>,
    /// Prompt tokens, which the repetition penalty counts.
    pub prompt: Arc<[TokenId]>,
    /// Tokens generated before this binding (an earlier attempt, or the token that prefill sampled); all penalties count them, and the next
    /// token sampled in this slot has output index `generated.len()`.
    pub generated: Vec<TokenId>,
}

/// A change to the page table of one slot and group.
#[derive(Debug, Clone)]
pub struct PageDelta {
    /// Whose table.
    pub slot: SlotId,
    /// Which of its two tables.
    pub group: PageGroup,
    /// Logical pages below this index are dropped (they left the window); always 0 for [`PageGroup::Full`].
    pub first_page: u32,
    /// Physical pages appended behind the last one.
    pub append: Vec<PageId>,
}

/// The tokens of one sequence that this step computes.
#[derive(Debug, Clone)]
pub struct StepRow {
    /// Whose.
    pub slot: SlotId,
    /// Position of the first of `tokens` in the sequence; all earlier positions are in the cache.
    pub position: u32,
    /// What enters the model.
    pub tokens: RowTokens,
    /// What the row yields.
    pub output: RowOutputKind,
    /// Tell the engine's KV listener when the row's keys and values of a group of layers are in the cache.
    pub publish_kv: bool,
    /// For [`RowOutputKind::Sample`]: which tokens may come out, if not all. Engines wait for it as late as they can, and never before the
    /// outputs of earlier steps can be collected, since the mask depends on them.
    pub mask: Option<Arc<PendingMask>>,
}

/// The tokens of a row.
#[derive(Debug, Clone)]
pub enum RowTokens {
    /// Known to the scheduler: a chunk of a prompt, the token that prefill sampled, or a draft to verify.
    Known(Vec<TokenId>),
    /// The one token that this slot sampled in the step before, which the host may not have read yet.
    LastSampled,
}

impl RowTokens {
    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Known(tokens) => tokens.len(),
            Self::LastSampled => 1,
        }
    }

    /// Whether there is none; a plan never holds such a row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What a row yields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowOutputKind {
    /// Nothing but its KV: a chunk that does not end the prompt.
    None,
    /// A token sampled from the last position's logits.
    Sample,
    /// The logits of the last position.
    LastLogits,
    /// The logits of every position: verification of drafts, numeric tests.
    AllLogits,
}

/// What a step yielded, rows in the plan's order.
#[derive(Debug, Clone, Default)]
pub struct StepOutput {
    /// The plan's number.
    pub step: u64,
    /// One entry for each row.
    pub rows: Vec<RowOutput>,
}

/// What a row yielded.
#[derive(Debug, Clone)]
pub struct RowOutput {
    /// Whose.
    pub slot: SlotId,
    /// The token, if the row asked for [`RowOutputKind::Sample`] and `failure` is `None`.
    pub sampled: Option<types::SampledToken>,
    /// Why a row that was to sample has no token. The other rows of the step have theirs.
    pub failure: Option<RowFailure>,
    /// `[positions, vocabulary]` row-major, if the row asked for logits; else empty.
    pub logits: Vec<f32>,
}

/// Why a row that was to sample has no token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowFailure {
    /// Its mask failed, or mask and biases leave no token.
    NothingAllowed,
    /// Its logits hold a NaN or plus infinity: something that it was computed from is damaged. A token drawn from them would be garbage
    /// served as an answer.
    NotANumber,
}
