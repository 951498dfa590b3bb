use std::sync::Arc;

use format::chat::{ChatFinish, ChatStream};
use serde_json::{Value, json};
use types::{FinishReason, SampledToken, TokenLogprob};
use vocabulary::Vocabulary;

use super::{CompletionWriter, FoldedCompletion, PlainParser, lower};
use crate::chat::ResponseHead;
use crate::choices::{Fold, StreamWriter};
use crate::ids::ResponseKey;
use crate::turn::Turn;
use crate::usage::Cost;

#[test]
fn prompts_of_all_kinds() {
    let vocabulary = Vocabulary::o200k_harmony();
    let hello = vocabulary.encode("hello");
    for (prompt, prompts) in [
        (json!("hello"), vec![hello.clone()]),
        (json!(["hello", "hello"]), vec![hello.clone(), hello]),
        (json!([200_006, 5]), vec![vec![200_006, 5]]),
        (json!([[1], [2, 3]]), vec![vec![1], vec![2, 3]]),
    ] {
        let request = lower(&json!({ "prompt": prompt }), &vocabulary, 0, 8).unwrap();
        assert_eq!((request.prompts, request.max_tokens), (prompts, 16));
    }
    let marker = lower(&json!({ "prompt": "<|start|>" }), &vocabulary, 0, 8).unwrap();
    assert!(marker.prompts[0].iter().all(|token| *token < 199_998), "text never becomes a control token");
}

#[test]
fn refusals_name_the_field() {
    let cases = [
        (json!({}), "prompt"),
        (json!({ "prompt": 1 }), "prompt"),
        (json!({ "prompt": "" }), "prompt"),
        (json!({ "prompt": [] }), "prompt"),
        (json!({ "prompt": ["a", "b", "c"], "n": 4 }), "prompt"),
        (json!({ "prompt": "a", "echo": true }), "echo"),
        (json!({ "prompt": "a", "suffix": "b" }), "suffix"),
        (json!({ "prompt": "a", "best_of": 2 }), "best_of"),
        (json!({ "prompt": "a", "logprobs": 6 }), "logprobs"),
        (json!({ "prompt": "a", "max_tokens": "x" }), "max_tokens"),
    ];
    for (body, param) in cases {
        let error = lower(&body, &Vocabulary::o200k_harmony(), 0, 8).unwrap_err();
        assert_eq!((error.status().as_u16(), error.object().param.as_deref()), (400, Some(param)), "{body}");
    }
}

#[test]
fn streamed_and_whole_agree_and_broken_characters_wait_for_their_rest() {
    let vocabulary = Vocabulary::o200k_harmony();
    let head = ResponseHead { key: ResponseKey::new(1), created: 1, model: "m".into() };
    let text = "Grüße 🦜🪿!";
    let mut turn = Turn::plain(ChatStream::new(Box::new(PlainParser::new(vocabulary.clone()))), &[]);
    let mut pieces = Vec::new();
    let tokens = vocabulary.encode(text);
    for token in &tokens {
        let top = vec![TokenLogprob { token: *token, logprob: -0.25 }];
        turn.push(SampledToken { token: *token, logprob: Some(-0.25), top }, &mut pieces);
    }
    let end = turn.finish(Some(FinishReason::Length), &mut pieces);
    assert_eq!((end.reason, end.output_tokens as usize), (ChatFinish::Length, tokens.len()));

    let mut writer = CompletionWriter::new(head, Arc::clone(&vocabulary), 1, false);
    let mut folded = FoldedCompletion::default();
    let (mut streamed, mut offsets) = (String::new(), Vec::new());
    for piece in &pieces {
        folded.push(piece, &vocabulary);
        let chunk = serde_json::to_value(writer.piece(0, piece)).unwrap();
        streamed += chunk["choices"][0]["text"].as_str().unwrap();
        offsets.extend(chunk["choices"][0]["logprobs"]["text_offset"].as_array().unwrap().clone());
    }
    folded.finish(end.reason);
    let whole = serde_json::to_value(writer.whole(vec![folded], Cost::default(), true)).unwrap();
    let choice = &whole["choices"][0];
    assert_eq!((choice["text"].as_str().unwrap(), streamed.as_str()), (text, text));
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["logprobs"]["text_offset"], Value::from(offsets));
    assert_eq!(choice["logprobs"]["token_logprobs"].as_array().unwrap().len(), tokens.len());
}
