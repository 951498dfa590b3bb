//! Messages to tokens.
//!
//! Control tokens are placed by number, texts are encoded as text, piece by piece: the pieces of a header are encoded apart, as
//! in the published renderer, because a token over their border would be a different prompt.

use types::TokenId;

use super::message::{Content, Ending, Message, RenderOptions};
use super::{ANALYSIS, FINAL, Harmony, blocks};
use crate::chat::Role;

/// The recipient that is not written.
const EVERYONE: &str = "all";

pub(super) fn messages(format: &Harmony, messages: &[Message], options: RenderOptions) -> Vec<TokenId> {
    let routes_functions = messages.iter().any(|message| match &message.content {
        Content::Developer(block) => block.functions.as_ref().is_some_and(|functions| !functions.is_empty()),
        Content::Text(_) | Content::System(_) => false,
    });
    let last_answer = messages.iter().rposition(is_answer).filter(|_| options.drop_analysis).unwrap_or(0);
    let is_kept = |i: usize, message: &Message| i >= last_answer || message.channel.as_deref() != Some(ANALYSIS);

    let mut writer = Writer { format, routes_functions, tokens: Vec::new() };
    for (_, message) in messages.iter().enumerate().filter(|(i, message)| is_kept(*i, message)) {
        writer.message(message);
    }
    match options.ending {
        Ending::Open(role) => {
            writer.tokens.push(format.control.start);
            writer.text(role.as_str());
        }
        Ending::Training if messages.last().is_some_and(is_answer) => {
            writer.tokens.pop();
            writer.tokens.push(format.control.r#return);
        }
        Ending::Training | Ending::Closed => {}
    }
    writer.tokens
}

fn is_answer(message: &Message) -> bool {
    message.role == Role::Assistant && message.channel.as_deref() == Some(FINAL)
}

struct Writer<'f> {
    format: &'f Harmony,
    /// Some developer block offers functions, which the system block must mention.
    routes_functions: bool,
    tokens: Vec<TokenId>,
}

impl Writer<'_> {
    fn text(&mut self, text: &str) {
        self.format.vocabulary.encode_into(text, &mut self.tokens);
    }

    fn message(&mut self, message: &Message) {
        self.header(message);
        self.body(&message.content);
        let calls = message.role == Role::Assistant && message.recipient.is_some();
        self.tokens.push(if calls { self.format.control.call } else { self.format.control.end });
    }

    fn header(&mut self, message: &Message) {
        let control = self.format.control;
        self.tokens.push(control.start);
        match (message.role, &message.name) {
            (Role::Tool, Some(name)) => self.text(name),
            (role, Some(name)) => self.text(&format!("{}:{name}", role.as_str())),
            (role, None) => self.text(role.as_str()),
        }
        if let Some(recipient) = message.recipient.as_deref().filter(|recipient| *recipient != EVERYONE) {
            self.text(&format!(" to={recipient}"));
        }
        if let Some(channel) = &message.channel {
            self.tokens.push(control.channel);
            self.text(channel);
        }
        if let Some(content_type) = &message.content_type {
            if content_type.constrained {
                self.text(" ");
                self.tokens.push(control.constrain);
                self.text(&content_type.name);
            } else {
                self.text(&format!(" {}", content_type.name));
            }
        }
        self.tokens.push(control.message);
    }

    fn body(&mut self, content: &Content) {
        match content {
            Content::Text(parts) => parts.iter().for_each(|part| self.text(part)),
            Content::System(block) => self.text(&blocks::system(block, self.routes_functions)),
            Content::Developer(block) => self.text(&blocks::developer(block, self.format.schema_types)),
        }
    }
}
