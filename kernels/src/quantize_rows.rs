//! Activations in FP8: the input of [`Fp8Gemm`](crate::Fp8Gemm).

use device::{DeviceBuffer, DevicePtr, DevicePtrMut, LaunchConfig, Stream, View};
use half::bf16;

use crate::error::{Checker, Result, int};
use crate::pack_weights::SCALE_BLOCK;
use crate::{Kernels, Routing};

/// Values along k that the order of places repeats after: packed/fp8.cuh.
const PLACES: usize = 64;

/// Rows of E4M3 values, each with one power of two for 128 of them.
#[derive(Debug)]
pub struct Fp8Rows {
    /// `[rows, pitch]` in the order of `cuda/packed/fp8.cuh`; places beyond `k` are zero.
    pub values: DeviceBuffer<u8>,
    /// `[k / 128 rounded up, rows]`: value `i` of a row is its E4M3 number times the scale of block `i / 128`.
    pub scales: DeviceBuffer<f32>,
    pub(crate) rows: usize,
    pub(crate) k: usize,
}

impl Fp8Rows {
    /// Room for `rows` rows of `k` values.
    ///
    /// # Errors
    /// `Dimension` unless k is a multiple of 16, `Device` without memory.
    pub fn new(stream: &Stream, rows: usize, k: usize) -> Result<Self> {
        Checker("fp8 rows").dimension("k", k, "a multiple of 16", k > 0 && k.is_multiple_of(16))?;
        let (values, scales) = (rows * k.next_multiple_of(PLACES), rows * k.div_ceil(SCALE_BLOCK));
        Ok(Self { values: stream.zeros(values)?, scales: stream.zeros(scales)?, rows, k })
    }

    /// Values of a row.
    #[must_use]
    pub const fn k(&self) -> usize {
        self.k
    }

    /// Places of a row.
    #[must_use]
    pub const fn pitch(&self) -> usize {
        self.k.next_multiple_of(PLACES)
    }
}

/// `out[s] = x[token of slot s]`, or `x[s]` without a routing, in FP8: a block of 128 values is divided by the smallest power of two
/// that brings its largest magnitude to at most 448, and rounded to nearest even. Plain definition: `model::fp8`.
#[derive(Debug)]
pub struct QuantizeRows<'a> {
    /// `[tokens, k]`
    pub x: View<'a, bf16>,
    /// Filled by [`Dispatch`](crate::Dispatch).
    pub routing: Option<&'a Routing>,
    /// Rows beyond the last slot stay as they are.
    pub out: &'a mut Fp8Rows,
}

kernel_args! {
    struct Args = QuantizeArgs in "quantize_rows/quantize_rows.cu" {
        x: DevicePtr<bf16>,
        gather: DevicePtr<i32>,
        num_rows: DevicePtr<i32>,
        out: DevicePtrMut<u8>,
        scales: DevicePtrMut<f32>,
        slots: i32,
        stride: i32,
        k: i32,
        pitch: i32,
    }
}

const _: () = assert!(size_of::<Args>() == 56);

impl QuantizeRows<'_> {
    /// Returns once enqueued.
    ///
    /// # Errors
    /// `Size` if the operands disagree, `Device` if the launch fails.
    pub fn enqueue(self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        let (check, out) = (Checker("quantize_rows"), self.out);
        let tokens = self.x.len() / out.k;
        check.size("x", tokens * out.k, self.x.len())?;
        let slots = self.routing.map_or(tokens, |routing| tokens * routing.top);
        check.room("out", slots, out.rows)?;
        if let Some(routing) = self.routing {
            check.room("routing", slots, routing.gather.len())?;
        }
        if slots == 0 {
            return Ok(());
        }
        let args = Args {
            x: stream.input(&self.x),
            gather: self.routing.map_or(DevicePtr::NULL, |routing| stream.input(&routing.gather.view())),
            num_rows: self
                .routing
                .map_or(DevicePtr::NULL, |routing| stream.input(&routing.offsets.slice(routing.num_experts..))),
            slots: int(slots),
            stride: int(out.rows),
            k: int(out.k),
            pitch: int(out.pitch()),
            out: stream.output(&mut out.values.view_mut()),
            scales: stream.output(&mut out.scales.view_mut()),
        };
        let blocks = (slots.div_ceil(8) as u32).min(kernels.multiprocessors * 8);
        // SAFETY: the last offset is the number of slots, at most `slots`, for which `out` has rows; gather holds tokens of `x`.
        Ok(unsafe { kernels.quantize_rows.launch(stream, LaunchConfig::linear(blocks, 256), &args) }?)
    }
}
