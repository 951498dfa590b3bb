//! What a Chat Completions body says beside the conversation itself, which [`format::chat::completions`] reads. Unknown
//! fields are ignored; `null` means absent.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use crate::params::{StopStrings, StreamOptions};

/// Options of a chat completion request.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct ChatOptions {
    /// Name of the served model; absent means the one that is served.
    pub(super) model: Option<String>,
    /// Server-sent events instead of one body.
    pub(super) stream: Option<bool>,
    pub(super) stream_options: Option<StreamOptions>,
    /// Most output tokens, reasoning counted in; the older name.
    pub(super) max_tokens: Option<u32>,
    /// Most output tokens, reasoning counted in.
    pub(super) max_completion_tokens: Option<u32>,
    /// Number of answers.
    pub(super) n: Option<u32>,
    pub(super) stop: Option<StopStrings>,
    pub(super) temperature: Option<f32>,
    pub(super) top_p: Option<f32>,
    /// `top_k`, `min_p` and `repetition_penalty` are not in OpenAI's API, but other servers take them.
    pub(super) top_k: Option<u32>,
    pub(super) min_p: Option<f32>,
    pub(super) repetition_penalty: Option<f32>,
    pub(super) presence_penalty: Option<f32>,
    pub(super) frequency_penalty: Option<f32>,
    /// Token id, as text, to bias.
    pub(super) logit_bias: Option<BTreeMap<String, f32>>,
    pub(super) seed: Option<i64>,
    /// Report log-probabilities of the visible answer's tokens.
    pub(super) logprobs: Option<bool>,
    /// And of this many alternatives.
    pub(super) top_logprobs: Option<u32>,
    pub(super) chat_template_kwargs: Option<TemplateKwargs>,
    /// Kinds of output; only text can be had.
    pub(super) modalities: Option<Vec<String>>,
    pub(super) audio: Option<Value>,
    /// Predecessors of `tools` and `tool_choice`; refused.
    pub(super) functions: Option<Value>,
    pub(super) function_call: Option<Value>,
}

/// What the prompt says about the model and the date. Each absent one has the gateway's default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub(super) struct TemplateKwargs {
    pub(super) model_identity: Option<String>,
    /// Year and month.
    pub(super) knowledge_cutoff: Option<String>,
    /// `YYYY-MM-DD`.
    pub(super) current_date: Option<String>,
}
