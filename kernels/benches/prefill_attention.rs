//! Prefill attention over prompts of one chunk.

use kernels::{KvCache, KvFormat, PrefillAttention, UnpackKv};

use crate::harness::Bench;

const DIM: usize = 64;
const Q_HEADS: usize = 64;
const KV_HEADS: usize = 8;
const PAGE_TOKENS: usize = 64;

pub(crate) fn run(bench: &mut Bench) {
    bench.heading("Prefill attention, bf16 pages of 64 tokens; operations of visible keys only");
    for tokens in [1024, 4096, 8192, 16_384, 32_768] {
        attention(bench, tokens, None);
    }
    attention(bench, 8192, Some(128));
    for tokens in [1024, 8192, 32_768] {
        unpack(bench, tokens);
    }
    println!();
}

fn attention(bench: &Bench, tokens: usize, window: Option<usize>) {
    let pages = tokens.div_ceil(PAGE_TOKENS);
    let mut cache = KvCache::new(&bench.stream, KvFormat::Bf16, pages, 1, KV_HEADS, PAGE_TOKENS).unwrap();
    bench.fill_cache(&mut cache);
    let table: Vec<i32> = (0..pages).map(|i| (i * 7919 % pages) as i32).collect();
    let table = bench.upload(&table);
    let (q, sinks) = (bench.values(tokens * Q_HEADS * DIM), bench.values(Q_HEADS));
    let mut out = bench.zeros(tokens * Q_HEADS * DIM);
    let us = bench.time(2, |_| {
        PrefillAttention {
            q: q.view(),
            sinks: sinks.view(),
            cache: &cache,
            layer: 0,
            start: 0,
            pages: table.view(),
            first_page: 0,
            window,
            out: out.view_mut(),
        }
        .enqueue(&bench.kernels, &bench.stream)
    });
    let visible = window.map_or(tokens * (tokens + 1) / 2, |window| tokens * window - window * (window - 1) / 2);
    let flops = 4 * visible * Q_HEADS * DIM;
    let bytes = tokens * (2 * Q_HEADS + 2 * KV_HEADS) * DIM * 2;
    let window = window.map_or(String::new(), |window| format!(", window {window}"));
    bench.row_flops("prefill attention", &format!("{tokens} tokens{window}"), us, bytes, flops);
}

/// What a cache in E4M3 adds to a prompt's layer.
fn unpack(bench: &Bench, tokens: usize) {
    let pages = tokens.div_ceil(PAGE_TOKENS);
    let cache = |format, layers| KvCache::new(&bench.stream, format, pages, layers, KV_HEADS, PAGE_TOKENS).unwrap();
    let layers = 12;
    let (mut narrow, mut wide) = (cache(KvFormat::E4M3, layers), cache(KvFormat::Bf16, 1));
    bench.fill_cache(&mut narrow);
    let table = bench.upload(&(0..pages as i32).collect::<Vec<_>>());
    let us = bench.time(layers, |layer| {
        UnpackKv { cache: &narrow, layer, pages: table.view(), out: &mut wide }.enqueue(&bench.kernels, &bench.stream)
    });
    bench.row("E4M3 pages to bf16", &format!("{tokens} tokens"), us, tokens * 2 * KV_HEADS * DIM * 3);
}
