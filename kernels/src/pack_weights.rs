//! Weight matrices in the order in which tensor cores take them.

use device::{DeviceBuffer, DevicePtr, DevicePtrMut, Kernel, LaunchConfig, Stream, View};
use half::bf16;

use crate::Kernels;
use crate::error::{Checker, KernelError, Result, int};

/// How a packed matrix stores its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// 2 bytes a value.
    Bf16,
    /// 4 bits a value and one scale byte for each 32 along k.
    Mxfp4,
    /// 1 byte a value (E4M3) and one scale, a power of two, for each 128 rows x 128 along k.
    Fp8,
}

impl Format {
    /// Values along k of a tile of 16 rows: `TILE_K` in packed.cuh and fp8.cuh.
    pub(crate) const fn tile_k(self) -> usize {
        match self {
            Self::Bf16 => 32,
            Self::Mxfp4 | Self::Fp8 => 64,
        }
    }

    /// Tiles of a strip that has `k` values in each row, the last ones filled up with zeros: whole steps of the kernels, which are 64 values
    /// along k, so an even number of bf16's.
    pub(crate) const fn strip_tiles(self, k: usize) -> usize {
        k.div_ceil(STEP_K) * (STEP_K / self.tile_k())
    }

    /// Bytes of a tile: `TILE_BYTES` in packed.cuh and fp8.cuh.
    pub(crate) const fn tile_bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::Fp8 => 1024,
            Self::Mxfp4 => 544,
        }
    }
}

/// Values along k that a matrix is filled up to a multiple of.
pub(crate) const STEP_K: usize = 64;
/// Rows of a strip.
pub(crate) const STRIP_ROWS: usize = 16;
/// Rows and values along k that share an FP8 scale.
pub(crate) const SCALE_BLOCK: usize = 128;

/// One matrix `[rows, k]`, or one for each expert, rearranged on the device as `cuda/packed/packed.cuh` describes.
#[derive(Debug)]
pub struct PackedWeights {
    pub(crate) bytes: DeviceBuffer<u8>,
    /// Of FP8 blocks, `[matrices, rows / 128, k / 128]` rounded up; `None` for other formats.
    pub(crate) scales: Option<DeviceBuffer<f32>>,
    pub(crate) format: Format,
    pub(crate) matrices: usize,
    pub(crate) rows: usize,
    pub(crate) k: usize,
    pub(crate) interleaved: bool,
}

impl PackedWeights {
    /// Device memory in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.bytes.len() + self.scales.as_ref().map_or(0, |scales| scales.len() * size_of::<f32>())
    }

    /// How values are stored.
    #[must_use]
    pub const fn format(&self) -> Format {
        self.format
    }

    /// `[rows, k]` of each matrix.
    #[must_use]
    pub const fn shape(&self) -> [usize; 2] {
        [self.rows, self.k]
    }

    pub(crate) const fn strip_tiles(&self) -> usize {
        self.format.strip_tiles(self.k)
    }

    pub(crate) const fn matrix_bytes(&self) -> usize {
        self.rows / STRIP_ROWS * self.strip_tiles() * self.format.tile_bytes()
    }

    /// The scales of FP8 blocks, for kernels; null for other formats.
    pub(crate) fn scales(&self, stream: &Stream) -> DevicePtr<f32> {
        self.scales.as_ref().map_or(DevicePtr::NULL, |scales| stream.input(&scales.view()))
    }

    pub(crate) fn allocate(
        stream: &Stream,
        format: Format,
        [matrices, rows, k]: [usize; 3],
        interleaved: bool,
    ) -> Result<Self> {
        let check = Checker("pack weights");
        check.dimension("rows", rows, "a multiple of 16", rows > 0 && rows.is_multiple_of(STRIP_ROWS))?;
        check.dimension("k", k, "a multiple of 32", k > 0 && k.is_multiple_of(32))?;
        let bytes = stream.allocate(matrices * rows / STRIP_ROWS * format.strip_tiles(k) * format.tile_bytes())?;
        let blocks = matrices * rows.div_ceil(SCALE_BLOCK) * k.div_ceil(SCALE_BLOCK);
        let scales = (format == Format::Fp8).then(|| stream.allocate(blocks)).transpose()?;
        Ok(Self { bytes, scales, format, matrices, rows, k, interleaved })
    }
}

kernel_args! {
    struct Args = PackArgs in "pack_weights/pack_weights.cu" {
        values: DevicePtr<u8>,
        scales: DevicePtr<u8>,
        out: DevicePtrMut<u8>,
        refused: DevicePtrMut<u32>,
        words: u64,
        rows: i32,
        k: i32,
        tiles: i32,
        interleave: i32,
    }
}

const _: () = assert!(size_of::<Args>() == 56);

/// Packs bf16 matrices `[matrices, rows, k]`, row-major, and waits, since kernels read weights before their predecessor has ended.
/// With `interleaved`, rows are gate and up in turn and the matrix can feed SwiGLU.
///
/// # Errors
/// `Dimension` unless rows are a multiple of 16 and k of 32, `Size` if the values do not fit, `Device` without memory.
pub fn pack_bf16(
    kernels: &Kernels,
    stream: &Stream,
    values: View<'_, bf16>,
    [matrices, rows, k]: [usize; 3],
    interleaved: bool,
) -> Result<PackedWeights> {
    Checker("pack bf16").size("values", matrices * rows * k, values.len())?;
    let mut packed = PackedWeights::allocate(stream, Format::Bf16, [matrices, rows, k], interleaved)?;
    let values = stream.input(&values).cast();
    launch(&kernels.pack_bf16, kernels, stream, &mut packed, values, DevicePtr::NULL, DevicePtrMut::NULL)?;
    stream.synchronize()?;
    Ok(packed)
}

/// MXFP4 matrices as released: E2M1 pairs, the earlier value in the low nibble, and E8M0 scales.
#[derive(Debug)]
pub struct PackMxfp4<'a> {
    /// `[matrices, rows, k / 2]`
    pub values: View<'a, u8>,
    /// `[matrices, rows, k / 32]`
    pub scales: View<'a, u8>,
    /// Matrices, rows, k.
    pub shape: [usize; 3],
    /// Rows are gate and up in turn: the matrix can feed SwiGLU.
    pub interleaved: bool,
}

impl PackMxfp4<'_> {
    /// Packs, and waits to learn whether every scale could be held.
    ///
    /// # Errors
    /// `ScaleRange` if not, `Dimension` unless rows are a multiple of 16 and k of 32, `Size` if values or scales do not fit, `Device`
    /// without memory.
    pub fn pack(self, kernels: &Kernels, stream: &Stream) -> Result<PackedWeights> {
        self.check()?;
        let mut packed = PackedWeights::allocate(stream, Format::Mxfp4, self.shape, self.interleaved)?;
        let mut refused = stream.zeros::<u32>(1)?;
        let (values, scales) = (stream.input(&self.values), stream.input(&self.scales));
        let refused_out = stream.output(&mut refused.view_mut());
        launch(&kernels.pack_mxfp4, kernels, stream, &mut packed, values, scales, refused_out)?;
        match stream.download(refused.view())?[0] {
            0 => Ok(packed),
            blocks => Err(KernelError::ScaleRange { blocks }),
        }
    }

    /// Packs as bf16, without loss, and waits.
    ///
    /// # Errors
    /// `Dimension` unless rows are a multiple of 16 and k of 32, `Size` if values or scales do not fit, `Device` without memory.
    pub fn pack_as_bf16(self, kernels: &Kernels, stream: &Stream) -> Result<PackedWeights> {
        self.check()?;
        let mut packed = PackedWeights::allocate(stream, Format::Bf16, self.shape, self.interleaved)?;
        let (values, scales) = (stream.input(&self.values), stream.input(&self.scales));
        launch(&kernels.pack_bf16_from_mxfp4, kernels, stream, &mut packed, values, scales, DevicePtrMut::NULL)?;
        stream.synchronize()?;
        Ok(packed)
    }

    pub(crate) fn check(&self) -> Result<()> {
        let ([matrices, rows, k], check) = (self.shape, Checker("pack mxfp4"));
        check.size("values", matrices * rows * k / 2, self.values.len())?;
        check.size("scales", matrices * rows * k / 32, self.scales.len())
    }
}

fn launch(
    kernel: &Kernel,
    kernels: &Kernels,
    stream: &Stream,
    packed: &mut PackedWeights,
    values: DevicePtr<u8>,
    scales: DevicePtr<u8>,
    refused: DevicePtrMut<u32>,
) -> Result<()> {
    let args = Args {
        values,
        scales,
        refused,
        words: packed.bytes.len() as u64 / 4,
        rows: int(packed.rows),
        k: int(packed.k),
        tiles: int(packed.strip_tiles()),
        interleave: i32::from(packed.interleaved),
        out: stream.output(&mut packed.bytes.view_mut()),
    };
    // SAFETY: one thread a word of `out`, in a strided loop; the words read lie within the matrices whose sizes were checked.
    Ok(unsafe { kernel.launch(stream, LaunchConfig::linear(kernels.multiprocessors * 8, 256), &args) }?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strip_is_whole_steps_along_k() {
        for k in (32..=2880).step_by(32) {
            for format in [Format::Bf16, Format::Mxfp4, Format::Fp8] {
                let values = format.strip_tiles(k) * format.tile_k();
                assert!(values.is_multiple_of(STEP_K) && (k..k + STEP_K).contains(&values), "{format:?}, k = {k}");
            }
        }
        // Units of an expert of gpt-oss over two and four ranks, in tiles of 32.
        assert_eq!([1440, 736, 704, 2880].map(|k| Format::Bf16.strip_tiles(k)), [46, 24, 22, 90]);
    }
}
