//! Arithmetic on vectors of 16 floats: conversions, reductions in a fixed order, the exponential.

use half::bf16;

use crate::simd::{LANES, V};

/// Where values are rounded: the two modes of the engine's arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Not at all: every intermediate value is f32.
    F32,
    /// To bf16 wherever the published reference stores a bf16 tensor; sums are f32 inside an operation.
    Bf16,
}

/// [`Precision`] as a type, so that kernels are compiled for each.
pub(crate) trait Rounding {
    /// Rounds a value to be stored.
    fn round(x: f32) -> f32;
}

/// Keeps f32.
pub(crate) struct Exact;

impl Rounding for Exact {
    #[inline(always)]
    fn round(x: f32) -> f32 {
        x
    }
}

/// Rounds to the nearest bf16, ties to even.
pub(crate) struct ToBf16;

impl Rounding for ToBf16 {
    #[inline(always)]
    fn round(x: f32) -> f32 {
        // `half` does the same with a branch, which does not vectorise.
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
        f32::from_bits(if x.is_nan() { bits } else { rounded })
    }
}

#[inline(always)]
pub(crate) fn splat(x: f32) -> V {
    [x; LANES]
}

#[inline(always)]
pub(crate) fn map(a: V, f: impl Fn(f32) -> f32) -> V {
    let mut out = [0.0; LANES];
    for i in 0..LANES {
        out[i] = f(a[i]);
    }
    out
}

#[inline(always)]
pub(crate) fn zip(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    let mut out = [0.0; LANES];
    for i in 0..LANES {
        out[i] = f(a[i], b[i]);
    }
    out
}

/// `c + a * b`, rounded once.
#[inline(always)]
pub(crate) fn fma(a: V, b: V, c: V) -> V {
    let mut out = [0.0; LANES];
    for i in 0..LANES {
        out[i] = a[i].mul_add(b[i], c[i]);
    }
    out
}

#[inline(always)]
pub(crate) fn widen(a: &[bf16; LANES]) -> V {
    let mut out = [0.0; LANES];
    for i in 0..LANES {
        out[i] = f32::from_bits(u32::from(a[i].to_bits()) << 16);
    }
    out
}

/// Reduces 16 lanes by halving: lane `i` takes lane `i + 8`, then `i + 4`, `i + 2`, `i + 1`.
#[inline(always)]
fn reduce(a: V, f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut eight = [0.0; 8];
    for i in 0..8 {
        eight[i] = f(a[i], a[i + 8]);
    }
    let mut four = [0.0; 4];
    for i in 0..4 {
        four[i] = f(eight[i], eight[i + 4]);
    }
    f(f(four[0], four[2]), f(four[1], four[3]))
}

/// Adds the halves of every segment of `2 * HALF` lanes: of `a` into the first eight lanes, of `b` into the others.
#[inline(always)]
fn halve<const HALF: usize>(a: &V, b: &V) -> V {
    let (mut low, mut high) = ([0.0; LANES], [0.0; LANES]);
    for segment in 0..LANES / (2 * HALF) {
        for i in 0..HALF {
            let (to, from) = (segment * HALF + i, segment * 2 * HALF + i);
            (low[to], high[to]) = (a[from], a[from + HALF]);
            (low[LANES / 2 + to], high[LANES / 2 + to]) = (b[from], b[from + HALF]);
        }
    }
    zip(low, high, |low, high| low + high)
}

/// [`sum`] of each of 16 vectors, in the same tree, at a quarter of the cost: 15 additions of vectors instead of 64.
#[inline(always)]
pub(crate) fn sums(rows: &[V; LANES]) -> V {
    let mut by_eight = [[0.0; LANES]; 8];
    for i in 0..8 {
        by_eight[i] = halve::<8>(&rows[2 * i], &rows[2 * i + 1]);
    }
    let mut by_four = [[0.0; LANES]; 4];
    for i in 0..4 {
        by_four[i] = halve::<4>(&by_eight[2 * i], &by_eight[2 * i + 1]);
    }
    let mut by_two = [[0.0; LANES]; 2];
    for i in 0..2 {
        by_two[i] = halve::<2>(&by_four[2 * i], &by_four[2 * i + 1]);
    }
    halve::<1>(&by_two[0], &by_two[1])
}

/// Sum of 16 lanes in a fixed tree.
#[inline(always)]
pub(crate) fn sum(a: V) -> f32 {
    reduce(a, |x, y| x + y)
}

/// Greatest of 16 lanes, none of them NaN.
#[inline(always)]
pub(crate) fn max(a: V) -> f32 {
    reduce(a, greater)
}

/// `max` as one instruction: no rule for NaN.
#[inline(always)]
pub(crate) fn greater(x: f32, y: f32) -> f32 {
    if x > y { x } else { y }
}

/// `exp(x)`, at most 1.1 units in the last place off (tested over all magnitudes); 0 below -87.33, where the result would be subnormal, and
/// infinity above 88.72; NaN of NaN.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`, `ln 2` in two parts (Cody and Waite), then the polynomial of degree 5 for `(exp(r) - 1 - r) / r²`
/// from Cephes `expf` (S. Moshier).
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const LOW: f32 = -87.336_54;
    const HIGH: f32 = 88.722_83;
    const ROUND: f32 = 12_582_912.0; // 1.5 x 2^23: adding and subtracting it rounds to an integer
    let clamped = greater(if x < HIGH { x } else { HIGH }, LOW);
    let n = clamped.mul_add(std::f32::consts::LOG2_E, ROUND) - ROUND;
    let r = n.mul_add(-0.693_359_4, clamped);
    let r = n.mul_add(2.121_944_4e-4, r);
    let mut p = 1.987_569_1e-4f32;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p.mul_add(r, c);
    }
    let p = p.mul_add(r * r, r) + 1.0;
    // 2^n in two factors, since n may be 128, which alone does not fit the exponent.
    let half = (n * 0.5 + ROUND) - ROUND;
    let y = p * power_of_two(half) * power_of_two(n - half);
    if x < LOW {
        0.0
    } else if x > HIGH {
        f32::INFINITY
    } else if x.is_nan() {
        x // comparisons with NaN are false, so `clamped` is `HIGH`
    } else {
        y
    }
}

/// `2^n` for whole `n` from -126 to 127.
#[inline(always)]
fn power_of_two(n: f32) -> f32 {
    // The sum holds n in its low bits; shifting drops all but the exponent.
    f32::from_bits((n + 12_583_039.0).to_bits() << 23)
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::{Rounding, ToBf16, exp, sum, sums};

    #[test]
    fn exp_is_within_its_stated_error() {
        let mut worst = (0.0f64, 0.0f32);
        let mut x = -87.3f32;
        while x < 88.7 {
            let want = f64::from(x).exp();
            let ulp = f64::from(f32::from_bits((want as f32).to_bits() + 1)) - f64::from(want as f32);
            let error = (f64::from(exp(x)) - want).abs() / ulp;
            if error > worst.0 {
                worst = (error, x);
            }
            x += 0.000_731;
        }
        assert!(worst.0 <= 1.1, "{} ulp at {}", worst.0, worst.1);
    }

    #[test]
    fn exp_at_its_edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(-88.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(89.0), f32::INFINITY);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn rounding_to_bf16_equals_half() {
        for i in 0..2_000_000u32 {
            let x = f32::from_bits(i.wrapping_mul(2_654_435_761));
            if !x.is_nan() {
                assert_eq!(ToBf16::round(x).to_bits(), bf16::from_f32(x).to_f32().to_bits(), "{x:e}");
            }
        }
        assert!(ToBf16::round(f32::NAN).is_nan());
    }

    #[test]
    fn sums_of_many_equal_single_sums_bit_for_bit() {
        let rows: [[f32; 16]; 16] =
            std::array::from_fn(|row| std::array::from_fn(|lane| ((row * 31 + lane * 17) as f32).sin() * 1e3));
        assert_eq!(sums(&rows).map(f32::to_bits), rows.map(sum).map(f32::to_bits));
    }

    #[test]
    fn sum_takes_the_documented_tree() {
        let mut lanes = [0.0; 16];
        lanes[0] = 1.0;
        lanes[8] = 1e8;
        lanes[4] = -1e8;
        // (lane 0 + lane 8) loses the 1 before lane 4 cancels the large part.
        assert_eq!(sum(lanes), 0.0);
    }
}
