//! Matrix products of FP8 weights and FP8 activations on the tensor cores: prefill.

use device::{DevicePtr, DevicePtrMut, Kernel, LaunchConfig, Module, Stream, Swizzle, TensorMap, View, ViewMut};
use half::bf16;

use crate::error::{Checker, Result, int};
use crate::pack_weights::{Format, PackedWeights};
use crate::{Fp8Rows, Kernels, Routing};

/// Slots and rows of a tile, rows of a group, values along k of a step, threads of a block: constants of fp8_gemm.cu.
const TILE_SLOTS: usize = 128;
const TILE_ROWS: usize = 256;
const GROUP_ROWS: usize = 64;
const STEP_K: u32 = 128;
const THREADS: u32 = 384;
/// Stages of 48 KB that fit beside what aligning them may take.
const STAGES: usize = 4;
const SHARED_BYTES: u32 = (STAGES as u32 * 48 + 1) * 1024;

/// Where the product goes, and what happens to it on the way.
#[derive(Debug)]
pub enum Fp8Output<'a> {
    /// Rounded: `[slots, rows]`.
    Bf16(ViewMut<'a, bf16>),
    /// As summed: `[slots, rows]`.
    F32(ViewMut<'a, f32>),
    /// Clamped SwiGLU of gate (even) and up (odd) rows, quantised again: rows of `rows / 2`. The weights are packed `interleaved`.
    SwiGlu(&'a mut Fp8Rows),
}

/// `out[s, r] = sum_k x[s, k] * weights[r, k] + bias[r]`; sums of 128 along k by the tensor cores, of those in f32, beginning with the
/// bias.
///
/// Dense: slots are the rows of `x`. With a [`Routing`], each slot takes its expert's matrix, and the routing's tiles have 128 slots.
/// Plain definitions: `model::fp8`, `model::reference::{linear, swiglu}`.
#[derive(Debug)]
pub struct Fp8Gemm<'a> {
    /// `[rows, k]`, or one such matrix an expert.
    pub weights: &'a PackedWeights,
    /// Slots, from [`QuantizeRows`](crate::QuantizeRows) or a SwiGLU before.
    pub x: &'a Fp8Rows,
    /// How many of them, at most.
    pub slots: usize,
    /// `[rows]`, or `[experts, rows]`.
    pub bias: Option<View<'a, bf16>>,
    /// Where it goes.
    pub out: Fp8Output<'a>,
    /// Which slots belong to which expert; `None`: one matrix for all.
    pub routing: Option<&'a Routing>,
}

kernel_args! {
    struct Args = Fp8Args in "fp8_gemm/fp8_gemm.cu" {
        x: TensorMap,
        weights: DevicePtr<u8>,
        weight_scales: DevicePtr<f32>,
        x_scales: DevicePtr<f32>,
        bias: DevicePtr<bf16>,
        out: u64,
        out_scales: DevicePtrMut<f32>,
        tiles: DevicePtr<[i32; 4]>,
        num_tiles: DevicePtr<i32>,
        expert_bytes: u64,
        slots: i32,
        x_stride: i32,
        out_stride: i32,
        groups: i32,
        k_tiles: i32,
        row_blocks: i32,
        stages: i32,
        out_pitch: i32,
        padding: [u64; 3],
    }
}

const _: () = assert!(size_of::<Args>() == 256);

/// Kernels by output.
#[derive(Debug)]
pub(crate) struct Variants {
    bf16: Kernel,
    f32: Kernel,
    swiglu: Kernel,
}

impl Variants {
    pub(crate) fn load(module: &Module) -> Result<Self> {
        Ok(Self {
            bf16: module.kernel("fp8_gemm_bf16", SHARED_BYTES)?,
            f32: module.kernel("fp8_gemm_f32", SHARED_BYTES)?,
            swiglu: module.kernel("fp8_gemm_swiglu", SHARED_BYTES)?,
        })
    }
}

impl Fp8Gemm<'_> {
    /// Returns once enqueued.
    ///
    /// # Errors
    /// `Size` if the operands disagree, `Dimension` for other weights than FP8 or a routing whose tiles have not 128 slots, `Device` if
    /// the launch fails.
    pub fn enqueue(self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        self.check()?;
        let Self { weights, x, slots, routing, .. } = self;
        if slots == 0 {
            return Ok(());
        }
        let values = stream.input(&x.values.view());
        let box_shape = [TILE_SLOTS as u32, STEP_K];
        let row_blocks = weights.rows.div_ceil(TILE_ROWS);
        let mut args = Args {
            x: TensorMap::bytes(values, [slots, x.pitch()], x.pitch(), box_shape, Swizzle::Bytes128)?,
            weights: stream.input(&weights.bytes.view()),
            weight_scales: weights.scales(stream),
            x_scales: stream.input(&x.scales.view()),
            bias: self.bias.map_or(DevicePtr::NULL, |bias| stream.input(&bias)),
            out: 0,
            out_scales: DevicePtrMut::NULL,
            tiles: routing.map_or(DevicePtr::NULL, |routing| stream.input(&routing.tiles.view())),
            num_tiles: routing.map_or(DevicePtr::NULL, |routing| stream.input(&routing.num_tiles.view())),
            expert_bytes: weights.matrix_bytes() as u64,
            slots: int(slots),
            x_stride: int(x.rows),
            out_stride: 0,
            groups: int(weights.rows / GROUP_ROWS),
            k_tiles: int(weights.strip_tiles()),
            row_blocks: int(row_blocks),
            stages: int(STAGES),
            out_pitch: int(weights.rows),
            padding: [0; 3],
        };
        let kernel = match self.out {
            Fp8Output::Bf16(mut out) => {
                args.out = stream.output(&mut out).address();
                &kernels.fp8_gemm.bf16
            }
            Fp8Output::F32(mut out) => {
                args.out = stream.output(&mut out).address();
                &kernels.fp8_gemm.f32
            }
            Fp8Output::SwiGlu(out) => {
                (args.out_stride, args.out_pitch) = (int(out.rows), int(out.pitch()));
                args.out = stream.output(&mut out.values.view_mut()).address();
                args.out_scales = stream.output(&mut out.scales.view_mut());
                &kernels.fp8_gemm.swiglu
            }
        };
        let tiles = slots.div_ceil(TILE_SLOTS) + routing.map_or(0, |routing| routing.num_experts);
        let blocks = kernels.multiprocessors.min((tiles * row_blocks) as u32);
        let config = LaunchConfig { shared_bytes: SHARED_BYTES, ..LaunchConfig::linear(blocks, THREADS) };
        // SAFETY: `check` proved that weights, x, bias and out cover every matrix, slot and row; tiles come from a dispatch into
        // `routing`, whose buffers bound them; what a box has beyond x is zero.
        Ok(unsafe { kernel.launch(stream, config, &args) }?)
    }

    fn check(&self) -> Result<()> {
        let (check, weights) = (Checker("fp8_gemm"), self.weights);
        check.dimension("weights", weights.format as usize, "fp8", weights.format == Format::Fp8)?;
        check.size("x", weights.k, self.x.k)?;
        check.room("slots", self.slots, self.x.rows)?;
        let swiglu = match &self.out {
            Fp8Output::Bf16(out) => check.room("out", self.slots * weights.rows, out.len()).map(|()| false)?,
            Fp8Output::F32(out) => check.room("out", self.slots * weights.rows, out.len()).map(|()| false)?,
            Fp8Output::SwiGlu(out) => {
                check.size("out", weights.rows / 2, out.k)?;
                check.room("out rows", self.slots, out.rows).map(|()| true)?
            }
        };
        let interleaved = usize::from(weights.interleaved);
        check.dimension("interleave", interleaved, "1 exactly for swiglu", swiglu == weights.interleaved)?;
        if let Some(bias) = &self.bias {
            check.size("bias", weights.matrices * weights.rows, bias.len())?;
        }
        match self.routing {
            None => check.dimension("matrices", weights.matrices, "1 without routing", weights.matrices == 1),
            Some(routing) => {
                check.size("experts", routing.num_experts, weights.matrices)?;
                check.dimension("tile slots", routing.tile_slots, "128", routing.tile_slots == TILE_SLOTS)?;
                check.room("routing", self.slots, routing.gather.len())
            }
        }
    }
}
