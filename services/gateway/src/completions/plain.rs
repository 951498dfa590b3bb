//! Reads generated tokens as nothing but text.

use std::sync::Arc;

use format::chat::{Channel, Event, Header, Parser, Role};
use types::TokenId;
use vocabulary::{Utf8Decoder, Vocabulary};

/// One answer without a channel's frame: every token's bytes, control tokens left out.
pub struct PlainParser {
    vocabulary: Arc<Vocabulary>,
    decoder: Utf8Decoder,
    begun: bool,
    body_tokens: u32,
}

impl PlainParser {
    /// Spells tokens with `vocabulary`.
    #[must_use]
    pub fn new(vocabulary: Arc<Vocabulary>) -> Self {
        Self { vocabulary, decoder: Utf8Decoder::default(), begun: false, body_tokens: 0 }
    }

    /// The answer is one message from its first token on.
    fn begin(&mut self, events: &mut Vec<Event>) {
        if !std::mem::replace(&mut self.begun, true) {
            events.push(Event::Header(Header {
                role: Role::Assistant,
                name: None,
                recipient: None,
                channel: Some(Channel::Answer),
                content_type: None,
            }));
        }
    }
}

impl Parser for PlainParser {
    fn push(&mut self, token: TokenId, events: &mut Vec<Event>) {
        self.begin(events);
        self.body_tokens += 1;
        if let Some(bytes) = self.vocabulary.token_bytes(token) {
            let mut text = String::new();
            self.decoder.push(bytes, &mut text);
            if !text.is_empty() {
                events.push(Event::Body(text));
            }
        }
    }

    fn finish(&mut self, events: &mut Vec<Event>) {
        self.begin(events);
        let mut text = String::new();
        self.decoder.finish(&mut text);
        if !text.is_empty() {
            events.push(Event::Body(text));
        }
        events.push(Event::End { complete: true, body_tokens: self.body_tokens });
    }
}
