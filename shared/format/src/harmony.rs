//! Harmony, the format of gpt-oss.
//!
//! A message is `<|start|>` author `[ to=recipient]` `[<|channel|>` channel`]` `[ type]` `<|message|>` body `<|end|>`, where the
//! angle brackets are single tokens; calls of tools end with `<|call|>`, and the model ends its turn with `<|return|>`.
//! Conversations become [`Message`]s (`lower`), those become tokens (`render`, with the texts of `blocks` and
//! `typescript`); what the model writes is read by [`HarmonyParser`], which forgives every departure from the grammar.

mod blocks;
mod constraint;
mod control;
mod header;
mod lower;
mod message;
mod parser;
mod recipient;
mod render;
mod schema;
mod typescript;

use std::sync::Arc;

use types::TokenId;

use crate::chat::{ChatFormat, Conversation, Parser, Prompt, RenderError, Role, TurnConstraint, TurnContext};
use vocabulary::Vocabulary;

use control::ControlTokens;
pub use control::MissingToken;
pub use message::{BuiltinTool, Content, DeveloperBlock, Ending, Message, RenderOptions, SystemBlock};
pub use parser::HarmonyParser;
pub use schema::SchemaTypes;

/// The names of the channels.
const ANALYSIS: &str = "analysis";
const COMMENTARY: &str = "commentary";
const FINAL: &str = "final";

/// The namespace of the client's functions.
const FUNCTIONS: &str = "functions";

/// Harmony over a vocabulary that has its control tokens.
#[derive(Debug, Clone)]
pub struct Harmony {
    vocabulary: Arc<Vocabulary>,
    control: ControlTokens,
    stop_token_ids: [TokenId; 3],
    schema_types: SchemaTypes,
}

impl Harmony {
    /// Looks up the control tokens in `vocabulary`.
    ///
    /// # Errors
    /// Names the token that the vocabulary lacks.
    pub fn new(vocabulary: Arc<Vocabulary>) -> Result<Self, MissingToken> {
        let control = ControlTokens::find(&vocabulary)?;
        let stop_token_ids = [control.r#return, control.call, control.end_of_text];
        Ok(Self { vocabulary, control, stop_token_ids, schema_types: SchemaTypes::default() })
    }

    /// Changes how much of a function's JSON schema the prompt shows.
    #[must_use]
    pub fn with_schema_types(self, schema_types: SchemaTypes) -> Self {
        Self { schema_types, ..self }
    }

    /// Writes messages as they are: the layer below [`ChatFormat::render`].
    #[must_use]
    pub fn render_messages(&self, messages: &[Message], options: RenderOptions) -> Vec<TokenId> {
        render::messages(self, messages, options)
    }

    /// A parser whose input begins in the header of `opened`, as after a prompt, and ends with that turn; or, with `None`, of a
    /// whole transcript. `tools` are the names of the declared functions.
    #[must_use]
    pub fn parser_of(&self, opened: Option<Role>, tools: &[String]) -> HarmonyParser {
        HarmonyParser::new(Arc::clone(&self.vocabulary), self.control, opened, tools.to_vec())
    }
}

impl ChatFormat for Harmony {
    fn name(&self) -> &'static str {
        "harmony"
    }

    fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// Return, call and end of text; the end of a message is not the end of a turn.
    fn stop_token_ids(&self) -> &[TokenId] {
        &self.stop_token_ids
    }

    fn render(&self, conversation: &Conversation) -> Result<Prompt, RenderError> {
        let messages = lower::messages(conversation)?;
        let options = RenderOptions { ending: Ending::Open(Role::Assistant), drop_analysis: true };
        let tools = conversation.offered_tools().iter().map(|tool| tool.name.clone()).collect();
        Ok(Prompt { tokens: self.render_messages(&messages, options), turn: TurnContext { tools } })
    }

    fn constraint(&self, conversation: &Conversation) -> Option<TurnConstraint> {
        constraint::of_turn(conversation, &self.control)
    }

    fn parser(&self, turn: &TurnContext) -> Box<dyn Parser> {
        Box::new(self.parser_of(Some(Role::Assistant), &turn.tools))
    }
}
