//! Each kernel against its definition in `model::reference`, on every vector unit of this CPU, whose results must be equal bit for bit.

use std::iter::once;
use std::marker::PhantomData;
use std::ops::Range;
use std::slice::from_ref;

use half::bf16;
use model::reference::{self, AttentionShape};
use types::{KvDtype, KvLayout, PageGroup, PageId, SlotId};

use super::attention::{Attention, HEAD_DIM, Rotate};
use super::experts::SwiGlu;
use super::kv_pool::KvPool;
use super::matmul::{MatMul, Panels};
use super::norm::RmsNorm;
use crate::simd::Simd;
use crate::vector::{Exact, ToBf16};

/// Numbers in [-1, 1) from a fixed seed (a linear congruential generator; Knuth's constants).
fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn bf16s(seed: u64, len: usize) -> Vec<bf16> {
    numbers(seed, len).into_iter().map(bf16::from_f32).collect()
}

/// Runs `kernel` on every vector unit; all must give the same bits, which are returned.
fn on_all_units(what: &str, kernel: impl Fn(Simd) -> Vec<f32>) -> Vec<f32> {
    let mut results = Simd::available().into_iter().map(|simd| (simd.name(), kernel(simd)));
    let (first_name, first) = results.next().expect("there is a portable one");
    for (name, result) in results {
        let at = first.iter().zip(&result).position(|(a, b)| a.to_bits() != b.to_bits());
        let values = at.map(|at| (at, first[at], result[at]));
        assert_eq!(values, None, "{what}: (index, {first_name}, {name})");
    }
    first
}

fn assert_close(what: &str, got: &[f32], want: &[f32], tolerance: impl Fn(usize) -> f32) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let bound = tolerance(i);
        assert!((got - want).abs() <= bound, "{what}: [{i}] is {got}, reference {want}, allowed {bound:e}");
    }
}

fn matmul(simd: Simd, x: &[f32], weights: &Panels, slices: &[Range<usize>], bias: &[f32]) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.len() / weights.depth() * weights.rows()];
    simd.run(MatMul { x, weights, slices, bias, out: &mut out, rounding: PhantomData::<Exact> });
    out
}

struct Matrix {
    rows: usize,
    depth: usize,
    values: Vec<bf16>,
}

impl Matrix {
    fn new(rows: usize, depth: usize) -> Self {
        Self { rows, depth, values: bf16s(rows as u64, rows * depth) }
    }

    fn panels(&self) -> Panels {
        Panels::pack(self.rows, self.depth, |row, out| {
            out.copy_from_slice(&self.values[row * self.depth..][..self.depth])
        })
    }

    fn wide(&self) -> Vec<f32> {
        self.values.iter().map(|value| value.to_f32()).collect()
    }
}

#[test]
fn matmul_agrees_with_the_reference() {
    // Tails of panels (rows), of four panels, of four tokens, of the block of 64 tokens; slices of unequal length and empty ones.
    let halves = |depth: usize| vec![0..depth / 2, depth / 2..depth];
    let eight = vec![0..64, 64..96, 96..96, 96..128, 128..192, 192..224, 224..224, 224..320];
    // Name, tokens, rows, depth, slices.
    type Case = (&'static str, usize, usize, usize, Vec<Range<usize>>);
    let cases: [Case; 7] = [
        ("one_token", 1, 64, 320, once(0..320).collect()),
        ("row_tail", 5, 40, 64, once(0..64).collect()),
        ("router", 9, 8, 320, once(0..320).collect()),
        ("token_tail", 67, 80, 32, once(0..32).collect()),
        ("block_edge", 64, 16, 32, once(0..32).collect()),
        ("two_slices", 3, 320, 128, halves(128)),
        ("eight_slices", 6, 320, 320, eight),
    ];
    for (name, tokens, rows, depth, slices) in cases {
        let matrix = Matrix::new(rows, depth);
        let (panels, wide, bias) = (matrix.panels(), matrix.wide(), numbers(3, rows));
        let x = numbers(tokens as u64, tokens * depth);
        let got = on_all_units(name, |simd| matmul(simd, &x, &panels, &slices, &bias));
        for (token, x) in x.chunks_exact(depth).enumerate() {
            let want = reference::linear(x, &wide, Some(&bias));
            // At most `depth + 4` roundings, each of at most half an ulp of the sum of absolute terms, which is below `depth + 1`.
            let bound = (depth + 4) as f32 * f32::EPSILON / 2.0 * (depth + 1) as f32;
            assert_close(name, &got[token * rows..][..rows], &want, |_| bound);
        }
    }
}

#[test]
fn a_token_has_the_same_product_in_any_batch() {
    let matrix = Matrix::new(80, 320);
    let (panels, x) = (matrix.panels(), numbers(1, 7 * 320));
    let slices = vec![0..64, 64..128, 128..224, 224..320];
    for simd in Simd::available() {
        let together = matmul(simd, &x, &panels, &slices, &[]);
        for (token, x) in x.chunks_exact(320).enumerate() {
            assert_eq!(
                matmul(simd, x, &panels, &slices, &[]),
                together[token * 80..][..80],
                "{} token {token}",
                simd.name()
            );
        }
    }
}

#[test]
fn partial_sums_of_ranks_make_the_sum_of_one() {
    // What `model::sharding` promises: two ranks with four slices each, added, equal one rank with eight.
    let matrix = Matrix::new(32, 320);
    let slices = model::split(320, 8);
    let x = numbers(5, 320);
    let simd = Simd::detect();
    let whole = matmul(simd, &x, &matrix.panels(), &slices, &[]);
    let part = |depth: Range<usize>, slices: &[Range<usize>]| {
        let panels = Panels::pack(32, depth.len(), |row, out| {
            out.copy_from_slice(&matrix.values[row * 320 + depth.start..row * 320 + depth.end]);
        });
        let own: Vec<_> = slices.iter().map(|slice| slice.start - depth.start..slice.end - depth.start).collect();
        matmul(simd, &x[depth], &panels, &own, &[])
    };
    let (left, right) = (part(0..160, &slices[..4]), part(160..320, &slices[4..]));
    let sum: Vec<f32> = left.iter().zip(&right).map(|(left, right)| left + right).collect();
    assert_eq!(sum, whole);
}

#[test]
fn rmsnorm_agrees_with_the_reference() {
    for hidden in [16, 320, 2880] {
        let (x, weight) = (numbers(1, 2 * hidden), numbers(2, hidden));
        let got = on_all_units("rmsnorm", |simd| {
            let mut out = vec![f32::NAN; x.len()];
            simd.run(RmsNorm { x: &x, weight: &weight, eps: 1e-5, out: &mut out, rounding: PhantomData::<Exact> });
            out
        });
        for (x, got) in x.chunks_exact(hidden).zip(got.chunks_exact(hidden)) {
            let want = reference::rmsnorm(x, &weight, 1e-5);
            // All terms of the mean are positive: its relative error is at most (hidden / 16 + 6) roundings, halved by the root.
            let relative = (hidden as f32 / 16.0 + 16.0) * f32::EPSILON / 2.0;
            assert_close("rmsnorm", got, &want, |i| relative * want[i].abs());
        }
    }
}

#[test]
fn rotation_agrees_with_the_reference_and_leaves_values_alone() {
    // Two query heads and a key head are rotated, a value head is not.
    let (x, angles) = (numbers(1, 3 * 4 * HEAD_DIM), numbers(2, 3 * HEAD_DIM));
    let (angles, _) = angles.as_chunks::<HEAD_DIM>();
    let got = on_all_units("rotate", |simd| {
        let mut x = x.clone();
        simd.run(Rotate { x: &mut x, stride: 4 * HEAD_DIM, heads: 3, angles, rounding: PhantomData::<Exact> });
        x
    });
    let mut want = x;
    for (row, angles) in want.chunks_exact_mut(4 * HEAD_DIM).zip(angles) {
        let (cos, sin) = angles.split_at(HEAD_DIM / 2);
        row[..3 * HEAD_DIM].chunks_exact_mut(HEAD_DIM).for_each(|head| reference::rotate(head, cos, sin));
    }
    assert_close("rotate", &got, &want, |_| 2.0 * f32::EPSILON);
}

#[test]
fn swiglu_agrees_with_the_reference_beyond_its_clamps() {
    let units = 48;
    let (h, bias) = (numbers(1, 2 * units).iter().map(|x| 12.0 * x).collect::<Vec<_>>(), numbers(2, 2 * units));
    let got = on_all_units("swiglu", |simd| {
        let mut out = vec![f32::NAN; units];
        let (h, bias) = (&h, &bias);
        let out_slice = &mut out;
        simd.run(SwiGlu { h, bias, alpha: 1.702, limit: 7.0, out: out_slice, rounding: PhantomData::<Exact> });
        out
    });
    let interleaved: Vec<f32> = (0..units).flat_map(|i| [h[i] + bias[i], h[units + i] + bias[units + i]]).collect();
    let want = reference::swiglu(&interleaved, 7.0);
    assert!(interleaved.iter().any(|x| *x > 7.0) && interleaved.iter().any(|x| *x < -7.0), "the clamps must matter");
    // |gate| <= 13, |up + 1| <= 8; exp is 1.1 ulp off, which the sigmoid passes on times at most |alpha gate| / 4 e; a dozen roundings.
    assert_close("swiglu", &got, &want, |_| 13.0 * 8.0 * 12.0 * f32::EPSILON / 2.0);
}

/// A sequence of `positions` in pages of `page_tokens`, with the pages in no order.
fn pool(layout: &KvLayout, keys: &[f32], values: &[f32], positions: usize) -> KvPool<f32> {
    let pages = positions.div_ceil(layout.page_tokens as usize) as u32;
    let mut pool = KvPool::new(layout, pages, pages, 1);
    for group in PageGroup::ALL {
        let append = (0..pages).rev().map(PageId).collect();
        pool.apply(&scheduler::plan::PageDelta { slot: SlotId(0), group, first_page: 0, append });
    }
    let heads = layout.kv_heads as usize;
    for position in 0..positions {
        for head in 0..heads {
            let at = (position * heads + head) * HEAD_DIM;
            let (key, value) = (&keys[at..at + HEAD_DIM], &values[at..at + HEAD_DIM]);
            PageGroup::ALL.into_iter().for_each(|group| pool.store(0, group, 0, head, position, key, value));
        }
    }
    pool
}

#[test]
fn attention_agrees_with_the_reference_around_window_and_page_edges() {
    const POSITIONS: usize = 300;
    let (heads, kv_heads) = (4, 2);
    let width = heads * HEAD_DIM;
    let keys: Vec<f32> = numbers(1, POSITIONS * kv_heads * HEAD_DIM).iter().map(|x| 2.0 * x).collect();
    let values = numbers(2, keys.len());
    let queries: Vec<f32> = numbers(3, POSITIONS * width).iter().map(|x| 2.0 * x).collect();
    // A sink far above all scores takes nearly all of the weight.
    let sinks = [0.5, -3.0, 40.0, 2.0];
    for page_tokens in [1, 16, 64] {
        let layout = KvLayout {
            full_layers: vec![0],
            window_layers: vec![1],
            kv_heads: kv_heads as u32,
            head_dim: HEAD_DIM as u32,
            page_tokens,
            window: 128,
            dtype: KvDtype::F32,
            tp: 1,
        };
        let pool = pool(&layout, &keys, &values, POSITIONS);
        for (group, window) in [(PageGroup::Full, None), (PageGroup::Window, Some(128))] {
            let attend = |simd: Simd, tokens: Range<usize>| {
                let mut out = vec![f32::NAN; tokens.len() * width];
                simd.run(Attention {
                    queries: &queries[tokens.start * width..tokens.end * width],
                    stride: width,
                    position: tokens.start,
                    pool: pool.pool(group),
                    table: pool.table(0, group),
                    layer: 0,
                    window,
                    sinks: &sinks,
                    group: heads / kv_heads,
                    scratch: &mut Vec::new(),
                    out: &mut out,
                    rounding: PhantomData::<Exact>,
                });
                out
            };
            let what = format!("{group} pages of {page_tokens}");
            let got = on_all_units(&what, |simd| attend(simd, 0..POSITIONS));
            let shape = AttentionShape { num_heads: heads, num_kv_heads: kv_heads, head_dim: HEAD_DIM, window };
            for position in [0, 1, 15, 16, 126, 127, 128, 129, 299] {
                let seen = (position + 1) * kv_heads * HEAD_DIM;
                let query = &queries[position * width..][..width];
                let want = reference::attention(query, &keys[..seen], &values[..seen], &sinks, shape);
                let got = &got[position * width..][..width];
                // Scores below 64 * 4 / 8 = 32 in size, off by 9 roundings of them; the weights by as much, relatively; values below 1.
                assert_close(&format!("{what} position {position}"), got, &want, |_| {
                    2.0 * 32.0 * 9.0 * f32::EPSILON / 2.0
                });
                assert_eq!(attend(Simd::detect(), position..position + 1), got, "{what} position {position} alone");
            }
        }
    }
}

#[test]
fn bf16_results_are_bf16() {
    let matrix = Matrix::new(32, 64);
    let x = numbers(1, 64);
    let panels = matrix.panels();
    let got = on_all_units("bf16", |simd| {
        let mut out = vec![0.0; 32];
        let whole = 0..64;
        simd.run(MatMul {
            x: &x,
            weights: &panels,
            slices: from_ref(&whole),
            bias: &[],
            out: &mut out,
            rounding: PhantomData::<ToBf16>,
        });
        out
    });
    let exact = matmul(Simd::detect(), &x, &panels, from_ref(&(0..64)), &[]);
    let rounded: Vec<f32> = exact.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
    assert_eq!(got, rounded);
}
