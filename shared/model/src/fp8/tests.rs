use super::*;
use crate::e4m3::NAN_BITS as NAN;
use crate::mxfp4::{self, BLOCK_VALUES, LUT};

/// E4M3 by its definition, in f64.
fn by_definition(byte: u8) -> f64 {
    let (exponent, mantissa) = (i32::from((byte >> 3) & 15), f64::from(byte & 7) / 8.0);
    let magnitude = if exponent == 0 { mantissa * 2f64.powi(-6) } else { (1.0 + mantissa) * 2f64.powi(exponent - 7) };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

#[test]
fn all_bytes_decode_by_the_definition_and_encode_to_themselves() {
    for byte in (0..=255u8).filter(|byte| byte & 0x7f != NAN) {
        assert_eq!(f64::from(decode(byte)), by_definition(byte), "{byte:#x}");
        assert_eq!(encode(decode(byte)), byte, "{byte:#x}");
    }
    assert!(decode(0x7f).is_nan() && decode(0xff).is_nan() && encode(f32::NAN) & 0x7f == NAN);
}

#[test]
fn encoding_rounds_to_the_nearest_ties_to_even() {
    // Between each number and the next: just below the middle, the middle, just above it.
    for byte in 0..0x7eu8 {
        let (low, high) = (decode(byte), decode(byte + 1));
        let middle = (low + high) / 2.0;
        let even = if byte % 2 == 0 { byte } else { byte + 1 };
        let (below, above) = (f32::from_bits(middle.to_bits() - 1), f32::from_bits(middle.to_bits() + 1));
        for (value, want) in [(below, byte), (middle, even), (above, byte + 1)] {
            assert_eq!(encode(value), want, "{value:e}");
            assert_eq!(encode(-value), want | 0x80, "-{value:e}");
        }
    }
    assert_eq!([449.0, 464.0, 465.0, 1e30, f32::INFINITY].map(encode), [0x7e; 5]);
}

#[test]
fn a_scale_is_the_smallest_power_of_two_that_fits() {
    for largest in [1e-30, 0.02, 0.875, 0.876, 1.0, 6.0, 448.0, 448.1, 512.0, 1e20f32] {
        let scale = scale_value(scale_of(largest));
        assert!(largest / scale <= MAX && largest / (scale / 2.0) > MAX, "{largest} with {scale}");
    }
    assert_eq!(scale_of(0.0), UNIT_SCALE);
    assert_eq!(scale_of(f32::MIN_POSITIVE), 1, "below, values are the smallest numbers there are");
}

/// Every E2M1 value at every distance from a 6 at the block's largest exponent: exact up to 14 binades, and not one
/// value more than must be is changed beyond.
#[test]
fn mxfp4_values_are_exact_up_to_fourteen_binades() {
    for top in [20u8, 127, 200] {
        for span in 0..20u8 {
            for nibble in 0..16u8 {
                let value = LUT[usize::from(nibble)] * mxfp4::scale_value(top - span);
                let values = [6.0 * mxfp4::scale_value(top), value];
                let (mut out, mut scales) = ([0; 2], [0]);
                let exactness = quantize_block_row(&values, 2, &mut out, &mut scales);
                let stored = decode(out[1]) * scale_value(scales[0]);
                // The smallest step of the block is 2^-9 times its scale 2^(top - 6).
                let step = f64::from(mxfp4::scale_value(top)) * 2f64.powi(-15);
                let holds = f64::from(value) % step == 0.0;
                assert_eq!(stored == value, holds, "span {span} nibble {nibble}");
                assert_eq!(exactness.is_exact(), holds, "span {span} nibble {nibble}");
                assert!(holds || span > 14, "span {span} nibble {nibble}");
                assert!((f64::from(stored) - f64::from(value)).abs() <= step / 2.0, "span {span} nibble {nibble}");
            }
        }
    }
}

fn numbers(len: usize, mut state: u64) -> Vec<f32> {
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    (0..len).map(|_| (next() % 2001) as f32 / 1000.0 - 1.0).map(|x| bf16::from_f32(x * x * x).to_f32()).collect()
}

#[test]
fn edges_have_their_own_smaller_blocks() {
    let (rows, cols) = (96, 320);
    let mut values = numbers(rows * cols, 1);
    values[5 * cols + 300] = 1000.0;
    let (mut out, mut scales) = (vec![0; rows * cols], vec![0; 3]);
    let exactness = quantize_block_row(&values, cols, &mut out, &mut scales);
    assert_eq!((exactness.blocks, exactness.values), (3, (rows * cols) as u64));
    assert!(scales[2] > scales[0] && scales[0] == scale_of(1.0), "{scales:?}");
    for (i, (value, byte)) in values.iter().zip(&out).enumerate() {
        let scale = scale_value(scales[i % cols / BLOCK]);
        let error = (decode(*byte) * scale - value).abs();
        // Half a step of a number with three mantissa bits, or of the smallest numbers.
        assert!(error <= (value.abs() / 16.0).max(scale * 2f32.powi(-10)), "{i}: {value} as {}", decode(*byte) * scale);
    }
}

#[test]
fn requantising_a_part_changes_nothing() {
    let (rows, cols) = (128, 256);
    let (mut out, mut scales) = (vec![0; rows * cols], vec![0; 2]);
    quantize_block_row(&numbers(rows * cols, 2), cols, &mut out, &mut scales);
    let matrix = Fp8Matrix { rows, cols, values: out.into(), scales: scales.into(), grid: [1, 2], offset: [0, 0] };
    let mut row = vec![0.0; cols];
    for (start, end) in [(0, 256), (96, 224), (32, 64)] {
        let mut part = Vec::new();
        for r in 17..80 {
            matrix.row_f32(r, &mut row);
            part.extend_from_slice(&row[start..end]);
        }
        let (mut again, mut part_scales) = (vec![0; part.len()], vec![0; (end - start).div_ceil(BLOCK)]);
        let exactness = quantize_block_row(&part, end - start, &mut again, &mut part_scales);
        assert!(exactness.is_exact(), "{start}..{end}: {exactness:?}");
    }
}

#[test]
fn a_part_finds_the_scales_that_it_touches() {
    let part = Fp8Matrix {
        rows: 2,
        cols: 64,
        values: vec![encode(1.0); 128].into(),
        scales: vec![127, 128, 129, 130].into(),
        grid: [2, 2],
        offset: [127, 96],
    };
    let values: Vec<f32> = part.dequantize().iter().map(|value| value.to_f32()).collect();
    assert_eq!([values[0], values[31], values[32], values[64], values[96]], [1.0, 1.0, 2.0, 4.0, 8.0]);
}

#[test]
fn activations_have_a_scale_for_each_128() {
    let row = numbers(2880, 3);
    let (values, scales) = quantize_activations(&row);
    assert_eq!((values.len(), scales.len()), (2880, 23));
    let block = &row[22 * 128..];
    assert_eq!(scales[22], scale_of(block.iter().fold(0.0, |max, x| max.max(x.abs()))));
    assert_eq!(BLOCK % BLOCK_VALUES, 0);
}
