//! Products with few columns: where a decode step spends its time.

use half::bf16;
use kernels::{Grouped, Output, PackedWeights, SkinnyExperts, SkinnyGemm};

use crate::experts::{HIDDEN, Routed, TOP, pack, pack_experts, routed};
use crate::harness::Bench;

const COPIES: usize = 8;

pub(crate) fn dense(bench: &mut Bench) {
    bench.heading("Dense products, bf16 weights");
    for (name, rows, k) in [("qkv", 5120, 2880), ("attention output", 2880, 4096)] {
        let weights: Vec<PackedWeights> = (0..COPIES).map(|_| pack(bench, rows, k)).collect();
        for columns in [1, 2, 4, 8, 16] {
            product(bench, name, &weights, columns, false);
        }
    }
    let head = [pack(bench, 201_088, HIDDEN)];
    for columns in [1, 8, 16] {
        product(bench, "head", &head, columns, true);
    }
    println!();
}

fn product(bench: &mut Bench, name: &str, weights: &[PackedWeights], columns: usize, logits: bool) {
    let [rows, k] = weights[0].shape();
    let (x, bias) = (bench.values(columns * k), bench.values(rows));
    let (mut out, mut out_f32) = (bench.zeros::<bf16>(columns * rows), bench.zeros::<f32>(columns * rows));
    let mut workspace = kernels::Workspace::new(&bench.stream).unwrap();
    let launches = if logits { 4 } else { 5 * weights.len() };
    let us = bench.time(launches, |i| {
        SkinnyGemm {
            weights: &weights[i % weights.len()],
            x: x.view(),
            bias: (!logits).then(|| bias.view()),
            out: if logits { Output::F32(out_f32.view_mut()) } else { Output::Bf16(out.view_mut()) },
            routing: None,
            workspace: &mut workspace,
        }
        .enqueue(&bench.kernels, &bench.stream)
    });
    let out_bytes = columns * rows * if logits { 4 } else { 2 };
    bench.row(name, &format!("{columns} x {k} x {rows}"), us, weights[0].len_bytes() + columns * k * 2 + out_bytes);
}

pub(crate) fn experts(bench: &mut Bench) {
    for (model, num_experts) in [("20b", 32), ("120b", 128)] {
        bench.heading(&format!("Expert products of {model}, MXFP4 weights"));
        let copies = if num_experts == 32 { 4 } else { 1 };
        let gate_up: Vec<_> = (0..copies).map(|_| pack_experts(bench, num_experts, 2 * HIDDEN, true)).collect();
        let down: Vec<_> = (0..copies).map(|_| pack_experts(bench, num_experts, HIDDEN, false)).collect();
        let few = [1, 2, 4, 8, 16, 32, 48, 64, 128].map(|tokens| (tokens, 8));
        for (tokens, tile_slots) in
            few.into_iter().chain([(48, 16), (64, 16), (128, 16), (64, 24), (128, 24), (256, 24)])
        {
            grouped(bench, &gate_up, &down, tokens, tile_slots);
        }
        println!();
    }
}

fn grouped(bench: &mut Bench, gate_up: &[PackedWeights], down: &[PackedWeights], tokens: usize, tile_slots: usize) {
    let num_experts = gate_up[0].len_bytes() / (gate_up[0].shape()[0] * (HIDDEN / 2 + HIDDEN / 32));
    let routed: Vec<Routed> = (0..COPIES).map(|shift| routed(bench, tokens, num_experts, tile_slots, shift)).collect();
    let slots = tokens * TOP;
    let x = bench.values(tokens * HIDDEN);
    let (mut activated, mut y) = (bench.values(slots * HIDDEN), bench.zeros::<bf16>(slots * HIDDEN));
    let bias_up = bench.values(num_experts * 2 * HIDDEN);
    let bias_down = bench.values(num_experts * HIDDEN);
    let mut workspace = kernels::Workspace::new(&bench.stream).unwrap();
    let launches = 2 * COPIES;
    let shape = format!("{tokens} tokens, tiles of {tile_slots}");
    let touched = routed.iter().map(|routed| routed.touched).sum::<usize>() as f64 / COPIES as f64;
    let bytes = |weights: &PackedWeights, rows_in: usize, out: usize| {
        (touched * (weights.len_bytes() / num_experts) as f64) as usize + (rows_in * HIDDEN + slots * out) * 2
    };
    let us = bench.time(launches, |i| {
        SkinnyGemm {
            weights: &gate_up[i % gate_up.len()],
            x: x.view(),
            bias: Some(bias_up.view()),
            out: Output::SwiGlu(activated.view_mut()),
            routing: Some(Grouped { routing: &routed[i % COPIES].routing, gather: true, settled: false }),
            workspace: &mut workspace,
        }
        .enqueue(&bench.kernels, &bench.stream)
    });
    bench.row("gate, up, swiglu", &shape, us, bytes(&gate_up[0], tokens, HIDDEN));
    let us = bench.time(launches, |i| {
        SkinnyGemm {
            weights: &down[i % down.len()],
            x: activated.view(),
            bias: Some(bias_down.view()),
            out: Output::Bf16(y.view_mut()),
            routing: Some(Grouped { routing: &routed[i % COPIES].routing, gather: false, settled: true }),
            workspace: &mut workspace,
        }
        .enqueue(&bench.kernels, &bench.stream)
    });
    bench.row("down", &shape, us, bytes(&down[0], slots, HIDDEN));
    if tile_slots > 8 {
        return; // MXFP4 has one launch for tiles of 8 only
    }
    let us = bench.time(launches, |i| {
        SkinnyExperts {
            gate_up: &gate_up[i % gate_up.len()],
            down: &down[i % down.len()],
            x: x.view(),
            gate_up_bias: Some(bias_up.view()),
            down_bias: Some(bias_down.view()),
            activated: activated.view_mut(),
            out: y.view_mut(),
            routing: &routed[i % COPIES].routing,
            workspace: &mut workspace,
        }
        .enqueue(&bench.kernels, &bench.stream)
    });
    let moved = bytes(&gate_up[0], tokens, HIDDEN) + bytes(&down[0], slots, HIDDEN);
    bench.row("gate, up, swiglu, down in one", &shape, us, moved);
}
