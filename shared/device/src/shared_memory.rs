//! Device memory that several parties address: within this process, or across processes by a handle (CUDA IPC).

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use bytemuck::Pod;
use cudarc::driver::sys::{self, CUdeviceptr, CUipcMem_flags, CUipcMemHandle};

use crate::driver::{Device, DeviceShared};
use crate::error::{DeviceError, Result, check};
use crate::memory::{Allocation, DeviceBuffer};
use crate::stream::Stream;

/// What another process on this host opens memory with, see [`SharedMemory::export`].
pub type IpcHandle = [u8; 64];

/// Device memory by address. Clones name the same bytes and keep them alive; who may touch which of them when is agreed
/// outside of the type system, which is why everything that does so is `unsafe`.
#[derive(Clone, Debug)]
pub struct SharedMemory {
    owner: Owner,
    len: usize,
}

#[derive(Clone, Debug)]
enum Owner {
    Here(Arc<Allocation>),
    OtherProcess(Arc<Mapping>),
}

/// Memory of another process, mapped into this one.
#[derive(Debug)]
struct Mapping {
    device: Arc<DeviceShared>,
    ptr: CUdeviceptr,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: opened once by `import`, closed once; whoever used it waited for the end of that use (see `import`).
            unsafe { sys::cuIpcCloseMemHandle(self.ptr) };
        }
    }
}

/// Allocations of this process that have been exported: the driver refuses to open a handle where it was made.
static EXPORTED: Mutex<Option<HashMap<IpcHandle, Weak<Allocation>>>> = Mutex::new(None);

impl<T: Pod> DeviceBuffer<T> {
    /// The same memory, to be addressed beside the buffer.
    #[must_use]
    pub fn shared(&self) -> SharedMemory {
        SharedMemory { owner: Owner::Here(self.allocation().clone()), len: self.len() * size_of::<T>() }
    }
}

impl SharedMemory {
    /// Bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no byte.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of bytes `range`.
    ///
    /// # Panics
    /// If the range does not lie within the memory.
    #[must_use]
    pub fn address(&self, range: Range<usize>) -> u64 {
        assert!(range.start <= range.end && range.end <= self.len, "bytes {range:?} of {}", self.len);
        let base = match &self.owner {
            Owner::Here(allocation) => allocation.address(),
            Owner::OtherProcess(mapping) => mapping.ptr,
        };
        base + range.start as u64
    }

    /// A handle with which a process on this host can [`Self::import`] the memory. This process must keep it as long as another one has it
    /// open.
    ///
    /// # Errors
    /// `Driver` if the driver refuses, `Unavailable` for memory that is imported itself.
    pub fn export(&self) -> Result<IpcHandle> {
        let Owner::Here(allocation) = &self.owner else {
            return Err(DeviceError::Unavailable { reason: "imported memory cannot be exported".into() });
        };
        allocation.device().bind()?;
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: a plain out-pointer and an allocation that is alive.
        check("cuIpcGetMemHandle", unsafe { sys::cuIpcGetMemHandle(&raw mut handle, allocation.address()) })?;
        let handle: IpcHandle = handle.reserved.map(|byte| byte as u8);
        let mut exported = EXPORTED.lock().unwrap_or_else(PoisonError::into_inner);
        let exported = exported.get_or_insert_default();
        exported.retain(|_, allocation| allocation.strong_count() > 0);
        exported.insert(handle, Arc::downgrade(allocation));
        Ok(handle)
    }

    /// Opens `len` bytes of memory that this or another process has exported, for work on `device`. The last clone may be dropped only
    /// when no work that uses it is under way.
    ///
    /// # Errors
    /// `Driver` if the driver refuses: the other process is gone, runs elsewhere, or its GPU is not visible here.
    pub fn import(device: &Device, handle: &IpcHandle, len: usize) -> Result<Self> {
        let exported = EXPORTED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(allocation) = exported.as_ref().and_then(|exported| exported.get(handle)?.upgrade()) {
            if !Arc::ptr_eq(&device.shared, allocation.device()) {
                device.shared.open_peer(allocation.device())?;
            }
            return Ok(Self { owner: Owner::Here(allocation), len });
        }
        drop(exported);
        device.shared.bind()?;
        let mut ptr = 0;
        let raw = CUipcMemHandle { reserved: handle.map(|byte| byte as _) };
        let flags = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: a plain out-pointer; the driver checks the handle.
        check("cuIpcOpenMemHandle", unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut ptr, raw, flags) })?;
        let mapping = Arc::new(Mapping { device: device.shared.clone(), ptr });
        Ok(Self { owner: Owner::OtherProcess(mapping), len })
    }
}

impl Stream {
    /// Copies `len` bytes between places that need not be on this stream's device: by a copy engine between devices.
    ///
    /// # Errors
    /// `Driver` if the driver refuses.
    ///
    /// # Panics
    /// If a place does not lie within its memory.
    ///
    /// # Safety
    /// Until the copy has run, both memories stay alive and nobody else writes either place or reads the target.
    pub unsafe fn copy_shared(
        &self,
        (dst, dst_at): (&SharedMemory, usize),
        (src, src_at): (&SharedMemory, usize),
        len: usize,
    ) -> Result<()> {
        self.device_shared().bind()?;
        let (to, from) = (dst.address(dst_at..dst_at + len), src.address(src_at..src_at + len));
        // SAFETY: `address` has checked both places; the rest is the caller's promise.
        check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, len, self.raw()) })
    }
}
