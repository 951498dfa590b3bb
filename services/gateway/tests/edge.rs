//! What every request meets on its way in: paths, methods, bodies, keys, names, other origins; and the small APIs.

#![allow(clippy::unwrap_used, reason = "helpers of tests that panic fail the test")]

mod support;

use std::time::Duration;

use serde_json::{Value, json};
use support::{Fleet, Step, config, key};
use types::FinishReason;

use gateway::config::{ApiKeyConfig, Config, KeyLimits, LimitsConfig, ResponsesStoreConfig};

fn suspended(name: &str) -> ApiKeyConfig {
    ApiKeyConfig { suspended: true, ..key(name) }
}

async fn fleet(config: Config) -> Fleet {
    let script = |_: &wire::pb::GenerateRequest| Ok(vec![Step::Tokens(vec![40, 41]), Step::Finish(FinishReason::Stop)]);
    let fleet = Fleet::start_with(config, |ours| ours, script).await;
    fleet.until_ready().await;
    fleet
}

async fn error(response: reqwest::Response, status: u16, code: &str) -> Value {
    assert_eq!(response.status(), status);
    assert!(response.headers().contains_key("x-request-id"));
    let body: Value = response.json().await.unwrap();
    for field in ["message", "type", "param", "code"] {
        assert!(body["error"].get(field).is_some(), "{field} is missing in {body}");
    }
    assert_eq!(body["error"]["code"], code, "{body}");
    body
}

#[tokio::test(flavor = "multi_thread")]
async fn every_refusal_has_openais_shape() {
    let fleet =
        fleet(Config { limits: LimitsConfig { body_bytes_max: 4096, ..LimitsConfig::default() }, ..config() }).await;
    error(fleet.get("/v1/nothing").await, 404, "unknown_url").await;
    error(fleet.get("/v1/chat/completions").await, 405, "method_not_allowed").await;
    error(fleet.chat(json!({ "model": "gpt-4" })).await, 404, "model_not_found").await;
    error(fleet.get("/v1/models/gpt-4").await, 404, "model_not_found").await;
    error(fleet.get("/v1/models/%ff").await, 400, "invalid_url").await;
    error(fleet.get("/v1/responses/%c3%28").await, 400, "invalid_url").await;
    error(fleet.chat(json!({ "messages": [] })).await, 400, "invalid_value").await;
    error(fleet.chat(json!({ "tool_choice": "required" })).await, 400, "invalid_value").await;
    let schema = json!({ "name": "s", "strict": true, "schema": { "type": "array", "uniqueItems": true } });
    let unique = json!({ "response_format": { "type": "json_schema", "json_schema": schema } });
    let refusal = error(fleet.chat(unique).await, 400, "invalid_json_schema").await;
    assert_eq!(refusal["error"]["param"], "response_format.json_schema.schema");
    error(fleet.chat(json!({ "padding": "x".repeat(5000) })).await, 413, "request_too_large").await;
    let post = |body: &'static str| fleet.client.post(format!("{}/v1/responses", fleet.http)).body(body).send();
    error(post("{").await.unwrap(), 400, "invalid_json").await;
    error(post("[]").await.unwrap(), 400, "invalid_json").await;
    let deep = "[".repeat(3000);
    let deep = fleet.client.post(format!("{}/v1/chat/completions", fleet.http)).body(deep).send().await.unwrap();
    error(deep, 400, "invalid_json").await;
    let form = fleet.client.post(format!("{}/v1/chat/completions", fleet.http));
    let form = form.header("content-type", "application/x-www-form-urlencoded").body("{}").send();
    error(form.await.unwrap(), 415, "unsupported_media_type").await;
    let packed = fleet.client.post(format!("{}/v1/completions", fleet.http)).header("content-encoding", "gzip");
    error(packed.body("{}").send().await.unwrap(), 415, "unsupported_media_type").await;
    let body = json!({ "input": "hi", "store": true });
    error(fleet.post("/v1/responses", body).await, 400, "unsupported_value").await;
    error(fleet.get("/v1/responses/resp_1").await, 400, "unsupported_value").await;
    assert_eq!(fleet.chat(json!({ "model": "openai/nano" })).await.status(), 200, "an alias");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_key_has_its_own_limits() {
    let limits = LimitsConfig {
        per_key: KeyLimits { requests_per_minute: Some(2), ..KeyLimits::default() },
        ..LimitsConfig::default()
    };
    let frugal = KeyLimits { tokens_per_minute: Some(100), requests_per_minute: Some(10), ..KeyLimits::default() };
    let keys = vec![key("sk-1"), ApiKeyConfig { limits: frugal, ..key("sk-2") }];
    let fleet = fleet(Config { limits, api_keys: keys, ..config() }).await;
    let ask = async |key: &str| {
        let body = json!({ "messages": [{ "role": "user", "content": "hi" }] });
        let url = format!("{}/v1/chat/completions", fleet.http);
        fleet.client.post(url).bearer_auth(key).json(&body).send().await.unwrap()
    };
    for _ in 0..2 {
        assert_eq!(ask("sk-1").await.status(), 200);
    }
    let refused = ask("sk-1").await;
    let wait_ms: u64 = refused.headers()["retry-after-ms"].to_str().unwrap().parse().unwrap();
    assert!((1..=30_000).contains(&wait_ms), "{wait_ms}");
    let body = error(refused, 429, "rate_limit_exceeded").await;
    assert_eq!(body["error"]["message"], "this key may send 2 requests a minute");

    // A prompt has about 70 tokens and an answer 2: one fits into the minute, two do not.
    assert_eq!(ask("sk-2").await.status(), 200, "other keys are not touched");
    let body = error(ask("sk-2").await, 429, "rate_limit_exceeded").await;
    assert_eq!(body["error"]["message"], "this key may use 100 tokens a minute");

    let salts: Vec<_> = fleet.received.lock().unwrap().iter().map(|request| request.cache_salt.clone()).collect();
    let [one, again, other] = &salts[..] else { panic!("three were admitted: {salts:?}") };
    assert!(
        one == again && one != other && !one.is_empty() && !other.is_empty(),
        "cached prompts are apart: {salts:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn responses_are_kept_where_configured_and_can_be_gone_on_from() {
    let store = ResponsesStoreConfig { file: None, keep_hours: 1, bytes_max: 1 << 20 };
    let fleet =
        fleet(Config { responses_store: Some(store), api_keys: vec![key("sk-1"), key("sk-2")], ..config() }).await;
    let send = async |method: reqwest::Method, path: &str, key: &str, body: Value| {
        let request = fleet.client.request(method, format!("{}/v1/responses{path}", fleet.http)).bearer_auth(key);
        request.json(&body).send().await.unwrap()
    };
    let first: Value = send(reqwest::Method::POST, "", "sk-1", json!({ "input": "one" })).await.json().await.unwrap();
    assert_eq!(first["store"], true);
    let path = format!("/{}", first["id"].as_str().unwrap());
    let again: Value = send(reqwest::Method::GET, &path, "sk-1", json!({})).await.json().await.unwrap();
    assert_eq!(again, first);

    let body = json!({ "input": "two", "previous_response_id": first["id"], "stream": true });
    let second = send(reqwest::Method::POST, "", "sk-1", body.clone()).await.text().await.unwrap();
    let (_, completed) = support::sse(&second).pop().unwrap();
    let completed: Value = serde_json::from_str(&completed).unwrap();
    assert_eq!(completed["response"]["previous_response_id"], first["id"]);
    let prompt = fleet.received.lock().unwrap()[1].prompt_tokens.clone();
    let said = fleet.model.vocabulary().decode(&prompt);
    assert!(
        said.contains("<|message|>one<|end|>") && said.ends_with("<|message|>two<|end|><|start|>assistant"),
        "{said}"
    );
    let third = json!({ "input": "three", "previous_response_id": completed["response"]["id"], "store": false });
    let third: Value = send(reqwest::Method::POST, "", "sk-1", third).await.json().await.unwrap();
    assert_eq!(third["store"], false);
    let said = fleet.model.vocabulary().decode(&fleet.received.lock().unwrap()[2].prompt_tokens);
    assert!(said.contains("one<|end|>") && said.contains("two<|end|>"), "{said}");

    let unkept = format!("/{}", third["id"].as_str().unwrap());
    error(send(reqwest::Method::GET, &unkept, "sk-1", json!({})).await, 404, "response_not_found").await;
    error(send(reqwest::Method::GET, &path, "sk-2", json!({})).await, 404, "response_not_found").await;
    error(send(reqwest::Method::POST, "", "sk-2", body.clone()).await, 400, "previous_response_not_found").await;
    let deleted: Value = send(reqwest::Method::DELETE, &path, "sk-1", json!({})).await.json().await.unwrap();
    assert_eq!(deleted["deleted"], true);
    error(send(reqwest::Method::DELETE, &path, "sk-1", json!({})).await, 404, "response_not_found").await;
    error(send(reqwest::Method::POST, "", "sk-1", body).await, 400, "previous_response_not_found").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_never_ends_is_given_up() {
    let limits = LimitsConfig { body_timeout_ms: 100, ..LimitsConfig::default() };
    let fleet = fleet(Config { limits, ..config() }).await;
    let endless = reqwest::Body::wrap_stream(futures_util::stream::pending::<Result<Vec<u8>, std::io::Error>>());
    let request = fleet.client.post(format!("{}/v1/chat/completions", fleet.http)).body(endless);
    error(request.send().await.unwrap(), 408, "request_timeout").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_request_too_many_is_sent_away_and_a_finished_one_makes_room() {
    let limits = LimitsConfig { concurrent_requests_max: 1, ..LimitsConfig::default() };
    let script = |_: &wire::pb::GenerateRequest| Ok(vec![Step::Tokens(vec![40]), Step::Hang]);
    let fleet = Fleet::start_with(Config { limits, ..config() }, |ours| ours, script).await;
    fleet.until_ready().await;
    let first = fleet.chat(json!({ "stream": true })).await;
    let second = fleet.chat(json!({ "stream": true })).await;
    assert_eq!(second.headers()["retry-after"], "1");
    error(second, 429, "rate_limit_exceeded").await;
    drop(first);
    fleet.until_cancelled().await;
    assert_eq!(fleet.chat(json!({ "stream": true })).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_guard_the_api_but_not_health() {
    let fleet = fleet(Config { api_keys: vec![key("sk-1"), suspended("sk-3")], ..config() }).await;
    error(fleet.chat(json!({})).await, 401, "invalid_api_key").await;
    error(fleet.get("/v1/models").await, 401, "invalid_api_key").await;
    for (key, status) in [("sk-1", 200), ("sk-2", 401), ("sk-3", 403)] {
        let request = fleet.client.get(format!("{}/v1/models", fleet.http)).bearer_auth(key);
        assert_eq!(request.send().await.unwrap().status(), status, "{key}");
    }
    assert_eq!(fleet.get("/health/live").await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_keep_their_names_and_valid_ones_only() {
    let fleet = fleet(config()).await;
    for (sent, kept) in [("my-id.7", true), ("not a name", false), (&"x".repeat(129), false)] {
        let request = fleet.client.get(format!("{}/v1/models", fleet.http)).header("x-request-id", sent);
        let response = request.send().await.unwrap();
        assert_eq!(response.headers()["x-request-id"] == sent, kept, "{sent}");
    }
    let request = fleet.client.post(format!("{}/v1/chat/completions", fleet.http)).header("x-request-id", "my-id.7");
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let body = json!({ "messages": [{ "role": "user", "content": "hi" }] });
    request.header("traceparent", trace).json(&body).send().await.unwrap();
    assert_eq!(fleet.received.lock().unwrap()[0].request_id, "my-id.7");
}

#[tokio::test(flavor = "multi_thread")]
async fn named_origins_may_call() {
    let fleet = fleet(Config { cors_origins: vec!["https://chat.example.com".into()], ..config() }).await;
    for (origin, allowed) in [("https://chat.example.com", true), ("https://evil.example.com", false)] {
        let preflight = fleet
            .client
            .request(reqwest::Method::OPTIONS, format!("{}/v1/chat/completions", fleet.http))
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization,content-type")
            .send()
            .await
            .unwrap();
        let granted = preflight.headers().get("access-control-allow-origin").is_some_and(|value| value == origin);
        assert_eq!(granted, allowed, "{origin}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn models_are_listed_with_their_context() {
    let fleet = fleet(config()).await;
    let list: Value = fleet.get("/v1/models").await.json().await.unwrap();
    let names: Vec<_> = list["data"].as_array().unwrap().iter().map(|model| model["id"].clone()).collect();
    assert_eq!(names, ["gpt-oss-nano", "openai/nano"]);
    let model: Value = fleet.get("/v1/models/openai/nano").await.json().await.unwrap();
    assert_eq!((&model["object"], &model["max_model_len"]), (&json!("model"), &json!(support::CONTEXT_TOKENS)));
}

#[tokio::test(flavor = "multi_thread")]
async fn text_becomes_tokens_and_tokens_text() {
    let fleet = fleet(config()).await;
    let body = json!({ "prompt": "It is <|start|> 149.", "return_token_strs": true });
    let tokenized: Value = fleet.post("/tokenize", body).await.json().await.unwrap();
    let tokens = fleet.model.vocabulary().encode("It is <|start|> 149.");
    assert_eq!(tokenized["tokens"], json!(tokens));
    assert_eq!(
        (&tokenized["count"], &tokenized["max_model_len"]),
        (&json!(tokens.len()), &json!(support::CONTEXT_TOKENS))
    );
    let text: Value = fleet.post("/detokenize", json!({ "tokens": tokens })).await.json().await.unwrap();
    assert_eq!(text["prompt"], "It is <|start|> 149.");
    let chat = json!({ "messages": [{ "role": "user", "content": "hi" }] });
    let chat: Value = fleet.post("/tokenize", chat).await.json().await.unwrap();
    let prompt: Value = fleet.post("/detokenize", json!({ "tokens": chat["tokens"] })).await.json().await.unwrap();
    assert!(prompt["prompt"].as_str().unwrap().ends_with("<|message|>hi<|end|><|start|>assistant"), "{prompt}");
    error(fleet.post("/tokenize", json!({})).await, 400, "invalid_value").await;
    error(fleet.post("/detokenize", json!({})).await, 400, "invalid_value").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_count_requests_and_tokens() {
    let fleet = fleet(config()).await;
    fleet.chat(json!({})).await.bytes().await.unwrap();
    fleet.get("/v1/made/up").await;
    let metrics = fleet.client.get(format!("{}/metrics", fleet.admin)).send().await.unwrap().text().await.unwrap();
    for line in [
        "damask_gateway_requests_total{route=\"/v1/chat/completions\",status=\"200\"} 1",
        "damask_gateway_requests_total{route=\"unknown\",status=\"404\"} 1",
        "damask_gateway_output_tokens_total 2",
        "damask_gateway_requests_in_flight 0",
        "damask_gateway_time_to_first_piece_seconds_count 1",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line} is not in\n{metrics}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_finishes_what_is_open() {
    let fleet = Fleet::start(|_| {
        let wait = Step::Wait(Duration::from_millis(300));
        Ok(vec![Step::Tokens(vec![40]), wait, Step::Tokens(vec![41]), Step::Finish(FinishReason::Stop)])
    })
    .await;
    let response = fleet.chat(json!({ "stream": true })).await;
    fleet.shutdown.begin_drain();
    let ready = fleet.client.get(format!("{}/health/ready", fleet.admin)).send().await.unwrap();
    assert_eq!(ready.status(), 503);
    assert!(response.text().await.unwrap().ends_with("data: [DONE]\n\n"));
    let late = fleet.client.get(format!("{}/health/live", fleet.http)).send().await;
    assert!(late.is_err(), "the listener is closed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_read_is_given_up() {
    let limits = LimitsConfig { slow_reader_timeout_ms: 200, ..LimitsConfig::default() };
    // More than all socket buffers on the way hold: 60,000 chunks of about 200 bytes.
    let script = |_: &wire::pb::GenerateRequest| {
        let tokens = std::iter::repeat_n(Step::Tokens(vec![40]), 60_000);
        Ok(tokens.chain([Step::Hang]).collect())
    };
    let fleet = Fleet::start_with(Config { limits, ..config() }, |ours| ours, script).await;
    fleet.until_ready().await;
    let unread = fleet.post("/v1/completions", json!({ "prompt": "a", "stream": true, "max_tokens": 100 })).await;
    fleet.until_cancelled().await;
    assert_eq!(unread.status(), 200);
    let other = fleet.get("/v1/models").await;
    assert_eq!(other.status(), 200, "nobody else notices");
}
