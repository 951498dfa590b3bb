//! Sampling on the device against the CPU engine's sampler, on the same logits.

use std::sync::Arc;

use engine::sampling::{Sampler, SlotSampler};
use scheduler::mask::{MaskFailure, MaskPromise};
use scheduler::plan::{RowFailure, RowOutputKind, SlotBinding, StepOutput};
use types::{Sampling, SlotId, TokenId, TokenMask};

use crate::driver::{Driver, Row, damage, greedy};
use crate::{gpu_is_here, nano, options, prompt, spreads};

/// One slot yields logits while another, with the same tokens in the same step, samples from them.
fn compare(name: &str, sampling: Sampling) {
    if !gpu_is_here() {
        return;
    }
    let mut gpu = nano(options(), None);
    let mut sampler = Sampler::default();
    let mut equal = 0;
    let draws = 60;
    for seed in 0..draws {
        let sampling = Sampling { seed, ..sampling.clone() };
        let tokens = prompt(20);
        let binding = SlotBinding {
            slot: SlotId(1),
            sampling: Arc::new(sampling.clone()),
            prompt: tokens.clone().into(),
            generated: Vec::new(),
        };
        let mut slot = SlotSampler::new(&binding);
        gpu.bind(0, &tokens, Sampling::default());
        gpu.bind(1, &tokens, sampling);
        let mut next = tokens;
        for _ in 0..3 {
            let rows = vec![Row::new(0, &next, RowOutputKind::LastLogits), Row::new(1, &next, RowOutputKind::Sample)];
            let mut output = gpu.step(rows);
            let got = output.rows[1].sampled.take().expect("the row samples");
            let want = sampler.sample(&mut slot, &mut output.rows[0].logits, None);
            if got.token == want.token {
                equal += 1;
            } else {
                println!("{name}: seed {seed}: {} where the cpu draws {}", got.token, want.token);
            }
            assert_eq!(got.top.len(), want.top.len(), "{name}");
            // Both sort the same logits, the lower id first among equals.
            for (got, want) in got.top.iter().zip(&want.top) {
                let near = (got.logprob - want.logprob).abs() < 1e-4;
                assert!(got.token == want.token && near, "{name}: {got:?}, want {want:?}");
            }
            if got.token != want.token {
                break; // from here on the two have other histories
            }
            assert_eq!(got.logprob.is_some(), want.logprob.is_some(), "{name}");
            if let (Some(got), Some(want)) = (got.logprob, want.logprob) {
                assert!((got - want).abs() < 1e-4, "{name}: log-probability {got}, want {want}");
            }
            next = vec![got.token];
        }
        gpu.end(0);
        gpu.end(1);
    }
    // Sums differ in the last bits, so a uniform number at the border of a token's share may fall on either side: about
    // one in 10^5.
    println!("{name}: {equal} draws equal");
    assert!(equal >= 3 * draws - 3, "{name}: {equal} of {} draws are equal", 3 * draws);
}

#[test]
fn greedy_with_log_probabilities() {
    compare("greedy", Sampling { temperature: 0.0, logprobs: Some(5), ..Sampling::default() });
}

#[test]
fn temperature() {
    compare("temperature", Sampling { temperature: 2.0, ..Sampling::default() });
}

#[test]
fn truncated() {
    compare("top-k", Sampling { temperature: 3.0, top_k: 40, ..Sampling::default() });
    compare("top-p", Sampling { temperature: 2.0, top_p: 0.9, logprobs: Some(0), ..Sampling::default() });
    compare("min-p", Sampling { temperature: 2.0, min_p: 0.01, ..Sampling::default() });
}

#[test]
fn penalties_and_biases() {
    let logit_bias = vec![(5, 10.0), (77, 9.0), (5, 2.0), (2000, 11.0)];
    let penalties = Sampling {
        temperature: 2.0,
        presence_penalty: 1.5,
        frequency_penalty: 0.7,
        repetition_penalty: 1.3,
        logit_bias,
        logprobs: Some(20),
        ..Sampling::default()
    };
    compare("penalties", penalties);
}

/// Two steps in flight: the mask of the second comes when the first has been collected, and that of the third when it is
/// launched already.
#[test]
fn masks_of_a_step_ahead_may_depend_on_the_step_before() {
    if !gpu_is_here() {
        return;
    }
    spreads().into_iter().for_each(|options| masks_ahead(&mut nano(options, None)));
}

fn masks_ahead(gpu: &mut Driver) {
    // Of two attention groups, where there are several: the second group waits for no mask.
    let [masked, other, later] = [0, 1, 3].map(|number| gpu.spread(number));
    gpu.bind(masked, &[1, 2, 3], greedy());
    gpu.bind(other, &[4, 5], greedy());
    let [first, second, third] = [(); 3].map(|()| MaskPromise::new());
    let only = |token: TokenId| {
        let word = |idx| if idx == token / 32 { 1 << (token % 32) } else { 0 };
        Ok(TokenMask::from_words((0..64).map(word).collect()))
    };
    let token = |output: &StepOutput, row: usize| output.rows[row].sampled.as_ref().map(|sampled| sampled.token);
    let sample = |slot, tokens: &[TokenId]| Row::new(slot, tokens, RowOutputKind::Sample);
    gpu.launch(vec![sample(masked, &[1, 2, 3]).masked(&first), sample(other, &[4, 5])]);
    gpu.launch(vec![Row::decode(masked).masked(&second), Row::decode(other)]);
    first.settle(only(77));
    let output = gpu.group.collect().unwrap();
    assert_eq!(token(&output, 0), Some(77));
    let free = token(&output, 1);
    gpu.launch(vec![Row::decode(masked).masked(&third), Row::decode(other)]);
    second.settle(only(2047));
    let output = gpu.group.collect().unwrap();
    assert_eq!(token(&output, 0), Some(2047));
    third.settle(Err(MaskFailure::Grammar("no way on".into())));
    let output = gpu.group.collect().unwrap();
    assert_eq!(token(&output, 0), None, "never a token that the grammar might forbid");
    assert!(token(&output, 1).is_some(), "other rows go on");
    for _ in 0..3 {
        assert!(token(&gpu.step(vec![Row::decode(masked), Row::decode(other)]), 1).is_some());
    }
    // The masks of row 0 did not touch row 1.
    gpu.bind(later, &[4, 5], greedy());
    assert_eq!(token(&gpu.step(vec![sample(later, &[4, 5])]), 0), free);
}

/// A damaged page is one sequence's: its rows say so, also that of a step that ran ahead, the others go on, and whoever gets the page next
/// reads no more than it has written.
#[test]
fn a_damaged_page_breaks_its_own_sequence_and_no_other() {
    if !gpu_is_here() {
        return;
    }
    for options in spreads() {
        let layout = options.layout;
        let mut gpu = nano(options, None);
        let slots = [0, 1, 2].map(|number| gpu.spread(number));
        let mut first = None;
        for round in 0..2 {
            slots.iter().for_each(|slot| gpu.bind(*slot, &prompt(40 + slot % 5), greedy()));
            let rows = slots.map(|slot| Row::new(slot, &prompt(40 + slot % 5), RowOutputKind::Sample));
            let tokens = gpu.step(rows.into()).rows.into_iter().map(|row| row.sampled.map(|sampled| sampled.token));
            let tokens: Vec<_> = tokens.collect();
            assert!(tokens.iter().all(Option::is_some), "{layout}, round {round}");
            assert_eq!(*first.get_or_insert_with(|| tokens.clone()), tokens, "{layout}: the same steps again");
            damage(&gpu, slots[0]);
            gpu.launch(slots.map(Row::decode).into());
            gpu.launch(slots.map(Row::decode).into());
            for _ in 0..2 {
                let output = gpu.group.collect().unwrap();
                let failures: Vec<_> = output.rows.iter().map(|row| row.failure).collect();
                assert_eq!(failures, [Some(RowFailure::NotANumber), None, None], "{layout}, round {round}");
                let sampled: Vec<_> = output.rows.iter().map(|row| row.sampled.is_some()).collect();
                assert_eq!(sampled, [false, true, true], "{layout}, round {round}");
            }
            slots.iter().for_each(|slot| gpu.end(*slot));
        }
    }
}
