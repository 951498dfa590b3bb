//! Products with many columns: prefill, and decode of large batches.

use half::bf16;
use kernels::{ChooseExperts, ExpertWeights, GatherRows, Output, PackedWeights, TileGemm};

use crate::experts::{HIDDEN, Routed, TOP, pack, pack_experts, routed};
use crate::harness::Bench;

pub(crate) fn dense(bench: &mut Bench) {
    bench.heading("Dense products with many columns, bf16 weights");
    for (name, rows, k) in [("qkv", 5120, 2880), ("attention output", 2880, 4096)] {
        let weights: Vec<PackedWeights> = (0..4).map(|_| pack(bench, rows, k)).collect();
        for columns in [32, 64, 128, 1024, 8192] {
            let (x, bias) = (bench.values(columns * k), bench.values(rows));
            let mut out = bench.zeros::<bf16>(columns * rows);
            let mut workspace = kernels::Workspace::new(&bench.stream).unwrap();
            let us = bench.time(8, |i| {
                TileGemm {
                    weights: &weights[i % weights.len()],
                    x: x.view(),
                    bias: Some(bias.view()),
                    out: Output::Bf16(out.view_mut()),
                    routing: None,
                    workspace: &mut workspace,
                }
                .enqueue(&bench.kernels, &bench.stream)
            });
            let bytes = weights[0].len_bytes() + columns * (k + rows) * 2;
            bench.row_flops(name, &format!("{columns} x {k} x {rows}"), us, bytes, 2 * columns * k * rows);
        }
    }
    router(bench, 8192, 128);
    println!();
}

/// What a long prompt takes in place of the router kernel.
fn router(bench: &mut Bench, tokens: usize, num_experts: usize) {
    let weights = pack(bench, num_experts, HIDDEN);
    let (x, bias, mut logits) =
        (bench.values(tokens * HIDDEN), bench.values(num_experts), bench.zeros(tokens * num_experts));
    let (mut picked, mut shares) = (bench.zeros(tokens * TOP), bench.zeros(tokens * TOP));
    let mut workspace = kernels::Workspace::new(&bench.stream).unwrap();
    let us = bench.time(8, |_| {
        TileGemm {
            weights: &weights,
            x: x.view(),
            bias: Some(bias.view()),
            out: Output::F32(logits.view_mut()),
            routing: None,
            workspace: &mut workspace,
        }
        .enqueue(&bench.kernels, &bench.stream)?;
        ChooseExperts {
            logits: logits.view_mut(),
            num_experts,
            present: None,
            experts: picked.view_mut(),
            weights: shares.view_mut(),
            top: TOP,
            mode: ExpertWeights::Bf16,
        }
        .enqueue(&bench.kernels, &bench.stream)
    });
    let bytes = weights.len_bytes() + tokens * (HIDDEN * 2 + num_experts * 4);
    let shape = format!("{tokens} tokens, {num_experts} experts");
    bench.row_flops("router logits, choice", &shape, us, bytes, 2 * tokens * HIDDEN * num_experts);
}

pub(crate) fn experts(bench: &mut Bench) {
    for (model, num_experts) in [("20b", 32), ("120b", 128)] {
        bench.heading(&format!("Expert products of {model} with many columns, MXFP4 weights"));
        let gate_up = pack_experts(bench, num_experts, 2 * HIDDEN, true);
        let down = pack_experts(bench, num_experts, HIDDEN, false);
        let cases =
            [(128, 32), (128, 64), (256, 64), (512, 64), (512, 128), (1024, 64), (1024, 128), (1024, 256), (8192, 256)];
        for (tokens, tile_slots) in cases {
            grouped(bench, &gate_up, &down, num_experts, tokens, tile_slots);
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
    let (mut gathered, mut activated) = (bench.values(slots * HIDDEN), bench.values(slots * HIDDEN));
    let mut y = bench.zeros::<bf16>(slots * HIDDEN);
    let (bias_up, bias_down) = (bench.values(num_experts * 2 * HIDDEN), bench.values(num_experts * HIDDEN));
    let mut workspace = kernels::Workspace::new(&bench.stream).unwrap();
    let shape = format!("{tokens} tokens, tiles of {tile_slots}");
    let bytes = |weights: &PackedWeights| touched * (weights.len_bytes() / num_experts) + 2 * slots * HIDDEN * 2;
    let us = bench.time(4, |_| {
        GatherRows { x: x.view(), routing: &routing, out: gathered.view_mut(), hidden: HIDDEN }
            .enqueue(&bench.kernels, &bench.stream)
    });
    bench.row("gather rows", &shape, us, (tokens + slots) * HIDDEN * 2);
    let us = bench.time(4, |_| {
        TileGemm {
            weights: gate_up,
            x: gathered.view(),
            bias: Some(bias_up.view()),
            out: Output::SwiGlu(activated.view_mut()),
            routing: Some(&routing),
            workspace: &mut workspace,
        }
        .enqueue(&bench.kernels, &bench.stream)
    });
    bench.row_flops("gate, up, swiglu", &shape, us, bytes(gate_up), 4 * slots * HIDDEN * HIDDEN);
    let us = bench.time(4, |_| {
        TileGemm {
            weights: down,
            x: activated.view(),
            bias: Some(bias_down.view()),
            out: Output::Bf16(y.view_mut()),
            routing: Some(&routing),
            workspace: &mut workspace,
        }
        .enqueue(&bench.kernels, &bench.stream)
    });
    bench.row_flops("down", &shape, us, bytes(down), 2 * slots * HIDDEN * HIDDEN);
}
