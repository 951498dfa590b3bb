//! The rows of a step that are the rank's, laid out as one run of tokens, checked against the state of the slots.

use std::ops::Range;

use scheduler::plan::{RowOutputKind, RowTokens, StepPlan};
use types::{DpGroup, PageGroup, SlotGroups, SlotId, TokenId};

use super::kv_pool::KvCache;
use crate::EngineError;

/// One row of the plan.
#[derive(Debug, Clone)]
pub(crate) struct BatchRow {
    pub(crate) slot: usize,
    /// Position of the first token.
    pub(crate) position: usize,
    /// Its tokens, within the batch.
    pub(crate) tokens: Range<usize>,
    /// Its logits, within those that the step computes.
    pub(crate) logits: Range<usize>,
}

/// The rows of a step whose slots are of the rank's attention group; maybe none.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) positions: Vec<usize>,
    pub(crate) rows: Vec<BatchRow>,
    /// Tokens whose logits are wanted, ascending.
    pub(crate) logit_tokens: Vec<usize>,
    /// Whether any row publishes its KV.
    pub(crate) publishes: bool,
}

/// What a batch is checked against.
pub(crate) struct Limits {
    pub(crate) max_step_tokens: usize,
    pub(crate) vocab_size: usize,
    pub(crate) window: usize,
    pub(crate) slots: SlotGroups,
    /// The rank's attention group.
    pub(crate) group: DpGroup,
}

impl Limits {
    /// Whether the sequence in this slot is computed here.
    pub(crate) fn is_own(&self, slot: SlotId) -> bool {
        self.slots.of(slot) == self.group
    }
}

impl Batch {
    /// Fills the batch from a plan whose slots and pages have been applied.
    ///
    /// # Errors
    /// [`EngineError::Plan`] if a row has no tokens or unknown ones, if its slot does not exist or appears twice, or if a position that it needs
    /// has no page.
    pub(crate) fn fill(
        &mut self,
        plan: &StepPlan,
        last_sampled: &[TokenId],
        cache: &KvCache,
        limits: &Limits,
    ) -> Result<(), EngineError> {
        let fail = |reason: String| Err(EngineError::Plan { step: plan.step, reason });
        *self = Self { tokens: std::mem::take(&mut self.tokens), ..Self::default() };
        self.tokens.clear();
        for row in &plan.rows {
            let (slot, position) = (row.slot.0 as usize, row.position as usize);
            if slot < last_sampled.len() && !limits.is_own(row.slot) {
                continue;
            }
            if slot >= last_sampled.len() || self.rows.iter().any(|other| other.slot == slot) {
                return fail(format!("slot {slot} does not exist or has two rows"));
            }
            let start = self.tokens.len();
            match &row.tokens {
                RowTokens::Known(tokens) => self.tokens.extend_from_slice(tokens),
                RowTokens::LastSampled => self.tokens.push(last_sampled[slot]),
            }
            let tokens = start..self.tokens.len();
            if let Some(token) = self.tokens[start..].iter().find(|token| **token as usize >= limits.vocab_size) {
                return fail(format!("slot {slot} has token {token}, the vocabulary {} tokens", limits.vocab_size));
            }
            let end = position + tokens.len();
            let window = (position + 1).saturating_sub(limits.window)..end;
            if !cache.covers(slot, PageGroup::Full, &(0..end)) || !cache.covers(slot, PageGroup::Window, &window) {
                return fail(format!("slot {slot} lacks pages for positions up to {end}"));
            }
            let wanted = match row.output {
                RowOutputKind::None => tokens.end..tokens.end,
                RowOutputKind::Sample | RowOutputKind::LastLogits => tokens.end - 1..tokens.end,
                RowOutputKind::AllLogits => tokens.clone(),
            };
            if tokens.is_empty() {
                return fail(format!("the row of slot {slot} has no tokens"));
            }
            let first_logit = self.logit_tokens.len();
            self.logit_tokens.extend(wanted);
            self.positions.extend(position..end);
            self.publishes |= row.publish_kv;
            self.rows.push(BatchRow { slot, position, tokens, logits: first_logit..self.logit_tokens.len() });
        }
        if self.tokens.len() > limits.max_step_tokens {
            return fail(format!("{} tokens, at most {} are allowed", self.tokens.len(), limits.max_step_tokens));
        }
        Ok(())
    }
}
