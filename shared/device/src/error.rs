//! What can go wrong between us and the driver.

use std::ffi::CStr;

use cudarc::driver::sys::{self, CUresult};

/// Result of anything that talks to the driver.
pub type Result<T> = std::result::Result<T, DeviceError>;

/// What a caller may have to act on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// There is no usable driver or GPU here: run on the CPU, or fix the machine.
    #[error("no usable GPU: {reason}")]
    Unavailable {
        /// What was looked for and not found.
        reason: String,
    },
    /// Device memory is exhausted: free something or ask for less.
    #[error("device {device} has no {requested_bytes} bytes left")]
    OutOfMemory {
        /// Ordinal of the device.
        device: u32,
        /// Size of the refused allocation.
        requested_bytes: usize,
    },
    /// Two devices that cannot reach each other's memory: no NVLink between them, and PCIe access is off.
    #[error("device {device} cannot reach the memory of device {peer}")]
    NoPeerAccess {
        /// Ordinal of the device that would read or write.
        device: u32,
        /// Ordinal of the device whose memory it is.
        peer: u32,
    },
    /// The driver refused a call, or reports the failure of earlier asynchronous work through it.
    #[error("{call} failed: {name}: {description}")]
    Driver {
        /// The driver function.
        call: &'static str,
        /// The code's symbolic name, for example `CUDA_ERROR_ILLEGAL_ADDRESS`.
        name: String,
        /// The driver's own words.
        description: String,
    },
    /// Two lengths that must agree do not.
    #[error("{what}: {found} elements where {expected} are needed")]
    Length {
        /// Which operation.
        what: &'static str,
        /// Elements needed.
        expected: usize,
        /// Elements given.
        found: usize,
    },
    /// The module has no function of this name: the embedded kernels and the host code are of different builds.
    #[error("module has no kernel {kernel}")]
    UnknownKernel {
        /// The missing function.
        kernel: &'static str,
    },
}

/// Turns a driver code into a result that names the call.
pub(crate) fn check(call: &'static str, code: CUresult) -> Result<()> {
    if code == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    // SAFETY: a code came back, so the library is loaded; the driver hands out static strings or leaves the pointer null.
    let text = |lookup: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| unsafe {
        let mut text = std::ptr::null();
        lookup(code, &raw mut text);
        if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    };
    let name = match text(sys::cuGetErrorName) {
        name if name.is_empty() => format!("{code:?}"),
        name => name,
    };
    Err(DeviceError::Driver { call, name, description: text(sys::cuGetErrorString) })
}
