//! Products with few columns: dense and grouped, bf16 and MXFP4.

use half::bf16;
use kernels::{Dispatch, Grouped, KernelError, Output, PackedWeights, Routing, SkinnyGemm, pack_bf16};
use model::reference;

use crate::gpu::{BF16_ROUNDING, Gpu, Random, compare, magnitudes, sum_error, widen};
use crate::mxfp4::Mxfp4;

const TOP: usize = 4;

fn pack(gpu: &Gpu, weight: &[bf16], [rows, k]: [usize; 2]) -> PackedWeights {
    pack_bf16(&gpu.kernels, &gpu.stream, gpu.upload(weight).view(), [1, rows, k], false).unwrap()
}

fn dense(gpu: &mut Gpu, weights: &PackedWeights, x: &[bf16], bias: Option<&[bf16]>) -> Vec<f32> {
    let [rows, k] = weights.shape();
    let (device_x, bias) = (gpu.upload(x), bias.map(|bias| gpu.upload(bias)));
    let mut out = gpu.poisoned::<bf16>(x.len() / k * rows);
    SkinnyGemm {
        weights,
        x: device_x.view(),
        bias: bias.as_ref().map(|bias| bias.view()),
        out: Output::Bf16(out.view_mut()),
        routing: None,
        workspace: &mut gpu.workspace,
    }
    .enqueue(&gpu.kernels, &gpu.stream)
    .unwrap();
    gpu.download(&out)
}

fn check_dense(case: &str, columns: usize, rows: usize, k: usize) {
    let Some(mut gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let (weight, bias, x) = (random.bf16(rows * k, 0.05), random.bf16(rows, 1.0), random.bf16(columns * k, 1.0));
    let packed = pack(&gpu, &weight, [rows, k]);
    let got = dense(&mut gpu, &packed, &x, Some(&bias));
    let (weight, bias) = (widen(&weight), widen(&bias));
    let x = widen(&x);
    let want: Vec<f32> = x.chunks(k).flat_map(|row| reference::linear(row, &weight, Some(&bias))).collect();
    let magnitude: Vec<f32> = x.chunks(k).flat_map(|row| magnitudes(row, &weight)).collect();
    compare(case, &got, &want, rows, |want, i| want.abs() * BF16_ROUNDING + sum_error(k) * magnitude[i]);
}

#[test]
fn qkv_of_one_token() {
    check_dense("qkv", 1, 5120, 2880);
}

#[test]
fn output_projection_at_every_edge_of_columns() {
    for columns in [2, 4, 7, 8, 9, 16] {
        check_dense("out", columns, 2880, 4096);
    }
}

#[test]
fn nano_and_single_strips() {
    check_dense("nano qkv", 3, 1024, 320);
    check_dense("one strip", 5, 16, 2880);
    check_dense("one block of k", 8, 48, 32);
}

#[test]
fn logits_stay_f32() {
    let Some(mut gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let (rows, k, columns) = (4096, 2880, 3);
    let (weight, x) = (random.bf16(rows * k, 0.05), random.bf16(columns * k, 1.0));
    let packed = pack(&gpu, &weight, [rows, k]);
    let device_x = gpu.upload(&x);
    let mut out = gpu.poisoned::<f32>(columns * rows);
    SkinnyGemm {
        weights: &packed,
        x: device_x.view(),
        bias: None,
        out: Output::F32(out.view_mut()),
        routing: None,
        workspace: &mut gpu.workspace,
    }
    .enqueue(&gpu.kernels, &gpu.stream)
    .unwrap();
    let got = gpu.stream.download(out.view()).unwrap();
    let (weight, x) = (widen(&weight), widen(&x));
    let want: Vec<f32> = x.chunks(k).flat_map(|row| reference::linear(row, &weight, None)).collect();
    let magnitude: Vec<f32> = x.chunks(k).flat_map(|row| magnitudes(row, &weight)).collect();
    compare("logits", &got, &want, rows, |_, i| sum_error(k) * magnitude[i]);
}

#[test]
fn a_row_does_not_change_with_its_batch() {
    let Some(mut gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let (rows, k) = (2880, 4096);
    let packed = pack(&gpu, &random.bf16(rows * k, 0.05), [rows, k]);
    let x = random.bf16(16 * k, 1.0);
    let all = dense(&mut gpu, &packed, &x, None);
    for row in [0, 7, 8, 15] {
        let alone = dense(&mut gpu, &packed, &x[row * k..][..k], None);
        assert_eq!(alone, all[row * rows..][..rows], "row {row}");
    }
    for _ in 0..200 {
        assert_eq!(dense(&mut gpu, &packed, &x, None), all, "the same bits every time");
    }
}

/// One-hot inputs pick single weights, which must come out exactly: every value, every place in a tile, every scale that is allowed.
#[test]
fn mxfp4_values_are_exact() {
    let Some(mut gpu) = Gpu::open() else { return };
    let (rows, k) = (64, 160);
    let mut weights = Mxfp4::random(&mut Random::new(), [1, rows, k]);
    for (i, scale) in weights.scales.iter_mut().enumerate() {
        *scale = 42 + (i % 127) as u8;
    }
    let packed = weights.pack(&gpu, false).unwrap();
    let decoded = weights.decode();
    for first in (0..k).step_by(16) {
        let mut x = vec![bf16::ZERO; 16 * k];
        (0..16).for_each(|column| x[column * k + first + column] = bf16::ONE);
        let got = dense(&mut gpu, &packed, &x, None);
        let want: Vec<f32> = (0..16)
            .flat_map(|column| (0..rows).map(move |row| (row, first + column)))
            .map(|(row, k_idx)| decoded[row * k + k_idx])
            .collect();
        compare("one-hot", &got, &want, rows, |_, _| 0.0);
    }
}

#[test]
fn scales_out_of_range_are_refused_unless_the_block_is_zero() {
    let Some(gpu) = Gpu::open() else { return };
    let mut weights = Mxfp4::random(&mut Random::new(), [1, 16, 64]);
    weights.scales[3] = 41;
    weights.values[3 * 16..4 * 16].fill(0x80);
    assert!(weights.pack(&gpu, false).is_ok(), "zeros, every other one negative");
    weights.values[3 * 16] = 1;
    assert_eq!(weights.pack(&gpu, false).unwrap_err(), KernelError::ScaleRange { blocks: 1 });
}

/// A whole mixture of experts but for the weighted sum: dispatch, gate and up with SwiGLU, down; each product checked on the inputs
/// that it was given.
fn check_experts(case: &str, picks: &[i32], num_experts: usize, tile_slots: usize, hidden: usize, units: usize) {
    let Some(mut gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let (tokens, slots) = (picks.len() / TOP, picks.len());
    let gate_up = Mxfp4::random(&mut random, [num_experts, 2 * units, hidden]);
    let down = Mxfp4::random(&mut random, [num_experts, hidden, units]);
    let (gate_up_bias, down_bias) = (random.bf16(num_experts * 2 * units, 1.0), random.bf16(num_experts * hidden, 1.0));
    let x = random.bf16(tokens * hidden, 0.3);
    let (packed_gate_up, packed_down) = (gate_up.pack(&gpu, true).unwrap(), down.pack(&gpu, false).unwrap());

    let mut routing = Routing::new(&gpu.stream, tokens, TOP, num_experts, tile_slots).unwrap();
    let experts = gpu.upload(picks);
    let (device_x, device_gate_up_bias, device_down_bias) =
        (gpu.upload(&x), gpu.upload(&gate_up_bias), gpu.upload(&down_bias));
    let (mut activated, mut y) = (gpu.poisoned::<bf16>(slots * units), gpu.poisoned::<bf16>(slots * hidden));
    Dispatch { experts: experts.view(), first_expert: 0, routing: &mut routing }
        .enqueue(&gpu.kernels, &gpu.stream)
        .unwrap();
    SkinnyGemm {
        weights: &packed_gate_up,
        x: device_x.view(),
        bias: Some(device_gate_up_bias.view()),
        out: Output::SwiGlu(activated.view_mut()),
        routing: Some(Grouped { routing: &routing, gather: true, settled: false }),
        workspace: &mut gpu.workspace,
    }
    .enqueue(&gpu.kernels, &gpu.stream)
    .unwrap();
    let mut again = gpu.poisoned::<bf16>(slots * hidden);
    for out in [&mut y, &mut again] {
        SkinnyGemm {
            weights: &packed_down,
            x: activated.view(),
            bias: Some(device_down_bias.view()),
            out: Output::Bf16(out.view_mut()),
            routing: Some(Grouped { routing: &routing, gather: false, settled: true }),
            workspace: &mut gpu.workspace,
        }
        .enqueue(&gpu.kernels, &gpu.stream)
        .unwrap();
    }
    assert_eq!(gpu.download(&y), gpu.download(&again), "{case}: the same bits every time");

    let slot = gpu.stream.download(routing.slot.view()).unwrap();
    let (activated, y) = (gpu.download(&activated), gpu.download(&y));
    let (gate_up, down) = (gate_up.decode(), down.decode());
    let (gate_up_bias, down_bias, x) = (widen(&gate_up_bias), widen(&down_bias), widen(&x));
    for (pair, (expert, slot)) in picks.iter().zip(&slot).enumerate() {
        let (expert, slot) = (*expert as usize, *slot as usize);
        let input = &x[pair / TOP * hidden..][..hidden];
        let matrix = &gate_up[expert * 2 * units * hidden..][..2 * units * hidden];
        let sums = reference::linear(input, matrix, Some(&gate_up_bias[expert * 2 * units..][..2 * units]));
        let magnitude = magnitudes(input, matrix);
        let want = reference::swiglu(&sums, 7.0);
        let got = &activated[slot * units..][..units];
        // SwiGLU's slope is at most 8 x 1.1 in the gate and 7 in the up half; then one rounding, and the fast exponential.
        compare(case, got, &want, units, |want, i| {
            let error = sum_error(hidden) * magnitude[2 * i].max(magnitude[2 * i + 1]);
            16.0 * error + want.abs() * (BF16_ROUNDING + 1e-5) + 1e-6
        });
        let matrix = &down[expert * hidden * units..][..hidden * units];
        let want = reference::linear(got, matrix, Some(&down_bias[expert * hidden..][..hidden]));
        let magnitude = magnitudes(got, matrix);
        compare(case, &y[slot * hidden..][..hidden], &want, hidden, |want, i| {
            want.abs() * BF16_ROUNDING + sum_error(units) * magnitude[i]
        });
    }
}

/// Small enough for compute-sanitizer.
#[test]
fn a_few_strips() {
    for columns in [1, 3, 8, 9, 16] {
        check_dense("few strips", columns, 144, 192);
    }
    let picks: Vec<i32> = (0..12).flat_map(|token| [0, 1 + token % 3, 5, 6 + token % 2]).collect();
    check_experts("few strips", &picks[..4], 8, 8, 192, 96);
    check_experts("few strips", &picks, 8, 8, 192, 96);
    check_experts("few strips", &picks, 8, 16, 192, 96);
    check_experts("few strips", &[3, 1, 2, 0].repeat(30), 4, 24, 192, 96);
}

#[test]
fn experts_of_one_token() {
    check_experts("one token", &[7, 3, 0, 5], 8, 8, 2880, 2880);
}

#[test]
fn experts_of_a_batch_with_empty_ones() {
    let picks: Vec<i32> = (0..12).flat_map(|token| [0, 1 + token % 3, 5, 6 + token % 2]).collect();
    check_experts("batch", &picks, 8, 8, 2880, 2880);
    check_experts("batch", &picks, 8, 16, 2880, 2880);
    check_experts("batch", &picks, 8, 24, 2880, 2880);
}

#[test]
fn every_number_of_slots_in_a_tile() {
    // Tokens of experts 0 to 6; expert 7 has none. Dealt out in turn, so that no token names an expert twice.
    let counts = [1, 8, 9, 16, 17, 24, 25];
    let tokens = counts.iter().sum::<usize>() / TOP;
    let mut picks = vec![0; tokens * TOP];
    let named = counts.iter().enumerate().flat_map(|(expert, count)| vec![expert as i32; *count]);
    named.enumerate().for_each(|(i, expert)| picks[i % tokens * TOP + i / tokens] = expert);
    for tile_slots in [16, 24] {
        check_experts("slots of a tile", &picks, 8, tile_slots, 320, 320);
        check_experts("slots of a tile", &picks, 8, tile_slots, 2880, 736);
    }
}

#[test]
fn all_tokens_to_the_same_experts() {
    check_experts("same", &[3, 1, 2, 0].repeat(37), 4, 16, 320, 320);
    check_experts("same", &[3, 1, 2, 0].repeat(37), 4, 24, 320, 320);
}

#[test]
fn more_tiles_than_blocks() {
    check_experts("tiles of one k-tile", &[3, 1, 2, 0].repeat(600), 4, 16, 64, 32);
    check_experts("tiles of a few", &[3, 1, 2, 0].repeat(900), 4, 24, 192, 96);
}

#[test]
fn a_shard_whose_k_ends_within_a_tile() {
    check_experts("shard", &[3, 1, 2, 0].repeat(5), 4, 8, 320, 96);
    check_experts("shard", &[3, 1, 2, 0].repeat(2), 4, 8, 2880, 736);
    check_experts("shard", &[3, 1, 2, 0].repeat(12), 4, 16, 320, 96);
    check_experts("shard", &[3, 1, 2, 0].repeat(20), 4, 24, 320, 96);
}
