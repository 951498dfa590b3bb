//! Prefill and decode together: what one computes and the other goes on from must be what one engine alone yields.
#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

mod fleet;
mod monolith;
mod reuse;

use std::sync::atomic::Ordering;
use std::time::Duration;

use fleet::{Fleet, decode_config, decode_event, prefill_config, prefill_event, prompt, request};
use futures_util::future::join_all;
use monolith::Monolith;
use tonic::Code;
use types::{
    DecodeEvent, ErrorClass, FinishReason, GenerateRequest, PrefillEvent, Sampling, WorkerReport, WorkerState,
};

/// Around a page (16 tokens), a chunk (64 in these tests) and the window (128).
const EDGES: [usize; 18] = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130, 143, 144, 145, 191, 192, 257];

fn edge_requests() -> Vec<GenerateRequest> {
    EDGES.iter().enumerate().map(|(i, len)| request(prompt(*len, i as u32), 12)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_equal_a_monolithic_run_for_every_pair_of_layouts() {
    let monolith = Monolith::new();
    let requests = edge_requests();
    let expected: Vec<_> = requests.iter().map(|request| monolith.generate(request)).collect();
    for prefill_tp in [1, 2, 4] {
        for decode_tp in [1, 2, 4] {
            let fleet = Fleet::with_layouts(prefill_tp, decode_tp).await;
            let answers = join_all(requests.iter().map(|request| fleet.generate(request))).await;
            for ((answer, expected), len) in answers.into_iter().zip(&expected).zip(EDGES) {
                let (tokens, finished) = answer.unwrap();
                assert_eq!(&tokens, expected, "prefill TP{prefill_tp}, decode TP{decode_tp}, {len} prompt tokens");
                assert_eq!(finished.reason, FinishReason::Length);
                assert_eq!(finished.usage.prompt_tokens as usize, len);
                assert_eq!(finished.usage.output_tokens, 12);
            }
            fleet.wait_idle().await;
            let Fleet { prefill, decode } = fleet;
            tokio::join!(prefill.drain(), decode.drain());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sampled_and_resumed_requests_equal_a_monolithic_run() {
    let monolith = Monolith::new();
    let fleet = Fleet::start(prefill_config(), decode_config()).await;
    for seed in 0..4 {
        let sampling = Sampling {
            temperature: 0.9,
            top_p: 0.95,
            presence_penalty: 0.5,
            frequency_penalty: 0.3,
            repetition_penalty: 1.1,
            seed,
            ..Sampling::default()
        };
        let whole = GenerateRequest { sampling, ..request(prompt(100 + 40 * seed as usize, 50), 24) };
        let expected = monolith.generate(&whole);
        assert_eq!(fleet.generate(&whole).await.unwrap().0, expected, "seed {seed}");
        for given in [1, 7, 23] {
            let resumed = GenerateRequest { generated: expected[..given].to_vec(), ..whole.clone() };
            let (tokens, finished) = fleet.generate(&resumed).await.unwrap();
            assert_eq!(tokens, expected[given..], "seed {seed}, resumed behind {given} tokens");
            assert_eq!(finished.usage.output_tokens, 24);
        }
    }
    fleet.wait_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_token_that_ends_the_request_transfers_nothing_further() {
    let monolith = Monolith::new();
    let fleet = Fleet::start(prefill_config(), decode_config()).await;
    for len in [1, 128, 200] {
        let plain = request(prompt(len, 9), 8);
        let first = monolith.generate(&plain)[0];
        let stopped = GenerateRequest { stop_token_ids: vec![first], ..plain.clone() };
        let (tokens, finished) = fleet.generate(&stopped).await.unwrap();
        assert_eq!((tokens, finished.reason), (vec![first], FinishReason::Stop));
        let one = GenerateRequest { max_tokens: 1, ..plain };
        let (tokens, finished) = fleet.generate(&one).await.unwrap();
        assert_eq!((tokens, finished.reason), (vec![first], FinishReason::Length));
        fleet.wait_idle().await;
    }
    fleet.assert_no_transfer_failed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_longest_context_fits_and_one_more_is_refused() {
    let monolith = Monolith::new();
    let fleet = Fleet::start(prefill_config(), decode_config()).await;
    for (len, output) in [(1_020, 4), (1_023, 1)] {
        let longest = request(prompt(len, 3), 1_000);
        let (tokens, finished) = fleet.generate(&longest).await.unwrap();
        assert_eq!(tokens, monolith.generate(&request(longest.prompt, output)), "{len} prompt tokens");
        assert_eq!(finished.reason, FinishReason::Length);
    }
    let status = fleet.reserve(&request(prompt(1_024, 3), 1)).await.err().unwrap();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    fleet.wait_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancel_frees_both_workers_in_every_phase() {
    let fleet = Fleet::start(prefill_config(), decode_config()).await;
    let long = request(prompt(700, 1), 300);
    // Reserved.
    let (_, decode) = fleet.reserve(&long).await.unwrap();
    drop(decode);
    fleet.wait_idle().await;
    // Being computed and landing: both streams are dropped some milliseconds later; then only one of them.
    for (pause_ms, keep_decode, keep_prefill) in [
        (0, false, false),
        (5, false, false),
        (20, false, false),
        (60, false, false),
        (20, true, false),
        (20, false, true),
    ] {
        let (ticket, decode) = fleet.reserve(&long).await.unwrap();
        let prefill = fleet.submit(&long, ticket).await.unwrap();
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        let (decode, prefill) = (keep_decode.then_some(decode), keep_prefill.then_some(prefill));
        if let Some(mut decode) = decode {
            let status = loop {
                match decode_event(&mut decode).await {
                    Ok(Some(_)) => {}
                    Ok(None) => panic!("the stream ended without an end"),
                    Err(status) => break status,
                }
            };
            assert_eq!(status.code(), Code::Aborted, "{status}");
            assert_eq!(wire::status::class(&status), ErrorClass::Retryable);
        }
        if let Some(mut prefill) = prefill {
            let status = loop {
                match prefill_event(&mut prefill).await {
                    Ok(Some(event)) => assert!(matches!(event, PrefillEvent::FirstToken { .. })),
                    Ok(None) => panic!("the stream ended without an end"),
                    Err(status) => break status,
                }
            };
            assert_eq!(wire::status::class(&status), ErrorClass::Retryable, "{status}");
        }
        fleet.wait_idle().await;
    }
    // First token known; committed; running.
    for phase in 0..3 {
        let (ticket, mut decode) = fleet.reserve(&long).await.unwrap();
        let mut prefill = fleet.submit(&long, ticket).await.unwrap();
        assert!(matches!(prefill_event(&mut prefill).await, Ok(Some(PrefillEvent::FirstToken { .. }))));
        if phase >= 1 {
            assert!(matches!(prefill_event(&mut prefill).await, Ok(Some(PrefillEvent::Committed { .. }))));
        }
        if phase >= 2 {
            assert!(matches!(decode_event(&mut decode).await, Ok(Some(DecodeEvent::Joined { .. }))));
            assert!(matches!(decode_event(&mut decode).await, Ok(Some(DecodeEvent::Tokens(_)))));
        }
        drop((prefill, decode));
        fleet.wait_idle().await;
    }
    let steps = fleet.decode.report().await.load.steps;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(fleet.decode.report().await.load.steps, steps, "nothing goes on computing");
    fleet.assert_no_transfer_failed().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_requests_at_once_some_cancelled() {
    let monolith = Monolith::new();
    let fleet = Fleet::start(prefill_config(), decode_config()).await;
    let requests: Vec<_> = (0..64_u32).map(|i| request(prompt(1 + (i as usize * 37) % 200, i), 2 + i % 23)).collect();
    all_at_once(&fleet, &monolith, &requests, |i| (i % 5 == 4).then(|| Duration::from_millis(20 * i))).await;
    fleet.wait_idle().await;
}

/// Sends requests at once and checks the answers. Those for which `patience` names a time, by their place, are given up after it.
async fn all_at_once(
    fleet: &Fleet,
    monolith: &Monolith,
    requests: &[GenerateRequest],
    patience: impl Fn(u64) -> Option<Duration>,
) {
    let answers = join_all((0..).zip(requests).map(async |(i, request)| match patience(i) {
        Some(patience) => tokio::time::timeout(patience, patiently(fleet, request)).await.ok(),
        None => Some(patiently(fleet, request).await),
    }));
    for (answer, request) in answers.await.into_iter().zip(requests) {
        if let Some(tokens) = answer {
            assert_eq!(tokens, monolith.generate(request));
        }
    }
}

/// As a router does: a refusal for lack of room is tried again.
async fn patiently(fleet: &Fleet, request: &GenerateRequest) -> Vec<u32> {
    loop {
        match fleet.generate(request).await {
            Ok((tokens, _)) => return tokens,
            Err(status) => {
                assert_eq!(wire::status::class(&status), ErrorClass::Overloaded, "{status}");
                assert!(wire::status::retry_after(&status).is_some());
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_that_gives_way_is_resumed_with_the_same_tokens() {
    let monolith = Monolith::new();
    // Pages for the longest context and little more: sequences that grow together run out of them.
    let decode = decode::Config { full_pages: Some(68), growth_tokens: 16, ..decode_config() };
    let fleet = Fleet::start(prefill_config(), decode).await;
    let requests: Vec<_> = (0..6).map(|i| request(prompt(100, i), 200)).collect();
    let answers = join_all(requests.iter().map(async |request| {
        let (mut tokens, mut preemptions) = (Vec::new(), 0);
        loop {
            let attempt = GenerateRequest { generated: tokens.clone(), ..request.clone() };
            let Ok((ticket, mut decode)) = fleet.reserve(&attempt).await else {
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            };
            let mut prefill = fleet.submit(&attempt, ticket).await.unwrap();
            let Some(PrefillEvent::FirstToken { token, .. }) = prefill_event(&mut prefill).await.unwrap() else {
                panic!("wanted FirstToken");
            };
            tokens.push(token.token);
            if tokens.len() == 200 {
                return (tokens, preemptions); // the last one came from prefill: nothing is handed over
            }
            loop {
                match decode_event(&mut decode).await.unwrap().unwrap() {
                    DecodeEvent::Joined { .. } => {}
                    DecodeEvent::Tokens(run) => tokens.extend(run.tokens.into_iter().map(|token| token.token)),
                    DecodeEvent::Finished(_) => return (tokens, preemptions),
                    DecodeEvent::Preempted => break,
                    DecodeEvent::Reserved(_) => panic!("reserved twice"),
                }
            }
            preemptions += 1;
        }
    }));
    let answers = answers.await;
    assert!(answers.iter().any(|(_, preemptions)| *preemptions > 0), "the pool was to run out");
    for ((tokens, _), request) in answers.into_iter().zip(&requests) {
        assert_eq!(tokens, monolith.generate(request));
    }
    fleet.wait_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_part_fails_its_own_request_only() {
    let monolith = Monolith::new();
    let fleet = Fleet::start(prefill_config(), decode_config()).await;
    let good = request(prompt(130, 1), 8);
    fleet.generate(&good).await.unwrap(); // the lane is open
    let (other_ticket, mut other_decode) = fleet.reserve(&good).await.unwrap();

    fleet.prefill.damage.store(1, Ordering::SeqCst);
    let bad = request(prompt(150, 2), 8);
    let (ticket, mut decode) = fleet.reserve(&bad).await.unwrap();
    let mut prefill = fleet.submit(&bad, ticket).await.unwrap();
    let status = decode_event(&mut decode).await.unwrap_err();
    assert_eq!(wire::status::reason(&status).as_deref(), Some("KV_CORRUPT"), "{status}");
    assert_eq!(wire::status::class(&status), ErrorClass::Retryable);
    let status = loop {
        match prefill_event(&mut prefill).await {
            Ok(Some(PrefillEvent::FirstToken { .. })) => {}
            Ok(other) => panic!("wanted an error, got {other:?}"),
            Err(status) => break status,
        }
    };
    assert_eq!(wire::status::reason(&status).as_deref(), Some("TRANSFER_ABORTED"), "{status}");
    assert_eq!(fleet.prefill.damage.load(Ordering::SeqCst), 0, "a part was damaged");

    let mut prefill = fleet.submit(&good, other_ticket).await.unwrap();
    assert!(matches!(prefill_event(&mut prefill).await, Ok(Some(PrefillEvent::FirstToken { .. }))));
    assert!(matches!(prefill_event(&mut prefill).await, Ok(Some(PrefillEvent::Committed { .. }))), "the lane is whole");
    assert!(matches!(decode_event(&mut other_decode).await, Ok(Some(DecodeEvent::Joined { .. }))));
    drop((decode, other_decode, prefill));
    assert_eq!(fleet.generate(&bad).await.unwrap().0, monolith.generate(&bad));
    fleet.wait_idle().await;
    assert_eq!(fleet.decode.failed_transfers().await, ["corrupt"]);
    assert_eq!(fleet.prefill.failed_transfers().await, ["corrupt"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_peer_is_a_typed_retryable_error_on_the_other_side() {
    // Decode is lost.
    let fleet = Fleet::start(prefill_config(), decode_config()).await;
    let long = request(prompt(1_000, 1), 20);
    let (ticket, decode) = fleet.reserve(&long).await.unwrap();
    let mut prefill = fleet.submit(&long, ticket).await.unwrap();
    tokio::time::sleep(Duration::from_millis(20)).await;
    fleet.decode.shutdown.begin_stop();
    let status = loop {
        match prefill_event(&mut prefill).await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the stream ended without an end"),
            Err(status) => break status,
        }
    };
    assert_eq!(wire::status::class(&status), ErrorClass::Retryable, "{status}");
    assert_eq!(wire::status::reason(&status).as_deref(), Some("PEER_LOST"), "{status}");
    fleet.prefill.wait_idle().await;
    drop(decode);

    // Prefill is lost.
    let fleet = Fleet::start(prefill_config(), decode_config()).await;
    let (ticket, mut decode) = fleet.reserve(&long).await.unwrap();
    let prefill = fleet.submit(&long, ticket).await.unwrap();
    tokio::time::sleep(Duration::from_millis(20)).await;
    fleet.prefill.shutdown.begin_stop();
    let status = decode_event(&mut decode).await.unwrap_err();
    assert_eq!(wire::status::class(&status), ErrorClass::Retryable, "{status}");
    assert_eq!(wire::status::reason(&status).as_deref(), Some("PEER_LOST"), "{status}");
    fleet.decode.wait_idle().await;
    drop(prefill);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tickets_of_another_life_are_refused() {
    let fleet = Fleet::start(prefill_config(), decode_config()).await;
    let short = request(prompt(20, 1), 4);
    let (ticket, decode) = fleet.reserve(&short).await.unwrap();
    let mut stale = ticket.clone();
    stale.prefill.incarnation.0 += 1;
    let status = fleet.submit(&short, stale).await.err().unwrap();
    assert_eq!(wire::status::reason(&status).as_deref(), Some("WRONG_WORKER"), "{status}");
    let mut restarted = ticket.clone();
    restarted.decode.incarnation.0 += 1;
    let mut prefill = fleet.submit(&short, restarted).await.unwrap();
    let status = loop {
        match prefill_event(&mut prefill).await {
            Ok(event) => assert!(matches!(event, Some(PrefillEvent::FirstToken { .. })), "{event:?}"),
            Err(status) => break status,
        }
    };
    assert_eq!(wire::status::reason(&status).as_deref(), Some("PEER_RESTARTED"), "{status}");
    drop(decode);
    let mut other_layout = ticket;
    other_layout.kv_layout.head_dim = 32;
    let status = fleet.submit(&short, other_layout).await.err().unwrap();
    assert_eq!((status.code(), status.message().contains("head_dim")), (Code::FailedPrecondition, true), "{status}");
    fleet.wait_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_finishes_what_runs_and_takes_nothing_new() {
    let monolith = Monolith::new();
    let fleet = Fleet::start(prefill_config(), decode_config()).await;
    let long = request(prompt(300, 1), 100);
    let (ticket, mut decode) = fleet.reserve(&long).await.unwrap();
    let mut prefill = fleet.submit(&long, ticket).await.unwrap();
    let Ok(Some(PrefillEvent::FirstToken { token, .. })) = prefill_event(&mut prefill).await else {
        panic!("wanted FirstToken");
    };
    let mut watch = fleet.decode.watch().await;
    let before = watch.message().await.unwrap().expect("a first report comes at once");
    assert_eq!(WorkerReport::try_from(before).unwrap().state, WorkerState::Ready);
    fleet.decode.shutdown.begin_drain();
    fleet.prefill.shutdown.begin_drain();
    let mut tokens = vec![token.token];
    loop {
        match decode_event(&mut decode).await.unwrap().unwrap() {
            DecodeEvent::Tokens(run) => tokens.extend(run.tokens.into_iter().map(|token| token.token)),
            DecodeEvent::Finished(_) => break,
            other => assert!(matches!(other, DecodeEvent::Joined { .. }), "{other:?}"),
        }
    }
    assert_eq!(tokens, monolith.generate(&long));
    assert!(matches!(prefill_event(&mut prefill).await, Ok(Some(PrefillEvent::Committed { .. }))));
    assert!(fleet.reserve(&long).await.is_err(), "a draining worker takes nothing new");
    drop((decode, prefill));
    // The heartbeat goes on through the drain and ends with it: its end means that the worker is gone.
    let mut last = None;
    while let Some(report) = watch.message().await.unwrap() {
        last = Some(WorkerReport::try_from(report).unwrap().state);
    }
    assert_eq!(last, Some(WorkerState::Draining));
    let Fleet { prefill, decode } = fleet;
    tokio::join!(prefill.drain(), decode.drain());
}
