//! One prompt that holds a slot and pages.

use std::sync::Arc;
use std::time::Instant;

use kv::SequencePages;
use types::{SlotId, TicketId};

use super::{PrefillRequest, PrefillStep};
use crate::mask::MaskPromise;
use crate::plan::{PageDelta, RowOutputKind, RowTokens, SlotBinding, StepPlan, StepRow};
use crate::sequence::SequenceSpec;

/// What is still to be done for a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// Its first token is not known yet.
    Computing,
    /// Its first token is known, its transfer has not ended.
    Sending,
    /// Over; pages may be pinned still.
    Ended,
}

/// Who reads a prompt's pages besides the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Transfer {
    /// Nobody: nothing has been published.
    Closed,
    /// The transport, since the first chunk was planned.
    Open,
}

/// A prompt that has begun.
#[derive(Debug)]
pub(super) struct Prompt {
    pub(super) ticket: TicketId,
    pub(super) slot: SlotId,
    pub(super) spec: SequenceSpec,
    pub(super) deadline: Instant,
    pub(super) progress: Progress,
    pub(super) transfer: Transfer,
    pub(super) steps_in_flight: u32,
    pages: SequencePages,
    /// Positions planned so far.
    planned: u32,
    publish_kv: bool,
}

impl Prompt {
    pub(super) fn new(request: PrefillRequest, slot: SlotId, pages: SequencePages, max_context_tokens: u32) -> Self {
        let PrefillRequest { ticket, sequence, deadline } = request;
        // Nothing is sent for a sequence that ends with its first token, if that is known beforehand.
        let publish_kv = !sequence.is_last_index(sequence.next_index(), max_context_tokens);
        Self {
            ticket,
            slot,
            spec: sequence,
            deadline,
            progress: Progress::Computing,
            transfer: Transfer::Closed,
            steps_in_flight: 0,
            pages,
            planned: 0,
            publish_kv,
        }
    }

    pub(super) fn has_chunks_left(&self) -> bool {
        self.progress == Progress::Computing && self.tokens_left() > 0
    }

    pub(super) fn tokens_left(&self) -> u32 {
        self.spec.context_tokens() - self.planned
    }

    /// Whether the steps that are complete have computed the whole context.
    pub(super) fn is_computed(&self) -> bool {
        self.tokens_left() == 0 && self.steps_in_flight == 0
    }

    /// Whether a plan has bound the slot.
    pub(super) fn is_bound(&self) -> bool {
        self.planned > 0
    }

    /// Whether somebody may still read the pages, or will.
    pub(super) fn is_pinned(&self) -> bool {
        self.progress != Progress::Ended || self.transfer == Transfer::Open || self.steps_in_flight > 0
    }

    /// Completes `plan` with the next chunk's row, which exists.
    pub(super) fn next_chunk(&mut self, mut plan: StepPlan, chunk_tokens: u32) -> PrefillStep {
        let context_tokens = self.spec.context_tokens();
        let positions = self.planned..self.planned + chunk_tokens.min(self.tokens_left());
        let last = positions.end == context_tokens;
        if !self.is_bound() {
            plan.bind.push(SlotBinding {
                slot: self.slot,
                sampling: self.spec.sampling.clone(),
                prompt: self.spec.prompt.clone(),
                generated: self.spec.generated.clone(),
            });
        }
        self.pages
            .prepare(positions.clone())
            .expect("the prompt set aside the pages of its longest chunk when it began");
        plan.pages.extend(self.pages.take_deltas().map(|delta| PageDelta {
            slot: self.slot,
            group: delta.group,
            first_page: delta.first_page,
            append: delta.append,
        }));
        let mask = (last && self.spec.constraint.is_some()).then(MaskPromise::new);
        plan.rows.push(StepRow {
            slot: self.slot,
            position: positions.start,
            tokens: RowTokens::Known(self.spec.context(positions.clone())),
            output: if last { RowOutputKind::Sample } else { RowOutputKind::None },
            publish_kv: self.publish_kv,
            mask: mask.as_ref().map(|promise| Arc::clone(promise.pending())),
        });
        if self.publish_kv {
            self.transfer = Transfer::Open;
        }
        self.planned = positions.end;
        self.steps_in_flight += 1;
        let tables = self.pages.tables();
        PrefillStep { ticket: self.ticket, plan, positions, last, publish_kv: self.publish_kv, tables, mask }
    }
}
