//! Streams, events, and the capture of work into a graph.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use bytemuck::Pod;
use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUgraph, CUresult, CUstream, CUstream_flags};

use crate::driver::{Device, DeviceShared};
use crate::error::{DeviceError, Result, check};
use crate::graph::Graph;
use crate::memory::{Allocation, DeviceBuffer, DevicePtr, DevicePtrMut, View, ViewMut};
use crate::module::ModuleShared;

/// An ordered queue of work on one device.
#[derive(Clone, Debug)]
pub struct Stream {
    pub(crate) shared: Arc<StreamShared>,
}

#[derive(Debug)]
pub(crate) struct StreamShared {
    device: Arc<DeviceShared>,
    raw: CUstream,
    capturing: AtomicBool,
    capture: Mutex<Capture>,
}

/// What a graph under construction must keep alive.
#[derive(Debug, Default)]
pub(crate) struct Capture {
    /// Passes when everything that ran before the capture began has run.
    before: Option<Arc<EventShared>>,
    pub(crate) allocations: Vec<Arc<Allocation>>,
    pub(crate) modules: Vec<Arc<ModuleShared>>,
}

// SAFETY: stream handles may be used from any thread; the capture state is behind a lock.
unsafe impl Send for StreamShared {}
// SAFETY: as above.
unsafe impl Sync for StreamShared {}

impl Stream {
    pub(crate) fn new(device: &Device, urgent: bool) -> Result<Self> {
        device.shared.bind()?;
        let (mut raw, mut least, mut greatest) = (std::ptr::null_mut(), 0, 0);
        // SAFETY: plain out-pointers and a current context.
        let code = unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) };
        check("cuCtxGetStreamPriorityRange", code)?;
        let (flags, priority) = (CUstream_flags::CU_STREAM_NON_BLOCKING as u32, if urgent { greatest } else { least });
        // SAFETY: as above.
        let code = unsafe { sys::cuStreamCreateWithPriority(&raw mut raw, flags, priority) };
        check("cuStreamCreateWithPriority", code)?;
        let shared = Arc::new(StreamShared {
            device: device.shared.clone(),
            raw,
            capturing: AtomicBool::new(false),
            capture: Mutex::default(),
        });
        device.shared.register(&shared);
        Ok(Self { shared })
    }

    /// The device that this stream belongs to.
    #[must_use]
    pub fn device(&self) -> Device {
        Device { shared: self.shared.device.clone() }
    }

    /// Waits until everything enqueued so far has run.
    ///
    /// # Errors
    /// `Driver`, also for failures of earlier asynchronous work.
    pub fn synchronize(&self) -> Result<()> {
        self.shared.device.bind()?;
        // SAFETY: the stream lives as long as `self`.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.shared.raw) })
    }

    /// An event that passes when everything enqueued so far has run. It can be timed with [`Event::elapsed_us`].
    ///
    /// # Errors
    /// `Driver` if the driver refuses.
    pub fn record(&self) -> Result<Event> {
        Ok(Event { shared: Arc::new(EventShared::record(&self.shared, CUevent_flags::CU_EVENT_DEFAULT)?) })
    }

    /// Makes later work on this stream wait for `event`, which may be of another stream.
    ///
    /// # Errors
    /// `Driver` if the driver refuses.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.shared.device.bind()?;
        // SAFETY: stream and event are alive; the driver keeps the event's state until the wait has passed.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.shared.raw, event.shared.raw, 0) })
    }

    /// Device memory of `len` elements, uninitialised in content but not in type: any bit pattern is a value.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn allocate<T: Pod>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        DeviceBuffer::allocate(&self.shared.device, len)
    }

    /// Device memory of `len` elements, zeroed on this stream.
    ///
    /// # Errors
    /// `OutOfMemory`, or `Driver`.
    pub fn zeros<T: Pod>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        let mut buffer = self.allocate(len)?;
        self.fill_zero(buffer.view_mut())?;
        Ok(buffer)
    }

    /// Device memory with the values of `host`.
    ///
    /// # Errors
    /// `OutOfMemory`, or `Driver`.
    pub fn upload<T: Pod>(&self, host: &[T]) -> Result<DeviceBuffer<T>> {
        let mut buffer = self.allocate(host.len())?;
        self.copy_from_host(buffer.view_mut(), host)?;
        Ok(buffer)
    }

    /// Copies pageable host memory to the device; `host` may be reused when this returns.
    ///
    /// # Errors
    /// `Length` if the two differ, or `Driver`.
    pub fn copy_from_host<T: Pod>(&self, mut dst: ViewMut<'_, T>, host: &[T]) -> Result<()> {
        same_length("copy from host", dst.len(), host.len())?;
        self.shared.device.bind()?;
        let ptr = self.output(&mut dst).address();
        // SAFETY: both sides cover `size_of_val(host)` bytes. From pageable memory the driver copies to its staging buffer
        // before it returns, so `host` is not needed after that.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(ptr, host.as_ptr().cast(), size_of_val(host), self.shared.raw) };
        check("cuMemcpyHtoDAsync", code)
    }

    /// Copies to pageable host memory and waits for it.
    ///
    /// # Errors
    /// `Driver`, also for failures of earlier asynchronous work.
    pub fn download<T: Pod>(&self, src: View<'_, T>) -> Result<Vec<T>> {
        let mut host = vec![T::zeroed(); src.len()];
        self.shared.device.bind()?;
        let ptr = self.input(&src).address();
        // SAFETY: both sides cover `size_of_val(&host)` bytes, and `host` lives past the synchronisation below.
        let code = unsafe {
            sys::cuMemcpyDtoHAsync_v2(host.as_mut_ptr().cast(), ptr, size_of_val(&host[..]), self.shared.raw)
        };
        check("cuMemcpyDtoHAsync", code)?;
        self.synchronize()?;
        Ok(host)
    }

    /// Copies within the device.
    ///
    /// # Errors
    /// `Length` if the two differ, or `Driver`.
    pub fn copy<T: Pod>(&self, mut dst: ViewMut<'_, T>, src: View<'_, T>) -> Result<()> {
        same_length("copy", dst.len(), src.len())?;
        self.shared.device.bind()?;
        let (to, from) = (self.output(&mut dst).address(), self.input(&src).address());
        // SAFETY: both cover the same number of bytes; `dst` is borrowed exclusively, so they do not overlap.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, src.len() * size_of::<T>(), self.shared.raw) };
        check("cuMemcpyDtoDAsync", code)
    }

    /// Sets every byte to zero.
    ///
    /// # Errors
    /// `Driver` if the driver refuses.
    pub fn fill_zero<T: Pod>(&self, dst: ViewMut<'_, T>) -> Result<()> {
        self.fill_bytes(dst, 0)
    }

    /// Sets every byte to `byte`: 0xff poisons an output with NaNs before a kernel is to write it.
    ///
    /// # Errors
    /// `Driver` if the driver refuses.
    pub fn fill_bytes<T: Pod>(&self, mut dst: ViewMut<'_, T>, byte: u8) -> Result<()> {
        if dst.is_empty() {
            return Ok(());
        }
        self.shared.device.bind()?;
        let (ptr, bytes) = (self.output(&mut dst).address(), dst.len() * size_of::<T>());
        // SAFETY: the view covers that many bytes.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(ptr, byte, bytes, self.shared.raw) })
    }

    /// Address of an input for work that is about to be enqueued here. In a capture, the graph keeps the memory alive.
    pub fn input<T: Pod>(&self, view: &View<'_, T>) -> DevicePtr<T> {
        self.hold(view.allocation());
        DevicePtr::of(view)
    }

    /// Address of an output for work that is about to be enqueued here. In a capture, the graph keeps the memory alive.
    pub fn output<T: Pod>(&self, view: &mut ViewMut<'_, T>) -> DevicePtrMut<T> {
        self.hold(view.allocation());
        DevicePtrMut::of(view)
    }

    /// Records what `enqueue` puts on this stream instead of running it; [`Graph::launch`] runs it, any number of times.
    ///
    /// # Errors
    /// Whatever `enqueue` returns, or `Driver` if it did something that cannot be captured (allocating, synchronising).
    pub fn capture<E: From<DeviceError>>(
        &self,
        enqueue: impl FnOnce(&Self) -> std::result::Result<(), E>,
    ) -> std::result::Result<Graph, E> {
        let before = EventShared::record(&self.shared, CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
        *self.shared.capture_state() = Capture { before: Some(Arc::new(before)), ..Capture::default() };
        // SAFETY: the stream is alive and, as `capturing` is false, not in a capture.
        let code = unsafe {
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            sys::cuStreamBeginCapture_v2(self.shared.raw, mode)
        };
        check("cuStreamBeginCapture", code)?;
        self.shared.capturing.store(true, Ordering::Release);
        let outcome = enqueue(self);
        self.shared.capturing.store(false, Ordering::Release);
        let mut graph: CUgraph = std::ptr::null_mut();
        // SAFETY: ends the capture begun above, also when `enqueue` failed.
        let code = unsafe { sys::cuStreamEndCapture(self.shared.raw, &raw mut graph) };
        let held = std::mem::take(&mut *self.shared.capture_state());
        outcome?;
        check("cuStreamEndCapture", code)?;
        Ok(Graph::instantiate(&self.shared.device, graph, held)?)
    }

    pub(crate) fn raw(&self) -> CUstream {
        self.shared.raw
    }

    pub(crate) fn device_shared(&self) -> &Arc<DeviceShared> {
        &self.shared.device
    }

    pub(crate) fn hold(&self, allocation: &Arc<Allocation>) {
        if self.shared.capturing.load(Ordering::Acquire) {
            self.shared.capture_state().allocations.push(allocation.clone());
        }
    }

    pub(crate) fn hold_module(&self, module: &Arc<ModuleShared>) {
        if self.shared.capturing.load(Ordering::Acquire) {
            self.shared.capture_state().modules.push(module.clone());
        }
    }
}

pub(crate) fn same_length(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found { Ok(()) } else { Err(DeviceError::Length { what, expected, found }) }
}

impl StreamShared {
    fn capture_state(&self) -> MutexGuard<'_, Capture> {
        self.capture.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An event after all work that can use memory dropped now. During a capture nothing new runs, and recording would add a
    /// node to the graph, so the event from before the capture serves.
    pub(crate) fn mark_last_use(self: &Arc<Self>) -> Result<Arc<EventShared>> {
        if self.capturing.load(Ordering::Acquire)
            && let Some(before) = &self.capture_state().before
        {
            return Ok(before.clone());
        }
        EventShared::record(self, CUevent_flags::CU_EVENT_DISABLE_TIMING).map(Arc::new)
    }
}

impl Drop for StreamShared {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // Memory used on this stream may be freed as soon as the stream is unregistered, so its work ends first.
            // SAFETY: the last owner is gone.
            unsafe {
                sys::cuStreamSynchronize(self.raw);
                sys::cuStreamDestroy_v2(self.raw);
            }
            self.device.reclaim(false);
        }
    }
}

/// A point in a stream's work.
#[derive(Clone, Debug)]
pub struct Event {
    shared: Arc<EventShared>,
}

impl Event {
    /// Whether everything before it has run. A stream that failed counts as done: the next call on it reports the failure.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.shared.is_done()
    }

    /// Waits for it.
    ///
    /// # Errors
    /// `Driver`, also for failures of earlier asynchronous work.
    pub fn wait(&self) -> Result<()> {
        self.shared.wait()
    }

    /// Waits for it, but no longer than `bound`; whether it has passed. For work that another process may never let end.
    #[must_use]
    pub fn passes_within(&self, bound: Duration) -> bool {
        let started = Instant::now();
        while !self.is_done() && started.elapsed() < bound {
            thread::sleep(Duration::from_micros(100));
        }
        self.is_done()
    }

    /// Device time from `earlier` to this event, in microseconds. Both must have passed.
    ///
    /// # Errors
    /// `Driver` if one of them has not.
    pub fn elapsed_us(&self, earlier: &Self) -> Result<f64> {
        self.shared.device.bind()?;
        let mut milliseconds = 0.0_f32;
        // SAFETY: both events are alive and of this driver.
        let code = unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, earlier.shared.raw, self.shared.raw) };
        check("cuEventElapsedTime", code)?;
        Ok(f64::from(milliseconds) * 1e3)
    }
}

#[derive(Debug)]
pub(crate) struct EventShared {
    device: Arc<DeviceShared>,
    raw: CUevent,
}

// SAFETY: event handles may be used from any thread.
unsafe impl Send for EventShared {}
// SAFETY: as above.
unsafe impl Sync for EventShared {}

impl EventShared {
    fn record(stream: &Arc<StreamShared>, flags: CUevent_flags) -> Result<Self> {
        stream.device.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a plain out-pointer and a current context.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, flags as u32) })?;
        let event = Self { device: stream.device.clone(), raw };
        // SAFETY: both handles are alive and of one context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.raw, stream.raw) })?;
        Ok(event)
    }

    pub(crate) fn is_done(&self) -> bool {
        // SAFETY: the event is alive.
        self.device.bind().is_ok() && unsafe { sys::cuEventQuery(self.raw) } != CUresult::CUDA_ERROR_NOT_READY
    }

    pub(crate) fn wait(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the event is alive.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })
    }
}

impl Drop for EventShared {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: the last owner is gone; the driver defers the release past pending uses.
            unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}
