//! Products with many columns: dense and grouped, bf16 and MXFP4.

use half::bf16;
use kernels::{Dispatch, Format, GatherRows, Output, Routing, TileGemm, pack_bf16};
use model::reference;

use crate::gpu::{BF16_ROUNDING, Gpu, Random, sum_error, widen};
use crate::mxfp4::Mxfp4;

pub(crate) const TOP: usize = 4;

/// Places of a matrix to check: its corners, the borders of tiles, and random ones. All of it would take minutes in f64.
pub(crate) fn places(random: &mut Random, columns: usize, rows: usize) -> Vec<(usize, usize)> {
    let edges = |len: usize| -> Vec<usize> {
        let mut edges = vec![0, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, len - 1];
        edges.retain(|edge| *edge < len);
        edges
    };
    let mut places: Vec<(usize, usize)> = Vec::new();
    for column in edges(columns) {
        places.extend(edges(rows).into_iter().map(|row| (column, row)));
    }
    places.extend((0..3000).map(|_| (random.below(columns), random.below(rows))));
    places
}

pub(crate) fn dot(x: &[f32], w: &[f32]) -> (f32, f32) {
    let products = || x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
    (products().sum::<f64>() as f32, products().map(f64::abs).sum::<f64>() as f32)
}

pub(crate) fn assert_close(case: &str, place: (usize, usize), got: f32, want: f32, tolerance: f32) {
    assert!(
        (got - want).abs() <= tolerance,
        "{case} [{}, {}]: got {got}, want {want} +- {tolerance}",
        place.0,
        place.1
    );
}

fn check_dense(case: &str, columns: usize, rows: usize, k: usize) {
    let Some(mut gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let (weight, bias, x) = (random.bf16(rows * k, 0.05), random.bf16(rows, 1.0), random.bf16(columns * k, 1.0));
    let packed = pack_bf16(&gpu.kernels, &gpu.stream, gpu.upload(&weight).view(), [1, rows, k], false).unwrap();
    let (device_x, device_bias) = (gpu.upload(&x), gpu.upload(&bias));
    let mut out = gpu.poisoned::<bf16>(columns * rows);
    let mut logits = gpu.poisoned::<f32>(columns * rows);
    for out in [Output::Bf16(out.view_mut()), Output::F32(logits.view_mut())] {
        TileGemm {
            weights: &packed,
            x: device_x.view(),
            bias: Some(device_bias.view()),
            out,
            routing: None,
            workspace: &mut gpu.workspace,
        }
        .enqueue(&gpu.kernels, &gpu.stream)
        .unwrap();
    }
    let (out, logits) = (gpu.download(&out), gpu.stream.download(logits.view()).unwrap());
    assert!(out.iter().chain(&logits).all(|value| value.is_finite()), "{case}: every element is written");
    let (weight, bias, x) = (widen(&weight), widen(&bias), widen(&x));
    for place in places(&mut random, columns, rows) {
        let (column, row) = place;
        let (sum, magnitude) = dot(&x[column * k..][..k], &weight[row * k..][..k]);
        let (want, error) = (sum + bias[row], sum_error(k) * magnitude);
        assert_close(case, place, logits[column * rows + row], want, error);
        assert_close(case, place, out[column * rows + row], want, error + want.abs() * BF16_ROUNDING);
    }
}

#[test]
fn every_width_and_its_borders() {
    for columns in [17, 32, 33, 64, 65, 128, 129, 256, 300, 1000] {
        check_dense("out", columns, 2880, 4096);
    }
}

#[test]
fn qkv_and_nano() {
    check_dense("qkv", 100, 5120, 2880);
    check_dense("qkv", 600, 5120, 2880);
    check_dense("nano", 40, 1024, 320);
    check_dense("one strip, one step", 20, 16, 64);
}

/// Small enough for compute-sanitizer: every kernel of this operation but for FP8's, more tiles than one, tails everywhere.
#[test]
fn a_few_strips() {
    for columns in [17, 33, 65, 129, 257] {
        check_dense("few strips", columns, 144, 192);
    }
    let picks = picks(&mut Random::new(), 70, 6);
    for tile_slots in [32, 64, 128, 256] {
        check_experts("few strips", &picks, 6, tile_slots, 192, 96);
    }
}

#[test]
fn the_same_bits_every_time() {
    let Some(mut gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let (columns, rows, k) = (96, 2880, 2880);
    let weight = gpu.upload(&random.bf16(rows * k, 0.05));
    let packed = pack_bf16(&gpu.kernels, &gpu.stream, weight.view(), [1, rows, k], false).unwrap();
    let x = gpu.upload(&random.bf16(columns * k, 1.0));
    let mut run = || {
        let mut out = gpu.poisoned::<bf16>(columns * rows);
        TileGemm {
            weights: &packed,
            x: x.view(),
            bias: None,
            out: Output::Bf16(out.view_mut()),
            routing: None,
            workspace: &mut gpu.workspace,
        }
        .enqueue(&gpu.kernels, &gpu.stream)
        .unwrap();
        gpu.stream.download(out.view()).unwrap()
    };
    let first = run();
    for _ in 0..200 {
        assert!(run() == first);
    }
}

fn check_experts(case: &str, picks: &[i32], num_experts: usize, tile_slots: usize, hidden: usize, units: usize) {
    check_experts_as(Format::Mxfp4, case, picks, num_experts, tile_slots, [hidden, units]);
}

/// Dispatch, gather, gate and up with SwiGLU, down; each product checked on the inputs that it was given.
fn check_experts_as(
    format: Format,
    case: &str,
    picks: &[i32],
    num_experts: usize,
    tile_slots: usize,
    [hidden, units]: [usize; 2],
) {
    let Some(mut gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let (tokens, slots) = (picks.len() / TOP, picks.len());
    let gate_up = Mxfp4::random(&mut random, [num_experts, 2 * units, hidden]);
    let down = Mxfp4::random(&mut random, [num_experts, hidden, units]);
    let (gate_up_bias, down_bias) = (random.bf16(num_experts * 2 * units, 1.0), random.bf16(num_experts * hidden, 1.0));
    let x = random.bf16(tokens * hidden, 0.3);
    let pack = |matrix: &Mxfp4, interleaved| matrix.pack_as(format, &gpu, interleaved).unwrap();
    let (packed_gate_up, packed_down) = (pack(&gate_up, true), pack(&down, false));

    let mut routing = Routing::new(&gpu.stream, tokens, TOP, num_experts, tile_slots).unwrap();
    let experts = gpu.upload(picks);
    let (device_x, device_gate_up_bias, device_down_bias) =
        (gpu.upload(&x), gpu.upload(&gate_up_bias), gpu.upload(&down_bias));
    let mut gathered = gpu.poisoned::<bf16>(slots * hidden);
    let (mut activated, mut y) = (gpu.poisoned::<bf16>(slots * units), gpu.poisoned::<bf16>(slots * hidden));
    Dispatch { experts: experts.view(), first_expert: 0, routing: &mut routing }
        .enqueue(&gpu.kernels, &gpu.stream)
        .unwrap();
    GatherRows { x: device_x.view(), routing: &routing, out: gathered.view_mut(), hidden }
        .enqueue(&gpu.kernels, &gpu.stream)
        .unwrap();
    TileGemm {
        weights: &packed_gate_up,
        x: gathered.view(),
        bias: Some(device_gate_up_bias.view()),
        out: Output::SwiGlu(activated.view_mut()),
        routing: Some(&routing),
        workspace: &mut gpu.workspace,
    }
    .enqueue(&gpu.kernels, &gpu.stream)
    .unwrap();
    TileGemm {
        weights: &packed_down,
        x: activated.view(),
        bias: Some(device_down_bias.view()),
        out: Output::Bf16(y.view_mut()),
        routing: Some(&routing),
        workspace: &mut gpu.workspace,
    }
    .enqueue(&gpu.kernels, &gpu.stream)
    .unwrap();

    let slot = gpu.stream.download(routing.slot.view()).unwrap();
    let (activated, y) = (gpu.download(&activated), gpu.download(&y));
    assert!(activated.iter().chain(&y).all(|value| value.is_finite()), "{case}: every element is written");
    let (gate_up, down) = (gate_up.decode(), down.decode());
    let (gate_up_bias, down_bias, x) = (widen(&gate_up_bias), widen(&down_bias), widen(&x));
    for place in places(&mut random, slots, units) {
        let (pair, unit) = place;
        let (expert, slot) = (picks[pair] as usize, slot[pair] as usize);
        let row = expert * 2 * units + 2 * unit;
        let input = &x[pair / TOP * hidden..][..hidden];
        let (gate, gate_magnitude) = dot(input, &gate_up[row * hidden..][..hidden]);
        let (up, up_magnitude) = dot(input, &gate_up[(row + 1) * hidden..][..hidden]);
        let want = reference::swiglu(&[gate + gate_up_bias[row], up + gate_up_bias[row + 1]], 7.0)[0];
        // As in the tests of skinny_gemm: SwiGLU's slope is at most 16 in both halves together.
        let error = 16.0 * sum_error(hidden) * gate_magnitude.max(up_magnitude);
        let rounding = want.abs() * (BF16_ROUNDING + 1e-5) + 1e-6;
        assert_close(case, place, activated[slot * units + unit], want, error + rounding);
    }
    for place in places(&mut random, slots, hidden) {
        let (pair, h) = place;
        let (expert, slot) = (picks[pair] as usize, slot[pair] as usize);
        let (sum, magnitude) =
            dot(&activated[slot * units..][..units], &down[(expert * hidden + h) * units..][..units]);
        let want = sum + down_bias[expert * hidden + h];
        let error = sum_error(units) * magnitude + want.abs() * BF16_ROUNDING;
        assert_close(case, place, y[slot * hidden + h], want, error);
    }
}

/// Four distinct experts a token, unevenly spread; expert 1 gets none.
pub(crate) fn picks(random: &mut Random, tokens: usize, num_experts: usize) -> Vec<i32> {
    let mut picks = Vec::new();
    for _ in 0..tokens {
        let mut row: Vec<i32> = Vec::new();
        while row.len() < TOP {
            let expert = (random.below(num_experts) * random.below(num_experts) / num_experts) as i32;
            if expert != 1 && !row.contains(&expert) {
                row.push(expert);
            }
        }
        picks.extend(row);
    }
    picks
}

#[test]
fn experts_of_every_width() {
    let mut random = Random::new();
    for tile_slots in [32, 64, 128, 256] {
        check_experts("experts", &picks(&mut random, 300, 8), 8, tile_slots, 2880, 320);
    }
}

/// Pieces of the line of stages: shorter than an item and longer, in an item's middle, and fewer than blocks.
#[test]
fn experts_whose_tiles_are_cut() {
    for tile_slots in [32, 64] {
        check_experts("pieces of an item", &[0, 1, 2, 3].repeat(20), 4, tile_slots, 2880, 96);
        check_experts("pieces of many", &picks(&mut Random::new(), 900, 8), 8, tile_slots, 192, 96);
        check_experts("one stage", &[0, 1, 2, 3].repeat(9), 4, tile_slots, 64, 32);
    }
}

#[test]
fn real_experts() {
    let mut random = Random::new();
    check_experts("20b shape", &picks(&mut random, 97, 6), 6, 64, 2880, 2880);
}

#[test]
fn a_shard_whose_k_ends_within_a_tile() {
    let mut random = Random::new();
    check_experts("shard", &picks(&mut random, 50, 6), 6, 32, 320, 96);
}

/// bf16 tiles are half a step: 1440 and 736 units are what two and four ranks have of an expert of gpt-oss.
#[test]
fn a_shard_whose_k_ends_within_a_step() {
    for columns in [17, 33, 65, 129, 257] {
        for k in [32, 96, 736, 1440] {
            check_dense("half a step", columns, 144, k);
        }
    }
    let picks = picks(&mut Random::new(), 300, 6);
    for tile_slots in [32, 64, 128, 256] {
        for units in [736, 1440] {
            check_experts_as(Format::Bf16, "bf16 shard", &picks, 6, tile_slots, [320, units]);
        }
    }
}
