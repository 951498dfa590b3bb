//! Chat Completions: the body of a request to a [`ChatPlan`], the pieces of its answers to chunks or one body.

mod request;
mod response;

pub use response::{ChatChunk, ChatCompletion, ChunkWriter, FoldedChoice, ResponseHead};

use format::chat::completions;
use serde_json::Value;

use crate::error::ApiError;
use crate::params::{self, SamplingFields};
use crate::plan::{ChatPlan, LoweringContext};
use request::ChatOptions;

/// A chat completion request, read and checked as far as that needs no vocabulary.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest {
    /// The model asked for.
    pub model: Option<String>,
    /// What to ask it, and how.
    pub plan: ChatPlan,
    /// Server-sent events instead of one body.
    pub stream: bool,
    /// End the stream with a chunk that tells what it cost.
    pub include_usage: bool,
}

/// Reads the body of a request.
///
/// # Errors
/// 400, naming the first field that is wrong or that cannot be honoured.
pub fn lower(body: &Value, context: &LoweringContext) -> Result<ChatRequest, ApiError> {
    let options: ChatOptions = params::read(body)?;
    refuse(&options)?;
    let mut conversation =
        completions::conversation(body).map_err(|error| ApiError::invalid(error.field.clone(), error.to_string()))?;
    let kwargs = options.chat_template_kwargs.unwrap_or_default();
    let defaults = context.defaults.clone();
    conversation.model_identity = kwargs.model_identity.or(defaults.model_identity);
    conversation.knowledge_cutoff = kwargs.knowledge_cutoff.or(defaults.knowledge_cutoff);
    conversation.current_date = kwargs.current_date.or(defaults.current_date);
    let sampling = SamplingFields {
        temperature: options.temperature,
        top_p: options.top_p,
        top_k: options.top_k,
        min_p: options.min_p,
        presence_penalty: options.presence_penalty,
        frequency_penalty: options.frequency_penalty,
        repetition_penalty: options.repetition_penalty,
        logit_bias: options.logit_bias,
        seed: options.seed,
        logprobs: logprobs(options.logprobs, options.top_logprobs)?,
    };
    let max_completion_tokens = params::token_limit("max_completion_tokens", options.max_completion_tokens)?;
    let max_tokens = params::token_limit("max_tokens", options.max_tokens)?;
    let plan = ChatPlan {
        conversation,
        sampling: sampling.resolve(context.drawn_seed)?,
        max_tokens: max_completion_tokens.or(max_tokens),
        num_choices: params::num_choices(options.n, context.choices_max)?,
        stop: options.stop.map_or(Ok(Vec::new()), params::StopStrings::checked)?,
    };
    let stream = options.stream.unwrap_or(false);
    let include_usage = options.stream_options.unwrap_or_default().include_usage.unwrap_or(false);
    Ok(ChatRequest { model: options.model, plan, stream, include_usage: stream && include_usage })
}

fn refuse(options: &ChatOptions) -> Result<(), ApiError> {
    let has_functions = options.functions.is_some() || options.function_call.is_some();
    let not_text = options.modalities.as_ref().is_some_and(|kinds| kinds.iter().any(|kind| kind != "text"));
    let refused = [
        ("functions", has_functions, "functions and function_call are not supported: use tools and tool_choice"),
        ("modalities", not_text, "this model writes text only"),
        ("audio", options.audio.is_some(), "this model writes text only"),
    ];
    match refused.into_iter().find(|(_, asked_for, _)| *asked_for) {
        Some((param, _, message)) => Err(ApiError::unsupported(param, message)),
        None => Ok(()),
    }
}

/// Number of alternatives to report, `None` for no log-probabilities at all.
fn logprobs(wanted: Option<bool>, top: Option<u32>) -> Result<Option<u32>, ApiError> {
    match (wanted.unwrap_or(false), top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs to be true")),
    }
}

#[cfg(test)]
mod tests;
