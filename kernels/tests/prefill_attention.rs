//! Prefill attention: chunks, windows, sinks, page sizes; memory outside the context holds NaNs.

use half::bf16;
use kernels::{KvCache, KvFormat, PrefillAttention};
use model::reference::{self, AttentionShape};

use crate::gpu::{Gpu, Random, compare, widen};

const DIM: usize = 64;

struct Case {
    start: usize,
    tokens: usize,
    q_heads: usize,
    kv_heads: usize,
    page_tokens: usize,
    window: Option<usize>,
    /// Pages in front that a window group no longer has.
    first_page: usize,
    /// By which keys behind the first 128 are larger.
    growth: f32,
}

const OF_20B: Case =
    Case { start: 0, tokens: 1, q_heads: 64, kv_heads: 8, page_tokens: 64, window: None, first_page: 0, growth: 1.0 };

fn check(name: &str, case: &Case) {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let Case { start, tokens, q_heads, kv_heads, page_tokens, window, first_page, growth } = *case;
    let (layers, layer, context) = (2, 1, start + tokens);
    let num_pages = context.div_ceil(page_tokens) - first_page;
    let mut pages: Vec<i32> = (0..num_pages as i32 + 3).collect();
    for i in (1..pages.len()).rev() {
        pages.swap(i, random.below(i + 1));
    }
    pages.truncate(num_pages);
    let mut keys = random.bf16(context * kv_heads * DIM, 1.0);
    for key in keys.iter_mut().skip(128 * kv_heads * DIM) {
        *key = bf16::from_f32(key.to_f32() * growth);
    }
    let values = random.bf16(context * kv_heads * DIM, 1.0);
    let q = random.bf16(tokens * q_heads * DIM, 2.0);
    let sinks: Vec<bf16> = (0..q_heads).map(|_| bf16::from_f32(3.0 + random.normal(3.0))).collect();

    let mut cache = KvCache::new(&gpu.stream, KvFormat::Bf16, num_pages + 3, layers, kv_heads, page_tokens).unwrap();
    let mut pool = vec![bf16::NAN; cache.pool.len() / 2];
    for position in window.map_or(0, |window| (start + 1).saturating_sub(window))..context {
        let page = pages[position / page_tokens - first_page] as usize;
        for head in 0..kv_heads {
            for (plane, source) in [&keys, &values].into_iter().enumerate() {
                let row =
                    (((page * layers + layer) * kv_heads + head) * 2 + plane) * page_tokens + position % page_tokens;
                pool[row * DIM..][..DIM].copy_from_slice(&source[(position * kv_heads + head) * DIM..][..DIM]);
            }
        }
    }
    gpu.stream.copy_from_host(cache.pool.view_mut(), bytemuck::cast_slice(&pool)).unwrap();
    let (device_q, device_sinks, device_pages) = (gpu.upload(&q), gpu.upload(&sinks), gpu.upload(&pages));
    let mut out = gpu.poisoned::<bf16>(q.len());
    PrefillAttention {
        q: device_q.view(),
        sinks: device_sinks.view(),
        cache: &cache,
        layer,
        start,
        pages: device_pages.view(),
        first_page,
        window,
        out: out.view_mut(),
    }
    .enqueue(&gpu.kernels, &gpu.stream)
    .unwrap();
    let got = gpu.download(&out);

    let (keys, values, q, sinks) = (widen(&keys), widen(&values), widen(&q), widen(&sinks));
    let shape = AttentionShape { num_heads: q_heads, num_kv_heads: kv_heads, head_dim: DIM, window };
    let row = q_heads * DIM;
    // The borders of tiles and some in between: every row in f64 would take minutes.
    let mut rows: Vec<usize> = (0..tokens.min(18)).chain((0..12).map(|_| random.below(tokens))).collect();
    rows.extend([23, 24, 47, 48, 127, 128, tokens - 1].into_iter().filter(|token| *token < tokens));
    for token in rows {
        let visible = (start + token + 1) * kv_heads * DIM;
        let want = reference::attention(&q[token * row..][..row], &keys[..visible], &values[..visible], &sinks, shape);
        // As in the tests of decode attention: probabilities and output are rounded to bf16.
        let name = format!("{name}: token {token}");
        compare(&name, &got[token * row..][..row], &want, DIM, |want, _| 0.01 * want.abs() + 0.006);
    }
    assert!(got.iter().all(|value| value.is_finite()), "{name}: every element is written");
}

#[test]
fn one_token() {
    check("one", &OF_20B);
}

#[test]
fn tile_borders() {
    for tokens in [2, 15, 16, 17, 23, 24, 25, 127, 128, 129, 300] {
        check("tokens", &Case { tokens, ..OF_20B });
    }
}

#[test]
fn chunks_behind_a_context() {
    check("chunk", &Case { start: 1000, tokens: 70, ..OF_20B });
    check("chunk", &Case { start: 127, tokens: 2, ..OF_20B });
    check("chunk", &Case { start: 128, tokens: 200, ..OF_20B });
}

/// Scores have a standard deviation of 2 x growth. The maximum of the first 128 keys serves later ones too, until a weight becomes too
/// large for it: 2^64 at growth 12, more than f32 holds at growth 40.
#[test]
fn scores_that_outgrow_the_first_maximum() {
    for growth in [0.01, 4.0, 12.0, 40.0] {
        check("growth", &Case { start: 300, tokens: 300, growth, ..OF_20B });
        check("growth in a window", &Case { start: 300, tokens: 70, window: Some(256), growth, ..OF_20B });
    }
}

#[test]
fn windows() {
    let window = Case { window: Some(128), ..OF_20B };
    check("window", &Case { tokens: 300, ..window });
    check("window", &Case { start: 129, tokens: 64, ..window });
    check("window", &Case { start: 127, tokens: 300, ..window });
    check("dropped pages", &Case { start: 1000, tokens: 40, first_page: 13, ..window });
}

#[test]
fn page_sizes_and_heads() {
    check("page 32", &Case { start: 50, tokens: 90, page_tokens: 32, ..OF_20B });
    check("page 128", &Case { start: 50, tokens: 190, page_tokens: 128, ..OF_20B });
    check("page 256", &Case { start: 50, tokens: 390, page_tokens: 256, ..OF_20B });
    check("nano", &Case { start: 3, tokens: 200, q_heads: 8, kv_heads: 4, ..OF_20B });
    check("one head", &Case { tokens: 200, q_heads: 1, kv_heads: 1, window: Some(128), ..OF_20B });
}
