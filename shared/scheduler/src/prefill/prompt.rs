//! One prompt that holds a slot and pages.

use std::sync::Arc;
use std::time::Instant;

use kv::{Context, PrefixCache, SequencePages, Start};
use types::{SlotId, TicketId, TokenId};

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
    /// Prompt and generated tokens.
    context: Vec<TokenId>,
    pages: SequencePages,
    /// Positions that were cached.
    reused: u32,
    /// Positions planned so far, those that were cached counted in.
    planned: u32,
    /// Where the chunk ends that is planned and not complete.
    in_flight: Option<u32>,
    /// Page ends behind what is computed where others may want to go on, ascending.
    boundaries: Vec<u32>,
    publish_kv: bool,
}

impl Prompt {
    pub(super) fn new(request: PrefillRequest, slot: SlotId, start: Start, max_context_tokens: u32) -> Self {
        let Start { pages, reused_tokens, boundaries } = start;
        let PrefillRequest { ticket, sequence, deadline } = request;
        // Nothing is sent for a sequence that ends with its first token, if that is known beforehand.
        let publish_kv = !sequence.is_last_index(sequence.next_index(), max_context_tokens);
        Self {
            ticket,
            slot,
            context: sequence.context(),
            spec: sequence,
            deadline,
            progress: Progress::Computing,
            transfer: Transfer::Closed,
            pages,
            reused: reused_tokens,
            planned: reused_tokens,
            in_flight: None,
            boundaries,
            publish_kv,
        }
    }

    pub(super) fn has_chunks_left(&self) -> bool {
        self.progress == Progress::Computing && self.tokens_left() > 0
    }

    pub(super) fn tokens_left(&self) -> u32 {
        self.context.len() as u32 - self.planned
    }

    /// Whether the steps that are complete have computed the whole context.
    pub(super) fn is_computed(&self) -> bool {
        self.tokens_left() == 0 && self.in_flight.is_none()
    }

    /// Whether a plan has bound the slot.
    pub(super) fn is_bound(&self) -> bool {
        self.planned > self.reused
    }

    /// Prompt tokens that were cached.
    pub(super) fn cached_tokens(&self) -> u32 {
        self.reused.min(self.spec.prompt.len() as u32)
    }

    /// The chunk in flight is computed; yields where it ends.
    pub(super) fn chunk_done(&mut self) -> u32 {
        self.in_flight.take().expect("a step of this prompt was in flight")
    }

    /// Leaves what is computed, up to position `computed`, to prompts that begin alike. Also of a prompt that was given up: what is complete is
    /// right.
    pub(super) fn keep(&mut self, computed: u32, cache: &mut PrefixCache) {
        let goes_on = self.has_chunks_left();
        let prompt_tokens = self.spec.prompt.len() as u32;
        let context = Context { salt: &self.spec.cache_salt, tokens: &self.context, prompt_tokens };
        cache.keep(context, &mut self.pages, computed);
        let passed = self.boundaries.partition_point(|at| *at <= computed);
        for at in self.boundaries.drain(..passed) {
            cache.keep_boundary(context, &mut self.pages, at, goes_on);
        }
    }

    /// Whether somebody may still read the pages, or will.
    pub(super) fn is_pinned(&self) -> bool {
        self.progress != Progress::Ended || self.transfer == Transfer::Open || self.in_flight.is_some()
    }

    /// Completes `plan` with the next chunk's row, which exists.
    pub(super) fn next_chunk(&mut self, mut plan: StepPlan, chunk_tokens: u32) -> PrefillStep {
        let positions = self.planned..self.planned + chunk_tokens.min(self.tokens_left());
        let last = positions.end == self.context.len() as u32;
        let is_first = !self.is_bound();
        if is_first {
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
        if last {
            self.pages.release_window_spare();
        }
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
            tokens: RowTokens::Known(self.context[positions.start as usize..positions.end as usize].to_vec()),
            output: if last { RowOutputKind::Sample } else { RowOutputKind::None },
            publish_kv: self.publish_kv,
            mask: mask.as_ref().map(|promise| Arc::clone(promise.pending())),
        });
        if self.publish_kv {
            self.transfer = Transfer::Open;
        }
        self.planned = positions.end;
        self.in_flight = Some(positions.end);
        let cached = if is_first { 0..self.reused } else { 0..0 };
        let (ticket, publish_kv, tables) = (self.ticket, self.publish_kv, self.pages.tables());
        PrefillStep { ticket, plan, cached, positions, last, publish_kv, tables, mask }
    }
}
