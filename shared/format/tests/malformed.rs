//! What becomes of output that departs from Harmony's grammar, row by row. The rules are those of `tests/cases/harmony/README.md`.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fmt::Write;
use std::sync::Arc;

use format::chat::{Channel, ChatFormat, Event, Parser, Recipient, Role};
use format::harmony::Harmony;
use types::TokenId;
use vocabulary::Vocabulary;

/// Functions `get_weather` and `search` are declared.
struct Reader {
    harmony: Harmony,
    tools: [String; 2],
}

impl Reader {
    fn new() -> Self {
        let tokenizer = include_bytes!("../../model/gpt-oss-nano/tokenizer.json");
        let vocabulary = Arc::new(Vocabulary::from_tokenizer_json(tokenizer).unwrap());
        Self { harmony: Harmony::new(vocabulary).unwrap(), tools: ["get_weather", "search"].map(str::to_owned) }
    }

    /// `written` with markers as control tokens.
    fn tokens(&self, written: &str) -> Vec<TokenId> {
        let vocabulary = self.harmony.vocabulary();
        let mut tokens = Vec::new();
        let mut rest = written;
        while let Some((text, behind)) = rest.split_once("<|") {
            let (name, tail) = behind.split_once("|>").unwrap();
            vocabulary.encode_into(text, &mut tokens);
            tokens.push(vocabulary.special(&format!("<|{name}|>")).unwrap());
            rest = tail;
        }
        vocabulary.encode_into(rest, &mut tokens);
        tokens
    }

    /// Each message in brackets: role and name unless it is the assistant, `>` recipient, `#` channel, `%` type, the text; then `…` if it
    /// is not complete.
    fn read(&self, written: &str, opened: Option<Role>) -> String {
        let mut parser = self.harmony.parser_of(opened, &self.tools);
        let mut events = Vec::new();
        self.tokens(written).into_iter().for_each(|token| parser.push(token, &mut events));
        parser.finish(&mut events);
        let mut read = String::new();
        for event in events {
            match event {
                Event::Header(header) => {
                    read.push('[');
                    if header.role != Role::Assistant {
                        write!(read, "{}:{} ", header.role.as_str(), header.name.unwrap_or_default()).unwrap();
                    }
                    match header.recipient {
                        Some(Recipient::Function(name)) => write!(read, ">functions.{name} ").unwrap(),
                        Some(Recipient::Other(name)) => write!(read, ">{name} ").unwrap(),
                        None => {}
                    }
                    let channel = match header.channel {
                        Some(Channel::Reasoning) => "#analysis ".to_owned(),
                        Some(Channel::Commentary) => "#commentary ".to_owned(),
                        Some(Channel::Answer) => "#final ".to_owned(),
                        Some(Channel::Unknown(name)) => format!("#?{name} "),
                        None => String::new(),
                    };
                    read.push_str(&channel);
                    if let Some(content_type) = header.content_type {
                        let mark = if content_type.constrained { "%%" } else { "%" };
                        write!(read, "{mark}{} ", content_type.name).unwrap();
                    }
                }
                Event::Body(text) => read.push_str(&text),
                Event::End { complete, .. } => read.push_str(if complete { "]" } else { "…]" }),
            }
        }
        read
    }
}

#[track_caller]
fn assert_reads(opened: Option<Role>, rows: &[(&str, &str)]) {
    let reader = Reader::new();
    for (written, expected) in rows {
        assert_eq!(reader.read(written, opened), *expected, "{written}");
    }
}

#[test]
fn words_come_in_any_order() {
    assert_reads(
        Some(Role::Assistant),
        &[
            (" to=search<|message|>{}<|call|>", "[>functions.search {}]"),
            ("<|channel|>commentary json to=search<|message|>{}<|call|>", "[>functions.search #commentary %json {}]"),
            (
                "<|channel|>commentary to=search to=get_weather<|message|>{}<|call|>",
                "[>functions.search #commentary {}]",
            ),
            ("<|channel|>commentary to= search<|message|>{}<|call|>", "[>functions.search #commentary {}]"),
            ("<|channel|>commentary search<|message|>{}<|call|>", "[>functions.search #commentary {}]"),
            ("<|channel|>commentary python<|message|>1<|call|>", "[>python #commentary 1]"),
            ("<|constrain|>json<|message|>{}<|return|>", "[%%json {}]"),
            ("<|channel|>final<|constrain|>json one two<|message|>{}<|return|>", "[#final %%json {}]"),
            (
                "<|channel|>commentary<|constrain|>to=search json<|message|>{}<|call|>",
                "[>functions.search #commentary %%json {}]",
            ),
        ],
    );
}

#[test]
fn names_of_channels() {
    assert_reads(
        Some(Role::Assistant),
        &[
            ("<|channel|>analysis<|channel|>final<|message|>x<|end|>", "[#analysis x]"),
            ("<|channel|>??<|channel|>final<|message|>x<|end|>", "[#final x]"),
            ("<|channel|>what<|channel|>final<|message|>x<|end|>", "[#final x]"),
            ("<|channel|>final final<|message|>x<|end|>", "[#final x]"),
            ("<|channel|>finalfinal1.<|message|>x<|end|>", "[#final x]"),
            ("<|channel|>commentaryto=search json<|message|>{}<|call|>", "[>functions.search #commentary %json {}]"),
            ("<|channel|>comment to=search<|message|>{}<|call|>", "[>functions.search #?comment {}]"),
            ("<|channel|><|message|>x<|end|>", "[x]"),
        ],
    );
}

#[test]
fn roles() {
    assert_reads(
        None,
        &[
            ("<|start|>user:bob<|message|>x<|end|>", "[user:bob x]"),
            ("<|start|>user user<|message|>x<|end|>", "[user: x]"),
            ("<|start|>useruser<|message|>x<|end|>", "[user: x]"),
            ("<|start|><|start|>user<|message|>x<|end|>", "[user: x]"),
            ("<|start|>user<|start|>assistant<|message|>x<|end|>", "[x]"),
            (
                "<|start|>functions.f to=assistant<|channel|>commentary<|message|>x<|end|>",
                "[tool:functions.f >assistant #commentary x]",
            ),
            ("<|start|> to=search json<|message|>{}<|call|>", "[>functions.search %json {}]"),
        ],
    );
    assert_reads(
        Some(Role::Assistant),
        &[
            ("assistant<|channel|>final<|message|>x<|end|>", "[#final x]"),
            ("<|start|>assistantassistant<|channel|>final<|message|>x<|end|>", "[#final x]"),
        ],
    );
}

#[test]
fn between_messages() {
    let opened = Some(Role::Assistant);
    assert_reads(
        opened,
        &[
            ("<|message|>x<|end|><|call|><|end|><|start|>assistant<|message|>y<|end|>", "[x][y]"),
            ("<|message|>x<|end|>assistant<|channel|>final<|message|>y<|end|>", "[x][#final y]"),
            ("<|message|>x<|end|>user<|message|>y<|end|>", "[x][user: y]"),
            ("<|message|>x<|end|><|message|>y<|end|>", "[x][y]"),
            (
                "<|message|>x<|end|> to=search<|channel|>commentary<|message|>{}<|call|>",
                "[x][>functions.search #commentary {}]",
            ),
            ("<|message|>x<|end|> stray <|start|>assistant<|message|>y<|end|>", "[x][y]"),
            ("<|message|>x<|end|> text <|return|>", "[x][text]"),
            ("<|message|>x<|end|> text", "[x][text…]"),
            ("<|channel|>final<|message|>x<|end|> text<|return|>", "[#final x]"),
            ("<|channel|>final<|message|>x<|return|><|start|>assistant<|message|>y<|end|>", "[#final x]"),
            ("<|endoftext|>x", ""),
        ],
    );
    assert_reads(
        None,
        &[
            ("stray<|start|>user<|message|>x<|end|>", "[user: x]"),
            ("<|start|>assistant<|message|>x<|return|><|start|>user<|message|>y<|end|>", "[x][user: y]"),
        ],
    );
}

#[test]
fn headers_without_a_message_token() {
    assert_reads(
        Some(Role::Assistant),
        &[
            ("Hello there<|start|>assistant<|message|>x<|end|>", "[Hello there][x]"),
            ("Hello there", "[Hello there…]"),
            ("<|start|>assistant Hello there<|end|>", "[Hello there]"),
            ("<|start|>Hello there<|end|>", "[Hello there]"),
            ("<|start|>assistant<|end|><|start|><|end|>", ""),
            ("<|channel|>analysis I think<|start|>assistant<|message|>x<|end|>", "[#analysis I think][x]"),
            ("<|channel|>Sure, here it is<|end|>", "[Sure, here it is]"),
            ("<|channel|>final json is nice<|end|>", "[#final json is nice]"),
            ("<|channel|>final json {}<|end|>", "[#final %json {}]"),
            ("<|channel|>final<|constrain|>json{}<|end|>", "[#final %%json {}]"),
            ("<|channel|>final Hello", ""),
            (" to=search", ""),
        ],
    );
}

#[test]
fn calls_without_a_message_token() {
    assert_reads(
        Some(Role::Assistant),
        &[
            (" to=search {}<|call|>", "[>functions.search {}]"),
            ("<|channel|>commentary to=search{}<|end|>", "[>functions.search #commentary {}]"),
            ("<|channel|>commentary functions.search {}<|end|>", "[>functions.search #commentary {}]"),
            (
                "<|channel|>commentary to=search <|constrain|>json {}<|start|>",
                "[>functions.search #commentary %%json {}]",
            ),
            ("<|channel|>commentary to=search json ls -la<|call|>", "[>functions.search #commentary %json ls -la]"),
            ("<|channel|>commentary to=search json ls -la<|end|>", ""),
            ("<|channel|>commentary to=search<|call|>", ""),
            ("<|channel|>commentary to=search <|constrain|>json", ""),
        ],
    );
}

#[test]
fn bodies() {
    assert_reads(
        Some(Role::Assistant),
        &[
            ("<|message|>x<|message|>y<|constrain|>z<|reserved_200011|>.<|end|>", "[xyz.]"),
            ("<|message|>x<|start|>assistant<|message|>y<|end|>", "[x][y]"),
            ("<|message|>x<|channel|>final<|message|>y<|end|>", "[x][#final y]"),
            ("<|message|>x", "[x…]"),
            ("<|message|>", "[…]"),
        ],
    );
}
