//! FP8 products: both operands for prefill, weights only for decode.

use half::bf16;
use kernels::{
    Fp8Gemm, Fp8Output, Fp8Rows, Fp8Source, Grouped, Output, PackFp8, PackedWeights, QuantizeRows, SkinnyGemm,
};

use crate::experts::{HIDDEN, Routed, TOP, routed};
use crate::harness::Bench;

fn pack(bench: &Bench, rows: usize, k: usize) -> PackedWeights {
    let values = bench.values(rows * k);
    let pack = PackFp8 { source: Fp8Source::Bf16(values.view()), shape: [1, rows, k], interleaved: false };
    pack.pack(&bench.kernels, &bench.stream).unwrap().0
}

fn pack_experts(bench: &Bench, num_experts: usize, rows: usize, interleaved: bool) -> PackedWeights {
    let mut values = bench.zeros::<u8>(num_experts * rows * HIDDEN / 2);
    bench.fill(&mut values);
    let scales = bench.upload(&vec![119_u8; num_experts * rows * HIDDEN / 32]);
    let source = Fp8Source::Mxfp4 { values: values.view(), scales: scales.view() };
    PackFp8 { source, shape: [num_experts, rows, HIDDEN], interleaved }.pack(&bench.kernels, &bench.stream).unwrap().0
}

fn quantize(bench: &Bench, rows: usize, k: usize) -> Fp8Rows {
    let (x, mut out) = (bench.values(rows * k), Fp8Rows::new(&bench.stream, rows, k).unwrap());
    QuantizeRows { x: x.view(), routing: None, out: &mut out }.enqueue(&bench.kernels, &bench.stream).unwrap();
    bench.stream.synchronize().unwrap();
    out
}

pub(crate) fn dense(bench: &mut Bench) {
    bench.heading("Dense products, FP8 weights and activations");
    for (name, rows, k) in [("qkv", 5120, 2880), ("attention output", 2880, 4096), ("large", 8192, 8192)] {
        let weights: Vec<PackedWeights> = (0..4).map(|_| pack(bench, rows, k)).collect();
        for columns in [128, 1024, 8192] {
            let (x, bias) = (quantize(bench, columns, k), bench.values(rows));
            let mut out = bench.zeros::<bf16>(columns * rows);
            let us = bench.time(8, |i| {
                Fp8Gemm {
                    weights: &weights[i % weights.len()],
                    x: &x,
                    slots: columns,
                    bias: Some(bias.view()),
                    out: Fp8Output::Bf16(out.view_mut()),
                    routing: None,
                }
                .enqueue(&bench.kernels, &bench.stream)
            });
            let bytes = weights[0].len_bytes() + columns * (k + 2 * rows);
            bench.row_flops(name, &format!("{columns} x {k} x {rows}"), us, bytes, 2 * columns * k * rows);
        }
    }
    for (name, k) in [("quantise", 2880), ("quantise", 4096)] {
        let (tokens, mut out) = (8192, Fp8Rows::new(&bench.stream, 8192, k).unwrap());
        let x = bench.values(tokens * k);
        let us = bench.time(8, |_| {
            QuantizeRows { x: x.view(), routing: None, out: &mut out }.enqueue(&bench.kernels, &bench.stream)
        });
        bench.row(name, &format!("{tokens} x {k}"), us, tokens * k * 3);
    }
    println!();
}

pub(crate) fn experts(bench: &mut Bench) {
    for (model, num_experts) in [("20b", 32), ("120b", 128)] {
        bench.heading(&format!("Expert products of {model}, FP8 weights and activations"));
        let gate_up = pack_experts(bench, num_experts, 2 * HIDDEN, true);
        let down = pack_experts(bench, num_experts, HIDDEN, false);
        for (tokens, tile_slots) in [(256, 128), (1024, 128), (4096, 128), (8192, 128), (16_384, 128)] {
            grouped(bench, &gate_up, &down, num_experts, tokens, tile_slots);
        }
        println!();
        bench.heading(&format!("Expert products of {model}, FP8 weights, bf16 activations"));
        for (tokens, tile_slots) in [(1, 8), (8, 8), (32, 8), (64, 16), (128, 16)] {
            weight_only(bench, &gate_up, num_experts, tokens, tile_slots);
        }
        println!();
    }
}

fn grouped(
    bench: &mut Bench,
    gate_up: &PackedWeights,
    down: &PackedWeights,
    num_experts: usize,
    tokens: usize,
    tile_slots: usize,
) {
    let slots = tokens * TOP;
    let Routed { routing, touched } = routed(bench, tokens, num_experts, tile_slots, 0);
    let x = bench.values(tokens * HIDDEN);
    let mut gathered = Fp8Rows::new(&bench.stream, slots, HIDDEN).unwrap();
    let mut activated = Fp8Rows::new(&bench.stream, slots, HIDDEN).unwrap();
    let mut y = bench.zeros::<bf16>(slots * HIDDEN);
    let (bias_up, bias_down) = (bench.values(num_experts * 2 * HIDDEN), bench.values(num_experts * HIDDEN));
    let shape = format!("{tokens} tokens, tiles of {tile_slots}");
    let weight_bytes = |weights: &PackedWeights| touched * (weights.len_bytes() / num_experts);
    let us = bench.time(4, |_| {
        QuantizeRows { x: x.view(), routing: Some(&routing), out: &mut gathered }.enqueue(&bench.kernels, &bench.stream)
    });
    bench.row("gather, quantise", &shape, us, (2 * tokens + slots) * HIDDEN);
    let us = bench.time(4, |_| {
        Fp8Gemm {
            weights: gate_up,
            x: &gathered,
            slots,
            bias: Some(bias_up.view()),
            out: Fp8Output::SwiGlu(&mut activated),
            routing: Some(&routing),
        }
        .enqueue(&bench.kernels, &bench.stream)
    });
    let bytes = weight_bytes(gate_up) + 2 * slots * HIDDEN;
    bench.row_flops("gate, up, swiglu", &shape, us, bytes, 4 * slots * HIDDEN * HIDDEN);
    let us = bench.time(4, |_| {
        Fp8Gemm {
            weights: down,
            x: &activated,
            slots,
            bias: Some(bias_down.view()),
            out: Fp8Output::Bf16(y.view_mut()),
            routing: Some(&routing),
        }
        .enqueue(&bench.kernels, &bench.stream)
    });
    bench.row_flops("down", &shape, us, weight_bytes(down) + 3 * slots * HIDDEN, 2 * slots * HIDDEN * HIDDEN);
}

fn weight_only(bench: &mut Bench, gate_up: &PackedWeights, num_experts: usize, tokens: usize, tile_slots: usize) {
    let slots = tokens * TOP;
    let Routed { routing, touched } = routed(bench, tokens, num_experts, tile_slots, 0);
    let (x, bias) = (bench.values(tokens * HIDDEN), bench.values(num_experts * 2 * HIDDEN));
    let mut out = bench.zeros::<bf16>(slots * HIDDEN);
    let mut workspace = kernels::Workspace::new(&bench.stream).unwrap();
    let us = bench.time(4, |_| {
        SkinnyGemm {
            weights: gate_up,
            x: x.view(),
            bias: Some(bias.view()),
            out: Output::SwiGlu(out.view_mut()),
            routing: Some(Grouped { routing: &routing, gather: true, settled: false }),
            workspace: &mut workspace,
        }
        .enqueue(&bench.kernels, &bench.stream)
    });
    let bytes = touched * (gate_up.len_bytes() / num_experts) + 3 * slots * HIDDEN * 2;
    bench.row("gate, up, swiglu", &format!("{tokens} tokens, tiles of {tile_slots}"), us, bytes);
}
