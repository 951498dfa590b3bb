//! Combine, alone and fused with the norm.

use half::bf16;
use kernels::{Combine, CombineNorm};
use model::reference;

use crate::gpu::{BF16_ROUNDING, Gpu, Random, compare, widen};

const HIDDEN: usize = 2880;
const TOP: usize = 4;

struct Case {
    y: Vec<bf16>,
    weights: Vec<f32>,
    slot: Vec<i32>,
}

impl Case {
    /// Slots in a shuffled order; every fifth pair is on another rank.
    fn new(random: &mut Random, tokens: usize) -> Self {
        let pairs = tokens * TOP;
        let mut slot: Vec<i32> = (0..pairs as i32).collect();
        for i in (1..pairs).rev() {
            slot.swap(i, random.below(i + 1));
        }
        slot.iter_mut().step_by(5).for_each(|slot| *slot = -1);
        let weights = (0..pairs).map(|_| random.normal(0.3).abs()).collect();
        Self { y: random.bf16(pairs * HIDDEN, 1.0), weights, slot }
    }

    fn want(&self) -> Vec<f32> {
        let tokens = self.weights.len() / TOP;
        let mut sum = vec![0.0f32; tokens * HIDDEN];
        for (pair, slot) in self.slot.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
            let row = &self.y[*slot as usize * HIDDEN..][..HIDDEN];
            for (sum, y) in sum[pair / TOP * HIDDEN..].iter_mut().zip(row) {
                *sum = self.weights[pair].mul_add(y.to_f32(), *sum);
            }
        }
        sum
    }
}

#[test]
fn weighted_sum_skips_other_ranks() {
    let Some(gpu) = Gpu::open() else { return };
    for tokens in [1, 33] {
        let case = Case::new(&mut Random::new(), tokens);
        let (y, weights, slot) = (gpu.upload(&case.y), gpu.upload(&case.weights), gpu.upload(&case.slot));
        let mut out = gpu.poisoned::<bf16>(tokens * HIDDEN);
        let op = Combine {
            y: y.view(),
            weights: weights.view(),
            slot: slot.view(),
            out: out.view_mut(),
            hidden: HIDDEN,
            top: TOP,
        };
        op.enqueue(&gpu.kernels, &gpu.stream).unwrap();
        // The same multiply-adds in the same order, then one rounding.
        compare("combine", &gpu.download(&out), &case.want(), HIDDEN, |want, _| want.abs() * BF16_ROUNDING + 1e-6);
    }
}

#[test]
fn fused_norm_equals_the_two_steps() {
    let Some(gpu) = Gpu::open() else { return };
    let tokens = 9;
    let mut random = Random::new();
    let case = Case::new(&mut random, tokens);
    let (residual, norm_weight) = (random.bf16(tokens * HIDDEN, 3.0), random.bf16(HIDDEN, 1.0));
    let (y, weights, slot) = (gpu.upload(&case.y), gpu.upload(&case.weights), gpu.upload(&case.slot));
    let (mut device_residual, device_weight) = (gpu.upload(&residual), gpu.upload(&norm_weight));
    let mut out = gpu.poisoned::<bf16>(tokens * HIDDEN);
    CombineNorm {
        combine: Combine {
            y: y.view(),
            weights: weights.view(),
            slot: slot.view(),
            out: out.view_mut(),
            hidden: HIDDEN,
            top: TOP,
        },
        residual: device_residual.view_mut(),
        norm_weight: device_weight.view(),
        eps: 1e-5,
    }
    .enqueue(&gpu.kernels, &gpu.stream)
    .unwrap();
    let sum: Vec<f32> = residual.iter().zip(case.want()).map(|(r, d)| r.to_f32() + d).collect();
    let got_sum = gpu.download(&device_residual);
    // The delta is rounded, then the sum: two roundings, of values up to their magnitudes.
    compare("residual", &got_sum, &sum, HIDDEN, |want, i| {
        (want.abs() + (want - residual[i].to_f32()).abs()) * BF16_ROUNDING + 1e-6
    });
    let weight = widen(&norm_weight);
    let want: Vec<f32> = got_sum.chunks(HIDDEN).flat_map(|row| reference::rmsnorm(row, &weight, 1e-5)).collect();
    compare("norm", &gpu.download(&out), &want, HIDDEN, |want, _| want.abs() * BF16_ROUNDING * 1.1 + 1e-30);
}
