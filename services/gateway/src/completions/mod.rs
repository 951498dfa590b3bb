//! `POST /v1/completions`: text or tokens in, the raw continuation out. No chat format is involved.

mod plain;
mod response;

pub use plain::PlainParser;
pub use response::{CompletionWriter, FoldedCompletion, TextCompletion};

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use types::{Sampling, TokenId};
use vocabulary::Vocabulary;

use crate::error::ApiError;
use crate::params::{self, SamplingFields, StopStrings, StreamOptions};

/// OpenAI's default for this old API.
const DEFAULT_MAX_TOKENS: u32 = 16;
/// Most alternatives that OpenAI reports here.
const LOGPROBS_MAX: u32 = 5;

#[derive(Debug, Clone, Deserialize)]
struct Body {
    model: Option<String>,
    prompt: Option<Prompt>,
    suffix: Option<String>,
    echo: Option<bool>,
    best_of: Option<u32>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<u32>,
    n: Option<u32>,
    stop: Option<StopStrings>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    repetition_penalty: Option<f32>,
    logit_bias: Option<BTreeMap<String, f32>>,
    seed: Option<i64>,
    logprobs: Option<u32>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged, expecting = "expected a string, a list of strings, a list of token ids, or a list of such lists")]
enum Prompt {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<TokenId>),
    TokenLists(Vec<Vec<TokenId>>),
}

/// A completion request, read and checked.
#[derive(Debug, Clone, PartialEq)]
pub struct CompletionRequest {
    /// The model asked for.
    pub model: Option<String>,
    /// Each is continued on its own.
    pub prompts: Vec<Vec<TokenId>>,
    /// Continuations of each prompt.
    pub num_choices: u32,
    /// How to draw tokens.
    pub sampling: Sampling,
    /// Most output tokens.
    pub max_tokens: u32,
    /// Texts that end a continuation.
    pub stop: Vec<String>,
    /// Server-sent events instead of one body.
    pub stream: bool,
    /// End the stream with a chunk that tells what it cost.
    pub include_usage: bool,
}

/// Reads the body of a request. Text is encoded as text: it never becomes a control token. Token lists may hold any
/// token.
///
/// # Errors
/// 400, naming the first field that is wrong or that cannot be honoured.
pub fn lower(
    body: &Value,
    vocabulary: &Vocabulary,
    drawn_seed: u64,
    choices_max: u32,
) -> Result<CompletionRequest, ApiError> {
    let body: Body = params::read(body)?;
    let refused = [
        ("suffix", body.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()), "suffix is not supported"),
        ("echo", body.echo == Some(true), "echo is not supported"),
        ("best_of", body.best_of.is_some_and(|best_of| best_of > 1), "best_of is not supported: use n"),
    ];
    if let Some((param, _, message)) = refused.into_iter().find(|(_, asked_for, _)| *asked_for) {
        return Err(ApiError::unsupported(param, message));
    }
    if let Some(logprobs) = body.logprobs.filter(|logprobs| *logprobs > LOGPROBS_MAX) {
        return Err(ApiError::invalid(
            "logprobs",
            format!("logprobs is {logprobs}, at most {LOGPROBS_MAX} is allowed"),
        ));
    }
    let num_choices = params::num_choices(body.n, choices_max)?;
    let prompts = prompts(body.prompt, num_choices, choices_max, vocabulary)?;
    let sampling = SamplingFields {
        temperature: body.temperature,
        top_p: body.top_p,
        top_k: body.top_k,
        min_p: body.min_p,
        presence_penalty: body.presence_penalty,
        frequency_penalty: body.frequency_penalty,
        repetition_penalty: body.repetition_penalty,
        logit_bias: body.logit_bias,
        seed: body.seed,
        logprobs: body.logprobs,
    };
    let stream = body.stream.unwrap_or(false);
    Ok(CompletionRequest {
        model: body.model,
        prompts,
        num_choices,
        sampling: sampling.resolve(drawn_seed)?,
        max_tokens: body.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS),
        stop: body.stop.map_or(Ok(Vec::new()), StopStrings::checked)?,
        stream,
        include_usage: stream && body.stream_options.unwrap_or_default().include_usage.unwrap_or(false),
    })
}

/// The prompts as tokens. They are counted before any is encoded: each is answered `num_choices` times, with at most `choices_max` answers.
fn prompts(
    prompt: Option<Prompt>,
    num_choices: u32,
    choices_max: u32,
    vocabulary: &Vocabulary,
) -> Result<Vec<Vec<TokenId>>, ApiError> {
    let prompt = prompt.ok_or_else(|| ApiError::invalid("prompt", "prompt is missing"))?;
    let num_prompts = match &prompt {
        Prompt::Text(_) | Prompt::Tokens(_) => 1,
        Prompt::Texts(texts) => texts.len(),
        Prompt::TokenLists(lists) => lists.len(),
    };
    if num_prompts > (choices_max / num_choices) as usize {
        let message =
            format!("{num_prompts} prompts with n = {num_choices}: at most {choices_max} answers are allowed");
        return Err(ApiError::invalid("prompt", message));
    }
    let prompts = match prompt {
        Prompt::Text(text) => vec![vocabulary.encode(&text)],
        Prompt::Texts(texts) => texts.iter().map(|text| vocabulary.encode(text)).collect(),
        Prompt::Tokens(tokens) => vec![tokens],
        Prompt::TokenLists(lists) => lists,
    };
    if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
        return Err(ApiError::invalid("prompt", "prompt is empty"));
    }
    Ok(prompts)
}

#[cfg(test)]
mod tests;
