//! Memory that several devices of one process share, and words that kernels and the host share while both run.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytemuck::Pod;
use cudarc::driver::sys;

use crate::driver::DeviceShared;
use crate::error::{DeviceError, Result, check};
use crate::memory::{Allocation, DeviceBuffer, DevicePtrMut, View};
use crate::stream::Stream;

/// Another hold on a [`DeviceBuffer`], for ranks on other devices. Nothing here keeps readers and writers apart: that is the
/// protocol of the kernels that get the address.
#[derive(Debug)]
pub struct PeerBuffer<T> {
    allocation: Arc<Allocation>,
    len: usize,
    element: PhantomData<T>,
}

impl<T> Clone for PeerBuffer<T> {
    fn clone(&self) -> Self {
        Self { allocation: self.allocation.clone(), len: self.len, element: PhantomData }
    }
}

impl<T: Pod> DeviceBuffer<T> {
    /// The same memory, to be handed to other ranks.
    #[must_use]
    pub fn share(&self) -> PeerBuffer<T> {
        PeerBuffer { allocation: self.allocation().clone(), len: self.len(), element: PhantomData }
    }
}

impl<T: Pod> PeerBuffer<T> {
    /// Number of elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Lets work on `stream` use the memory, which from then on is not freed before that work has ended. Done once for each
    /// stream, before [`Stream::peer`].
    ///
    /// # Errors
    /// `NoPeerAccess` if the stream's device cannot reach this memory, `Driver`.
    pub fn open(&self, stream: &Stream) -> Result<()> {
        stream.device_shared().open_peer(self.allocation.device())?;
        self.allocation.device().register(&stream.shared);
        Ok(())
    }
}

impl Stream {
    /// Address of shared memory for work that is about to be enqueued here. In a capture, the graph keeps the memory alive.
    pub fn peer<T: Pod>(&self, buffer: &PeerBuffer<T>) -> DevicePtrMut<T> {
        self.hold(&buffer.allocation);
        DevicePtrMut::at(buffer.allocation.address())
    }
}

impl Stream {
    /// Copies to memory that may be another device's. [`PeerBuffer::open`] was called for this stream.
    ///
    /// # Errors
    /// `Length` if `src` does not fill `dst`, or `Driver`.
    pub fn copy_to_peer<T: Pod>(&self, dst: &PeerBuffer<T>, src: View<'_, T>) -> Result<()> {
        if dst.len != src.len() {
            return Err(DeviceError::Length { what: "copy to peer", expected: dst.len, found: src.len() });
        }
        self.device_shared().bind()?;
        let (to, from) = (self.peer(dst).address(), self.input(&src).address());
        // SAFETY: both cover the same number of bytes, and one address space holds all devices of the process.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, src.len() * size_of::<T>(), self.raw()) };
        check("cuMemcpyDtoDAsync", code)
    }
}

/// 32-bit words in page-locked host memory that the host and kernels of every device read and write while both run.
#[derive(Debug)]
pub struct HostWords {
    device: Arc<DeviceShared>,
    ptr: NonNull<AtomicU32>,
    len: usize,
}

// SAFETY: atomics in memory that lives as long as `self`.
unsafe impl Send for HostWords {}
// SAFETY: as above.
unsafe impl Sync for HostWords {}

impl HostWords {
    /// `len` words, all zero.
    ///
    /// # Errors
    /// `Driver` if the host has no such memory left.
    pub fn zeros(stream: &Stream, len: usize) -> Result<Self> {
        let device = stream.device_shared().clone();
        device.bind()?;
        let bytes = (len * size_of::<AtomicU32>()).max(1);
        let mut ptr = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: a plain out-pointer and a size above zero.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut ptr, bytes, flags) })?;
        let ptr = NonNull::new(ptr.cast::<AtomicU32>()).expect("a successful allocation is not null");
        // SAFETY: the allocation covers `bytes` and is aligned to pages.
        unsafe { ptr.as_ptr().cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { device, ptr, len })
    }

    /// The word `idx`.
    ///
    /// # Panics
    /// If there are fewer words.
    #[must_use]
    pub fn load(&self, idx: usize) -> u32 {
        self.words()[idx].load(Ordering::Acquire)
    }

    /// Writes the word `idx`.
    ///
    /// # Panics
    /// If there are fewer words.
    pub fn store(&self, idx: usize, value: u32) {
        self.words()[idx].store(value, Ordering::Release);
    }

    fn words(&self) -> &[AtomicU32] {
        // SAFETY: `zeros` initialised `len` words; devices write them whole.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    /// The words' address, the same on every device. Whoever gives it to a kernel keeps the words until the kernel has ended.
    #[must_use]
    pub fn address(&self) -> DevicePtrMut<u32> {
        DevicePtrMut::at(self.ptr.as_ptr() as u64)
    }
}

impl Drop for HostWords {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: allocated in `zeros`, freed once; no kernel uses it any more (see `address`).
            unsafe { sys::cuMemFreeHost(self.ptr.as_ptr().cast()) };
        }
    }
}
