//! The rim between the router's streams and the pure layers: each stream of sampled tokens becomes a stream of pieces,
//! and the answers to one request are merged into one stream. Dropping it cancels them all.

use std::sync::Arc;
use std::time::Instant;

use futures_util::stream::{BoxStream, SelectAll, Stream, StreamExt};
use tokio::sync::OwnedSemaphorePermit;
use types::{GenerateEvent, RequestId};

use crate::caller::Caller;
use crate::error::ApiError;
use crate::metrics::GatewayMetrics;
use crate::router_link::Generation;
use crate::turn::{Flow, Piece, Turn, TurnEnd};
use crate::usage::{CachedTokens, Cost};

/// Something new about answer `index`.
#[derive(Debug, Clone, PartialEq)]
pub struct AnswerEvent {
    /// Which answer of the request.
    pub index: u32,
    /// What is new.
    pub update: Update,
}

/// What is new about an answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Update {
    /// More of it.
    Piece(Piece),
    /// It is complete.
    End(TurnEnd),
}

/// All answers to one request, as they come.
pub struct Answers {
    events: SelectAll<BoxStream<'static, Result<(AnswerEvent, u32), ApiError>>>,
    id: RequestId,
    num_answers: u32,
    num_ended: u32,
    cost: Cost,
    cached: CachedTokens,
    metrics: GatewayMetrics,
    has_begun: bool,
    slot: Slot,
}

/// A place among the concurrent requests and among those of its caller, given back when dropped.
pub(crate) struct Slot {
    _permit: OwnedSemaphorePermit,
    _callers_permit: Option<OwnedSemaphorePermit>,
    caller: Arc<Caller>,
    since: Instant,
}

impl Slot {
    /// Taken by a request of `caller` that arrived at `since`.
    pub(crate) fn new(
        permit: OwnedSemaphorePermit,
        callers_permit: Option<OwnedSemaphorePermit>,
        caller: Arc<Caller>,
        since: Instant,
    ) -> Self {
        Self { _permit: permit, _callers_permit: callers_permit, caller, since }
    }

    /// Whose request it is.
    pub(crate) fn caller(&self) -> &Arc<Caller> {
        &self.caller
    }
}

impl Answers {
    /// Reads generation `i` with turn `i`. Those of each prompt, `choices_per_prompt` of them, follow each other.
    pub(crate) fn new(
        id: RequestId,
        generations: Vec<(Generation, Turn)>,
        (prompt_tokens, choices_per_prompt): (u32, u32),
        slot: Slot,
        metrics: GatewayMetrics,
    ) -> Self {
        let num_answers = generations.len() as u32;
        let streams = (0..)
            .zip(generations)
            .map(|(index, (generation, turn))| answer(index, generation, turn, Arc::clone(slot.caller())).boxed());
        let cost = Cost { prompt_tokens, ..Cost::default() };
        Self {
            events: futures_util::stream::select_all(streams),
            id,
            num_answers,
            num_ended: 0,
            cost,
            cached: CachedTokens::new(choices_per_prompt),
            metrics,
            has_begun: false,
            slot,
        }
    }

    /// How many answers there will be.
    #[must_use]
    pub fn num_answers(&self) -> u32 {
        self.num_answers
    }

    /// What the answers cost that have ended so far.
    #[must_use]
    pub fn cost(&self) -> Cost {
        self.cost
    }

    /// The next event; `None` once all answers are complete. After an error nothing of worth follows. Cancellation
    /// safe.
    pub async fn next(&mut self) -> Option<Result<AnswerEvent, ApiError>> {
        let event = self.events.next().await?;
        Some(event.map(|(event, cached_tokens)| {
            if !std::mem::replace(&mut self.has_begun, true) {
                self.metrics.first_piece_seconds.observe(self.slot.since.elapsed().as_secs_f64());
            }
            if let Update::End(end) = &event.update {
                self.num_ended += 1;
                self.cost.add(end);
                self.cost.cached_tokens = self.cached.count(event.index, cached_tokens);
                self.metrics.output_tokens.inc_by(u64::from(end.output_tokens));
            }
            event
        }))
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        let total_ms = self.slot.since.elapsed().as_millis() as u64;
        let Cost { prompt_tokens, cached_tokens, output_tokens, reasoning_tokens } = self.cost;
        tracing::info!(
            request_id = %self.id, complete = self.num_ended == self.num_answers, prompt_tokens, cached_tokens,
            output_tokens, reasoning_tokens, total_ms, "answer ended"
        );
    }
}

/// The events of one answer, the last one with the number of cached prompt tokens.
fn answer(
    index: u32,
    mut generation: Generation,
    mut turn: Turn,
    caller: Arc<Caller>,
) -> impl Stream<Item = Result<(AnswerEvent, u32), ApiError>> {
    let event = move |update| AnswerEvent { index, update };
    async_stream::try_stream! {
        let mut pieces = Vec::new();
        let mut next_index = 0;
        let finished = 'reading: loop {
            let run = match generation.next().await {
                Some(Ok(GenerateEvent::Tokens(run))) if run.first_index == next_index => run,
                Some(Ok(GenerateEvent::Finished(finished))) => break Some(finished),
                Some(Err(error)) => Err(error)?,
                Some(Ok(GenerateEvent::Tokens(_) | GenerateEvent::Started { .. })) | None => {
                    Err(ApiError::Internal { message: "the answer broke off".into() })?
                }
            };
            let num_tokens = run.tokens.len() as u32;
            next_index += num_tokens;
            caller.charge_output(Instant::now(), num_tokens);
            for token in run.tokens {
                if turn.push(token, &mut pieces) == Flow::Stopped {
                    break 'reading None;
                }
            }
            for piece in pieces.drain(..) {
                yield (event(Update::Piece(piece)), 0);
            }
        };
        // After a stop string this cancels the generation.
        drop(generation);
        let end = turn.finish(finished.map(|finished| finished.reason), &mut pieces);
        let cached_tokens = finished.map_or(0, |finished| finished.usage.cached_tokens);
        for piece in pieces {
            yield (event(Update::Piece(piece)), 0);
        }
        yield (event(Update::End(end)), cached_tokens);
    }
}
