//! The step loop's state: scheduler, engine, transfers and streams, brought together in one synchronous turn.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use engine::KvReader;
use engine::group::EngineGroup;
use kv::{PageTables, PrefixCounts};
use scheduler::{
    AbortReason, PendingMask, PrefillAction, PrefillOutcome, PrefillRefusal, PrefillRequest, PrefillScheduler,
    PrefillStep, TransferEnd,
};
use tokio::sync::{mpsc, oneshot};
use transfer::{BatchTimes, FirstToken, Receipt, TransferError};
use types::{DpGroup, FinishReason, Finished, Load, PageGroup, PrefillEvent, SampledToken, TicketId, Usage};
use worker::status::pool_load;
use worker::{Clock, LoadReport, MaskThreads, Next, Opening, Status, StepLoopFailure, TailTimes, Turn, WorkerMetrics};

use crate::error::PrefillError;
use crate::export::{Export, Exporter, Span};
use crate::handoff::Handoff;

/// What others say to the step loop.
pub enum Message {
    /// A router hands a prompt in.
    Submit(Box<Submit>),
    /// The lane has room for the chunk that waits for it, or never will.
    Room {
        /// Whose chunk.
        ticket: TicketId,
        /// Whether.
        room: Result<(), TransferError>,
    },
    /// A transfer is over.
    TransferEnded {
        /// Which.
        ticket: TicketId,
        /// How.
        outcome: Result<Receipt, TransferError>,
    },
}

/// A prompt handed in.
pub struct Submit {
    pub(crate) request: PrefillRequest,
    /// `None` when nothing is to be sent.
    pub(crate) handoff: Option<Arc<Handoff>>,
    pub(crate) events: mpsc::Sender<Result<PrefillEvent, PrefillError>>,
    pub(crate) reply: oneshot::Sender<Result<(), PrefillError>>,
}

/// One prompt that has not ended.
struct Job {
    handoff: Option<Arc<Handoff>>,
    events: mpsc::Sender<Result<PrefillEvent, PrefillError>>,
    prompt_tokens: u32,
    submitted_at: Instant,
    /// When the first of its KV was sent from the cache, or else its first chunk launched: the end of its time in the queue.
    started_at: Option<Instant>,
    computed_at: Option<Instant>,
    /// What the decode worker acknowledged.
    receipt: Option<Receipt>,
    /// More than the scheduler knows of why it will end.
    failure: Option<PrefillError>,
    /// Output index of the token that it samples.
    next_index: u32,
    is_constrained: bool,
    /// The mask for the token that the prompt samples.
    mask: Option<Arc<PendingMask>>,
}

/// A chunk that is planned and not launched.
struct Pending {
    step: PrefillStep,
    tables: Arc<PageTables>,
    /// Positions that were cached and are still to be sent, each no more than a chunk has.
    cached: VecDeque<Range<u32>>,
    /// For the first of them, or the chunk itself.
    room: Room,
}

impl Pending {
    fn new(step: PrefillStep, chunk_tokens: u32, page_tokens: u32) -> Self {
        let piece = (chunk_tokens / page_tokens).max(1) * page_tokens;
        let end = if step.publish_kv { step.cached.end } else { 0 };
        let cached = (0..end).step_by(piece as usize).map(|start| start..end.min(start + piece)).collect();
        Self { tables: Arc::new(step.tables.clone()), step, cached, room: Room::Unasked }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Room {
    Unasked,
    Waiting,
    Taken,
}

/// A chunk in flight.
struct Launched {
    ticket: TicketId,
    at: Instant,
}

/// See the module.
pub struct PrefillState {
    scheduler: PrefillScheduler,
    engine: Arc<EngineGroup>,
    masks: MaskThreads,
    exporter: Arc<Exporter>,
    jobs: HashMap<TicketId, Job>,
    actions: Vec<PrefillAction>,
    pending: Option<Pending>,
    launched: Option<Launched>,
    chunk_tokens: u32,
    status: Arc<Status>,
    metrics: WorkerMetrics,
    /// As the metrics have it.
    reuse: PrefixCounts,
}

impl PrefillState {
    /// Nothing is queued. `exporter` is the engine's listener, `chunk_tokens` the scheduler's.
    #[must_use]
    pub fn new(
        scheduler: PrefillScheduler,
        engine: Arc<EngineGroup>,
        masks: MaskThreads,
        exporter: Arc<Exporter>,
        chunk_tokens: u32,
        status: Arc<Status>,
        metrics: WorkerMetrics,
    ) -> Self {
        let mut state = Self {
            scheduler,
            engine,
            masks,
            exporter,
            jobs: HashMap::new(),
            actions: Vec::new(),
            pending: None,
            launched: None,
            chunk_tokens,
            status,
            metrics,
            reuse: PrefixCounts::default(),
        };
        state.report();
        state
    }

    fn on_message(&mut self, now: Instant, message: Message) {
        match message {
            Message::Submit(submit) => self.on_submit(now, *submit),
            Message::Room { ticket, room } => self.on_room(ticket, room),
            Message::TransferEnded { ticket, outcome } => self.on_transfer_ended(ticket, outcome),
        }
        self.carry_out(now);
    }

    fn on_submit(&mut self, now: Instant, submit: Submit) {
        let Submit { request, handoff, events, reply } = submit;
        let (ticket, prompt_tokens) = (request.ticket, request.sequence.prompt.len() as u32);
        let next_index = request.sequence.next_index();
        let opening = Opening::of(&request.sequence);
        let submitted =
            if self.status.is_draining() { Err(PrefillRefusal::Draining) } else { self.scheduler.submit(request) };
        if let Err(refusal) = submitted {
            let error = PrefillError::from(refusal);
            self.metrics.request_failed(error.reason());
            let _ = reply.send(Err(error)); // a caller that left needs no answer
            return;
        }
        let job = Job {
            handoff,
            events,
            prompt_tokens,
            submitted_at: now,
            started_at: None,
            computed_at: None,
            receipt: None,
            failure: None,
            next_index,
            is_constrained: opening.is_some(),
            mask: None,
        };
        self.jobs.insert(ticket, job);
        // Compiled while the prompt waits and computes.
        if let Some(opening) = opening {
            self.masks.open(ticket, opening);
        }
        // If the caller left meanwhile, its stream is closed, and the sweep for abandoned streams finds it.
        let _ = reply.send(Ok(()));
    }

    fn on_room(&mut self, ticket: TicketId, room: Result<(), TransferError>) {
        if let Some(pending) = self.pending.as_mut().filter(|pending| pending.step.ticket == ticket) {
            pending.room = Room::Taken;
        }
        if let Err(error) = room {
            self.fail(ticket, error.into());
        }
    }

    fn on_transfer_ended(&mut self, ticket: TicketId, outcome: Result<Receipt, TransferError>) {
        let end = match outcome {
            Ok(receipt) => {
                if let Some(job) = self.jobs.get_mut(&ticket) {
                    job.receipt = Some(receipt);
                }
                TransferEnd::Committed
            }
            Err(error) => {
                // Of a prompt that has ended it is the answer to that, and no news.
                self.fail(ticket, error.into());
                TransferEnd::Aborted
            }
        };
        // A prompt that never held pages here is gone already: there is nothing to unpin.
        let _ = self.scheduler.transfer_ended(ticket, end, &mut self.actions);
    }

    /// Ends a prompt for a reason of which more is known than the scheduler's enum says.
    fn fail(&mut self, ticket: TicketId, failure: PrefillError) {
        let reason = match &failure {
            PrefillError::Transfer(TransferError::PeerLost { .. } | TransferError::Unreachable { .. }) => {
                AbortReason::PeerLost
            }
            PrefillError::Cancelled => AbortReason::Cancelled,
            _ => AbortReason::TransferFailed,
        };
        if let Some(job) = self.jobs.get_mut(&ticket) {
            job.failure.get_or_insert(failure);
        }
        // One that has ended already has nothing left to end.
        let _ = self.scheduler.cancel(ticket, reason, &mut self.actions);
    }

    /// Ends prompts whose reader has left, or whose transfer failed while they compute.
    fn cancel_hopeless(&mut self, now: Instant) {
        let hopeless = |job: &Job| {
            if job.events.is_closed() {
                return Some(PrefillError::Cancelled);
            }
            job.handoff.as_ref().filter(|_| job.receipt.is_none()).and_then(|handoff| handoff.failure())
        };
        let found: Vec<(TicketId, PrefillError)> =
            self.jobs.iter().filter_map(|(ticket, job)| Some((*ticket, hopeless(job)?))).collect();
        for (ticket, failure) in found {
            self.fail(ticket, failure);
        }
        self.carry_out(now);
    }

    fn carry_out(&mut self, now: Instant) {
        while !self.actions.is_empty() {
            for action in std::mem::take(&mut self.actions) {
                match action {
                    PrefillAction::FirstToken { ticket, index, token, cached_tokens, finish } => {
                        self.on_first_token(now, ticket, (index, token), cached_tokens, finish);
                    }
                    // `Ended` came before it and gave the transfer up; its task will say when it is over.
                    PrefillAction::AbortTransfer { .. } => {}
                    PrefillAction::Ended { ticket, outcome } => self.on_ended(now, ticket, outcome),
                }
            }
        }
    }

    fn on_first_token(
        &mut self,
        now: Instant,
        ticket: TicketId,
        (index, token): (u32, SampledToken),
        cached_tokens: u32,
        finish: Option<FinishReason>,
    ) {
        let Some(job) = self.jobs.get_mut(&ticket) else { return };
        job.computed_at = Some(now);
        let started_at = job.started_at.unwrap_or(job.submitted_at);
        self.metrics.first_token_seconds.observe((now - started_at).as_secs_f64());
        if let (Some(handoff), None) = (&job.handoff, finish) {
            handoff.commit(FirstToken { index, token: token.token, logprob: token.logprob });
        }
        job.send(Ok(PrefillEvent::FirstToken {
            index,
            token,
            cached_tokens,
            queue_us: (started_at - job.submitted_at).as_micros() as u64,
            compute_us: (now - started_at).as_micros() as u64,
        }));
        if let Some(reason) = finish {
            let (prompt_tokens, output_tokens) = (job.prompt_tokens, index + 1);
            let usage = Usage { prompt_tokens, cached_tokens, output_tokens, resumptions: 0 };
            job.send(Ok(PrefillEvent::Finished(Finished { reason, usage })));
        }
    }

    fn on_ended(&mut self, now: Instant, ticket: TicketId, outcome: PrefillOutcome) {
        let Some(job) = self.jobs.remove(&ticket) else { return };
        if job.is_constrained {
            self.masks.close(ticket);
        }
        match outcome {
            PrefillOutcome::Sent => {
                let kv_bytes = job.receipt.map_or(0, |receipt| receipt.kv_bytes);
                let since = |start: Option<Instant>| start.map_or_else(Default::default, |start| now - start);
                let transfer = since(job.handoff.as_ref().and_then(|handoff| handoff.first_part_at()));
                let tail = since(job.computed_at);
                let last_layer = job.handoff.as_ref().and_then(|handoff| handoff.last_layer_at());
                if let Some((last_layer, batches)) = last_layer.zip(job.receipt.and_then(|receipt| receipt.batches)) {
                    let BatchTimes { announced_at, landed_at } = batches;
                    self.metrics.transfer_tail.observe(TailTimes {
                        last_layer,
                        announced_at,
                        landed_at,
                        joined_at: now,
                    });
                }
                self.metrics.transfer_bytes.inc_by(kv_bytes);
                self.metrics.transfer_seconds.observe(transfer.as_secs_f64());
                self.metrics.transfer_tail_seconds.observe(tail.as_secs_f64());
                let (transfer_us, tail_us) = (transfer.as_micros() as u64, tail.as_micros() as u64);
                job.send(Ok(PrefillEvent::Committed { kv_bytes, transfer_us, tail_us }));
                return;
            }
            // `Finished` was sent with the token.
            PrefillOutcome::Finished(_) => {}
            PrefillOutcome::Aborted(reason) => {
                let broken = job.mask.as_deref().and_then(PendingMask::failure);
                let broken = broken.filter(|_| reason == AbortReason::ConstraintFailed);
                let failure = broken.map(|failure| PrefillError::Constraint(failure.clone())).or(job.failure.clone());
                let error = failure.unwrap_or_else(|| PrefillError::from_reason(reason));
                self.metrics.request_failed(error.reason());
                if let Some(cause) = error.failed_transfer() {
                    self.metrics.transfer_failed(cause);
                }
                job.send(Err(error));
            }
        }
        // Whether or not anything was published: the task waits for orders that will not come.
        if let Some(handoff) = &job.handoff {
            handoff.give_up();
        }
    }

    /// Launches the next chunk if its KV has room, and collects one. Whether there was one.
    fn step(&mut self, clock: &dyn Clock) -> Result<bool, StepLoopFailure> {
        if self.pending.is_none() {
            let page_tokens = self.engine.kv_layout().page_tokens;
            self.pending = self.scheduler.plan().map(|step| Pending::new(step, self.chunk_tokens, page_tokens));
        }
        if let Some(mut pending) = self.pending.take() {
            if self.is_ready(&mut pending, clock.now())? {
                self.launch(clock.now(), pending)?;
            } else {
                self.pending = Some(pending);
            }
            self.carry_out(clock.now());
        }
        let Some(launched) = self.launched.take() else { return Ok(false) };
        let output = self.engine.collect()?;
        let now = clock.now();
        self.metrics.steps.inc();
        self.metrics.step_seconds.observe((now - launched.at).as_secs_f64());
        // Before its token is taken: a context that was not handed over whole is not committed.
        let handoff = self.jobs.get(&launched.ticket).and_then(|job| job.handoff.as_ref());
        if let Some(failure) = handoff.and_then(|handoff| handoff.failure()) {
            self.fail(launched.ticket, failure);
        }
        self.scheduler.complete(output, &mut self.actions)?;
        self.carry_out(now);
        Ok(true)
    }

    /// Sends what was cached, which need not wait for the step, and tells whether the chunk itself has room too.
    fn is_ready(&mut self, pending: &mut Pending, now: Instant) -> Result<bool, StepLoopFailure> {
        while let Some(positions) = pending.cached.front().cloned() {
            if !self.has_room(pending, &positions) {
                return Ok(false);
            }
            pending.cached.pop_front();
            pending.room = Room::Unasked;
            if let Some(job) = self.jobs.get_mut(&pending.step.ticket) {
                job.started_at.get_or_insert(now);
            }
            if let Some(span) = self.span(&pending.step, &pending.tables, positions) {
                self.engine.read_kv(Arc::new(move |rank: u32, kv: &dyn KvReader| span.send_all(rank, kv)))?;
            }
        }
        let positions = pending.step.positions.clone();
        Ok(self.has_room(pending, &positions))
    }

    /// What is sent of a prompt's positions: nothing once it has ended or failed.
    fn span(&self, step: &PrefillStep, tables: &Arc<PageTables>, positions: Range<u32>) -> Option<Span> {
        let job = self.jobs.get(&step.ticket).filter(|job| step.publish_kv && job.failure.is_none())?;
        let (handoff, tables) = (job.handoff.clone()?, Arc::clone(tables));
        Some(Span { handoff, tables, positions, num_layers: self.num_layers() })
    }

    /// Whether the KV of some positions fits into the lane: room first, work second. A prompt that has ended needs none.
    fn has_room(&mut self, pending: &mut Pending, positions: &Range<u32>) -> bool {
        let PrefillStep { ticket, publish_kv, .. } = &pending.step;
        let handoff = self.jobs.get(ticket).and_then(|job| job.handoff.clone()).filter(|_| *publish_kv);
        let Some(handoff) = handoff else { return true };
        if pending.room == Room::Unasked {
            let layers = self.num_layers();
            let slices =
                (0..self.engine.ranks()).flat_map(|rank| handoff.map.ready_slices(rank, 0..layers, positions.clone()));
            let bytes: usize = slices.map(|slice| handoff.map.slice_bytes(&slice)).sum();
            pending.room = match handoff.take_room(bytes) {
                Ok(true) => Room::Taken,
                Ok(false) => Room::Waiting,
                Err(error) => {
                    self.fail(*ticket, error);
                    Room::Taken
                }
            };
        }
        pending.room == Room::Taken
    }

    fn num_layers(&self) -> u32 {
        let layout = self.engine.kv_layout();
        (layout.full_layers.len() + layout.window_layers.len()) as u32
    }

    fn launch(&mut self, now: Instant, pending: Pending) -> Result<(), StepLoopFailure> {
        let Pending { step, tables, .. } = pending;
        if let Some(span) = self.span(&step, &tables, step.positions.clone()) {
            self.exporter.begin(Export { step: step.plan.step, span, ranks_left: self.engine.ranks().into() });
        }
        let PrefillStep { ticket, plan, positions, mask, .. } = step;
        if let Some(job) = self.jobs.get_mut(&ticket) {
            job.started_at.get_or_insert(now);
            if let Some(promise) = mask {
                job.mask = Some(Arc::clone(promise.pending()));
                // The context ends with the last token that is known: the mask is for the one behind it.
                self.masks.mask(ticket, job.next_index, promise);
            }
        }
        self.metrics.step_rows.observe(plan.rows.len() as f64);
        self.metrics.step_tokens.observe(positions.len() as f64);
        self.launched = Some(Launched { ticket, at: now });
        self.engine.launch(Arc::new(plan))?;
        Ok(())
    }

    fn report(&mut self) {
        let counts = self.scheduler.counts();
        self.metrics.prefix.advance(&self.reuse, &counts.reuse);
        self.reuse = counts.reuse;
        let load = Load {
            waiting: counts.queued,
            running: counts.computing + counts.sending,
            pending_prompt_tokens: counts.pending_tokens,
            pools: vec![
                pool_load(DpGroup(0), PageGroup::Full, counts.full),
                pool_load(DpGroup(0), PageGroup::Window, counts.window),
            ],
            steps: counts.steps,
        };
        // A chunk that waits for room waits for a peer; that has a bound of its own.
        let step_due = counts.computing > 0 && self.pending.is_none();
        let idle = self.scheduler.is_idle() && self.jobs.is_empty();
        self.status.set_report(LoadReport { load, step_due, idle });
    }
}

impl Job {
    /// All events of a prompt fit into its channel; a reader that has left is found by `cancel_hopeless`.
    fn send(&self, event: Result<PrefillEvent, PrefillError>) {
        let _ = self.events.try_send(event);
    }
}

impl Turn for PrefillState {
    type Message = Message;

    fn turn(&mut self, clock: &dyn Clock, inbox: &mut VecDeque<Message>) -> Result<Next, StepLoopFailure> {
        let now = clock.now();
        if self.status.is_draining() {
            self.scheduler.drain();
        }
        for message in inbox.drain(..) {
            self.on_message(now, message);
        }
        self.cancel_hopeless(now);
        self.scheduler.expire(now, &mut self.actions);
        self.carry_out(now);
        let has_stepped = self.step(clock)?;
        self.report();
        Ok(if has_stepped { Next::Again } else { Next::Wait })
    }
}
