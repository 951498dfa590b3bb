//! The counter-based random generator: a pure function from (seed, choice, output index, draw) to a number, so that a sequence resumed anywhere
//! draws what it would have drawn.

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const KEY_STEPS: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];

/// Philox 4x32 with 10 rounds. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), and its library Random123.
#[must_use]
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
        }
        let product = |i: usize| u64::from(MULTIPLIERS[i]) * u64::from(counter[2 * i]);
        let (first, second) = (product(0), product(1));
        counter = [
            (second >> 32) as u32 ^ counter[1] ^ key[0],
            second as u32,
            (first >> 32) as u32 ^ counter[3] ^ key[1],
            first as u32,
        ];
    }
    counter
}

/// A number in [0, 1) with 53 random bits. `draw` tells apart several draws for one output token.
#[must_use]
pub fn uniform(seed: u64, choice: u32, output_idx: u32, draw: u32) -> f64 {
    let [high, low, ..] = philox4x32([choice, output_idx, draw, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = u64::from(high) << 32 | u64::from(low);
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_known_answers_of_random123() {
        // `kat_vectors` of Random123, lines "philox4x32 10".
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, want) in cases {
            assert_eq!(philox4x32(counter, key), want);
        }
    }

    #[test]
    fn each_coordinate_matters() {
        let base = uniform(7, 0, 0, 0);
        for other in [
            uniform(8, 0, 0, 0),
            uniform(7 + (1 << 40), 0, 0, 0),
            uniform(7, 1, 0, 0),
            uniform(7, 0, 1, 0),
            uniform(7, 0, 0, 1),
        ] {
            assert_ne!(base, other);
        }
        assert_eq!(base, uniform(7, 0, 0, 0));
    }
}
