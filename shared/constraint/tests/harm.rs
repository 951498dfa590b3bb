//! Grammars that mean harm: whatever they say, compiling them ends soon, with a matcher or an error, and never with the process.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use constraint::{Compiler, STACK_BYTES};
use types::Constraint;
use vocabulary::Vocabulary;

/// Far beyond what any of them takes alone; the machine may be building beside the test.
const ENDS_WITHIN: Duration = Duration::from_secs(60);

/// As long as a grammar may be.
fn filled(head: &str, step: &str, tail: &str) -> String {
    let steps = (Constraint::BYTES_MAX - head.len() - tail.len()) / step.len();
    format!("{head}{}{tail}", step.repeat(steps))
}

/// `link(i)` mentions `i + 1`.
fn chain(head: &str, link: impl Fn(usize) -> String, last: &str) -> String {
    let mut text = head.to_owned();
    for i in 0.. {
        let next = link(i);
        if text.len() + next.len() + last.len() > Constraint::BYTES_MAX {
            return text + &last.replace("{i}", &i.to_string());
        }
        text += &next;
    }
    unreachable!("links have a length")
}

fn schema_chain(link: impl Fn(usize) -> String) -> String {
    let head = r##"start: %json {"$ref":"#/$defs/d0","$defs":{"##;
    chain(head, |i| format!(r#""d{i}":{},"#, link(i + 1)), r#""d{i}":{"type":"null"}}}"#)
}

#[test]
fn deep_and_long_grammars_end_in_words() {
    let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
    thread.spawn(compile_all).unwrap().join().unwrap();
}

fn compile_all() {
    let json = include_bytes!("../../model/gpt-oss-nano/tokenizer.json");
    let vocabulary = Arc::new(Vocabulary::from_tokenizer_json(json).unwrap());
    let compiler = Arc::new(Compiler::new(vocabulary));
    let nested =
        |open: &str, close: &str, depth| format!("start: {}\"a\"{}\n", open.repeat(depth), close.repeat(depth));
    let grammars = [
        ("groups", nested("(", ")", 200_000)),
        ("optional groups", nested("[", "]", 200_000)),
        ("nested grammars", nested("%lark { start: ", " }", 20_000)),
        ("templates", filled("start: ", "a{", "")),
        ("closed templates", format!("start: {}\"a\"{}\n", "a{".repeat(170_000), "}".repeat(170_000))),
        ("conditions", filled("start: \"a\" %if ", "and(", "")),
        ("negations", filled("start: A\nA: ", "~", "\"a\"")),
        ("closed negations", format!("start: A\nA: {}\"a\"{}", "~(".repeat(100_000), ")".repeat(100_000))),
        ("rules", chain("start: r0\n", |i| format!("r{i}: r{}\n", i + 1), "r{i}: \"a\"\n")),
        ("rules with text", chain("start: r0\n", |i| format!("r{i}: \"a\" r{}\n", i + 1), "r{i}: \"a\"\n")),
        ("terminals", chain("start: T0\n", |i| format!("T{i}: T{}\n", i + 1), "T{i}: \"a\"\n")),
        ("alternatives", filled("start: \"a\"", " | \"b\"", "\n")),
        ("sequence", filled("start: \"a\"", " \"b\"", "\n")),
        ("choices of terminals", filled("start: A\nA: \"a\"", " | \"b\"", "\n")),
        ("repeats", "start: ((\"a\"{1,2000000000}){1,2000000000}){1,2000000000}\n".to_owned()),
        ("regex groups", format!("start: /{}a{}/\n", "(".repeat(100_000), ")".repeat(100_000))),
        ("regex repeats", "start: /((a{1000}){1000}){1000}/\n".to_owned()),
        ("regex alternatives", filled("start: /a", "|b", "/\n")),
        ("text", filled("start: \"", "a", "\"\n")),
        ("schema references", schema_chain(|next| format!(r##"{{"$ref":"#/$defs/d{next}"}}"##))),
        (
            "schema references in unions",
            schema_chain(|next| format!(r##"{{"anyOf":[{{"$ref":"#/$defs/d{next}"}}]}}"##)),
        ),
        ("schema references in meets", schema_chain(|next| format!(r##"{{"allOf":[{{"$ref":"#/$defs/d{next}"}}]}}"##))),
        (
            "schema references in both",
            schema_chain(|next| {
                format!(r##"{{"allOf":[{{"$ref":"#/$defs/d{next}"}},{{"$ref":"#/$defs/d{next}"}}]}}"##)
            }),
        ),
        (
            "schema nesting and references",
            schema_chain(|next| {
                let (open, close) = (r#"{"items":"#.repeat(110), "}".repeat(110));
                format!(r##"{open}{{"$ref":"#/$defs/d{next}"}}{close}"##)
            }),
        ),
        (
            "schema references in properties",
            schema_chain(|next| format!(r##"{{"properties":{{"a":{{"$ref":"#/$defs/d{next}"}}}}}}"##)),
        ),
        ("schema nesting", format!("start: %json {}{}\n", r#"{"items":"#.repeat(40_000), "}".repeat(40_000))),
        ("schema enumeration", filled(r#"start: %json {"enum":["a""#, r#","a""#, "]}\n")),
        ("schema pattern", filled(r#"start: %json {"type":"string","pattern":""#, "(a?)", "\"}\n")),
        ("schema length", r#"start: %json {"type":"string","minLength":4000000000,"maxLength":4000000000}"#.to_owned()),
        ("schema items", r#"start: %json {"type":"array","minItems":4000000000}"#.to_owned()),
        (
            "schema multiple",
            r#"start: %json {"type":"number","multipleOf":1e-300,"minimum":-1e308,"maximum":1e308}"#.to_owned(),
        ),
        ("no grammar", filled("", "\u{0}\u{feff}%{<[", "")),
    ];
    for (name, lark) in grammars {
        assert!(lark.len() <= Constraint::BYTES_MAX, "{name}");
        let begun = Instant::now();
        let outcome =
            compiler.compile(&Constraint { lark: lark.into() }, &[0]).map(|mut matcher| matcher.mask().is_ok());
        let took = begun.elapsed();
        println!("{name}: {took:?}, {outcome:?}");
        assert!(took < ENDS_WITHIN, "{name} took {took:?}: {outcome:?}");
    }
}
