//! Attention groups: sequences dealt out unevenly, groups without any, and slots and pages that are each group's own.

use std::sync::Arc;

use engine::cuda::{CudaOptions, Weights};
use engine::{KvListener, KvReader};
use model::Checkpoint;
use scheduler::plan::{RowOutputKind, StepPlan};
use types::{Sampling, TokenId};

use crate::driver::{Driver, Row, greedy};
use crate::nano::{follow_in, greedy_cases};
use crate::{gpu_is_here, nano, prompt, spreads};

/// Layouts with several attention groups.
fn groups() -> Vec<CudaOptions> {
    spreads().into_iter().filter(|options| options.layout.dp > 1).collect()
}

#[test]
fn continuations_agree_however_they_are_dealt_out() {
    if !gpu_is_here() {
        return;
    }
    let cases = greedy_cases();
    for options in groups() {
        let layout = options.layout;
        let mut gpu = nano(options, None);
        let (dp, per_group) = (gpu.slots.dp(), gpu.slots.per_group());
        let last = (dp - 1) * per_group;
        let cases = &cases[..cases.len().min(per_group as usize)];
        let all = cases.len() as u32;
        // All in the first group, all in the last, and all but one in the last, each group with a graph of its own.
        let dealt: [Vec<u32>; 3] = [
            (0..all).collect(),
            (last..last + all).collect(),
            std::iter::once(0).chain(last..last + all - 1).collect(),
        ];
        for slots in dealt {
            let close = follow_in(&mut gpu, cases, &slots, 4096);
            println!("{layout}, slots {slots:?}: {close} of {all} continuations end at a close step");
            assert!(close <= 1, "{layout}: {close} of {all} continuations end at a close step");
        }
    }
}

/// Tokens that a sequence draws, alone or while others come and go in all groups.
fn drawn(gpu: &mut Driver, slot: u32, crowd: bool) -> Vec<TokenId> {
    let sampling = Sampling { seed: 3, temperature: 0.0, presence_penalty: 0.5, ..Sampling::default() };
    gpu.bind(slot, &prompt(70), sampling);
    let mut next = Row::new(slot, &prompt(70), RowOutputKind::Sample);
    let mut tokens = Vec::new();
    let mut others: Vec<u32> = Vec::new();
    for step in 0..40_u32 {
        let mut rows = vec![next];
        if crowd {
            rows.extend(others.iter().map(|other| Row::decode(*other)));
            let free = |number: &u32| {
                let other = gpu.spread(*number);
                other != slot && !others.contains(&other)
            };
            // Every third step one joins, with a prompt, so that some steps are graphs and others not; every seventh, one leaves.
            if step % 3 == 1
                && let Some(other) = (0..48).find(free).map(|number| gpu.spread(number))
            {
                gpu.bind(other, &prompt(5 + step), greedy());
                rows.push(Row::new(other, &prompt(5 + step), RowOutputKind::Sample));
                others.push(other);
            }
        }
        let output = gpu.step(rows);
        tokens.push(output.rows[0].sampled.as_ref().expect("the row samples").token);
        assert!(output.rows.iter().all(|row| row.sampled.is_some()), "every row of every group samples");
        if step % 7 == 6 && !others.is_empty() {
            gpu.end(others.remove(0));
        }
        next = Row::decode(slot);
    }
    others.into_iter().chain([slot]).for_each(|slot| gpu.end(slot));
    tokens
}

/// Each group has slots, pages and counts of its own: what others do changes no token, but for steps that rounding decides.
#[test]
fn sequences_of_other_groups_change_nothing() {
    if !gpu_is_here() {
        return;
    }
    for options in groups() {
        let layout = options.layout;
        let mut gpu = nano(options, None);
        let runs: Vec<Vec<TokenId>> = (0..gpu.slots.dp())
            .flat_map(|number| [false, true].map(|crowd| (number, crowd)))
            .map(|(number, crowd)| {
                let slot = gpu.spread(number);
                drawn(&mut gpu, slot, crowd)
            })
            .collect();
        for (run, tokens) in runs.iter().enumerate() {
            let equal = tokens.iter().zip(&runs[0]).take_while(|(a, b)| a == b).count();
            println!("{layout}, run {run}: the first {equal} of 40 tokens are those of the first run");
            assert!(equal >= 20, "{layout}, run {run}: {tokens:?}, in the first run {:?}", runs[0]);
        }
    }
}

#[derive(Debug)]
struct Deaf;

impl KvListener for Deaf {
    fn layers_ready(&self, _: u32, _: &StepPlan, _: std::ops::Range<u32>, _: &dyn KvReader) {}
}

#[test]
fn several_groups_publish_nothing() {
    if !gpu_is_here() {
        return;
    }
    for options in groups() {
        let weights = Weights::Checkpoint(Arc::new(Checkpoint::embedded_nano()));
        let built = engine::cuda::build_group(weights, options, Some(Arc::new(Deaf)), Arc::new(|_| {}));
        let error = built.map(drop).unwrap_err().to_string();
        assert!(error.contains("only one attention group (dp) can publish"), "{error}");
    }
}
