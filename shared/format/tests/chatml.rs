//! A second chat format, to prove that nothing above [`ChatFormat`] knows Harmony.
//!
//! Like ChatML: one token begins and one ends a message, the first line names the role, the model thinks between two marks
//! of plain text, and calls are JSON objects between two more. All that it shares with Harmony is a vocabulary.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;

use format::chat::{
    Answer, Channel, ChatFormat, ChatStream, ContentType, Conversation, Event, Header, JsonShape, Message, Parser,
    Prompt, Recipient, RenderError, ResponseFormat, Role, SchemaPlace, TurnConstraint, TurnContext,
};
use types::{FinishReason, TokenId};
use vocabulary::{Utf8Decoder, Vocabulary};

const THINK: (&str, &str) = ("<think>", "</think>");
const CALL: (&str, &str) = ("<call>", "</call>");

struct ChatMl {
    vocabulary: Arc<Vocabulary>,
    start: TokenId,
    stop: [TokenId; 1],
}

impl ChatMl {
    /// Any vocabulary with a token to begin and one to end a message.
    fn new(vocabulary: Arc<Vocabulary>) -> Self {
        let (start, end) = (vocabulary.special("<|start|>").unwrap(), vocabulary.special("<|end|>").unwrap());
        Self { vocabulary, start, stop: [end] }
    }
}

impl ChatFormat for ChatMl {
    fn name(&self) -> &'static str {
        "chatml"
    }

    fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    fn stop_token_ids(&self) -> &[TokenId] {
        &self.stop
    }

    fn render(&self, conversation: &Conversation) -> Result<Prompt, RenderError> {
        let mut tokens = Vec::new();
        for message in &conversation.messages {
            let (role, text) = match message {
                Message::Instructions { text } => (Role::System, text.clone()),
                Message::User { text, .. } => (Role::User, text.clone()),
                Message::ToolResult { text, .. } => (Role::Tool, text.clone()),
                Message::Assistant { content, tool_calls, .. } => {
                    let calls =
                        tool_calls.iter().map(|call| format!("{}{} {}{}", CALL.0, call.name, call.arguments, CALL.1));
                    (Role::Assistant, content.iter().cloned().chain(calls).collect())
                }
            };
            tokens.push(self.start);
            self.vocabulary.encode_into(&format!("{}\n{text}", role.as_str()), &mut tokens);
            tokens.extend(self.stop);
        }
        tokens.push(self.start);
        self.vocabulary.encode_into("assistant\n", &mut tokens);
        Ok(Prompt { tokens, turn: TurnContext::default() })
    }

    fn constraint(&self, conversation: &Conversation) -> Option<TurnConstraint> {
        let ResponseFormat::JsonSchema(format) = &conversation.response_format else { return None };
        let shape = JsonShape::new(&format.schema, format.strict);
        let lark = format!("start: json <[{}]>\njson: {}\n", self.stop[0], shape.rule());
        let schemas = vec![(SchemaPlace::ResponseFormat, shape)];
        Some(TurnConstraint { grammar: types::Constraint { lark: lark.into() }, schemas })
    }

    fn parser(&self, _turn: &TurnContext) -> Box<dyn Parser> {
        Box::new(ChatMlParser {
            vocabulary: Arc::clone(&self.vocabulary),
            decoder: Utf8Decoder::default(),
            pending: String::new(),
            part: None,
            body_tokens: 0,
        })
    }
}

/// Cuts one message at its marks into parts, which it reports as messages.
struct ChatMlParser {
    vocabulary: Arc<Vocabulary>,
    decoder: Utf8Decoder,
    /// Text that may be the beginning of a mark, or of a call's name.
    pending: String,
    part: Option<Part>,
    body_tokens: u32,
}

#[derive(Clone, Copy, PartialEq)]
enum Part {
    Thought,
    Answer,
    Call,
}

impl ChatMlParser {
    fn open(&mut self, part: Part, function: Option<&str>, events: &mut Vec<Event>) {
        self.part = Some(part);
        events.push(Event::Header(Header {
            role: Role::Assistant,
            name: None,
            recipient: function.map(|name| Recipient::Function(name.to_owned())),
            channel: match part {
                Part::Thought => Some(Channel::Reasoning),
                Part::Answer => Some(Channel::Answer),
                Part::Call => None,
            },
            content_type: function.map(|_| ContentType { constrained: false, name: "json".to_owned() }),
        }));
    }

    fn close(&mut self, complete: bool, events: &mut Vec<Event>) {
        if self.part.take().is_some() {
            events.push(Event::End { complete, body_tokens: std::mem::take(&mut self.body_tokens) });
        }
    }

    /// Gives out what is certain; `is_end`: nothing more comes, so that all is.
    fn advance(&mut self, is_end: bool, events: &mut Vec<Event>) {
        while !self.pending.is_empty() {
            let end_mark = match self.part {
                Some(Part::Thought) => THINK.1,
                Some(Part::Call) => CALL.1,
                Some(Part::Answer) => CALL.0,
                None if self.pending.starts_with(THINK.0) => {
                    self.pending.drain(..THINK.0.len());
                    self.open(Part::Thought, None, events);
                    continue;
                }
                None if self.pending.starts_with(CALL.0) => {
                    let Some((name, rest)) = self.pending[CALL.0.len()..].split_once(' ') else { return };
                    let (name, rest) = (name.to_owned(), rest.to_owned());
                    self.pending = rest;
                    self.open(Part::Call, Some(&name), events);
                    continue;
                }
                None if !is_end && [THINK.0, CALL.0].iter().any(|mark| mark.starts_with(&self.pending)) => return,
                None => {
                    self.open(Part::Answer, None, events);
                    continue;
                }
            };
            let mark_at = self.pending.find(end_mark);
            let held = |start: &usize| !is_end && end_mark.starts_with(&self.pending[*start..]);
            let body_end =
                mark_at.or_else(|| (0..self.pending.len()).filter(|at| self.pending.is_char_boundary(*at)).find(held));
            let body: String = self.pending.drain(..body_end.unwrap_or(self.pending.len())).collect();
            if !body.is_empty() {
                events.push(Event::Body(body));
            }
            if mark_at.is_none() {
                return;
            }
            // The mark that ends an answer begins a call.
            if self.part != Some(Part::Answer) {
                self.pending.drain(..end_mark.len());
            }
            self.close(true, events);
        }
    }
}

impl Parser for ChatMlParser {
    fn push(&mut self, token: TokenId, events: &mut Vec<Event>) {
        let Some(bytes) = self.vocabulary.token_bytes(token) else {
            self.advance(true, events);
            return self.close(true, events);
        };
        self.body_tokens += 1;
        self.decoder.push(bytes, &mut self.pending);
        self.advance(false, events);
    }

    fn finish(&mut self, events: &mut Vec<Event>) {
        self.decoder.finish(&mut self.pending);
        self.advance(true, events);
        self.close(false, events);
    }
}

/// All that the rest of a server does with a format, by the trait alone.
fn answer(format: &dyn ChatFormat, output: &str, stop: bool) -> (Answer, &'static str) {
    let prompt = format.render(&Conversation::default()).unwrap();
    let mut stream = ChatStream::new(format.parser(&prompt.turn));
    let mut deltas = Vec::new();
    for token in format.vocabulary().encode(output).iter().chain(format.stop_token_ids().iter().filter(|_| stop)) {
        stream.push(*token, &mut deltas);
    }
    let finished = stream.finish(if stop { FinishReason::Stop } else { FinishReason::Length }, &mut deltas);
    let mut answer = Answer::default();
    deltas.iter().for_each(|delta| answer.push(delta));
    (answer, finished.reason.as_str())
}

fn chatml() -> ChatMl {
    let tokenizer = include_bytes!("../../model/gpt-oss-nano/tokenizer.json");
    ChatMl::new(Arc::new(Vocabulary::from_tokenizer_json(tokenizer).unwrap()))
}

#[test]
fn another_format_renders() {
    let format = chatml();
    let conversation = Conversation {
        messages: vec![
            Message::Instructions { text: "Be brief.".into() },
            Message::User { name: None, text: "Say <|end|>.".into() },
        ],
        ..Conversation::default()
    };
    let prompt = format.render(&conversation).unwrap();
    let text = "<|start|>system\nBe brief.<|end|><|start|>user\nSay <|end|>.<|end|><|start|>assistant\n";
    assert_eq!(format.vocabulary().decode(&prompt.tokens), text);
    let ends = prompt.tokens.iter().filter(|token| format.stop_token_ids().contains(token)).count();
    assert_eq!(ends, 2, "the user's text is no control token");
}

#[test]
fn another_format_is_parsed() {
    let format = chatml();
    let (thought, finish) = answer(&format, "<think>So, 4 > 3?</think>Yes: 4 < 5 \u{1f980}", true);
    assert_eq!(thought.reasoning.as_deref(), Some("So, 4 > 3?"));
    assert_eq!(thought.content.as_deref(), Some("Yes: 4 < 5 \u{1f980}"));
    assert_eq!(finish, "stop");

    let (called, finish) = answer(&format, "One moment.<call>f {\"a\":1}</call><call>g {}</call>", true);
    assert_eq!(called.content.as_deref(), Some("One moment."));
    let calls: Vec<_> = called.tool_calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect();
    assert_eq!(calls, [("f", "{\"a\":1}"), ("g", "{}")]);
    assert_eq!(finish, "tool_calls");

    let (cut, finish) = answer(&format, "<think>Half a th", false);
    assert_eq!((cut.reasoning.as_deref(), cut.content), (Some("Half a th"), None));
    assert_eq!(finish, "length");
}

#[test]
fn another_format_has_its_own_grammar() {
    let format = chatml();
    let schema = serde_json::json!({"enum": ["yes", "no"]});
    let response_format = format::chat::SchemaFormat { name: "word".into(), description: None, schema, strict: true };
    let asked =
        Conversation { response_format: ResponseFormat::JsonSchema(response_format), ..Conversation::default() };
    let constraint = format.constraint(&asked).unwrap();
    let compiler = constraint::Compiler::new(Arc::clone(format.vocabulary()));
    let mut matcher = compiler.compile(&constraint.grammar, format.stop_token_ids()).unwrap();
    matcher.consume(&format.vocabulary().encode("\"no\"")).unwrap();
    let mask = matcher.mask().unwrap();
    assert!(mask.allows(format.stop[0]));
    assert!(!mask.allows(format.start));
    assert_eq!(format.constraint(&Conversation::default()), None);
}
