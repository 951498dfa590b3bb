//! FP8 weight matrices, made on the device: E4M3 with one power of two for each 128 x 128 values.

use device::{DevicePtr, DevicePtrMut, Kernel, LaunchConfig, Module, Stream, View};
use half::bf16;

use crate::Kernels;
use crate::error::{Checker, Result, int};
use crate::pack_weights::{Format, PackedWeights, SCALE_BLOCK};

/// What matrices are made of. `matrices`, `rows` and `k` are those of [`PackFp8::shape`].
#[derive(Debug, Clone, Copy)]
pub enum Fp8Source<'a> {
    /// `[matrices, rows, k]`
    Bf16(View<'a, bf16>),
    /// As released.
    Mxfp4 {
        /// E2M1 pairs, the earlier value in the low nibble: `[matrices, rows, k / 2]`.
        values: View<'a, u8>,
        /// E8M0, `[matrices, rows, k / 32]`.
        scales: View<'a, u8>,
    },
    /// FP8 whose blocks are those of a larger matrix, of which this is a part.
    Fp8 {
        /// E4M3, `[matrices, rows, k]`.
        values: View<'a, u8>,
        /// E8M0 of the blocks that the part touches, `[matrices, grid[0], grid[1]]`.
        scales: View<'a, u8>,
        /// Blocks along rows and along k.
        grid: [usize; 2],
        /// Row and column within the first block where the part begins.
        offset: [usize; 2],
    },
}

/// Matrices to be packed as FP8. A block's scale is the smallest power of two that brings its largest magnitude to at most 448;
/// values are rounded to nearest even. Blocks are those of the matrices as they are given. Plain definition: `model::fp8`.
#[derive(Debug)]
pub struct PackFp8<'a> {
    /// The values.
    pub source: Fp8Source<'a>,
    /// Matrices, rows, k.
    pub shape: [usize; 3],
    /// Rows are gate and up in turn: the matrix can feed SwiGLU.
    pub interleaved: bool,
}

/// What packing changed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Rounding {
    /// Values that are not exactly what they were.
    pub changed: u64,
    /// Largest relative change; 1 where a value became zero.
    pub largest: f32,
}

kernel_args! {
    struct Args = PackFp8Args in "pack_fp8/pack_fp8.cu" {
        values: DevicePtr<u8>,
        scales: DevicePtr<u8>,
        out: DevicePtrMut<u8>,
        out_scales: DevicePtrMut<f32>,
        report: DevicePtrMut<u32>,
        matrices: i32,
        rows: i32,
        k: i32,
        interleave: i32,
        grid_rows: i32,
        grid_cols: i32,
        row_offset: i32,
        col_offset: i32,
    }
}

const _: () = assert!(size_of::<Args>() == 72);

/// Kernels by source.
#[derive(Debug)]
pub(crate) struct Variants {
    bf16: Kernel,
    mxfp4: Kernel,
    fp8: Kernel,
}

impl Variants {
    pub(crate) fn load(module: &Module) -> Result<Self> {
        Ok(Self {
            bf16: module.kernel("pack_fp8_from_bf16", 0)?,
            mxfp4: module.kernel("pack_fp8_from_mxfp4", 0)?,
            fp8: module.kernel("pack_fp8_from_fp8", 0)?,
        })
    }
}

impl PackFp8<'_> {
    /// Packs, and waits: kernels read weights before their predecessor has ended.
    ///
    /// # Errors
    /// `Dimension` unless rows are a multiple of 64 and k of 32, `Size` if values or scales do not fit, `Device` without memory.
    pub fn pack(self, kernels: &Kernels, stream: &Stream) -> Result<(PackedWeights, Rounding)> {
        let [matrices, rows, k] = self.shape;
        self.check()?;
        let mut packed = PackedWeights::allocate(stream, Format::Fp8, self.shape, self.interleaved)?;
        let mut report = stream.zeros::<u32>(4)?;
        let scales_out = packed.scales.as_mut().expect("allocated for fp8");
        let (kernel, values, scales, grid, offset) = match &self.source {
            Fp8Source::Bf16(values) => {
                (&kernels.pack_fp8.bf16, stream.input(values).cast(), DevicePtr::NULL, [0; 2], [0; 2])
            }
            Fp8Source::Mxfp4 { values, scales } => {
                (&kernels.pack_fp8.mxfp4, stream.input(values), stream.input(scales), [0; 2], [0; 2])
            }
            Fp8Source::Fp8 { values, scales, grid, offset } => {
                (&kernels.pack_fp8.fp8, stream.input(values), stream.input(scales), *grid, *offset)
            }
        };
        let args = Args {
            values,
            scales,
            out: stream.output(&mut packed.bytes.view_mut()),
            out_scales: stream.output(&mut scales_out.view_mut()),
            report: stream.output(&mut report.view_mut()),
            matrices: int(matrices),
            rows: int(rows),
            k: int(k),
            interleave: i32::from(self.interleaved),
            grid_rows: int(grid[0]),
            grid_cols: int(grid[1]),
            row_offset: int(offset[0]),
            col_offset: int(offset[1]),
        };
        let config = LaunchConfig::linear(kernels.multiprocessors * 2, 1024);
        // SAFETY: `check` proved that values and scales cover every matrix; blocks are taken in a strided loop, and those beyond the
        // last row or tile are not written.
        unsafe { kernel.launch(stream, config, &args) }?;
        let report = stream.download(report.view())?;
        let changed = u64::from(report[1]) << 32 | u64::from(report[0]);
        Ok((packed, Rounding { changed, largest: f32::from_bits(report[2]) }))
    }

    fn check(&self) -> Result<()> {
        let ([matrices, rows, k], check) = (self.shape, Checker("pack fp8"));
        check.dimension("rows", rows, "a multiple of 64", rows > 0 && rows.is_multiple_of(64))?;
        check.dimension("k", k, "a multiple of 32", k > 0 && k.is_multiple_of(32))?;
        match &self.source {
            Fp8Source::Bf16(values) => check.size("values", matrices * rows * k, values.len()),
            Fp8Source::Mxfp4 { values, scales } => {
                check.size("values", matrices * rows * k / 2, values.len())?;
                check.size("scales", matrices * rows * k / 32, scales.len())
            }
            Fp8Source::Fp8 { values, scales, grid, offset } => {
                check.size("values", matrices * rows * k, values.len())?;
                check.size("scales", matrices * grid[0] * grid[1], scales.len())?;
                let blocks = [offset[0] + rows, offset[1] + k].map(|end| end.div_ceil(SCALE_BLOCK));
                check.dimension("blocks along rows", grid[0], "those that the part touches", grid[0] == blocks[0])?;
                check.dimension("blocks along k", grid[1], "those that the part touches", grid[1] == blocks[1])
            }
        }
    }
}
