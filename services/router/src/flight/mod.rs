//! The life of a request, without clock, sockets or tasks: events go in, actions come out.
//!
//! ```text
//!  Queued ──placed──► Reserving ──ticket──► Prefilling ──first token──► Transferring ──joined──► Decoding ──finished──► Ended
//!    ▲ ▲                 │ no room: costs no attempt    │                     │                     │
//!    │ └─────────────────┘                              │                     │                     │
//!    └──────────── lost, failed, late, preempted: the next attempt begins behind the tokens forwarded so far
//! ```
//!
//! The client sees each output index once and in order, whatever happened behind it. Both legs (the streams to the two workers) are
//! released on every way out; releasing a leg is what cancels its work.

mod event;
#[cfg(test)]
mod random_tests;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use types::{
    DecodeEvent, ErrorClass, FinishReason, Finished, GenerateEvent, GenerateRequest, PeerId, PrefillEvent, Role,
    SampledToken, TicketId, TokenRun, Usage,
};

pub use event::{Action, Event, LegFailure, Outcome, Pair};
use event::{decode_event_name, prefill_event_name};

use crate::error::{AttemptFailure, RequestError, Stage};

/// How long each stage may take, and how often a request is tried again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlightLimits {
    /// From being queued to being placed.
    pub queue: Duration,
    /// From the request to decode to its ticket.
    pub reserve: Duration,
    /// From the request to prefill to its token, its queue included.
    pub prefill: Duration,
    /// From that token to the sequence joining decode's batch.
    pub transfer: Duration,
    /// From joining to decode's first token.
    pub first_token: Duration,
    /// Between two messages with tokens.
    pub inter_token: Duration,
    /// Failed attempts, the last one not counted in. Giving way to others (a preemption) is no failure.
    pub resumptions_max: u32,
}

#[derive(Debug)]
enum Phase {
    Queued,
    Reserving { pair: Pair, ticket: TicketId },
    Prefilling { pair: Pair },
    Transferring { pair: Pair },
    Decoding { pair: Pair, has_token: bool },
    Ended,
}

/// One request from its admission to its end.
#[derive(Debug)]
pub struct Flight {
    /// `generated` holds every token that was forwarded.
    request: GenerateRequest,
    limits: FlightLimits,
    /// Latest end of the whole flight.
    deadline: Instant,
    timeout: Duration,
    phase: Phase,
    /// When the stage began, or last made progress.
    stage_since: Instant,
    /// When the present attempt first asked for a pair: refusals for lack of room do not prolong the wait.
    queued_since: Instant,
    attempt: u32,
    resumptions: u32,
    /// Those resumptions that something failed before.
    failures: u32,
    avoid: Vec<PeerId>,
    prefill_is_done: bool,
    /// Decode's messages that overtook prefill's token on the way here.
    early: Vec<DecodeEvent>,
    /// Accepted, not emitted yet.
    fresh: Vec<SampledToken>,
    /// Of the first prefill that yielded a token: what the client's prompt cost. Later ones find what that has left.
    cached_tokens: Option<u32>,
}

impl Flight {
    /// Begins a flight: it greets the client and asks for a pair. `timeout` is the limit for the whole request.
    pub fn new(
        now: Instant,
        request: GenerateRequest,
        timeout: Duration,
        limits: FlightLimits,
        out: &mut Vec<Action>,
    ) -> Self {
        let started = GenerateEvent::Started { request_id: request.id.clone(), seed: request.sampling.seed };
        out.push(Action::Emit(started));
        let mut flight = Self {
            request,
            limits,
            deadline: now + timeout,
            timeout,
            phase: Phase::Queued,
            stage_since: now,
            queued_since: now,
            attempt: 0,
            resumptions: 0,
            failures: 0,
            avoid: Vec::new(),
            prefill_is_done: false,
            early: Vec::new(),
            fresh: Vec::new(),
            cached_tokens: None,
        };
        match flight.finish_reason() {
            // What the client resumes from is a whole answer already.
            Some(reason) => flight.finish(reason, out),
            None => out.push(Action::Place { avoid: Vec::new(), was_refused: false }),
        }
        flight
    }

    /// The request, with all tokens forwarded so far.
    #[must_use]
    pub fn request(&self) -> &GenerateRequest {
        &self.request
    }

    /// Whether the flight is over.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        matches!(self.phase, Phase::Ended)
    }

    /// When [`Event::Tick`] is due: the stage's limit or the whole request's, whichever comes first.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        let (_, since, limit) = self.stage();
        (since + limit).min(self.deadline)
    }

    /// When the whole request's limit passes; the only deadline while the client is too slow to be sent anything.
    #[must_use]
    pub fn request_deadline(&self) -> Instant {
        self.deadline
    }

    fn stage(&self) -> (Stage, Instant, Duration) {
        match &self.phase {
            Phase::Queued => (Stage::Queue, self.queued_since, self.limits.queue),
            Phase::Reserving { .. } => (Stage::Reserve, self.stage_since, self.limits.reserve),
            Phase::Prefilling { .. } => (Stage::Prefill, self.stage_since, self.limits.prefill),
            Phase::Transferring { .. } => (Stage::Transfer, self.stage_since, self.limits.transfer),
            Phase::Decoding { has_token: false, .. } => (Stage::FirstToken, self.stage_since, self.limits.first_token),
            Phase::Decoding { has_token: true, .. } | Phase::Ended => {
                (Stage::InterToken, self.stage_since, self.limits.inter_token)
            }
        }
    }

    /// Takes one event in; what is to be done about it is appended to `out`.
    pub fn on_event(&mut self, now: Instant, event: Event, out: &mut Vec<Action>) {
        if self.has_ended() {
            return;
        }
        // A flight without workers has no legs: what still comes from one is old.
        let is_current = |attempt| attempt == self.attempt && !matches!(self.phase, Phase::Queued);
        match event {
            Event::ClientGone => self.end(Outcome::Cancelled, out),
            Event::ClientCaughtUp => self.stage_since = now,
            Event::Tick { has_pair } => self.on_tick(now, has_pair, out),
            Event::Placed { pair, ticket } => self.on_placed(now, pair, ticket, out),
            Event::Decode { attempt, event } if is_current(attempt) => self.on_decode(now, event, out),
            Event::Prefill { attempt, event } if is_current(attempt) => self.on_prefill(now, event, out),
            Event::LegClosed { attempt, role } if is_current(attempt) => {
                let reason = "stream ended before its last message".to_owned();
                self.on_leg_lost(now, role, false, AttemptFailure::WorkerLost { role, reason }, out);
            }
            Event::WorkerGone { attempt, role } if is_current(attempt) => {
                let reason = "no heartbeat".to_owned();
                self.on_leg_lost(now, role, false, AttemptFailure::WorkerLost { role, reason }, out);
            }
            Event::LegFailed { attempt, role, failure } if is_current(attempt) => {
                self.on_leg_failed(now, role, failure, out);
            }
            Event::Decode { .. }
            | Event::Prefill { .. }
            | Event::LegClosed { .. }
            | Event::LegFailed { .. }
            | Event::WorkerGone { .. } => {}
        }
        self.flush(out);
    }

    fn on_placed(&mut self, now: Instant, pair: Pair, ticket: TicketId, out: &mut Vec<Action>) {
        if !matches!(self.phase, Phase::Queued) {
            return;
        }
        out.push(Action::Reserve {
            attempt: self.attempt,
            ticket,
            prefill: pair.prefill.clone(),
            sequence: self.request.clone(),
        });
        self.prefill_is_done = false;
        self.enter(now, Phase::Reserving { pair, ticket });
    }

    fn on_decode(&mut self, now: Instant, event: DecodeEvent, out: &mut Vec<Action>) {
        let role = Role::Decode;
        match (std::mem::replace(&mut self.phase, Phase::Ended), event) {
            (Phase::Reserving { pair, ticket: asked }, DecodeEvent::Reserved(ticket)) => {
                if ticket.id != asked || ticket.decode != pair.decode || ticket.prefill != pair.prefill {
                    self.phase = Phase::Reserving { pair, ticket: asked };
                    let reason = format!("ticket {} names another reservation than {asked}", ticket.id);
                    return self.attempt_failed(now, AttemptFailure::Protocol { role, reason }, &[role], out);
                }
                out.push(Action::Prefill { attempt: self.attempt, ticket, sequence: self.request.clone() });
                self.enter(now, Phase::Prefilling { pair });
            }
            (
                phase @ (Phase::Prefilling { .. } | Phase::Transferring { .. } | Phase::Decoding { .. }),
                DecodeEvent::Preempted,
            ) => {
                self.phase = phase;
                self.attempt_failed(now, AttemptFailure::Preempted, &[], out);
            }
            (phase @ Phase::Prefilling { .. }, event) if !matches!(event, DecodeEvent::Reserved(_)) => {
                self.phase = phase;
                self.early.push(event);
            }
            (Phase::Transferring { pair }, DecodeEvent::Joined { .. }) => {
                self.enter(now, Phase::Decoding { pair, has_token: false });
            }
            (Phase::Decoding { pair, .. }, DecodeEvent::Tokens(run)) => {
                self.enter(now, Phase::Decoding { pair, has_token: true });
                if let Err(reason) = self.accept(run) {
                    self.attempt_failed(now, AttemptFailure::Protocol { role, reason }, &[role], out);
                }
            }
            (phase @ Phase::Decoding { .. }, DecodeEvent::Finished(finished)) => {
                self.phase = phase;
                self.on_finished(now, role, finished, out);
            }
            (phase, event) => {
                self.phase = phase;
                let reason = format!("{} in stage {}", decode_event_name(&event), self.stage().0);
                self.attempt_failed(now, AttemptFailure::Protocol { role, reason }, &[role], out);
            }
        }
    }

    fn on_prefill(&mut self, now: Instant, event: PrefillEvent, out: &mut Vec<Action>) {
        let role = Role::Prefill;
        match (std::mem::replace(&mut self.phase, Phase::Ended), event) {
            (Phase::Prefilling { pair }, PrefillEvent::FirstToken { index, token, cached_tokens, .. }) => {
                self.enter(now, Phase::Transferring { pair });
                self.cached_tokens.get_or_insert(cached_tokens);
                if index != self.request.next_index() {
                    let reason = format!("token {index} where {} is next", self.request.next_index());
                    return self.attempt_failed(now, AttemptFailure::Protocol { role, reason }, &[role], out);
                }
                self.request.generated.push(token.token);
                self.fresh.push(token);
                let attempt = self.attempt;
                for event in std::mem::take(&mut self.early) {
                    if self.attempt == attempt && !self.has_ended() {
                        self.on_decode(now, event, out);
                    }
                }
            }
            (phase @ (Phase::Transferring { .. } | Phase::Decoding { .. }), PrefillEvent::Committed { .. })
                if !self.prefill_is_done =>
            {
                self.phase = phase;
                self.prefill_is_done = true;
                out.push(Action::Release(role));
            }
            (phase @ Phase::Transferring { .. }, PrefillEvent::Finished(finished)) if !self.prefill_is_done => {
                self.phase = phase;
                self.on_finished(now, role, finished, out);
            }
            (phase, event) => {
                self.phase = phase;
                let reason = format!("{} in stage {}", prefill_event_name(&event), self.stage().0);
                self.attempt_failed(now, AttemptFailure::Protocol { role, reason }, &[role], out);
            }
        }
    }

    /// Appends tokens that are new. Those that were forwarded before are dropped; a gap, or a token behind the end, is an error.
    fn accept(&mut self, run: TokenRun) -> Result<(), String> {
        for (index, token) in (run.first_index..).zip(run.tokens) {
            let next = self.request.next_index();
            if index < next {
                continue;
            }
            if index > next {
                return Err(format!("token {index} where {next} is next"));
            }
            if let Some(reason) = self.finish_reason() {
                return Err(format!("token {index} behind the end ({reason:?})"));
            }
            self.request.generated.push(token.token);
            self.fresh.push(token);
        }
        Ok(())
    }

    /// Whether the tokens forwarded so far are a whole answer.
    fn finish_reason(&self) -> Option<FinishReason> {
        let last = self.request.generated.last()?;
        if self.request.stop_token_ids.contains(last) {
            Some(FinishReason::Stop)
        } else {
            (self.request.next_index() >= self.request.max_tokens).then_some(FinishReason::Length)
        }
    }

    fn on_finished(&mut self, now: Instant, role: Role, finished: Finished, out: &mut Vec<Action>) {
        let (says, has) = (finished.usage.output_tokens, self.request.next_index());
        if says == has {
            self.finish(finished.reason, out);
        } else {
            let reason = format!("finished with {says} tokens, {has} have arrived");
            self.attempt_failed(now, AttemptFailure::Protocol { role, reason }, &[role], out);
        }
    }

    fn on_leg_failed(&mut self, now: Instant, role: Role, failure: LegFailure, out: &mut Vec<Action>) {
        let LegFailure { class, between, reason } = failure;
        let pair = match &self.phase {
            Phase::Queued | Phase::Ended => return,
            Phase::Reserving { pair, .. }
            | Phase::Prefilling { pair }
            | Phase::Transferring { pair }
            | Phase::Decoding { pair, .. } => pair,
        };
        match class {
            ErrorClass::Caller => self.end(Outcome::Failed(RequestError::Rejected { role, reason }), out),
            // Refused before anything was done: the worker is well, only full.
            ErrorClass::Overloaded if matches!(self.phase, Phase::Reserving { .. } | Phase::Prefilling { .. }) => {
                out.push(Action::Full(pair.peer(role).clone()));
                self.requeue(now, true, out);
            }
            ErrorClass::Retryable => {
                self.on_leg_lost(now, role, between, AttemptFailure::WorkerLost { role, reason }, out);
            }
            ErrorClass::Overloaded | ErrorClass::Cancelled | ErrorClass::Fatal => {
                self.on_leg_lost(now, role, between, AttemptFailure::WorkerFailed { role, reason }, out);
            }
        }
    }

    /// A leg is gone. Prefill is not needed any more once the KV cache has arrived.
    fn on_leg_lost(&mut self, now: Instant, role: Role, between: bool, failure: AttemptFailure, out: &mut Vec<Action>) {
        let is_needed = match (&self.phase, role) {
            (Phase::Queued | Phase::Ended, _) => return,
            (Phase::Decoding { .. }, Role::Prefill) => false,
            (_, Role::Prefill) => !self.prefill_is_done,
            // Decode is through, and only prefill's token has yet to come in.
            (Phase::Prefilling { .. }, Role::Decode) => !matches!(self.early.last(), Some(DecodeEvent::Finished(_))),
            (_, Role::Decode) => true,
        };
        if is_needed {
            let blame: &[Role] = if between { &[Role::Prefill, Role::Decode] } else { &[role] };
            if between {
                out.push(Action::Unlink);
            }
            self.attempt_failed(now, failure, blame, out);
        } else if role == Role::Prefill && !self.prefill_is_done {
            self.prefill_is_done = true;
            out.push(Action::Release(role));
        }
    }

    fn on_tick(&mut self, now: Instant, has_pair: bool, out: &mut Vec<Action>) {
        let (stage, since, limit) = self.stage();
        if now >= self.deadline {
            let error = RequestError::DeadlineExceeded { stage, limit: self.timeout };
            return self.end(Outcome::Failed(error), out);
        }
        if now < since + limit {
            return;
        }
        let blame: &[Role] = match stage {
            Stage::Queue => {
                let error = if has_pair { RequestError::QueueTimeout { limit } } else { RequestError::NoPair };
                return self.end(Outcome::Failed(error), out);
            }
            Stage::Prefill => &[Role::Prefill],
            // Either side may be what holds the transfer up.
            Stage::Transfer => &[Role::Prefill, Role::Decode],
            Stage::Reserve | Stage::FirstToken | Stage::InterToken => &[Role::Decode],
        };
        self.attempt_failed(now, AttemptFailure::Timeout { stage, limit }, blame, out);
    }

    /// The present attempt is over; `blame` names the sides that the next one should rather do without.
    fn attempt_failed(&mut self, now: Instant, failure: AttemptFailure, blame: &[Role], out: &mut Vec<Action>) {
        // All tokens are there and only the word about the end was lost.
        if let Some(reason) = self.finish_reason() {
            return self.finish(reason, out);
        }
        // A decode worker that makes room is well, and a crowd may make it do so many times: the request's deadline bounds that.
        if !matches!(failure, AttemptFailure::Preempted) {
            if self.failures == self.limits.resumptions_max {
                let error = RequestError::Exhausted { attempts: self.failures + 1, last: failure };
                return self.end(Outcome::Failed(error), out);
            }
            self.failures += 1;
        }
        if let Phase::Reserving { pair, .. }
        | Phase::Prefilling { pair }
        | Phase::Transferring { pair }
        | Phase::Decoding { pair, .. } = &self.phase
        {
            let failed = blame.iter().map(|role| pair.peer(*role).clone());
            self.avoid.extend(failed.filter(|peer| !self.avoid.contains(peer)).collect::<Vec<_>>());
        }
        self.resumptions += 1;
        self.queued_since = now;
        out.push(Action::Resume(failure));
        self.requeue(now, false, out);
    }

    /// Lets go of both workers and asks for a pair.
    fn requeue(&mut self, now: Instant, was_refused: bool, out: &mut Vec<Action>) {
        self.flush(out);
        self.early.clear();
        self.attempt += 1;
        self.release_both(out);
        out.push(Action::Place { avoid: self.avoid.clone(), was_refused });
        self.enter(now, Phase::Queued);
    }

    fn release_both(&mut self, out: &mut Vec<Action>) {
        if !matches!(self.phase, Phase::Queued) {
            // Decode last: its pages must not go to anybody else while prefill still writes to them.
            out.extend([Action::Release(Role::Prefill), Action::Release(Role::Decode)]);
        }
    }

    fn finish(&mut self, reason: FinishReason, out: &mut Vec<Action>) {
        self.flush(out);
        let usage = Usage {
            prompt_tokens: self.request.prompt.len() as u32,
            cached_tokens: self.cached_tokens.unwrap_or(0),
            output_tokens: self.request.next_index(),
            resumptions: self.resumptions,
        };
        out.push(Action::Emit(GenerateEvent::Finished(Finished { reason, usage })));
        self.end(Outcome::Finished(reason), out);
    }

    fn end(&mut self, outcome: Outcome, out: &mut Vec<Action>) {
        self.flush(out);
        self.release_both(out);
        self.phase = Phase::Ended;
        out.push(Action::End(outcome));
    }

    fn enter(&mut self, now: Instant, phase: Phase) {
        self.phase = phase;
        self.stage_since = now;
    }

    /// One message for all tokens that an event brought.
    fn flush(&mut self, out: &mut Vec<Action>) {
        if !self.fresh.is_empty() {
            let tokens = std::mem::take(&mut self.fresh);
            let first_index = self.request.next_index() - tokens.len() as u32;
            out.push(Action::Emit(GenerateEvent::Tokens(TokenRun { first_index, tokens })));
        }
    }
}
