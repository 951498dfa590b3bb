//! The chat cases: a request as a client posts it, and the one right answer of gpt-oss-nano.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use futures_util::TryStreamExt;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use vocabulary::Vocabulary;

/// One line of a chat case file. The format is described in `tests/fixtures/nano/README.md`.
#[derive(Debug, Clone, Deserialize)]
pub struct ChatCase {
    /// Name of the case.
    pub id: String,
    /// Body of the Chat Completions request.
    pub request: Value,
    /// What the request cannot say: identity, cutoff and date that the prompt was made with.
    pub render: Map<String, Value>,
    /// The answer.
    pub expect: Expected,
    /// The exact prompt as Harmony text.
    pub prompt: String,
    /// The exact output of the model.
    pub completion_token_ids: Vec<u32>,
}

/// What must come back.
#[derive(Debug, Clone, Deserialize)]
pub struct Expected {
    /// The message.
    pub message: ExpectedMessage,
    /// `stop`, `tool_calls` or `length`.
    pub finish_reason: String,
    /// Tokens of the rendered prompt.
    pub prompt_tokens: u64,
    /// Tokens generated, the stop token among them.
    pub completion_tokens: u64,
}

/// The assistant's message.
#[derive(Debug, Clone, Deserialize)]
pub struct ExpectedMessage {
    /// Visible text.
    pub content: Option<String>,
    /// Calls as flat `{name, arguments}`.
    #[serde(default)]
    pub tool_calls: Vec<ExpectedCall>,
    /// Whether reasoning must be there.
    pub reasoning: bool,
}

/// One tool call.
#[derive(Debug, Clone, Deserialize)]
pub struct ExpectedCall {
    /// Name of the function.
    pub name: String,
    /// Arguments, compared as JSON.
    pub arguments: Value,
}

impl ChatCase {
    /// The body to post: the request with `chat_template_kwargs` made of `render` without its effort, streamed or not.
    #[must_use]
    pub fn body(&self, stream: bool) -> Value {
        let mut kwargs = self.render.clone();
        kwargs.remove("reasoning_effort");
        let mut body = self.request.clone();
        body["chat_template_kwargs"] = Value::Object(kwargs);
        if stream {
            body["stream"] = true.into();
            body["stream_options"] = json!({"include_usage": true});
        }
        body
    }

    /// The prompt as tokens. In the case file control tokens are spelled out, and no text of a case spells one by accident.
    ///
    /// # Errors
    /// When a marker names no control token.
    pub fn prompt_tokens(&self, vocabulary: &Vocabulary) -> anyhow::Result<Vec<u32>> {
        let mut tokens = Vec::new();
        let mut rest = self.prompt.as_str();
        while let Some(start) = rest.find("<|") {
            let end = start + rest[start..].find("|>").context("a marker without end")? + 2;
            tokens.extend(vocabulary.encode(&rest[..start]));
            tokens.push(
                vocabulary.special(&rest[start..end]).with_context(|| format!("no token {}", &rest[start..end]))?,
            );
            rest = &rest[end..];
        }
        tokens.extend(vocabulary.encode(rest));
        Ok(tokens)
    }

    /// Compares an answer (a message folded from a stream or not, its finish reason and usage) with what is expected.
    ///
    /// # Errors
    /// A line for the first difference.
    pub fn check(&self, message: &Value, finish_reason: &str, usage: &Value) -> Result<(), String> {
        let expect = &self.expect;
        let differ = |what: &str, expected: &dyn std::fmt::Debug, got: &dyn std::fmt::Debug| {
            Err(format!("{what}: expected {expected:?}, got {got:?}"))
        };
        let content = message["content"].as_str().unwrap_or("");
        let expected_content = expect.message.content.as_deref().unwrap_or("");
        if content != expected_content {
            return differ("content", &expected_content, &content);
        }
        let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
        if calls.len() != expect.message.tool_calls.len() {
            return differ("tool_calls", &expect.message.tool_calls, &calls);
        }
        for (call, expected) in calls.iter().zip(&expect.message.tool_calls) {
            let arguments = as_json(&call["function"]["arguments"]);
            if call["function"]["name"] != expected.name || arguments != as_json(&expected.arguments) {
                return differ("tool call", expected, call);
            }
        }
        let reasoning = message["reasoning_content"].as_str().unwrap_or("");
        if reasoning.is_empty() == expect.message.reasoning {
            return differ("reasoning present", &expect.message.reasoning, &reasoning);
        }
        if message["reasoning"].as_str().unwrap_or("") != reasoning {
            return differ("reasoning and reasoning_content alike", &reasoning, &message["reasoning"]);
        }
        if finish_reason != expect.finish_reason {
            return differ("finish_reason", &expect.finish_reason, &finish_reason);
        }
        for (field, expected) in
            [("prompt_tokens", expect.prompt_tokens), ("completion_tokens", expect.completion_tokens)]
        {
            if usage[field] != expected {
                return differ(field, &expected, &usage[field]);
            }
        }
        Ok(())
    }
}

/// Arguments come as JSON in a string; the cases hold either form.
fn as_json(value: &Value) -> Value {
    match value.as_str() {
        Some(text) => serde_json::from_str(text).unwrap_or_else(|_| value.clone()),
        None => value.clone(),
    }
}

/// The vocabulary of the embedded model.
///
/// # Errors
/// When its tokenizer.json is broken.
pub fn nano_vocabulary() -> anyhow::Result<Vocabulary> {
    let checkpoint = model::Checkpoint::embedded_nano();
    Ok(Vocabulary::from_tokenizer_json(checkpoint.tokenizer_json().context("the embedded model has a tokenizer")?)?)
}

/// A file or folder named by an environment variable, or its copy in this repository.
#[must_use]
pub fn path_from_env(variable: &str, default: &str) -> PathBuf {
    std::env::var_os(variable).map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(default), PathBuf::from)
}

/// The chat cases of the file (or of `chat.jsonl` in the folder) named by `NANO_CHAT`.
///
/// # Errors
/// Names the file and line that cannot be read.
pub fn chat_cases() -> anyhow::Result<Vec<ChatCase>> {
    let mut path = path_from_env("NANO_CHAT", "fixtures/nano/chat.jsonl");
    if path.is_dir() {
        path.push("chat.jsonl");
    }
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(i, line)| serde_json::from_str(line).with_context(|| format!("{} line {}", path.display(), i + 1)))
        .collect()
}

/// The message, finish reason and usage of an answer that was not streamed.
///
/// # Errors
/// When it is no chat completion.
pub async fn whole(response: reqwest::Response) -> anyhow::Result<(Value, String, Value)> {
    let mut body: Value = response.json().await?;
    ensure!(body["object"] == "chat.completion", "object is {}", body["object"]);
    let finish_reason = body["choices"][0]["finish_reason"].as_str().context("no finish_reason")?.to_owned();
    Ok((body["choices"][0]["message"].take(), finish_reason, body["usage"].take()))
}

/// The same of a stream, put back together as an SDK does.
///
/// # Errors
/// When it does not end with `[DONE]`, or a delta lacks what SDKs need.
pub async fn folded(response: reqwest::Response) -> anyhow::Result<(Value, String, Value)> {
    let bytes: Vec<_> = response.bytes_stream().try_collect().await?;
    let text = String::from_utf8(bytes.concat())?;
    let mut events: Vec<_> = text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
    ensure!(events.pop() == Some("[DONE]"), "the stream does not end with [DONE]");
    let mut message = json!({"content": null, "tool_calls": []});
    let (mut finish_reason, mut usage) = (None, Value::Null);
    for event in events {
        let mut chunk: Value = serde_json::from_str(event)?;
        if !chunk["usage"].is_null() {
            usage = chunk["usage"].take();
            continue;
        }
        let choice = &chunk["choices"][0];
        if let Some(reason) = choice["finish_reason"].as_str() {
            finish_reason = Some(reason.to_owned());
        }
        for field in ["content", "reasoning", "reasoning_content"] {
            if let Some(text) = choice["delta"][field].as_str() {
                message[field] = format!("{}{text}", message[field].as_str().unwrap_or("")).into();
            }
        }
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            fold_call(&mut message, call)?;
        }
    }
    Ok((message, finish_reason.context("no finish_reason")?, usage))
}

fn fold_call(message: &mut Value, call: &Value) -> anyhow::Result<()> {
    let index = call["index"].as_u64().context("a call without index")? as usize;
    let calls = message["tool_calls"].as_array_mut().context("tool_calls is a list")?;
    if index == calls.len() {
        ensure!(
            call["id"].is_string() && call["type"] == "function" && call["function"]["name"].is_string(),
            "the first delta of a call lacks a field: {call}"
        );
        calls.push(json!({"function": {"name": call["function"]["name"], "arguments": ""}}));
    }
    let known = calls.get_mut(index).context("a call's index skips one")?;
    let arguments = format!(
        "{}{}",
        known["function"]["arguments"].as_str().unwrap_or(""),
        call["function"]["arguments"].as_str().unwrap_or("")
    );
    known["function"]["arguments"] = arguments.into();
    Ok(())
}
