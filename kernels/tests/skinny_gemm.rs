//! Dense products with few columns, bf16 and MXFP4; those of experts are tested with `SkinnyExperts`.

use half::bf16;
use kernels::{KernelError, Output, PackedWeights, SkinnyGemm, pack_bf16};
use model::reference;

use crate::gpu::{BF16_ROUNDING, Gpu, Random, compare, magnitudes, sum_error, widen};
use crate::mxfp4::Mxfp4;

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

/// Small enough for compute-sanitizer.
#[test]
fn a_few_strips() {
    for columns in [1, 3, 8, 9, 16] {
        check_dense("few strips", columns, 144, 192);
    }
}
