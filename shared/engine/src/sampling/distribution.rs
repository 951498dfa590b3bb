//! Drawing from a distribution over the vocabulary without sorting all of it.

use std::cmp::Ordering;

use types::{Sampling, TokenId};

use crate::simd::{Kernel, LANES, Simd, V};
use crate::vector::{exp, greater, map, max, splat, zip};

/// Weights whose sum is kept beside them, so that a draw looks into one block only.
const BLOCK: usize = 256;
/// Candidates that top-p sorts first. Most distributions of a trained model need no more.
const FIRST_CANDIDATES: usize = 64;

/// `exp((logit - greatest) / temperature)` of each token, and their sums by block.
pub(super) struct Distribution {
    simd: Simd,
    weights: Vec<f32>,
    block_sums: Vec<f64>,
    candidates: Vec<TokenId>,
}

impl Distribution {
    pub(super) const fn new(simd: Simd) -> Self {
        Self { simd, weights: Vec::new(), block_sums: Vec::new(), candidates: Vec::new() }
    }

    fn fill(&mut self, logits: &[f32], temperature: f32) -> f32 {
        self.weights.resize(logits.len(), 0.0);
        self.block_sums.clear();
        let Self { simd, weights, block_sums, .. } = self;
        simd.run(Weigh { logits, temperature, weights, block_sums })
    }

    /// `ln sum_i exp(logit_i)`.
    pub(super) fn log_sum_exp(&mut self, logits: &[f32]) -> f64 {
        let top = self.fill(logits, 1.0);
        f64::from(top) + self.block_sums.iter().sum::<f64>().ln()
    }

    /// Draws a token. `u` is uniform in [0, 1).
    ///
    /// With neither top-k nor top-p the inverse of the cumulative distribution is taken in order of ids, which needs no sorting; else in order of
    /// descending probability, the lowest id first among equals.
    pub(super) fn draw(&mut self, logits: &[f32], sampling: &Sampling, u: f64) -> TokenId {
        self.fill(logits, sampling.temperature);
        let top_k = if sampling.top_k == 0 { logits.len() } else { (sampling.top_k as usize).min(logits.len()) };
        if top_k == logits.len() && sampling.top_p >= 1.0 {
            if sampling.min_p > 0.0 {
                self.drop_below(sampling.min_p);
            }
            self.draw_by_id(u)
        } else {
            self.draw_sorted(logits, top_k, sampling, u)
        }
    }

    /// Min-p: the greatest weight is 1.
    fn drop_below(&mut self, min_p: f32) {
        for (weights, sum) in self.weights.chunks_mut(BLOCK).zip(&mut self.block_sums) {
            *sum = 0.0;
            for weight in weights {
                *weight = if *weight < min_p { 0.0 } else { *weight };
                *sum += f64::from(*weight);
            }
        }
    }

    fn draw_by_id(&self, u: f64) -> TokenId {
        let mut left = u * self.block_sums.iter().sum::<f64>();
        let mut last = 0;
        for (block, sum) in self.block_sums.iter().enumerate() {
            if *sum == 0.0 {
                continue;
            }
            last = block;
            if left < *sum {
                break;
            }
            left -= sum;
        }
        // Rounding may leave a rest past the last token of the block: then that one it is.
        let mut drawn = last * BLOCK;
        for (i, weight) in self.weights[last * BLOCK..].iter().take(BLOCK).enumerate() {
            if *weight > 0.0 {
                drawn = last * BLOCK + i;
                left -= f64::from(*weight);
                if left < 0.0 {
                    break;
                }
            }
        }
        drawn as TokenId
    }

    fn draw_sorted(&mut self, logits: &[f32], top_k: usize, sampling: &Sampling, u: f64) -> TokenId {
        let order = |a: &TokenId, b: &TokenId| descending(logits, *a, *b);
        let weight = |token: &TokenId| f64::from(self.weights[*token as usize]);
        let ids = 0..logits.len() as TokenId;
        self.candidates.clear();
        let (total, mut sorted) = if top_k < logits.len() {
            self.candidates.extend(ids);
            self.candidates.select_nth_unstable_by(top_k - 1, order);
            self.candidates.truncate(top_k);
            self.candidates.sort_unstable_by(order);
            (self.candidates.iter().map(weight).sum::<f64>(), top_k)
        } else {
            // What is less probable than this has less than `1 - top_p` of the mass, all of it together: never kept.
            let total = self.block_sums.iter().sum::<f64>();
            let least = (1.0 - f64::from(sampling.top_p)) * total / logits.len() as f64;
            self.candidates.extend(ids.filter(|token| weight(token) >= least));
            (total, 0)
        };
        // Sort ever longer prefixes until one holds the mass that top-p wants.
        let wanted = if sampling.top_p < 1.0 { f64::from(sampling.top_p) * total } else { f64::INFINITY };
        let candidates = &mut self.candidates[..];
        let (mut kept, mut kept_mass) = (0, 0.0);
        loop {
            while kept < sorted && kept_mass < wanted {
                kept_mass += weight(&candidates[kept]);
                kept += 1;
            }
            if kept_mass >= wanted || sorted == candidates.len() {
                break;
            }
            let longer = (sorted * 8).max(FIRST_CANDIDATES).min(candidates.len());
            if longer < candidates.len() {
                candidates[sorted..].select_nth_unstable_by(longer - sorted, order);
            }
            candidates[sorted..longer].sort_unstable_by(order);
            sorted = longer;
        }
        // The greatest weight is 1, so this keeps at least one; it never keeps a weight of zero.
        let least = f64::from(greater(sampling.min_p, f32::MIN_POSITIVE));
        let kept = &candidates[..kept];
        let kept = &kept[..kept.partition_point(|token| weight(token) >= least)];
        let mut left = u * kept.iter().map(weight).sum::<f64>();
        for token in kept {
            left -= weight(token);
            if left < 0.0 {
                return *token;
            }
        }
        kept[kept.len() - 1] // rounding left a rest
    }
}

/// Order by falling logit, then by rising id. Adding zero makes -0 and 0 equal.
fn descending(logits: &[f32], a: TokenId, b: TokenId) -> Ordering {
    let key = |token: TokenId| logits[token as usize] + 0.0;
    key(b).total_cmp(&key(a)).then(a.cmp(&b))
}

struct Weigh<'a> {
    logits: &'a [f32],
    temperature: f32,
    weights: &'a mut [f32],
    block_sums: &'a mut Vec<f64>,
}

impl Kernel for Weigh<'_> {
    /// The greatest logit.
    type Output = f32;

    #[inline(always)]
    fn run<const WIDE: bool>(self) -> f32 {
        let (vectors, rest) = self.logits.as_chunks::<LANES>();
        let top = vectors.iter().fold(splat(f32::NEG_INFINITY), |top, logits| zip(top, *logits, greater));
        let top = rest.iter().fold(max(top), |top, logit| greater(top, *logit));
        for (weights, logits) in self.weights.chunks_mut(BLOCK).zip(self.logits.chunks(BLOCK)) {
            let ((weights, weights_rest), (logits, logits_rest)) =
                (weights.as_chunks_mut::<LANES>(), logits.as_chunks::<LANES>());
            let mut sums = [0.0f64; LANES];
            for (weights, logits) in weights.iter_mut().zip(logits) {
                let w: V = map(*logits, |logit| exp((logit - top) / self.temperature));
                *weights = w;
                for lane in 0..LANES {
                    sums[lane] += f64::from(w[lane]);
                }
            }
            let mut sum: f64 = sums.iter().sum();
            for (weight, logit) in weights_rest.iter_mut().zip(logits_rest) {
                *weight = exp((logit - top) / self.temperature);
                sum += f64::from(*weight);
            }
            self.block_sums.push(sum);
        }
        top
    }
}
