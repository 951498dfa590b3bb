//! Messages as Harmony writes them: what a renderer is given once a conversation has been lowered.

use crate::chat::{ContentType, ReasoningEffort, Role, SchemaFormat, ToolDefinition};

/// A message.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// Tells users apart (`user:dana`); in the author's place for tools (`functions.search`).
    pub name: Option<String>,
    /// To whom, namespace included. `all` is not written.
    pub recipient: Option<String>,
    /// `analysis`, `commentary` or `final`.
    pub channel: Option<String>,
    /// What the body is written in.
    pub content_type: Option<ContentType>,
    /// The body.
    pub content: Content,
}

impl Message {
    /// A message with a role and a body only.
    #[must_use]
    pub fn new(role: Role, content: Content) -> Self {
        Self { role, name: None, recipient: None, channel: None, content_type: None, content }
    }

    /// The same on a channel.
    #[must_use]
    pub(super) fn on(self, channel: &str) -> Self {
        Self { channel: Some(channel.to_owned()), ..self }
    }
}

/// The body of a message.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// Texts that follow each other without separator, each encoded by itself.
    Text(Vec<String>),
    /// The system block.
    System(SystemBlock),
    /// A developer block.
    Developer(DeveloperBlock),
}

impl From<String> for Content {
    fn from(text: String) -> Self {
        Self::Text(vec![text])
    }
}

/// What the model is told about itself. What is `None` leaves no line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SystemBlock {
    /// Who the model is; may have several lines.
    pub model_identity: Option<String>,
    /// `YYYY-MM`.
    pub knowledge_cutoff: Option<String>,
    /// `YYYY-MM-DD`.
    pub current_date: Option<String>,
    /// How long to think.
    pub reasoning_effort: Option<ReasoningEffort>,
    /// Tools that the server runs.
    pub builtin_tools: Vec<BuiltinTool>,
    /// The channels that a message may be on.
    pub valid_channels: Option<Vec<String>>,
    /// Every message must be on one.
    pub channel_required: bool,
}

impl Default for SystemBlock {
    /// As the model was trained: everything but a date and tools.
    fn default() -> Self {
        Self {
            model_identity: Some("You are ChatGPT, a large language model trained by OpenAI.".to_owned()),
            knowledge_cutoff: Some("2024-06".to_owned()),
            current_date: None,
            reasoning_effort: Some(ReasoningEffort::Medium),
            builtin_tools: Vec::new(),
            valid_channels: Some([super::ANALYSIS, super::COMMENTARY, super::FINAL].map(str::to_owned).to_vec()),
            channel_required: true,
        }
    }
}

/// A tool that the model was trained to use and the server would run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BuiltinTool {
    /// Web search.
    Browser,
    /// A Jupyter notebook.
    Python,
}

/// What the application tells the model.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DeveloperBlock {
    /// Instructions. An empty text still writes the heading.
    pub instructions: Option<String>,
    /// Functions of the client. An empty list still writes the headings.
    pub functions: Option<Vec<ToolDefinition>>,
    /// The schema that an answer must follow.
    pub response_format: Option<SchemaFormat>,
}

/// What stands behind the last message, and what is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RenderOptions {
    /// What stands behind the last message.
    pub ending: Ending,
    /// Leave out all messages on `analysis` that precede the last answer: finished turns keep no reasoning, a running tool loop
    /// keeps all of its own, so that its prompt extends the one of the step before.
    pub drop_analysis: bool,
}

/// What stands behind the last message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The opened header of the next speaker, for the model to go on.
    Open(Role),
    /// Nothing.
    Closed,
    /// Nothing, but a last answer ends with the return token: a turn as the model writes it.
    Training,
}
