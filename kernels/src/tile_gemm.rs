//! Matrix products with many columns, on the tensor cores: prefill, and decode of large batches.

use device::{DevicePtr, DevicePtrMut, Kernel, LaunchConfig, Module, Stream, Swizzle, TensorMap, View};
use half::bf16;

use crate::error::{Checker, KernelError, Result, int};
use crate::pack_weights::{Format, PackedWeights, STEP_K, STRIP_ROWS};
use crate::{Kernels, Output, Routing, Workspace};

/// Columns of a tile that there are kernels for.
const WIDTHS: [usize; 4] = [32, 64, 128, 256];
/// Strips of a tile, threads of a block: constants of tile_gemm.cu, whose steps take `STEP_K` values along k.
const TILE_STRIPS: usize = 8;
const THREADS: u32 = 384;
const MAX_STAGES: usize = 12;
const SHARED_BYTES: usize = 224 * 1024;
/// What aligning the activations may take.
const ALIGNMENT: usize = 1024;

/// Blocks that share a multiprocessor at a width: `BLOCKS` in tile_gemm.cu.
const fn resident(width: usize) -> usize {
    if width <= 64 { 2 } else { 1 }
}

/// Steps of a stage: `STAGE_STEPS` in tile_gemm.cu.
const fn stage_steps(format: Format, width: usize) -> usize {
    if matches!(format, Format::Mxfp4) && width <= 64 { 2 } else { 1 }
}

/// `out[s, r] = sum_k x[s, k] * weights[r, k] + bias[r]` with f32 sums, the bias added to them before any rounding.
///
/// Dense: slots are the rows of `x`. With a [`Routing`], each slot takes its expert's matrix; `x` has a row a slot
/// ([`GatherRows`](crate::GatherRows)), and the routing's tiles have 32, 64, 128 or 256 slots.
///
/// Takes the same packed weights as [`SkinnyGemm`](crate::SkinnyGemm), which is faster up to 16 columns.
/// Plain definitions: `model::reference::{linear, swiglu}`.
#[derive(Debug)]
pub struct TileGemm<'a> {
    /// `[rows, k]`, or one such matrix an expert.
    pub weights: &'a PackedWeights,
    /// `[columns, k]`
    pub x: View<'a, bf16>,
    /// `[rows]`, or `[experts, rows]`.
    pub bias: Option<View<'a, bf16>>,
    /// Where it goes.
    pub out: Output<'a>,
    /// Which slots belong to which expert; `None`: one matrix for all.
    pub routing: Option<&'a Routing>,
    /// Scratch of this stream.
    pub workspace: &'a mut Workspace,
}

kernel_args! {
    struct Args = TileArgs in "tile_gemm/tile_gemm.cu" {
        x: TensorMap,
        weights: DevicePtr<u8>,
        scales: DevicePtr<f32>,
        bias: DevicePtr<bf16>,
        out: u64,
        tiles: DevicePtr<[i32; 4]>,
        num_tiles: DevicePtr<i32>,
        partials: DevicePtrMut<f32>,
        counters: DevicePtrMut<u32>,
        expert_bytes: u64,
        columns: i32,
        strips: i32,
        row_blocks: i32,
        steps: i32,
        splits: i32,
        stages: i32,
    }
}

const _: () = assert!(size_of::<Args>() == 256);

/// Kernels by format and epilogue, then by width.
#[derive(Debug)]
pub(crate) struct Variants {
    bf16: [Kernel; 4],
    bf16_f32: [Kernel; 4],
    bf16_swiglu: [Kernel; 4],
    mxfp4: [Kernel; 4],
    mxfp4_swiglu: [Kernel; 4],
    fp8: [Kernel; 4],
    fp8_f32: [Kernel; 4],
    fp8_swiglu: [Kernel; 4],
}

impl Variants {
    pub(crate) fn load(module: &Module) -> Result<Self> {
        let widths = |names: [&'static str; 4]| -> Result<[Kernel; 4]> {
            let [a, b, c, d] = names.map(|name| module.kernel(name, SHARED_BYTES as u32));
            Ok([a?, b?, c?, d?])
        };
        Ok(Self {
            bf16: widths(["tile_bf16_n32", "tile_bf16_n64", "tile_bf16_n128", "tile_bf16_n256"])?,
            bf16_f32: widths(["tile_bf16_f32_n32", "tile_bf16_f32_n64", "tile_bf16_f32_n128", "tile_bf16_f32_n256"])?,
            bf16_swiglu: widths([
                "tile_bf16_swiglu_n32",
                "tile_bf16_swiglu_n64",
                "tile_bf16_swiglu_n128",
                "tile_bf16_swiglu_n256",
            ])?,
            mxfp4: widths(["tile_mxfp4_n32", "tile_mxfp4_n64", "tile_mxfp4_n128", "tile_mxfp4_n256"])?,
            mxfp4_swiglu: widths([
                "tile_mxfp4_swiglu_n32",
                "tile_mxfp4_swiglu_n64",
                "tile_mxfp4_swiglu_n128",
                "tile_mxfp4_swiglu_n256",
            ])?,
            fp8: widths(["tile_fp8_n32", "tile_fp8_n64", "tile_fp8_n128", "tile_fp8_n256"])?,
            fp8_f32: widths(["tile_fp8_f32_n32", "tile_fp8_f32_n64", "tile_fp8_f32_n128", "tile_fp8_f32_n256"])?,
            fp8_swiglu: widths([
                "tile_fp8_swiglu_n32",
                "tile_fp8_swiglu_n64",
                "tile_fp8_swiglu_n128",
                "tile_fp8_swiglu_n256",
            ])?,
        })
    }

    fn of(&self, format: Format, out: &Output<'_>) -> Option<&[Kernel; 4]> {
        match (format, out) {
            (Format::Bf16, Output::Bf16(_)) => Some(&self.bf16),
            (Format::Bf16, Output::F32(_)) => Some(&self.bf16_f32),
            (Format::Bf16, Output::SwiGlu(_)) => Some(&self.bf16_swiglu),
            (Format::Mxfp4, Output::Bf16(_)) => Some(&self.mxfp4),
            (Format::Mxfp4, Output::SwiGlu(_)) => Some(&self.mxfp4_swiglu),
            (Format::Mxfp4, Output::F32(_)) => None,
            (Format::Fp8, Output::Bf16(_)) => Some(&self.fp8),
            (Format::Fp8, Output::F32(_)) => Some(&self.fp8_f32),
            (Format::Fp8, Output::SwiGlu(_)) => Some(&self.fp8_swiglu),
        }
    }
}

impl TileGemm<'_> {
    /// Returns once enqueued.
    ///
    /// # Errors
    /// `Size` if the operands disagree, `Dimension` for tiles of another width or an output that the format has no kernel for, `Device`
    /// if the launch fails.
    pub fn enqueue(mut self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        let check = Checker("tile_gemm");
        let weights = self.weights;
        let columns = self.check(check)?;
        if columns == 0 {
            return Ok(());
        }
        let plan = Plan::new(weights, columns, self.routing, kernels.multiprocessors as usize);
        let variants = kernels.tile_gemm.of(weights.format, &self.out);
        let variants = variants.ok_or(KernelError::Dimension {
            operation: "tile_gemm",
            dimension: "output",
            allowed: "bf16 or swiglu for mxfp4 weights",
            found: 0,
        })?;
        let width = WIDTHS[plan.width];
        let parts = if plan.splits > 1 { plan.items * plan.splits } else { plan.cuts };
        check.room("partials", parts * width * 128, self.workspace.partials.len())?;
        check.room("counters", plan.items.min(parts).max(plan.cuts), self.workspace.counters.len())?;
        let x = stream.input(&self.x);
        // `BOX` in tile_gemm.cu: tiles of experts have any number of columns.
        let box_columns = if weights.format == Format::Mxfp4 { width / 4 } else { width };
        let args = Args {
            x: TensorMap::matrix(
                x,
                [columns, weights.k],
                weights.k,
                [box_columns as u32, STEP_K as u32],
                Swizzle::Bytes128,
            )?,
            weights: stream.input(&weights.bytes.view()),
            scales: weights.scales(stream),
            bias: self.bias.map_or(DevicePtr::NULL, |bias| stream.input(&bias)),
            out: match &mut self.out {
                Output::Bf16(out) | Output::SwiGlu(out) => stream.output(out).address(),
                Output::F32(out) => stream.output(out).address(),
            },
            tiles: self.routing.map_or(DevicePtr::NULL, |routing| stream.input(&routing.tiles.view())),
            num_tiles: self.routing.map_or(DevicePtr::NULL, |routing| stream.input(&routing.num_tiles.view())),
            partials: stream.output(&mut self.workspace.partials.view_mut()),
            counters: stream.output(&mut self.workspace.counters.view_mut()),
            expert_bytes: weights.matrix_bytes() as u64,
            columns: int(columns),
            strips: int(weights.rows / STRIP_ROWS),
            row_blocks: int(plan.row_blocks),
            steps: int(plan.steps),
            splits: int(plan.splits),
            stages: int(plan.stages),
        };
        let config = LaunchConfig {
            shared_bytes: plan.shared_bytes as u32,
            ..LaunchConfig::linear(plan.blocks as u32, THREADS)
        };
        // SAFETY: `check` proved that weights, x, bias and out cover every matrix, slot and row; tiles come from a dispatch into
        // `routing`, whose buffers bound them; what a box has beyond x is zero, and so is what weights are filled up with.
        Ok(unsafe { variants[plan.width].launch(stream, config, &args) }?)
    }

    /// Rows of `x`.
    fn check(&self, check: Checker) -> Result<usize> {
        let weights = self.weights;
        let columns = self.x.len() / weights.k;
        check.size("x", columns * weights.k, self.x.len())?;
        let (out_len, out_rows, swiglu) = match &self.out {
            Output::Bf16(out) => (out.len(), weights.rows, false),
            Output::F32(out) => (out.len(), weights.rows, false),
            Output::SwiGlu(out) => (out.len(), weights.rows / 2, true),
        };
        check.dimension(
            "interleave",
            usize::from(weights.interleaved),
            "1 exactly for swiglu",
            swiglu == weights.interleaved,
        )?;
        check.room("out", columns * out_rows, out_len)?;
        if let Some(bias) = &self.bias {
            check.size("bias", weights.matrices * weights.rows, bias.len())?;
        }
        match self.routing {
            None => check.dimension("matrices", weights.matrices, "1 without routing", weights.matrices == 1)?,
            Some(routing) => {
                check.size("experts", routing.num_experts, weights.matrices)?;
                let tiled = WIDTHS.contains(&routing.tile_slots);
                check.dimension("tile slots", routing.tile_slots, "32, 64, 128 or 256", tiled)?;
                check.room("routing", columns, routing.gather.len())?;
            }
        }
        Ok(columns)
    }
}

/// How the work is cut: the one place where tile sizes are chosen.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    /// Index into [`WIDTHS`].
    width: usize,
    row_blocks: usize,
    steps: usize,
    /// Tiles of a dense product; of a grouped one only the device knows.
    items: usize,
    splits: usize,
    blocks: usize,
    /// Blocks whose work may begin or end within a tile.
    cuts: usize,
    stages: usize,
    shared_bytes: usize,
}

impl Plan {
    /// Dense: the width whose last wave of blocks wastes least, wider first; and where even all tiles leave multiprocessors idle, k is
    /// split until they are busy, but not below 6 steps. Grouped: the routing's width.
    fn new(weights: &PackedWeights, columns: usize, routing: Option<&Routing>, multiprocessors: usize) -> Self {
        let row_blocks = (weights.rows / STRIP_ROWS).div_ceil(TILE_STRIPS);
        let steps = weights.k.div_ceil(STEP_K);
        let items = |width: usize| columns.div_ceil(width) * row_blocks;
        let cost = |width: usize| items(width).div_ceil(multiprocessors) * width;
        let width = match routing {
            Some(routing) => WIDTHS.iter().position(|width| *width == routing.tile_slots).unwrap_or(0),
            None => match WIDTHS.iter().position(|width| columns <= *width) {
                Some(narrow) if narrow < 3 => narrow,
                // Tiles of 128 fetch 1.3 times as much for each operation.
                _ if 10 * cost(WIDTHS[2]) < 9 * cost(WIDTHS[3]) => 2,
                _ => 3,
            },
        };
        let items = items(WIDTHS[width]);
        // Partial sums of 256 columns would not fit the workspace, and so many columns fill the chip.
        let splits = if routing.is_some() || WIDTHS[width] == 256 {
            1
        } else {
            (multiprocessors * resident(WIDTHS[width]) / items).min(steps / 6).max(1)
        };
        let step_bytes = weights.format.tile_bytes() * (STEP_K / weights.format.tile_k());
        let stage =
            stage_steps(weights.format, WIDTHS[width]) * (WIDTHS[width] * STEP_K * 2 + TILE_STRIPS * step_bytes);
        let blocks = multiprocessors * resident(WIDTHS[width]);
        let cuts = if routing.is_some() && stage_steps(weights.format, WIDTHS[width]) > 1 { blocks } else { 0 };
        let stages = ((SHARED_BYTES / resident(WIDTHS[width]) - ALIGNMENT) / stage).min(MAX_STAGES);
        let shared_bytes = stages * stage + ALIGNMENT;
        Self { width, row_blocks, steps, items, splits, blocks, cuts, stages, shared_bytes }
    }
}
