//! Grammars of turns: whatever a model does under their masks, the turn is legal Harmony, and JSON is what the schema says.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use constraint::{Compiler, Matcher};
use format::chat::{Answer, ChatFormat, ChatStream, Conversation, SchemaPlace, completions};
use format::harmony::Harmony;
use proptest::prelude::*;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use types::{FinishReason, TokenId};
use vocabulary::Vocabulary;

/// Longest walk. Some do not end by then, as a model's answer may not before `max_tokens`.
const TOKENS_MAX: usize = 600;

struct Nano {
    harmony: Harmony,
    compiler: Compiler,
    /// By what they spell, special tokens by name.
    words: Vec<String>,
}

fn nano() -> &'static Nano {
    static NANO: OnceLock<Nano> = OnceLock::new();
    NANO.get_or_init(|| {
        let json = include_bytes!("../../model/gpt-oss-nano/tokenizer.json");
        let vocabulary = Arc::new(Vocabulary::from_tokenizer_json(json).unwrap());
        let words = (0..vocabulary.size()).map(|token| vocabulary.decode(&[token])).collect();
        let compiler = Compiler::new(Arc::clone(&vocabulary));
        Nano { harmony: Harmony::new(vocabulary).unwrap(), compiler, words }
    })
}

/// A piece of a turn: a control token, or the text between two of them.
#[derive(Debug, PartialEq)]
enum Symbol {
    Control(String),
    Text(String),
}

fn symbols(tokens: &[TokenId]) -> Vec<Symbol> {
    let vocabulary = nano().harmony.vocabulary();
    let runs = tokens.chunk_by(|a, b| vocabulary.special_name(*a).is_none() && vocabulary.special_name(*b).is_none());
    runs.map(|run| match vocabulary.special_name(run[0]) {
        Some(name) => Symbol::Control(name.trim_matches(['<', '|', '>']).to_owned()),
        None => Symbol::Text(vocabulary.decode(run)),
    })
    .collect()
}

fn conversation(request: &Value) -> Conversation {
    let mut request = request.clone();
    request["messages"] = json!([{"role": "user", "content": "hi"}]);
    completions::conversation(&request).unwrap()
}

fn matcher(request: &Value) -> Matcher {
    let Nano { harmony, compiler, .. } = nano();
    let constraint = harmony.constraint(&conversation(request)).expect("the request asks for one");
    let stop = harmony.stop_token_ids();
    compiler.compile(&constraint.grammar, stop).unwrap_or_else(|error| panic!("{error}\n{}", constraint.grammar.lark))
}

/// A model that does as it likes within the masks, with some taste for control tokens and for what closes JSON.
fn walk(request: &Value, mut random: u64) -> (Vec<TokenId>, bool) {
    let Nano { harmony, words, .. } = nano();
    let mut next = move || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize
    };
    let mut matcher = matcher(request);
    let mut tokens = Vec::new();
    while tokens.len() < TOKENS_MAX {
        let mask = matcher.mask().unwrap();
        let allowed: Vec<TokenId> = (0..words.len() as TokenId).filter(|token| mask.allows(*token)).collect();
        let closes = |token: &TokenId| {
            let word = words[*token as usize].as_str();
            word.starts_with("<|") && word.ends_with("|>") || matches!(word, "\"" | "}" | "]" | "," | "\"}" | "\":\"")
        };
        let closing: Vec<TokenId> = allowed.iter().copied().filter(closes).collect();
        let choices = if next() % 3 == 0 && !closing.is_empty() { &closing } else { &allowed };
        let token = choices[next() % choices.len()];
        matcher.consume(&[token]).unwrap();
        tokens.push(token);
        if harmony.stop_token_ids().contains(&token) {
            return (tokens, true);
        }
    }
    (tokens, false)
}

fn read(request: &Value, tokens: &[TokenId]) -> Answer {
    let harmony = &nano().harmony;
    let prompt = harmony.render(&conversation(request)).unwrap();
    let mut stream = ChatStream::new(harmony.parser(&prompt.turn));
    let mut deltas = Vec::new();
    for token in tokens {
        stream.push(*token, &mut deltas);
    }
    stream.finish(FinishReason::Stop, &mut deltas);
    let mut answer = Answer::default();
    deltas.iter().for_each(|delta| answer.push(delta));
    answer
}

/// Takes whole messages of channel `name` off the front; returns how many.
fn skip_notes(symbols: &mut &[Symbol], name: &str) -> usize {
    let mut count = 0;
    let is = |symbol: &Symbol, name: &str| matches!(symbol, Symbol::Control(found) if found == name);
    loop {
        let rest = match symbols {
            [a, Symbol::Text(channel), b, Symbol::Text(_), c, d, Symbol::Text(role), rest @ ..]
            | [a, Symbol::Text(channel), b, c, d, Symbol::Text(role), rest @ ..]
                if channel == name
                    && role == "assistant"
                    && is(a, "channel")
                    && is(b, "message")
                    && is(c, "end")
                    && is(d, "start") =>
            {
                rest
            }
            _ => return count,
        };
        *symbols = rest;
        count += 1;
    }
}

fn person(value: &Value) -> bool {
    let Some(object) = value.as_object() else { return false };
    let short = |value: &Value, most: usize| value.as_str().is_some_and(|text| text.chars().count() <= most);
    object.len() == 3
        && short(&object["name"], 12)
        && object["age"].as_i64().is_some_and(|age| (0..=150).contains(&age))
        && object["tags"].as_array().is_some_and(|tags| {
            tags.len() <= 3 && tags.iter().all(|tag| matches!(tag.as_str(), Some("red" | "green" | "dark blue")))
        })
}

fn person_schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "maxItems": 3, "items": {"$ref": "#/$defs/colour"}},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": false,
        "$defs": {"colour": {"enum": ["red", "green", "dark blue"]}},
    })
}

fn tool(name: &str, strict: bool) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": person_schema(), "strict": strict}})
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_answer_follows_its_schema(random: u64) {
        let request = json!({"response_format": {"type": "json_schema",
            "json_schema": {"name": "person", "schema": person_schema(), "strict": true}}});
        let (tokens, ended) = walk(&request, random);
        prop_assume!(ended);
        let found = symbols(&tokens);
        let mut rest = &found[..];
        prop_assert!(skip_notes(&mut rest, "analysis") <= 1);
        prop_assert_eq!(&rest[0], &Symbol::Control("channel".into()));
        let answer = read(&request, &tokens);
        let content = answer.content.expect("an answer has content");
        let value: Value = serde_json::from_str(&content).unwrap();
        prop_assert!(person(&value), "{}", content);
        prop_assert!(answer.tool_calls.is_empty());
    }

    #[test]
    fn a_json_object_is_one(random: u64) {
        let request = json!({"response_format": {"type": "json_object"}});
        let (tokens, ended) = walk(&request, random);
        prop_assume!(ended);
        let content = read(&request, &tokens).content.expect("an answer has content");
        // Numbers may be greater than any machine's: their text is all that is asked for.
        let object = serde_json::from_str::<BTreeMap<String, Box<RawValue>>>(&content);
        prop_assert!(object.is_ok(), "{}: {:?}", content, object);
    }

    #[test]
    fn a_required_call_is_one_of_the_tools_and_its_arguments_follow_their_schema(random: u64, named: bool) {
        let choice = if named { json!({"type": "function", "function": {"name": "get_more"}}) } else { json!("required") };
        let request = json!({"tools": [tool("get", true), tool("get_more", true)], "tool_choice": choice});
        let (tokens, ended) = walk(&request, random);
        prop_assume!(ended);
        let found = symbols(&tokens);
        let mut rest = &found[..];
        prop_assert!(skip_notes(&mut rest, "analysis") <= 1);
        prop_assert!(skip_notes(&mut rest, "commentary") <= 1);
        prop_assert_eq!(rest.last(), Some(&Symbol::Control("call".into())));
        let answer = read(&request, &tokens);
        prop_assert_eq!(answer.tool_calls.len(), 1);
        let call = &answer.tool_calls[0];
        prop_assert!(call.name == "get_more" || call.name == "get" && !named, "{}", call.name);
        prop_assert!(person(&serde_json::from_str(&call.arguments).unwrap()), "{}", call.arguments);
    }

    #[test]
    fn strict_arguments_bind_also_where_a_call_is_the_models_choice(random: u64) {
        let request = json!({"tools": [tool("strict", true), tool("loose", false)]});
        let (tokens, ended) = walk(&request, random);
        prop_assume!(ended);
        let answer = read(&request, &tokens);
        for call in &answer.tool_calls {
            let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
            prop_assert!(call.name != "strict" || person(&arguments), "{}", call.arguments);
        }
    }
}

#[test]
fn most_walks_end() {
    let request =
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": person_schema()}}});
    let ended = (0..50).filter(|seed| walk(&request, *seed).1).count();
    assert!(ended > 40, "{ended} of 50 walks ended");
}

/// What the model writes by itself is legal: masks must not push it off its habits.
#[test]
fn turns_as_the_model_writes_them_are_allowed() {
    let answer = r#"{"name": "Ann", "age": 7, "tags": ["red"]}"#;
    let pretty = "{\n  \"name\": \"Ann\",\n  \"age\": 7,\n  \"tags\": [\n    \"red\"\n  ]\n}";
    let compact = r#"{"name":"Ann","age":7,"tags":[]}"#;
    let format = json!({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": person_schema(), "strict": true}}});
    let call = json!({"tools": [tool("get", true)], "tool_choice": "required"});
    let think = "<|channel|>analysis<|message|>Let me \"think\".\n<final>…<|end|><|start|>assistant";
    for json in [answer, pretty, compact] {
        for turn in [
            format!("<|channel|>final<|message|>{json}<|return|>"),
            format!("{think}<|channel|>final<|message|>{json}<|return|>"),
            format!("{think}<|channel|>final <|constrain|>json<|message|>{json}<|return|>"),
        ] {
            assert_eq!(refused_at(&format, &turn), None, "{turn}");
        }
        for turn in [
            format!("{think}<|channel|>commentary to=functions.get <|constrain|>json<|message|>{json}<|call|>"),
            format!("<|channel|>commentary to=functions.get json<|message|>{json}<|call|>"),
            format!(" to=functions.get<|channel|>commentary <|constrain|>json<|message|>{json}<|call|>"),
            format!(
                "{think}<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant to=functions.get<|channel|>commentary<|message|>{json}<|call|>"
            ),
        ] {
            assert_eq!(refused_at(&call, &turn), None, "{turn}");
        }
    }
    let wrong = [
        ("<|channel|>final<|message|>Ann is 7", &format, "Ann"),
        ("<|channel|>final<|message|>{\"name\":\"Ann\",\"age\":7,\"tags\":[]}<|call|>", &format, "<|call|>"),
        ("<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>analysis", &format, "analysis"),
        ("<|channel|>final<|message|>", &call, "final"),
        ("<|channel|>commentary to=functions.other", &call, "."),
        ("<|channel|>final<|message|>{\"name\":  \"", &format, " "),
    ];
    for (turn, request, at) in wrong {
        let refused = refused_at(request, turn).unwrap_or_else(|| panic!("{turn} is allowed"));
        assert!(refused.contains(at) || at.contains(refused.trim()), "{turn} is refused at {refused:?}");
    }
}

/// The word of the first token that is refused. Text is tokenized as the model would.
fn refused_at(request: &Value, turn: &str) -> Option<String> {
    let vocabulary = nano().harmony.vocabulary();
    let mut tokens = Vec::new();
    let mut rest = turn;
    while let Some((text, after)) = rest.split_once("<|") {
        let (name, after) = after.split_once("|>").unwrap();
        vocabulary.encode_into(text, &mut tokens);
        tokens.push(vocabulary.special(&format!("<|{name}|>")).unwrap());
        rest = after;
    }
    vocabulary.encode_into(rest, &mut tokens);
    let mut matcher = matcher(request);
    tokens.into_iter().find_map(|token| {
        let allowed = matcher.mask().unwrap().allows(token);
        if allowed {
            matcher.consume(&[token]).unwrap();
        }
        (!allowed).then(|| vocabulary.decode(&[token]))
    })
}

#[test]
fn free_requests_have_no_grammar() {
    for request in [
        json!({}),
        json!({"tools": [tool("loose", false)]}),
        json!({"tools": [tool("strict", true)], "tool_choice": "none"}),
    ] {
        assert_eq!(nano().harmony.constraint(&conversation(&request)), None, "{request}");
    }
}

#[test]
fn names_of_tools_cannot_break_out_of_their_quotes() {
    let name = "a\" | <[1]> \\ \n%json";
    let request = json!({"tools": [tool(name, false)], "tool_choice": "required"});
    let constraint = nano().harmony.constraint(&conversation(&request)).unwrap();
    assert_eq!(constraint.schemas[0].0, SchemaPlace::Tool(0));
    matcher(&request);
}
