//! Matrix products with a fixed order of summation.
//!
//! Each output element is a chain of fused multiply-adds in ascending depth, or, for the reductions that ranks share, several such chains added
//! in the tree of `model::sharding`. Vectors run over output columns, so neither the number of tokens in a call nor the width of the vector unit
//! touches the order.

use std::marker::PhantomData;
use std::ops::Range;

use half::bf16;

use crate::simd::{Kernel, LANES, V};
use crate::vector::{Rounding, fma, splat, widen, zip};

/// Panels side by side in a tile, where the registers hold them.
const TILE_PANELS: usize = 4;
/// Tokens in a tile.
const TILE_TOKENS: usize = 4;
/// Tokens whose activations stay in the second-level cache while all panels pass by.
const BLOCK_TOKENS: usize = 64;

/// A weight matrix `[rows, depth]` in bf16, packed as `[rows / 16][depth][16]`, the last panel filled up with zero rows.
pub(crate) struct Panels {
    rows: usize,
    depth: usize,
    data: Vec<[bf16; LANES]>,
}

impl Panels {
    /// Packs a matrix. `read_row(row, buffer)` fills the buffer with the `depth` weights of one row.
    pub(crate) fn pack(rows: usize, depth: usize, mut read_row: impl FnMut(usize, &mut [bf16])) -> Self {
        let mut data = vec![[bf16::ZERO; LANES]; rows.div_ceil(LANES) * depth];
        let mut buffer = vec![bf16::ZERO; depth];
        for row in 0..rows {
            read_row(row, &mut buffer);
            let panel = &mut data[row / LANES * depth..][..depth];
            for (column, weight) in panel.iter_mut().zip(&buffer) {
                column[row % LANES] = *weight;
            }
        }
        Self { rows, depth, data }
    }

    pub(crate) const fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) const fn depth(&self) -> usize {
        self.depth
    }

    #[inline(always)]
    fn panel(&self, idx: usize) -> &[[bf16; LANES]] {
        &self.data[idx * self.depth..(idx + 1) * self.depth]
    }
}

/// `out[t, n] = round(sum_k x[t, k] * weights[n, k] + bias[n])`.
pub(crate) struct MatMul<'a, R> {
    /// `[tokens, depth]`, f32.
    pub(crate) x: &'a [f32],
    /// `[rows, depth]`.
    pub(crate) weights: &'a Panels,
    /// Ranges of depth, each summed by itself and then added in a binary tree over neighbours; a power of two of them, some maybe empty.
    pub(crate) slices: &'a [Range<usize>],
    /// `[rows]`, or empty for none.
    pub(crate) bias: &'a [f32],
    /// `[tokens, rows]`.
    pub(crate) out: &'a mut [f32],
    /// How results are rounded.
    pub(crate) rounding: PhantomData<R>,
}

impl<R: Rounding> Kernel for MatMul<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<const WIDE: bool>(mut self) {
        let (depth, rows) = (self.weights.depth, self.weights.rows);
        let tokens = self.x.len() / depth;
        assert_eq!(self.x.len(), tokens * depth, "activations are [tokens, {depth}]");
        assert_eq!(self.out.len(), tokens * rows, "output is [{tokens}, {rows}]");
        assert!(self.bias.is_empty() || self.bias.len() == rows, "bias is [{rows}]");
        assert!(self.slices.len().is_power_of_two(), "{} slices form no full tree", self.slices.len());
        let panels = rows.div_ceil(LANES);
        for block in (0..tokens).step_by(BLOCK_TOKENS) {
            let block = block..(block + BLOCK_TOKENS).min(tokens);
            let mut panel = 0;
            while panel < panels {
                // Four panels by four tokens need 16 accumulators of 16 lanes: too many for 16 registers of 8 lanes, unless for one token.
                let four = panel + TILE_PANELS <= panels && (WIDE || block.len() == 1);
                if four {
                    self.column::<TILE_PANELS>(block.clone(), panel);
                } else {
                    self.column::<1>(block.clone(), panel);
                }
                panel += if four { TILE_PANELS } else { 1 };
            }
        }
    }
}

impl<R: Rounding> MatMul<'_, R> {
    /// All tokens of a block by `P` panels.
    #[inline(always)]
    fn column<const P: usize>(&mut self, block: Range<usize>, panel: usize) {
        let mut token = block.start;
        while token + TILE_TOKENS <= block.end {
            self.tile::<P, TILE_TOKENS>(token, panel);
            token += TILE_TOKENS;
        }
        match block.end - token {
            3 => self.tile::<P, 3>(token, panel),
            2 => self.tile::<P, 2>(token, panel),
            1 => self.tile::<P, 1>(token, panel),
            _ => {}
        }
    }

    #[inline(always)]
    fn tile<const P: usize, const M: usize>(&mut self, token: usize, panel: usize) {
        let depth = self.weights.depth;
        let rows: [&[f32]; M] = std::array::from_fn(|m| &self.x[(token + m) * depth..(token + m + 1) * depth]);
        let panels: [&[[bf16; LANES]]; P] = std::array::from_fn(|p| self.weights.panel(panel + p));
        let sums = tree::<P, M>(rows, panels, self.slices);
        for (m, sums) in sums.into_iter().enumerate() {
            for (p, sum) in sums.into_iter().enumerate() {
                self.store(token + m, (panel + p) * LANES, sum);
            }
        }
    }

    #[inline(always)]
    fn store(&mut self, token: usize, column: usize, sum: V) {
        let rows = self.weights.rows;
        let out = &mut self.out[token * rows + column..(token + 1) * rows];
        // Whole vectors apart from the last, cut one: with a length known to the compiler sums stay in registers until here.
        if let Some(out) = out.first_chunk_mut::<LANES>() {
            let bias = self.bias.get(column..).and_then(|bias| bias.first_chunk()).unwrap_or(&[0.0; LANES]);
            *out = zip(sum, *bias, |sum, bias| R::round(sum + bias));
        } else {
            let bias = self.bias.get(column..).unwrap_or(&[]).iter().chain(std::iter::repeat(&0.0));
            for ((out, sum), bias) in out.iter_mut().zip(sum).zip(bias) {
                *out = R::round(sum + bias);
            }
        }
    }
}

/// The sums of all slices, added as `((s0 + s1) + (s2 + s3)) + ..`.
#[inline(always)]
fn tree<const P: usize, const M: usize>(
    rows: [&[f32]; M],
    panels: [&[[bf16; LANES]]; P],
    slices: &[Range<usize>],
) -> [[V; P]; M] {
    // Like a binary counter: level `l` holds a finished sum of 2^l slices while its right neighbour is computed.
    let mut levels = [[[[0.0; LANES]; P]; M]; 4];
    for (i, slice) in slices.iter().enumerate() {
        let mut sum = chain(rows, panels, slice.clone());
        let carries = i.trailing_ones() as usize;
        for left in &levels[..carries] {
            for m in 0..M {
                for p in 0..P {
                    for lane in 0..LANES {
                        sum[m][p][lane] += left[m][p][lane];
                    }
                }
            }
        }
        levels[carries] = sum;
    }
    levels[slices.len().trailing_zeros() as usize]
}

/// One slice: a chain of fused multiply-adds in ascending depth, from zero.
#[inline(always)]
fn chain<const P: usize, const M: usize>(
    rows: [&[f32]; M],
    panels: [&[[bf16; LANES]]; P],
    slice: Range<usize>,
) -> [[V; P]; M] {
    // Cut to one length, so that the loop needs no checks.
    let len = slice.len();
    let rows = rows.map(|row| &row[slice.start..][..len]);
    let panels = panels.map(|panel| &panel[slice.start..][..len]);
    let mut sums = [[[0.0; LANES]; P]; M];
    for k in 0..len {
        let mut weights = [[0.0; LANES]; P];
        for p in 0..P {
            weights[p] = widen(&panels[p][k]);
        }
        for m in 0..M {
            let x = splat(rows[m][k]);
            for p in 0..P {
                sums[m][p] = fma(x, weights[p], sums[m][p]);
            }
        }
    }
    sums
}
