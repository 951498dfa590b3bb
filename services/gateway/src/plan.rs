//! A request for answers, whichever API it came by: what the three lowerings yield and the one generation path takes.

use format::chat::{Conversation, ResponseFormat, ToolChoice};
use types::Sampling;

use crate::error::ApiError;

/// What to ask the model, and how.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatPlan {
    /// What reaches the prompt.
    pub conversation: Conversation,
    /// How to draw tokens; the same for all answers but for [`Sampling::choice`].
    pub sampling: Sampling,
    /// Most output tokens of an answer; `None` means as many as the context holds.
    pub max_tokens: Option<u32>,
    /// Number of answers.
    pub num_choices: u32,
    /// Texts that end the visible answer.
    pub stop: Vec<String>,
}

/// What the prompt says where a request does not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PromptDefaults {
    /// Replaces the format's own sentence on who the model is.
    pub model_identity: Option<String>,
    /// Replaces the format's own knowledge cutoff.
    pub knowledge_cutoff: Option<String>,
    /// `YYYY-MM-DD`.
    pub current_date: Option<String>,
}

/// What a lowering needs beside the request.
#[derive(Debug, Clone)]
pub struct LoweringContext {
    /// What the prompt says where a request does not.
    pub defaults: PromptDefaults,
    /// Seed of a request that has none.
    pub drawn_seed: u64,
    /// Most answers to one prompt.
    pub choices_max: u32,
}

/// Refuses what only a constraint on sampling could guarantee. A schema that is not strict is shown to the model and
/// that is all it asks for; `strict` of a function is taken as such a wish too, since the Responses API sets it where a
/// client says nothing.
///
/// # Errors
/// 400, naming the field.
pub fn refuse_constraints(conversation: &Conversation, format_param: &str) -> Result<(), ApiError> {
    let unsupported = |param, what| {
        let message = format!("{what} needs constrained decoding, which this server does not have");
        Err(ApiError::unsupported(param, message))
    };
    match &conversation.tool_choice {
        ToolChoice::Required => return unsupported("tool_choice", "tool_choice `required`"),
        ToolChoice::Named(_) => return unsupported("tool_choice", "a tool_choice that names a function"),
        ToolChoice::Auto | ToolChoice::None => {}
    }
    match &conversation.response_format {
        ResponseFormat::JsonObject => unsupported(format_param, "the format `json_object`"),
        ResponseFormat::JsonSchema(schema) if schema.strict => {
            unsupported(format_param, "a format `json_schema` with `strict`")
        }
        ResponseFormat::JsonSchema(_) | ResponseFormat::Text => Ok(()),
    }
}
