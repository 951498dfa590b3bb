//! The body of `POST /v1/responses`. Unknown fields are ignored; `null` means absent.

use serde::Deserialize;
use serde_json::{Map, Value, json};

/// A request of the Responses API.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct ResponsesRequest {
    /// Name of the served model; absent means the one that is served.
    pub(super) model: Option<String>,
    /// A user's text, or the conversation as items.
    pub(super) input: Option<Input>,
    /// Instructions that come before those in `input`.
    pub(super) instructions: Option<String>,
    pub(super) tools: Option<Vec<ToolEntry>>,
    pub(super) tool_choice: Option<ToolChoiceField>,
    pub(super) parallel_tool_calls: Option<bool>,
    pub(super) text: Option<TextOptions>,
    pub(super) reasoning: Option<ReasoningOptions>,
    pub(super) stream: Option<bool>,
    pub(super) max_output_tokens: Option<u32>,
    pub(super) temperature: Option<f32>,
    pub(super) top_p: Option<f32>,
    pub(super) top_logprobs: Option<u32>,
    pub(super) metadata: Option<Map<String, Value>>,
    pub(super) user: Option<String>,
    pub(super) truncation: Option<String>,
    /// These need a server that remembers; see [`History`](super::History).
    pub(super) store: Option<bool>,
    pub(super) previous_response_id: Option<String>,
    pub(super) conversation: Option<Value>,
    pub(super) background: Option<bool>,
    /// A prompt template kept by the server; refused.
    pub(super) prompt: Option<Value>,
}

/// The `input` field.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of items")]
pub(super) enum Input {
    /// One message of the user.
    Text(String),
    /// Items, read one by one so that an error names its item.
    Items(Vec<Value>),
}

/// The input as items.
pub(super) fn items(input: Option<&Input>) -> Vec<Value> {
    match input {
        None => Vec::new(),
        Some(Input::Text(text)) => vec![json!({ "type": "message", "role": "user", "content": text })],
        Some(Input::Items(items)) => items.clone(),
    }
}

/// An input item, all kinds in one: which fields it must have depends on `kind`.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct Item {
    /// `message` where absent.
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) role: Option<String>,
    pub(super) content: Option<ItemText>,
    pub(super) summary: Option<ItemText>,
    pub(super) call_id: Option<String>,
    pub(super) name: Option<String>,
    pub(super) arguments: Option<String>,
    pub(super) output: Option<ItemText>,
}

/// Text of an item, whole or in parts.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of parts with a type")]
pub(super) enum ItemText {
    Whole(String),
    Parts(Vec<Part>),
}

/// A part of an item's text.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Part {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) text: Option<String>,
    pub(super) refusal: Option<String>,
}

/// A tool that the model may call.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct ToolEntry {
    /// `function`; other kinds are run by OpenAI's servers and are left out of the prompt.
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) name: Option<String>,
    pub(super) description: Option<String>,
    pub(super) parameters: Option<Value>,
    pub(super) strict: Option<bool>,
}

/// Whether the model calls functions.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged, expecting = "expected a string or an object with a type")]
pub(super) enum ToolChoiceField {
    /// `auto`, `none` or `required`.
    Mode(String),
    /// A function by name, or another kind of tool.
    Tool {
        #[serde(rename = "type")]
        kind: String,
        name: Option<String>,
    },
}

/// How the answer's text must look.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct TextOptions {
    pub(super) format: Option<TextFormat>,
}

/// `text`, `json_object`, or `json_schema` with its fields beside it.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct TextFormat {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) name: Option<String>,
    pub(super) description: Option<String>,
    pub(super) schema: Option<Value>,
    pub(super) strict: Option<bool>,
}

/// How the model reasons.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct ReasoningOptions {
    pub(super) effort: Option<String>,
    /// Summaries are not made: the reasoning itself is in the answer. Echoed only.
    pub(super) summary: Option<String>,
}
