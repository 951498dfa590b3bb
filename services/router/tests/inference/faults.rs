//! Workers that die, freeze or give way: the client's stream goes on.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tonic::Code;
use types::{ErrorClass, Role};

use crate::stand::{Stand, request};
use crate::workers::FakeWorker;

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_worker_dies_while_it_generates() {
    let mut stand = Stand::start(1, 2, |_| {}).await;
    stand.slow_down(10);
    let mut answer = stand.generate(request(&[1, 2, 3], 60)).await.unwrap();
    answer.until_tokens(10).await;
    stand.busy_decode().kill();
    let (tokens, finished) = answer.whole().await;
    assert_eq!((tokens.len(), finished.usage.resumptions), (60, 1));
    stand.decodes.retain(|worker| worker.open() == 0);
    stand.assert_all_released().await;
    assert!(stand.metrics().await.contains("damask_router_resumptions_total{cause=\"decode_lost\"} 1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_only_decode_worker_restarts() {
    let mut stand = Stand::start(1, 1, |_| {}).await;
    stand.slow_down(10);
    let mut answer = stand.generate(request(&[1, 2, 3], 60)).await.unwrap();
    answer.until_tokens(10).await;
    stand.decodes[0].kill();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let address = stand.decodes[0].address.clone();
    stand.decodes[0] = FakeWorker::start_at(Role::Decode, "decode-0", &stand.landings, &address);
    let (tokens, finished) = answer.whole().await;
    assert_eq!((tokens.len(), finished.usage.resumptions), (60, 1));
    stand.assert_all_released().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_worker_dies_while_it_computes() {
    let mut stand = Stand::start(2, 1, |_| {}).await;
    for prefill in &stand.prefills {
        prefill.script.prefill_ms.store(300, Ordering::SeqCst);
    }
    let mut answer = stand.generate(request(&[1, 2, 3], 10)).await.unwrap();
    answer.next().await.unwrap();
    while stand.prefills.iter().all(|worker| worker.open() == 0) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    stand.prefills.iter_mut().find(|worker| worker.open() > 0).unwrap().kill();
    let (tokens, finished) = answer.whole().await;
    assert_eq!((tokens.len(), finished.usage.resumptions), (10, 1));
    stand.prefills.retain(|worker| worker.open() == 0);
    stand.assert_all_released().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_falls_silent_is_dead() {
    let mut stand = Stand::start(1, 2, |_| {}).await;
    stand.slow_down(10);
    let mut answer = stand.generate(request(&[1, 2, 3], 60)).await.unwrap();
    answer.until_tokens(10).await;
    stand.busy_decode().script.frozen.store(true, Ordering::SeqCst);
    let (tokens, finished) = answer.whole().await;
    assert_eq!((tokens.len(), finished.usage.resumptions), (60, 1));
    // It comes back to life, and nobody waits for what it had.
    for decode in &stand.decodes {
        decode.script.frozen.store(false, Ordering::SeqCst);
    }
    stand.await_pairs(2).await;
    stand.assert_all_released().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_preempted_sequence_is_resumed() {
    let mut stand = Stand::start(1, 1, |_| {}).await;
    stand.decodes[0].script.preempt_after.store(5, Ordering::SeqCst);
    let (tokens, finished) = stand.generate(request(&[1, 2, 3], 30)).await.unwrap().whole().await;
    assert_eq!((tokens.len(), finished.usage.resumptions), (30, 1));
    stand.assert_all_released().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_decode_worker_is_waited_for() {
    let mut stand = Stand::start(1, 1, |_| {}).await;
    stand.decodes[0].script.refusals.store(3, Ordering::SeqCst);
    let (tokens, finished) = stand.generate(request(&[1, 2, 3], 10)).await.unwrap().whole().await;
    assert_eq!((tokens.len(), finished.usage.resumptions), (10, 0));
    stand.prefills[0].script.refusals.store(3, Ordering::SeqCst);
    let (tokens, finished) = stand.generate(request(&[1, 2, 3], 10)).await.unwrap().whole().await;
    assert_eq!((tokens.len(), finished.usage.resumptions), (10, 0));
    stand.assert_all_released().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fleet_that_keeps_failing_is_given_up() {
    let mut stand = Stand::start(1, 1, |config| {
        config.limits.resumptions_max = 2;
        config.deadlines.first_token_ms = 100;
    })
    .await;
    stand.slow_down(60_000);
    let status = stand.generate(request(&[1, 2, 3], 30)).await.unwrap().error().await;
    assert!(status.message().ends_with("stage first_token took longer than 100 ms"), "{status:?}");
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    assert_eq!(wire::status::reason(&status).as_deref(), Some("ATTEMPTS_EXHAUSTED"));
    stand.assert_all_released().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_lets_requests_finish() {
    let mut stand = Stand::start(1, 1, |_| {}).await;
    stand.slow_down(10);
    let mut answer = stand.generate(request(&[1, 2, 3], 40)).await.unwrap();
    answer.until_tokens(5).await;
    stand.shutdown.begin_drain();
    let (status, body) = stand.fetch("/health/ready").await;
    assert_eq!((status, body.contains("draining")), (503, true));
    let refused = stand.generate(request(&[1, 2, 3], 40)).await.err().unwrap();
    // By the router, or by a connection that it is about to close.
    assert_eq!(wire::status::class(&refused), ErrorClass::Retryable, "{refused:?}");
    let (tokens, finished) = answer.whole().await;
    assert_eq!((tokens.len(), finished.usage.resumptions), (40, 0));
    tokio::time::timeout(Duration::from_secs(5), &mut stand.running).await.unwrap().unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_does_not_make_a_cut_answer_look_whole() {
    let mut stand = Stand::start(1, 1, |_| {}).await;
    stand.slow_down(10);
    let mut answer = stand.generate(request(&[1, 2, 3], 500)).await.unwrap();
    answer.until_tokens(5).await;
    stand.shutdown.begin_stop();
    let status = answer.error().await;
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    tokio::time::timeout(Duration::from_secs(5), &mut stand.running).await.unwrap().unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_without_a_way_for_kv_are_no_pair_until_there_is_one() {
    let mut stand = Stand::start(1, 1, |_| {}).await;
    stand.prefills[0].script.unlinked.store(true, Ordering::SeqCst);
    let address = stand.decodes[0].address.clone();
    stand.decodes[0].kill();
    stand.await_pairs(0).await;
    stand.decodes[0] = FakeWorker::start_at(Role::Decode, "decode-0", &stand.landings, &address);
    let is_ready = "damask_router_workers{role=\"decode\",state=\"ready\"} 1";
    // Known as ready, which a worker of a past life is not: its loss was awaited above.
    while !stand.metrics().await.contains(is_ready) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // Several tries fit into this.
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(stand.num_pairs().await, 0);
    let (status, body) = stand.fetch("/health/ready").await;
    assert_eq!(status, 503);
    assert!(body.contains("no way for kv between prefill-0@"), "{body}");
    let status = stand.generate(request(&[1], 5)).await.err().unwrap();
    assert_eq!(wire::status::reason(&status).as_deref(), Some("NO_PAIR"), "{status:?}");
    stand.prefills[0].script.unlinked.store(false, Ordering::SeqCst);
    stand.await_pairs(1).await;
    let (tokens, _) = stand.generate(request(&[1], 5)).await.unwrap().whole().await;
    assert_eq!(tokens.len(), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_way_for_kv_that_fails_costs_one_attempt_and_is_used_again_when_it_is_there() {
    let mut stand = Stand::start(1, 2, |_| {}).await;
    stand.prefills[0].script.cut.store(true, Ordering::SeqCst);
    let mut resumptions = 0;
    for _ in 0..12 {
        let (tokens, finished) = stand.generate(request(&[1, 2, 3], 5)).await.unwrap().whole().await;
        assert_eq!(tokens.len(), 5);
        resumptions += finished.usage.resumptions;
    }
    assert_eq!(resumptions, 1, "the first request found it out");
    assert_eq!(stand.num_pairs().await, 1);
    stand.prefills[0].script.cut.store(false, Ordering::SeqCst);
    stand.await_pairs(2).await;
    stand.assert_all_released().await;
}
