//! One answer while it is generated: sampled tokens in, pieces of the answer out. Pure; every API maps the same pieces.

use std::collections::VecDeque;

use format::chat::{ChatFinish, ChatStream, Delta, Field, TextDelta};
use types::{FinishReason, SampledToken};

use crate::stop::StopMatcher;

/// A piece of an answer, with the log-probabilities of the content tokens that it completes (empty unless asked for).
#[derive(Debug, Clone, PartialEq)]
pub struct Piece {
    /// What is new.
    pub delta: Delta,
    /// Tokens of the content, in order. Over all pieces: each token of the content given out, once.
    pub logprobs: Vec<SampledToken>,
}

/// How an answer ended and what it cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TurnEnd {
    /// Why.
    pub reason: ChatFinish,
    /// Tokens generated, frames and stop token counted in.
    pub output_tokens: u32,
    /// Those of them in reasoning.
    pub reasoning_tokens: u32,
}

/// Whether an answer wants more tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// Yes.
    Continue,
    /// No: a stop string was found; the generation is to be cancelled and the turn finished.
    Stopped,
}

/// Reads one answer.
pub struct Turn {
    stream: ChatStream,
    /// There is nothing but content: no format frames it.
    is_plain: bool,
    /// `None` if the request has no stop strings: then messages keep their borders.
    stops: Option<StopMatcher>,
    deltas: Vec<Delta>,
    content_begun: bool,
    /// The message of the last content.
    content_message_idx: u32,
    num_calls: u32,
    output_tokens: u32,
    /// Bytes of content that the parser has given, and that were given out.
    content_bytes: usize,
    given_bytes: usize,
    /// Content tokens not given out yet, each with the content byte at which it begins.
    logprobs: VecDeque<(usize, SampledToken)>,
}

impl Turn {
    /// Reads an answer with `stream`, up to the first of `stops` in its content.
    #[must_use]
    pub fn new(stream: ChatStream, stops: &[String]) -> Self {
        Self {
            stream,
            is_plain: false,
            stops: (!stops.is_empty()).then(|| StopMatcher::new(stops)),
            deltas: Vec::new(),
            content_begun: false,
            content_message_idx: 0,
            num_calls: 0,
            output_tokens: 0,
            content_bytes: 0,
            given_bytes: 0,
            logprobs: VecDeque::new(),
        }
    }

    /// Reads a text that no format frames: every token is content.
    #[must_use]
    pub fn plain(stream: ChatStream, stops: &[String]) -> Self {
        Self { is_plain: true, ..Self::new(stream, stops) }
    }

    /// Reads one token; appends the pieces that it completes.
    pub fn push(&mut self, token: SampledToken, pieces: &mut Vec<Piece>) -> Flow {
        self.output_tokens += 1;
        let begins_at = self.content_bytes;
        let mut deltas = std::mem::take(&mut self.deltas);
        let field = self.stream.push(token.token, &mut deltas);
        let is_content = self.is_plain || field == Some(Field::Content);
        if is_content && token.logprob.is_some() {
            self.logprobs.push_back((begins_at, token));
        }
        let flow = self.apply(&mut deltas, pieces);
        self.deltas = deltas;
        flow
    }

    /// The tokens end here: because the engine says so (`Some`), or because of a stop string (`None`). Appends the last
    /// pieces.
    pub fn finish(mut self, reason: Option<FinishReason>, pieces: &mut Vec<Piece>) -> TurnEnd {
        let mut deltas = std::mem::take(&mut self.deltas);
        let end = self.stream.finish(reason.unwrap_or(FinishReason::Stop), &mut deltas);
        let mut reason = match reason {
            Some(_) => {
                self.apply(&mut deltas, pieces);
                self.release_held(pieces);
                end.reason
            }
            None => ChatFinish::Stop,
        };
        if self.stops.as_ref().is_some_and(StopMatcher::matched) {
            reason = if self.num_calls > 0 { ChatFinish::ToolCalls } else { ChatFinish::Stop };
        } else if let Some(last) = pieces.iter_mut().rev().find(|piece| matches!(piece.delta, Delta::Content(_))) {
            last.logprobs.extend(self.logprobs.drain(..).map(|(_, token)| token));
        }
        TurnEnd { reason, output_tokens: self.output_tokens, reasoning_tokens: end.reasoning_tokens }
    }

    fn apply(&mut self, deltas: &mut Vec<Delta>, pieces: &mut Vec<Piece>) -> Flow {
        for delta in deltas.drain(..) {
            match delta {
                Delta::Content(text) => {
                    self.content(text, pieces);
                    if self.stops.as_ref().is_some_and(StopMatcher::matched) {
                        return Flow::Stopped;
                    }
                }
                Delta::Reasoning(_) => pieces.push(Piece { delta, logprobs: Vec::new() }),
                Delta::ToolCall(ref call) => {
                    self.num_calls += u32::from(call.name.is_some());
                    pieces.push(Piece { delta, logprobs: Vec::new() });
                }
            }
        }
        Flow::Continue
    }

    fn content(&mut self, mut delta: TextDelta, pieces: &mut Vec<Piece>) {
        self.content_message_idx = delta.message_idx;
        if let Some(stops) = &mut self.stops {
            // Text held back may belong to an earlier message: messages are joined before they are searched.
            let joined = delta.joined();
            self.content_bytes += joined.len();
            delta = TextDelta { text: stops.push(&joined), joins: false, ..delta };
        } else {
            self.content_bytes += delta.text.len();
        }
        self.give(delta, pieces);
    }

    fn release_held(&mut self, pieces: &mut Vec<Piece>) {
        let Some(stops) = &mut self.stops else { return };
        let text = stops.finish();
        if !text.is_empty() {
            self.give(TextDelta { message_idx: self.content_message_idx, text, joins: false }, pieces);
        }
    }

    /// Gives out content. An empty text counts only as the first one: it makes the field an empty text instead of null.
    fn give(&mut self, delta: TextDelta, pieces: &mut Vec<Piece>) {
        if delta.text.is_empty() && std::mem::replace(&mut self.content_begun, true) {
            return;
        }
        self.content_begun = true;
        self.given_bytes += delta.text.len();
        let mut logprobs = Vec::new();
        while let Some((_, token)) = self.logprobs.pop_front_if(|(begins_at, _)| *begins_at < self.given_bytes) {
            logprobs.push(token);
        }
        pieces.push(Piece { delta: Delta::Content(delta), logprobs });
    }
}

#[cfg(test)]
#[path = "turn_tests.rs"]
mod tests;
