//! Root-mean-square normalisation.

use std::marker::PhantomData;

use crate::simd::{Kernel, LANES, V};
use crate::vector::{Rounding, fma, sum};

/// `out[t, h] = round(x[t, h] * (1 / sqrt(mean_h(x[t, h]²) + eps)) * weight[h])`, all in f32 before the rounding.
/// Squares are summed in 16 chains over `h mod 16`, then in a tree. Source: `RMSNorm` in openai/gpt-oss `gpt_oss/torch/model.py`.
pub(crate) struct RmsNorm<'a, R> {
    /// `[tokens, hidden]`; `hidden` is a multiple of 16.
    pub(crate) x: &'a [f32],
    /// `[hidden]`.
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
    /// `[tokens, hidden]`.
    pub(crate) out: &'a mut [f32],
    pub(crate) rounding: PhantomData<R>,
}

impl<R: Rounding> Kernel for RmsNorm<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<const WIDE: bool>(self) {
        let hidden = self.weight.len();
        let (weight, _) = self.weight.as_chunks::<LANES>();
        for (x, out) in self.x.chunks_exact(hidden).zip(self.out.chunks_exact_mut(hidden)) {
            let ((x, _), (out, _)) = (x.as_chunks::<LANES>(), out.as_chunks_mut::<LANES>());
            let mut squares: V = [0.0; LANES];
            for x in x {
                squares = fma(*x, *x, squares);
            }
            let scale = 1.0 / (sum(squares) / hidden as f32 + self.eps).sqrt();
            for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                for lane in 0..LANES {
                    out[lane] = R::round(x[lane] * scale * weight[lane]);
                }
            }
        }
    }
}
