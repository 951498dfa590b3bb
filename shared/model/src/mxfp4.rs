//! MXFP4: blocks of 32 four-bit floats (E2M1) with one shared power of two (E8M0).
//!
//! `value = LUT[nibble] * 2^(scale - 127)`. A block is 16 bytes; the *low* nibble of a byte is the earlier value.
//! Blocks lie along the input axis of a matrix. Sources: OCP Microscaling Formats (MX) v1.0; `_get_mxfp4_tensor` in
//! openai/gpt-oss `gpt_oss/torch/weights.py`.
//!
//! Decoding is exact in bf16 and f32: E2M1 needs two significant bits, and 2^-128 (half of the smallest scale) is a
//! bf16 subnormal. Only products of 2^128 and more (4 and 6 at scale 253, from 2 at scale 254) become infinite, as
//! `ldexp` makes them in the reference. Scale 255 is NaN in the format; a checkpoint that holds it is refused when
//! it is loaded.

use half::bf16;

/// Values that share one scale.
pub const BLOCK_VALUES: usize = 32;
/// Bytes of one block's nibbles.
pub const BLOCK_BYTES: usize = BLOCK_VALUES / 2;
/// The scale byte that stands for NaN.
pub const SCALE_NAN: u8 = 255;

/// The sixteen E2M1 values; bit 3 is the sign.
pub const LUT: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// `2^(scale - 127)`, exactly; NaN for [`SCALE_NAN`].
#[must_use]
pub fn scale_value(scale: u8) -> f32 {
    match scale {
        // 2^-127 lies below the smallest normal f32, so its bits are a subnormal's.
        0 => f32::from_bits(1 << 22),
        SCALE_NAN => f32::NAN,
        biased => f32::from_bits(u32::from(biased) << 23),
    }
}

/// Decodes one block into 32 values.
pub fn decode_block(block: &[u8; BLOCK_BYTES], scale: u8, out: &mut [f32; BLOCK_VALUES]) {
    let scale = scale_value(scale);
    for (pair, &byte) in out.chunks_exact_mut(2).zip(block) {
        pair[0] = LUT[usize::from(byte & 0x0f)] * scale;
        pair[1] = LUT[usize::from(byte >> 4)] * scale;
    }
}

/// Decodes consecutive blocks (a row, or a whole row-major matrix) to f32.
///
/// # Panics
/// If the lengths disagree: `blocks` has 16 bytes and `out` 32 values for each scale.
pub fn decode_f32(blocks: &[u8], scales: &[u8], out: &mut [f32]) {
    check_lengths(blocks, scales, out.len());
    let (blocks, _) = blocks.as_chunks::<BLOCK_BYTES>();
    let (out, _) = out.as_chunks_mut::<BLOCK_VALUES>();
    for ((block, &scale), values) in blocks.iter().zip(scales).zip(out) {
        decode_block(block, scale, values);
    }
}

/// Decodes consecutive blocks (a row, or a whole row-major matrix) to bf16, without rounding.
///
/// # Panics
/// If the lengths disagree: `blocks` has 16 bytes and `out` 32 values for each scale.
pub fn decode_bf16(blocks: &[u8], scales: &[u8], out: &mut [bf16]) {
    check_lengths(blocks, scales, out.len());
    let (blocks, _) = blocks.as_chunks::<BLOCK_BYTES>();
    let (out, _) = out.as_chunks_mut::<BLOCK_VALUES>();
    let mut values = [0.0; BLOCK_VALUES];
    for ((block, &scale), out) in blocks.iter().zip(scales).zip(out) {
        decode_block(block, scale, &mut values);
        for (out, value) in out.iter_mut().zip(&values) {
            // Exact: every decoded value has at most eight significant bits, so the lower half of the f32 is zero.
            *out = bf16::from_bits((value.to_bits() >> 16) as u16);
        }
    }
}

fn check_lengths(blocks: &[u8], scales: &[u8], num_values: usize) {
    assert_eq!(blocks.len(), scales.len() * BLOCK_BYTES, "each scale has a block of 16 bytes");
    assert_eq!(num_values, scales.len() * BLOCK_VALUES, "each scale has 32 values");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rule in f64 and by arithmetic instead of tables.
    fn by_definition(nibble: u8, scale: u8) -> f64 {
        let (sign, exponent, mantissa) = (nibble >> 3, (nibble >> 1) & 3, nibble & 1);
        let magnitude = match exponent {
            0 => f64::from(mantissa) * 0.5,
            _ => (1.0 + f64::from(mantissa) * 0.5) * 2f64.powi(i32::from(exponent) - 1),
        };
        (if sign == 1 { -magnitude } else { magnitude }) * 2f64.powi(i32::from(scale) - 127)
    }

    #[test]
    fn all_nibbles_at_all_scales_are_exact() {
        for scale in 0..=254u8 {
            for nibble in 0..16u8 {
                // The other nibble differs, so an exchange of low and high cannot pass.
                let block = [nibble | ((nibble ^ 5) << 4); BLOCK_BYTES];
                let (mut wide, mut narrow) = ([0.0; BLOCK_VALUES], [bf16::ZERO; BLOCK_VALUES]);
                decode_f32(&block, &[scale], &mut wide);
                decode_bf16(&block, &[scale], &mut narrow);
                for (i, nibble) in [(0, nibble), (1, nibble ^ 5)] {
                    let expected = by_definition(nibble, scale);
                    if expected.abs() < 2f64.powi(128) {
                        assert_eq!(f64::from(wide[i]), expected, "nibble {nibble} scale {scale}");
                    } else {
                        assert!(wide[i].is_infinite() && f64::from(wide[i]).signum() == expected.signum());
                    }
                    assert_eq!(narrow[i].to_f32().to_bits(), wide[i].to_bits(), "nibble {nibble} scale {scale}");
                }
            }
        }
    }

    #[test]
    fn rows_keep_their_order_and_own_scales() {
        let blocks: Vec<u8> = (0..3 * BLOCK_BYTES).map(|i| (i * 37 % 256) as u8).collect();
        let scales = [120, 127, 131];
        let mut out = [0.0; 3 * BLOCK_VALUES];
        decode_f32(&blocks, &scales, &mut out);
        for (k, &value) in out.iter().enumerate() {
            let byte = blocks[k / 2];
            let nibble = if k % 2 == 0 { byte & 15 } else { byte >> 4 };
            assert_eq!(f64::from(value), by_definition(nibble, scales[k / BLOCK_VALUES]), "element {k}");
        }
    }

    #[test]
    fn nan_scale_decodes_to_nan() {
        let mut out = [0.0; BLOCK_VALUES];
        decode_block(&[0x21; BLOCK_BYTES], SCALE_NAN, &mut out);
        assert!(out.iter().all(|value| value.is_nan()));
    }
}
