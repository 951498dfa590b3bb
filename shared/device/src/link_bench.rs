//! How fast a GPU's memory is, and how fast bytes come from the GPU of another process. Everything here waits for its own end.

use std::time::Duration;

use cudarc::driver::sys::{self, CUipcMem_flags, CUipcMemHandle};

use crate::driver::Device;
use crate::error::{Result, check};
use crate::memory::{DeviceBuffer, DevicePtr};
use crate::nccl::{self, Communicator, CommunicatorConfig, UniqueId};
use crate::stream::Stream;

/// Large enough that starting a transfer does not count.
const BYTES: usize = 64 << 20;
const TRANSFERS: usize = 16;
const BOUND: Duration = Duration::from_secs(20);

/// One GPU of this process with some memory to measure on, which other processes may open.
#[derive(Debug)]
pub struct LinkBench {
    device: Device,
    stream: Stream,
    own: DeviceBuffer<u8>,
    landing: DeviceBuffer<u8>,
}

impl LinkBench {
    /// Takes 128 MiB of GPU `ordinal`.
    ///
    /// # Errors
    /// As [`Device::open`]; `OutOfMemory`.
    pub fn open(ordinal: u32) -> Result<Self> {
        let device = Device::open(ordinal)?;
        let stream = device.stream()?;
        let (own, landing) = (stream.zeros(BYTES)?, stream.zeros(BYTES)?);
        stream.synchronize()?;
        Ok(Self { device, stream, own, landing })
    }

    /// Bytes read and written by copies within the GPU, in GB/s.
    ///
    /// # Errors
    /// `Driver`.
    pub fn memory_gb_per_s(&self) -> Result<f64> {
        let (to, from) = (DevicePtr::of(&self.landing.view()).address(), DevicePtr::of(&self.own.view()).address());
        Ok(2.0 * self.copies(to, from)?)
    }

    /// A handle with which another process on this host can [`pull`](Self::pull_gb_per_s) from this one's memory.
    ///
    /// # Errors
    /// `Driver` if the driver refuses.
    pub fn export(&self) -> Result<[u8; 64]> {
        self.device.shared.bind()?;
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        let address = DevicePtr::of(&self.own.view()).address();
        // SAFETY: a plain out-pointer and the base address of an allocation that is alive.
        check("cuIpcGetMemHandle", unsafe { sys::cuIpcGetMemHandle(&raw mut handle, address) })?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    /// The rate of copies from the memory of another process's [`LinkBench`] by this GPU's copy engine, in GB/s.
    ///
    /// # Errors
    /// `Driver`: the other process is gone, its GPU is not visible here, or the two GPUs cannot reach each other.
    pub fn pull_gb_per_s(&self, handle: &[u8; 64]) -> Result<f64> {
        self.device.shared.bind()?;
        let raw = CUipcMemHandle { reserved: handle.map(|byte| byte as _) };
        let flags = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut from = 0;
        // SAFETY: a plain out-pointer; the driver checks the handle.
        check("cuIpcOpenMemHandle", unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut from, raw, flags) })?;
        let rate = self.copies(DevicePtr::of(&self.landing.view()).address(), from);
        // SAFETY: opened above, and `copies` has waited for its end.
        check("cuIpcCloseMemHandle", unsafe { sys::cuIpcCloseMemHandle(from) })?;
        rate
    }

    /// The rate of sends from rank 0 to rank 1 of a new communicator, in GB/s; both call this. Rank 0 is the one that made `id`.
    ///
    /// # Errors
    /// Those of [`Communicator`]: `Timeout` if the other one does not take part.
    pub fn nccl_gb_per_s(&self, id: &UniqueId, rank: u32) -> nccl::Result<f64> {
        let config =
            CommunicatorConfig { name: "probe".into(), init_timeout: BOUND, call_timeout: BOUND, ..Default::default() };
        let communicator = Communicator::init(&self.device, id, 2, rank, &config)?;
        let outcome = self.transfers(&communicator);
        match outcome {
            Ok(_) => communicator.close(BOUND)?,
            Err(_) => {
                let _ = communicator.abort(BOUND);
            }
        }
        outcome
    }

    fn transfers(&self, communicator: &Communicator) -> nccl::Result<f64> {
        let mut landing = self.stream.allocate::<u8>(BYTES)?;
        let mut transfer = || match communicator.rank() {
            0 => communicator.send(&self.stream, self.own.view(), 1),
            _ => communicator.recv(&self.stream, landing.view_mut(), 0),
        };
        // The first connects the two.
        transfer()?;
        let start = self.stream.record()?;
        (0..TRANSFERS).try_for_each(|_| transfer())?;
        let end = self.stream.record()?;
        if !end.passes_within(BOUND) {
            return Err(nccl::NcclError::Timeout { call: "a transfer", waited: BOUND });
        }
        Ok(rate(end.elapsed_us(&start)?))
    }

    /// Copies of `BYTES` one after the other, the first not counted.
    fn copies(&self, to: u64, from: u64) -> Result<f64> {
        self.device.shared.bind()?;
        let copy = || {
            // SAFETY: both cover `BYTES`; the caller keeps them until the wait below.
            check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, BYTES, self.stream.raw()) })
        };
        let outcome = (|| {
            copy()?;
            let start = self.stream.record()?;
            (0..TRANSFERS).try_for_each(|_| copy())?;
            Ok((start, self.stream.record()?))
        })();
        // Also after an error: what was enqueued ends before the caller gives the memory back.
        self.stream.synchronize()?;
        let (start, end) = outcome?;
        Ok(rate(end.elapsed_us(&start)?))
    }
}

fn rate(us: f64) -> f64 {
    (BYTES * TRANSFERS) as f64 / us / 1e3
}
