//! Matrix products with few columns: what decode spends its time on. Streams every weight once.

use device::{DevicePtr, DevicePtrMut, Kernel, LaunchConfig, Module, Stream, View, ViewMut};
use half::bf16;

use crate::error::{Checker, KernelError, Result, int};
use crate::pack_weights::{Format, PackedWeights, STRIP_ROWS};
use crate::{Kernels, Routing, Workspace};

/// Columns of a dense product at most.
const MAX_COLUMNS: usize = 16;
/// Strips of a group, parts into which its k is split among warps, warps of a block, most stages: constants of work.cuh.
const GROUP: usize = 4;
const PARTS: usize = 8;
const WARPS: u32 = 19;
const MAX_STAGES: usize = 16;
/// Warpgroups of a block that multiply, warps of it, k-tiles of a stage, columns at most: constants of warpgroups.cuh.
const WARPGROUPS: usize = 4;
const STREAM_WARPS: u32 = 20;
const CHUNK_TILES: usize = 3;
const STREAM_COLUMNS: usize = 24;
/// What aligning the activations of warpgroups may take.
const ALIGNMENT: usize = 1024;
/// Dynamic shared memory that a block can have beside its barriers.
pub(crate) const SHARED_BYTES: usize = 226 * 1024;

/// Where the product goes, and what happens to it on the way.
#[derive(Debug)]
pub enum Output<'a> {
    /// Rounded: `[slots, rows]`.
    Bf16(ViewMut<'a, bf16>),
    /// As summed: `[slots, rows]`.
    F32(ViewMut<'a, f32>),
    /// Clamped SwiGLU of gate (even) and up (odd) rows, rounded: `[slots, rows / 2]`. The weights are packed `interleaved`.
    SwiGlu(ViewMut<'a, bf16>),
}

/// `out[s, r] = sum_k x[row(s), k] * weights[r, k] + bias[r]` with f32 sums, the bias added to them before any rounding.
///
/// Dense: slots are the rows of `x`, at most 16. With a [`Routing`], each slot takes its expert's matrix, and any number of slots is
/// worked off in tiles; `x` is then indexed by token (`gather`) or by slot.
///
/// Dense: the order of a sum depends on the matrix and the device only, so a row's result does not change with the batch around it.
/// With a routing, it depends on the number of tiles as well: where one block's work ends and the next one's begins.
///
/// Plain definitions: `model::reference::{linear, swiglu}`.
#[derive(Debug)]
pub struct SkinnyGemm<'a> {
    /// `[rows, k]`, or one such matrix an expert.
    pub weights: &'a PackedWeights,
    /// `[tokens or slots, k]`
    pub x: View<'a, bf16>,
    /// `[rows]`, or `[experts, rows]`.
    pub bias: Option<View<'a, bf16>>,
    /// Where it goes.
    pub out: Output<'a>,
    /// Which slots belong to which expert; `None`: one matrix for all.
    pub routing: Option<Grouped<'a>>,
    /// Scratch of this stream.
    pub workspace: &'a mut Workspace,
}

/// How a grouped product finds its rows.
#[derive(Debug, Clone, Copy)]
pub struct Grouped<'a> {
    /// Filled by [`Dispatch`](crate::Dispatch), with 8 or 16 slots a tile, or 24 for MXFP4 weights.
    pub routing: &'a Routing,
    /// Whether `x` has a row a token (the first product of an expert) or a row a slot (the second).
    pub gather: bool,
    /// Whether a `SkinnyGemm` that is not settled was enqueued since the dispatch: then weights are fetched before it has ended. It
    /// starts the next kernel only when the dispatch has ended, which others do not wait for.
    pub settled: bool,
}

kernel_struct! {
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct SkinnyArgs = SkinnyArgs in "skinny_gemm/work.cuh" as ARGS {
        weights: DevicePtr<u8>,
        scales: DevicePtr<f32>,
        x: DevicePtr<bf16>,
        bias: DevicePtr<bf16>,
        out: u64,
        tiles: DevicePtr<[i32; 4]>,
        num_tiles: DevicePtr<i32>,
        gather: DevicePtr<i32>,
        pub(crate) joins: DevicePtrMut<f32>,
        pub(crate) done: DevicePtrMut<u32>,
        expert_bytes: u64,
        tokens: i32,
        strips: i32,
        groups: i32,
        k: i32,
        strip_tiles: i32,
        unit_tiles: i32,
        group_units: i32,
        x_units: i32,
        stages: i32,
        stage_bytes: i32,
        early_tiles: i32,
        tiles_room: i32,
        pub(crate) awaited_groups: i32,
        padding: i32,
    }
}

const _: () = assert!(size_of::<SkinnyArgs>() == 144);

// SAFETY: `#[repr(C)]`, and the tests of `abi` find the fields where the kernel's only parameter has them.
unsafe impl device::KernelArgs for SkinnyArgs {}

/// Kernels by format, epilogue and columns: 8, or more.
#[derive(Debug)]
pub(crate) struct Variants {
    bf16: [Kernel; 2],
    bf16_f32: [Kernel; 2],
    bf16_swiglu: [Kernel; 2],
    mxfp4: [Kernel; 2],
    mxfp4_swiglu: [Kernel; 2],
    fp8: [Kernel; 2],
    fp8_f32: [Kernel; 2],
    fp8_swiglu: [Kernel; 2],
}

impl Variants {
    pub(crate) fn load(module: &Module) -> Result<Self> {
        let pair = |n8, n16| -> Result<[Kernel; 2]> {
            Ok([module.kernel(n8, SHARED_BYTES as u32)?, module.kernel(n16, SHARED_BYTES as u32)?])
        };
        Ok(Self {
            bf16: pair("skinny_bf16_n8", "skinny_bf16_n16")?,
            bf16_f32: pair("skinny_bf16_n8_f32", "skinny_bf16_n16_f32")?,
            bf16_swiglu: pair("skinny_bf16_n8_swiglu", "skinny_bf16_n16_swiglu")?,
            mxfp4: pair("skinny_mxfp4_n8", "skinny_mxfp4_streams")?,
            mxfp4_swiglu: pair("skinny_mxfp4_n8_swiglu", "skinny_mxfp4_streams_swiglu")?,
            fp8: pair("skinny_fp8_n8", "skinny_fp8_n16")?,
            fp8_f32: pair("skinny_fp8_n8_f32", "skinny_fp8_n16_f32")?,
            fp8_swiglu: pair("skinny_fp8_n8_swiglu", "skinny_fp8_n16_swiglu")?,
        })
    }

    fn of(&self, format: Format, out: &Output<'_>) -> Option<&[Kernel; 2]> {
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

impl SkinnyGemm<'_> {
    /// Returns once enqueued.
    ///
    /// # Errors
    /// `Size` if the operands disagree, `Dimension` for too many columns or an output that the format has no kernel for, `Device` if
    /// the launch fails.
    pub fn enqueue(mut self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        let check = Checker("skinny_gemm");
        let variants = kernels.skinny_gemm.of(self.weights.format, &self.out);
        let variants = variants.ok_or(KernelError::Dimension {
            operation: "skinny_gemm",
            dimension: "output",
            allowed: "bf16 or swiglu for mxfp4 weights",
            found: 0,
        })?;
        let Some((mut args, plan)) = self.prepare(check, kernels, stream)? else { return Ok(()) };
        let config = share_out(check, kernels, &mut [&mut args], &[&plan])?;
        // SAFETY: `prepare` proved that weights, x, bias and out cover every matrix, slot and row; slots and tiles come from a
        // dispatch into `routing`, whose buffers bound them.
        Ok(unsafe { variants[plan.variant].launch(stream, config, &args) }?)
    }

    /// What the kernel is told, but for how blocks share out their memory; `None` if there is nothing to do.
    pub(crate) fn prepare(
        &mut self,
        check: Checker,
        kernels: &Kernels,
        stream: &Stream,
    ) -> Result<Option<(SkinnyArgs, Plan)>> {
        let weights = self.weights;
        let Some(columns) = self.check(check)? else { return Ok(None) };
        let plan = Plan::new(weights, &columns, kernels.multiprocessors as usize);
        check.room("joins", plan.joins(kernels), self.workspace.joins.len())?;
        let grouped = self.routing;
        let args = SkinnyArgs {
            weights: stream.input(&weights.bytes.view()),
            scales: weights.scales(stream),
            x: stream.input(&self.x),
            bias: self.bias.map_or(DevicePtr::NULL, |bias| stream.input(&bias)),
            out: match &mut self.out {
                Output::Bf16(out) | Output::SwiGlu(out) => stream.output(out).address(),
                Output::F32(out) => stream.output(out).address(),
            },
            tiles: grouped.map_or(DevicePtr::NULL, |grouped| stream.input(&grouped.routing.tiles.view())),
            num_tiles: grouped.map_or(DevicePtr::NULL, |grouped| stream.input(&grouped.routing.num_tiles.view())),
            gather: match grouped {
                Some(grouped) if grouped.gather => stream.input(&grouped.routing.gather.view()),
                _ => DevicePtr::NULL,
            },
            joins: stream.output(&mut self.workspace.joins.view_mut()),
            done: DevicePtrMut::NULL,
            expert_bytes: weights.matrix_bytes() as u64,
            tokens: int(columns.tile_columns),
            strips: int(weights.rows / STRIP_ROWS),
            groups: int(plan.groups),
            k: int(weights.k),
            strip_tiles: int(weights.strip_tiles()),
            unit_tiles: int(plan.unit_tiles),
            group_units: int(plan.group_units),
            x_units: int(plan.x_units),
            stages: 0,
            stage_bytes: 0,
            early_tiles: i32::from(grouped.is_some_and(|grouped| grouped.settled)),
            tiles_room: grouped.map_or(0, |grouped| int(grouped.routing.tiles.len())),
            awaited_groups: 0,
            padding: 0,
        };
        Ok(Some((args, plan)))
    }

    /// Columns of the launch; `None` if there is nothing to do.
    fn check(&self, check: Checker) -> Result<Option<Columns>> {
        let weights = self.weights;
        let x_rows = self.x.len() / weights.k;
        check.size("x", x_rows * weights.k, self.x.len())?;
        let (out_len, out_rows) = match &self.out {
            Output::Bf16(out) => (out.len(), weights.rows),
            Output::F32(out) => (out.len(), weights.rows),
            Output::SwiGlu(out) => (out.len(), weights.rows / 2),
        };
        let swiglu = matches!(self.out, Output::SwiGlu(_));
        check.dimension(
            "interleave",
            usize::from(weights.interleaved),
            "1 exactly for swiglu",
            swiglu == weights.interleaved,
        )?;
        if let Some(bias) = &self.bias {
            check.size("bias", weights.matrices * weights.rows, bias.len())?;
        }
        match &self.routing {
            None => {
                check.dimension("matrices", weights.matrices, "1 without routing", weights.matrices == 1)?;
                check.dimension("columns", x_rows, "at most 16", x_rows <= MAX_COLUMNS)?;
                check.size("out", x_rows * out_rows, out_len)?;
                Ok((x_rows > 0).then_some(Columns { tile_columns: x_rows, is_grouped: false }))
            }
            Some(Grouped { routing, gather, .. }) => {
                check.size("experts", routing.num_experts, weights.matrices)?;
                let widest = if weights.format == Format::Mxfp4 { STREAM_COLUMNS } else { MAX_COLUMNS };
                let tiled = [8, 16, STREAM_COLUMNS].contains(&routing.tile_slots) && routing.tile_slots <= widest;
                check.dimension("tile slots", routing.tile_slots, "8, 16, or 24 for mxfp4 weights", tiled)?;
                let slots = if *gather { x_rows * routing.top } else { x_rows };
                check.room("routing", slots, routing.gather.len())?;
                check.room("out", slots * out_rows, out_len)?;
                Ok((slots > 0).then_some(Columns { tile_columns: routing.tile_slots, is_grouped: true }))
            }
        }
    }
}

struct Columns {
    tile_columns: usize,
    is_grouped: bool,
}

/// Divides a block's memory among stages and what the products of a launch need beside them, and tells them.
///
/// # Errors
/// `Dimension` if that leaves less than two stages.
pub(crate) fn share_out(
    check: Checker,
    kernels: &Kernels,
    products: &mut [&mut SkinnyArgs],
    plans: &[&Plan],
) -> Result<LaunchConfig> {
    let most = |bytes: fn(&Plan) -> usize| plans.iter().map(|plan| bytes(plan)).max().unwrap_or(0);
    let (stage, beside) = (most(|plan| plan.stage_bytes), most(|plan| plan.sums_bytes) + most(|plan| plan.x_bytes));
    let stages = (SHARED_BYTES.saturating_sub(beside) / stage).min(MAX_STAGES);
    let k = products.iter().map(|args| args.k as usize).max().unwrap_or(0);
    check.dimension("k", k, "small enough for two stages beside the activations", stages >= 2)?;
    for args in products {
        (args.stages, args.stage_bytes) = (int(stages), int(stage));
    }
    // Warpgroups have all of it: a block makes the most of it for the tiles that it finds.
    let is_streams = plans.iter().any(|plan| plan.is_streams);
    let (shared_bytes, warps) =
        if is_streams { (SHARED_BYTES, STREAM_WARPS) } else { (stages * stage + beside, WARPS) };
    Ok(LaunchConfig { shared_bytes: shared_bytes as u32, ..LaunchConfig::linear(kernels.multiprocessors, warps * 32) })
}

/// How the work is cut: the one place where tile sizes are chosen.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Of the kernels of a format and an epilogue.
    pub(crate) variant: usize,
    /// Whether warpgroups work it off, each a stream of its own; then there are no units.
    pub(crate) is_streams: bool,
    /// Groups of strips.
    pub(crate) groups: usize,
    /// k-tiles of a unit.
    unit_tiles: usize,
    /// Units of a group of strips.
    group_units: usize,
    /// Units whose activations a block holds.
    x_units: usize,
    /// Shared memory that a unit takes, sums of a group, and activations.
    stage_bytes: usize,
    sums_bytes: usize,
    x_bytes: usize,
    /// f32 that a block may leave to others.
    block_joins: usize,
}

impl Plan {
    /// f32 that blocks may leave to each other.
    pub(crate) const fn joins(&self, kernels: &Kernels) -> usize {
        kernels.multiprocessors as usize * self.block_joins
    }

    fn new(weights: &PackedWeights, columns: &Columns, multiprocessors: usize) -> Self {
        if weights.format == Format::Mxfp4 && columns.tile_columns > 8 {
            Self::streams(weights)
        } else {
            Self::units(weights, columns, multiprocessors)
        }
    }

    fn streams(weights: &PackedWeights) -> Self {
        Self {
            variant: 1,
            is_streams: true,
            groups: weights.rows.div_ceil(STRIP_ROWS * GROUP),
            unit_tiles: 0,
            group_units: 0,
            x_units: 0,
            stage_bytes: WARPGROUPS * CHUNK_TILES * GROUP * weights.format.tile_bytes(),
            sums_bytes: 0,
            x_bytes: weights.strip_tiles() * weights.format.tile_k() * STREAM_COLUMNS * 2 + ALIGNMENT,
            // For a block's first tile of slots, and for a later one.
            block_joins: 2 * WARPGROUPS * STREAM_COLUMNS * GROUP * STRIP_ROWS,
        }
    }

    /// One dense matrix: of large units those for which the busiest block has least to do, and a block holds activations only for the
    /// units that it can get. Waiting at barriers costs more than an even cut gains: 2880 x 5120 at one column takes 10.3 us in units
    /// of 6 tiles, of which the busiest block has 60, and 9.3 in units of 10, with 60 as well (one H200).
    ///
    /// Experts: as many k-tiles for each consumer warp at a time as leave room for stages, since how many units there are is known on
    /// the device only. 8 tiles in place of 24 cost a third at 32 tokens of 120b.
    fn units(weights: &PackedWeights, columns: &Columns, multiprocessors: usize) -> Self {
        let (tiles, format) = (weights.strip_tiles(), weights.format);
        let column_tiles = if columns.tile_columns <= 8 { 1 } else { 2 };
        let groups = weights.rows.div_ceil(STRIP_ROWS * GROUP);
        let longest_range = |unit_tiles: usize| (groups * tiles.div_ceil(unit_tiles)).div_ceil(multiprocessors);
        let dense = !columns.is_grouped && format != Format::Mxfp4;
        let unit_tiles = match format {
            Format::Bf16 if dense => (10..=12).min_by_key(|size| longest_range(*size) * size).expect("sizes 10 to 12"),
            Format::Mxfp4 => 3 * PARTS,
            // One tile a warp: an FP8 warp fetches one scale a unit.
            Format::Bf16 | Format::Fp8 => PARTS,
        }
        .min(tiles);
        let group_units = tiles.div_ceil(unit_tiles);
        let x_units = if dense { longest_range(unit_tiles).min(group_units) } else { group_units };
        Self {
            variant: column_tiles - 1,
            is_streams: false,
            groups,
            unit_tiles,
            group_units,
            x_units,
            stage_bytes: GROUP * unit_tiles * format.tile_bytes(),
            sums_bytes: PARTS * GROUP * column_tiles * 512,
            x_bytes: x_units * unit_tiles * format.tile_k() * column_tiles * 8 * 2,
            block_joins: GROUP * column_tiles * 32 * 4,
        }
    }
}
