//! FP8: packing, quantised activations, products of both, and FP8 weights with bf16 activations.

use device::DeviceBuffer;
use half::bf16;
use kernels::{
    Dispatch, Format, Fp8Gemm, Fp8Output, Fp8Rows, Fp8Source, Grouped, Output, PackFp8, PackedWeights, QuantizeRows,
    Rounding, Routing, SkinnyGemm, TileGemm,
};
use model::{fp8, reference};

use crate::gpu::{BF16_ROUNDING, Gpu, Random, sum_error, widen};
use crate::mxfp4::Mxfp4;
use crate::tile_gemm::{TOP, assert_close, dot, picks, places};

/// What the tensor cores lose of a sum of products: they align them to the largest and keep 14 bits. So a sum of 32 products at
/// most 32 units of 2^-13 of its largest product; of k, as a share of the sum of all magnitudes, no more than 2^-8.
const FP8_SUM_ERROR: f32 = 1.0 / 256.0;

/// Rows of activations as `model::fp8` quantises them, as numbers.
fn quantized(x: &[f32], k: usize) -> Vec<f32> {
    let row = |row: &[f32]| {
        let (values, scales) = fp8::quantize_activations(row);
        let number =
            |(i, value): (usize, &u8)| fp8::decode(*value) * 2f32.powi(i32::from(scales[i / fp8::BLOCK]) - 127);
        values.iter().enumerate().map(number).collect::<Vec<f32>>()
    };
    x.chunks(k).flat_map(row).collect()
}

/// Matrices as `model::fp8` quantises them, as numbers.
fn quantized_matrices(values: &[f32], [_, rows, k]: [usize; 3]) -> Vec<f32> {
    let mut numbers = Vec::with_capacity(values.len());
    for matrix in values.chunks(rows * k) {
        for block_row in matrix.chunks(fp8::BLOCK * k) {
            let (mut bytes, mut scales) = (vec![0; block_row.len()], vec![0; k.div_ceil(fp8::BLOCK)]);
            fp8::quantize_block_row(block_row, k, &mut bytes, &mut scales);
            let scale = |i: usize| 2f32.powi(i32::from(scales[i % k / fp8::BLOCK]) - 127);
            numbers.extend(bytes.iter().enumerate().map(|(i, byte)| fp8::decode(*byte) * scale(i)));
        }
    }
    numbers
}

/// The numbers in rows that a kernel quantised, in the order of k.
fn read_rows(gpu: &Gpu, rows: &Fp8Rows, num_rows: usize, k: usize) -> Vec<f32> {
    let (values, scales) = (gpu.stream.download(rows.values.view()), gpu.stream.download(rows.scales.view()));
    let (values, scales) = (values.unwrap(), scales.unwrap());
    let stride = scales.len() / k.div_ceil(fp8::BLOCK);
    let place = |k: usize| k / 64 * 64 + 16 * (k / 2 % 4) + 4 * (k / 16 % 4) + 2 * (k % 2) + k / 8 % 2;
    let number = |row: usize, k: usize| {
        fp8::decode(values[row * rows.pitch() + place(k)]) * scales[k / fp8::BLOCK * stride + row]
    };
    (0..num_rows).flat_map(|row| (0..k).map(move |k| (row, k))).map(|(row, k)| number(row, k)).collect()
}

fn pack_bf16(gpu: &Gpu, values: &[bf16], shape: [usize; 3], interleaved: bool) -> PackedWeights {
    let values = gpu.upload(values);
    let pack = PackFp8 { source: Fp8Source::Bf16(values.view()), shape, interleaved };
    pack.pack(&gpu.kernels, &gpu.stream).unwrap().0
}

fn pack_mxfp4(gpu: &Gpu, matrices: &Mxfp4, interleaved: bool) -> (PackedWeights, Rounding) {
    let (values, scales) = (gpu.upload(&matrices.values), gpu.upload(&matrices.scales));
    let source = Fp8Source::Mxfp4 { values: values.view(), scales: scales.view() };
    PackFp8 { source, shape: matrices.shape, interleaved }.pack(&gpu.kernels, &gpu.stream).unwrap()
}

fn quantize(gpu: &Gpu, x: &DeviceBuffer<bf16>, k: usize, routing: Option<&Routing>) -> Fp8Rows {
    let rows = x.len() / k * routing.map_or(1, |routing| routing.top);
    // More room than rows: the scales' stride is not the number of rows.
    let mut out = Fp8Rows::new(&gpu.stream, rows + 5, k).unwrap();
    gpu.stream.fill_bytes(out.values.view_mut(), 0xff).unwrap();
    gpu.stream.fill_bytes(out.scales.view_mut(), 0xff).unwrap();
    QuantizeRows { x: x.view(), routing, out: &mut out }.enqueue(&gpu.kernels, &gpu.stream).unwrap();
    out
}

#[test]
fn quantised_rows_are_those_of_the_definition() {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    for (rows, k) in [(1, 2880), (37, 4096), (5, 320), (9, 96), (300, 736)] {
        let mut x = random.bf16(rows * k, 0.3);
        x[k - 1] = bf16::from_f32(3000.0);
        x[..k.min(128)].fill(bf16::ZERO);
        let out = quantize(&gpu, &gpu.upload(&x), k, None);
        let (got, want) = (read_rows(&gpu, &out, rows, k), quantized(&widen(&x), k));
        let wrong = got.iter().zip(&want).position(|(got, want)| got != want);
        assert!(wrong.is_none(), "{rows} x {k}: {:?}", wrong.map(|i| (i / k, i % k, got[i], want[i])));
    }
}

/// Products of packed weights with one-hot rows read every weight back.
fn read_weights(gpu: &mut Gpu, packed: &PackedWeights) -> Vec<f32> {
    let [rows, k] = packed.shape();
    let mut weights = vec![0.0; rows * k];
    for first in (0..k).step_by(16) {
        let columns = 16.min(k - first);
        let mut x = vec![bf16::ZERO; columns * k];
        (0..columns).for_each(|column| x[column * k + first + column] = bf16::ONE);
        let (x, mut out) = (gpu.upload(&x), gpu.poisoned::<f32>(columns * rows));
        let (weights_in, workspace) = (packed, &mut gpu.workspace);
        let out_view = Output::F32(out.view_mut());
        SkinnyGemm { weights: weights_in, x: x.view(), bias: None, out: out_view, routing: None, workspace }
            .enqueue(&gpu.kernels, &gpu.stream)
            .unwrap();
        for (i, value) in gpu.stream.download(out.view()).unwrap().into_iter().enumerate() {
            weights[i % rows * k + first + i / rows] = value;
        }
    }
    weights
}

fn assert_equal(case: &str, got: &[f32], want: &[f32], k: usize) {
    let wrong = got.iter().zip(want).position(|(got, want)| got != want);
    assert!(wrong.is_none(), "{case}: {:?}", wrong.map(|i| (i / k, i % k, got[i], want[i])));
}

#[test]
fn packed_weights_are_those_of_the_definition() {
    let Some(mut gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    for (rows, k) in [(192, 320), (64, 736), (2880, 96)] {
        let mut values = random.bf16(rows * k, 0.05);
        values[rows * k - 1] = bf16::from_f32(1e-9);
        let packed = pack_bf16(&gpu, &values, [1, rows, k], false);
        assert_eq!(packed.format(), Format::Fp8);
        assert_equal("bf16", &read_weights(&mut gpu, &packed), &quantized_matrices(&widen(&values), [1, rows, k]), k);

        let matrices = Mxfp4::random(&mut random, [1, rows, k]);
        let (packed, rounding) = pack_mxfp4(&gpu, &matrices, false);
        assert_eq!(rounding, Rounding::default(), "7 binades are exact");
        assert_equal("mxfp4", &read_weights(&mut gpu, &packed), &matrices.decode(), k);
    }
}

#[test]
fn values_that_do_not_fit_are_counted() {
    let Some(gpu) = Gpu::open() else { return };
    // One block of 128 x 128: a 6 at 2^0, 31 values of 0.5 at 2^-15, all else zero.
    let mut matrices = Mxfp4 { values: vec![0; 8192], scales: vec![127; 512], shape: [1, 128, 128] };
    matrices.values[0] = 7;
    matrices.values[16..32].fill(0x11);
    matrices.values[31] = 0x01;
    matrices.scales[1] = 127 - 15;
    let (_, rounding) = pack_mxfp4(&gpu, &matrices, false);
    assert_eq!(rounding, Rounding { changed: 31, largest: 1.0 });
}

#[test]
fn a_part_of_a_larger_fp8_matrix_keeps_its_values() {
    let Some(mut gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let ([rows, k], grid, offset) = ([192, 736], [2, 7], [64, 96]);
    let values: Vec<u8> = (0..rows * k).map(|_| (random.next() % 0x7f) as u8 | (random.next() as u8 & 0x80)).collect();
    let scales: Vec<u8> = (0..14).map(|_| 118 + random.below(2) as u8).collect();
    let (device_values, device_scales) = (gpu.upload(&values), gpu.upload(&scales));
    let source = Fp8Source::Fp8 { values: device_values.view(), scales: device_scales.view(), grid, offset };
    let (packed, rounding) =
        PackFp8 { source, shape: [1, rows, k], interleaved: false }.pack(&gpu.kernels, &gpu.stream).unwrap();
    let part = model::Fp8Matrix { rows, cols: k, values: values.into(), scales: scales.into(), grid, offset };
    let mut want = vec![0.0; rows * k];
    (0..rows).for_each(|row| part.row_f32(row, &mut want[row * k..][..k]));
    let got = read_weights(&mut gpu, &packed);
    let changed = got.iter().zip(&want).filter(|(got, want)| got != want).count();
    // A block that meets two scales holds the finer one's smallest numbers no longer.
    assert_eq!(changed as u64, rounding.changed);
    assert!(changed < rows * k / 20, "{changed} of {} changed", rows * k);
    assert!(got.iter().zip(&want).all(|(got, want)| (got - want).abs() <= 2f32.powi(119 - 127 - 9)));
}

fn check_dense(case: &str, columns: usize, rows: usize, k: usize) {
    let Some(mut gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let (weight, bias, x) = (random.bf16(rows * k, 0.05), random.bf16(rows, 1.0), random.bf16(columns * k, 1.0));
    let packed = pack_bf16(&gpu, &weight, [1, rows, k], false);
    let (device_x, device_bias) = (gpu.upload(&x), gpu.upload(&bias));
    let (mut out, mut logits) = (gpu.poisoned::<bf16>(columns * rows), gpu.poisoned::<f32>(columns * rows));
    let weight = quantized_matrices(&widen(&weight), [1, rows, k]);
    let (bias, x) = (widen(&bias), widen(&x));
    let mut check = |kind: &str, out: Vec<f32>, logits: Vec<f32>, x: &[f32], share: f32| {
        assert!(out.iter().chain(&logits).all(|value| value.is_finite()), "{case} {kind}: every element is written");
        for place in places(&mut random, columns, rows) {
            let (column, row) = place;
            let (sum, magnitude) = dot(&x[column * k..][..k], &weight[row * k..][..k]);
            let (want, error) = (sum + bias[row], share * magnitude + bias[row].abs() * 1e-6);
            assert_close(case, place, logits[column * rows + row], want, error);
            assert_close(case, place, out[column * rows + row], want, error + want.abs() * BF16_ROUNDING);
        }
    };

    let quantized_x = quantize(&gpu, &device_x, k, None);
    for out in [Fp8Output::Bf16(out.view_mut()), Fp8Output::F32(logits.view_mut())] {
        Fp8Gemm {
            weights: &packed,
            x: &quantized_x,
            slots: columns,
            bias: Some(device_bias.view()),
            out,
            routing: None,
        }
        .enqueue(&gpu.kernels, &gpu.stream)
        .unwrap();
    }
    let got = (gpu.download(&out), gpu.stream.download(logits.view()).unwrap());
    check("fp8 x fp8", got.0, got.1, &quantized(&x, k), FP8_SUM_ERROR);

    // The same weights with bf16 activations.
    gpu.stream.fill_bytes(out.view_mut(), 0xff).unwrap();
    gpu.stream.fill_bytes(logits.view_mut(), 0xff).unwrap();
    for out in [Output::Bf16(out.view_mut()), Output::F32(logits.view_mut())] {
        let (bias, workspace) = (Some(device_bias.view()), &mut gpu.workspace);
        if columns <= 16 {
            SkinnyGemm { weights: &packed, x: device_x.view(), bias, out, routing: None, workspace }
                .enqueue(&gpu.kernels, &gpu.stream)
                .unwrap();
        } else {
            TileGemm { weights: &packed, x: device_x.view(), bias, out, routing: None, workspace }
                .enqueue(&gpu.kernels, &gpu.stream)
                .unwrap();
        }
    }
    let got = (gpu.download(&out), gpu.stream.download(logits.view()).unwrap());
    check("fp8 x bf16", got.0, got.1, &x, 2.0 * sum_error(k));
}

#[test]
fn dense_products_at_every_edge() {
    check_dense("one token", 1, 2880, 2880);
    check_dense("sixteen", 16, 5120, 2880);
    check_dense("out", 17, 2880, 4096);
    check_dense("qkv", 128, 5120, 2880);
    check_dense("qkv", 300, 5120, 2880);
    check_dense("nano", 40, 1024, 320);
    check_dense("one group", 200, 64, 64);
    check_dense("three groups", 130, 192, 512);
}

/// Dispatch, gate and up with SwiGLU, down; each product checked on the inputs that it was given.
fn check_experts(case: &str, picks: &[i32], num_experts: usize, hidden: usize, units: usize) {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let (tokens, slots) = (picks.len() / TOP, picks.len());
    let gate_up = Mxfp4::random(&mut random, [num_experts, 2 * units, hidden]);
    let down = Mxfp4::random(&mut random, [num_experts, hidden, units]);
    let (gate_up_bias, down_bias) = (random.bf16(num_experts * 2 * units, 1.0), random.bf16(num_experts * hidden, 1.0));
    let x = random.bf16(tokens * hidden, 0.3);
    let (packed_gate_up, packed_down) = (pack_mxfp4(&gpu, &gate_up, true).0, pack_mxfp4(&gpu, &down, false).0);

    let mut routing = Routing::new(&gpu.stream, tokens, TOP, num_experts, 128).unwrap();
    let (experts, device_x) = (gpu.upload(picks), gpu.upload(&x));
    let (device_gate_up_bias, device_down_bias) = (gpu.upload(&gate_up_bias), gpu.upload(&down_bias));
    Dispatch { experts: experts.view(), first_expert: 0, routing: &mut routing }
        .enqueue(&gpu.kernels, &gpu.stream)
        .unwrap();
    let gathered = quantize(&gpu, &device_x, hidden, Some(&routing));
    let mut activated = Fp8Rows::new(&gpu.stream, slots + 3, units).unwrap();
    gpu.stream.fill_bytes(activated.values.view_mut(), 0xff).unwrap();
    gpu.stream.fill_bytes(activated.scales.view_mut(), 0xff).unwrap();
    let mut y = gpu.poisoned::<bf16>(slots * hidden);
    Fp8Gemm {
        weights: &packed_gate_up,
        x: &gathered,
        slots,
        bias: Some(device_gate_up_bias.view()),
        out: Fp8Output::SwiGlu(&mut activated),
        routing: Some(&routing),
    }
    .enqueue(&gpu.kernels, &gpu.stream)
    .unwrap();
    Fp8Gemm {
        weights: &packed_down,
        x: &activated,
        slots,
        bias: Some(device_down_bias.view()),
        out: Fp8Output::Bf16(y.view_mut()),
        routing: Some(&routing),
    }
    .enqueue(&gpu.kernels, &gpu.stream)
    .unwrap();

    let slot = gpu.stream.download(routing.slot.view()).unwrap();
    let (activated, y) = (read_rows(&gpu, &activated, slots, units), gpu.download(&y));
    assert!(activated.iter().chain(&y).all(|value| value.is_finite()), "{case}: every element is written");
    let (gate_up, down) = (gate_up.decode(), down.decode());
    let (gate_up_bias, down_bias, x) = (widen(&gate_up_bias), widen(&down_bias), quantized(&widen(&x), hidden));
    for place in places(&mut random, slots, units) {
        let (pair, unit) = place;
        let (expert, slot) = (picks[pair] as usize, slot[pair] as usize);
        let row = expert * 2 * units + 2 * unit;
        let input = &x[pair / TOP * hidden..][..hidden];
        let (gate, gate_magnitude) = dot(input, &gate_up[row * hidden..][..hidden]);
        let (up, up_magnitude) = dot(input, &gate_up[(row + 1) * hidden..][..hidden]);
        let want = reference::swiglu(&[gate + gate_up_bias[row], up + gate_up_bias[row + 1]], 7.0)[0];
        // SwiGLU's slope is at most 16 in both halves together. Then half a step of E4M3: 1/16 of the value, or of the block's
        // smallest numbers, 2^-18 of its largest, which is at most 56.
        let error = 16.0 * FP8_SUM_ERROR * gate_magnitude.max(up_magnitude);
        let rounding = want.abs() / 15.0 + 56.0 * 2f32.powi(-18);
        assert_close(case, place, activated[slot * units + unit], want, error + rounding);
    }
    for place in places(&mut random, slots, hidden) {
        let (pair, h) = place;
        let (expert, slot) = (picks[pair] as usize, slot[pair] as usize);
        let (sum, magnitude) =
            dot(&activated[slot * units..][..units], &down[(expert * hidden + h) * units..][..units]);
        let want = sum + down_bias[expert * hidden + h];
        let error = FP8_SUM_ERROR * magnitude + want.abs() * BF16_ROUNDING;
        assert_close(case, place, y[slot * hidden + h], want, error);
    }
}

/// Small enough for compute-sanitizer: products with FP8 activations and, of every width, with bf16 ones.
#[test]
fn a_few_strips() {
    for columns in [1, 9, 17, 33, 65, 129, 257] {
        check_dense("few strips", columns, 192, 192);
    }
    check_experts("few strips", &picks(&mut Random::new(), 70, 6), 6, 192, 96);
}

#[test]
fn experts_of_the_real_shape() {
    let mut random = Random::new();
    check_experts("20b shape", &picks(&mut random, 97, 6), 6, 2880, 2880);
    check_experts("unequal experts", &picks(&mut random, 700, 8), 8, 2880, 320);
}

#[test]
fn one_token_and_one_expert_for_all() {
    check_experts("one token", &[0, 2, 3, 5], 6, 2880, 320);
    let all: Vec<i32> = (0..150).flat_map(|_| [4, 0, 2, 3]).collect();
    check_experts("the same experts for all", &all, 6, 320, 320);
}

#[test]
fn a_shard_whose_units_end_within_a_block() {
    let mut random = Random::new();
    check_experts("shard of 96", &picks(&mut random, 50, 6), 6, 320, 96);
    check_experts("shard of 736", &picks(&mut random, 150, 6), 6, 320, 736);
}

/// FP8 weights of experts with bf16 activations: SwiGLU and down, for few and for many slots.
fn check_weight_only(case: &str, picks: &[i32], num_experts: usize, tile_slots: usize, hidden: usize, units: usize) {
    let Some(mut gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let (tokens, slots) = (picks.len() / TOP, picks.len());
    let gate_up = Mxfp4::random(&mut random, [num_experts, 2 * units, hidden]);
    let bias = random.bf16(num_experts * 2 * units, 1.0);
    let x = random.bf16(tokens * hidden, 0.3);
    let (packed, packed_mxfp4) = (pack_mxfp4(&gpu, &gate_up, true).0, gate_up.pack(&gpu, true).unwrap());
    let mut routing = Routing::new(&gpu.stream, tokens, TOP, num_experts, tile_slots).unwrap();
    let (experts, device_x, device_bias) = (gpu.upload(picks), gpu.upload(&x), gpu.upload(&bias));
    Dispatch { experts: experts.view(), first_expert: 0, routing: &mut routing }
        .enqueue(&gpu.kernels, &gpu.stream)
        .unwrap();
    let mut gathered = gpu.poisoned::<bf16>(slots * hidden);
    kernels::GatherRows { x: device_x.view(), routing: &routing, out: gathered.view_mut(), hidden }
        .enqueue(&gpu.kernels, &gpu.stream)
        .unwrap();
    let mut outputs = Vec::new();
    for weights in [&packed, &packed_mxfp4] {
        let mut out = gpu.poisoned::<bf16>(slots * units);
        let (bias, workspace) = (Some(device_bias.view()), &mut gpu.workspace);
        let output = Output::SwiGlu(out.view_mut());
        if tile_slots <= 16 {
            let routing = Some(Grouped { routing: &routing, gather: true, settled: false });
            SkinnyGemm { weights, x: device_x.view(), bias, out: output, routing, workspace }
                .enqueue(&gpu.kernels, &gpu.stream)
                .unwrap();
        } else {
            let routing = Some(&routing);
            TileGemm { weights, x: gathered.view(), bias, out: output, routing, workspace }
                .enqueue(&gpu.kernels, &gpu.stream)
                .unwrap();
        }
        outputs.push(gpu.download(&out));
    }
    // The same values in another format: sums differ in their order at most.
    let largest = outputs[1].iter().fold(0.0f32, |max, value| max.max(value.abs()));
    for (i, (got, want)) in outputs[0].iter().zip(&outputs[1]).enumerate() {
        let tolerance = want.abs() * 2.0 * BF16_ROUNDING + largest * 1e-3;
        assert_close(case, (i / units, i % units), *got, *want, tolerance);
    }
}

#[test]
fn fp8_weights_give_what_mxfp4_weights_give() {
    let mut random = Random::new();
    for tile_slots in [8, 16, 32, 64, 128, 256] {
        check_weight_only("experts", &picks(&mut random, 60, 6), 6, tile_slots, 2880, 320);
    }
    check_weight_only("real", &picks(&mut random, 9, 6), 6, 8, 2880, 2880);
}
