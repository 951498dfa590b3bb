//! Kernels that touch each token's values once: bound by latency in decode.

use kernels::{
    Combine, CombineNorm, DISPATCH_TOKENS, Dispatch, ExpertWeights, KvCache, KvFormat, PageTable, RmsNorm, RopeKv,
    Router, RouterDispatch, Routing, Sample, SampleRow,
};

use crate::experts::{HIDDEN, TOP, picks};
use crate::harness::Bench;

const LAUNCHES: usize = 100;

pub(crate) fn run(bench: &mut Bench) {
    bench.heading("Token-wise kernels");
    for tokens in [1, 8, 32, 128, 8192] {
        rmsnorm(bench, tokens);
    }
    for (experts, tokens) in [(32, 1), (32, 8), (32, 128), (128, 1), (128, 32), (128, 128)] {
        router(bench, experts, tokens);
    }
    for tokens in [1, 128, 8192] {
        dispatch(bench, tokens);
        combine(bench, tokens);
        rope_kv(bench, KvFormat::Bf16, tokens);
        rope_kv(bench, KvFormat::E4M3, tokens);
    }
    let warm = SampleRow { temperature: 1.0, ..SampleRow::default() };
    for rows in [1, 128] {
        sample(bench, rows, "greedy", SampleRow::default());
        sample(bench, rows, "temperature", warm);
        sample(bench, rows, "top-k 50, top-p 0.9", SampleRow { top_k: 50, top_p: 0.9, ..warm });
        sample(bench, rows, "20 logprobs", SampleRow { logprobs: 20, ..warm });
    }
    println!();
}

fn rmsnorm(bench: &Bench, tokens: usize) {
    let (mut residual, delta) = (bench.values(tokens * HIDDEN), bench.values(tokens * HIDDEN));
    let (weight, mut out) = (bench.values(HIDDEN), bench.zeros(tokens * HIDDEN));
    let us = bench.time(LAUNCHES, |_| {
        RmsNorm {
            residual: residual.view_mut(),
            delta: Some(delta.view()),
            weight: weight.view(),
            out: out.view_mut(),
            eps: 1e-5,
        }
        .enqueue(&bench.kernels, &bench.stream)
    });
    bench.row("rmsnorm", &format!("{tokens} x {HIDDEN}, with residual add"), us, tokens * HIDDEN * 8 + HIDDEN * 2);
}

fn router(bench: &Bench, num_experts: usize, tokens: usize) {
    let (x, weight, bias) =
        (bench.values(tokens * HIDDEN), bench.values(num_experts * HIDDEN), bench.values(num_experts));
    let (mut experts, mut weights) = (bench.zeros(tokens * TOP), bench.zeros(tokens * TOP));
    let dispatches = tokens <= DISPATCH_TOKENS;
    let mut routing = dispatches.then(|| Routing::new(&bench.stream, tokens, TOP, num_experts, 8).unwrap());
    let us = bench.time(LAUNCHES, |_| {
        Router {
            x: x.view(),
            weight: weight.view(),
            bias: bias.view(),
            present: None,
            experts: experts.view_mut(),
            weights: weights.view_mut(),
            logits: None,
            top: TOP,
            mode: ExpertWeights::Bf16,
            dispatch: routing.as_mut().map(|routing| RouterDispatch { first_expert: 0, routing }),
        }
        .enqueue(&bench.kernels, &bench.stream)
    });
    let shape = format!("{tokens} tokens, {num_experts} experts");
    let name = if dispatches { "router + dispatch" } else { "router" };
    bench.row(name, &shape, us, (tokens + num_experts) * HIDDEN * 2 + tokens * TOP * 8);
}

fn dispatch(bench: &Bench, tokens: usize) {
    let num_experts = 128;
    let mut routing = Routing::new(&bench.stream, tokens, TOP, num_experts, 16).unwrap();
    let experts = picks(bench, tokens, num_experts, 0);
    let us = bench.time(LAUNCHES, |_| {
        Dispatch { experts: experts.view(), first_expert: 0, routing: &mut routing }
            .enqueue(&bench.kernels, &bench.stream)
    });
    bench.row("dispatch", &format!("{tokens} tokens, {num_experts} experts"), us, tokens * TOP * 12);
}

fn combine(bench: &Bench, tokens: usize) {
    let (y, mut residual) = (bench.values(tokens * TOP * HIDDEN), bench.values(tokens * HIDDEN));
    let weights = bench.upload(&vec![0.25_f32; tokens * TOP]);
    let slot = bench.upload(&(0..(tokens * TOP) as i32).collect::<Vec<_>>());
    let (norm_weight, mut out) = (bench.values(HIDDEN), bench.zeros(tokens * HIDDEN));
    let us = bench.time(LAUNCHES, |_| {
        CombineNorm {
            combine: Combine {
                y: y.view(),
                weights: weights.view(),
                slot: slot.view(),
                out: out.view_mut(),
                hidden: HIDDEN,
                top: TOP,
            },
            residual: residual.view_mut(),
            norm_weight: norm_weight.view(),
            eps: 1e-5,
        }
        .enqueue(&bench.kernels, &bench.stream)
    });
    bench.row("combine + rmsnorm", &format!("{tokens} x 4 x {HIDDEN}"), us, tokens * HIDDEN * (TOP * 2 + 6));
}

fn rope_kv(bench: &Bench, format: KvFormat, tokens: usize) {
    let (q_heads, kv_heads, page_tokens) = (64, 8, 64);
    let qkv = bench.values(tokens * 5120);
    let mut q = bench.zeros(tokens * 4096);
    let pages = tokens.div_ceil(page_tokens);
    let mut cache = KvCache::new(&bench.stream, format, pages, 12, kv_heads, page_tokens).unwrap();
    let positions = bench.upload(&(0..tokens as i32).collect::<Vec<_>>());
    let sequences = bench.zeros::<i32>(tokens);
    let table = bench.upload(&(0..pages as i32).collect::<Vec<_>>());
    let angles = bench.upload(&vec![[0.6_f32, 0.8]; tokens * 32]);
    let us = bench.time(LAUNCHES, |i| {
        RopeKv {
            qkv: qkv.view(),
            q: q.view_mut(),
            cache: &mut cache,
            layer: i % 12,
            angles: angles.view(),
            positions: positions.view(),
            sequences: Some(sequences.view()),
            table: PageTable { pages: table.view(), width: pages, first_page: None },
        }
        .enqueue(&bench.kernels, &bench.stream)
    });
    let cache = if format == KvFormat::Bf16 { "" } else { ", E4M3" };
    let shape = format!("{tokens} tokens, {q_heads} + 2 x {kv_heads} heads{cache}");
    bench.row("rope + kv write", &shape, us, tokens * (5120 * 2 + 4096 * 2 + 1024 * format.bytes() + 32 * 8));
}

fn sample(bench: &Bench, rows: usize, title: &str, row: SampleRow) {
    let vocab = 201_088;
    let spread: Vec<f32> = (0..vocab).map(|i| ((i * 7919 % 4096) as f32 - 2048.0) / 300.0).collect();
    let logits = bench.upload(&spread.repeat(rows));
    let parameters: Vec<SampleRow> = (0..rows).map(|i| SampleRow { seed: i as u64, ..row }).collect();
    let parameters = bench.upload(&parameters);
    let (mut tokens, mut status, mut logprobs) = (bench.zeros(rows), bench.zeros(rows), bench.zeros(rows));
    let (mut top_tokens, mut top_logprobs) = (bench.zeros(rows * 20), bench.zeros(rows * 20));
    let (mut counts, masks) = (bench.zeros::<u16>(1), bench.zeros::<u32>(1));
    let (bias_tokens, bias_values) = (bench.zeros::<i32>(1), bench.zeros::<f32>(1));
    let us = bench.time(20, |_| {
        Sample {
            logits: logits.view(),
            rows: parameters.view(),
            vocab,
            tokens: tokens.view_mut(),
            status: status.view_mut(),
            logprobs: logprobs.view_mut(),
            top_tokens: top_tokens.view_mut(),
            top_logprobs: top_logprobs.view_mut(),
            counts: counts.view_mut(),
            masks: masks.view(),
            assigned: None,
            bias_tokens: bias_tokens.view(),
            bias_values: bias_values.view(),
        }
        .enqueue(&bench.kernels, &bench.stream)
    });
    bench.row("sample", &format!("{rows} rows, {title}"), us, rows * vocab * 4);
}
