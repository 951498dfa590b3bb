//! From a parser's events to the fields of an answer: reasoning, content, tool calls.
//!
//! Streamed and whole answers come from the same [`Delta`]s: a stream sends them, [`Answer`] folds them.
//!
//! Which field a message goes to:
//! - to a function: a tool call, whatever its channel, declared or not; to any other recipient (a tool of the server that
//!   was not enabled): reasoning, neither the client's call nor text for the user;
//! - without recipient: reasoning and answer as the channel says, commentary is content;
//! - without a known channel: content if it is the last message and there is no answer, else reasoning. It is held back until
//!   that is known;
//! - of another role than assistant: nowhere.

use types::{FinishReason, TokenId};

use crate::chat::format::{Channel, Event, Header, Parser, Recipient, Role};

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    /// More thoughts.
    Reasoning(TextDelta),
    /// More of what the user sees.
    Content(TextDelta),
    /// More of a tool call.
    ToolCall(CallDelta),
}

/// More text of a field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextDelta {
    /// The message that it comes from, counted over all messages of the turn; for outputs that keep messages apart.
    pub message_idx: u32,
    /// The text. Empty only if the whole message is: then the field is an empty text instead of null.
    pub text: String,
    /// The field already has text of an earlier message, and this is the first of a new one: an output that joins messages
    /// puts a newline between them, see [`joined`](Self::joined).
    pub joins: bool,
}

impl TextDelta {
    /// The text for an output that joins the messages of a field.
    #[must_use]
    pub fn joined(&self) -> String {
        if self.joins { format!("\n{}", self.text) } else { self.text.clone() }
    }
}

/// More of a tool call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallDelta {
    /// The message that it comes from, counted over all messages of the turn.
    pub message_idx: u32,
    /// The call's place among the calls of the turn.
    pub index: u32,
    /// The function's name, in the first delta of the call only.
    pub name: Option<String>,
    /// More of the arguments, byte for byte as the model writes them.
    pub arguments: String,
}

/// A field of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Field {
    /// The thoughts.
    Reasoning,
    /// What the user sees.
    Content,
    /// The arguments of a tool call.
    ToolCall,
}

/// Why an answer ended, as a client is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChatFinish {
    /// The model ended its turn.
    Stop,
    /// The budget was spent, maybe in the middle of arguments.
    Length,
    /// The model called at least one function.
    ToolCalls,
}

impl ChatFinish {
    /// The word for it in OpenAI's API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

/// How an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finished {
    /// Why.
    pub reason: ChatFinish,
    /// Generated tokens in the bodies of reasoning messages; those of headers are not among them.
    pub reasoning_tokens: u32,
}

/// Turns generated tokens into deltas.
pub struct ChatStream {
    parser: Box<dyn Parser>,
    fields: Fields,
    events: Vec<Event>,
}

impl ChatStream {
    /// Reads the answer with `parser`.
    #[must_use]
    pub fn new(parser: Box<dyn Parser>) -> Self {
        Self { parser, fields: Fields::default(), events: Vec::new() }
    }

    /// Reads one token; appends the deltas that it completes.
    ///
    /// Returns the field whose text the token is part of, if that is known: `None` for the tokens of headers and frames, and
    /// for text without a header. A client's log-probabilities of content are those of the tokens of [`Field::Content`].
    pub fn push(&mut self, token: TokenId, deltas: &mut Vec<Delta>) -> Option<Field> {
        let before = self.fields.open_body();
        self.parser.push(token, &mut self.events);
        for event in self.events.drain(..) {
            self.fields.apply(event, false, deltas);
        }
        let after = self.fields.open_body();
        before.filter(|_| before == after).map(|(_, field)| field)
    }

    /// The tokens end here, as the engine says for `reason`; appends the last deltas. The stop token may or may not have been
    /// among the tokens. Nothing may follow.
    pub fn finish(&mut self, reason: FinishReason, deltas: &mut Vec<Delta>) -> Finished {
        let stopped = reason == FinishReason::Stop;
        self.parser.finish(&mut self.events);
        for event in self.events.drain(..) {
            self.fields.apply(event, stopped, deltas);
        }
        self.fields.release_held(true, deltas);
        let reason = match reason {
            FinishReason::Length => ChatFinish::Length,
            FinishReason::Stop if self.fields.num_calls > 0 => ChatFinish::ToolCalls,
            FinishReason::Stop => ChatFinish::Stop,
        };
        Finished { reason, reasoning_tokens: self.fields.reasoning_tokens }
    }
}

/// Where the messages of a turn go.
#[derive(Default)]
struct Fields {
    num_messages: u32,
    num_calls: u32,
    reasoning_tokens: u32,
    /// An answer has begun, so that text without a channel is not it.
    has_answer: bool,
    reasoning_has_text: bool,
    content_has_text: bool,
    open: Option<OpenMessage>,
    /// A message without a known channel, until it is known whether another one follows.
    held: Option<HeldMessage>,
}

struct OpenMessage {
    message_idx: u32,
    target: Target,
    /// A delta of this message was given out.
    begun: bool,
}

enum Target {
    Reasoning,
    Content,
    Held,
    Call { name: String },
    Hidden,
}

struct HeldMessage {
    message_idx: u32,
    text: String,
    body_tokens: u32,
}

impl Fields {
    /// The message that is open and the field that it goes to.
    fn open_body(&self) -> Option<(u32, Field)> {
        let open = self.open.as_ref()?;
        let field = match open.target {
            Target::Reasoning => Field::Reasoning,
            Target::Content => Field::Content,
            Target::Call { .. } => Field::ToolCall,
            Target::Held | Target::Hidden => return None,
        };
        Some((open.message_idx, field))
    }

    /// `stopped`: the engine met a stop token, so that a message which the input leaves open is a finished one.
    fn apply(&mut self, event: Event, stopped: bool, deltas: &mut Vec<Delta>) {
        match event {
            Event::Header(header) => {
                self.release_held(false, deltas);
                let target = self.target(header);
                let message_idx = self.num_messages;
                self.num_messages += 1;
                if matches!(target, Target::Held) {
                    self.held = Some(HeldMessage { message_idx, text: String::new(), body_tokens: 0 });
                }
                self.open = Some(OpenMessage { message_idx, target, begun: false });
            }
            Event::Body(text) => {
                if let Some(mut open) = self.open.take() {
                    self.body(&mut open, text, deltas);
                    self.open = Some(open);
                }
            }
            Event::End { complete, body_tokens } => {
                if let Some(open) = self.open.take() {
                    self.end(open, complete || stopped, body_tokens, deltas);
                }
            }
        }
    }

    fn target(&mut self, header: Header) -> Target {
        if header.role != Role::Assistant {
            return Target::Hidden;
        }
        self.has_answer |= header.channel == Some(Channel::Answer);
        match (header.recipient, header.channel) {
            (Some(Recipient::Function(name)), _) => Target::Call { name },
            (Some(Recipient::Other(_)), _) | (None, Some(Channel::Reasoning)) => Target::Reasoning,
            (None, Some(Channel::Answer | Channel::Commentary)) => Target::Content,
            (None, Some(Channel::Unknown(_)) | None) if self.has_answer => Target::Reasoning,
            (None, Some(Channel::Unknown(_)) | None) => Target::Held,
        }
    }

    fn body(&mut self, open: &mut OpenMessage, text: String, deltas: &mut Vec<Delta>) {
        let begins = !std::mem::replace(&mut open.begun, true);
        match &mut open.target {
            Target::Reasoning => deltas.push(self.reasoning(open.message_idx, text, begins)),
            Target::Content => deltas.push(self.content(open.message_idx, text, begins)),
            Target::Held => {
                if let Some(held) = &mut self.held {
                    held.text.push_str(&text);
                }
            }
            Target::Call { name } => {
                let name = begins.then(|| std::mem::take(name));
                deltas.push(self.call(open.message_idx, name, text));
            }
            Target::Hidden => {}
        }
    }

    fn end(&mut self, open: OpenMessage, complete: bool, body_tokens: u32, deltas: &mut Vec<Delta>) {
        match open.target {
            Target::Reasoning => {
                self.reasoning_tokens += body_tokens;
                if !open.begun {
                    deltas.push(self.reasoning(open.message_idx, String::new(), true));
                }
            }
            Target::Content if !open.begun => deltas.push(self.content(open.message_idx, String::new(), true)),
            // A client parses arguments as JSON, which an empty text is not. A call cut off before its first argument is none.
            Target::Call { name } if !open.begun && complete => {
                deltas.push(self.call(open.message_idx, Some(name), "{}".to_owned()));
            }
            Target::Held => {
                if let Some(held) = &mut self.held {
                    held.body_tokens = body_tokens;
                }
            }
            Target::Content | Target::Call { .. } | Target::Hidden => {}
        }
    }

    /// Gives out the message that was held back: it is the answer if no other message followed.
    fn release_held(&mut self, is_last: bool, deltas: &mut Vec<Delta>) {
        let Some(held) = self.held.take() else { return };
        if is_last {
            deltas.push(self.content(held.message_idx, held.text, true));
        } else {
            self.reasoning_tokens += held.body_tokens;
            deltas.push(self.reasoning(held.message_idx, held.text, true));
        }
    }

    fn reasoning(&mut self, message_idx: u32, text: String, begins: bool) -> Delta {
        Delta::Reasoning(text_delta(message_idx, text, begins, &mut self.reasoning_has_text))
    }

    fn content(&mut self, message_idx: u32, text: String, begins: bool) -> Delta {
        Delta::Content(text_delta(message_idx, text, begins, &mut self.content_has_text))
    }

    fn call(&mut self, message_idx: u32, name: Option<String>, arguments: String) -> Delta {
        self.num_calls += u32::from(name.is_some());
        Delta::ToolCall(CallDelta { message_idx, index: self.num_calls - 1, name, arguments })
    }
}

fn text_delta(message_idx: u32, text: String, begins: bool, field_has_text: &mut bool) -> TextDelta {
    let joins = begins && *field_has_text && !text.is_empty();
    *field_has_text |= !text.is_empty();
    TextDelta { message_idx, text, joins }
}

/// A whole answer, folded from the deltas that a stream would have sent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    /// The thoughts; `None` if no message went there.
    pub reasoning: Option<String>,
    /// What the user sees; `None` if no message went there.
    pub content: Option<String>,
    /// The calls, in order.
    pub tool_calls: Vec<AnswerCall>,
}

/// A tool call of an answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AnswerCall {
    /// The function, without any namespace.
    pub name: String,
    /// The arguments, byte for byte as the model wrote them.
    pub arguments: String,
}

impl Answer {
    /// Adds a delta, in the order of the stream.
    pub fn push(&mut self, delta: &Delta) {
        match delta {
            Delta::Reasoning(text) => self.reasoning.get_or_insert_default().push_str(&text.joined()),
            Delta::Content(text) => self.content.get_or_insert_default().push_str(&text.joined()),
            Delta::ToolCall(call) => {
                if let Some(name) = &call.name {
                    self.tool_calls.push(AnswerCall { name: name.clone(), arguments: String::new() });
                }
                if let Some(last) = self.tool_calls.last_mut() {
                    last.arguments.push_str(&call.arguments);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use types::{FinishReason, TokenId};

    use super::{Answer, ChatFinish, ChatStream, Field};
    use crate::chat::format::{Channel, Event, Header, Parser, Recipient, Role};

    /// A format in which token `n` means the `n`th list of events.
    struct Script(Vec<Vec<Event>>);

    impl Parser for Script {
        fn push(&mut self, token: TokenId, events: &mut Vec<Event>) {
            events.extend(self.0[token as usize].clone());
        }

        fn finish(&mut self, _events: &mut Vec<Event>) {}
    }

    fn header(channel: Option<Channel>, function: Option<&str>) -> Event {
        let recipient = function.map(|name| Recipient::Function(name.to_owned()));
        Event::Header(Header { role: Role::Assistant, name: None, recipient, channel, content_type: None })
    }

    fn body(text: &str) -> Event {
        Event::Body(text.to_owned())
    }

    fn end(body_tokens: u32) -> Event {
        Event::End { complete: true, body_tokens }
    }

    fn run(script: Vec<Vec<Event>>, reason: FinishReason) -> (Vec<Option<Field>>, Answer, super::Finished) {
        let tokens = 0..script.len() as TokenId;
        let mut stream = ChatStream::new(Box::new(Script(script)));
        let mut deltas = Vec::new();
        let fields = tokens.map(|token| stream.push(token, &mut deltas)).collect();
        let finished = stream.finish(reason, &mut deltas);
        let mut answer = Answer::default();
        deltas.iter().for_each(|delta| answer.push(delta));
        (fields, answer, finished)
    }

    #[test]
    fn each_token_knows_its_field() {
        let script = vec![
            vec![header(Some(Channel::Reasoning), None)],
            vec![body("t")],
            vec![end(1)],
            vec![header(Some(Channel::Answer), None)],
            vec![],
            vec![body("é")],
            vec![end(2)],
            vec![header(None, Some("f"))],
            vec![body("{}")],
        ];
        let (fields, answer, finished) = run(script, FinishReason::Stop);
        let (r, c, t) = (Some(Field::Reasoning), Some(Field::Content), Some(Field::ToolCall));
        assert_eq!(fields, [None, r, None, None, c, c, None, None, t]);
        assert_eq!(finished.reason, ChatFinish::ToolCalls);
        assert_eq!(finished.reasoning_tokens, 1);
        assert_eq!((answer.reasoning.as_deref(), answer.content.as_deref()), (Some("t"), Some("é")));
        assert_eq!(answer.tool_calls[0].arguments, "{}");
    }

    #[test]
    fn text_without_a_channel_is_the_answer_only_if_it_is_last_and_alone() {
        let headless = || vec![header(None, None), body("h"), end(3)];
        let (_, alone, finished) = run(vec![headless()], FinishReason::Stop);
        assert_eq!((alone.reasoning, alone.content.as_deref(), finished.reasoning_tokens), (None, Some("h"), 0));

        let answer = || vec![header(Some(Channel::Answer), None), body("a"), end(1)];
        for script in [vec![headless(), answer()], vec![answer(), headless()]] {
            let (_, answer, finished) = run(script, FinishReason::Stop);
            assert_eq!((answer.reasoning.as_deref(), answer.content.as_deref()), (Some("h"), Some("a")));
            assert_eq!(finished.reasoning_tokens, 3);
        }
    }

    #[test]
    fn a_call_without_arguments_is_an_empty_object_if_finished_and_none_if_cut() {
        let script = || vec![vec![header(None, Some("f")), end(0)], vec![header(None, Some("g"))]];
        let (_, answer, _) = run(script(), FinishReason::Length);
        assert_eq!(answer.tool_calls.len(), 1);
        assert_eq!(answer.tool_calls[0].arguments, "{}");
    }
}
