//! The logits of a position are the same bits whatever computes them: any batch, any chunks, prefill or decode, any pages, any layout.

mod driver;

use std::collections::BTreeMap;

use driver::{Driver, Row, greedy, options};
use engine::cpu::{CpuOptions, Numerics};
use proptest::prelude::*;
use scheduler::plan::RowOutputKind;
use types::{KvDtype, ParallelLayout, TokenId};

const fn layout(ep: u32, dp: u32, tp: u32) -> ParallelLayout {
    ParallelLayout { tp, ep, dp }
}

const LAYOUTS: [ParallelLayout; 12] = [
    layout(1, 1, 1),
    layout(1, 1, 2),
    layout(2, 1, 2),
    layout(1, 1, 4),
    layout(2, 1, 4),
    layout(4, 1, 4),
    // Experts split over the data-parallel groups, within them as well, and every expert over all ranks.
    layout(2, 2, 1),
    layout(4, 2, 2),
    layout(2, 2, 2),
    layout(1, 2, 1),
    layout(4, 4, 1),
    layout(2, 4, 1),
];

/// The tokens of a sequence and how many of them each step feeds.
#[derive(Debug, Clone)]
struct Script {
    tokens: Vec<TokenId>,
    chunks: Vec<usize>,
}

fn script() -> impl Strategy<Value = Script> {
    // Long enough for the window (128) to slide; chunks of one are decode steps.
    let chunk = prop_oneof![3 => Just(1usize), 1 => 2..5usize, 1 => 5..40usize, 1 => 40..200usize];
    (prop::collection::vec(0..2048u32, 1..300), prop::collection::vec(chunk, 300))
        .prop_map(|(tokens, chunks)| Script { tokens, chunks })
}

/// Logits of all positions of each script, computed side by side: a step has the next chunk of every script that is not at its end. With
/// data parallelism the scripts are spread over the groups, some of which have none, or are done before others.
fn run(driver: &mut Driver, scripts: &[Script]) -> Vec<Vec<f32>> {
    let slots: Vec<u32> = (0..scripts.len() as u32).map(|number| driver.spread(number)).collect();
    for (script, slot) in scripts.iter().zip(&slots) {
        driver.bind(*slot, &script.tokens, greedy());
    }
    let mut logits = vec![Vec::new(); scripts.len()];
    let mut chunks: Vec<_> = scripts.iter().map(|script| script.chunks.iter()).collect();
    loop {
        let mut rows = Vec::new();
        for ((script, slot), chunks) in scripts.iter().zip(&slots).zip(&mut chunks) {
            let left = &script.tokens[driver.sequences[slot].len as usize..];
            if !left.is_empty() {
                let chunk = chunks.next().map_or(left.len(), |chunk| (*chunk).min(left.len()));
                rows.push(Row::new(*slot, &left[..chunk], RowOutputKind::AllLogits));
            }
        }
        if rows.is_empty() {
            break;
        }
        for row in driver.step(rows).rows {
            let number = slots.iter().position(|slot| *slot == row.slot.0).expect("the row is of a script");
            logits[number].extend(row.logits);
        }
    }
    slots.into_iter().for_each(|slot| driver.end(slot));
    logits
}

/// First position and token where two runs differ, with both values.
fn difference(a: &[f32], b: &[f32]) -> Option<String> {
    assert_eq!(a.len(), b.len(), "both runs yield all logits");
    let at = a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits())?;
    Some(format!("position {}, token {}: {:e} and {:e}", at / 2048, at % 2048, a[at], b[at]))
}

fn modes() -> [(Numerics, KvDtype); 3] {
    [(Numerics::F32, KvDtype::F32), (Numerics::F32, KvDtype::Bf16), (Numerics::BF16, KvDtype::Bf16)]
}

#[test]
fn logits_do_not_depend_on_batch_chunks_pages_or_layout() {
    for (numerics, kv_dtype) in modes() {
        let base = |layout| CpuOptions { numerics, kv_dtype, ..options(layout) };
        // The yardstick: alone, in one step, on one rank.
        let mut alone = Driver::new(base(LAYOUTS[0]));
        let mut drivers = BTreeMap::new();
        let config = ProptestConfig { cases: 20, failure_persistence: None, ..ProptestConfig::default() };
        let rng = proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha);
        let mut runner = proptest::test_runner::TestRunner::new_with_rng(config, rng);
        let strategy = (
            prop::collection::vec(script(), 1..6),
            0..LAYOUTS.len(),
            prop_oneof![Just(1u32), Just(7), Just(16), Just(64)],
        );
        let drivers = std::cell::RefCell::new((&mut alone, &mut drivers));
        runner
            .run(&strategy, |(scripts, layout, page_tokens)| {
                let (alone, drivers) = &mut *drivers.borrow_mut();
                let options = CpuOptions { page_tokens, ..base(LAYOUTS[layout]) };
                let driver = drivers.entry((layout, page_tokens)).or_insert_with(|| Driver::new(options));
                let together = run(driver, &scripts);
                for (i, (script, together)) in scripts.iter().zip(&together).enumerate() {
                    let whole = Script { tokens: script.tokens.clone(), chunks: Vec::new() };
                    let want = run(alone, &[whole]).remove(0);
                    let difference = difference(together, &want);
                    prop_assert!(
                        difference.is_none(),
                        "script {i}, {}: {}",
                        LAYOUTS[layout],
                        difference.unwrap_or_default()
                    );
                }
                Ok(())
            })
            .unwrap_or_else(|failure| panic!("{numerics:?} {kv_dtype:?}: {failure}"));
    }
}

#[test]
fn every_layout_agrees_on_one_long_sequence_decoded_token_by_token() {
    let tokens: Vec<TokenId> = (0..260).map(|i| (i * 193 + 7) % 2016).collect();
    let whole = Script { tokens: tokens.clone(), chunks: Vec::new() };
    let want = run(&mut Driver::new(options(LAYOUTS[0])), &[whole]).remove(0);
    for layout in LAYOUTS {
        let single = Script { tokens: tokens.clone(), chunks: vec![1; tokens.len()] };
        let got = run(&mut Driver::new(options(layout)), &[single]).remove(0);
        assert_eq!(difference(&got, &want), None, "{layout}");
    }
}

#[test]
fn kv_moved_between_groups_of_unlike_layout_continues_equally() {
    let tokens: Vec<TokenId> = (0..200).map(|i| (i * 71 + 3) % 2016).collect();
    for (from, to) in [
        (layout(1, 1, 2), layout(4, 1, 4)),
        (layout(2, 1, 4), layout(1, 1, 1)),
        (layout(1, 1, 1), layout(2, 1, 2)),
        (layout(1, 1, 4), layout(4, 2, 2)),
        (layout(1, 1, 1), layout(4, 4, 1)),
    ] {
        let (mut prefill, mut decode) = (Driver::new(options(from)), Driver::new(options(to)));
        // In the last group, the pages of which are on the last ranks.
        let slot = 47;
        prefill.bind(slot, &tokens, greedy());
        let first = prefill.step(vec![Row::new(slot, &tokens, RowOutputKind::Sample)]).rows[0].sampled.clone();
        let first = first.expect("the row samples").token;
        decode.bind(slot, &tokens, greedy());
        // A step that only binds the slot and hands out pages.
        decode.grow(slot, 0, tokens.len() as u32);
        decode.step(Vec::new());
        driver::copy_kv(&prefill, &decode, slot);
        decode.sequences.get_mut(&slot).expect("bound").len = tokens.len() as u32;
        let mut logits = [&mut prefill, &mut decode].map(|driver| {
            driver.step(vec![Row::new(slot, &[first, 5, 9], RowOutputKind::AllLogits)]).rows.remove(0).logits
        });
        let other = logits[1].split_off(0);
        assert_eq!(difference(&logits[0], &other), None, "{from} to {to}");
    }
}
