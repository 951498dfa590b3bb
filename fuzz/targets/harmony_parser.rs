//! Any tokens whatever: the parser does not panic, messages are well formed, control tokens are in no text, and an answer is the same however
//! its deltas are collected.
//!
//! The input is text in which names of control tokens stand for these; `0xff` and two bytes, little-endian, stand for any token by number, so
//! that tokens of half a character and numbers beyond the vocabulary come too.

#![no_main]

use std::sync::{Arc, LazyLock};

use format::chat::{Answer, ChatFormat, ChatStream, Event, Parser, Role};
use format::harmony::Harmony;
use libfuzzer_sys::fuzz_target;
use types::{FinishReason, TokenId};
use vocabulary::Vocabulary;

static HARMONY: LazyLock<Harmony> = LazyLock::new(|| {
    let tokenizer = include_bytes!("../../shared/model/gpt-oss-nano/tokenizer.json");
    let vocabulary = Vocabulary::from_tokenizer_json(tokenizer).expect("the embedded tokenizer is valid");
    Harmony::new(Arc::new(vocabulary)).expect("the embedded vocabulary has all control tokens")
});

fuzz_target!(|input: &[u8]| {
    let Some((options, input)) = input.split_first() else { return };
    let tokens = tokens(input);
    let tools = if options & 1 == 0 { Vec::new() } else { vec!["search".to_owned(), "python".to_owned()] };
    let opened = (options & 2 == 0).then_some(Role::Assistant);
    let finish = if options & 4 == 0 { FinishReason::Stop } else { FinishReason::Length };

    let mut parser = HARMONY.parser_of(opened, &tools);
    let mut events = Vec::new();
    tokens.iter().for_each(|token| parser.push(*token, &mut events));
    parser.finish(&mut events);
    check(&events, &tokens);

    let collected = [1, 7, usize::MAX].map(|every| {
        let mut stream = ChatStream::new(Box::new(HARMONY.parser_of(opened, &tools)));
        let (mut answer, mut deltas) = (Answer::default(), Vec::new());
        for (idx, token) in tokens.iter().enumerate() {
            stream.push(*token, &mut deltas);
            if idx % every == 0 {
                deltas.drain(..).for_each(|delta| answer.push(&delta));
            }
        }
        stream.finish(finish, &mut deltas);
        deltas.iter().for_each(|delta| answer.push(delta));
        answer
    });
    assert!(collected.iter().all(|answer| *answer == collected[0]), "{collected:?}");
});

fn tokens(mut input: &[u8]) -> Vec<TokenId> {
    let vocabulary = HARMONY.vocabulary();
    let mut tokens = Vec::new();
    while let Some(first) = input.first() {
        if let (0xff, Some([low, high])) = (*first, input.get(1..3)) {
            tokens.push(TokenId::from(u16::from_le_bytes([*low, *high])) % (vocabulary.size() + 50));
            input = &input[3..];
            continue;
        }
        let end = input[1..].iter().position(|byte| matches!(byte, 0xff | b'<')).map_or(input.len(), |at| at + 1);
        let name_end = input.windows(2).position(|window| window == b"|>").map(|at| at + 2);
        let special =
            name_end.and_then(|end| Some((vocabulary.special(std::str::from_utf8(&input[..end]).ok()?)?, end)));
        if let Some((token, end)) = special {
            tokens.push(token);
            input = &input[end..];
        } else {
            tokens.extend(vocabulary.encode(&String::from_utf8_lossy(&input[..end])));
            input = &input[end..];
        }
    }
    tokens
}

/// Each message is one header, bodies, one end; bodies have no more text than ordinary tokens can spell.
fn check(events: &[Event], tokens: &[TokenId]) {
    let vocabulary = HARMONY.vocabulary();
    let spelled: usize = tokens.iter().filter_map(|token| vocabulary.token_bytes(*token)).map(<[u8]>::len).sum();
    let num_ordinary = tokens.iter().filter(|token| vocabulary.special_name(**token).is_none()).count();
    let (mut is_open, mut num_body_tokens, mut body_bytes) = (false, 0, 0);
    for event in events {
        match event {
            Event::Header(_) => assert!(!std::mem::replace(&mut is_open, true), "a header inside a message"),
            Event::Body(text) => {
                assert!(is_open && !text.is_empty(), "a body outside a message, or an empty one");
                body_bytes += text.len();
            }
            Event::End { body_tokens, .. } => {
                num_body_tokens += *body_tokens as usize;
                assert!(std::mem::replace(&mut is_open, false), "an end without a header");
            }
        }
    }
    assert!(!is_open, "a message without an end");
    assert!(num_body_tokens <= num_ordinary, "{num_body_tokens} body tokens of {num_ordinary} ordinary ones");
    // A byte that is no UTF-8 becomes a replacement character of three.
    assert!(body_bytes <= 3 * spelled, "{body_bytes} bytes of text out of {spelled}");
}
