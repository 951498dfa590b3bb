//! E4M3: 8-bit floats of sign, 4 bits of exponent (bias 7) and 3 of mantissa, without infinities. OCP 8-bit Floating Point
//! Specification, revision 1.0, section 5.

use std::sync::LazyLock;

/// The largest number.
pub const MAX: f32 = 448.0;
/// Bits of [`MAX`].
const MAX_BITS: u32 = 0x7e;
/// Bits of the one NaN, beside the sign.
pub(crate) const NAN_BITS: u8 = 0x7f;
/// The smallest number that is not subnormal; below it numbers are multiples of 2^-9.
const SMALLEST_NORMAL: f32 = 1.0 / 64.0;

/// One number, as its bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct E4M3(pub u8);

static VALUES: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|bits| E4M3(bits as u8).decode()));

impl E4M3 {
    /// Rounds to the nearest number, ties to even. What lies beyond [`MAX`] becomes that.
    #[must_use]
    pub fn from_f32(x: f32) -> Self {
        let sign = (x.to_bits() >> 24) as u8 & 0x80;
        let size = x.abs();
        let bits = if x.is_nan() {
            NAN_BITS
        } else if size < SMALLEST_NORMAL {
            (size * 512.0).round_ties_even() as u8
        } else {
            let bits = size.to_bits();
            let rounded = (bits + 0x7_ffff + ((bits >> 20) & 1)) >> 20;
            (rounded - ((127 - 7) << 3)).min(MAX_BITS) as u8
        };
        Self(sign | bits)
    }

    /// Its value.
    #[must_use]
    #[inline]
    pub fn to_f32(self) -> f32 {
        VALUES[usize::from(self.0)]
    }

    /// All values, by bits: for loops that look up many.
    #[must_use]
    pub fn values() -> &'static [f32; 256] {
        &VALUES
    }

    fn decode(self) -> f32 {
        let (exponent, mantissa) = (i32::from(self.0 >> 3) & 15, f32::from(self.0 & 7));
        let size = match (exponent, self.0 & NAN_BITS) {
            (_, NAN_BITS) => f32::NAN,
            (0, _) => mantissa / 512.0,
            _ => (8.0 + mantissa) * 2.0_f32.powi(exponent - 10),
        };
        if self.0 & 0x80 == 0 { size } else { -size }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_kept_and_every_midpoint_goes_to_the_even_one() {
        for bits in 0..=MAX_BITS as u8 {
            for sign in [0, 0x80] {
                let number = E4M3(sign | bits);
                assert_eq!(E4M3::from_f32(number.to_f32()), number);
            }
            if u32::from(bits) == MAX_BITS {
                continue;
            }
            let (low, high) = (E4M3(bits).to_f32(), E4M3(bits + 1).to_f32());
            let middle = f32::midpoint(low, high);
            assert_eq!(E4M3::from_f32(middle).0, bits + (bits & 1), "{middle}");
            assert_eq!(E4M3::from_f32(middle.next_down()).0, bits);
            assert_eq!(E4M3::from_f32(middle.next_up()).0, bits + 1);
        }
    }

    #[test]
    fn values_are_those_of_the_specification() {
        for (bits, value) in [(0x00, 0.0), (0x01, 2.0_f32.powi(-9)), (0x08, 2.0_f32.powi(-6)), (0x38, 1.0), (0x7e, MAX)]
        {
            assert_eq!(E4M3(bits).to_f32(), value);
        }
        assert!(E4M3(0xff).to_f32().is_nan() && E4M3::from_f32(f32::NAN).to_f32().is_nan());
    }

    #[test]
    fn what_is_too_large_becomes_the_largest() {
        for x in [448.0, 460.0, 1e6, f32::INFINITY] {
            assert_eq!((E4M3::from_f32(x).to_f32(), E4M3::from_f32(-x).to_f32()), (MAX, -MAX));
        }
    }
}
