//! Combine: the weighted sum of a token's expert outputs, alone or fused with the residual add and the norm behind it.

use device::{DevicePtr, DevicePtrMut, Kernel, LaunchConfig, Module, Stream, View, ViewMut};
use half::bf16;

use crate::Kernels;
use crate::error::{Checker, Result, int};

/// `out[t, h] = sum_j weights[t, j] * y[slot[t, j], h]`, in order of `j`, rounded once. What several ranks add up.
#[derive(Debug)]
pub struct Combine<'a> {
    /// Outputs of experts, `[slots, hidden]`.
    pub y: View<'a, bf16>,
    /// `[tokens, top]`
    pub weights: View<'a, f32>,
    /// Row of `y` of each pair, `[tokens, top]`; negative where another rank has it.
    pub slot: View<'a, i32>,
    /// `[tokens, hidden]`
    pub out: ViewMut<'a, bf16>,
    /// Values of a token.
    pub hidden: usize,
    /// Experts of a token.
    pub top: usize,
}

/// [`Combine`], then [`RmsNorm`](crate::RmsNorm) with the sum as its delta.
#[derive(Debug)]
pub struct CombineNorm<'a> {
    /// The sum; its `out` receives the norm's output.
    pub combine: Combine<'a>,
    /// `[tokens, hidden]`
    pub residual: ViewMut<'a, bf16>,
    /// `[hidden]`
    pub norm_weight: View<'a, bf16>,
    /// Added to the mean square.
    pub eps: f32,
}

kernel_args! {
    struct Args = CombineArgs in "combine/combine.cu" {
        y: DevicePtr<bf16>,
        weight: DevicePtr<f32>,
        slot: DevicePtr<i32>,
        residual: DevicePtrMut<bf16>,
        norm_weight: DevicePtr<bf16>,
        out: DevicePtrMut<bf16>,
        hidden: i32,
        top: i32,
        eps: f32,
        padding: i32,
    }
}

const _: () = assert!(size_of::<Args>() == 64);

/// Kernels by the experts of a token that they have registers for.
#[derive(Debug)]
pub(crate) struct Variants {
    top4: Kernel,
    top8: Kernel,
}

impl Variants {
    pub(crate) fn load(module: &Module) -> Result<Self> {
        Ok(Self { top4: module.kernel("combine_top4", 0)?, top8: module.kernel("combine_top8", 0)? })
    }
}

impl Combine<'_> {
    /// Returns once enqueued. Every slot is below `y`'s rows, which [`Dispatch`](crate::Dispatch) ensures.
    ///
    /// # Errors
    /// `Size` if the operands disagree, `Dimension` unless hidden is a multiple of 8 up to 8192 and top at most 8, `Device` if
    /// the launch fails.
    pub fn enqueue(self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        launch(self, None, kernels, stream)
    }
}

impl CombineNorm<'_> {
    /// Returns once enqueued.
    ///
    /// # Errors
    /// As [`Combine::enqueue`].
    pub fn enqueue(self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        launch(self.combine, Some((self.residual, self.norm_weight, self.eps)), kernels, stream)
    }
}

fn launch(
    mut op: Combine<'_>,
    norm: Option<(ViewMut<'_, bf16>, View<'_, bf16>, f32)>,
    kernels: &Kernels,
    stream: &Stream,
) -> Result<()> {
    let check = Checker("combine");
    let (hidden, top) = (op.hidden, op.top);
    check.dimension(
        "hidden",
        hidden,
        "a multiple of 8 up to 8192",
        hidden.is_multiple_of(8) && (8..=8192).contains(&hidden),
    )?;
    let tokens = op.out.len() / hidden;
    check.size("out", tokens * hidden, op.out.len())?;
    check.experts([tokens, top, hidden], op.weights.len(), op.slot.len(), op.y.len())?;
    let (residual, norm_weight, eps) = match norm {
        None => (DevicePtrMut::NULL, DevicePtr::NULL, 0.0),
        Some((mut residual, weight, eps)) => {
            check.size("residual", tokens * hidden, residual.len())?;
            check.size("norm weight", hidden, weight.len())?;
            (stream.output(&mut residual), stream.input(&weight), eps)
        }
    };
    if tokens == 0 {
        return Ok(());
    }
    let args = Args {
        y: stream.input(&op.y),
        weight: stream.input(&op.weights),
        slot: stream.input(&op.slot),
        residual,
        norm_weight,
        out: stream.output(&mut op.out),
        hidden: int(hidden),
        top: int(top),
        eps,
        padding: 0,
    };
    let config = LaunchConfig::linear(tokens as u32, (hidden / 8).next_multiple_of(32) as u32);
    let kernel = if top <= 4 { &kernels.combine.top4 } else { &kernels.combine.top8 };
    // SAFETY: one block a token and one thread for 8 values; slots are below `tokens * top`, which `y` covers.
    Ok(unsafe { kernel.launch(stream, config, &args) }?)
}
