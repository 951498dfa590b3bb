//! RMSNorm: residual add, norm, and their rounding points.

use half::bf16;
use kernels::RmsNorm;
use model::reference;

use crate::gpu::{BF16_ROUNDING, Gpu, Random, compare, widen};

const EPS: f32 = 1e-5;

fn check(case: &str, tokens: usize, hidden: usize, with_delta: bool) {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let residual = random.bf16(tokens * hidden, 3.0);
    let delta = random.bf16(tokens * hidden, 1.0);
    let weight = random.bf16(hidden, 1.0);
    let mut device_residual = gpu.upload(&residual);
    let (device_delta, device_weight) = (gpu.upload(&delta), gpu.upload(&weight));
    let mut out = gpu.poisoned::<bf16>(tokens * hidden);
    RmsNorm {
        residual: device_residual.view_mut(),
        delta: with_delta.then(|| device_delta.view()),
        weight: device_weight.view(),
        out: out.view_mut(),
        eps: EPS,
    }
    .enqueue(&gpu.kernels, &gpu.stream)
    .unwrap();

    let add = |(r, d): (&bf16, &bf16)| bf16::from_f32(r.to_f32() + if with_delta { d.to_f32() } else { 0.0 });
    let sum: Vec<bf16> = residual.iter().zip(&delta).map(add).collect();
    let sum = widen(&sum);
    assert_eq!(gpu.download(&device_residual), sum, "{case}: the residual is rounded once");
    let want: Vec<f32> = sum.chunks(hidden).flat_map(|row| reference::rmsnorm(row, &widen(&weight), EPS)).collect();
    // One rounding to bf16; the f32 sum and rsqrt add less than a tenth of that.
    compare(case, &gpu.download(&out), &want, hidden, |want, _| want.abs() * BF16_ROUNDING * 1.1 + 1e-30);
}

#[test]
fn one_token() {
    check("one token", 1, 2880, true);
}

#[test]
fn many_tokens() {
    check("many tokens", 130, 2880, true);
}

#[test]
fn nothing_to_add() {
    check("nothing to add", 5, 2880, false);
}

#[test]
fn hidden_of_nano() {
    check("hidden of nano", 7, 320, true);
}
