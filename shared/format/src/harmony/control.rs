//! The control tokens, by number.

use types::TokenId;

use vocabulary::Vocabulary;

/// The vocabulary is not one of Harmony's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the vocabulary has no token {name}, which the format harmony needs")]
pub struct MissingToken {
    /// The token's name.
    pub name: &'static str,
}

/// The numbers of the control tokens in one vocabulary.
#[derive(Debug, Clone, Copy)]
pub(super) struct ControlTokens {
    pub(super) start: TokenId,
    pub(super) end: TokenId,
    pub(super) message: TokenId,
    pub(super) channel: TokenId,
    pub(super) constrain: TokenId,
    pub(super) call: TokenId,
    pub(super) r#return: TokenId,
    pub(super) end_of_text: TokenId,
}

/// What a token is to the parser.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Symbol<'v> {
    Start,
    Message,
    Channel,
    Constrain,
    /// Ends a message.
    Stop(Stop),
    /// An ordinary token, and its bytes.
    Text(&'v [u8]),
    /// A special token without meaning in the format, or no token at all: never shown.
    Reserved,
}

/// The tokens that end a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    End,
    Call,
    /// Return or end of text: the turn is over as well.
    Turn,
}

impl ControlTokens {
    pub(super) fn find(vocabulary: &Vocabulary) -> Result<Self, MissingToken> {
        let token = |name| vocabulary.special(name).ok_or(MissingToken { name });
        Ok(Self {
            start: token("<|start|>")?,
            end: token("<|end|>")?,
            message: token("<|message|>")?,
            channel: token("<|channel|>")?,
            constrain: token("<|constrain|>")?,
            call: token("<|call|>")?,
            r#return: token("<|return|>")?,
            end_of_text: token("<|endoftext|>")?,
        })
    }

    pub(super) fn symbol<'v>(&self, token: TokenId, vocabulary: &'v Vocabulary) -> Symbol<'v> {
        if let Some(bytes) = vocabulary.token_bytes(token) {
            return Symbol::Text(bytes);
        }
        match token {
            _ if token == self.start => Symbol::Start,
            _ if token == self.message => Symbol::Message,
            _ if token == self.channel => Symbol::Channel,
            _ if token == self.constrain => Symbol::Constrain,
            _ if token == self.end => Symbol::Stop(Stop::End),
            _ if token == self.call => Symbol::Stop(Stop::Call),
            _ if token == self.r#return || token == self.end_of_text => Symbol::Stop(Stop::Turn),
            _ => Symbol::Reserved,
        }
    }
}
