//! The decode worker's scheduler: tickets, their pages, and continuous batching.
//!
//! Events are method calls; effects are [`DecodeAction`]s appended to `out`. A sequence is admitted by [`DecodeScheduler::reserve`], receives
//! its context slice by slice, joins the batch on commit, and ends exactly once, with one [`DecodeAction::Ended`].
//!
//! Each attention group (`DpGroup`) has slots and pages of its own, and a sequence stays in the one that took it in. When full-attention
//! pages of a group run out its youngest sequence gives way. Its oldest can always grow to the end: one sequence fits in the
//! pool by configuration, everything younger gives way to it, and reservations that hold pages either commit (and are younger) or expire.

mod batch;
mod config;
mod group;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Instant;

use kv::{KvSlice, NoPages, PageShape, PageTables, PoolCounts, SequenceReserve};
use types::{Classify, DpGroup, ErrorClass, KvLayout, PageGroup, PeerId, SampledToken, SlotGroups, SlotId, TicketId};

pub use config::DecodeConfig;

use crate::config::InvalidConfig;
use crate::in_flight::StepsInFlight;
use crate::mask::MaskPromise;
use crate::numbers::NumberWatch;
use crate::recent::RecentTickets;
use crate::sequence::SequenceSpec;
use crate::ticket::{AbortReason, Fence, Gone, Outcome, Phase, Taken, Ticket, TicketError};

use batch::Sequence;
use group::Group;

/// What the caller must carry out.
#[derive(Debug, Clone, PartialEq)]
pub enum DecodeAction {
    /// Shut this ticket's writer out of its pages, then call [`DecodeScheduler::fenced`]: until then they are in quarantine.
    Fence {
        /// Whose writer.
        ticket: TicketId,
    },
    /// Deliver a token. For each ticket the indices are consecutive from the spec's `generated.len()`; the first is prefill's.
    Token {
        /// Whose.
        ticket: TicketId,
        /// Output index.
        index: u32,
        /// The token.
        token: SampledToken,
    },
    /// Settle the promise with the mask for the output token with index `index`, once all tokens before it are known. A step in flight waits
    /// for it.
    Mask {
        /// Whose.
        ticket: TicketId,
        /// Output index.
        index: u32,
        /// To be settled.
        promise: MaskPromise,
    },
    /// The ticket is over; exactly one for each reservation, and nothing after it but a `Fence`.
    Ended {
        /// Which.
        ticket: TicketId,
        /// How.
        outcome: Outcome,
    },
}

/// What a router asks for.
#[derive(Debug, Clone)]
pub struct ReserveRequest {
    /// The ticket's name, drawn by the router, used once.
    pub ticket: TicketId,
    /// The prefill worker, in its present life, that will send the context.
    pub prefill: PeerId,
    /// What to compute.
    pub sequence: SequenceSpec,
}

/// Slot and pages are set aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reservation {
    /// The ticket.
    pub ticket: TicketId,
    /// Whose slot and pages they are: the context lands on this group's ranks.
    pub group: DpGroup,
    /// Tokens that must land: prompt and generated so far.
    pub context_tokens: u32,
    /// When the ticket expires unless it is renewed or committed.
    pub deadline: Instant,
}

/// Why a reservation was refused. Nothing was taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Every slot is taken.
    #[error("all {max_sequences} slots are taken")]
    NoSlot {
        /// Slots there are.
        max_sequences: u32,
    },
    /// Too few pages are free now, in the attention group with the most room.
    #[error(transparent)]
    NoPages(#[from] NoPages),
    /// Pages are free, but a sequence of the batch waits for more of them than there are.
    #[error("running sequences wait for pages")]
    GrowthFirst,
    /// The worker takes no new work.
    #[error("worker is draining")]
    Draining,
    /// Prompt and generated tokens leave no room for another.
    #[error("sequence has {context_tokens} tokens, at most {} fit before the next one", max_context_tokens - 1)]
    TooLong {
        /// Tokens of the context.
        context_tokens: u32,
        /// The limit.
        max_context_tokens: u32,
    },
    /// The prompt has no tokens.
    #[error("prompt is empty")]
    EmptyPrompt,
    /// A ticket id is used once.
    #[error("ticket {ticket} is in phase {phase:?} already")]
    TicketUsed {
        /// The ticket.
        ticket: TicketId,
        /// Its phase.
        phase: Phase,
    },
}

impl Classify for Refusal {
    fn class(&self) -> ErrorClass {
        match self {
            Self::NoSlot { .. } | Self::NoPages(_) | Self::GrowthFirst => ErrorClass::Overloaded,
            Self::Draining => ErrorClass::Retryable,
            Self::TooLong { .. } | Self::EmptyPrompt | Self::TicketUsed { .. } => ErrorClass::Caller,
        }
    }
}

/// A picture of a scheduler, for load reports and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DecodeCounts {
    /// Slots there are.
    pub slots: u32,
    /// Tickets without a writer yet.
    pub reserved: u32,
    /// Tickets being written to.
    pub landing: u32,
    /// Sequences that the next plan takes in.
    pub committed: u32,
    /// Sequences in the batch.
    pub running: u32,
    /// Full-attention pages of all attention groups.
    pub full: PoolCounts,
    /// Window pages of all attention groups.
    pub window: PoolCounts,
    /// Steps completed since the start.
    pub steps: u64,
    /// Sequences that gave way since the start.
    pub preemptions: u64,
}

/// What is remembered of a ticket that has ended.
#[derive(Debug)]
struct EndedTicket {
    prefill: PeerId,
    outcome: Outcome,
}

/// The decode worker's scheduler. See the module.
#[derive(Debug)]
pub struct DecodeScheduler {
    config: DecodeConfig,
    layout: KvLayout,
    shape: PageShape,
    slots: SlotGroups,
    /// By number.
    groups: Vec<Group>,
    sequences: BTreeMap<TicketId, Sequence>,
    recent: RecentTickets<EndedTicket>,
    in_flight: StepsInFlight,
    numbers: NumberWatch,
    /// Slots that the next plan ends.
    unbind: Vec<SlotId>,
    draining: bool,
    preemptions: u64,
}

impl DecodeScheduler {
    /// A scheduler with all slots and pages free. `layout` is this worker's.
    ///
    /// # Errors
    /// [`InvalidConfig`] when a sequence of the longest context could not run to its end.
    pub fn new(config: DecodeConfig, layout: KvLayout) -> Result<Self, InvalidConfig> {
        let shape = PageShape::of(&layout);
        let slots = config.validate(shape)?;
        let group = |group| Group::new(slots.slots(group), config.full_pages, config.window_pages);
        Ok(Self {
            layout,
            shape,
            slots,
            groups: slots.groups().map(group).collect(),
            sequences: BTreeMap::new(),
            recent: RecentTickets::new(config.remembered_tickets as usize),
            in_flight: StepsInFlight::new(1 + usize::from(config.lookahead)),
            numbers: NumberWatch::default(),
            unbind: Vec::new(),
            draining: false,
            preemptions: 0,
            config,
        })
    }

    /// Sets a slot and pages for the context and some growth aside, in the attention group with the most room that can take it in.
    ///
    /// # Errors
    /// [`Refusal`]; nothing was taken.
    pub fn reserve(&mut self, now: Instant, request: ReserveRequest) -> Result<Reservation, Refusal> {
        let ReserveRequest { ticket, prefill, sequence } = request;
        if let Some(phase) = self.phase(ticket) {
            return Err(Refusal::TicketUsed { ticket, phase });
        }
        if self.draining {
            return Err(Refusal::Draining);
        }
        let (context_tokens, max_context_tokens) = (sequence.context_tokens(), self.config.max_context_tokens);
        if sequence.prompt.is_empty() {
            return Err(Refusal::EmptyPrompt);
        }
        if context_tokens >= max_context_tokens {
            return Err(Refusal::TooLong { context_tokens, max_context_tokens });
        }
        let (slot, reserve) = self.place(&sequence)?;
        let deadline = now + self.config.ticket_ttl;
        let ticket_state = Ticket::new(ticket, prefill, deadline, reserve);
        self.sequences.insert(ticket, Sequence::new(ticket_state, slot, sequence));
        Ok(Reservation { ticket, group: self.slots.of(slot), context_tokens, deadline })
    }

    /// Tries the groups by room, the first of equals first; the refusal is that of the one with the most.
    fn place(&mut self, sequence: &SequenceSpec) -> Result<(SlotId, SequenceReserve), Refusal> {
        let demand = self.config.demand(self.shape, sequence);
        let mut by_room: Vec<&mut Group> = self.groups.iter_mut().collect();
        by_room.sort_by_key(|group| Reverse(group.room()));
        let mut refusal = None;
        for group in by_room {
            match group.admit(self.shape, demand, self.config.max_sequences) {
                Ok(taken) => return Ok(taken),
                Err(refused) => refusal = refusal.or(Some(refused)),
            }
        }
        Err(refusal.expect("there is a group, and it refused"))
    }

    /// The owner still wants the ticket: its time to commit starts anew. Returns the new deadline.
    ///
    /// # Errors
    /// [`Gone`] when the ticket no longer waits for a commit.
    pub fn renew(&mut self, now: Instant, ticket: TicketId) -> Result<Instant, Gone> {
        let deadline = now + self.config.ticket_ttl;
        match self.sequences.get_mut(&ticket).filter(|sequence| sequence.ticket.deadline().is_some()) {
            Some(sequence) => {
                sequence.ticket.set_deadline(deadline);
                Ok(deadline)
            }
            None => Err(self.gone(ticket)),
        }
    }

    /// `from`, whose layout is `sender`, is about to write: from now on the pages of the context are its, and the answer says which they
    /// are. Must precede the first write. Idempotent while the ticket is landing.
    ///
    /// # Errors
    /// [`TicketError::Gone`] or [`TicketError::Land`]; then nothing may be written.
    pub fn begin_landing(
        &mut self,
        ticket: TicketId,
        from: &PeerId,
        sender: &KvLayout,
    ) -> Result<PageTables, TicketError> {
        let Some(sequence) = self.sequences.get_mut(&ticket) else { return Err(self.gone(ticket).into()) };
        let context_tokens = sequence.spec.context_tokens();
        sequence.ticket.begin_landing(from, sender, &self.layout, context_tokens)
    }

    /// A slice's bytes are in their page on its rank. Returns how many slices are still missing.
    ///
    /// # Errors
    /// [`TicketError`]; the ticket is unchanged. A slice that is not expected says that the sender is confused: cancel the ticket with
    /// [`AbortReason::TransferFailed`].
    pub fn slice_arrived(&mut self, ticket: TicketId, from: &PeerId, slice: &KvSlice) -> Result<u32, TicketError> {
        let Some(sequence) = self.sequences.get_mut(&ticket) else { return Err(self.gone(ticket).into()) };
        sequence.ticket.arrive(from, slice)
    }

    /// The sender has sent everything and sampled `first`, the token with output index `generated.len()`. The sequence joins the batch,
    /// or ends at once when `first` ends it. Idempotent: a repeated commit is answered [`Taken::Again`], also after the end.
    ///
    /// The caller must have closed the ticket to its sender's writes.
    ///
    /// # Errors
    /// [`TicketError::Incomplete`] names a slice that is missing; the ticket goes on landing, and the commit may be tried again.
    pub fn commit(
        &mut self,
        ticket: TicketId,
        from: &PeerId,
        first: SampledToken,
        out: &mut Vec<DecodeAction>,
    ) -> Result<Taken, TicketError> {
        let Some(sequence) = self.sequences.get_mut(&ticket) else { return self.commit_after_end(ticket, from) };
        let taken = sequence.ticket.commit(from)?;
        if taken == Taken::First {
            let slot = sequence.slot;
            self.group_mut(slot).batch.push(ticket);
            self.deliver(ticket, first, out);
        }
        Ok(taken)
    }

    /// Ends a ticket in whatever phase it is, and says which that was. Its pages are free again, or in quarantine until the writer is
    /// fenced, or held until the steps in flight are complete.
    ///
    /// # Errors
    /// [`Gone`] when the ticket is unknown or has ended already.
    pub fn cancel(
        &mut self,
        ticket: TicketId,
        reason: AbortReason,
        out: &mut Vec<DecodeAction>,
    ) -> Result<Phase, Gone> {
        self.end(ticket, Outcome::Aborted(reason), out).ok_or_else(|| self.gone(ticket))
    }

    /// A prefill worker is gone in this life: ends every ticket that waits for it. Sequences that it has committed go on.
    pub fn peer_lost(&mut self, peer: &PeerId, out: &mut Vec<DecodeAction>) {
        self.end_where(|sequence| sequence.ticket.waits_for(peer), AbortReason::PeerLost, out);
    }

    /// Ends every ticket whose deadline has passed. To be called on a timer of its own, not only when there is work to do.
    pub fn expire(&mut self, now: Instant, out: &mut Vec<DecodeAction>) {
        let late = |sequence: &Sequence| sequence.ticket.deadline().is_some_and(|deadline| deadline <= now);
        self.end_where(late, AbortReason::Expired, out);
    }

    /// When [`Self::expire`] has something to do next.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.sequences.values().filter_map(|sequence| sequence.ticket.deadline()).min()
    }

    /// The transport warrants that no writer of the ticket, on no rank and no connection, can write any more; asked by
    /// [`DecodeAction::Fence`] or of its own accord. Frees the ticket's quarantined pages. A ticket that still lacks
    /// slices ends, since nobody can complete it. Idempotent.
    pub fn fenced(&mut self, ticket: TicketId, out: &mut Vec<DecodeAction>) {
        let can_complete = self.sequences.get_mut(&ticket).is_none_or(|sequence| sequence.ticket.writer_fenced());
        if !can_complete {
            self.end(ticket, Outcome::Aborted(AbortReason::PeerLost), out);
        }
        self.free_quarantine(ticket);
    }

    /// Takes no new reservations; those made go on.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Whether nothing is reserved, running, in quarantine or in flight.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty() && self.groups.iter().all(Group::is_idle)
    }

    /// Where a ticket is in its life, if it is known.
    #[must_use]
    pub fn phase(&self, ticket: TicketId) -> Option<Phase> {
        match self.sequences.get(&ticket) {
            Some(sequence) => Some(sequence.ticket.phase()),
            None => self.recent.get(ticket).map(|ended| Phase::Ended(ended.outcome)),
        }
    }

    /// Tickets by phase, pages by state.
    #[must_use]
    pub fn counts(&self) -> DecodeCounts {
        let pages = |of| self.pool_counts().filter(|(_, group, _)| *group == of).map(|(_, _, counts)| counts).sum();
        let in_phase = |phase| self.sequences.values().filter(|s| s.ticket.phase() == phase).count() as u32;
        DecodeCounts {
            slots: self.config.max_sequences,
            reserved: in_phase(Phase::Reserved),
            landing: in_phase(Phase::Landing),
            committed: in_phase(Phase::Committed),
            running: in_phase(Phase::Running),
            full: pages(PageGroup::Full),
            window: pages(PageGroup::Window),
            steps: self.in_flight.completed(),
            preemptions: self.preemptions,
        }
    }

    /// Pages by state, for each attention group and page group.
    pub fn pool_counts(&self) -> impl Iterator<Item = (DpGroup, PageGroup, PoolCounts)> + '_ {
        self.slots
            .groups()
            .zip(&self.groups)
            .flat_map(|(number, group)| PageGroup::ALL.map(|pages| (number, pages, group.pools.group(pages).counts())))
    }

    fn group_mut(&mut self, slot: SlotId) -> &mut Group {
        &mut self.groups[self.slots.of(slot).0 as usize]
    }

    /// The writer of this ticket can write no more. A ticket's pages are all in one group; which one is forgotten with its sequence.
    fn free_quarantine(&self, ticket: TicketId) {
        for group in &self.groups {
            group.pools.fence(ticket);
        }
    }

    fn gone(&self, ticket: TicketId) -> Gone {
        Gone { ticket, phase: self.phase(ticket) }
    }

    /// A commit that comes again after a short sequence has ended is still a repetition; after an abort nothing was committed.
    fn commit_after_end(&self, ticket: TicketId, from: &PeerId) -> Result<Taken, TicketError> {
        match self.recent.get(ticket) {
            Some(EndedTicket { prefill, outcome: Outcome::Finished(_) | Outcome::Preempted }) if prefill == from => {
                Ok(Taken::Again)
            }
            _ => Err(self.gone(ticket).into()),
        }
    }

    fn end_where(&mut self, which: impl Fn(&Sequence) -> bool, reason: AbortReason, out: &mut Vec<DecodeAction>) {
        let chosen: Vec<TicketId> =
            self.sequences.iter().filter(|(_, sequence)| which(sequence)).map(|(ticket, _)| *ticket).collect();
        for ticket in chosen {
            self.end(ticket, Outcome::Aborted(reason), out);
        }
    }

    /// The one way out of the scheduler. Returns the phase in which the end took effect; `None` when the ticket is not here.
    fn end(&mut self, ticket: TicketId, outcome: Outcome, out: &mut Vec<DecodeAction>) -> Option<Phase> {
        let mut sequence = self.sequences.remove(&ticket)?;
        let released = sequence.ticket.end(outcome);
        let group = &mut self.groups[self.slots.of(sequence.slot).0 as usize];
        group.leave(ticket, sequence.slot);
        if released.phase == Phase::Running {
            self.unbind.push(sequence.slot);
        }
        if let (Some(pages), Some(step)) = (released.pages, sequence.last_step)
            && self.in_flight.contains(step)
        {
            group.retired.hold_until(step, pages);
        }
        self.recent.insert(ticket, EndedTicket { prefill: sequence.ticket.prefill().clone(), outcome });
        out.push(DecodeAction::Ended { ticket, outcome });
        match released.fence {
            Fence::NotNeeded => {}
            Fence::Wanted => out.push(DecodeAction::Fence { ticket }),
            Fence::Done => self.free_quarantine(ticket),
        }
        Some(released.phase)
    }
}
