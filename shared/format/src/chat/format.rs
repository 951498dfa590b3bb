//! The plug-in: how one family of models writes conversations as tokens.

use std::sync::Arc;

use types::TokenId;

use crate::chat::constraint::TurnConstraint;
use crate::chat::conversation::Conversation;
use vocabulary::Vocabulary;

/// A chat format over a vocabulary. Implementations are immutable and shared by all requests.
pub trait ChatFormat: Send + Sync {
    /// The format's name, for logs and configuration: `harmony`.
    fn name(&self) -> &'static str;

    /// The vocabulary whose tokens [`render`](Self::render) writes and parsers read.
    fn vocabulary(&self) -> &Arc<Vocabulary>;

    /// Tokens at which generation must stop. The token itself is still to be given to the parser.
    fn stop_token_ids(&self) -> &[TokenId];

    /// Writes the prompt: the conversation, and the beginning of the model's turn.
    ///
    /// Text of the conversation never becomes a control token, whatever it spells.
    ///
    /// # Errors
    /// The conversation contradicts itself; the error names the message.
    fn render(&self, conversation: &Conversation) -> Result<Prompt, RenderError>;

    /// What the model's turn must look like, from the first token behind [`Prompt::tokens`] to the stop token; `None` if the conversation
    /// asks for nothing but text and calls as the model likes them. Asks for a call only of tools that the conversation offers.
    fn constraint(&self, conversation: &Conversation) -> Option<TurnConstraint>;

    /// A parser for what the model writes after [`Prompt::tokens`].
    fn parser(&self, turn: &TurnContext) -> Box<dyn Parser>;
}

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// What the model continues.
    pub tokens: Vec<TokenId>,
    /// What the parser of the answer must know about it.
    pub turn: TurnContext,
}

/// What a parser must know about the turn that it reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TurnContext {
    /// Names of the functions that the prompt offers.
    pub tools: Vec<String>,
}

/// Reads generated tokens. Total: any sequence of tokens is an answer, and how it is cut into calls changes nothing.
pub trait Parser: Send {
    /// Reads one token; appends what it completes.
    fn push(&mut self, token: TokenId, events: &mut Vec<Event>);

    /// The input ends here, for whatever reason. Appends what was held back, the end of an open message included.
    fn finish(&mut self, events: &mut Vec<Event>);
}

/// What a parser sees. A message is one [`Event::Header`], any number of [`Event::Body`], one [`Event::End`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A message begins; everything known about it is in the header.
    Header(Header),
    /// More text of the message: never empty, never half a character, never the text of a control token.
    Body(String),
    /// The message ends.
    End {
        /// `false`: the input ended inside the message.
        complete: bool,
        /// Generated tokens that make up the body, those that gave no text counted in.
        body_tokens: u32,
    },
}

/// Who speaks, to whom, on which channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Who speaks.
    pub role: Role,
    /// The speaker's name, if the header gives one.
    pub name: Option<String>,
    /// To whom, if not to the reader.
    pub recipient: Option<Recipient>,
    /// What kind of message it is, if the header says so.
    pub channel: Option<Channel>,
    /// What the body is written in, if the header says so.
    pub content_type: Option<ContentType>,
}

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// The server.
    System,
    /// The application.
    Developer,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// A tool that answers a call.
    Tool,
}

impl Role {
    /// The word for it in prompts and requests.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Developer => "developer",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }

    /// The role that `word` names.
    #[must_use]
    pub fn from_word(word: &str) -> Option<Self> {
        [Self::System, Self::Developer, Self::User, Self::Assistant, Self::Tool]
            .into_iter()
            .find(|role| role.as_str() == word)
    }
}

/// To whom a message goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Recipient {
    /// A function of the client, by its name without namespace; declared or not.
    Function(String),
    /// Anything else, as the model wrote it: a tool of the server, or a participant.
    Other(String),
}

/// What kind of message it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Channel {
    /// Thoughts.
    Reasoning,
    /// Words to the user before the answer, and calls.
    Commentary,
    /// The answer.
    Answer,
    /// A channel that the format does not have.
    Unknown(String),
}

/// What a body is written in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContentType {
    /// The model announced it by its format's control token, not by a plain word.
    pub constrained: bool,
    /// The type: `json`, `code`. Empty if only the control token is there.
    pub name: String,
}

/// The conversation contradicts itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RenderError {
    /// A result answers a call that no earlier message made.
    #[error("messages[{message_idx}].tool_call_id: no earlier tool call has the id {id:?}")]
    UnknownToolCall {
        /// Index of the result.
        message_idx: usize,
        /// The id that it names.
        id: String,
    },
}

impl RenderError {
    /// The place in the request, as an error answer names it: `messages[3].tool_call_id`.
    #[must_use]
    pub fn field(&self) -> String {
        match self {
            Self::UnknownToolCall { message_idx, .. } => format!("messages[{message_idx}].tool_call_id"),
        }
    }
}
