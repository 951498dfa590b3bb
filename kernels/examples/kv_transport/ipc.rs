//! Memory of another process, through CUDA's handles, and copies to and from it by the copy engines.

use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUresult, CUstream};
use device::{DeviceBuffer, Stream};

/// A handle with which another process opens `buffer`, in hexadecimal.
pub(crate) fn export(stream: &Stream, buffer: &DeviceBuffer<u8>) -> String {
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: a plain out-pointer and the base address of an allocation that is alive.
    check(unsafe { sys::cuIpcGetMemHandle(&raw mut handle, stream.input(&buffer.view()).address()) });
    crate::side::hex(&handle.reserved.map(|byte| byte as u8))
}

/// Which way a copy goes, seen from the process that enqueues it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// From own memory into the other's.
    Push,
    /// From the other's memory into own.
    Pull,
}

/// Memory of another process, and a stream of its own for copies.
pub(crate) struct Mapped {
    address: u64,
    len: usize,
    copies: CUstream,
}

// SAFETY: handles of the driver may be used from any thread.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Opens what another process exported with `len` bytes, for the device of `stream`.
    pub(crate) fn open(stream: &Stream, handle: &str, len: usize) -> Self {
        // Makes the context current on this thread, which all of this then needs.
        stream.synchronize().unwrap();
        let bytes: [u8; 64] = crate::side::unhex(handle).try_into().unwrap();
        let handle = sys::CUipcMemHandle { reserved: bytes.map(|byte| byte as _) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let (mut address, mut copies) = (0, ptr::null_mut());
        // SAFETY: plain out-pointers; the driver checks the handle.
        unsafe {
            check(sys::cuIpcOpenMemHandle_v2(&raw mut address, handle, flags));
            check(sys::cuStreamCreate(&raw mut copies, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32));
        }
        Self { address, len, copies }
    }

    /// Enqueues a copy of `bytes` between `own` and this memory, each from its start.
    pub(crate) fn copy(&self, stream: &Stream, own: &mut DeviceBuffer<u8>, way: Way, bytes: usize) -> CUresult {
        assert!(bytes <= self.len && bytes <= own.len());
        // Makes the context current on this thread.
        stream.record().unwrap();
        let own = stream.output(&mut own.view_mut()).address();
        let (to, from) = match way {
            Way::Push => (self.address, own),
            Way::Pull => (own, self.address),
        };
        // SAFETY: both cover `bytes`. What is read or written elsewhere meanwhile does not matter to a measurement.
        unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.copies) }
    }

    /// Enqueues a copy of `bytes` from each place of own memory, which begins at `own`, to the same place of this one: one call each,
    /// or one for all.
    pub(crate) fn push_pieces(&self, own: u64, places: &[usize], bytes: usize, batched: bool) {
        assert!(places.iter().all(|at| at + bytes <= self.len));
        if !batched {
            for at in places.iter().map(|at| *at as u64) {
                // SAFETY: the place lies in both memories, whose owners measure and do nothing else with them.
                check(unsafe { sys::cuMemcpyDtoDAsync_v2(self.address + at, own + at, bytes, self.copies) });
            }
            return;
        }
        let mut to: Vec<u64> = places.iter().map(|at| self.address + *at as u64).collect();
        let mut from: Vec<u64> = places.iter().map(|at| own + *at as u64).collect();
        let mut sizes = vec![bytes; places.len()];
        // SAFETY: all fields are numbers and enums with a zero.
        let mut attributes: sys::CUmemcpyAttributes = unsafe { std::mem::zeroed() };
        attributes.srcAccessOrder = sys::CUmemcpySrcAccessOrder_enum::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        let mut first = 0;
        // SAFETY: as above; three lists of one length, and one set of attributes for all, from the first on.
        check(unsafe {
            sys::cuMemcpyBatchAsync_v2(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                sizes.as_mut_ptr(),
                places.len(),
                &raw mut attributes,
                &raw mut first,
                1,
                self.copies,
            )
        });
    }

    /// Waits for the copies, no longer than `bound`: the driver's answer, or `None` if they still run.
    pub(crate) fn finish(&self, bound: Duration) -> Option<CUresult> {
        let started = Instant::now();
        loop {
            // SAFETY: the stream is alive.
            match unsafe { sys::cuStreamQuery(self.copies) } {
                CUresult::CUDA_ERROR_NOT_READY if started.elapsed() > bound => return None,
                CUresult::CUDA_ERROR_NOT_READY => thread::yield_now(),
                code => return Some(code),
            }
        }
    }

    /// Unmaps it.
    pub(crate) fn close(self) {
        // SAFETY: opened above and used no more.
        check(unsafe { sys::cuIpcCloseMemHandle(self.address) });
    }
}

fn check(code: CUresult) {
    assert_eq!(code, CUresult::CUDA_SUCCESS);
}
