//! What holds for any text and any tokens.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Arc, LazyLock};

use format::chat::{
    Answer, ChatFormat, ChatStream, Conversation, Event, Finished, Message, Parser, ResponseFormat, Role, SchemaFormat,
    ToolCall, ToolDefinition,
};
use format::harmony::Harmony;
use proptest::prelude::*;
use serde_json::json;
use types::{FinishReason, TokenId};
use vocabulary::Vocabulary;

static HARMONY: LazyLock<Harmony> = LazyLock::new(|| {
    let tokenizer = include_bytes!("../../model/gpt-oss-nano/tokenizer.json");
    Harmony::new(Arc::new(Vocabulary::from_tokenizer_json(tokenizer).unwrap())).unwrap()
});

/// Names of the control tokens, which texts imitate.
const CONTROL: [&str; 8] =
    ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>", "<|endoftext|>"];

/// Words that mean something in headers.
const WORDS: [&str; 18] = [
    "assistant",
    "user",
    "analysis",
    "final",
    "commentary",
    " to=",
    "functions.",
    "search",
    " json",
    "{\"q\":1}",
    " ",
    "??",
    "python",
    "Sorry, no.",
    "\n",
    "user:dana",
    "–",
    "é",
];

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Tokens as a model may write them: mostly control tokens and header words, any other number besides.
fn output() -> impl Strategy<Value = Vec<TokenId>> {
    let vocabulary = HARMONY.vocabulary();
    let control = prop::sample::select(&CONTROL[..]).prop_map(|name| vec![vocabulary.special(name).unwrap()]);
    let word = prop::sample::select(&WORDS[..]).prop_map(|word| vocabulary.encode(word));
    let any = (0..vocabulary.size() + 50).prop_map(|token| vec![token]);
    prop::collection::vec(prop_oneof![5 => control, 5 => word, 2 => any], 0..60).prop_map(|parts| parts.concat())
}

fn tools() -> impl Strategy<Value = Vec<String>> {
    prop_oneof![Just(Vec::new()), Just(vec!["search".to_owned(), "python".to_owned()])]
}

fn text() -> impl Strategy<Value = String> {
    let control = prop::sample::select(&CONTROL[..]).prop_map(str::to_owned);
    prop::collection::vec(prop_oneof![control, any::<String>()], 0..4).prop_map(|parts| parts.concat())
}

fn answer(tokens: &[TokenId], tools: &[String], finish: FinishReason) -> (Answer, Finished) {
    let mut stream = ChatStream::new(Box::new(HARMONY.parser_of(Some(Role::Assistant), tools)));
    let mut answer = Answer::default();
    let mut deltas = Vec::new();
    for token in tokens {
        stream.push(*token, &mut deltas);
        deltas.drain(..).for_each(|delta| answer.push(&delta));
    }
    let finished = stream.finish(finish, &mut deltas);
    deltas.iter().for_each(|delta| answer.push(delta));
    (answer, finished)
}

fn is_special(token: &TokenId) -> bool {
    HARMONY.vocabulary().special_name(*token).is_some()
}

proptest! {
    #![proptest_config(config(4_000))]

    /// Each message is one header, bodies, one end, and the texts are made of ordinary tokens alone.
    #[test]
    fn any_output_is_parsed(tokens in output(), tools in tools(), opened in prop::option::of(Just(Role::Assistant))) {
        let mut parser = HARMONY.parser_of(opened, &tools);
        let mut events = Vec::new();
        tokens.iter().for_each(|token| parser.push(*token, &mut events));
        parser.finish(&mut events);

        let ordinary: Vec<TokenId> = tokens.iter().copied().filter(|token| !is_special(token)).collect();
        let mut is_open = false;
        let mut num_body_tokens = 0;
        for event in &events {
            match event {
                Event::Header(_) => prop_assert!(!std::mem::replace(&mut is_open, true)),
                Event::Body(text) => prop_assert!(is_open && !text.is_empty()),
                Event::End { body_tokens, .. } => {
                    num_body_tokens += *body_tokens as usize;
                    prop_assert!(std::mem::replace(&mut is_open, false));
                }
            }
        }
        prop_assert!(!is_open);
        prop_assert!(num_body_tokens <= ordinary.len());
        // None of the words spells a control token, so neither may any text.
        let shown = format!("{events:?}");
        prop_assert!(!CONTROL.iter().any(|name| shown.contains(name)), "{}", shown);
    }

    /// What a stream has given out is the beginning of the whole answer, wherever it is cut.
    #[test]
    fn answers_only_grow(tokens in output(), tools in tools(), cut in 0_usize..60) {
        let (whole, _) = answer(&tokens, &tools, FinishReason::Stop);
        let mut stream = ChatStream::new(Box::new(HARMONY.parser_of(Some(Role::Assistant), &tools)));
        let mut deltas = Vec::new();
        for token in &tokens[..cut.min(tokens.len())] {
            stream.push(*token, &mut deltas);
        }
        let mut begun = Answer::default();
        deltas.iter().for_each(|delta| begun.push(delta));
        let starts = |whole: &Option<String>, begun: &Option<String>| {
            begun.as_deref().is_none_or(|begun| whole.as_deref().is_some_and(|whole| whole.starts_with(begun)))
        };
        prop_assert!(starts(&whole.reasoning, &begun.reasoning));
        prop_assert!(starts(&whole.content, &begun.content));
        prop_assert!(begun.tool_calls.len() <= whole.tool_calls.len());
        for (begun, whole) in begun.tool_calls.iter().zip(&whole.tool_calls) {
            prop_assert_eq!(&begun.name, &whole.name);
            prop_assert!(whole.arguments.starts_with(&begun.arguments));
        }
    }

    /// All text of the assistant is in one of the fields.
    #[test]
    fn streams_and_events_agree(tokens in output(), tools in tools()) {
        let mut parser = HARMONY.parser_of(Some(Role::Assistant), &tools);
        let mut events = Vec::new();
        tokens.iter().for_each(|token| parser.push(*token, &mut events));
        parser.finish(&mut events);
        let mut said = 0;
        let mut is_shown = false;
        for event in &events {
            match event {
                Event::Header(header) => is_shown = header.role == Role::Assistant,
                Event::Body(text) if is_shown => said += text.len(),
                Event::Body(_) | Event::End { .. } => {}
            }
        }
        let mut stream = ChatStream::new(Box::new(HARMONY.parser_of(Some(Role::Assistant), &tools)));
        let mut deltas = Vec::new();
        tokens.iter().for_each(|token| _ = stream.push(*token, &mut deltas));
        stream.finish(FinishReason::Length, &mut deltas);
        let given: usize = deltas.iter().map(|delta| match delta {
            format::chat::Delta::Reasoning(text) | format::chat::Delta::Content(text) => text.text.len(),
            format::chat::Delta::ToolCall(call) => call.arguments.len(),
        }).sum();
        // A finished call without arguments is given "{}".
        let empty_calls = given.checked_sub(said);
        prop_assert!(empty_calls.is_some_and(|more| more % 2 == 0), "{said} bytes of text, {given} given");
    }
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn decoding_undoes_encoding(text in text()) {
        let tokens = HARMONY.vocabulary().encode(&text);
        prop_assert!(!tokens.iter().any(is_special));
        prop_assert_eq!(HARMONY.vocabulary().decode(&tokens), text);
    }

    /// A conversation has as many control tokens as the same conversation with harmless words in place of all texts.
    #[test]
    fn no_text_becomes_a_control_token(texts in prop::collection::vec(text(), 16)) {
        let hostile = conversation(&mut texts.iter().map(|text| format!("x{text}")));
        let harmless = conversation(&mut std::iter::repeat_with(|| "x".to_owned()));
        let control = |conversation: &Conversation| -> Vec<TokenId> {
            HARMONY.render(conversation).unwrap().tokens.into_iter().filter(is_special).collect()
        };
        prop_assert_eq!(control(&hostile), control(&harmless));
    }
}

/// A conversation with a text from `texts` in every place that takes one.
fn conversation(texts: &mut dyn Iterator<Item = String>) -> Conversation {
    let mut text = || texts.next().unwrap();
    let property = text();
    let schema = json!({"type": "object", "properties": {property: {"type": "string", "enum": [text()], "description": text()}}});
    let call = ToolCall { id: "call".into(), name: text(), arguments: text() };
    Conversation {
        messages: vec![
            Message::Instructions { text: text() },
            Message::User { name: Some(text()), text: text() },
            Message::Assistant { reasoning: Some(text()), content: Some(text()), tool_calls: vec![call] },
            Message::ToolResult { call_id: "call".into(), text: text() },
            Message::Instructions { text: text() },
        ],
        tools: vec![ToolDefinition {
            name: text(),
            description: Some(text()),
            parameters: Some(schema.clone()),
            strict: false,
        }],
        response_format: ResponseFormat::JsonSchema(SchemaFormat {
            name: text(),
            description: Some(text()),
            schema,
            strict: true,
        }),
        ..Conversation::default()
    }
}
