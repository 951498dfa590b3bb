//! What happens between and after the expert matrices: the gated activation, and adding results to the residual stream.

use std::marker::PhantomData;

use super::routing::Routes;
use crate::simd::{Kernel, LANES, V};
use crate::vector::{Rounding, exp, fma, splat, zip};

/// `gate = min(h_gate + b_gate, limit)`, `up = clamp(h_up + b_up, -limit, limit)`, `out = gate * sigmoid(alpha * gate) * (up + 1)`.
/// Source: `swiglu` in openai/gpt-oss `gpt_oss/torch/model.py`; there each operation is rounded in bf16, and the bias is added to the
/// rounded product.
pub(crate) struct SwiGlu<'a, R> {
    /// `[tokens, 2, units]`: gates, then ups (the checkpoint interleaves them; packing the weights took them apart).
    pub(crate) h: &'a [f32],
    /// `[2, units]`.
    pub(crate) bias: &'a [f32],
    pub(crate) alpha: f32,
    pub(crate) limit: f32,
    /// `[tokens, units]`; `units` is a multiple of 16.
    pub(crate) out: &'a mut [f32],
    pub(crate) rounding: PhantomData<R>,
}

impl<R: Rounding> Kernel for SwiGlu<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<const WIDE: bool>(self) {
        let units = self.bias.len() / 2;
        let ((gate_bias, _), (up_bias, _)) =
            (self.bias[..units].as_chunks::<LANES>(), self.bias[units..].as_chunks::<LANES>());
        for (h, out) in self.h.chunks_exact(2 * units).zip(self.out.chunks_exact_mut(units)) {
            let ((gates, _), (ups, _)) = (h[..units].as_chunks::<LANES>(), h[units..].as_chunks::<LANES>());
            let (out, _) = out.as_chunks_mut::<LANES>();
            for (i, out) in out.iter_mut().enumerate() {
                for lane in 0..LANES {
                    let gate = R::round(gates[i][lane] + gate_bias[i][lane]);
                    let gate = if gate < self.limit { gate } else { self.limit };
                    let up = R::round(ups[i][lane] + up_bias[i][lane]);
                    let up = if up < self.limit { up } else { self.limit };
                    let up = if up > -self.limit { up } else { -self.limit };
                    let sigmoid = R::round(1.0 / (1.0 + exp(-R::round(self.alpha * gate))));
                    out[lane] = R::round(R::round(gate * sigmoid) * R::round(up + 1.0));
                }
            }
        }
    }
}

/// The sum of one vector over ranks, in the tree that continues the one inside a rank (`model::sharding`).
#[inline(always)]
fn rank_tree(ranks: usize, part: impl Fn(usize) -> V) -> V {
    let add = |a: V, b: V| zip(a, b, |a, b| a + b);
    let four = |i: usize| add(add(part(i), part(i + 1)), add(part(i + 2), part(i + 3)));
    match ranks {
        1 => part(0),
        2 => add(part(0), part(1)),
        4 => four(0),
        8 => add(four(0), four(4)),
        _ => unreachable!("ranks that share a sum are a power of two up to 8"),
    }
}

#[inline(always)]
fn vector(row: &[f32], at: usize) -> V {
    row.as_chunks::<LANES>().0[at]
}

/// Finishes the attention block: `x = round(x + round(sum over ranks + bias))`.
pub(crate) struct AddAttention<'a, R> {
    /// One `[tokens, hidden]` of partial sums a rank.
    pub(crate) parts: &'a [&'a [f32]],
    /// `[hidden]`.
    pub(crate) bias: &'a [f32],
    /// `[tokens, hidden]`, the residual stream.
    pub(crate) x: &'a mut [f32],
    pub(crate) rounding: PhantomData<R>,
}

impl<R: Rounding> Kernel for AddAttention<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<const WIDE: bool>(self) {
        let hidden = self.bias.len();
        for (token, x) in self.x.chunks_exact_mut(hidden).enumerate() {
            let (x, _) = x.as_chunks_mut::<LANES>();
            for (i, x) in x.iter_mut().enumerate() {
                let y = rank_tree(self.parts.len(), |rank| vector(&self.parts[rank][token * hidden..][..hidden], i));
                let y = zip(y, vector(self.bias, i), |y, bias| R::round(y + bias));
                *x = zip(*x, y, |x, y| R::round(x + y));
            }
        }
    }
}

/// Finishes the expert block: with `y_e = round(round(sum over ranks) + bias_e)`, `x = round(x + round(sum_e weight_e * y_e))`, experts in
/// ascending order, the sum a chain of fused multiply-adds.
pub(crate) struct AddExperts<'a, R> {
    /// One `[places of its experts, hidden]` of partial sums a rank.
    pub(crate) parts: &'a [&'a [f32]],
    /// Ranks that share an expert.
    pub(crate) expert_tp: usize,
    /// Experts that such a group of ranks holds.
    pub(crate) group_experts: usize,
    /// Of all tokens of the step.
    pub(crate) routes: &'a Routes,
    /// The first of them whose residual stream `x` holds.
    pub(crate) first_token: usize,
    pub(crate) per_token: usize,
    /// `[experts, hidden]`.
    pub(crate) bias: &'a [f32],
    pub(crate) hidden: usize,
    /// `[tokens, hidden]`, the residual stream: the tokens of the rank's attention group.
    pub(crate) x: &'a mut [f32],
    pub(crate) rounding: PhantomData<R>,
}

impl<R: Rounding> Kernel for AddExperts<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<const WIDE: bool>(self) {
        let hidden = self.hidden;
        let mut sums = vec![splat(0.0); hidden / LANES];
        for (token, x) in (self.first_token..).zip(self.x.chunks_exact_mut(hidden)) {
            sums.fill(splat(0.0));
            for pick in token * self.per_token..(token + 1) * self.per_token {
                let expert = self.routes.picks[pick].expert as usize;
                let weight = splat(self.routes.picks[pick].weight);
                let group = expert / self.group_experts;
                let place = self.routes.places[pick] as usize - self.routes.starts[group * self.group_experts];
                let parts = &self.parts[group * self.expert_tp..(group + 1) * self.expert_tp];
                let bias = &self.bias[expert * hidden..][..hidden];
                for (i, sum) in sums.iter_mut().enumerate() {
                    let y = rank_tree(parts.len(), |rank| vector(&parts[rank][place * hidden..][..hidden], i));
                    let y = zip(y, vector(bias, i), |y, bias| R::round(R::round(y) + bias));
                    *sum = fma(weight, y, *sum);
                }
            }
            let (x, _) = x.as_chunks_mut::<LANES>();
            for (x, sum) in x.iter_mut().zip(&sums) {
                *x = zip(*x, *sum, |x, sum| R::round(x + R::round(sum)));
            }
        }
    }
}
