//! Runs a folder of Harmony cases: conversations to tokens, and tokens to messages and deltas.
//!
//! `cargo test --release -p gateway harmony -- --nocapture`. The folder is the one that `HARMONY_CASES` names, or else
//! `tests/cases/harmony`; the format of the cases is described in its README. Each file is one case, at any depth.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::{Path, PathBuf};

use format::chat::{
    Answer, Channel, ChatFormat, ChatStream, ContentType, Delta, Event, Parser, ReasoningEffort, Recipient, Role,
    ToolDefinition, completions,
};
use format::harmony::{BuiltinTool, Content, DeveloperBlock, Ending, Harmony, Message, RenderOptions, SystemBlock};
use serde_json::{Map, Value, json};
use types::{FinishReason, TokenId};
use vocabulary::Vocabulary;

#[test]
fn harmony_cases() {
    let folder = cases_folder();
    let mut files = Vec::new();
    collect_json(&folder, &mut files);
    files.sort();
    assert!(!files.is_empty(), "no case in {}", folder.display());

    let harmony = Harmony::new(Vocabulary::o200k_harmony()).unwrap();
    let mut failed = 0;
    for file in &files {
        let case: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        let (expected, got) = run(&harmony, &case);
        if expected != got {
            failed += 1;
            println!("FAILED {}", case["id"].as_str().unwrap_or_else(|| file.to_str().unwrap_or_default()));
            println!("  expected {expected}");
            println!("  got      {got}");
        }
    }
    println!("{} passed, {failed} failed", files.len() - failed);
    assert_eq!(failed, 0, "of the cases in {}", folder.display());
}

/// A path in `HARMONY_CASES` may also be relative to the root of the workspace, where the command is given.
fn cases_folder() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    match std::env::var_os("HARMONY_CASES").map(PathBuf::from) {
        None => root.join("tests/cases/harmony"),
        Some(folder) if folder.exists() => folder,
        Some(folder) => root.join(folder),
    }
}

fn collect_json(folder: &Path, files: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    for entry in entries {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect_json(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "json") {
            files.push(path);
        }
    }
}

/// What a case expects and what it gets, in one notation.
fn run(harmony: &Harmony, case: &Value) -> (Value, Value) {
    let (input, expected) = (&case["input"], &case["expected"]);
    match case["kind"].as_str() {
        Some("render") => {
            let tokens = harmony.render_messages(&messages(&input["messages"]), options(&input["options"]));
            prompts(harmony, expected, Ok(tokens))
        }
        Some("chat") => prompts(harmony, expected, chat(harmony, input)),
        Some("parse") => (expected["messages"].clone(), parse(harmony, input)),
        Some("stream") => (expected.clone(), stream(harmony, input)),
        other => panic!("no such kind of case: {other:?}"),
    }
}

/// The tokens decide; the text makes a difference readable. A case without tokens expects a refusal.
fn prompts(harmony: &Harmony, expected: &Value, got: Result<Vec<TokenId>, String>) -> (Value, Value) {
    let show = |tokens: &[TokenId]| json!({"text": harmony.vocabulary().decode(tokens), "tokens": tokens});
    let got = got.map_or_else(|error| json!({"refused": error}), |tokens| show(&tokens));
    match expected.get("tokens") {
        Some(tokens) => (show(&token_ids(tokens)), got),
        None if got.get("refused").is_some() => (got.clone(), got),
        None => (expected.clone(), got),
    }
}

fn token_ids(tokens: &Value) -> Vec<TokenId> {
    serde_json::from_value(tokens.clone()).unwrap()
}

fn owned(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn strings(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().filter_map(owned).collect()
}

fn messages(list: &Value) -> Vec<Message> {
    list.as_array().unwrap().iter().map(message).collect()
}

fn message(message: &Value) -> Message {
    let content = if let Some(system) = message.get("system") {
        Content::System(system_block(system.as_object().unwrap()))
    } else if let Some(developer) = message.get("developer") {
        Content::Developer(developer_block(developer))
    } else {
        Content::Text(match &message["content"] {
            Value::Array(parts) => parts.iter().filter_map(|part| owned(&part["text"])).collect(),
            text => owned(text).into_iter().collect(),
        })
    };
    Message {
        role: role(&message["role"]).unwrap(),
        name: owned(&message["name"]),
        recipient: owned(&message["recipient"]),
        channel: owned(&message["channel"]),
        content_type: message["content_type"].as_str().map(|written| match written.strip_prefix("<|constrain|>") {
            Some(name) => ContentType { constrained: true, name: name.to_owned() },
            None => ContentType { constrained: false, name: written.to_owned() },
        }),
        content,
    }
}

fn role(word: &Value) -> Option<Role> {
    Role::from_word(word.as_str()?)
}

/// A field that is not there has its default, null leaves its line out.
fn system_block(fields: &Map<String, Value>) -> SystemBlock {
    let default = SystemBlock::default();
    let text = |field: &str, default: Option<String>| fields.get(field).map_or(default, owned);
    SystemBlock {
        model_identity: text("model_identity", default.model_identity),
        knowledge_cutoff: text("knowledge_cutoff", default.knowledge_cutoff),
        current_date: text("current_date", default.current_date),
        reasoning_effort: fields.get("reasoning_effort").map_or(default.reasoning_effort, |effort| {
            match effort.as_str()? {
                "low" => Some(ReasoningEffort::Low),
                "medium" => Some(ReasoningEffort::Medium),
                "high" => Some(ReasoningEffort::High),
                other => panic!("no such effort: {other}"),
            }
        }),
        builtin_tools: strings(fields.get("builtin_tools").unwrap_or(&Value::Null))
            .iter()
            .map(|tool| match tool.as_str() {
                "browser" => BuiltinTool::Browser,
                "python" => BuiltinTool::Python,
                other => panic!("no such tool: {other}"),
            })
            .collect(),
        valid_channels: match fields.get("valid_channels") {
            None => default.valid_channels,
            Some(Value::Null) => None,
            Some(names) => Some(strings(names)),
        },
        channel_required: fields.get("channel_required").and_then(Value::as_bool).unwrap_or(default.channel_required),
    }
}

fn developer_block(fields: &Value) -> DeveloperBlock {
    let function = |function: &Value| ToolDefinition {
        name: owned(&function["name"]).unwrap(),
        description: owned(&function["description"]),
        parameters: function.get("parameters").filter(|schema| !schema.is_null()).cloned(),
        strict: false,
    };
    DeveloperBlock {
        instructions: owned(&fields["instructions"]),
        functions: fields["functions"].as_array().map(|functions| functions.iter().map(function).collect()),
        response_format: None,
    }
}

fn options(options: &Value) -> RenderOptions {
    let ending = match options["mode"].as_str() {
        Some("completion") => Ending::Open(role(&options["next_role"]).unwrap_or(Role::Assistant)),
        Some("history") => Ending::Closed,
        Some("training") => Ending::Training,
        other => panic!("no such mode: {other:?}"),
    };
    RenderOptions { ending, drop_analysis: options["drop_analysis"] == true }
}

fn chat(harmony: &Harmony, input: &Value) -> Result<Vec<TokenId>, String> {
    let mut conversation = completions::conversation(&input["request"]).map_err(|error| error.to_string())?;
    conversation.current_date = owned(&input["date"]);
    harmony.render(&conversation).map(|prompt| prompt.tokens).map_err(|error| error.to_string())
}

fn parse(harmony: &Harmony, input: &Value) -> Value {
    let mut parser = harmony.parser_of(role(&input["role"]), &strings(&input["tools"]));
    let mut events = Vec::new();
    for token in token_ids(&input["tokens"]) {
        parser.push(token, &mut events);
    }
    parser.finish(&mut events);

    let mut messages: Vec<Value> = Vec::new();
    let mut content = String::new();
    for event in events {
        match event {
            Event::Header(header) => messages.push(json!({
                "role": header.role.as_str(),
                "name": header.name,
                "recipient": header.recipient.map(|recipient| match recipient {
                    Recipient::Function(name) => format!("functions.{name}"),
                    Recipient::Other(name) => name,
                }),
                "channel": header.channel.map(|channel| match channel {
                    Channel::Reasoning => "analysis".to_owned(),
                    Channel::Commentary => "commentary".to_owned(),
                    Channel::Answer => "final".to_owned(),
                    Channel::Unknown(name) => name,
                }),
                "content_type": header.content_type.map(|content_type| {
                    format!("{}{}", if content_type.constrained { "<|constrain|>" } else { "" }, content_type.name)
                }),
            })),
            Event::Body(text) => content.push_str(&text),
            Event::End { complete, .. } => {
                let message = messages.last_mut().unwrap();
                message["content"] = json!(std::mem::take(&mut content));
                message["complete"] = json!(complete);
            }
        }
    }
    json!(messages)
}

fn stream(harmony: &Harmony, input: &Value) -> Value {
    let parser = harmony.parser_of(role(&input["role"]), &strings(&input["tools"]));
    let mut stream = ChatStream::new(Box::new(parser));
    let mut deltas = Vec::new();
    for token in token_ids(&input["tokens"]) {
        stream.push(token, &mut deltas);
    }
    let finish = if input["finish"] == "length" { FinishReason::Length } else { FinishReason::Stop };
    let finished = stream.finish(finish, &mut deltas);
    let mut answer = Answer::default();
    deltas.iter().for_each(|delta| answer.push(delta));
    let call = |(index, call): (usize, &format::chat::AnswerCall)| json!({"index": index, "name": call.name, "arguments": call.arguments});
    json!({
        "deltas": merged(&deltas),
        "accumulated": {
            "reasoning_content": answer.reasoning,
            "content": answer.content,
            "tool_calls": answer.tool_calls.iter().enumerate().map(call).collect::<Vec<_>>(),
            "finish_reason": finished.reason.as_str(),
        },
    })
}

/// The deltas with neighbours of the same message put together, and without those that only say that a field is empty.
fn merged(deltas: &[Delta]) -> Vec<Value> {
    let mut merged: Vec<(u32, Value)> = Vec::new();
    for delta in deltas {
        let (message_idx, field, more, new) = match delta {
            Delta::Reasoning(text) => {
                (text.message_idx, "text", &text.text, json!({"type": "reasoning", "text": text.text}))
            }
            Delta::Content(text) => {
                (text.message_idx, "text", &text.text, json!({"type": "content", "text": text.text}))
            }
            Delta::ToolCall(call) => (
                call.message_idx,
                "arguments",
                &call.arguments,
                json!({"type": "tool_call", "index": call.index, "name": call.name, "arguments": call.arguments}),
            ),
        };
        match merged.last_mut() {
            Some((last, same)) if *last == message_idx => {
                same[field] = json!(format!("{}{more}", same[field].as_str().unwrap_or_default()));
            }
            _ if more.is_empty() && field == "text" => {}
            _ => merged.push((message_idx, new)),
        }
    }
    merged.into_iter().map(|(_, delta)| delta).collect()
}
