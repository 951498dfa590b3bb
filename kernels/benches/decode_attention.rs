//! Decode attention over contexts that do not fit the cache.

use kernels::{DecodeAttention, KvCache, KvFormat, PageTable};

use crate::harness::Bench;

const DIM: usize = 64;
const Q_HEADS: usize = 64;
const KV_HEADS: usize = 8;
const PAGE_TOKENS: usize = 64;

pub(crate) fn run(bench: &mut Bench) {
    for (name, format) in [("bf16", KvFormat::Bf16), ("E4M3", KvFormat::E4M3)] {
        bench.heading(&format!("Decode attention, {name} pages of 64 tokens"));
        for context in [1024, 8192, 32_768] {
            for batch in [1, 8, 32, 128] {
                if batch * context <= 128 * 8192 {
                    attention(bench, format, batch, context, None);
                }
            }
        }
        for batch in [1, 8, 32, 128] {
            attention(bench, format, batch, 1024, Some(128));
        }
        println!();
    }
}

fn attention(bench: &mut Bench, format: KvFormat, batch: usize, context: usize, window: Option<usize>) {
    // Layers rotate through at least 256 MB.
    let key_bytes = KV_HEADS * DIM * 2 * format.bytes();
    let layer_bytes = batch * context * key_bytes;
    let layers = (256_usize << 20).div_ceil(layer_bytes).min(12);
    let width = context.div_ceil(PAGE_TOKENS);
    let pages = batch * width;
    let mut cache = KvCache::new(&bench.stream, format, pages, layers, KV_HEADS, PAGE_TOKENS).unwrap();
    bench.fill_cache(&mut cache);
    // Neighbouring pages of a sequence are scattered.
    let table: Vec<i32> = (0..pages).map(|i| (i * 7919 % pages) as i32).collect();
    let (table, contexts) = (bench.upload(&table), bench.upload(&vec![context as i32; batch]));
    let (q, sinks) = (bench.values(batch * Q_HEADS * DIM), bench.values(Q_HEADS));
    let mut out = bench.zeros(batch * Q_HEADS * DIM);
    let mut workspace = kernels::Workspace::new(&bench.stream).unwrap();
    let us = bench.time(24, |i| {
        DecodeAttention {
            q: q.view(),
            sinks: sinks.view(),
            cache: &cache,
            layer: i % layers,
            contexts: contexts.view(),
            sequences: None,
            table: PageTable { pages: table.view(), width, first_page: None },
            window,
            max_context: context,
            out: out.view_mut(),
            workspace: &mut workspace,
        }
        .enqueue(&bench.kernels, &bench.stream)
    });
    let keys = window.map_or(context, |window| window.min(context));
    let bytes = batch * (keys * key_bytes + 2 * Q_HEADS * DIM * 2);
    let window = window.map_or(String::new(), |window| format!(", window {window}"));
    bench.row("decode attention", &format!("batch {batch}, context {context}{window}"), us, bytes);
}
