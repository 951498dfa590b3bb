//! Requests that are refused: each in its own way, and without harm to anybody else.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tonic::{Code, Status};
use wire::pb;

use crate::stand::{Stand, request};
use crate::workers::MAX_CONTEXT;

#[track_caller]
fn assert_refused(status: &Status, code: Code, reason: &str, message: &str) {
    assert_eq!(status.code(), code, "{status:?}");
    assert_eq!(wire::status::reason(status).as_deref(), Some(reason), "{status:?}");
    assert!(status.message().contains(message), "{status:?}");
    let later = matches!(code, Code::ResourceExhausted | Code::Unavailable);
    assert_eq!(wire::status::retry_after(status).is_some(), later, "{status:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_pair_nothing_is_taken_on() {
    let mut stand = Stand::start(1, 1, |_| {}).await;
    stand.decodes[0].kill();
    stand.await_pairs(0).await;
    let status = stand.generate(request(&[1], 5)).await.err().unwrap();
    assert_refused(&status, Code::Unavailable, "NO_PAIR", "no pair");
    assert_eq!(stand.prefills[0].script.served.load(Ordering::SeqCst), 0, "refused before anything was dispatched");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_request_names_its_field() {
    let mut stand = Stand::start(1, 1, |_| {}).await;
    let sampling = |sampling| pb::GenerateRequest { sampling: Some(sampling), ..request(&[1], 5) };
    for (bad, reason, message) in [
        (request(&[], 5), "INVALID_REQUEST", "prompt_tokens is empty"),
        (request(&[1, 5_000], 5), "INVALID_REQUEST", "prompt_tokens [1] is 5000"),
        (request(&[1], 0), "INVALID_REQUEST", "max_tokens is 0"),
        (
            request(&vec![1; MAX_CONTEXT as usize], 5),
            "INVALID_REQUEST",
            "prompt_tokens and resume_from have 2048 tokens, at most 2047",
        ),
        (
            sampling(pb::Sampling { temperature: Some(-1.0), ..Default::default() }),
            "INVALID_REQUEST",
            "temperature is -1",
        ),
        (
            sampling(pb::Sampling { top_p: Some(0.0), ..Default::default() }),
            "INVALID_REQUEST",
            "top_p is 0, allowed is above 0 and up to 1",
        ),
        (
            pb::GenerateRequest { request_id: "two words".into(), ..request(&[1], 5) },
            "INVALID_MESSAGE",
            "request_id has a character",
        ),
    ] {
        let status = stand.generate(bad).await.err().unwrap();
        assert_refused(&status, Code::InvalidArgument, reason, message);
    }
    let fits = vec![1; MAX_CONTEXT as usize - 1];
    assert_eq!(stand.generate(request(&fits, 5)).await.unwrap().whole().await.0.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workers_word_against_the_request_does_not_count_against_the_worker() {
    let mut stand = Stand::start(1, 1, |_| {}).await;
    stand.decodes[0].script.rejects.store(true, Ordering::SeqCst);
    for _ in 0..5 {
        let status = stand.generate(request(&[1], 5)).await.unwrap().error().await;
        assert_refused(&status, Code::InvalidArgument, "REJECTED_BY_WORKER", "prompt is too long");
    }
    stand.decodes[0].script.rejects.store(false, Ordering::SeqCst);
    stand.generate(request(&[1], 5)).await.unwrap().whole().await;
    assert!(!stand.metrics().await.contains("damask_router_resumptions_total{"), "no attempt was repeated");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_refuses_and_a_long_wait_ends() {
    let mut stand = Stand::start(1, 1, |config| {
        config.limits.in_flight_max = 1;
        config.limits.queue_max = 1;
        config.limits.queue_timeout_ms = 300;
    })
    .await;
    stand.slow_down(20);
    let mut served = stand.generate(request(&[1], 100)).await.unwrap();
    served.until_tokens(1).await;
    let queued = stand.generate(request(&[2], 5)).await.unwrap();
    let status = stand.generate(request(&[3], 5)).await.err().unwrap();
    assert_refused(&status, Code::ResourceExhausted, "QUEUE_FULL", "1 requests wait");
    assert_refused(&queued.error().await, Code::ResourceExhausted, "QUEUE_TIMEOUT", "within 300 ms");
    // The one before was not disturbed, and its end lets the next one in.
    let next = stand.generate(request(&[4], 5));
    drop(served);
    assert_eq!(next.await.unwrap().whole().await.0.len(), 5);
    stand.assert_all_released().await;
}

/// Heartbeats so rare that none makes a full worker look well.
#[tokio::test(flavor = "multi_thread")]
async fn one_that_was_refused_is_sent_again_when_there_may_be_room_and_not_overtaken() {
    let mut stand = Stand::start(1, 1, |config| {
        config.workers.heartbeat_interval_ms = 60_000;
        config.workers.dead_after_ms = 120_000;
    })
    .await;
    stand.slow_down(20);
    let mut served = stand.generate(request(&[1], 500)).await.unwrap();
    served.until_tokens(2).await;
    let script = std::sync::Arc::clone(&stand.decodes[0].script);
    let asked = || script.asked.load(Ordering::SeqCst);
    script.refusals.store(1, Ordering::SeqCst);
    let long = stand.generate(request(&[2; 1_000], 5)).await.unwrap();
    while asked() < 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let small = stand.generate(request(&[3], 5)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(asked(), 2, "neither again, nor by one behind it");
    assert_eq!(script.served.load(Ordering::SeqCst), 1);
    drop(served);
    assert_eq!(long.whole().await.0.len(), 5);
    assert_eq!(small.whole().await.0.len(), 5);
    assert_eq!(asked(), 4);
    stand.assert_all_released().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_names_the_stage() {
    let mut stand = Stand::start(1, 1, |_| {}).await;
    stand.slow_down(30);
    let short = |prompt: &[u32]| pb::GenerateRequest {
        timeout: Some(prost_types::Duration { seconds: 0, nanos: 300_000_000 }),
        ..request(prompt, 400)
    };
    let status = stand.generate(short(&[1])).await.unwrap().error().await;
    assert_refused(
        &status,
        Code::DeadlineExceeded,
        "DEADLINE_EXCEEDED",
        "deadline of 300 ms passed in stage inter_token",
    );
    stand.prefills[0].script.prefill_ms.store(60_000, Ordering::SeqCst);
    let status = stand.generate(short(&[2])).await.unwrap().error().await;
    assert_refused(&status, Code::DeadlineExceeded, "DEADLINE_EXCEEDED", "passed in stage prefill");
    stand.assert_all_released().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_deadline_of_the_call_counts_as_well() {
    let mut stand = Stand::start(1, 1, |_| {}).await;
    stand.slow_down(30);
    let mut call = tonic::Request::new(request(&[1], 400));
    call.set_timeout(Duration::from_millis(300));
    let mut stream = stand.client.generate(call).await.unwrap().into_inner();
    let status = loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the stream ended well"),
            Err(status) => break status,
        }
    };
    assert!(status.message().contains("deadline of 300 ms passed in stage"), "{status:?}");
    stand.assert_all_released().await;
}
