//! The batch: which rows a step computes, and what its outputs mean.
//!
//! A row computes every known token that is not in the cache yet. That is one for plain decoding; a drafter above the scheduler makes it
//! several (`max_row_tokens` bounds them, since it decides how many window pages a sequence sets aside), and page tables allow the next row
//! to begin inside this one, when drafts were rejected.

use std::sync::Arc;

use kv::SequencePages;
use types::{SampledToken, SlotId, TicketId, TokenId};

use super::{DecodeAction, DecodeScheduler};
use crate::in_flight::StepMismatch;
use crate::mask::MaskPromise;
use crate::plan::{PageDelta, RowFailure, RowOutputKind, RowTokens, SlotBinding, StepOutput, StepPlan, StepRow};
use crate::sequence::SequenceSpec;
use crate::ticket::{AbortReason, Outcome, Taken, Ticket};

/// One admitted sequence.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) ticket: Ticket,
    pub(super) slot: SlotId,
    pub(super) spec: SequenceSpec,
    /// Output tokens known so far: those of earlier attempts, then prefill's, then the batch's.
    output: Vec<TokenId>,
    /// Positions that are in the cache once the steps in flight are complete.
    cached_tokens: u32,
    /// The last step that has a row of this sequence.
    pub(super) last_step: Option<u64>,
}

impl Sequence {
    pub(super) fn new(ticket: Ticket, slot: SlotId, spec: SequenceSpec) -> Self {
        let (output, cached_tokens) = (spec.generated.clone(), spec.context_tokens());
        Self { ticket, slot, spec, output, cached_tokens, last_step: None }
    }

    fn known_tokens(&self) -> u32 {
        (self.spec.prompt.len() + self.output.len()) as u32
    }

    /// Output index of the token that the next row samples.
    fn next_row_index(&self) -> u32 {
        self.cached_tokens + 1 - self.spec.prompt.len() as u32
    }

    /// Whether a row in flight is known to yield the last token, whatever it is: then no row may follow it.
    fn awaits_last_token(&self, max_context_tokens: u32) -> bool {
        self.cached_tokens == self.known_tokens()
            && self.spec.is_last_index(self.next_row_index() - 1, max_context_tokens)
    }

    /// What the next row computes. The token behind the last one in the cache is the host's if it has been read, else the device's.
    fn next_tokens(&self) -> RowTokens {
        let prompt_tokens = self.spec.prompt.len();
        match self.output.get(self.cached_tokens as usize - prompt_tokens..) {
            Some(unread @ [_, ..]) => RowTokens::Known(unread.to_vec()),
            _ => RowTokens::LastSampled,
        }
    }

    fn pages_mut(&mut self) -> &mut SequencePages {
        self.ticket.pages_mut().expect("members of the batch have landed pages until they are taken out of it")
    }

    /// Adds this sequence's row, and its binding if it is new, to a plan for which its pages are prepared.
    fn join(&mut self, plan: &mut StepPlan, out: &mut Vec<DecodeAction>) {
        let slot = self.slot;
        if self.ticket.run() == Taken::First {
            plan.bind.push(SlotBinding {
                slot,
                sampling: self.spec.sampling.clone(),
                prompt: self.spec.prompt.clone(),
                generated: self.output.clone(),
            });
        }
        let deltas = self.pages_mut().take_deltas();
        plan.pages.extend(deltas.map(|delta| PageDelta {
            slot,
            group: delta.group,
            first_page: delta.first_page,
            append: delta.append,
        }));
        let tokens = self.next_tokens();
        let position = self.cached_tokens;
        self.cached_tokens += tokens.len() as u32;
        self.last_step = Some(plan.step);
        let mask = self.spec.constraint.is_some().then(|| {
            let (promise, index) = (MaskPromise::new(), self.next_row_index() - 1);
            let pending = Arc::clone(promise.pending());
            out.push(DecodeAction::Mask { ticket: self.ticket.id(), index, promise });
            pending
        });
        plan.rows.push(StepRow { slot, position, tokens, output: RowOutputKind::Sample, publish_kv: false, mask });
    }
}

impl DecodeScheduler {
    /// The next step: one row for each sequence of the batch, group by group, the oldest of each first. `None` when
    /// there is nothing to compute, or when as many steps are in flight as may be. Sequences that gave way for lack of
    /// pages end with [`Outcome::Preempted`].
    pub fn plan(&mut self, out: &mut Vec<DecodeAction>) -> Option<StepPlan> {
        if self.in_flight.is_full() {
            return None;
        }
        let members: Vec<TicketId> = (0..self.groups.len()).flat_map(|group| self.prepare_rows(group, out)).collect();
        if members.is_empty() {
            return None;
        }
        let unbind = std::mem::take(&mut self.unbind);
        let mut plan = StepPlan { step: self.in_flight.next_step(), unbind, ..StepPlan::default() };
        let mut rows = Vec::with_capacity(members.len());
        for ticket in members {
            let sequence =
                self.sequences.get_mut(&ticket).expect("prepared sequences are here: only younger ones gave way");
            sequence.join(&mut plan, out);
            rows.push((sequence.slot, ticket));
        }
        self.in_flight.push(&plan, rows);
        Some(plan)
    }

    /// Gives every row of an attention group its pages, oldest sequence first; returns the sequences that have them.
    fn prepare_rows(&mut self, group_idx: usize, out: &mut Vec<DecodeAction>) -> Vec<TicketId> {
        let mut ready = Vec::with_capacity(self.groups[group_idx].batch.len());
        let mut member_idx = 0;
        self.groups[group_idx].growth_waits = false;
        while let Some(ticket) = self.groups[group_idx].batch.get(member_idx).copied() {
            let sequence = self.sequences.get_mut(&ticket).expect("the batch lists sequences that are here");
            if sequence.awaits_last_token(self.config.max_context_tokens) {
                member_idx += 1;
                continue;
            }
            let position = sequence.cached_tokens;
            let row = position..position + sequence.next_tokens().len() as u32;
            let group = &mut self.groups[group_idx];
            if sequence.pages_mut().prepare(row).is_ok() {
                ready.push(ticket);
                member_idx += 1;
            } else if !group.retired.is_empty() || group.batch.len() == 1 {
                // Pages are on their way back: with the step in flight, or, for a sequence alone, with reservations and quarantine,
                // which are bounded in time. Nobody need give way: this row waits.
                group.growth_waits = true;
                member_idx += 1;
            } else if let Some(youngest) = group.batch.last().copied() {
                self.preemptions += 1;
                self.end(youngest, Outcome::Preempted, out);
            }
        }
        ready
    }

    /// Takes in what the oldest step in flight yielded: a [`DecodeAction::Token`] for each row whose sequence is still here, and
    /// [`DecodeAction::Ended`] for those that it ends, also for want of a mask or of numbers.
    ///
    /// # Errors
    /// [`StepMismatch`] when the output is not that of the oldest step in flight, or when no sequence has logits that are numbers: the engine
    /// is broken.
    pub fn complete(&mut self, output: StepOutput, out: &mut Vec<DecodeAction>) -> Result<(), StepMismatch> {
        let step = output.step;
        let (mut broken, mut is_sound) = (0, false);
        for (ticket, row) in self.in_flight.pop(output)? {
            match (row.sampled, row.failure, self.sequences.get(&ticket)) {
                (Some(token), ..) => {
                    is_sound = true;
                    self.deliver(ticket, token, out);
                }
                // It has ended, and its mask was abandoned with it; or the step before ended it, and this one read what was broken.
                (None, _, None) => {}
                (None, Some(RowFailure::NotANumber), Some(_)) => {
                    broken += 1;
                    self.end(ticket, Outcome::Aborted(AbortReason::NotANumber), out);
                }
                (None, _, Some(sequence)) if sequence.spec.constraint.is_some() => {
                    self.end(ticket, Outcome::Aborted(AbortReason::ConstraintFailed), out);
                }
                (None, _, Some(_)) => return Err(StepMismatch::NoToken { step, slot: row.slot.0 }),
            }
        }
        self.groups.iter_mut().for_each(|group| group.retired.step_completed(step));
        if is_sound {
            self.numbers.sound_row();
            return Ok(());
        }
        self.numbers.broken_step(step, broken)
    }

    /// The next output token of a sequence; those of sequences that have ended are dropped.
    pub(super) fn deliver(&mut self, ticket: TicketId, token: SampledToken, out: &mut Vec<DecodeAction>) {
        let Some(sequence) = self.sequences.get_mut(&ticket) else { return };
        let index = sequence.output.len() as u32;
        let finish = sequence.spec.finish_reason(index, token.token, self.config.max_context_tokens);
        sequence.output.push(token.token);
        out.push(DecodeAction::Token { ticket, index, token });
        if let Some(reason) = finish {
            self.end(ticket, Outcome::Finished(reason), out);
        }
    }
}
