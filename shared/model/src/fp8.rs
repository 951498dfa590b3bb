//! FP8: E4M3 values with one power of two for each block of 128 x 128 of a matrix `[out, in]`, or for each 128 of a row
//! of activations.
//!
//! E4M3 has four exponent and three mantissa bits, no infinity, and reaches from 2^-9 to 448. A block's scale is the
//! *smallest power of two* that brings its largest magnitude to at most 448, stored as E8M0 (`2^(byte - 127)`). So an
//! MXFP4 block comes through exactly unless its values spread over more binades than E4M3 has: 6 at the largest MX
//! exponent and 0.5 at one 14 lower still are exact. Blocks at the right and lower edge may be smaller (2880 = 22.5 x
//! 128). Requantising an FP8 matrix, or a part of it, changes nothing: the grid never becomes coarser.
//!
//! Blocks are those of the unsharded matrix, whatever part of it a rank holds.

use std::ops::Range;

use half::bf16;

use crate::E4M3;
pub use crate::e4m3::MAX;

/// Rows and columns of a block.
pub const BLOCK: usize = 128;
/// The scale byte of a block of zeros: 1.
const UNIT_SCALE: u8 = 127;

/// The byte of the E4M3 number nearest to `value`: [`E4M3::from_f32`].
#[must_use]
pub fn encode(value: f32) -> u8 {
    E4M3::from_f32(value).0
}

/// The value of an E4M3 byte: [`E4M3::to_f32`].
#[must_use]
pub fn decode(byte: u8) -> f32 {
    E4M3(byte).to_f32()
}

/// The scale byte of a block whose largest magnitude is `largest`: the smallest power of two that brings it to at most
/// [`MAX`]; 1 for a block of zeros.
#[must_use]
pub fn scale_of(largest: f32) -> u8 {
    let bits = largest.to_bits();
    if bits == 0 {
        return UNIT_SCALE;
    }
    // 448 = 1.75 * 2^8.
    let exponent = (bits >> 23) as i32 - 8 + i32::from(bits & 0x7f_ffff > 0x60_0000);
    exponent.max(1) as u8
}

/// How faithful a conversion was.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Exactness {
    /// Blocks of 128 x 128.
    pub blocks: u64,
    /// Blocks with a value that changed.
    pub changed_blocks: u64,
    /// Values.
    pub values: u64,
    /// Values that changed.
    pub changed_values: u64,
    /// Largest relative change of a value; 1 where one became zero.
    pub largest_change: f64,
}

impl Exactness {
    /// Adds what another conversion found.
    pub fn add(&mut self, other: &Self) {
        self.blocks += other.blocks;
        self.changed_blocks += other.changed_blocks;
        self.values += other.values;
        self.changed_values += other.changed_values;
        self.largest_change = self.largest_change.max(other.largest_change);
    }

    /// Whether every value is what it was.
    #[must_use]
    pub const fn is_exact(&self) -> bool {
        self.changed_values == 0
    }
}

/// Quantises one row of blocks: `rows` (at most 128) rows of `cols` values. `out`: `[rows, cols]` E4M3; `scales`:
/// `[cols / 128 rounded up]` E8M0.
///
/// # Panics
/// If the lengths disagree.
pub fn quantize_block_row(values: &[f32], cols: usize, out: &mut [u8], scales: &mut [u8]) -> Exactness {
    let rows = values.len() / cols;
    assert!(rows <= BLOCK && values.len() == rows * cols && out.len() == values.len(), "values are [rows, cols]");
    assert_eq!(scales.len(), cols.div_ceil(BLOCK), "one scale a block");
    let mut exactness = Exactness { values: values.len() as u64, ..Exactness::default() };
    for (block, scale) in scales.iter_mut().enumerate() {
        let part = |row: usize| row * cols + block * BLOCK..row * cols + cols.min((block + 1) * BLOCK);
        let largest = (0..rows).flat_map(|row| &values[part(row)]).fold(0.0f32, |max, value| max.max(value.abs()));
        *scale = scale_of(largest);
        let (factor, inverse) = (scale_value(*scale), scale_value(254 - (*scale).min(253)));
        let mut changed = 0;
        for row in 0..rows {
            for (value, out) in values[part(row)].iter().zip(&mut out[part(row)]) {
                *out = encode(value * inverse);
                let stored = decode(*out) * factor;
                if stored != *value {
                    changed += 1;
                    let change = f64::from((stored - value).abs()) / f64::from(value.abs());
                    exactness.largest_change = exactness.largest_change.max(change);
                }
            }
        }
        exactness.blocks += 1;
        exactness.changed_blocks += u64::from(changed > 0);
        exactness.changed_values += changed;
    }
    exactness
}

/// Quantises rows `rows` and columns `cols` of a matrix of shape `[out, in]`, by the blocks of the whole matrix.
/// `read(row, out)` yields one row of it.
pub(crate) fn quantize_part(
    [total_rows, total_cols]: [usize; 2],
    rows: &Range<usize>,
    cols: &Range<usize>,
    mut read: impl FnMut(usize, &mut [f32]),
) -> Fp8Matrix {
    let [row_blocks, col_blocks] = [rows, cols].map(Fp8Matrix::blocks);
    let covered_cols = col_blocks.start * BLOCK..total_cols.min(col_blocks.end * BLOCK);
    let width = covered_cols.len();
    let (mut whole_row, mut block) = (vec![0.0; total_cols], vec![0.0; BLOCK * width]);
    let (mut bytes, mut scales) = (vec![0; BLOCK * width], vec![0; row_blocks.len() * col_blocks.len()]);
    let mut values = Vec::with_capacity(rows.len() * cols.len());
    for (block_row, scales) in row_blocks.clone().zip(scales.chunks_exact_mut(col_blocks.len())) {
        let block_rows = block_row * BLOCK..total_rows.min((block_row + 1) * BLOCK);
        for (row, out) in block_rows.clone().zip(block.chunks_exact_mut(width)) {
            read(row, &mut whole_row);
            out.copy_from_slice(&whole_row[covered_cols.clone()]);
        }
        let len = block_rows.len() * width;
        quantize_block_row(&block[..len], width, &mut bytes[..len], scales);
        let wanted = rows.start.max(block_rows.start)..rows.end.min(block_rows.end);
        for row in wanted {
            let start = (row - block_rows.start) * width + cols.start - covered_cols.start;
            values.extend_from_slice(&bytes[start..start + cols.len()]);
        }
    }
    Fp8Matrix {
        rows: rows.len(),
        cols: cols.len(),
        values: values.into(),
        scales: scales.into(),
        grid: [row_blocks.len(), col_blocks.len()],
        offset: [rows.start % BLOCK, cols.start % BLOCK],
    }
}

/// Quantises a row of activations: one scale for each 128 values. Returns E4M3 values and E8M0 scales.
#[must_use]
pub fn quantize_activations(row: &[f32]) -> (Vec<u8>, Vec<u8>) {
    let (mut values, mut scales) = (vec![0; row.len()], vec![0; row.len().div_ceil(BLOCK)]);
    quantize_block_row(row, row.len(), &mut values, &mut scales);
    (values, scales)
}

/// `2^(byte - 127)`.
fn scale_value(byte: u8) -> f32 {
    crate::mxfp4::scale_value(byte)
}

/// A part of an FP8 matrix, row-major `[rows, cols]` = `[out, in]`, with the scales of the blocks that it touches.
#[derive(Debug, Clone)]
pub struct Fp8Matrix {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// `[rows, cols]` E4M3.
    pub values: crate::Buffer<u8>,
    /// `[grid[0], grid[1]]` E8M0.
    pub scales: crate::Buffer<u8>,
    /// Blocks touched along rows and columns.
    pub grid: [usize; 2],
    /// Row and column within the first block where the part begins.
    pub offset: [usize; 2],
}

impl Fp8Matrix {
    /// Blocks touched by a part of a matrix along one axis.
    #[must_use]
    pub const fn blocks(part: &Range<usize>) -> Range<usize> {
        part.start / BLOCK..part.end.div_ceil(BLOCK)
    }

    /// Writes one row as f32, exactly.
    ///
    /// # Panics
    /// If there is no such row, or `out` is not `cols` long.
    pub fn row_f32(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "a row has {} values", self.cols);
        let scales = &self.scales[(row + self.offset[0]) / BLOCK * self.grid[1]..][..self.grid[1]];
        let values = &self.values[row * self.cols..][..self.cols];
        for (k, (out, value)) in out.iter_mut().zip(values).enumerate() {
            *out = decode(*value) * scale_value(scales[(k + self.offset[1]) / BLOCK]);
        }
    }

    /// The matrix as row-major bf16: exact, since E4M3 has four significant bits, for scales of 2^-117 and more.
    #[must_use]
    pub fn dequantize(&self) -> Vec<bf16> {
        let mut row_values = vec![0.0; self.cols];
        let mut values = Vec::with_capacity(self.rows * self.cols);
        for row in 0..self.rows {
            self.row_f32(row, &mut row_values);
            values.extend(row_values.iter().map(|value| bf16::from_f32(*value)));
        }
        values
    }
}

#[cfg(test)]
mod tests;
