//! The prefill worker's scheduler: one prompt at a time, in chunks, first come first served.
//!
//! A prompt's pages are taken when it begins and are pinned until nobody can read them any more: until its steps are complete and its
//! transfer is terminal. While one prompt's transfer ends the next may compute, if slots and pages allow.
//!
//! A prompt that begins like an earlier one is computed from the last boundary on that is cached of it ([`PrefixCache`]); its transfer sends
//! all of it. What a step has computed is cached when the step is complete, so nothing of one that fails is.
//!
//! Events are method calls; effects are [`PrefillAction`]s appended to `out`. Each prompt ends with one [`PrefillAction::Ended`].

mod config;
mod port;
mod prompt;

use std::collections::VecDeque;
use std::time::Instant;

use kv::{Context, NoPages, PagePools, PageShape, PrefixCache, PrefixCounts, SequenceReserve, Start};
use types::{KvLayout, PageGroup, SlotId, TicketId};

pub use config::PrefillConfig;
pub use port::{
    PrefillAction, PrefillCounts, PrefillOutcome, PrefillRefusal, PrefillRequest, PrefillStep, PromptGone, TransferEnd,
};

use crate::config::InvalidConfig;
use crate::in_flight::{StepMismatch, StepsInFlight};
use crate::numbers::NumberWatch;
use crate::plan::{RowFailure, StepOutput, StepPlan};
use crate::recent::RecentTickets;
use crate::sequence::SequenceSpec;
use crate::ticket::AbortReason;

use prompt::{Progress, Prompt, Transfer};

/// A prompt that waits.
#[derive(Debug)]
struct Queued {
    request: PrefillRequest,
    /// Tokens of its context that were not cached when it came.
    new_tokens: u32,
}

/// The prefill worker's scheduler. See the module.
#[derive(Debug)]
pub struct PrefillScheduler {
    config: PrefillConfig,
    shape: PageShape,
    pools: PagePools,
    /// If pages of prompts are kept.
    cache: Option<PrefixCache>,
    /// Popped from the end; low numbers first.
    free_slots: Vec<SlotId>,
    queue: VecDeque<Queued>,
    /// Prompts that hold a slot and pages, in the order in which they began.
    prompts: Vec<Prompt>,
    recent: RecentTickets<PrefillOutcome>,
    in_flight: StepsInFlight,
    numbers: NumberWatch,
    /// Slots that the next plan ends.
    unbind: Vec<SlotId>,
    draining: bool,
}

impl PrefillScheduler {
    /// A scheduler with all slots and pages free. `layout` is this worker's.
    ///
    /// # Errors
    /// [`InvalidConfig`] when the longest prompt could never begin.
    pub fn new(config: PrefillConfig, layout: &KvLayout) -> Result<Self, InvalidConfig> {
        let shape = PageShape::of(layout);
        config.validate(shape)?;
        let pools = PagePools::new(config.full_pages, config.window_pages);
        Ok(Self {
            shape,
            cache: config.prefix_reuse.then(|| PrefixCache::new(shape, pools.clone())),
            pools,
            free_slots: (0..config.max_prompts).rev().map(SlotId).collect(),
            queue: VecDeque::new(),
            prompts: Vec::new(),
            recent: RecentTickets::new(config.remembered_tickets as usize),
            in_flight: StepsInFlight::new(1),
            numbers: NumberWatch::default(),
            unbind: Vec::new(),
            draining: false,
            config,
        })
    }

    /// Puts a prompt at the end of the queue.
    ///
    /// # Errors
    /// [`PrefillRefusal`]; nothing changes then.
    pub fn submit(&mut self, request: PrefillRequest) -> Result<(), PrefillRefusal> {
        let (ticket, sequence) = (request.ticket, &request.sequence);
        let (context_tokens, max_context_tokens) = (sequence.context_tokens(), self.config.max_context_tokens);
        if self.is_known(ticket) {
            return Err(PrefillRefusal::TicketUsed { ticket });
        }
        if self.draining {
            return Err(PrefillRefusal::Draining);
        }
        if sequence.prompt.is_empty() {
            return Err(PrefillRefusal::EmptyPrompt);
        }
        if context_tokens >= max_context_tokens {
            return Err(PrefillRefusal::TooLong { context_tokens, max_context_tokens });
        }
        if self.queue.len() as u32 >= self.config.max_queued {
            return Err(PrefillRefusal::QueueFull { waiting: self.queue.len() as u32 });
        }
        let cached = self.cache.as_ref().map_or(0, |cache| {
            let (salt, prompt_tokens) = (&request.sequence.cache_salt, request.sequence.prompt.len() as u32);
            cache.cached_tokens(Context { salt, tokens: &request.sequence.context(), prompt_tokens })
        });
        self.queue.push_back(Queued { request, new_tokens: context_tokens - cached });
        Ok(())
    }

    /// The next chunk: of the prompt being computed, else of the queue's head if a slot and pages are free for it. `None` when there is
    /// nothing to compute or no room, or while a step is in flight: an engine publishes the KV of a step while it computes it, so another
    /// that was launched behind it would only hold up its first token.
    pub fn plan(&mut self) -> Option<PrefillStep> {
        if self.in_flight.is_full() {
            return None;
        }
        let prompt_idx = match self.prompts.iter().position(Prompt::has_chunks_left) {
            Some(idx) => idx,
            None => self.begin_next()?,
        };
        let unbind = std::mem::take(&mut self.unbind);
        let plan = StepPlan { step: self.in_flight.next_step(), unbind, ..StepPlan::default() };
        let prompt = &mut self.prompts[prompt_idx];
        let step = prompt.next_chunk(plan, self.config.chunk_tokens);
        if step.last {
            // The engine takes this up with the plan after this one, when the prompt's last row is behind it.
            self.unbind.push(prompt.slot);
        }
        self.in_flight.push(&step.plan, vec![(prompt.slot, prompt.ticket)]);
        Some(step)
    }

    /// Gives the head of the queue a slot and pages; returns its place among the prompts. The head waits for room, nobody overtakes it.
    fn begin_next(&mut self) -> Option<usize> {
        let slot = self.free_slots.last().copied()?;
        let head = self.queue.pop_front()?;
        let Ok(start) = self.take_pages(&head.request.sequence) else {
            self.queue.push_front(head);
            return None;
        };
        self.free_slots.pop();
        self.prompts.push(Prompt::new(head.request, slot, start, self.config.max_context_tokens));
        Some(self.prompts.len() - 1)
    }

    /// Pages for a sequence: those that are cached of it, and room for the rest.
    fn take_pages(&mut self, sequence: &SequenceSpec) -> Result<Start, NoPages> {
        let demand = |tokens| self.config.demand(self.shape, tokens);
        if let Some(cache) = &mut self.cache {
            let prompt_tokens = sequence.prompt.len() as u32;
            let (salt, tokens) = (&sequence.cache_salt, &*sequence.context());
            return cache.begin(Context { salt, tokens, prompt_tokens }, demand);
        }
        let pages = SequenceReserve::take(&self.pools, self.shape, demand(sequence.context_tokens()))?.start();
        Ok(Start { pages, reused_tokens: 0, boundaries: Vec::new() })
    }

    /// Takes in what the step in flight yielded: a [`PrefillAction::FirstToken`] if it was a last chunk.
    ///
    /// # Errors
    /// [`StepMismatch`] when the output is not that of the step in flight, or when no prompt has logits that are numbers: the engine is
    /// broken.
    pub fn complete(&mut self, output: StepOutput, out: &mut Vec<PrefillAction>) -> Result<(), StepMismatch> {
        let step = output.step;
        for (ticket, row) in self.in_flight.pop(output)? {
            let Some(prompt) = self.prompts.iter_mut().find(|prompt| prompt.ticket == ticket) else { continue };
            let computed = prompt.chunk_done();
            if row.failure == Some(RowFailure::NotANumber) {
                // Something that it was computed from is damaged, and others may go on from that as well.
                if let Some(cache) = &mut self.cache {
                    cache.clear();
                }
                if prompt.progress == Progress::Computing {
                    self.end(ticket, PrefillOutcome::Aborted(AbortReason::NotANumber), out);
                }
                self.numbers.broken_step(step, 1)?;
                continue;
            }
            let samples = prompt.is_computed() && prompt.progress == Progress::Computing;
            if samples && row.sampled.is_none() && prompt.spec.constraint.is_none() {
                return Err(StepMismatch::NoToken { step, slot: row.slot.0 });
            }
            if let Some(cache) = &mut self.cache {
                prompt.keep(computed, cache);
            }
            if !samples {
                continue;
            }
            let Some(token) = row.sampled else {
                self.end(ticket, PrefillOutcome::Aborted(AbortReason::ConstraintFailed), out);
                continue;
            };
            self.numbers.sound_row();
            let index = prompt.spec.next_index();
            let finish = prompt.spec.finish_reason(index, token.token, self.config.max_context_tokens);
            prompt.progress = Progress::Sending;
            out.push(PrefillAction::FirstToken { ticket, index, token, cached_tokens: prompt.cached_tokens(), finish });
            if let Some(reason) = finish {
                self.end(ticket, PrefillOutcome::Finished(reason), out);
            }
        }
        self.release_unpinned();
        Ok(())
    }

    /// The transfer of a ticket is over: nothing reads its pages any more. Idempotent.
    ///
    /// # Errors
    /// [`PromptGone`] when the ticket holds no pages here.
    pub fn transfer_ended(
        &mut self,
        ticket: TicketId,
        end: TransferEnd,
        out: &mut Vec<PrefillAction>,
    ) -> Result<(), PromptGone> {
        let Some(prompt) = self.prompts.iter_mut().find(|prompt| prompt.ticket == ticket) else {
            return Err(self.gone(ticket));
        };
        prompt.transfer = Transfer::Closed;
        let outcome = match (end, prompt.progress) {
            (TransferEnd::Committed, Progress::Sending) => PrefillOutcome::Sent,
            // A commit before the first token is known can only be a confused transport's.
            _ => PrefillOutcome::Aborted(AbortReason::TransferFailed),
        };
        self.end(ticket, outcome, out);
        self.release_unpinned();
        Ok(())
    }

    /// Ends a prompt, queued, being computed or being sent.
    ///
    /// # Errors
    /// [`PromptGone`] when the ticket is unknown or has ended already.
    pub fn cancel(
        &mut self,
        ticket: TicketId,
        reason: AbortReason,
        out: &mut Vec<PrefillAction>,
    ) -> Result<(), PromptGone> {
        let ended = self.end(ticket, PrefillOutcome::Aborted(reason), out);
        self.release_unpinned();
        if ended { Ok(()) } else { Err(self.gone(ticket)) }
    }

    /// Ends every prompt whose deadline has passed, unless it is being sent: a transfer has a bound of its own.
    pub fn expire(&mut self, now: Instant, out: &mut Vec<PrefillAction>) {
        let computing = self.prompts.iter().filter(|prompt| prompt.progress == Progress::Computing);
        let waiting = self.queue.iter().map(|queued| (queued.request.ticket, queued.request.deadline));
        let late = waiting.chain(computing.map(|prompt| (prompt.ticket, prompt.deadline)));
        let late: Vec<TicketId> = late.filter(|(_, deadline)| *deadline <= now).map(|(ticket, _)| ticket).collect();
        for ticket in late {
            self.end(ticket, PrefillOutcome::Aborted(AbortReason::Expired), out);
        }
        self.release_unpinned();
    }

    /// When [`Self::expire`] has something to do next.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let computing = self.prompts.iter().filter(|prompt| prompt.progress == Progress::Computing);
        self.queue.iter().map(|queued| queued.request.deadline).chain(computing.map(|prompt| prompt.deadline)).min()
    }

    /// Takes no new prompts; those queued go on.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Whether nothing is queued, being computed, being sent or pinned.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.prompts.is_empty()
    }

    /// Prompts by phase, pages by state.
    #[must_use]
    pub fn counts(&self) -> PrefillCounts {
        let in_progress =
            |which: fn(&Progress) -> bool| self.prompts.iter().filter(|prompt| which(&prompt.progress)).count() as u32;
        let queued_tokens = self.queue.iter().map(|queued| queued.new_tokens);
        let left = self.prompts.iter().filter(|prompt| prompt.has_chunks_left()).map(Prompt::tokens_left);
        PrefillCounts {
            queued: self.queue.len() as u32,
            computing: in_progress(|progress| *progress == Progress::Computing),
            sending: in_progress(|progress| *progress == Progress::Sending),
            pinned: in_progress(|progress| *progress == Progress::Ended),
            pending_tokens: queued_tokens.chain(left).map(u64::from).sum(),
            full: self.pools.group(PageGroup::Full).counts(),
            window: self.pools.group(PageGroup::Window).counts(),
            steps: self.in_flight.completed(),
            reuse: self.cache.as_ref().map_or_else(PrefixCounts::default, PrefixCache::counts),
        }
    }

    fn is_known(&self, ticket: TicketId) -> bool {
        self.queue.iter().any(|queued| queued.request.ticket == ticket)
            || self.prompts.iter().any(|prompt| prompt.ticket == ticket)
            || self.recent.get(ticket).is_some()
    }

    fn gone(&self, ticket: TicketId) -> PromptGone {
        PromptGone { ticket, outcome: self.recent.get(ticket).copied() }
    }

    /// Ends a prompt that has not ended; tells whether there was one. Its pages stay until nobody reads them.
    fn end(&mut self, ticket: TicketId, outcome: PrefillOutcome, out: &mut Vec<PrefillAction>) -> bool {
        let running = self.prompts.iter_mut().find(|prompt| prompt.ticket == ticket);
        if let Some(prompt) = running {
            if prompt.progress == Progress::Ended {
                return false;
            }
            if prompt.has_chunks_left() && prompt.is_bound() {
                self.unbind.push(prompt.slot);
            }
            prompt.progress = Progress::Ended;
            out.push(PrefillAction::Ended { ticket, outcome });
            if prompt.transfer == Transfer::Open {
                out.push(PrefillAction::AbortTransfer { ticket });
            }
        } else if let Some(place) = self.queue.iter().position(|queued| queued.request.ticket == ticket) {
            self.queue.remove(place);
            out.push(PrefillAction::Ended { ticket, outcome });
        } else {
            return false;
        }
        self.recent.insert(ticket, outcome);
        true
    }

    /// Frees slots and pages of prompts that are over and that neither a step nor a transfer reads.
    fn release_unpinned(&mut self) {
        let (free_slots, prompts) = (&mut self.free_slots, &mut self.prompts);
        prompts.retain(|prompt| {
            let pinned = prompt.is_pinned();
            if !pinned {
                free_slots.push(prompt.slot);
            }
            pinned
        });
    }
}
