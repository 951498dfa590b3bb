//! RMSNorm, fused with the residual add before it.

use device::{DevicePtr, DevicePtrMut, LaunchConfig, Stream, View, ViewMut};
use half::bf16;

use crate::Kernels;
use crate::error::{Checker, Result, int};

/// `residual[t, h] += delta[t, h]`, rounded to bf16;
/// `out[t, h] = residual[t, h] * rsqrt(mean_h(residual[t, h]²) + eps) * weight[h]`, in f32, the weight before the cast.
///
/// Source: `RMSNorm` in openai/gpt-oss `gpt_oss/torch/model.py`; plain definition: `model::reference::rmsnorm`.
#[derive(Debug)]
pub struct RmsNorm<'a> {
    /// `[tokens, hidden]`
    pub residual: ViewMut<'a, bf16>,
    /// `[tokens, hidden]`, or nothing to add.
    pub delta: Option<View<'a, bf16>>,
    /// `[hidden]`
    pub weight: View<'a, bf16>,
    /// `[tokens, hidden]`
    pub out: ViewMut<'a, bf16>,
    /// Added to the mean square.
    pub eps: f32,
}

kernel_args! {
    struct Args = RmsNormArgs in "rmsnorm/rmsnorm.cu" {
        residual: DevicePtrMut<bf16>,
        delta: DevicePtr<bf16>,
        weight: DevicePtr<bf16>,
        out: DevicePtrMut<bf16>,
        hidden: i32,
        eps: f32,
    }
}

const _: () = assert!(size_of::<Args>() == 40);

impl RmsNorm<'_> {
    /// Returns once enqueued.
    ///
    /// # Errors
    /// `Size` if the operands disagree, `Dimension` unless hidden is a multiple of 8 up to 8192, `Device` if the launch fails.
    pub fn enqueue(mut self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        let check = Checker("rmsnorm");
        let hidden = self.weight.len();
        check.dimension(
            "hidden",
            hidden,
            "a multiple of 8 up to 8192",
            hidden.is_multiple_of(8) && (8..=8192).contains(&hidden),
        )?;
        let tokens = self.out.len() / hidden;
        check.size("out", tokens * hidden, self.out.len())?;
        check.size("residual", tokens * hidden, self.residual.len())?;
        if let Some(delta) = &self.delta {
            check.size("delta", tokens * hidden, delta.len())?;
        }
        if tokens == 0 {
            return Ok(());
        }
        let args = Args {
            residual: stream.output(&mut self.residual),
            delta: self.delta.map_or(DevicePtr::NULL, |delta| stream.input(&delta)),
            weight: stream.input(&self.weight),
            out: stream.output(&mut self.out),
            hidden: int(hidden),
            eps: self.eps,
        };
        let config = LaunchConfig::linear(tokens as u32, (hidden / 8).next_multiple_of(32) as u32);
        // SAFETY: one block a token and one thread for 8 values: the accesses are those checked above.
        Ok(unsafe { kernels.rmsnorm.launch(stream, config, &args) }?)
    }
}
