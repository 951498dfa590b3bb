//! How fast this device's memory is, measured: what every share of a bound refers to.

use device::Device;

use crate::EngineError;

/// Bytes of a copy: far more than the L2 cache holds.
const BYTES: usize = 2 << 30;
const REPEATS: usize = 10;

/// Bytes a second, read and written together, of the best of ten copies of 2 GiB within the device's memory.
///
/// # Errors
/// [`EngineError::Gpu`] without the device or without 4 GiB of free memory on it.
pub fn copy_bytes_per_s(ordinal: u32) -> Result<f64, EngineError> {
    let stream = Device::open(ordinal)?.stream()?;
    let source = stream.zeros::<u8>(BYTES)?;
    let mut target = stream.zeros::<u8>(BYTES)?;
    let mut best_us = f64::INFINITY;
    for _ in 0..REPEATS {
        let before = stream.record()?;
        stream.copy(target.view_mut(), source.view())?;
        let after = stream.record()?;
        after.wait()?;
        best_us = best_us.min(after.elapsed_us(&before)?);
    }
    Ok(2.0 * BYTES as f64 / best_us * 1e6)
}
