//! Prompts that begin like earlier ones, through both workers.

use std::time::Duration;

use transfer::TransferConfig;
use types::{CacheSalt, GenerateRequest, ParallelLayout};

use crate::all_at_once;
use crate::fleet::{Fleet, decode_config, prefill_config, prompt, request};
use crate::monolith::Monolith;

/// What the fleet answers is what one engine alone does; yields how many prompt tokens were cached.
async fn answer(fleet: &Fleet, monolith: &Monolith, request: &GenerateRequest) -> u32 {
    let (tokens, finished, cached_tokens) = fleet.generate_and_report(request).await.unwrap();
    assert_eq!(tokens, monolith.generate(request), "{} prompt tokens, {cached_tokens} cached", request.prompt.len());
    assert_eq!(finished.usage.prompt_tokens as usize, request.prompt.len());
    cached_tokens
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turns_of_a_conversation_equal_a_monolithic_run_in_every_layout() {
    let monolith = Monolith::new();
    for (prefill_tp, decode_tp) in [(1, 1), (1, 4), (2, 1), (2, 2), (4, 2), (4, 1)] {
        let fleet = Fleet::with_layouts(prefill_tp, decode_tp).await;
        // Around a page, the window, and several chunks of 64; each turn begins with all of the one before.
        let turns = [1, 17, 33, 127, 128, 129, 145, 146, 273, 274, 700, 701];
        let mut cached = Vec::new();
        for len in turns {
            cached.push(answer(&fleet, &monolith, &request(prompt(len, 5), 8)).await);
        }
        // What a turn of n tokens leaves is the last page end before its last token.
        let expected = [0, 0, 16, 32, 112, 112, 128, 144, 144, 272, 272, 688];
        assert_eq!(cached, expected, "prefill TP{prefill_tp}, decode TP{decode_tp}");
        fleet.wait_idle().await;
        let Fleet { prefill, decode } = fleet;
        tokio::join!(prefill.drain(), decode.drain());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_cached_is_sent_through_a_lane_that_is_too_narrow_for_it() {
    let monolith = Monolith::new();
    // The least that is allowed: a chunk of the window's length, and its window. 60 pages that are cached take several times that.
    let transfer = TransferConfig { in_flight_bytes_max: 40 * 4 * 8_192, ..TransferConfig::default() };
    let prefill = prefill::Config { transfer, layout: ParallelLayout::tp(2), ..prefill_config() };
    let fleet = Fleet::start(prefill, decode_config()).await;
    assert_eq!(answer(&fleet, &monolith, &request(prompt(970, 1), 8)).await, 0);
    for _ in 0..3 {
        assert_eq!(answer(&fleet, &monolith, &request(prompt(970, 1), 8)).await, 960);
    }
    // Several at once, and some that are given up while they wait for room.
    let requests: Vec<_> = (0..12).map(|i| request(prompt(961 + i, 1), 8)).collect();
    all_at_once(&fleet, &monolith, &requests, |i| (i % 4 == 3).then(|| Duration::from_millis(5 * i))).await;
    fleet.wait_idle().await;
    assert_eq!(answer(&fleet, &monolith, &request(prompt(970, 1), 8)).await, 960);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn salts_resumptions_and_last_tokens() {
    let monolith = Monolith::new();
    let fleet = Fleet::start(prefill_config(), decode_config()).await;
    let plain = request(prompt(300, 1), 40);
    let salted = |salt: &[u8]| GenerateRequest { cache_salt: CacheSalt::new(salt).ok(), ..plain.clone() };
    let mut cached = Vec::new();
    for salt in [b"one" as &[u8], b"two", b"", b"one", b"two", b""] {
        cached.push(answer(&fleet, &monolith, &salted(salt)).await);
    }
    assert_eq!(cached, [0, 0, 0, 288, 288, 288]);
    let generated = monolith.generate(&plain)[..20].to_vec();
    let resumed = GenerateRequest { generated, ..plain.clone() };
    assert_eq!(answer(&fleet, &monolith, &resumed).await, 288);
    // By now 304 positions are, 4 of them generated.
    assert_eq!(answer(&fleet, &monolith, &resumed).await, 300);
    // Nothing is sent for a request of one token; what it computes is kept all the same.
    assert_eq!(answer(&fleet, &monolith, &request(prompt(500, 9), 1)).await, 0);
    assert_eq!(answer(&fleet, &monolith, &request(prompt(500, 9), 1)).await, 496);
    assert_eq!(answer(&fleet, &monolith, &request(prompt(501, 9), 8)).await, 496);
    fleet.wait_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn switched_off_nothing_is_kept() {
    let monolith = Monolith::new();
    let fleet = Fleet::start(prefill::Config { prefix_reuse: false, ..prefill_config() }, decode_config()).await;
    for _ in 0..3 {
        assert_eq!(answer(&fleet, &monolith, &request(prompt(300, 1), 8)).await, 0);
    }
    fleet.wait_idle().await;
    let pools = fleet.prefill.report().await.load.pools;
    assert!(pools.iter().all(|pool| pool.free == pool.total), "{pools:?}");
}
