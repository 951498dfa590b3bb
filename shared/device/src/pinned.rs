//! Page-locked host memory: the only kind that copies run beside the host's own work.

use bytemuck::Pod;
use cudarc::driver::sys;

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::driver::DeviceShared;
use crate::error::{DeviceError, Result, check};
use crate::memory::{View, ViewMut};
use crate::stream::{Event, Stream};

/// Page-locked host memory of a fixed number of elements. Reads and writes as a slice.
#[derive(Debug)]
pub struct PinnedBuffer<T> {
    device: Arc<DeviceShared>,
    ptr: NonNull<T>,
    len: usize,
}

// SAFETY: owned host memory of plain data, like a `Box<[T]>`.
unsafe impl<T: Send> Send for PinnedBuffer<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for PinnedBuffer<T> {}

impl<T: Pod> PinnedBuffer<T> {
    /// `len` zeroed elements, known to the driver of `stream`'s device.
    ///
    /// # Errors
    /// `Driver` if the host has no such memory left.
    pub fn zeros(stream: &Stream, len: usize) -> Result<Self> {
        let device = stream.device_shared().clone();
        device.bind()?;
        let bytes = (len * size_of::<T>()).max(1);
        let mut ptr = std::ptr::null_mut();
        // SAFETY: a plain out-pointer and a size above zero.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut ptr, bytes, 0) })?;
        let ptr = NonNull::new(ptr.cast::<T>()).expect("a successful allocation is not null");
        // SAFETY: the allocation covers `bytes`, and zero is a value of every `Pod`. Pages are aligned for any element.
        unsafe { ptr.as_ptr().cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { device, ptr, len })
    }
}

impl<T> PinnedBuffer<T> {
    /// The address at which kernels reach it, over the bus. A kernel that does so must have ended before the buffer is touched or dropped.
    #[must_use]
    pub fn device_address(&self) -> u64 {
        // With unified addressing, which every device of compute capability 9.0 has, it is the host's.
        self.ptr.as_ptr() as u64
    }
}

impl<T> Deref for PinnedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `zeros` initialised `len` elements, and no copy is under way: `Landing` owns the buffer while one is.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for PinnedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl<T> Drop for PinnedBuffer<T> {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: allocated in `zeros`, freed once; no copy is under way (see `Landing`).
            unsafe { sys::cuMemFreeHost(self.ptr.as_ptr().cast()) };
        }
    }
}

/// A pinned buffer that a copy is using. The buffer comes back with [`Self::wait`], so it can be neither read too early nor
/// overwritten nor freed meanwhile.
#[derive(Debug)]
pub struct Landing<T> {
    done: Event,
    buffer: Option<PinnedBuffer<T>>,
}

impl<T> Landing<T> {
    /// Whether [`Self::wait`] would return at once.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.done.is_done()
    }

    /// The buffer, once the copy has run.
    ///
    /// # Errors
    /// `Driver`, also for failures of earlier asynchronous work.
    pub fn wait(mut self) -> Result<PinnedBuffer<T>> {
        self.done.wait()?;
        Ok(self.buffer.take().expect("only `wait` and `drop` take the buffer"))
    }
}

impl<T> Drop for Landing<T> {
    fn drop(&mut self) {
        // An error means that the stream is broken and copies nothing any more.
        let _ = self.done.wait();
    }
}

impl Stream {
    /// Starts a copy from the device into `dst`, which must be as long as `src`.
    ///
    /// # Errors
    /// `Length` if the two differ, or `Driver`.
    pub fn download_into<T: Pod>(&self, src: View<'_, T>, dst: PinnedBuffer<T>) -> Result<Landing<T>> {
        if src.len() != dst.len {
            return Err(DeviceError::Length { what: "download", expected: src.len(), found: dst.len });
        }
        self.device_shared().bind()?;
        let bytes = dst.len * size_of::<T>();
        // SAFETY: both sides cover `bytes`; `Landing` holds the buffer until the copy has run.
        let code = unsafe {
            sys::cuMemcpyDtoHAsync_v2(dst.ptr.as_ptr().cast(), self.input(&src).address(), bytes, self.raw())
        };
        check("cuMemcpyDtoHAsync", code)?;
        self.landing(dst)
    }

    /// Starts a copy of `src` to the device.
    ///
    /// # Errors
    /// `Length` if the two differ, or `Driver`.
    pub fn upload_from<T: Pod>(&self, mut dst: ViewMut<'_, T>, src: PinnedBuffer<T>) -> Result<Landing<T>> {
        if src.len != dst.len() {
            return Err(DeviceError::Length { what: "upload", expected: dst.len(), found: src.len });
        }
        self.device_shared().bind()?;
        let (to, bytes) = (self.output(&mut dst).address(), src.len * size_of::<T>());
        // SAFETY: both sides cover `bytes`; `Landing` holds the buffer until the copy has run.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, src.ptr.as_ptr().cast(), bytes, self.raw()) };
        check("cuMemcpyHtoDAsync", code)?;
        self.landing(src)
    }

    fn landing<T>(&self, buffer: PinnedBuffer<T>) -> Result<Landing<T>> {
        match self.record() {
            Ok(done) => Ok(Landing { done, buffer: Some(buffer) }),
            Err(error) => {
                // Without an event nobody could tell when the copy ends: the buffer must outlive it.
                std::mem::forget(buffer);
                Err(error)
            }
        }
    }
}
