//! A conversation as a client states it, before any format has written it down.

use serde_json::Value;

/// Everything of a chat request that reaches the prompt. How to sample the answer is no part of it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Conversation {
    /// What was said so far, oldest first. The index of a message here is its index in the request.
    pub messages: Vec<Message>,
    /// Functions that the client can run, in the order of the request.
    pub tools: Vec<ToolDefinition>,
    /// Whether and which of `tools` the model may call.
    pub tool_choice: ToolChoice,
    /// The shape that the answer must have.
    pub response_format: ResponseFormat,
    /// How long the model should think.
    pub reasoning_effort: ReasoningEffort,
    /// The date to tell the model, `YYYY-MM-DD`; the prompt has no date without it. An input, so that rendering needs no clock and
    /// the same request gives the same prompt.
    pub current_date: Option<String>,
    /// Replaces the format's sentence on who the model is.
    pub model_identity: Option<String>,
    /// Replaces the format's knowledge cutoff, `YYYY-MM`.
    pub knowledge_cutoff: Option<String>,
}

impl Conversation {
    /// The functions that the prompt offers: none with [`ToolChoice::None`], the only way to keep a model from calling one.
    #[must_use]
    pub fn offered_tools(&self) -> &[ToolDefinition] {
        if self.tool_choice == ToolChoice::None { &[] } else { &self.tools }
    }
}

/// One message. Text that came in parts has been joined: no format here reads anything but text.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    /// Instructions of the application (`system` or `developer` on the wire: both mean the same).
    Instructions {
        /// The instructions.
        text: String,
    },
    /// What the user said.
    User {
        /// Tells users of one conversation apart.
        name: Option<String>,
        /// The words.
        text: String,
    },
    /// What the model said, in the order of generation: reasoning, text, calls.
    Assistant {
        /// Thoughts behind this message, if the client kept them.
        reasoning: Option<String>,
        /// The answer, or beside calls a preamble to them. `None` is "said nothing", `""` is an empty answer.
        content: Option<String>,
        /// Functions called, in order.
        tool_calls: Vec<ToolCall>,
    },
    /// What a function returned.
    ToolResult {
        /// The [`ToolCall::id`] that it answers; the call comes earlier in the conversation.
        call_id: String,
        /// The result, passed on as it is.
        text: String,
    },
}

/// A call that the model made earlier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// Ties results to calls. If two calls share an id, a result belongs to the latest one before it.
    pub id: String,
    /// The function, without any namespace.
    pub name: String,
    /// The arguments, byte for byte as the model wrote them; usually JSON.
    pub arguments: String,
}

/// A function that the client offers.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolDefinition {
    /// The name to call it by.
    pub name: String,
    /// What it does; may have several lines.
    pub description: Option<String>,
    /// JSON schema of the arguments; `None` means that there are none.
    pub parameters: Option<Value>,
    /// Arguments must follow the schema exactly. Nothing in the prompt: a constraint on decoding.
    pub strict: bool,
}

/// Whether the model may or must call a function.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// No call: the functions are left out of the prompt.
    None,
    /// At least one call. Nothing in the prompt: a constraint on decoding.
    Required,
    /// A call of this function. Nothing in the prompt: a constraint on decoding.
    Named(String),
}

/// The shape that an answer must have.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum ResponseFormat {
    /// Any text.
    #[default]
    Text,
    /// Any JSON object. Nothing in the prompt: a constraint on decoding.
    JsonObject,
    /// JSON that follows a schema, which the prompt shows to the model.
    JsonSchema(SchemaFormat),
}

/// A named JSON schema for answers.
#[derive(Debug, Clone, PartialEq)]
pub struct SchemaFormat {
    /// The name of the format.
    pub name: String,
    /// What it is for; may have several lines.
    pub description: Option<String>,
    /// The schema, keys in the order of the request.
    pub schema: Value,
    /// The answer must follow the schema exactly. Nothing in the prompt: a constraint on decoding.
    pub strict: bool,
}

/// How long the model should think.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum ReasoningEffort {
    /// Little or not at all.
    Low,
    /// The usual amount.
    #[default]
    Medium,
    /// As long as it takes.
    High,
}

impl ReasoningEffort {
    /// The word for it in prompts and requests.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
        }
    }
}
