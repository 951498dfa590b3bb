//! The step loop's state: scheduler, engine, transport and streams, brought together in one synchronous turn.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use engine::group::{EngineGroup, KvWrite};
use kv::{KvSlice, PageTables, SliceError};
use scheduler::ticket::TicketError;
use scheduler::{
    AbortReason, DecodeAction, DecodeScheduler, MaskPromise, Outcome, PendingMask, Refusal, ReserveRequest,
};
use tokio::sync::oneshot;
use transfer::{Arrival, ArrivalEvent, CommitReply, EndCause, FirstToken, ReceiveTransport, Revoked};
use types::{DpGroup, Finished, KvLayout, Load, PeerId, SampledToken, TicketId, Usage};
use worker::status::pool_load;
use worker::{Clock, LoadReport, MaskThreads, Next, Opening, Status, StepLoopFailure, Turn, WorkerMetrics};

use crate::error::DecodeError;
use crate::flight::{End, FlightSender, NotSent};

/// What others say to the step loop.
pub enum Message {
    /// A router wants to reserve.
    Reserve(Box<Reserve>),
    /// Something arrived for a ticket.
    Arrival(Arrival),
}

/// A reservation wanted.
pub struct Reserve {
    pub(crate) request: ReserveRequest,
    pub(crate) events: FlightSender,
    /// Is told which attention group has taken the sequence in.
    pub(crate) reply: oneshot::Sender<Result<DpGroup, DecodeError>>,
}

/// One reservation's stream, and what is told about its sequence at the end.
struct Flight {
    events: FlightSender,
    prefill: PeerId,
    prompt_tokens: u32,
    /// Index of prefill's token, which it streams itself.
    first_index: u32,
    output_tokens: u32,
    /// Whose ranks hold its pages.
    group: DpGroup,
    /// Where parts go, once the sender has begun.
    tables: Option<PageTables>,
    kv_bytes: u64,
    first_part_at: Option<Instant>,
    /// More than the scheduler knows of why it will end.
    failure: Option<DecodeError>,
    is_constrained: bool,
    /// The last mask that was promised.
    mask: Option<Arc<PendingMask>>,
}

/// Parts whose bytes wait to be written, all in one go for each rank.
#[derive(Default)]
struct Staged {
    writes: Vec<Vec<KvWrite>>,
    slices: Vec<(TicketId, PeerId, KvSlice)>,
}

/// See the module.
pub struct DecodeState {
    scheduler: DecodeScheduler,
    engine: Arc<EngineGroup>,
    masks: MaskThreads,
    layout: KvLayout,
    /// Rows of the model's embedding: a token beyond them would end the engine, and all sequences with it.
    vocab_size: u32,
    transport: Arc<dyn ReceiveTransport>,
    flights: HashMap<TicketId, Flight>,
    staged: Staged,
    actions: Vec<DecodeAction>,
    /// When each step in flight was launched, oldest first.
    launched: VecDeque<Instant>,
    status: Arc<Status>,
    metrics: WorkerMetrics,
    preemptions_seen: u64,
}

impl DecodeState {
    /// Nothing is reserved. `vocab_size` is the number of rows of the model's embedding.
    #[must_use]
    pub fn new(
        scheduler: DecodeScheduler,
        engine: Arc<EngineGroup>,
        vocab_size: u32,
        masks: MaskThreads,
        transport: Arc<dyn ReceiveTransport>,
        status: Arc<Status>,
        metrics: WorkerMetrics,
    ) -> Self {
        let layout = engine.kv_layout().clone();
        let writes = (0..engine.ranks()).map(|_| Vec::new()).collect();
        let state = Self {
            scheduler,
            engine,
            masks,
            layout,
            vocab_size,
            transport,
            flights: HashMap::new(),
            staged: Staged { writes, slices: Vec::new() },
            actions: Vec::new(),
            launched: VecDeque::new(),
            status,
            metrics,
            preemptions_seen: 0,
        };
        state.report();
        state
    }

    fn on_message(&mut self, now: Instant, message: Message) -> Result<(), StepLoopFailure> {
        if let Message::Arrival(Arrival { ticket, event: ArrivalEvent::Part { slice, bytes } }) = message {
            self.stage(now, ticket, slice, bytes.into());
            return Ok(());
        }
        // Messages take effect in the order in which they came: a commit counts the parts before it, and no page changes its owner
        // under a part that has yet to be written.
        self.write_staged()?;
        match message {
            Message::Reserve(reserve) => self.on_reserve(now, *reserve),
            Message::Arrival(Arrival { ticket, event }) => match event {
                ArrivalEvent::Begin { sender, layout } => self.on_begin(ticket, &sender, &layout),
                ArrivalEvent::Part { .. } => unreachable!("parts were staged"),
                ArrivalEvent::Landed { slices, bytes } => self.on_landed(now, ticket, &slices, bytes),
                ArrivalEvent::Commit { first, reply } => self.on_commit(now, ticket, first, reply),
                ArrivalEvent::Ended(cause) => self.on_transfer_ended(ticket, cause),
            },
        }
        self.carry_out();
        Ok(())
    }

    fn on_reserve(&mut self, now: Instant, reserve: Reserve) {
        let Reserve { request, events, reply } = reserve;
        let (ticket, prefill) = (request.ticket, request.prefill.clone());
        let (prompt_tokens, next_index) = (request.sequence.prompt.len() as u32, request.sequence.next_index());
        let is_constrained = request.sequence.constraint.is_some();
        let opening = Opening::of(&request.sequence);
        let group = match self.take_in(now, request) {
            Ok(group) => group,
            Err(error) => {
                self.metrics.request_failed(error.reason());
                let _ = reply.send(Err(error)); // a caller that left needs no answer
                return;
            }
        };
        let flight = Flight {
            events,
            prefill,
            prompt_tokens,
            first_index: next_index,
            output_tokens: next_index,
            group,
            tables: None,
            kv_bytes: 0,
            first_part_at: None,
            failure: None,
            is_constrained,
            mask: None,
        };
        self.flights.insert(ticket, flight);
        // Compiled while the KV cache is on its way.
        if let Some(opening) = opening {
            self.masks.open(ticket, opening);
        }
        // If the caller left meanwhile, its stream is closed, and the sweep for abandoned streams finds it.
        let _ = reply.send(Ok(group));
    }

    /// Slot, pages and the transport's consent, or nothing.
    fn take_in(&mut self, now: Instant, request: ReserveRequest) -> Result<DpGroup, DecodeError> {
        if self.status.is_draining() {
            return Err(Refusal::Draining.into());
        }
        let (ticket, prefill) = (request.ticket, request.prefill.clone());
        let reservation = self.scheduler.reserve(now, request)?;
        if let Err(error) = self.transport.post(ticket, &prefill) {
            // Its `Ended` finds no flight: the answer says what happened.
            let _ = self.scheduler.cancel(ticket, AbortReason::Cancelled, &mut self.actions);
            return Err(error.into());
        }
        Ok(reservation.group)
    }

    fn on_begin(&mut self, ticket: TicketId, sender: &PeerId, layout: &KvLayout) {
        match self.scheduler.begin_landing(ticket, sender, layout) {
            Ok(tables) => {
                if let Some(flight) = self.flights.get_mut(&ticket) {
                    self.transport.land(ticket, flight.group, &tables);
                    flight.tables = Some(tables);
                }
            }
            Err(error) => self.fail_transfer(ticket, &error),
        }
    }

    /// Takes note of slices that the transport has written to their pages.
    fn on_landed(&mut self, now: Instant, ticket: TicketId, slices: &[KvSlice], bytes: usize) {
        let Some(flight) = self.flights.get_mut(&ticket) else { return };
        flight.first_part_at.get_or_insert(now);
        flight.kv_bytes += bytes as u64;
        let sender = flight.prefill.clone();
        slices.iter().for_each(|slice| self.slice_arrived(ticket, &sender, slice));
    }

    fn slice_arrived(&mut self, ticket: TicketId, sender: &PeerId, slice: &KvSlice) {
        match self.scheduler.slice_arrived(ticket, sender, slice) {
            // A repetition holds the same bytes: it carries the same checksum.
            Ok(_) | Err(TicketError::Slice(SliceError::Duplicate { .. }) | TicketError::Gone(_)) => {}
            Err(error) => self.fail_transfer(ticket, &error),
        }
    }

    /// Takes a part of a ticket that is landing; others come too late and are dropped, as their pages are quarantined or gone.
    fn stage(&mut self, now: Instant, ticket: TicketId, slice: KvSlice, bytes: Vec<u8>) {
        let Some(flight) = self.flights.get_mut(&ticket) else { return };
        let Some(page) = flight.tables.as_ref().and_then(|tables| tables.physical(&slice)) else {
            let prefill = flight.prefill.clone();
            let reason = format!("{slice:?} has no page");
            return self.fail(ticket, AbortReason::TransferFailed, DecodeError::WrongParts { prefill, reason });
        };
        flight.first_part_at.get_or_insert(now);
        flight.kv_bytes += bytes.len() as u64;
        let rank = self.layout.rank_of(flight.group, slice.head_start);
        self.staged.slices.push((ticket, flight.prefill.clone(), slice));
        self.staged.writes[rank as usize].push(KvWrite { slice, page, bytes });
    }

    fn write_staged(&mut self) -> Result<(), StepLoopFailure> {
        if self.staged.slices.is_empty() {
            return Ok(());
        }
        for (rank, writes) in self.staged.writes.iter_mut().enumerate() {
            if !writes.is_empty() {
                self.engine.import_kv(rank as u32, std::mem::take(writes))?;
            }
        }
        for (ticket, sender, slice) in std::mem::take(&mut self.staged.slices) {
            self.slice_arrived(ticket, &sender, &slice);
        }
        self.carry_out();
        Ok(())
    }

    fn on_commit(&mut self, now: Instant, ticket: TicketId, first: FirstToken, reply: CommitReply) {
        let Some(flight) = self.flights.get(&ticket) else {
            // Cancelled while the commit was on its way. It is terminal: nothing of the ticket follows.
            reply.reject(transfer::AbortReason::Cancelled);
            return self.scheduler.fenced(ticket, &mut self.actions);
        };
        let prefill = flight.prefill.clone();
        if first.index != flight.first_index || first.token >= self.vocab_size {
            let (FirstToken { index, token, .. }, next) = (first, flight.first_index);
            let reason =
                format!("token {token} with index {index} where {next} is next, of {} tokens", self.vocab_size);
            tracing::warn!(%ticket, %prefill, reason, "transfer is not as agreed");
            return self.reject_commit(ticket, reply, DecodeError::WrongParts { prefill, reason });
        }
        let token = SampledToken { token: first.token, logprob: first.logprob, top: Vec::new() };
        match self.scheduler.commit(ticket, &prefill, token, &mut self.actions) {
            Ok(_) => {
                reply.accept();
                if let Some(flight) = self.flights.get(&ticket) {
                    let landing = flight.first_part_at.map_or_else(Default::default, |first| now - first);
                    self.metrics.transfer_bytes.inc_by(flight.kv_bytes);
                    self.metrics.transfer_seconds.observe(landing.as_secs_f64());
                    flight.events.joined(flight.kv_bytes, landing.as_micros() as u64);
                }
            }
            Err(error) => {
                tracing::warn!(%ticket, %prefill, %error, "transfer is not as agreed");
                let reason = error.to_string();
                self.reject_commit(ticket, reply, DecodeError::WrongParts { prefill, reason });
            }
        }
    }

    /// A commit is terminal: whatever is wrong with it, nothing of the ticket follows.
    fn reject_commit(&mut self, ticket: TicketId, reply: CommitReply, failure: DecodeError) {
        reply.reject(transfer::AbortReason::WrongParts);
        self.fail(ticket, AbortReason::TransferFailed, failure);
        self.scheduler.fenced(ticket, &mut self.actions);
    }

    fn on_transfer_ended(&mut self, ticket: TicketId, cause: EndCause) {
        // Without a flight it was ended here, and this is only the fence.
        if let Some(flight) = self.flights.get(&ticket) {
            let reason = match cause {
                EndCause::Lost(_) => AbortReason::PeerLost,
                _ => AbortReason::TransferFailed,
            };
            let prefill = flight.prefill.clone();
            tracing::debug!(%ticket, %prefill, %cause, "transfer ended without a commit");
            self.fail(ticket, reason, DecodeError::Transfer { prefill, cause });
        }
        self.scheduler.fenced(ticket, &mut self.actions);
    }

    fn fail_transfer(&mut self, ticket: TicketId, error: &TicketError) {
        if let Some(flight) = self.flights.get(&ticket) {
            let prefill = flight.prefill.clone();
            tracing::warn!(%ticket, %prefill, %error, "transfer is not as agreed");
            let failure = DecodeError::WrongParts { prefill, reason: error.to_string() };
            self.fail(ticket, AbortReason::TransferFailed, failure);
        }
    }

    /// Ends a ticket for a reason of which more is known than the scheduler's enum says.
    fn fail(&mut self, ticket: TicketId, reason: AbortReason, failure: DecodeError) {
        if let Some(flight) = self.flights.get_mut(&ticket) {
            flight.failure.get_or_insert(failure);
        }
        // One that has ended already has nothing left to end.
        let _ = self.scheduler.cancel(ticket, reason, &mut self.actions);
    }

    fn cancel_abandoned(&mut self) {
        let abandoned = self.flights.iter().filter(|(_, flight)| flight.events.is_abandoned());
        let abandoned: Vec<TicketId> = abandoned.map(|(ticket, _)| *ticket).collect();
        for ticket in abandoned {
            self.fail(ticket, AbortReason::Cancelled, DecodeError::Cancelled);
        }
        self.carry_out();
    }

    /// Carries out the scheduler's actions, and those that come of it.
    fn carry_out(&mut self) {
        while !self.actions.is_empty() {
            for action in std::mem::take(&mut self.actions) {
                match action {
                    DecodeAction::Token { ticket, index, token } => self.on_token(ticket, index, token),
                    DecodeAction::Mask { ticket, index, promise } => self.on_mask(ticket, index, promise),
                    DecodeAction::Ended { ticket, outcome } => self.on_ended(ticket, outcome),
                    DecodeAction::Fence { ticket } => self.revoke(ticket, transfer::AbortReason::Cancelled),
                }
            }
        }
    }

    fn on_token(&mut self, ticket: TicketId, index: u32, token: SampledToken) {
        let Some(flight) = self.flights.get_mut(&ticket) else { return };
        flight.output_tokens = index + 1;
        if flight.is_constrained {
            self.masks.consume(ticket, token.token);
        }
        if index == flight.first_index {
            return;
        }
        if let Err(NotSent::Behind { waiting }) = flight.events.token(index, token) {
            self.fail(ticket, AbortReason::Cancelled, DecodeError::SlowConsumer { waiting });
        }
    }

    fn on_mask(&mut self, ticket: TicketId, index: u32, promise: MaskPromise) {
        if let Some(flight) = self.flights.get_mut(&ticket) {
            flight.mask = Some(Arc::clone(promise.pending()));
        }
        self.masks.mask(ticket, index, promise);
    }

    fn on_ended(&mut self, ticket: TicketId, outcome: Outcome) {
        if let Outcome::Aborted(reason) = outcome {
            let reason = match reason {
                AbortReason::Cancelled => transfer::AbortReason::Cancelled,
                AbortReason::Expired => transfer::AbortReason::Expired,
                AbortReason::PeerLost | AbortReason::TransferFailed => transfer::AbortReason::WrongParts,
                AbortReason::ConstraintFailed | AbortReason::NotANumber => transfer::AbortReason::Cancelled,
            };
            self.revoke(ticket, reason);
        }
        let Some(flight) = self.flights.remove(&ticket) else { return };
        if flight.is_constrained {
            self.masks.close(ticket);
        }
        let end = match outcome {
            Outcome::Finished(reason) => {
                let Flight { prompt_tokens, output_tokens, .. } = flight;
                End::Finished(Finished { reason, usage: Usage { prompt_tokens, output_tokens, ..Usage::default() } })
            }
            Outcome::Preempted => End::Preempted,
            Outcome::Aborted(reason) => {
                let broken = flight.mask.as_deref().and_then(PendingMask::failure);
                let broken = broken.filter(|_| reason == AbortReason::ConstraintFailed);
                let failure = broken.map(|failure| DecodeError::Constraint(failure.clone())).or(flight.failure);
                let error = failure.unwrap_or_else(|| DecodeError::from_reason(reason, &flight.prefill));
                self.metrics.request_failed(error.reason());
                if let Some(cause) = error.failed_transfer() {
                    self.metrics.transfer_failed(cause);
                }
                End::Failed(error)
            }
        };
        flight.events.end(end);
    }

    /// Shuts the sender out. When that cannot be said at once, the ticket's terminal arrival says it later, or is in the inbox.
    fn revoke(&mut self, ticket: TicketId, reason: transfer::AbortReason) {
        match self.transport.revoke(ticket, reason) {
            Revoked::Now => self.scheduler.fenced(ticket, &mut self.actions),
            Revoked::Pending | Revoked::NotOpen => {}
        }
    }

    /// Launches what can be launched, and collects one step. Whether there was one.
    fn step(&mut self, clock: &dyn Clock) -> Result<bool, StepLoopFailure> {
        while let Some(plan) = self.scheduler.plan(&mut self.actions) {
            let tokens: usize = plan.rows.iter().map(|row| row.tokens.len()).sum();
            self.metrics.step_rows.observe(plan.rows.len() as f64);
            self.metrics.step_tokens.observe(tokens as f64);
            self.launched.push_back(clock.now());
            self.engine.launch(Arc::new(plan))?;
        }
        self.carry_out(); // sequences that gave way for lack of pages
        let Some(launched_at) = self.launched.pop_front() else {
            return Ok(false);
        };
        let output = self.engine.collect()?;
        self.scheduler.complete(output, &mut self.actions)?;
        self.metrics.steps.inc();
        self.metrics.step_seconds.observe((clock.now() - launched_at).as_secs_f64());
        self.carry_out();
        Ok(true)
    }

    fn report(&self) {
        let counts = self.scheduler.counts();
        let load = Load {
            waiting: counts.reserved + counts.landing,
            running: counts.committed + counts.running,
            pending_prompt_tokens: 0,
            pools: self.scheduler.pool_counts().map(|(group, pages, counts)| pool_load(group, pages, counts)).collect(),
            steps: counts.steps,
        };
        let step_due = load.running > 0;
        let idle = self.scheduler.is_idle() && self.flights.is_empty();
        self.status.set_report(LoadReport { load, step_due, idle });
    }
}

impl Turn for DecodeState {
    type Message = Message;

    fn turn(&mut self, clock: &dyn Clock, inbox: &mut VecDeque<Message>) -> Result<Next, StepLoopFailure> {
        let now = clock.now();
        if self.status.is_draining() {
            self.scheduler.drain();
        }
        for message in inbox.drain(..) {
            self.on_message(now, message)?;
        }
        self.write_staged()?;
        self.cancel_abandoned();
        self.scheduler.expire(now, &mut self.actions);
        self.carry_out();
        let has_stepped = self.step(clock)?;
        let preemptions = self.scheduler.counts().preemptions;
        self.metrics.preemptions.inc_by(preemptions - std::mem::replace(&mut self.preemptions_seen, preemptions));
        self.report();
        Ok(if has_stepped { Next::Again } else { Next::Wait })
    }
}

#[cfg(test)]
mod tests;
