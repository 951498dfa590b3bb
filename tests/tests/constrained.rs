//! Constrained answers through the real stack: what gpt-oss-nano, which never saw a schema, answers is valid all the same.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use format::chat::{ChatFormat, completions};
use format::harmony::Harmony;
use futures_util::future::try_join_all;
use serde::Deserialize;
use serde_json::{Value, json};
use tests::router::{generate, greedy, wait_all_pages_free, wait_for_pair};
use tests::stack::Stack;
use tonic::Code;
use wire::pb::generate_response::Event;
use wire::pb::inference_client::InferenceClient;
use wire::pb::{Constraint, FinishReason, GenerateRequest};

/// What the schema of [`person_schema`] says, as types.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Person {
    name: String,
    age: u32,
    tags: Vec<Colour>,
    #[serde(deserialize_with = "required_nullable")]
    city: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Colour {
    Red,
    Green,
    #[serde(rename = "dark blue")]
    DarkBlue,
}

/// Without this serde would take an absent field for null.
fn required_nullable<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    Option::deserialize(deserializer)
}

impl Person {
    fn read(text: &str) -> anyhow::Result<Self> {
        let person: Self = serde_json::from_str(text).with_context(|| text.to_owned())?;
        let lengths = [&person.name, person.city.as_ref().unwrap_or(&person.name)].map(|text| text.chars().count());
        ensure!(lengths.iter().all(|length| *length <= 16), "too long: {text}");
        ensure!(person.age <= 150 && person.tags.len() <= 3, "too many: {text}");
        Ok(person)
    }
}

fn person_schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 16},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "maxItems": 3, "items": {"$ref": "#/$defs/colour"}},
            "city": {"anyOf": [{"type": "string", "maxLength": 16}, {"type": "null"}]},
        },
        "required": ["name", "age", "tags", "city"],
        "additionalProperties": false,
        "$defs": {"colour": {"enum": ["red", "green", "dark blue"]}},
    })
}

fn tool(name: &str, strict: bool) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": person_schema(), "strict": strict}})
}

fn person_format() -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "person", "schema": person_schema(), "strict": true}})
}

struct Client {
    http: reqwest::Client,
    url: String,
}

impl Client {
    fn of(stack: &Stack) -> Self {
        Self { http: reqwest::Client::new(), url: stack.url() }
    }

    async fn post(&self, path: &str, body: &Value) -> anyhow::Result<(u16, Value)> {
        let response = self.http.post(format!("{}/v1/{path}", self.url)).json(body).send().await?;
        Ok((response.status().as_u16(), response.json().await?))
    }

    /// Asks a question, with more fields of the request.
    async fn chat(&self, question: &str, more: Value) -> anyhow::Result<Value> {
        let mut body = json!({
            "messages": [{"role": "user", "content": question}],
            "reasoning_effort": "low", "temperature": 0, "max_tokens": 700,
        });
        for (key, value) in more.as_object().into_iter().flatten() {
            body[key] = value.clone();
        }
        let (status, answer) = self.post("chat/completions", &body).await?;
        ensure!(status == 200, "{status}: {answer}");
        Ok(answer)
    }
}

fn content(choice: &Value) -> anyhow::Result<&str> {
    choice["message"]["content"].as_str().with_context(|| format!("no content in {choice}"))
}

/// The one call of an answer that must end with one.
fn call(answer: &Value) -> anyhow::Result<(&str, &str)> {
    let choice = &answer["choices"][0];
    ensure!(choice["finish_reason"] == "tool_calls", "not a call: {choice}");
    let function = &choice["message"]["tool_calls"][0]["function"];
    let text = |field: &str| function[field].as_str().with_context(|| format!("no {field} in {choice}"));
    Ok((text("name")?, text("arguments")?))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_follow_their_schema_at_every_temperature() -> anyhow::Result<()> {
    let stack = Stack::start(env!("CARGO_BIN_EXE_damask-under-test"), &[])?;
    let client = Client::of(&stack);
    let questions = ["What is the capital of France?", "Spell the word garden with dashes.", "Who are you?"];
    let asked = questions.iter().enumerate().flat_map(|(idx, question)| {
        [0.0, 1.0].map(|temperature| {
            (
                *question,
                json!({"temperature": temperature, "seed": idx, "n": 3,
            "logprobs": true, "top_logprobs": 2, "response_format": person_format()}),
            )
        })
    });
    let answers = try_join_all(asked.map(|(question, more)| client.chat(question, more))).await?;
    let (mut complete, mut kinds) = (0, BTreeSet::new());
    for choice in answers.iter().flat_map(|answer| answer["choices"].as_array().into_iter().flatten()) {
        if choice["finish_reason"] == "length" {
            continue; // nothing bounds its reasoning
        }
        ensure!(choice["finish_reason"] == "stop", "{choice}");
        let content = content(choice)?;
        Person::read(content)?;
        let logprobs = choice["logprobs"]["content"].as_array().context("logprobs were asked for")?;
        let spelled: String = logprobs.iter().filter_map(|entry| entry["token"].as_str()).collect();
        ensure!(spelled == content, "logprobs of {spelled:?}, content is {content:?}");
        complete += 1;
        kinds.insert(content.to_owned());
    }
    ensure!(complete >= 14, "{complete} of 18 answers are complete");
    ensure!(kinds.len() > 4, "sampling makes a difference: {kinds:?}");
    wait_all_pages_free(&[&stack.addresses.admin["prefill"], &stack.addresses.admin["decode"]]).await?;
    stack.stop()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_api_and_kind_of_constraint_is_kept() -> anyhow::Result<()> {
    let stack = Stack::start(env!("CARGO_BIN_EXE_damask-under-test"), &[])?;
    let client = Client::of(&stack);

    let object = client.chat("What is 12 + 30?", json!({"response_format": {"type": "json_object"}})).await?;
    if object["choices"][0]["finish_reason"] == "stop" {
        let content = content(&object["choices"][0])?;
        ensure!(serde_json::from_str::<Value>(content)?.is_object(), "{content}");
    }

    let tools = json!([tool("get_person", true), tool("get_other", true)]);
    let question = "Hello! What is the capital of Spain?";
    for temperature in [0.0, 1.0] {
        let required = json!({"tools": tools, "tool_choice": "required", "temperature": temperature, "seed": 3});
        let answer = client.chat(question, required).await?;
        let (name, arguments) = call(&answer)?;
        ensure!(["get_person", "get_other"].contains(&name), "{name}");
        Person::read(arguments)?;
        let choice = json!({"type": "function", "function": {"name": "get_other"}});
        let named = json!({"tools": tools, "tool_choice": choice, "temperature": temperature, "seed": 4});
        let answer = client.chat(question, named).await?;
        let (name, arguments) = call(&answer)?;
        ensure!(name == "get_other", "{name}");
        Person::read(arguments)?;
    }

    // A call that the model makes by itself, with an argument that it has to make up.
    let light = json!({"type": "function", "function": {"name": "set_light", "strict": true,
        "description": "Switch a light on or off.", "parameters": {"type": "object", "properties":
        {"room": {"type": "string", "maxLength": 20}, "on": {"type": "boolean"}, "level": {"enum": [17, 23]}},
        "required": ["room", "on", "level"], "additionalProperties": false}}});
    let answer = client.chat("Turn off the light in the bathroom.", json!({"tools": [light]})).await?;
    let (name, arguments) = call(&answer)?;
    let arguments: Value = serde_json::from_str(arguments)?;
    ensure!(name == "set_light" && arguments["room"].is_string() && arguments["on"].is_boolean(), "{name} {arguments}");
    ensure!([17, 23].contains(&arguments["level"].as_i64().unwrap_or(0)), "{arguments}");

    let responses = json!({"input": "What is the capital of France?", "temperature": 0, "max_output_tokens": 700,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "person", "schema": person_schema(), "strict": true}}});
    let (status, answer) = client.post("responses", &responses).await?;
    ensure!(status == 200 && answer["status"] == "completed", "{status}: {answer}");
    let output = answer["output"].as_array().context("no output")?;
    let message = output.iter().find(|item| item["type"] == "message").context("no message")?;
    Person::read(message["content"][0]["text"].as_str().context("no text")?)?;
    stack.stop()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_followed_is_refused_by_name() -> anyhow::Result<()> {
    let stack = Stack::start(env!("CARGO_BIN_EXE_damask-under-test"), &[])?;
    let client = Client::of(&stack);
    let schema = json!({"type": "object", "properties": {"list": {"type": "array", "uniqueItems": true}}});
    let messages = json!([{"role": "user", "content": "hi"}]);
    let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": true}});
    let body = json!({"messages": messages, "response_format": format});
    let (status, answer) = client.post("chat/completions", &body).await?;
    ensure!(status == 400, "{status}: {answer}");
    ensure!(answer["error"]["param"] == "response_format.json_schema.schema.properties.list", "{answer}");
    let format = json!({"type": "json_schema", "name": "s", "schema": schema, "strict": true});
    let (status, answer) = client.post("responses", &json!({"input": "hi", "text": {"format": format}})).await?;
    ensure!(status == 400 && answer["error"]["param"] == "text.format.schema.properties.list", "{status}: {answer}");

    let constrained =
        |lark: &str| GenerateRequest { constraint: Some(Constraint { lark: lark.into() }), ..greedy(&[1, 2, 3], 20) };
    for (lark, reason) in
        [("start: nothing", "nothing"), ("start: %json {\"type\": \"objekt\"}", "objekt"), ("", "constraint")]
    {
        let refused = generate(&stack.addresses.router, constrained(lark)).await.err().context("it is refused")?;
        let status = refused.downcast_ref::<tonic::Status>().context("by a status")?;
        ensure!(status.code() == Code::InvalidArgument && status.message().contains(reason), "{lark}: {status:?}");
    }
    wait_all_pages_free(&[&stack.addresses.admin["prefill"], &stack.addresses.admin["decode"]]).await?;
    stack.stop()
}

/// A constraint needs no chat format: the engine follows any grammar, and where it ends forces a stop token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_follow_a_grammar_of_their_own() -> anyhow::Result<()> {
    let stack = Stack::start(env!("CARGO_BIN_EXE_damask-under-test"), &[])?;
    let vocabulary = tests::cases::nano_vocabulary()?;
    let request = GenerateRequest {
        constraint: Some(Constraint { lark: r#"start: ("yes" | "no") " " /[0-9]{3}/ "!""#.into() }),
        ..greedy(&vocabulary.encode("Is it?"), 50)
    };
    let generated = generate(&stack.addresses.router, request).await?;
    ensure!(generated.reason == FinishReason::Stop, "{generated:?}");
    let (stop, text) = generated.tokens.split_last().context("no tokens")?;
    ensure!(vocabulary.special_name(*stop).is_some(), "{generated:?}");
    let text = vocabulary.decode(text);
    let rest = text.strip_prefix("yes ").or(text.strip_prefix("no ")).and_then(|rest| rest.strip_suffix('!'));
    ensure!(rest.is_some_and(|digits| digits.len() == 3 && digits.bytes().all(|byte| byte.is_ascii_digit())), "{text}");
    stack.stop()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_worker_does_not_show_in_a_constrained_answer() -> anyhow::Result<()> {
    let mut stack = Stack::start(env!("CARGO_BIN_EXE_damask-under-test"), &[])?;
    let harmony = Harmony::new(Arc::new(tests::cases::nano_vocabulary()?))?;
    let row = json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y", "zebra"]}},
        "required": ["a", "b"], "additionalProperties": false});
    let schema = json!({"type": "array", "minItems": 20, "maxItems": 20, "items": row});
    let body = json!({"messages": [{"role": "user", "content": "Count from 1 to 5."}], "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "rows", "schema":
            {"type": "object", "properties": {"rows": schema}, "required": ["rows"], "additionalProperties": false},
            "strict": true}}});
    let conversation = completions::conversation(&body)?;
    let turn = harmony.constraint(&conversation).context("a schema asks for a grammar")?;
    let mut request = greedy(&harmony.render(&conversation)?.tokens, 1500);
    request.stop_token_ids = harmony.stop_token_ids().to_vec();
    request.constraint = Some(turn.grammar.into());
    let undisturbed = generate(&stack.addresses.router, request.clone()).await?;
    ensure!(undisturbed.reason == FinishReason::Stop, "{undisturbed:?}");
    ensure!(undisturbed.tokens.len() > 150, "{} tokens are too few to be disturbed", undisturbed.tokens.len());
    for victim in ["decode", "prefill"] {
        stack.refresh()?;
        let pid = stack.addresses.pids[victim];
        let tokens = generate_killing(&stack.addresses.router, request.clone(), pid, 60).await;
        let tokens = tokens.with_context(|| format!("{victim} was killed"))?;
        ensure!(tokens == undisturbed.tokens, "{victim} was killed: {:?} became {tokens:?}", undisturbed.tokens);
        wait_for_pair(&stack.addresses.router).await?;
    }
    stack.stop()
}

/// Generates, and kills a process once so many tokens have come.
async fn generate_killing(address: &str, request: GenerateRequest, pid: u32, after: usize) -> anyhow::Result<Vec<u32>> {
    let mut client = InferenceClient::connect(format!("http://{address}")).await?;
    let mut stream = client.generate(request).await?.into_inner();
    let (mut tokens, mut killed) = (Vec::new(), false);
    while let Some(message) = stream.message().await? {
        match message.event.context("an event without content")? {
            Event::Started(_) => {}
            Event::Tokens(batch) => {
                ensure!(batch.first_index as usize == tokens.len(), "a gap after {} tokens", tokens.len());
                tokens.extend(batch.tokens.iter().map(|token| token.id));
            }
            Event::Finished(_) => {
                ensure!(killed, "it ended before anything was killed");
                return Ok(tokens);
            }
        }
        if tokens.len() >= after && !std::mem::replace(&mut killed, true) {
            let status = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status()?;
            ensure!(status.success(), "cannot kill process {pid}");
        }
    }
    bail!("the stream ended after {} tokens", tokens.len())
}
