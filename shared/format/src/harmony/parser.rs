//! What the model writes, read one token at a time. No sequence of tokens makes it fail.
//!
//! Between messages, in a header, in a body, over: what each token does in each state is [`HarmonyParser::push`]. Headers
//! without a message token give their text when they end, see [`Draft::recover`].

use std::sync::Arc;

use types::TokenId;

use super::control::{ControlTokens, Stop, Symbol};
use super::header::{Break, Draft, Marker, Origin};
use crate::chat::{Channel, Event, Header, Parser, Role};
use vocabulary::{Utf8Decoder, Vocabulary};

/// Reads Harmony.
#[derive(Debug)]
pub struct HarmonyParser {
    vocabulary: Arc<Vocabulary>,
    control: ControlTokens,
    /// Names of the declared functions.
    tools: Vec<String>,
    /// The input is one turn: nothing counts behind its end.
    is_turn: bool,
    /// The assistant has written a message on the channel of answers.
    has_answer: bool,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Between messages.
    Between,
    Header(Draft),
    Body(Body),
    /// Behind the end of the turn.
    Over,
}

#[derive(Debug, Default)]
struct Body {
    decoder: Utf8Decoder,
    num_tokens: u32,
}

impl HarmonyParser {
    pub(super) fn new(
        vocabulary: Arc<Vocabulary>,
        control: ControlTokens,
        opened: Option<Role>,
        tools: Vec<String>,
    ) -> Self {
        let state = opened.map_or(State::Between, |role| State::Header(Draft::new(Origin::Prompt(role))));
        Self { vocabulary, control, tools, is_turn: opened.is_some(), has_answer: false, state }
    }

    fn between(&mut self, symbol: Symbol<'_>, events: &mut Vec<Event>) -> State {
        match symbol {
            Symbol::Start => State::Header(Draft::new(Origin::Start)),
            // The start of a message is missing: this token belongs to a header of the assistant.
            Symbol::Message | Symbol::Channel | Symbol::Constrain | Symbol::Text(_) => {
                self.header(Draft::new(Origin::Implied), symbol, events)
            }
            Symbol::Stop(stop) => self.behind(stop),
            Symbol::Reserved => State::Between,
        }
    }

    fn header(&mut self, mut draft: Draft, symbol: Symbol<'_>, events: &mut Vec<Event>) -> State {
        match symbol {
            Symbol::Message => {
                let header = draft.read(&self.tools);
                self.open(header, events);
                return State::Body(Body::default());
            }
            Symbol::Start => {
                if !draft.is_only_a_role() {
                    self.recover(&draft, Break::Start, events);
                }
                return State::Header(Draft::new(Origin::Start));
            }
            Symbol::Stop(stop) => {
                self.recover(&draft, Break::Stop(stop), events);
                return self.behind(stop);
            }
            Symbol::Channel => draft.push_marker(Marker::Channel),
            Symbol::Constrain => draft.push_marker(Marker::Constrain),
            Symbol::Text(bytes) => draft.push_text(bytes),
            Symbol::Reserved => {}
        }
        State::Header(draft)
    }

    fn body(&mut self, mut body: Body, symbol: Symbol<'_>, events: &mut Vec<Event>) -> State {
        match symbol {
            Symbol::Text(bytes) => {
                let mut text = String::new();
                body.decoder.push(bytes, &mut text);
                body.num_tokens += 1;
                if !text.is_empty() {
                    events.push(Event::Body(text));
                }
                State::Body(body)
            }
            Symbol::Stop(stop) => {
                close(body, true, events);
                self.behind(stop)
            }
            // The end of the message is missing.
            Symbol::Start => {
                close(body, true, events);
                State::Header(Draft::new(Origin::Start))
            }
            Symbol::Channel => {
                close(body, true, events);
                self.header(Draft::new(Origin::Implied), symbol, events)
            }
            Symbol::Message | Symbol::Constrain | Symbol::Reserved => State::Body(body),
        }
    }

    fn behind(&self, stop: Stop) -> State {
        if self.is_turn && stop == Stop::Turn { State::Over } else { State::Between }
    }

    fn open(&mut self, header: Header, events: &mut Vec<Event>) {
        self.has_answer |= header.role == Role::Assistant && header.channel == Some(Channel::Answer);
        events.push(Event::Header(header));
    }

    /// Gives out what a header without message token holds.
    fn recover(&mut self, draft: &Draft, broken_by: Break, events: &mut Vec<Event>) {
        let Some(recovered) = draft.recover(broken_by, &self.tools) else { return };
        // Text between two messages is a slip of the model if another message follows or the answer is there already.
        let is_stray = draft.is_implied() && recovered.is_plain && (broken_by == Break::Start || self.has_answer);
        if is_stray {
            return;
        }
        self.open(recovered.header, events);
        events.push(Event::Body(recovered.content));
        events.push(Event::End { complete: broken_by != Break::EndOfInput, body_tokens: recovered.content_tokens });
    }
}

fn close(mut body: Body, complete: bool, events: &mut Vec<Event>) {
    let mut text = String::new();
    body.decoder.finish(&mut text);
    if !text.is_empty() {
        events.push(Event::Body(text));
    }
    events.push(Event::End { complete, body_tokens: body.num_tokens });
}

impl Parser for HarmonyParser {
    fn push(&mut self, token: TokenId, events: &mut Vec<Event>) {
        let vocabulary = Arc::clone(&self.vocabulary);
        let symbol = self.control.symbol(token, &vocabulary);
        self.state = match std::mem::replace(&mut self.state, State::Over) {
            State::Between => self.between(symbol, events),
            State::Header(draft) => self.header(draft, symbol, events),
            State::Body(body) => self.body(body, symbol, events),
            State::Over => State::Over,
        };
    }

    fn finish(&mut self, events: &mut Vec<Event>) {
        match std::mem::replace(&mut self.state, State::Over) {
            State::Header(draft) => self.recover(&draft, Break::EndOfInput, events),
            State::Body(body) => close(body, false, events),
            State::Between | State::Over => {}
        }
    }
}
