//! Prompts and answers of gpt-oss-nano, whose vocabulary has Harmony's control tokens at other numbers than o200k_harmony.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;

use format::chat::{Answer, ChatFormat, ChatStream, completions};
use format::harmony::Harmony;
use serde_json::{Value, json};
use types::{FinishReason, TokenId};
use vocabulary::Vocabulary;

fn harmony() -> Harmony {
    let tokenizer = include_bytes!("../../model/gpt-oss-nano/tokenizer.json");
    Harmony::new(Arc::new(Vocabulary::from_tokenizer_json(tokenizer).unwrap())).unwrap()
}

fn chats() -> Vec<Value> {
    let lines = include_str!("../../../tests/fixtures/nano/chat.jsonl").lines();
    let chats: Vec<Value> = lines.map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(chats.len(), 60);
    chats
}

#[test]
fn prompts_are_those_of_the_reference() {
    let harmony = harmony();
    for chat in chats() {
        let mut conversation = completions::conversation(&chat["request"]).unwrap();
        let said = |field: &str| chat["render"][field].as_str().map(str::to_owned);
        conversation.model_identity = said("model_identity");
        conversation.knowledge_cutoff = said("knowledge_cutoff");
        conversation.current_date = said("current_date");
        let prompt = harmony.render(&conversation).unwrap();
        assert_eq!(harmony.vocabulary().decode(&prompt.tokens), chat["prompt"].as_str().unwrap(), "{}", chat["id"]);
        assert_eq!(json!(prompt.tokens.len()), chat["expect"]["prompt_tokens"], "{}", chat["id"]);
    }
}

#[test]
fn answers_are_those_of_the_reference() {
    let harmony = harmony();
    for chat in chats() {
        let tokens: Vec<TokenId> = serde_json::from_value(chat["completion_token_ids"].clone()).unwrap();
        assert_eq!(harmony.vocabulary().decode(&tokens), chat["completion"].as_str().unwrap(), "{}", chat["id"]);
        let conversation = completions::conversation(&chat["request"]).unwrap();
        let mut stream = ChatStream::new(harmony.parser(&harmony.render(&conversation).unwrap().turn));
        let mut deltas = Vec::new();
        for token in &tokens {
            stream.push(*token, &mut deltas);
        }
        let finished = stream.finish(FinishReason::Stop, &mut deltas);
        let mut answer = Answer::default();
        deltas.iter().for_each(|delta| answer.push(delta));

        let expected = &chat["expect"]["message"];
        assert_eq!(json!(finished.reason.as_str()), chat["expect"]["finish_reason"], "{}", chat["id"]);
        assert_eq!(json!(answer.content), expected["content"], "{}", chat["id"]);
        assert_eq!(json!(answer.reasoning), expected["reasoning_text"], "{}", chat["id"]);
        assert_eq!(answer.reasoning.is_some(), finished.reasoning_tokens > 0, "{}", chat["id"]);
        let calls: Vec<_> =
            answer.tool_calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect();
        let text = |call: &'_ Value, field: &str| call[field].as_str().unwrap().to_owned();
        let expected_calls: Vec<_> = expected["tool_calls"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|call| (text(call, "name"), text(call, "arguments")))
            .collect();
        assert!(
            calls.into_iter().eq(expected_calls.iter().map(|(name, arguments)| (&name[..], &arguments[..]))),
            "{}",
            chat["id"]
        );
    }
}
