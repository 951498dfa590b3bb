//! Scratch that kernels of one stream share.

use device::{DeviceBuffer, Stream};

use crate::error::Result;

/// Partial results and arrival counters of kernels that finish each other's work. Consecutive kernels of a stream share one
/// workspace: each has done with it before the next writes to it, and leaves the counters at zero.
#[derive(Debug)]
pub struct Workspace {
    pub(crate) partials: DeviceBuffer<f32>,
    pub(crate) counters: DeviceBuffer<u32>,
}

/// f32 of partial results: decode attention at batch 128 with 8 KV heads unsplit, or 64 splits of 16 pairs.
const PARTIALS: usize = 4 << 20;
/// Counters: one for each strip of each tile of a grouped GEMM, 512 tiles of 360 strips.
const COUNTERS: usize = 256 << 10;

impl Workspace {
    /// 17 MB of device memory.
    ///
    /// # Errors
    /// `Device` without memory.
    pub fn new(stream: &Stream) -> Result<Self> {
        Ok(Self { partials: stream.zeros(PARTIALS)?, counters: stream.zeros(COUNTERS)? })
    }
}
