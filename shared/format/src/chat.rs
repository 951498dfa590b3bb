//! What a chat is, whatever format a model was trained on.
//!
//! [`conversation`] holds what goes in, [`format`](mod@format) the plug-in ([`ChatFormat`], [`Parser`] and its events), [`deltas`] the way from
//! events to the fields of an answer, [`completions`] the reading of a Chat Completions request body, [`constraint`] the shape that a turn must have.

pub mod completions;
pub mod constraint;
pub mod conversation;
pub mod deltas;
pub mod format;

pub use completions::InvalidField;
pub use constraint::{JsonShape, SchemaPlace, TurnConstraint};
pub use conversation::{
    Conversation, Message, ReasoningEffort, ResponseFormat, SchemaFormat, ToolCall, ToolChoice, ToolDefinition,
};
pub use deltas::{Answer, AnswerCall, CallDelta, ChatFinish, ChatStream, Delta, Field, Finished, TextDelta};
pub use format::{
    Channel, ChatFormat, ContentType, Event, Header, Parser, Prompt, Recipient, RenderError, Role, TurnContext,
};
