//! What clients see when all is well.

use std::time::Duration;

use tonic::Request;
use types::*;
use wire::pb;

use crate::stand::{Stand, request};
use crate::workers::{EOS, MAX_CONTEXT, model_token};

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_is_streamed_whole() {
    let mut stand = Stand::start(1, 1, |_| {}).await;
    let (tokens, finished) = stand.generate(request(&[1, 2, 3], 20)).await.unwrap().whole().await;
    assert_eq!(tokens.len(), 20);
    assert_eq!(finished.reason, FinishReason::Length);
    let want = Usage { prompt_tokens: 3, cached_tokens: 1, output_tokens: 20, resumptions: 0 };
    assert_eq!(finished.usage, want);
    stand.assert_all_released().await;
    let metrics = stand.metrics().await;
    for want in [
        "damask_router_requests_total{outcome=\"length\"} 1",
        "damask_router_output_tokens_total 20",
        "damask_router_prompt_tokens_total 3",
        "damask_router_time_to_first_token_seconds_count 1",
        "damask_router_inter_token_latency_seconds_count 19",
        "damask_router_kv_transfer_bytes_total 1000",
        "damask_router_workers{role=\"decode\",state=\"ready\"} 1",
        "damask_router_requests_queued 0",
    ] {
        assert!(metrics.contains(want), "no {want} in\n{metrics}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_ends_with_a_stop_token() {
    let mut stand = Stand::start(1, 1, |_| {}).await;
    for index in [0, 1, 5] {
        let mut stopping = request(&[1, 2, 3], 20);
        stopping.stop_token_ids = vec![model_token(&[1, 2, 3], index)];
        let (tokens, finished) = stand.generate(stopping).await.unwrap().whole().await;
        assert_eq!((tokens.len() as u32, finished.reason), (index + 1, FinishReason::Stop));
    }
    stand.assert_all_released().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_token_needs_no_transfer() {
    let mut stand = Stand::start(1, 1, |_| {}).await;
    let (tokens, _) = stand.generate(request(&[1], 1)).await.unwrap().whole().await;
    assert_eq!(tokens.len(), 1);
    stand.assert_all_released().await;
    assert!(stand.metrics().await.contains("damask_router_kv_transfer_bytes_total 0"));
}

#[tokio::test(flavor = "multi_thread")]
async fn absent_fields_are_drawn_once_and_reported() {
    let mut stand = Stand::start(1, 1, |_| {}).await;
    let mut first = stand.generate(request(&[1], 2)).await.unwrap();
    let mut second = stand.generate(request(&[1], 2)).await.unwrap();
    first.until_tokens(1).await;
    second.until_tokens(1).await;
    assert_ne!(first.started, second.started);
    let mut named = request(&[1], 2);
    named.request_id = "mine".into();
    named.sampling = Some(pb::Sampling { seed: Some(7), ..Default::default() });
    let mut named = stand.generate(named).await.unwrap();
    named.until_tokens(1).await;
    assert_eq!(named.started, Some((RequestId::new("mine").unwrap(), 7)));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_max_tokens_the_context_is_the_limit() {
    let mut stand = Stand::start(1, 1, |_| {}).await;
    let unlimited = pb::GenerateRequest { max_tokens: None, ..request(&[1, 2, 3], 0) };
    let (tokens, finished) = stand.generate(unlimited).await.unwrap().whole().await;
    assert_eq!((tokens.len() as u32, finished.reason), (MAX_CONTEXT - 3, FinishReason::Length));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_may_resume_an_answer() {
    let mut stand = Stand::start(1, 1, |_| {}).await;
    let mut resumed = request(&[1, 2, 3], 20);
    resumed.resume_from = (0..7).map(|index| model_token(&[1, 2, 3], index)).collect();
    let (tokens, finished) = stand.generate(resumed).await.unwrap().whole().await;
    assert_eq!((tokens.len(), finished.usage.resumptions), (20, 0));
    let mut whole = request(&[1, 2, 3], 20);
    whole.resume_from = vec![5, EOS];
    let mut answer = stand.generate(whole).await.unwrap();
    while answer.next().await.unwrap() {}
    assert_eq!(answer.finished.unwrap().reason, FinishReason::Stop);
    stand.assert_all_released().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_requests_share_few_workers() {
    let mut stand = Stand::start(2, 2, |config| config.limits.prefills_per_worker_max = 2).await;
    stand.slow_down(1);
    for prefill in &stand.prefills {
        prefill.script.prefill_ms.store(5, std::sync::atomic::Ordering::SeqCst);
    }
    let mut answers = Vec::new();
    for n in 1..=64 {
        answers.push(stand.generate(request(&[n], 1 + n % 24)).await.unwrap());
    }
    let cancelled: Vec<_> = answers.drain(40..).collect();
    drop(cancelled);
    for (n, answer) in (1u32..).zip(answers) {
        assert_eq!(answer.whole().await.0.len() as u32, 1 + n % 24);
    }
    stand.assert_all_released().await;
    for worker in stand.prefills.iter().chain(&stand.decodes) {
        assert!(worker.script.served.load(std::sync::atomic::Ordering::SeqCst) >= 10, "the load is spread");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_both_workers() {
    let mut stand = Stand::start(1, 1, |_| {}).await;
    // While decode generates.
    stand.slow_down(20);
    let mut answer = stand.generate(request(&[1], 500)).await.unwrap();
    answer.until_tokens(3).await;
    drop(answer);
    stand.assert_all_released().await;
    // While prefill computes and decode waits.
    stand.prefills[0].script.prefill_ms.store(60_000, std::sync::atomic::Ordering::SeqCst);
    let mut answer = stand.generate(request(&[1], 500)).await.unwrap();
    answer.next().await.unwrap();
    while stand.prefills[0].open() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(stand.decodes[0].open(), 1);
    drop(answer);
    stand.assert_all_released().await;
    assert!(stand.metrics().await.contains("damask_router_requests_total{outcome=\"cancelled\"} 2"));
}

/// An answer too large for the buffers of the connections on its way: about 200 bytes a token.
fn large_request() -> pb::GenerateRequest {
    let sampling = pb::Sampling { logprobs: Some(20), ..Default::default() };
    pb::GenerateRequest { sampling: Some(sampling), ..request(&[1], 2_000) }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_client_slows_its_worker_and_loses_nothing() {
    let mut stand = Stand::start(1, 1, |config| config.deadlines.inter_token_ms = 200).await;
    let mut answer = stand.generate(large_request()).await.unwrap();
    answer.until_tokens(2).await;
    tokio::time::sleep(Duration::from_millis(800)).await;
    assert_eq!(stand.decodes[0].open(), 1, "decode must not have got rid of all tokens");
    let (tokens, finished) = answer.whole().await;
    assert_eq!((tokens.len(), finished.usage.resumptions), (2_000, 0));
    stand.assert_all_released().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_read_is_ended_by_its_deadline() {
    let mut stand = Stand::start(1, 1, |config| config.limits.request_timeout_ms = 500).await;
    let mut answer = stand.generate(large_request()).await.unwrap();
    answer.until_tokens(2).await;
    stand.assert_all_released().await;
    let status = answer.error().await;
    assert!(status.message().contains("deadline of 500 ms passed in stage inter_token"), "{status:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn health_says_what_is_true() {
    let mut stand = Stand::start(1, 1, |_| {}).await;
    let check = async |channel: &tonic::transport::Channel, service: &str| {
        let request = tonic_health::pb::HealthCheckRequest { service: service.into() };
        let mut health = tonic_health::pb::health_client::HealthClient::new(channel.clone());
        health.check(Request::new(request)).await.unwrap().into_inner().status
    };
    const SERVING: i32 = 1;
    const NOT_SERVING: i32 = 2;
    for service in ["", "damask.v1.Inference"] {
        assert_eq!(check(&stand.channel, service).await, SERVING);
    }
    assert_eq!(stand.fetch("/health/ready").await.0, 200);
    stand.prefills[0].kill();
    stand.await_pairs(0).await;
    let (status, body) = stand.fetch("/health/ready").await;
    assert_eq!(status, 503);
    assert!(body.contains("no pair of prefill and decode workers is ready"), "{body}");
    assert_eq!(stand.fetch("/health/live").await.0, 200);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(check(&stand.channel, "damask.v1.Inference").await, NOT_SERVING);
}

#[tokio::test(flavor = "multi_thread")]
async fn reflection_lists_what_is_served_here() {
    use reflection::server_reflection_request::MessageRequest;
    use reflection::server_reflection_response::MessageResponse;
    use tonic_reflection::pb::v1 as reflection;

    let stand = Stand::start(1, 1, |_| {}).await;
    let message_request = Some(MessageRequest::ListServices(String::new()));
    let request = reflection::ServerReflectionRequest { host: String::new(), message_request };
    let mut client = reflection::server_reflection_client::ServerReflectionClient::new(stand.channel.clone());
    let mut answers = client.server_reflection_info(tokio_stream::once(request)).await.unwrap().into_inner();
    let Some(MessageResponse::ListServicesResponse(list)) = answers.message().await.unwrap().unwrap().message_response
    else {
        panic!("no list of services");
    };
    let mut names: Vec<_> = list.service.into_iter().map(|service| service.name).collect();
    names.sort();
    assert_eq!(names, ["damask.v1.Inference", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"]);
}
