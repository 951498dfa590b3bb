//! Rotary embedding with YaRN scaling, as gpt-oss uses it: "NTK by parts" with fractional ramp bounds.
//!
//! With `d = head_dim` and channel pair `i` in `0..d/2`:
//! ```text
//! f_i       = theta^(2i / d)
//! bound(b)  = d/2 * ln(original_context / (2 pi b)) / ln(theta)        low = bound(beta_fast), high = bound(beta_slow)
//! keep_i    = 1 - clamp((i - low) / (high - low), 0, 1)
//! inv_freq_i = (1 - keep_i) / (factor * f_i) + keep_i / f_i
//! concentration = 0.1 ln(factor) + 1                                    multiplied into both cos and sin
//! ```
//! `low` and `high` are neither floored nor ceiled: rounding them changes some frequencies by up to 76 %
//! (vllm-project/vllm#27722). Source: `RotaryEmbedding` in openai/gpt-oss `gpt_oss/torch/model.py`; arXiv:2309.00071.

use std::f64::consts::PI;

use crate::config::RopeConfig;

/// Factor on cos and sin; scores `q . k` get its square.
#[must_use]
pub fn concentration(rope: &RopeConfig) -> f64 {
    0.1 * rope.factor.ln() + 1.0
}

/// Channel pairs between which YaRN goes from keeping a frequency to interpolating it: (low, high), fractional.
#[must_use]
pub fn ramp_bounds(rope: &RopeConfig, head_dim: usize) -> (f64, f64) {
    let bound = |turns: f64| {
        head_dim as f64 / 2.0 * (rope.original_context_tokens as f64 / (turns * 2.0 * PI)).ln() / rope.theta.ln()
    };
    (bound(rope.beta_fast), bound(rope.beta_slow))
}

/// Radians per position of each channel pair; `head_dim / 2` entries, computed in f64 and rounded once.
#[must_use]
pub fn inv_freq(rope: &RopeConfig, head_dim: usize) -> Vec<f32> {
    let (low, high) = ramp_bounds(rope, head_dim);
    let pair_inv_freq = |pair: usize| {
        let freq = rope.theta.powf(2.0 * pair as f64 / head_dim as f64);
        let keep = 1.0 - ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
        ((1.0 - keep) / (rope.factor * freq) + keep / freq) as f32
    };
    (0..head_dim / 2).map(pair_inv_freq).collect()
}

/// Computes the (cos, sin) pairs of any position, concentration included.
#[derive(Debug, Clone)]
pub struct RopeAngles {
    inv_freq: Vec<f32>,
    concentration: f32,
}

impl RopeAngles {
    /// Prepares the frequencies.
    #[must_use]
    pub fn new(rope: &RopeConfig, head_dim: usize) -> Self {
        Self { inv_freq: inv_freq(rope, head_dim), concentration: concentration(rope) as f32 }
    }

    /// Writes cos and sin of one position, each `head_dim / 2` long. The angle is an f32 product, as in the reference.
    ///
    /// # Panics
    /// If a slice has another length.
    pub fn fill(&self, position: usize, cos: &mut [f32], sin: &mut [f32]) {
        assert!(cos.len() == self.inv_freq.len() && sin.len() == self.inv_freq.len(), "cos and sin hold head_dim / 2");
        for (pair, inv_freq) in self.inv_freq.iter().enumerate() {
            let (s, c) = (position as f32 * inv_freq).sin_cos();
            cos[pair] = c * self.concentration;
            sin[pair] = s * self.concentration;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ModelConfig;

    #[test]
    fn agrees_with_published_values() {
        let rope = ModelConfig::gpt_oss_20b().rope;
        assert_eq!(concentration(&rope), 1.346_573_590_279_972_7);
        let (low, high) = ramp_bounds(&rope, 64);
        assert!((low - 8.092_779_115_512_402).abs() < 1e-12, "low is {low}");
        assert!((high - 17.398_024_501_588_56).abs() < 1e-12, "high is {high}");
        let inv_freq = inv_freq(&rope, 64);
        for (pair, expected) in [(0, 1.0), (8, 0.050_813_275), (17, 1.293_187e-4), (31, 3.023_511_4e-7)] {
            let error = (f64::from(inv_freq[pair]) - expected).abs() / expected;
            assert!(error < 1e-7, "inv_freq[{pair}] is {}, expected {expected}", inv_freq[pair]);
        }
    }

    #[test]
    fn rounding_the_ramp_would_be_seen() {
        // The released bug: low floored to 8, high ceiled to 18. The tests above must be able to tell.
        let rope = ModelConfig::gpt_oss_20b().rope;
        let (low, high) = ramp_bounds(&rope, 64);
        let truncated = |pair: f64| {
            let freq = rope.theta.powf(2.0 * pair / 64.0);
            let keep = 1.0 - ((pair - low.floor()) / (high.ceil() - low.floor())).clamp(0.0, 1.0);
            (1.0 - keep) / (rope.factor * freq) + keep / freq
        };
        let worst = inv_freq(&rope, 64)
            .iter()
            .enumerate()
            .map(|(pair, &exact)| (truncated(pair as f64) / f64::from(exact) - 1.0).abs())
            .fold(0.0, f64::max);
        assert!((0.70..0.80).contains(&worst), "largest relative change is {worst}");
    }

    #[test]
    fn angles_carry_the_concentration() {
        let angles = RopeAngles::new(&ModelConfig::gpt_oss_20b().rope, 64);
        let (mut cos, mut sin) = ([0.0; 32], [0.0; 32]);
        angles.fill(0, &mut cos, &mut sin);
        assert_eq!((cos[0], sin[0]), (1.346_573_6, 0.0));
        angles.fill(131_071, &mut cos, &mut sin);
        for pair in 0..32 {
            let norm = f64::from(cos[pair]).hypot(f64::from(sin[pair]));
            assert!((norm - 1.346_573_590).abs() < 1e-6, "pair {pair}: {norm}");
        }
    }
}
