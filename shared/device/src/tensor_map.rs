//! Descriptors for the tensor copy engine (TMA).

use cudarc::driver::sys::{
    self, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle,
};
use half::bf16;

use crate::error::{Result, check};
use crate::memory::DevicePtr;

/// How 16-byte pieces are permuted within a box, so that a warp reads columns of it without bank conflicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swizzle {
    /// Within 8 rows of 64 bytes, two of them alike; the box is 64 bytes wide.
    Bytes64,
    /// Within 8 rows of 128 bytes; the box is 128 bytes wide.
    Bytes128,
}

/// A matrix as the tensor copy engine sees it, cut into boxes. Lies in argument structs by value. Elements outside the
/// matrix are read as zero, so tails need no padding.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct TensorMap(CUtensorMap);

impl TensorMap {
    /// A row-major matrix of `rows` x `cols` at `matrix`, `pitch` elements from row to row, copied in boxes of
    /// `box_rows` x `box_cols`.
    ///
    /// # Errors
    /// `Driver` with `CUDA_ERROR_INVALID_VALUE` unless the address and the pitch in bytes are multiples of 16 and a box has at
    /// most 256 rows and columns, of as many bytes a row as the swizzle.
    pub fn matrix(
        matrix: DevicePtr<bf16>,
        [rows, cols]: [usize; 2],
        pitch: usize,
        [box_rows, box_cols]: [u32; 2],
        swizzle: Swizzle,
    ) -> Result<Self> {
        let kind = CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
        let pitch_bytes = pitch * size_of::<bf16>();
        Self::encode(kind, matrix.address(), [rows, cols], pitch_bytes, [box_rows, box_cols], swizzle)
    }

    /// The same of bytes: 8-bit numbers of any kind.
    ///
    /// # Errors
    /// As [`TensorMap::matrix`].
    pub fn bytes(
        matrix: DevicePtr<u8>,
        shape: [usize; 2],
        pitch: usize,
        box_shape: [u32; 2],
        swizzle: Swizzle,
    ) -> Result<Self> {
        let kind = CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8;
        Self::encode(kind, matrix.address(), shape, pitch, box_shape, swizzle)
    }

    fn encode(
        kind: CUtensorMapDataType,
        address: u64,
        [rows, cols]: [usize; 2],
        pitch_bytes: usize,
        [box_rows, box_cols]: [u32; 2],
        swizzle: Swizzle,
    ) -> Result<Self> {
        let mut map = CUtensorMap { opaque: [0; 16] };
        let (dims, strides) = ([cols as u64, rows as u64], [pitch_bytes as u64]);
        let (box_dims, element_strides) = ([box_cols, box_rows], [1_u32, 1]);
        // SAFETY: encodes numbers into `map` and reads four arrays of the stated rank; no device memory is touched.
        let code = unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                kind,
                2,
                address as *mut _,
                dims.as_ptr(),
                strides.as_ptr(),
                box_dims.as_ptr(),
                element_strides.as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                match swizzle {
                    Swizzle::Bytes64 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
                    Swizzle::Bytes128 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                },
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check("cuTensorMapEncodeTiled", code)?;
        Ok(Self(map))
    }
}
