//! Finding the driver, opening a device, and giving memory back once nothing uses it any more.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUresult};

use crate::error::{DeviceError, Result, check};
use crate::link::driver_version;
use crate::stream::{EventShared, Stream, StreamShared};

/// Oldest CUDA, major and minor, whose drivers load what nvcc 13.0 emits.
pub const MIN_CUDA: (u32, u32) = (13, 0);

/// Number of GPUs that the driver offers here.
///
/// # Errors
/// `Unavailable`, with what is missing: library, driver version or device.
pub fn probe() -> Result<u32> {
    let unavailable = |reason: String| DeviceError::Unavailable { reason };
    // Before any other call: it finds a missing library, on which the bindings panic.
    let version = driver_version()?;
    if version < MIN_CUDA {
        let ((major, minor), (min_major, min_minor)) = (version, MIN_CUDA);
        return Err(unavailable(format!(
            "the driver supports CUDA {major}.{minor}, {min_major}.{min_minor} is needed"
        )));
    }
    // SAFETY: the library is present; one takes a number, the other a plain out-pointer.
    unsafe {
        check("cuInit", sys::cuInit(0)).map_err(|error| unavailable(error.to_string()))?;
        let mut count = 0;
        check("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut count))?;
        match u32::try_from(count) {
            Ok(count) if count > 0 => Ok(count),
            _ => Err(unavailable("the driver sees no device".into())),
        }
    }
}

/// One GPU, by its primary context. Cloning is cheap; the context lives as long as anything made from it.
#[derive(Clone, Debug)]
pub struct Device {
    pub(crate) shared: Arc<DeviceShared>,
}

impl Device {
    /// Opens GPU `ordinal`, counted as the driver does after `CUDA_VISIBLE_DEVICES`.
    ///
    /// # Errors
    /// `Unavailable` without driver or such a device; `Driver` if the context cannot be made.
    pub fn open(ordinal: u32) -> Result<Self> {
        let count = probe()?;
        if ordinal >= count {
            let reason = format!("device {ordinal} asked for, the driver sees {count}");
            return Err(DeviceError::Unavailable { reason });
        }
        let mut device: CUdevice = 0;
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: the driver is initialised by `probe` and the ordinal is in range.
        unsafe {
            check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, ordinal as i32))?;
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        }
        let shared = DeviceShared { ordinal, device, context, streams: Mutex::default(), retired: Mutex::default() };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The ordinal that [`Self::open`] was given.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.shared.ordinal
    }

    /// Marketing name, for example `NVIDIA H200`.
    ///
    /// # Errors
    /// `Driver` if the driver will not say.
    pub fn name(&self) -> Result<String> {
        let mut name = [0_u8; 256];
        // SAFETY: the buffer is 256 bytes long, as stated; the driver terminates the string within it.
        let code = unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), 256, self.shared.device) };
        check("cuDeviceGetName", code)?;
        let len = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        Ok(String::from_utf8_lossy(&name[..len]).into_owned())
    }

    /// Compute capability, (9, 0) on an H200.
    ///
    /// # Errors
    /// `Driver` if the driver will not say.
    pub fn compute_capability(&self) -> Result<(u32, u32)> {
        use CUdevice_attribute as A;
        Ok((
            self.attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            self.attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ))
    }

    /// Streaming multiprocessors: persistent kernels launch one or two blocks for each.
    ///
    /// # Errors
    /// `Driver` if the driver will not say.
    pub fn multiprocessors(&self) -> Result<u32> {
        self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
    }

    /// Whether kernels of other processes may run beside this one's: under the multi-process service (MPS). Without it processes take turns.
    ///
    /// # Errors
    /// `Driver` if the driver will not say.
    pub fn runs_beside_others(&self) -> Result<bool> {
        Ok(self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED)? != 0)
    }

    /// What tells this GPU from every other one, in whatever order a process sees them.
    ///
    /// # Errors
    /// `Driver` if the driver will not say.
    pub fn uuid(&self) -> Result<[u8; 16]> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: a plain out-pointer and a device that `open` obtained.
        check("cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, self.shared.device) })?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    /// Bytes of device memory: (free now, in total).
    ///
    /// # Errors
    /// `Driver` if the driver will not say.
    pub fn memory_bytes(&self) -> Result<(usize, usize)> {
        self.shared.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: two plain out-pointers; the context is current.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok((free, total))
    }

    /// A new stream, independent of all others.
    ///
    /// # Errors
    /// `Driver` if the driver refuses.
    pub fn stream(&self) -> Result<Stream> {
        Stream::new(self, false)
    }

    /// As [`Self::stream`], but wherever a multiprocessor has room, blocks of its kernels come before those of other streams: for short
    /// work beside long.
    ///
    /// # Errors
    /// As [`Self::stream`].
    pub fn urgent_stream(&self) -> Result<Stream> {
        Stream::new(self, true)
    }

    fn attribute(&self, attribute: CUdevice_attribute) -> Result<u32> {
        let mut value = 0;
        // SAFETY: a plain out-pointer and a device that `open` obtained.
        let code = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, self.shared.device) };
        check("cuDeviceGetAttribute", code)?;
        Ok(u32::try_from(value).unwrap_or(0))
    }
}

/// The context and what outlives its users: streams that may still be busy, memory that may still be in use.
#[derive(Debug)]
pub(crate) struct DeviceShared {
    pub(crate) ordinal: u32,
    device: CUdevice,
    context: CUcontext,
    streams: Mutex<Vec<Weak<StreamShared>>>,
    retired: Mutex<Vec<Retired>>,
}

/// Memory without an owner, freed when every event has passed.
#[derive(Debug)]
struct Retired {
    ptr: CUdeviceptr,
    last_uses: Vec<Arc<EventShared>>,
}

// SAFETY: a context may be current on any number of threads and the driver's calls are thread-safe; the rest is behind locks.
unsafe impl Send for DeviceShared {}
// SAFETY: as above.
unsafe impl Sync for DeviceShared {}

impl DeviceShared {
    /// Makes the context current on this thread: the first thing every call into the driver does.
    pub(crate) fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained until `self` is dropped.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// The device as the driver names it.
    pub(crate) const fn raw(&self) -> CUdevice {
        self.device
    }

    /// Lets kernels and copies in this context use the memory of `peer`'s. One context's own memory needs no leave.
    pub(crate) fn open_peer(&self, peer: &Self) -> Result<()> {
        if self.context == peer.context {
            return Ok(());
        }
        let mut can = 0;
        // SAFETY: a plain out-pointer and two devices that `open` obtained.
        let code = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, self.device, peer.device) };
        check("cuDeviceCanAccessPeer", code)?;
        if can == 0 {
            return Err(DeviceError::NoPeerAccess { device: self.ordinal, peer: peer.ordinal });
        }
        self.bind()?;
        // SAFETY: the peer's context is retained until `peer` is dropped, and memory of it holds `peer`.
        match unsafe { sys::cuCtxEnablePeerAccess(peer.context, 0) } {
            CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => check("cuCtxEnablePeerAccess", code),
        }
    }

    /// Has memory that is retired from now on wait for the work of `stream`, which may be another device's.
    pub(crate) fn register(&self, stream: &Arc<StreamShared>) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let stream = Arc::downgrade(stream);
        streams.retain(|known| known.strong_count() > 0 && !known.ptr_eq(&stream));
        streams.push(stream);
    }

    /// Allocates, after freeing retired memory that is no longer in use.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<CUdeviceptr> {
        self.bind()?;
        self.reclaim(false);
        let mut ptr = 0;
        let allocate = |ptr: &mut CUdeviceptr| {
            // SAFETY: a plain out-pointer, a size above zero, and a current context.
            unsafe { sys::cuMemAlloc_v2(std::ptr::from_mut(ptr), bytes.max(1)) }
        };
        let mut code = allocate(&mut ptr);
        if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            self.reclaim(true);
            code = allocate(&mut ptr);
        }
        if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(DeviceError::OutOfMemory { device: self.ordinal, requested_bytes: bytes });
        }
        check("cuMemAlloc", code)?;
        Ok(ptr)
    }

    /// Takes memory whose owner is gone. Whatever used it was enqueued before, so an event recorded now on every stream comes
    /// after the last use.
    pub(crate) fn retire(&self, ptr: CUdeviceptr) {
        let streams: Vec<_> = {
            let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
            streams.iter().filter_map(Weak::upgrade).collect()
        };
        // A stream that can no longer record an event is broken (a sticky error): nothing runs on it any more.
        let last_uses = streams.iter().filter_map(|stream| stream.mark_last_use().ok()).collect();
        let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        retired.push(Retired { ptr, last_uses });
        drop(retired);
        self.reclaim(false);
    }

    /// Frees retired memory that nothing uses any more; with `wait`, all of it.
    pub(crate) fn reclaim(&self, wait: bool) {
        let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        retired.retain(|memory| {
            let done = memory.last_uses.iter().all(|event| if wait { event.wait().is_ok() } else { event.is_done() });
            if done && self.bind().is_ok() {
                // SAFETY: allocated by `allocate`, retired once, and its last use lies behind us. An error here would be an
                // earlier asynchronous failure, which the next call on the stream reports.
                unsafe { sys::cuMemFree_v2(memory.ptr) };
            }
            !done
        });
    }
}

impl Drop for DeviceShared {
    fn drop(&mut self) {
        self.reclaim(true);
        // SAFETY: everything made from this context holds `self`, so nothing is left that needs it.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}
