//! Pieces of an answer as the bodies of Chat Completions: chunks of a stream, or one whole body folded from the same
//! pieces.

use std::sync::Arc;

use format::chat::{Answer, ChatFinish, Delta};
use serde::Serialize;
use vocabulary::Vocabulary;

use crate::choices::{Fold, StreamWriter};
use crate::ids::ResponseKey;
use crate::logprobs::{ChoiceLogprobs, TokenLogprobs};
use crate::turn::Piece;
use crate::usage::{ChatUsage, Cost};

/// What all bodies of one response have in common.
#[derive(Debug, Clone)]
pub struct ResponseHead {
    /// Names the response and its calls.
    pub key: ResponseKey,
    /// Seconds since the epoch.
    pub created: u64,
    /// The served model's name.
    pub model: String,
}

/// A chunk of a stream.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChatChunk {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    choices: Vec<ChunkChoice>,
    /// `Some(None)` is `null`: what a client that asked for usage gets in all chunks but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<ChatUsage>>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct ChunkChoice {
    index: u32,
    delta: ChunkDelta,
    logprobs: Option<ChoiceLogprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize)]
struct ChunkDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    /// Both names that clients read carry the same text.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[CallChunk; 1]>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct CallChunk {
    index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionChunk,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct FunctionChunk {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

/// Makes the chunks of one stream.
#[derive(Debug)]
pub struct ChunkWriter {
    head: ResponseHead,
    vocabulary: Arc<Vocabulary>,
    num_choices: u32,
    include_usage: bool,
}

impl StreamWriter for ChunkWriter {
    type Chunk = ChatChunk;

    /// The role of each answer.
    fn opening(&self) -> Vec<ChatChunk> {
        let role =
            |choice| self.chunk(choice, ChunkDelta { role: Some("assistant"), ..ChunkDelta::default() }, None, None);
        (0..self.num_choices).map(role).collect()
    }

    fn piece(&mut self, choice: u32, piece: &Piece) -> ChatChunk {
        let delta = match &piece.delta {
            Delta::Reasoning(text) => {
                let text = text.joined();
                ChunkDelta { reasoning_content: Some(text.clone()), reasoning: Some(text), ..ChunkDelta::default() }
            }
            Delta::Content(text) => ChunkDelta { content: Some(text.joined()), ..ChunkDelta::default() },
            Delta::ToolCall(call) => {
                let begins = call.name.is_some();
                let chunk = CallChunk {
                    index: call.index,
                    id: begins.then(|| self.head.key.call_id(choice, call.index)),
                    kind: begins.then_some("function"),
                    function: FunctionChunk { name: call.name.clone(), arguments: call.arguments.clone() },
                };
                ChunkDelta { tool_calls: Some([chunk]), ..ChunkDelta::default() }
            }
        };
        self.chunk(choice, delta, logprobs(&piece.logprobs, &self.vocabulary), None)
    }

    fn last(&self, choice: u32, reason: ChatFinish) -> ChatChunk {
        self.chunk(choice, ChunkDelta::default(), None, Some(reason.as_str()))
    }

    fn usage(&self, cost: Cost) -> Option<ChatChunk> {
        let body = || ChatChunk { choices: Vec::new(), usage: Some(Some(cost.into())), ..self.empty() };
        self.include_usage.then(body)
    }
}

impl ChunkWriter {
    /// Makes chunks of the response `head` with `num_choices` answers; with `include_usage`, a last one tells what it cost.
    #[must_use]
    pub fn new(head: ResponseHead, vocabulary: Arc<Vocabulary>, num_choices: u32, include_usage: bool) -> Self {
        Self { head, vocabulary, num_choices, include_usage }
    }

    fn chunk(
        &self,
        index: u32,
        delta: ChunkDelta,
        logprobs: Option<ChoiceLogprobs>,
        finish_reason: Option<&'static str>,
    ) -> ChatChunk {
        ChatChunk { choices: vec![ChunkChoice { index, delta, logprobs, finish_reason }], ..self.empty() }
    }

    fn empty(&self) -> ChatChunk {
        ChatChunk {
            id: self.head.key.chat_id(),
            object: "chat.completion.chunk",
            created: self.head.created,
            model: self.head.model.clone(),
            choices: Vec::new(),
            usage: self.include_usage.then_some(None),
        }
    }
}

/// A whole response.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChatCompletion {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    choices: Vec<Choice>,
    usage: ChatUsage,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct Choice {
    index: u32,
    message: AssistantMessage,
    logprobs: Option<ChoiceLogprobs>,
    finish_reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct AssistantMessage {
    role: &'static str,
    content: Option<String>,
    /// Always there: SDKs declare it.
    refusal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct Call {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: Function,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct Function {
    name: String,
    arguments: String,
}

/// One answer, folded from its pieces.
#[derive(Debug, Default)]
pub struct FoldedChoice {
    answer: Answer,
    logprobs: Vec<TokenLogprobs>,
    finish_reason: Option<ChatFinish>,
}

impl Fold for FoldedChoice {
    fn push(&mut self, piece: &Piece, vocabulary: &Vocabulary) {
        self.answer.push(&piece.delta);
        self.logprobs.extend(piece.logprobs.iter().map(|token| TokenLogprobs::new(token, vocabulary)));
    }

    fn finish(&mut self, reason: ChatFinish) {
        self.finish_reason = Some(reason);
    }
}

impl ChatCompletion {
    /// The whole response of `choices`; `with_logprobs` if the request asked for them.
    #[must_use]
    pub fn new(head: &ResponseHead, choices: Vec<FoldedChoice>, cost: Cost, with_logprobs: bool) -> Self {
        let choices = (0..).zip(choices).map(|(index, folded)| Choice {
            index,
            logprobs: with_logprobs.then_some(ChoiceLogprobs { content: folded.logprobs }),
            finish_reason: folded.finish_reason.unwrap_or(ChatFinish::Stop).as_str(),
            message: message(head, index, folded.answer),
        });
        Self {
            id: head.key.chat_id(),
            object: "chat.completion",
            created: head.created,
            model: head.model.clone(),
            choices: choices.collect(),
            usage: cost.into(),
        }
    }
}

fn message(head: &ResponseHead, choice: u32, answer: Answer) -> AssistantMessage {
    let calls = (0..).zip(answer.tool_calls).map(|(index, call)| Call {
        id: head.key.call_id(choice, index),
        kind: "function",
        function: Function { name: call.name, arguments: call.arguments },
    });
    AssistantMessage {
        role: "assistant",
        content: answer.content,
        refusal: None,
        reasoning_content: answer.reasoning.clone(),
        reasoning: answer.reasoning,
        tool_calls: calls.collect(),
    }
}

fn logprobs(tokens: &[types::SampledToken], vocabulary: &Vocabulary) -> Option<ChoiceLogprobs> {
    let content: Vec<_> = tokens.iter().map(|token| TokenLogprobs::new(token, vocabulary)).collect();
    (!content.is_empty()).then_some(ChoiceLogprobs { content })
}
