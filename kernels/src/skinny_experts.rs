//! Both products of experts in one launch, for few slots an expert: what a decode step of experts spends its time on.

use device::{DevicePtrMut, Kernel, Module, Stream, View, ViewMut};
use half::bf16;

use crate::error::{Checker, Result, int};
use crate::pack_weights::{Format, PackedWeights};
use crate::skinny_gemm::{Plan, SHARED_BYTES, SkinnyArgs, share_out};
use crate::{Grouped, Kernels, Output, Routing, SkinnyGemm, Workspace};

/// `activated = swiglu(x[gather] gate_up^T + gate_up_bias)`, `out = activated down^T + down_bias`: a [`SkinnyGemm`] that gathers and
/// activates, and one by slot that takes what the first gave, to the same bits.
///
/// A block waits for all others, so all must be on the device at once: no kernel may run beside it that waits for blocks of its own, as
/// another one of these does, or for another GPU.
///
/// Plain definitions: `model::reference::{linear, swiglu}`.
#[derive(Debug)]
pub struct SkinnyExperts<'a> {
    /// `[2 * units, hidden]` an expert, packed `interleaved`.
    pub gate_up: &'a PackedWeights,
    /// `[hidden, units]` an expert, in the same format.
    pub down: &'a PackedWeights,
    /// `[tokens, hidden]`
    pub x: View<'a, bf16>,
    /// `[experts, 2 * units]`
    pub gate_up_bias: Option<View<'a, bf16>>,
    /// `[experts, hidden]`
    pub down_bias: Option<View<'a, bf16>>,
    /// Scratch, written as well: `[slots, units]`.
    pub activated: ViewMut<'a, bf16>,
    /// `[slots, hidden]`
    pub out: ViewMut<'a, bf16>,
    /// Filled by [`Dispatch`](crate::Dispatch), with 8 slots a tile.
    pub routing: &'a Routing,
    /// Scratch of this stream.
    pub workspace: &'a mut Workspace,
}

kernel_args! {
    struct Args = SkinnyExpertsArgs in "skinny_gemm/work.cuh" {
        products: [SkinnyArgs; 2],
    }
}

const _: () = assert!(size_of::<Args>() == 288);

/// Kernels by format.
#[derive(Debug)]
pub(crate) struct Variants {
    bf16: Kernel,
    mxfp4: Kernel,
    fp8: Kernel,
}

impl Variants {
    pub(crate) fn load(module: &Module) -> Result<Self> {
        let kernel = |name| module.kernel(name, SHARED_BYTES as u32);
        Ok(Self {
            bf16: kernel("skinny_experts_bf16")?,
            mxfp4: kernel("skinny_experts_mxfp4")?,
            fp8: kernel("skinny_experts_fp8")?,
        })
    }

    const fn of(&self, format: Format) -> &Kernel {
        match format {
            Format::Bf16 => &self.bf16,
            Format::Mxfp4 => &self.mxfp4,
            Format::Fp8 => &self.fp8,
        }
    }
}

impl SkinnyExperts<'_> {
    /// Returns once enqueued.
    ///
    /// # Errors
    /// `Size` if the operands disagree, `Dimension` for tiles that are too wide or two formats, `Device` if the launch fails.
    pub fn enqueue(mut self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        let check = Checker("skinny_experts");
        let format = self.gate_up.format;
        check.dimension("formats", 1, "the same in both products", self.down.format == format)?;
        check.size("units", self.gate_up.rows, 2 * self.down.k)?;
        let (tiles, tile_slots) = (self.routing.tiles.len(), self.routing.tile_slots);
        check.dimension("tile slots", tile_slots, "8", tile_slots == 8)?;
        check.room("counters", tiles, self.workspace.counters.len())?;
        let (Some((mut first, first_plan)), Some((mut second, second_plan))) =
            (self.first(check, kernels, stream)?, self.second(check, kernels, stream)?)
        else {
            return Ok(());
        };
        let joins = first_plan.joins(kernels);
        check.room("joins", joins + second_plan.joins(kernels), self.workspace.joins.len())?;
        second.joins = stream.output(&mut self.workspace.joins.slice_mut(joins..));
        let done: DevicePtrMut<u32> = stream.output(&mut self.workspace.counters.view_mut());
        (first.done, second.done) = (done, done);
        second.awaited_groups = int(first_plan.groups);
        let plans = [&first_plan, &second_plan];
        let config = share_out(check, kernels, &mut [&mut first, &mut second], &plans)?;
        let kernel = kernels.skinny_experts.of(format);
        // SAFETY: as for `SkinnyGemm`, of each product; `done` has a counter for each tile that the routing has room for.
        Ok(unsafe { kernel.launch(stream, config, &Args { products: [first, second] }) }?)
    }

    fn first(&mut self, check: Checker, kernels: &Kernels, stream: &Stream) -> Result<Option<(SkinnyArgs, Plan)>> {
        SkinnyGemm {
            weights: self.gate_up,
            x: self.x,
            bias: self.gate_up_bias,
            out: Output::SwiGlu(self.activated.reborrow()),
            routing: Some(Grouped { routing: self.routing, gather: true, settled: false }),
            workspace: self.workspace,
        }
        .prepare(check, kernels, stream)
    }

    fn second(&mut self, check: Checker, kernels: &Kernels, stream: &Stream) -> Result<Option<(SkinnyArgs, Plan)>> {
        SkinnyGemm {
            weights: self.down,
            x: self.activated.as_view(),
            bias: self.down_bias,
            out: Output::Bf16(self.out.reborrow()),
            routing: Some(Grouped { routing: self.routing, gather: false, settled: true }),
            workspace: self.workspace,
        }
        .prepare(check, kernels, stream)
    }
}
