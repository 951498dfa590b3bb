//! Paged attention with sinks, and rotary embedding.

use std::hint::black_box;
use std::marker::PhantomData;

use super::kv_pool::{KvElement, PagePool, PageTable};
use crate::simd::{Kernel, LANES, V};
use crate::vector::{Rounding, exp, fma, greater, map, max, splat, sum, sums, zip};

/// Elements of a head; the same in all gpt-oss models, so loops over it have a fixed length.
pub(crate) const HEAD_DIM: usize = 64;
const CHUNKS: usize = HEAD_DIM / LANES;
/// Query vectors that pass over a page while it is in the first-level cache.
const TILE_QUERIES: usize = 16;

/// Rotates heads by position, in place: with `a = x[i]`, `b = x[i + 32]` for `i < 32`, `a' = a cos_i - b sin_i`, `b' = b cos_i + a sin_i`.
/// Source: `_apply_rotary_emb` in openai/gpt-oss `gpt_oss/torch/model.py`, whose products are rounded like its sums in bf16.
pub(crate) struct Rotate<'a, R> {
    /// `[tokens, stride]`, of which the first `heads * 64` of each row are rotated.
    pub(crate) x: &'a mut [f32],
    pub(crate) stride: usize,
    pub(crate) heads: usize,
    /// `[tokens][cos of 32 pairs, sin of 32 pairs]`.
    pub(crate) angles: &'a [[f32; HEAD_DIM]],
    pub(crate) rounding: PhantomData<R>,
}

impl<R: Rounding> Kernel for Rotate<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<const WIDE: bool>(self) {
        const PAIRS: usize = HEAD_DIM / 2;
        for (row, angles) in self.x.chunks_exact_mut(self.stride).zip(self.angles) {
            let (heads, _) = row[..self.heads * HEAD_DIM].as_chunks_mut::<HEAD_DIM>();
            for head in heads {
                for i in 0..PAIRS {
                    let (cos, sin) = (R::round(angles[i]), R::round(angles[PAIRS + i]));
                    let (a, b) = (head[i], head[PAIRS + i]);
                    head[i] = R::round(R::round(a * cos) - R::round(b * sin));
                    head[PAIRS + i] = R::round(R::round(b * cos) + R::round(a * sin));
                }
            }
        }
    }
}

/// Attention of the tokens of one sequence over its cached keys, all heads of a rank.
///
/// For the query at position `i` and the keys `j` it sees (`j <= i`, and `i - j < window` if there is one):
/// `s_j = q . k_j / 8`, `m = max(sink, max_j s_j)`, `p_j = exp(s_j - m) / (exp(sink - m) + sum_j exp(s_j - m))`, `out = sum_j p_j v_j`.
/// Order: a dot product is 4 fused steps in 16 lanes, then a tree; the sum over exponentials takes key `j` into lane
/// `(j - first visible key) mod 16` in ascending order, then a tree, the sink last; `out` is a chain over ascending keys. Nothing of it depends on
/// pages, on the other queries, or on where a chunk begins.
/// Source: `sdpa` in openai/gpt-oss `gpt_oss/torch/model.py`, whose scores and probabilities are rounded in bf16.
pub(crate) struct Attention<'a, E, R> {
    /// `[tokens, stride]`, rotated; the first `sinks.len() * 64` of each row are the queries.
    pub(crate) queries: &'a [f32],
    pub(crate) stride: usize,
    /// Position of the first token.
    pub(crate) position: usize,
    pub(crate) pool: &'a PagePool<E>,
    pub(crate) table: &'a PageTable,
    /// Layer, counted over those of the pool's group.
    pub(crate) layer: usize,
    /// Keys that a query sees, its own included; `None` for all.
    pub(crate) window: Option<usize>,
    /// One logit a query head.
    pub(crate) sinks: &'a [f32],
    /// Query heads that share a KV head.
    pub(crate) group: usize,
    /// Room for scores, reused from call to call.
    pub(crate) scratch: &'a mut Vec<V>,
    /// `[tokens, sinks.len() * 64]`.
    pub(crate) out: &'a mut [f32],
    pub(crate) rounding: PhantomData<R>,
}

/// One query vector of a tile.
#[derive(Clone, Copy)]
struct Query {
    token: usize,
    head: usize,
    /// First key that it sees.
    start: usize,
    /// One past the last.
    end: usize,
}

impl<E: KvElement, R: Rounding> Kernel for Attention<'_, E, R> {
    type Output = ();

    #[inline(always)]
    fn run<const WIDE: bool>(mut self) {
        let heads = self.sinks.len();
        let tokens = self.out.len() / (heads * HEAD_DIM);
        let tile_tokens = (TILE_QUERIES / self.group).max(1);
        let mut tile = Vec::with_capacity(tile_tokens * self.group);
        for kv_head in 0..heads / self.group {
            for first in (0..tokens).step_by(tile_tokens) {
                tile.clear();
                for token in first..(first + tile_tokens).min(tokens) {
                    let end = self.position + token + 1;
                    let start = self.window.map_or(0, |window| end.saturating_sub(window));
                    tile.extend((0..self.group).map(|i| Query { token, head: kv_head * self.group + i, start, end }));
                }
                self.attend(kv_head, &tile);
            }
        }
    }
}

impl<E: KvElement, R: Rounding> Attention<'_, E, R> {
    #[inline(always)]
    fn attend(&mut self, kv_head: usize, tile: &[Query]) {
        let (Some(first), Some(last)) = (tile.first(), tile.last()) else { return };
        // Vectors of scores a query; queries of a window see keys that start one later each, so their counts differ by one at most.
        let vectors = tile.iter().map(|query| query.end - query.start).max().unwrap_or(0).div_ceil(LANES);
        self.scratch.clear();
        self.scratch.resize(tile.len() * vectors, splat(f32::NEG_INFINITY));
        let page_tokens = self.pool.page_tokens();
        let pages = first.start / page_tokens..last.end.div_ceil(page_tokens);
        for page in pages.clone() {
            let (keys, _) = self.pool.head(self.table.page(page), self.layer, kv_head);
            for (i, query) in tile.iter().enumerate() {
                self.scores(query, keys, page * page_tokens, i * vectors);
            }
        }
        for (i, query) in tile.iter().enumerate() {
            softmax::<R>(&mut self.scratch[i * vectors..(i + 1) * vectors], self.sinks[query.head]);
        }
        let width = self.sinks.len() * HEAD_DIM;
        for query in tile {
            self.out[query.token * width + query.head * HEAD_DIM..][..HEAD_DIM].fill(0.0);
        }
        for page in pages {
            let (_, values) = self.pool.head(self.table.page(page), self.layer, kv_head);
            for (i, query) in tile.iter().enumerate() {
                self.mix(query, values, page * page_tokens, i * vectors);
            }
        }
        for query in tile {
            for out in &mut self.out[query.token * width + query.head * HEAD_DIM..][..HEAD_DIM] {
                *out = R::round(*out);
            }
        }
    }

    /// Scores of one query against the keys of a page that begins at position `base`.
    #[inline(always)]
    fn scores(&mut self, query: &Query, keys: &[[E; HEAD_DIM]], base: usize, scratch: usize) {
        let (from, to) = (query.start.max(base), query.end.min(base + keys.len()));
        if from >= to {
            return;
        }
        let q = &self.queries[query.token * self.stride + query.head * HEAD_DIM..][..HEAD_DIM];
        let (q, _) = q.as_chunks::<LANES>();
        let q: [V; CHUNKS] = std::array::from_fn(|c| q[c]);
        let scores = &mut self.scratch[scratch..].as_flattened_mut()[from - query.start..to - query.start];
        let mut products = [[0.0; LANES]; LANES];
        for (scores, keys) in scores.chunks_mut(LANES).zip(keys[from - base..to - base].chunks(LANES)) {
            for (products, key) in products.iter_mut().zip(keys) {
                // Both `black_box` keep LLVM from vectorising over keys, with gathers: 2.2 ns a key instead of 13.5 (AVX-512, Zen 5).
                let (key, _) = black_box(key).as_chunks::<LANES>();
                let mut sum = [0.0; LANES];
                for c in 0..CHUNKS {
                    sum = fma(q[c], E::load(&key[c]), sum);
                }
                *products = sum;
            }
            let sums = sums(black_box(&products));
            for (score, sum) in scores.iter_mut().zip(sums) {
                // The scale is a power of two: exact.
                *score = R::round(sum) * 0.125;
            }
        }
    }

    /// Adds the values of a page, weighted, to one query's output.
    #[inline(always)]
    fn mix(&mut self, query: &Query, values: &[[E; HEAD_DIM]], base: usize, scratch: usize) {
        let (from, to) = (query.start.max(base), query.end.min(base + values.len()));
        if from >= to {
            return;
        }
        let width = self.sinks.len() * HEAD_DIM;
        let out = &mut self.out[query.token * width + query.head * HEAD_DIM..][..HEAD_DIM];
        let (out, _) = out.as_chunks_mut::<LANES>();
        let mut sums: [V; CHUNKS] = std::array::from_fn(|c| out[c]);
        let weights = &self.scratch[scratch..].as_flattened()[from - query.start..to - query.start];
        for (weight, value) in weights.iter().zip(&values[from - base..to - base]) {
            let (value, _) = value.as_chunks::<LANES>();
            for c in 0..CHUNKS {
                sums[c] = fma(splat(*weight), E::load(&value[c]), sums[c]);
            }
        }
        out.copy_from_slice(&sums);
    }
}

/// Turns scores (minus infinity where there is no key) into probabilities.
#[inline(always)]
fn softmax<R: Rounding>(scores: &mut [V], sink: f32) {
    let mut top = splat(sink);
    for scores in scores.iter() {
        top = zip(top, *scores, greater);
    }
    let top = max(top);
    let mut total = splat(0.0);
    for scores in scores.iter_mut() {
        *scores = map(*scores, |score| exp(score - top));
        total = zip(total, *scores, |total, x| total + x);
    }
    let total = sum(total) + exp(sink - top);
    for scores in scores.iter_mut() {
        *scores = map(*scores, |x| R::round(x / total));
    }
}
