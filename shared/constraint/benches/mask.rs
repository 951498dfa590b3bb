//! What constraints cost: the set-up of a vocabulary, compiling a grammar, and masks along an answer. One core; percentiles over all tokens of
//! the answer, each with its token taken in first.
//!
//! `cargo bench -p constraint`

use std::sync::Arc;
use std::time::{Duration, Instant};

use constraint::Compiler;
use serde_json::{Value, json};
use types::{Constraint, TokenId};
use vocabulary::Vocabulary;

const RUNS: usize = 50;

fn main() {
    let nano = Vocabulary::from_tokenizer_json(include_bytes!("../../model/gpt-oss-nano/tokenizer.json"));
    let nano = nano.expect("the embedded file is sound");
    println!("vocabulary  set-up ms  grammar      compile µs  tokens  mask p50 µs    p99    max");
    for (name, vocabulary) in [("nano", Arc::new(nano)), ("o200k", Vocabulary::o200k_harmony())] {
        let begun = Instant::now();
        let compiler = Compiler::new(Arc::clone(&vocabulary));
        let set_up = begun.elapsed();
        for (grammar, lark, answer) in answers(&vocabulary) {
            measure(name, set_up, &vocabulary, &compiler, grammar, &lark, &answer);
        }
    }
}

/// Grammars, and an answer that each allows.
fn answers(vocabulary: &Vocabulary) -> Vec<(&'static str, String, Vec<TokenId>)> {
    let special = |name| vocabulary.special(name).expect("the vocabulary is Harmony's");
    let (channel, message, end) = (special("<|channel|>"), special("<|message|>"), special("<|return|>"));
    let framed = |body: &str| {
        let header = [vec![channel], vocabulary.encode("final"), vec![message]].concat();
        [header, vocabulary.encode(body), vec![end]].concat()
    };
    let grammar = |body: &str| format!("start: <[{channel}]> \"final\" <[{message}]> body <[{end}]>\nbody: {body}");
    let text = "Reasoning goes on for a while, with \"quotes\", numbers like 12 + 30, and\nline breaks. ".repeat(5);
    vec![
        ("schema", grammar(&format!("%json {}", schema())), framed(&document().to_string())),
        ("json_object", grammar(r#"%json {"type": "object"}"#), framed(&document().to_string())),
        ("free text", grammar("/(?s:.+)/"), framed(&text)),
    ]
}

fn schema() -> Value {
    let person = json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150}, "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "dark blue"]}, "maxItems": 5}},
        "required": ["name", "age", "email", "tags"], "additionalProperties": false});
    json!({"type": "object", "properties": {"people": {"type": "array", "items": person}, "note": {"type": "string"}},
        "required": ["people", "note"], "additionalProperties": false})
}

fn document() -> Value {
    let person = |idx: u32| {
        json!({"name": format!("Ann Number {idx}"), "age": 20 + idx,
        "email": format!("ann{idx}@example.com"), "tags": ["red", "dark blue"]})
    };
    json!({"people": (0..6).map(person).collect::<Vec<_>>(), "note": "a few words to end with, nothing special"})
}

fn measure(
    name: &str,
    set_up: Duration,
    vocabulary: &Vocabulary,
    compiler: &Compiler,
    grammar: &str,
    lark: &str,
    answer: &[TokenId],
) {
    let constraint = Constraint { lark: lark.into() };
    let stop = [vocabulary.special("<|return|>").expect("the vocabulary is Harmony's")];
    let (mut compiling, mut masks) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        let begun = Instant::now();
        let mut matcher = compiler.compile(&constraint, &stop).expect("the grammar is sound");
        compiling.push(begun.elapsed());
        for token in answer {
            let begun = Instant::now();
            let mask = matcher.mask().expect("the answer is allowed");
            assert!(mask.allows(*token), "{grammar}: {:?} is not allowed", vocabulary.decode(&[*token]));
            matcher.consume(&[*token]).expect("the answer is allowed");
            masks.push(begun.elapsed());
        }
    }
    compiling.sort_unstable();
    masks.sort_unstable();
    let micros =
        |times: &[Duration], share: f64| times[((times.len() - 1) as f64 * share).round() as usize].as_secs_f64() * 1e6;
    println!(
        "{name:10}  {:9.0}  {grammar:11}  {:10.0}  {:6}  {:11.1}  {:5.0}  {:5.0}",
        set_up.as_secs_f64() * 1e3,
        micros(&compiling, 0.5),
        answer.len(),
        micros(&masks, 0.5),
        micros(&masks, 0.99),
        micros(&masks, 1.0),
    );
}
