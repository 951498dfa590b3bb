use std::sync::Arc;

use format::chat::{CallDelta, ChatFinish, Delta, TextDelta};
use serde_json::{Value, json};
use types::{SampledToken, Sampling, TokenLogprob};
use vocabulary::Vocabulary;

use super::{ChatCompletion, ChatRequest, ChunkWriter, FoldedChoice, ResponseHead, lower};
use crate::choices::{Fold, StreamWriter};
use crate::error::ApiError;
use crate::ids::ResponseKey;
use crate::plan::{LoweringContext, PromptDefaults};
use crate::turn::Piece;
use crate::usage::Cost;

fn lowered(mut body: Value) -> Result<ChatRequest, ApiError> {
    let defaults = PromptDefaults { current_date: Some("2025-06-28".into()), ..PromptDefaults::default() };
    let context = LoweringContext { defaults, drawn_seed: 9, choices_max: 8 };
    if body.get("messages").is_none() {
        body["messages"] = json!([{ "role": "user", "content": "hi" }]);
    }
    lower(&body, &context)
}

#[test]
fn absent_and_null_fields_have_the_defaults_and_unknown_ones_do_not_matter() {
    for body in [
        json!({}),
        json!({ "model": null, "n": null, "stop": null, "stream": null, "temperature": null, "logprobs": null }),
        json!({ "user": "u", "metadata": {}, "store": true, "parallel_tool_calls": false, "zzz": [1] }),
    ] {
        let request = lowered(body).unwrap();
        assert_eq!(request.plan.sampling, Sampling { seed: 9, ..Sampling::default() });
        assert_eq!((request.plan.num_choices, request.plan.max_tokens), (1, None));
        assert!(!request.stream && !request.include_usage && request.plan.stop.is_empty());
        assert_eq!(request.plan.conversation.current_date.as_deref(), Some("2025-06-28"));
    }
}

#[test]
fn every_option_arrives() {
    let request = lowered(json!({
        "model": "m", "stream": true, "stream_options": { "include_usage": true }, "n": 2, "stop": ["a", "b"],
        "max_tokens": 5, "max_completion_tokens": 6, "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
        "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.1, "logit_bias": { "12": -100 },
        "seed": 42, "logprobs": true, "top_logprobs": 2,
        "chat_template_kwargs": { "model_identity": "I", "knowledge_cutoff": "2020-01", "current_date": "2026-01-02" }
    }))
    .unwrap();
    let expected = Sampling {
        temperature: 0.0,
        top_p: 0.5,
        top_k: 3,
        min_p: 0.1,
        presence_penalty: 1.0,
        frequency_penalty: -1.0,
        repetition_penalty: 1.1,
        logit_bias: vec![(12, -100.0)],
        seed: 42,
        choice: 0,
        logprobs: Some(2),
    };
    assert_eq!(request.plan.sampling, expected);
    assert_eq!((request.plan.num_choices, request.plan.max_tokens), (2, Some(6)));
    assert_eq!(request.plan.stop, ["a", "b"]);
    assert!(request.stream && request.include_usage);
    let conversation = &request.plan.conversation;
    assert_eq!(conversation.model_identity.as_deref(), Some("I"));
    assert_eq!(conversation.knowledge_cutoff.as_deref(), Some("2020-01"));
    assert_eq!(conversation.current_date.as_deref(), Some("2026-01-02"));
}

#[test]
fn refusals_name_the_field() {
    let cases = [
        (json!({ "messages": [{ "role": "robot", "content": "" }] }), "messages[0].role"),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url" }] }] }),
            "messages[0].content[0].type",
        ),
        (json!({ "temperature": "hot" }), "temperature"),
        (json!({ "max_tokens": -1 }), "max_tokens"),
        (json!({ "max_tokens": 5, "max_completion_tokens": 0 }), "max_completion_tokens"),
        (json!({ "stream_options": { "include_usage": 1 } }), "stream_options.include_usage"),
        (json!({ "n": 9 }), "n"),
        (json!({ "stop": ["a", ""] }), "stop"),
        (json!({ "top_logprobs": 2 }), "top_logprobs"),
        (json!({ "modalities": ["text", "audio"] }), "modalities"),
        (json!({ "functions": [] }), "functions"),
        (json!({ "reasoning_effort": "huge" }), "reasoning_effort"),
    ];
    for (body, param) in cases {
        let error = lowered(body.clone()).unwrap_err();
        assert_eq!((error.status().as_u16(), error.object().param.as_deref()), (400, Some(param)), "{body}");
    }
}

fn head() -> ResponseHead {
    ResponseHead { key: ResponseKey::new(1), created: 1_700_000_000, model: "m".into() }
}

fn pieces() -> Vec<Piece> {
    let text = |message_idx, text: &str, joins| TextDelta { message_idx, text: text.into(), joins };
    let call = |name: Option<&str>, arguments: &str| {
        let name = name.map(str::to_owned);
        Delta::ToolCall(CallDelta { message_idx: 3, index: 0, name, arguments: arguments.into() })
    };
    let deltas = [
        Delta::Reasoning(text(0, "Hm.", false)),
        Delta::Reasoning(text(1, "So.", true)),
        Delta::Content(text(2, "Look:", false)),
        call(Some("f"), "{\"a\""),
        call(None, ":1}"),
    ];
    deltas.map(|delta| Piece { delta, logprobs: Vec::new() }).into()
}

#[test]
fn chunks_carry_both_reasoning_names_and_a_call_names_itself_once() {
    let mut writer = ChunkWriter::new(head(), Vocabulary::o200k_harmony(), 2, false);
    let deltas: Vec<Value> = pieces()
        .iter()
        .map(|piece| serde_json::to_value(writer.piece(0, piece)).unwrap()["choices"][0]["delta"].clone())
        .collect();
    let id = ResponseKey::new(1).call_id(0, 0);
    let expected = [
        json!({ "reasoning_content": "Hm.", "reasoning": "Hm." }),
        json!({ "reasoning_content": "\nSo.", "reasoning": "\nSo." }),
        json!({ "content": "Look:" }),
        json!({ "tool_calls": [
            { "index": 0, "id": id, "type": "function", "function": { "name": "f", "arguments": "{\"a\"" } }] }),
        json!({ "tool_calls": [{ "index": 0, "function": { "arguments": ":1}" } }] }),
    ];
    assert_eq!(deltas, expected);
    let opening = serde_json::to_value(writer.opening()).unwrap();
    assert_eq!(opening.as_array().unwrap().len(), 2);
    let first = &opening[1];
    assert_eq!(
        first["choices"][0],
        json!({
        "index": 1, "delta": { "role": "assistant" }, "logprobs": null, "finish_reason": null })
    );
    assert!(first.get("usage").is_none() && writer.usage(Cost::default()).is_none());
    let last = serde_json::to_value(writer.last(0, ChatFinish::ToolCalls)).unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "tool_calls");
}

#[test]
fn usage_is_null_in_all_chunks_but_the_last_which_has_no_choices() {
    let writer = ChunkWriter::new(head(), Vocabulary::o200k_harmony(), 1, true);
    assert_eq!(serde_json::to_value(writer.opening()).unwrap()[0]["usage"], Value::Null);
    let cost = Cost { prompt_tokens: 10, cached_tokens: 4, output_tokens: 5, reasoning_tokens: 2 };
    let last = serde_json::to_value(writer.usage(cost).unwrap()).unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(
        last["usage"],
        json!({
        "prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15,
        "prompt_tokens_details": { "cached_tokens": 4 }, "completion_tokens_details": { "reasoning_tokens": 2 } })
    );
}

#[test]
fn a_whole_body_is_what_a_client_accumulates() {
    let vocabulary = Vocabulary::o200k_harmony();
    let mut folded = FoldedChoice::default();
    for piece in pieces() {
        folded.push(&piece, &vocabulary);
    }
    folded.finish(ChatFinish::ToolCalls);
    let mut bare = FoldedChoice::default();
    bare.finish(ChatFinish::Length);
    let body = ChatCompletion::new(&head(), vec![folded, bare], Cost::default(), false);
    let body = serde_json::to_value(body).unwrap();
    assert_eq!(
        body["choices"][0],
        json!({
        "index": 0, "logprobs": null, "finish_reason": "tool_calls",
        "message": {
            "role": "assistant", "content": "Look:", "refusal": null,
            "reasoning_content": "Hm.\nSo.", "reasoning": "Hm.\nSo.",
            "tool_calls": [{ "id": ResponseKey::new(1).call_id(0, 0), "type": "function",
                "function": { "name": "f", "arguments": "{\"a\":1}" } }]
        } })
    );
    assert_eq!(body["choices"][1]["message"], json!({ "role": "assistant", "content": null, "refusal": null }));
    assert_eq!(body["choices"][1]["finish_reason"], "length");
}

#[test]
fn logprobs_spell_out_tokens() {
    let vocabulary = Vocabulary::o200k_harmony();
    let hello = vocabulary.encode("Hello")[0];
    let delta = Delta::Content(TextDelta { message_idx: 0, text: "Hello".into(), joins: false });
    let top =
        vec![TokenLogprob { token: hello, logprob: -0.5 }, TokenLogprob { token: 200_002, logprob: f32::NEG_INFINITY }];
    let piece = Piece { delta, logprobs: vec![SampledToken { token: hello, logprob: Some(-0.5), top }] };
    let chunk =
        serde_json::to_value(ChunkWriter::new(head(), Arc::clone(&vocabulary), 1, false).piece(0, &piece)).unwrap();
    assert_eq!(
        chunk["choices"][0]["logprobs"],
        json!({ "content": [{
        "token": "Hello", "logprob": -0.5, "bytes": [72, 101, 108, 108, 111],
        "top_logprobs": [
            { "token": "Hello", "logprob": -0.5, "bytes": [72, 101, 108, 108, 111] },
            { "token": "<|return|>", "logprob": -9999.0, "bytes": [] }] }] })
    );
}
