//! Masks over the vocabulary of gpt-oss-nano, and what is refused.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use constraint::{Compiler, ConstraintBroken, Matcher};
use serde_json::{Value, json};
use types::{Constraint, TokenId, TokenMask};
use vocabulary::Vocabulary;

fn nano() -> &'static (Arc<Vocabulary>, Compiler) {
    static NANO: OnceLock<(Arc<Vocabulary>, Compiler)> = OnceLock::new();
    NANO.get_or_init(|| {
        let json = include_bytes!("../../model/gpt-oss-nano/tokenizer.json");
        let vocabulary = Arc::new(Vocabulary::from_tokenizer_json(json).unwrap());
        (Arc::clone(&vocabulary), Compiler::new(vocabulary))
    })
}

fn special(name: &str) -> TokenId {
    nano().0.special(name).unwrap()
}

fn compile(lark: &str) -> Matcher {
    let stop = [special("<|return|>"), special("<|call|>")];
    nano().1.compile(&Constraint { lark: lark.into() }, &stop).unwrap()
}

fn refusal(lark: &str) -> String {
    nano().1.compile(&Constraint { lark: lark.into() }, &[]).map(|_| ()).unwrap_err().to_string()
}

fn allowed(mask: &TokenMask) -> Vec<TokenId> {
    (0..nano().0.size() + 100).filter(|token| mask.allows(*token)).collect()
}

#[test]
fn a_finished_grammar_forces_a_stop_token() {
    let mut matcher = compile(r#"start: "7" | "78""#);
    let seven = nano().0.encode("7")[0];
    assert!(matcher.mask().unwrap().allows(seven));
    matcher.consume(&[seven]).unwrap();
    let mask = matcher.mask().unwrap();
    assert!(mask.allows(special("<|return|>")) && mask.allows(special("<|call|>")), "it may end");
    assert!(mask.allows(nano().0.encode("8")[0]), "or go on");
    assert!(!matcher.is_finished());
    matcher.consume(&nano().0.encode("8")).unwrap();
    assert!(matcher.is_finished());
    let stop = [special("<|return|>"), special("<|call|>")];
    let mut ends = allowed(&matcher.mask().unwrap());
    ends.sort_by_key(|token| stop.iter().position(|stop| stop == token));
    assert_eq!(ends, stop);
    matcher.consume(&[stop[0]]).unwrap();
    assert!(matches!(matcher.consume(&[stop[0]]), Err(ConstraintBroken::Token { .. })));
}

#[test]
fn tokens_are_named_by_number() {
    let (channel, message, end) = (special("<|channel|>"), special("<|message|>"), special("<|return|>"));
    let mut matcher = compile(&format!(r#"start: <[{channel}]> "7" <[{message}]> /(?s:.+)/ <[{end}]>"#));
    assert_eq!(allowed(&matcher.mask().unwrap()), [channel]);
    matcher.consume(&[channel]).unwrap();
    matcher.consume(&nano().0.encode("7")).unwrap();
    assert_eq!(allowed(&matcher.mask().unwrap()), [message]);
    matcher.consume(&[message]).unwrap();
    let text = matcher.mask().unwrap();
    let missing = (0..nano().0.size()).filter(|token| nano().0.token_bytes(*token).is_some() && !text.allows(*token));
    let missing: Vec<&[u8]> = missing.filter_map(|token| nano().0.token_bytes(token)).collect();
    assert!(missing.iter().all(|bytes| std::str::from_utf8(bytes).is_err()), "all text is free, but not {missing:?}");
    assert!(!text.allows(end), "some text must come first");
    matcher.consume(&nano().0.encode("so <|return|> it is")).unwrap();
    let text = matcher.mask().unwrap();
    assert!(text.allows(end));
    assert!(!text.allows(special("<|call|>")) && !text.allows(channel), "the grammar ends with one token only");
    matcher.consume(&[end]).unwrap();
    assert!(matcher.is_finished());
}

#[test]
fn what_is_forbidden_breaks_the_grammar_for_good() {
    let mut matcher = compile(r#"start: "7""#);
    let wrong = nano().0.encode("8");
    assert!(matches!(matcher.consume(&wrong), Err(ConstraintBroken::Token { token, .. }) if token == wrong[0]));
    assert!(matcher.mask().is_err());
    let mut matcher = compile(r#"start: "7""#);
    let early = special("<|return|>");
    assert!(matches!(matcher.consume(&[early]), Err(ConstraintBroken::Token { token, .. }) if token == early));
}

#[test]
fn without_a_stop_token_nothing_follows_the_end() {
    let grammar = Constraint { lark: r#"start: "7""#.into() };
    let mut matcher = nano().1.compile(&grammar, &[nano().0.size() + 5]).unwrap();
    matcher.consume(&nano().0.encode("7")).unwrap();
    assert!(matches!(matcher.mask(), Err(ConstraintBroken::NoToken(_))));
}

/// Replaying tokens and taking tokens back lead to the same masks as having come there straight.
#[test]
fn state_is_a_function_of_the_tokens() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}},
        "b": {"type": "string", "maxLength": 5}}, "required": ["a", "b"], "additionalProperties": false});
    let lark = format!("start: %json {schema}");
    let tokens = nano().0.encode(r#"{"a": [1, 22, 333], "b": "x\"y"}"#);
    let mut straight = compile(&lark);
    let masks: Vec<TokenMask> = tokens
        .iter()
        .map(|token| {
            let mask = straight.mask().unwrap();
            assert!(mask.allows(*token));
            straight.consume(&[*token]).unwrap();
            mask
        })
        .collect();
    for (len, mask) in masks.iter().enumerate() {
        let mut replayed = compile(&lark);
        replayed.consume(&tokens[..len]).unwrap();
        assert_eq!(replayed.mask().unwrap(), *mask, "after {len} tokens");
    }
    for back in 1..=tokens.len() {
        straight.rollback(back).unwrap();
        assert_eq!(straight.mask().unwrap(), masks[tokens.len() - back], "{back} tokens back");
        straight.consume(&tokens[tokens.len() - back..]).unwrap();
    }
    straight.consume(&[special("<|return|>")]).unwrap();
    straight.rollback(2).unwrap();
    assert_eq!(straight.mask().unwrap(), masks[tokens.len() - 1], "the stop token is one of them");
}

#[test]
fn refusals_say_what_is_wrong() {
    for (lark, reason) in [
        ("start: nothing", "nothing"),
        ("start: \"a", "1"),
        ("start: %json {\"type\": \"array\", \"uniqueItems\": true}", "uniqueItems"),
        ("start: %json {\"type\": \"objekt\"}", "objekt"),
        ("start: <|nonsense|>", "nonsense"),
        ("start: %json {\"$ref\": \"http://example.com/schema\"}", "example.com"),
    ] {
        let refusal = refusal(lark);
        assert!(refusal.contains(reason), "{lark}: {refusal}");
        assert!(refusal.len() < 400 && !refusal.contains("non-verbose"), "{refusal}");
    }
}

/// How long this thread has computed: what else the machine does is not counted.
fn time_on_cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(stat.split_whitespace().next().unwrap().parse().unwrap())
}

/// Whatever a client sends, compiling and one mask are bounded.
#[test]
fn hostile_schemas_cost_a_bounded_time() {
    let deep = |depth: usize| {
        let nested = |schema: Value, _| json!({"type": "object", "properties": {"a": schema}, "required": ["a"]});
        (0..depth).fold(json!({"type": "string"}), nested)
    };
    let wide: serde_json::Map<String, Value> =
        (0..3_000).map(|idx| (format!("property_{idx}"), json!({"type": "string", "maxLength": 100}))).collect();
    let words: Vec<String> = (0..20_000).map(|idx| format!("{}", idx * 7919)).collect();
    let hostile = [
        ("deep", deep(60)),
        ("wide", json!({"type": "object", "properties": wide})),
        ("long string", json!({"type": "string", "maxLength": 1_000_000_000})),
        ("long array", json!({"type": "array", "minItems": 1_000_000, "items": {"type": "integer"}})),
        ("pattern", json!({"type": "string", "pattern": "^(a|aa|aaa)*(b|bb){1000,5000}c$"})),
        ("nested counts", json!({"type": "string", "pattern": "^((((x{1,50}y){1,50}z){1,50}w){1,50})$"})),
        ("enum", json!({"enum": words})),
        (
            "alternatives",
            json!({"anyOf": (0..500).map(|idx| json!({"type": "object",
            "properties": {"kind": {"const": idx}, "rest": {"type": "string"}}})).collect::<Vec<_>>()}),
        ),
        (
            "recursion",
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}}),
        ),
    ];
    for (name, schema) in hostile {
        let begun = time_on_cpu();
        let constraint = Constraint { lark: format!("start: %json {schema}").into() };
        let outcome = nano().1.compile(&constraint, &[special("<|return|>")]).map(|mut matcher| matcher.mask().is_ok());
        let elapsed = time_on_cpu() - begun;
        println!("{name}: {elapsed:?} {outcome:?}");
        assert!(elapsed < Duration::from_secs(2), "{name} took {elapsed:?}");
    }
}
