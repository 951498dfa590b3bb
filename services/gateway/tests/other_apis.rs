//! Responses, Completions and gRPC Chat end to end but for the model.

#![allow(clippy::unwrap_used, reason = "helpers of tests that panic fail the test")]

mod support;

use std::time::Duration;

use chassis::net::grpc::{ChannelLimits, channel};
use futures_util::StreamExt;
use gateway::config::{Config, LimitsConfig, ModelSource};
use gateway::served_model::ServedModel;
use serde_json::{Value, json};
use support::{Fleet, Step, config, key, sse, tokens};
use tonic::Code;
use types::FinishReason;
use wire::pb::chat_response::Event;
use wire::pb::gateway_client::GatewayClient;
use wire::pb::{self, chat_message::Kind};

const ANSWER: &str = "<|channel|>analysis<|message|>191 - 42 = 149.<|end|>\
    <|start|>assistant<|channel|>final<|message|>It is 149.<|return|>";

#[tokio::test(flavor = "multi_thread")]
async fn a_response_streamed_and_whole_are_the_same() {
    let fleet = Fleet::answering(config(), ANSWER, Step::Finish(FinishReason::Stop)).await;
    let whole: Value =
        fleet.post("/v1/responses", json!({ "input": "?", "metadata": { "a": "b" } })).await.json().await.unwrap();
    assert_eq!(whole["status"], "completed");
    assert_eq!(whole["output"][0]["content"][0]["text"], "191 - 42 = 149.");
    assert_eq!(whole["output"][1]["content"][0]["text"], "It is 149.");
    assert_eq!(
        (&whole["metadata"], &whole["store"], &whole["tools"]),
        (&json!({ "a": "b" }), &json!(false), &json!([]))
    );

    let response = fleet.post("/v1/responses", json!({ "input": "?", "metadata": { "a": "b" }, "stream": true })).await;
    let events = sse(&response.text().await.unwrap());
    let events: Vec<(String, Value)> = events
        .into_iter()
        .map(|(name, data)| (name.expect("every event has a name"), serde_json::from_str(&data).unwrap()))
        .collect();
    assert!(events.iter().all(|(name, data)| data["type"] == name.as_str()));
    assert_eq!(events[0].0, "response.created");
    let (last, data) = events.last().unwrap();
    assert_eq!(last, "response.completed");
    let text = |response: &Value| {
        let items = response["output"].as_array().unwrap();
        items.iter().map(|item| item["content"][0]["text"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(text(&data["response"]), text(&whole));
    assert_eq!(data["response"]["usage"], whole["usage"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_that_fails_midway_says_so_in_its_last_event() {
    let fleet = Fleet::start(|_| {
        let status = wire::status::with_code(Code::Unavailable, "LOST", "workers are lost", None);
        Ok(vec![Step::Tokens(vec![5]), Step::Fail(status)])
    })
    .await;
    let response = fleet.post("/v1/responses", json!({ "input": "?", "stream": true })).await;
    let events = sse(&response.text().await.unwrap());
    let data: Value = serde_json::from_str(&events.last().unwrap().1).unwrap();
    assert_eq!((&data["type"], &data["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert_eq!(data["response"]["error"]["message"], "workers are lost");
    let stored = fleet.post("/v1/responses", json!({ "input": "?", "previous_response_id": "resp_1" })).await;
    assert_eq!(stored.status(), 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_continues_text_without_a_format() {
    let fleet = Fleet::answering(config(), "It is 149.", Step::Finish(FinishReason::Length)).await;
    let body: Value =
        fleet.post("/v1/completions", json!({ "prompt": ["a", "b"], "n": 2 })).await.json().await.unwrap();
    let texts: Vec<_> = body["choices"].as_array().unwrap().iter().map(|choice| choice["text"].clone()).collect();
    assert_eq!(texts, ["It is 149."; 4]);
    assert_eq!(body["choices"][3]["finish_reason"], "length");
    {
        let received = fleet.received.lock().unwrap();
        assert_eq!((received.len(), received[0].max_tokens), (4, Some(16)));
        assert!(received[0].stop_token_ids.is_empty());
    }
    let response = fleet.post("/v1/completions", json!({ "prompt": "a", "stream": true, "stop": "49" })).await;
    let events = sse(&response.text().await.unwrap());
    assert_eq!(events.last().unwrap().1, "[DONE]");
    let text: String = events
        .iter()
        .filter_map(|(_, data)| serde_json::from_str::<Value>(data).ok())
        .map(|chunk| chunk["choices"][0]["text"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(text, "It is 1");
}

fn asking(text: &str) -> pb::ChatRequest {
    let user = Kind::User(pb::UserMessage { text: text.into(), name: None });
    pb::ChatRequest { messages: vec![pb::ChatMessage { kind: Some(user) }], ..pb::ChatRequest::default() }
}

async fn grpc(fleet: &Fleet) -> GatewayClient<tonic::transport::Channel> {
    GatewayClient::new(channel(&fleet.network, &fleet.grpc, ChannelLimits::default()))
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_streams_pieces_between_a_start_and_an_end() {
    let fleet = Fleet::answering(config(), ANSWER, Step::Finish(FinishReason::Stop)).await;
    let request = pb::ChatRequest { request_id: "mine".into(), ..asking("?") };
    let mut stream = grpc(&fleet).await.chat(request).await.unwrap().into_inner();
    let mut events = Vec::new();
    while let Some(response) = stream.next().await {
        events.push(response.unwrap().event.unwrap());
    }
    let Some(Event::Started(started)) = events.first() else { panic!("no start") };
    assert_eq!((started.request_id.as_str(), started.model.as_str()), ("mine", "gpt-oss-nano"));
    let (mut reasoning, mut content) = (String::new(), String::new());
    for event in &events {
        match event {
            Event::Reasoning(delta) => reasoning += &delta.text,
            Event::Content(delta) => content += &delta.text,
            _ => {}
        }
    }
    assert_eq!((reasoning.as_str(), content.as_str()), ("191 - 42 = 149.", "It is 149."));
    let Some(Event::Finished(finished)) = events.last() else { panic!("no end") };
    assert_eq!(finished.reason(), pb::ChatFinishReason::Stop);
    assert_eq!(finished.usage.unwrap().output_tokens as usize, fleet.tokens(ANSWER).len());
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_refusals_carry_reasons_deadlines_go_on_and_a_dropped_stream_cancels() {
    let fleet = Fleet::start(|_| Ok(vec![Step::Tokens(vec![5]), Step::Hang])).await;
    let mut client = grpc(&fleet).await;
    let refused = client.chat(pb::ChatRequest { model: "gpt-4".into(), ..asking("?") }).await.unwrap_err();
    assert_eq!((refused.code(), wire::status::reason(&refused).as_deref()), (Code::NotFound, Some("MODEL_NOT_FOUND")));
    let refused = client.chat(pb::ChatRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);

    let mut request = tonic::Request::new(asking("?"));
    request.set_timeout(Duration::from_secs(30));
    let stream = client.chat(request).await.unwrap().into_inner();
    let timeout = fleet.received.lock().unwrap()[0].timeout.unwrap();
    assert!((28..=30).contains(&timeout.seconds), "{timeout:?}");
    drop(stream);
    let cancelled = fleet.until_cancelled().await;
    assert!(cancelled < Duration::from_millis(100), "{cancelled:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_asks_for_keys_and_tells_its_health() {
    let config = Config { api_keys: vec![key("sk-1")], ..config() };
    let fleet = Fleet::answering(config, ANSWER, Step::Finish(FinishReason::Stop)).await;
    let mut client = grpc(&fleet).await;
    assert_eq!(client.chat(asking("?")).await.unwrap_err().code(), Code::Unauthenticated);
    let mut request = tonic::Request::new(asking("?"));
    request.metadata_mut().insert("authorization", "Bearer sk-1".parse().unwrap());
    assert!(client.chat(request).await.is_ok());
    let metrics = fleet.client.get(format!("{}/metrics", fleet.admin)).send().await.unwrap().text().await.unwrap();
    for status in [200, 401] {
        let line = format!(r#"damask_gateway_requests_total{{route="/damask.v1.Gateway/Chat",status="{status}"}} 1"#);
        assert!(metrics.lines().any(|found| found == line), "{line} is not in\n{metrics}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_gives_a_client_up_that_does_not_read_and_tells_it_so() {
    let limits = LimitsConfig { slow_reader_timeout_ms: 200, ..LimitsConfig::default() };
    let model = ServedModel::load(&ModelSource::EmbeddedNano).unwrap();
    let header = tokens(model.vocabulary(), "<|channel|>final<|message|>");
    // Over 10 MB: more than the windows of HTTP/2 and all buffers hold. In few and large messages, since a client's HTTP/2 takes many small
    // ones that nobody reads for an attack, and would end the connection itself.
    let length = |token: &u32| model.vocabulary().token_bytes(*token).map_or(0, <[u8]>::len);
    let longest = (0..2000).max_by_key(length).unwrap();
    let messages = 12_000_000 / (2048 * length(&longest));
    let script = move |_: &pb::GenerateRequest| {
        let content = std::iter::repeat_n(Step::Tokens(vec![longest; 2048]), messages);
        Ok([Step::Tokens(header.clone())].into_iter().chain(content).chain([Step::Hang]).collect())
    };
    let fleet = Fleet::start_with(Config { limits, ..config() }, |ours| ours, script).await;
    fleet.until_ready().await;
    let mut unread = grpc(&fleet).await.chat(asking("?")).await.unwrap().into_inner();
    fleet.until_cancelled().await;
    let mut last = unread.next().await;
    while let Some(Ok(_)) = last {
        last = unread.next().await;
    }
    let status = last.unwrap().unwrap_err();
    assert_eq!(wire::status::reason(&status).as_deref(), Some("NOT_READ"), "{status:?}");
}
