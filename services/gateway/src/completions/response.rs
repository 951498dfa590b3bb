//! Pieces of a continuation as the bodies of Completions.

use std::sync::Arc;

use format::chat::{ChatFinish, Delta};
use serde::Serialize;
use serde_json::{Map, Value};
use types::SampledToken;
use vocabulary::Vocabulary;

use crate::chat::ResponseHead;
use crate::choices::{Fold, StreamWriter};
use crate::turn::Piece;
use crate::usage::{ChatUsage, Cost};

/// A whole response, or a chunk of a stream: both have the same shape here.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TextCompletion {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    choices: Vec<TextChoice>,
    /// `Some(None)` is `null`: what a client that asked for usage gets in all chunks but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<ChatUsage>>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct TextChoice {
    index: u32,
    text: String,
    logprobs: Option<TextLogprobs>,
    finish_reason: Option<&'static str>,
}

/// The old shape: one list a property.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
struct TextLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    /// Token text to log-probability, most probable first.
    top_logprobs: Vec<Map<String, Value>>,
    /// Bytes of the continuation's text before each token.
    text_offset: Vec<usize>,
}

impl TextLogprobs {
    fn push(&mut self, token: &SampledToken, text_offset: usize, vocabulary: &Vocabulary) {
        self.tokens.push(vocabulary.decode(&[token.token]));
        self.token_logprobs.push(token.logprob.unwrap_or(f32::NEG_INFINITY).max(-9999.0));
        let top = token.top.iter().map(|top| (vocabulary.decode(&[top.token]), top.logprob.max(-9999.0).into()));
        self.top_logprobs.push(top.collect());
        self.text_offset.push(text_offset);
    }

    fn of(piece: &Piece, mut text_offset: usize, vocabulary: &Vocabulary) -> Self {
        let mut logprobs = Self::default();
        for token in &piece.logprobs {
            logprobs.push(token, text_offset, vocabulary);
            text_offset += vocabulary.token_bytes(token.token).map_or(0, <[u8]>::len);
        }
        logprobs
    }
}

/// Text of a piece: a plain answer has content only.
fn text(piece: &Piece) -> &str {
    match &piece.delta {
        Delta::Content(text) => &text.text,
        Delta::Reasoning(_) | Delta::ToolCall(_) => "",
    }
}

/// One continuation, folded from its pieces.
#[derive(Debug, Default)]
pub struct FoldedCompletion {
    text: String,
    logprobs: TextLogprobs,
    finish_reason: Option<ChatFinish>,
}

impl Fold for FoldedCompletion {
    fn push(&mut self, piece: &Piece, vocabulary: &Vocabulary) {
        let more = TextLogprobs::of(piece, self.text.len(), vocabulary);
        self.text.push_str(text(piece));
        self.logprobs.tokens.extend(more.tokens);
        self.logprobs.token_logprobs.extend(more.token_logprobs);
        self.logprobs.top_logprobs.extend(more.top_logprobs);
        self.logprobs.text_offset.extend(more.text_offset);
    }

    fn finish(&mut self, reason: ChatFinish) {
        self.finish_reason = Some(reason);
    }
}

/// Makes the bodies of one response.
#[derive(Debug)]
pub struct CompletionWriter {
    head: ResponseHead,
    vocabulary: Arc<Vocabulary>,
    include_usage: bool,
    /// Bytes of text sent for each continuation.
    sent: Vec<usize>,
}

impl StreamWriter for CompletionWriter {
    type Chunk = TextCompletion;

    fn opening(&self) -> Vec<TextCompletion> {
        Vec::new()
    }

    fn piece(&mut self, choice: u32, piece: &Piece) -> TextCompletion {
        let sent = &mut self.sent[choice as usize];
        let logprobs = TextLogprobs::of(piece, *sent, &self.vocabulary);
        *sent += text(piece).len();
        let logprobs = (!logprobs.tokens.is_empty()).then_some(logprobs);
        self.body(vec![TextChoice { index: choice, text: text(piece).to_owned(), logprobs, finish_reason: None }])
    }

    fn last(&self, choice: u32, reason: ChatFinish) -> TextCompletion {
        let finish_reason = Some(reason.as_str());
        self.body(vec![TextChoice { index: choice, text: String::new(), logprobs: None, finish_reason }])
    }

    fn usage(&self, cost: Cost) -> Option<TextCompletion> {
        self.include_usage.then(|| TextCompletion { usage: Some(Some(cost.into())), ..self.body(Vec::new()) })
    }
}

impl CompletionWriter {
    /// Makes bodies of the response `head` with `num_choices` continuations; with `include_usage`, a last chunk tells what it cost.
    #[must_use]
    pub fn new(head: ResponseHead, vocabulary: Arc<Vocabulary>, num_choices: u32, include_usage: bool) -> Self {
        Self { head, vocabulary, include_usage, sent: vec![0; num_choices as usize] }
    }

    /// The whole response.
    #[must_use]
    pub fn whole(&self, answers: Vec<FoldedCompletion>, cost: Cost, with_logprobs: bool) -> TextCompletion {
        let choices = (0..).zip(answers).map(|(index, answer)| TextChoice {
            index,
            text: answer.text,
            logprobs: with_logprobs.then_some(answer.logprobs),
            finish_reason: Some(answer.finish_reason.unwrap_or(ChatFinish::Stop).as_str()),
        });
        TextCompletion { usage: Some(Some(cost.into())), ..self.body(choices.collect()) }
    }

    fn body(&self, choices: Vec<TextChoice>) -> TextCompletion {
        TextCompletion {
            id: self.head.key.completion_id(),
            object: "text_completion",
            created: self.head.created,
            model: self.head.model.clone(),
            choices,
            usage: self.include_usage.then_some(None),
        }
    }
}
