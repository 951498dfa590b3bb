//! The header of a message, as far as it has come, and what it says.
//!
//! Models depart from the grammar in many ways; the rules for that are stated where they are carried out. Nothing here fails.

use super::control::Stop;
use super::recipient::{is_recipient, recipient};
use super::{ANALYSIS, COMMENTARY, FINAL};
use crate::chat::{Channel, ContentType, Header, Role};

const CHANNELS: [&str; 3] = [ANALYSIS, COMMENTARY, FINAL];
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Content types that are known without the token that announces one.
const PLAIN_TYPES: [&str; 2] = ["json", "code"];

/// What arguments begin with.
const ARGUMENTS: [char; 2] = ['{', '['];

/// How a header began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// The prompt wrote the start token and the role.
    Prompt(Role),
    /// With a start token; a role should follow.
    Start,
    /// Without: the model forgot start token and role. A message of the assistant, unless a role is named after all.
    Implied,
}

/// How a header ended that has no message token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Break {
    /// A token that ends messages.
    Stop(Stop),
    /// A start token.
    Start,
    /// The input.
    EndOfInput,
}

/// A header that is still being written.
#[derive(Debug)]
pub(super) struct Draft {
    origin: Origin,
    /// What stands before the first marker, then what stands behind each.
    runs: Vec<Run>,
}

#[derive(Debug)]
struct Run {
    /// What stands before it.
    marker: Option<Marker>,
    text: Vec<u8>,
    /// For each token of `text`, where it ends.
    token_ends: Vec<usize>,
}

/// The control tokens inside a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Marker {
    Channel,
    Constrain,
}

/// A message whose header was never closed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Recovered {
    pub(super) header: Header,
    pub(super) content: String,
    pub(super) content_tokens: u32,
    /// There was no header at all, only text.
    pub(super) is_plain: bool,
}

impl Draft {
    pub(super) fn new(origin: Origin) -> Self {
        Self { origin, runs: vec![Run { marker: None, text: Vec::new(), token_ends: Vec::new() }] }
    }

    pub(super) fn push_text(&mut self, bytes: &[u8]) {
        if let Some(run) = self.runs.last_mut() {
            run.text.extend_from_slice(bytes);
            run.token_ends.push(run.text.len());
        }
    }

    pub(super) fn push_marker(&mut self, marker: Marker) {
        self.runs.push(Run { marker: Some(marker), text: Vec::new(), token_ends: Vec::new() });
    }

    pub(super) fn is_implied(&self) -> bool {
        self.origin == Origin::Implied
    }

    /// Whether there is nothing but a role so far, so that a start token begins the header anew.
    pub(super) fn is_only_a_role(&self) -> bool {
        let [run] = self.runs.as_slice() else { return false };
        let text = String::from_utf8_lossy(&run.text);
        let mut words = text.split_whitespace();
        match (words.next(), words.next(), self.origin) {
            (None, ..) | (Some(_), None, Origin::Start) => true,
            (Some(word), None, Origin::Prompt(_) | Origin::Implied) => known_role(word).is_some(),
            (Some(_), Some(_), _) => false,
        }
    }

    /// What the header says, once a message token closed it. Words may come in any order.
    pub(super) fn read(&self, tools: &[String]) -> Header {
        let texts: Vec<_> = self.runs.iter().map(|run| String::from_utf8_lossy(&run.text)).collect();
        let mut parts = Parts::new(self.origin);
        for (run, text) in self.runs.iter().zip(&texts) {
            parts.read_run(run.marker, text, tools);
        }
        parts.header(tools)
    }

    /// What can be had of a header without message token: its parts are read off the front, the rest is the body.
    ///
    /// Nothing left, no message. With a recipient it is a call only if the rest looks like arguments or the call token ended it: a
    /// call with made-up arguments is worse than none. Only text and no part of a header at all is a message without channel.
    pub(super) fn recover(&self, broken_by: Break, tools: &[String]) -> Option<Recovered> {
        let texts: Vec<_> = self.runs.iter().map(|run| String::from_utf8_lossy(&run.text)).collect();
        let mut parts = Parts::new(self.origin);
        let mut content = String::new();
        let mut content_tokens = 0;
        for (i, (run, text)) in self.runs.iter().zip(&texts).enumerate() {
            let is_last = i + 1 == self.runs.len();
            let rest = parts.read_front(run.marker, text, is_last, tools);
            content.push_str(rest);
            if !rest.trim().is_empty() {
                let content_start = text.len() - rest.len();
                content_tokens += run.token_ends.iter().filter(|end| **end > content_start).count() as u32;
            }
        }
        let is_plain = self.runs.len() == 1 && parts.is_empty();
        let content = content.trim().to_owned();
        if content.is_empty() || broken_by == Break::EndOfInput && !is_plain {
            return None;
        }
        let header = parts.header(tools);
        let looks_like_arguments = content.starts_with(ARGUMENTS) || broken_by == Break::Stop(Stop::Call);
        if header.recipient.is_some() && !looks_like_arguments {
            return None;
        }
        Some(Recovered { header, content, content_tokens, is_plain })
    }
}

/// The parts of a header, collected from its words.
struct Parts<'h> {
    role: Option<Role>,
    name: Option<&'h str>,
    origin: Origin,
    /// Behind `to=`.
    recipient: Option<&'h str>,
    /// A word without `to=` that can only be a recipient.
    bare_recipient: Option<&'h str>,
    known_channel: Option<&'static str>,
    unknown_channel: Option<&'h str>,
    is_constrained: bool,
    constrained_type: Option<&'h str>,
    plain_type: Option<&'h str>,
}

enum Word<'h> {
    Recipient(&'h str),
    Plain(&'h str),
}

impl<'h> Parts<'h> {
    fn new(origin: Origin) -> Self {
        Self {
            role: if let Origin::Prompt(role) = origin { Some(role) } else { None },
            name: None,
            origin,
            recipient: None,
            bare_recipient: None,
            known_channel: None,
            unknown_channel: None,
            is_constrained: false,
            constrained_type: None,
            plain_type: None,
        }
    }

    /// No part was found but the role that was there before.
    fn is_empty(&self) -> bool {
        let has_role = self.role.is_some() && self.origin == Origin::Start;
        !has_role && self.recipient.is_none() && self.bare_recipient.is_none() && self.plain_type.is_none()
    }

    fn header(self, tools: &[String]) -> Header {
        let role = self.role.unwrap_or(Role::Assistant);
        let written = self.recipient.or(self.bare_recipient);
        let channel = match (self.known_channel, self.unknown_channel) {
            (Some(ANALYSIS), _) => Some(Channel::Reasoning),
            (Some(COMMENTARY), _) => Some(Channel::Commentary),
            (Some(_), _) => Some(Channel::Answer),
            (None, unknown) => unknown.map(|name| Channel::Unknown(name.to_owned())),
        };
        let r#type = self.constrained_type.or(self.plain_type);
        Header {
            role,
            name: self.name.map(str::to_owned),
            recipient: written.and_then(|written| recipient(written, role, tools)),
            channel,
            content_type: (self.is_constrained || r#type.is_some())
                .then(|| ContentType { constrained: self.is_constrained, name: r#type.unwrap_or_default().to_owned() }),
        }
    }

    /// Reads a run of a header that was closed: all of it is header.
    fn read_run(&mut self, marker: Option<Marker>, text: &'h str, tools: &[String]) {
        let mut expects_channel = marker == Some(Marker::Channel);
        let mut expects_type = marker == Some(Marker::Constrain);
        let mut own_channel = None;
        self.is_constrained |= expects_type;
        for word in words(text) {
            match word {
                Word::Recipient(written) => _ = self.recipient.get_or_insert(written),
                Word::Plain(word) if marker.is_none() && self.take_role(word) => {}
                Word::Plain(word) if expects_type => {
                    expects_type = false;
                    self.constrained_type.get_or_insert(word);
                }
                Word::Plain(word) if expects_channel && !is_recipient(word, tools) => {
                    // Punctuation alone is no name, the name may follow.
                    expects_channel = !word.contains(char::is_alphanumeric);
                    own_channel = known_name(word, &CHANNELS);
                    self.take_channel(word);
                }
                Word::Plain(word) if own_channel.is_some() && known_name(word, &CHANNELS) == own_channel => {}
                Word::Plain(word) if is_recipient(word, tools) => _ = self.bare_recipient.get_or_insert(word),
                Word::Plain(word) => _ = self.plain_type.get_or_insert(word),
            }
        }
    }

    /// Reads the parts off the front of a run of a header that was not closed; returns the rest.
    fn read_front(&mut self, marker: Option<Marker>, text: &'h str, is_last: bool, tools: &[String]) -> &'h str {
        let mut rest = match marker {
            None => self.role_off_the_front(text, is_last),
            Some(Marker::Channel) => self.channel_off_the_front(text, is_last),
            Some(Marker::Constrain) => {
                self.is_constrained = true;
                let (r#type, rest) = split_type(text.trim_start());
                self.constrained_type = self.constrained_type.or(Some(r#type).filter(|name| !name.is_empty()));
                rest
            }
        };
        loop {
            rest = rest.trim_start();
            if let Some(behind) = rest.strip_prefix("to=") {
                let (written, behind) = split_type(behind.trim_start());
                self.recipient.get_or_insert(written);
                rest = behind;
                continue;
            }
            // A word that may as well begin the text is a part of the header only where something says so.
            let (word, behind) = split_type(rest);
            let is_before_arguments = behind.trim_start().starts_with(ARGUMENTS);
            let is_before_marker = !is_last && behind.trim().is_empty();
            if is_recipient(word, tools) && (is_before_arguments || is_before_marker) {
                self.bare_recipient.get_or_insert(word);
            } else if PLAIN_TYPES.contains(&word)
                && (self.recipient.is_some() || is_before_arguments || is_before_marker)
            {
                self.plain_type.get_or_insert(word);
            } else {
                return rest;
            }
            rest = behind;
        }
    }

    /// Reads the role off the front of what stands before the first marker; returns the rest.
    fn role_off_the_front(&mut self, text: &'h str, is_last: bool) -> &'h str {
        let (word, rest) = first_word(text);
        let is_role = match self.origin {
            _ if word.is_empty() || word.starts_with("to=") => false,
            // An unknown role is one only where a role must be; before plain text it is the beginning of the text.
            Origin::Start => known_role(word).is_some() || !is_last || is_before_header_part(rest),
            Origin::Prompt(role) => spells(word, role.as_str()),
            Origin::Implied => spells(word, Role::Assistant.as_str()) || !is_last && known_role(word).is_some(),
        };
        if is_role && self.take_role(word) { rest } else { text }
    }

    /// Reads the name off the front of what stands behind a channel marker; returns the rest.
    fn channel_off_the_front(&mut self, text: &'h str, is_last: bool) -> &'h str {
        let (word, rest) = first_word(text);
        let (name, rest) = match word.find("to=") {
            Some(at) => text.trim_start().split_at(at),
            None => (word, rest),
        };
        // As with roles: nothing of a text is lost that only looks like the name of a channel.
        let is_name = known_name(name, &CHANNELS).is_some() || !is_last || is_before_header_part(rest);
        if !is_name && name.contains(char::is_alphanumeric) {
            return text;
        }
        self.take_channel(name);
        rest
    }

    /// Takes `word` as the role, if one may stand here.
    fn take_role(&mut self, word: &'h str) -> bool {
        let known = known_role(word);
        let is_first_plain = self.role.is_none() && self.bare_recipient.is_none() && self.plain_type.is_none();
        match (self.origin, known) {
            // The role once more.
            (_, Some((role, _))) if self.role == Some(role) => true,
            (Origin::Start | Origin::Implied, Some((role, name))) if is_first_plain => {
                (self.role, self.name) = (Some(role), name);
                true
            }
            // A tool's name stands in the role's place.
            (Origin::Start, None) if is_first_plain && self.recipient.is_none() => {
                (self.role, self.name) = (Some(Role::Tool), Some(word));
                true
            }
            _ => false,
        }
    }

    /// Takes `word` as a channel; the first known name counts, or else the first unknown one.
    fn take_channel(&mut self, word: &'h str) {
        match known_name(word, &CHANNELS) {
            Some(name) => _ = self.known_channel.get_or_insert(name),
            None if word.contains(char::is_alphanumeric) => _ = self.unknown_channel.get_or_insert(word),
            None => {}
        }
    }
}

/// The words of a header; `to=` begins a recipient also in the middle of a word, and may be apart from it.
fn words(text: &str) -> Vec<Word<'_>> {
    let mut words = Vec::new();
    let mut awaits_recipient = false;
    for word in text.split_whitespace() {
        if std::mem::take(&mut awaits_recipient) {
            words.push(Word::Recipient(word));
            continue;
        }
        let Some(at) = word.find("to=") else {
            words.push(Word::Plain(word));
            continue;
        };
        if at > 0 {
            words.push(Word::Plain(&word[..at]));
        }
        match &word[at + "to=".len()..] {
            "" => awaits_recipient = true,
            written => words.push(Word::Recipient(written)),
        }
    }
    words
}

/// The first word, and what follows it.
fn first_word(text: &str) -> (&str, &str) {
    let text = text.trim_start();
    text.split_at(text.find(char::is_whitespace).unwrap_or(text.len()))
}

/// The first word, which arguments may follow without a space, and what follows it.
fn split_type(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| c.is_whitespace() || ARGUMENTS.contains(&c)).unwrap_or(text.len()))
}

/// The role that `word` names, maybe doubled, maybe with a name: `user:dana`.
fn known_role(word: &str) -> Option<(Role, Option<&str>)> {
    if let Some((role, name)) = word.split_once(':')
        && let Some(role) = Role::from_word(role)
    {
        return Some((role, Some(name).filter(|name| !name.is_empty())));
    }
    let role = known_name(word, &ROLES)?;
    Some((Role::from_word(role)?, None))
}

/// The name in `names` that `word` spells, once or several times, with punctuation and digits anywhere around it.
fn known_name(word: &str, names: &[&'static str]) -> Option<&'static str> {
    let letters: String = word.chars().filter(|c| c.is_alphabetic()).collect();
    names.iter().find(|name| spells(&letters, name)).copied()
}

/// Whether `word` is `name`, once or several times.
fn spells(word: &str, name: &str) -> bool {
    !word.is_empty() && word.replace(name, "").is_empty()
}

/// Whether what follows a word is the end of a run, or a recipient.
fn is_before_header_part(rest: &str) -> bool {
    let rest = rest.trim_start();
    rest.is_empty() || rest.starts_with("to=")
}
