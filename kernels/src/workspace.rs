//! Scratch that kernels of one stream share.

use device::{DeviceBuffer, Stream};

use crate::error::Result;

/// Partial results and arrival counters of kernels that finish each other's work. Consecutive kernels of a stream share one
/// workspace: each has done with it before the next writes to it, and leaves counters and joins as it found them.
#[derive(Debug)]
pub struct Workspace {
    pub(crate) partials: DeviceBuffer<f32>,
    pub(crate) counters: DeviceBuffer<u32>,
    /// All bits set between kernels.
    pub(crate) joins: DeviceBuffer<f32>,
}

/// f32 of partial results: twice what a split `TileGemm` leaves at most, 128 rows of 128 columns for each of 132 multiprocessors.
pub(crate) const PARTIALS: usize = 4 << 20;
/// Counters, zero between kernels: for each tile of columns and block of rows of a split product, each block of one cut into pieces, each
/// tile of slots of `SkinnyExperts`, each sequence and head of decode attention.
pub(crate) const COUNTERS: usize = 256 << 10;
/// f32 that blocks of `SkinnyGemm` and `SkinnyExperts` leave to others: 8 groups of 4 strips and 24 columns for each of 256 multiprocessors.
const JOINS: usize = 3 << 20;

impl Workspace {
    /// 30 MB of device memory.
    ///
    /// # Errors
    /// `Device` without memory.
    pub fn new(stream: &Stream) -> Result<Self> {
        let mut joins = stream.zeros(JOINS)?;
        stream.fill_bytes(joins.view_mut(), 0xff)?;
        Ok(Self { partials: stream.zeros(PARTIALS)?, counters: stream.zeros(COUNTERS)?, joins })
    }
}
