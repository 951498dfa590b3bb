//! What lies between the driver, the GPUs, and each pair of them.

use cudarc::driver::sys::{self, CUdevice_P2PAttribute};

use crate::driver::Device;
use crate::error::{DeviceError, Result, check};

/// The newest CUDA version that the driver supports, as (major, minor). Needs no GPU.
///
/// # Errors
/// `Unavailable` without a driver library.
pub fn driver_version() -> Result<(u32, u32)> {
    // The bindings panic on a missing library, so this check comes before any other call.
    // SAFETY: loads and unloads the library, which has no other precondition.
    if !unsafe { sys::is_culib_present() } {
        return Err(DeviceError::Unavailable { reason: "the driver library libcuda.so.1 is not installed".into() });
    }
    let mut version = 0;
    // SAFETY: the library is present, and this is a plain out-pointer.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    let version = u32::try_from(version).unwrap_or(0);
    Ok((version / 1000, version % 1000 / 10))
}

/// How one GPU reaches another's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// Whether it can at all, without going through host memory.
    pub peer_access: bool,
    /// Whether atomics work across, as they do over NVLink; over PCIe they do not.
    pub native_atomics: bool,
}

impl Device {
    /// The link from this GPU to the memory of `peer`.
    ///
    /// # Errors
    /// `Driver` if the driver will not say.
    pub fn link_to(&self, peer: &Self) -> Result<Link> {
        use CUdevice_P2PAttribute as A;
        let attribute = |attribute| {
            let mut value = 0;
            let (from, to) = (self.shared.raw(), peer.shared.raw());
            // SAFETY: a plain out-pointer and two devices that `open` obtained.
            let code = unsafe { sys::cuDeviceGetP2PAttribute(&raw mut value, attribute, from, to) };
            check("cuDeviceGetP2PAttribute", code).map(|()| value != 0)
        };
        Ok(Link {
            peer_access: attribute(A::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)?,
            native_atomics: attribute(A::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)?,
        })
    }

    /// Address on the PCI bus, for example `0000:19:00.0`: the same in every process, whatever it calls the GPU.
    ///
    /// # Errors
    /// `Driver` if the driver will not say.
    pub fn pci_address(&self) -> Result<String> {
        let mut text = [0_u8; 32];
        // SAFETY: the buffer is 32 bytes long, as stated; the driver terminates the string within it.
        let code = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), 32, self.shared.raw()) };
        check("cuDeviceGetPCIBusId", code)?;
        let len = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        Ok(String::from_utf8_lossy(&text[..len]).into_owned())
    }
}
