//! Compiled kernels and their launch.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUfunction, CUfunction_attribute, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchConfig, CUmodule, CUresult,
};

use crate::driver::{Device, DeviceShared};
use crate::error::{DeviceError, Result, check};
use crate::stream::Stream;

/// Kernels compiled ahead of time, loaded into one device's context.
#[derive(Clone, Debug)]
pub struct Module {
    shared: Arc<ModuleShared>,
}

#[derive(Debug)]
pub(crate) struct ModuleShared {
    device: Arc<DeviceShared>,
    raw: CUmodule,
}

// SAFETY: module handles may be used from any thread.
unsafe impl Send for ModuleShared {}
// SAFETY: as above.
unsafe impl Sync for ModuleShared {}

impl Module {
    /// Loads a fatbin or cubin, as nvcc emits it.
    ///
    /// # Errors
    /// `Driver`, for example `CUDA_ERROR_NO_BINARY_FOR_GPU` when it holds no code for this device.
    pub fn load(device: &Device, image: &[u8]) -> Result<Self> {
        device.shared.bind()?;
        let mut raw = std::ptr::null_mut();
        // The driver wants an aligned image; bytes embedded by the compiler need not be.
        let mut aligned = vec![0_u64; image.len().div_ceil(8)];
        bytemuck::cast_slice_mut(&mut aligned)[..image.len()].copy_from_slice(image);
        // SAFETY: the image carries its own length in its header; the driver copies what it needs before it returns.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut raw, aligned.as_ptr().cast()) })?;
        Ok(Self { shared: Arc::new(ModuleShared { device: device.shared.clone(), raw }) })
    }

    /// The kernel `name`, ready for launches with up to `max_shared_bytes` of dynamic shared memory.
    ///
    /// # Errors
    /// `UnknownKernel`, or `Driver` if a block cannot have that much shared memory.
    pub fn kernel(&self, name: &'static str, max_shared_bytes: u32) -> Result<Kernel> {
        self.shared.device.bind()?;
        let symbol = CString::new(name).map_err(|_| DeviceError::UnknownKernel { kernel: name })?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is alive and the name is a terminated string.
        let code = unsafe { sys::cuModuleGetFunction(&raw mut raw, self.shared.raw, symbol.as_ptr()) };
        if code == CUresult::CUDA_ERROR_NOT_FOUND {
            return Err(DeviceError::UnknownKernel { kernel: name });
        }
        check("cuModuleGetFunction", code)?;
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is alive as long as the module.
        check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(raw, attribute, max_shared_bytes as i32) })?;
        Ok(Kernel { module: self.shared.clone(), raw, name })
    }
}

impl Drop for ModuleShared {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: every kernel, and every graph that contains one, holds the module; the driver unloads after running work.
            unsafe { sys::cuModuleUnload(self.raw) };
        }
    }
}

/// Argument of a kernel: one struct, passed by value.
///
/// # Safety
/// The type is `#[repr(C)]`, and its layout equals that of the kernel's only parameter.
pub unsafe trait KernelArgs: Copy {}

/// How many blocks of how many threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchConfig {
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Whether blocks may start while the preceding kernel of the stream still drains (programmatic dependent launch). Only for
    /// kernels that execute `griddepcontrol.wait` before they touch memory which another kernel writes or reads.
    pub overlap: bool,
}

impl LaunchConfig {
    /// `blocks` blocks of `threads` threads, overlapping the preceding kernel.
    #[must_use]
    pub const fn linear(blocks: u32, threads: u32) -> Self {
        Self { grid: [blocks, 1, 1], threads, shared_bytes: 0, overlap: true }
    }
}

/// One kernel of a [`Module`].
#[derive(Clone, Debug)]
pub struct Kernel {
    module: Arc<ModuleShared>,
    raw: CUfunction,
    name: &'static str,
}

// SAFETY: function handles may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// The function's name in the module.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Enqueues the kernel on `stream`.
    ///
    /// # Errors
    /// `Driver` if the launch is refused. A fault while it runs is reported by a later call on the stream.
    ///
    /// # Safety
    /// `args` holds only addresses taken from `stream` with [`Stream::input`] and [`Stream::output`] since the caller borrowed the
    /// views, the kernel stays within those views, and it writes only to the latter.
    pub unsafe fn launch<A: KernelArgs>(&self, stream: &Stream, config: LaunchConfig, args: &A) -> Result<()> {
        self.module.device.bind()?;
        stream.hold_module(&self.module);
        let mut value = CUlaunchAttributeValue { pad: [0; 64] };
        value.programmaticStreamSerializationAllowed = i32::from(config.overlap);
        let id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        let mut overlap = CUlaunchAttribute { id, pad: [0; 4], value };
        let launch = CUlaunchConfig {
            gridDimX: config.grid[0],
            gridDimY: config.grid[1],
            gridDimZ: config.grid[2],
            blockDimX: config.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: config.shared_bytes,
            hStream: stream.raw(),
            attrs: &raw mut overlap,
            numAttrs: 1,
        };
        let mut params = [std::ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: `A: KernelArgs` has the layout of the only parameter, which the driver copies before it returns; what the
        // addresses in it cover is the caller's promise.
        let code =
            unsafe { sys::cuLaunchKernelEx(&raw const launch, self.raw, params.as_mut_ptr(), std::ptr::null_mut()) };
        check("cuLaunchKernelEx", code)
    }
}
