//! One pair of ranks that talks by NCCL: a communicator of two, apart from every other one, so that a pair fails alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use device::nccl::{Abort, Communicator, CommunicatorConfig, UniqueId, exit_stuck};
use device::{DeviceBuffer, Stream};
use kernels::KvPort;

use super::open_pairs::PairEnd;
use crate::config::TransferConfig;
use crate::data::DataError;

/// Bytes that are sent to measure a pair.
pub(super) const PROBE_BYTES: usize = 64 << 20;
/// Times that they are sent; the first opens the connection.
pub(super) const PROBES: usize = 3;
/// How long an abort may take.
const ABORT_BOUND: Duration = Duration::from_secs(5);

/// The receiver makes the id.
const RECEIVER: u32 = 0;
const SENDER: u32 = 1;

impl From<device::nccl::NcclError> for DataError {
    fn from(error: device::nccl::NcclError) -> Self {
        Self(error.to_string())
    }
}

/// One end.
pub(super) struct Link {
    communicator: Communicator,
    /// Its sends or receives, which wait for the other end and for nothing else.
    pub(super) stream: Stream,
    is_aborted: AtomicBool,
}

impl Link {
    /// Does not wait for the other end: see [`Self::ready`].
    pub(super) fn join(port: &KvPort, id: &UniqueId, sends: bool, config: &TransferConfig) -> Result<Self, DataError> {
        let config = CommunicatorConfig {
            max_ctas: config.nccl_max_ctas,
            name: "damask-kv".into(),
            init_timeout: config.setup_timeout(),
            call_timeout: config.setup_timeout(),
        };
        let rank = if sends { SENDER } else { RECEIVER };
        let stream = port.device.stream()?;
        let communicator = Communicator::start(&port.device, id, 2, rank, &config)?;
        Ok(Self { communicator, stream, is_aborted: AtomicBool::new(false) })
    }

    /// Blocks until the other end has joined, within `setup_timeout_ms`, or this one is aborted.
    pub(super) fn ready(&self) -> Result<(), DataError> {
        Ok(self.communicator.ready()?)
    }

    pub(super) fn send(&self, staging: &DeviceBuffer<u8>, offset: usize, bytes: usize) -> Result<(), DataError> {
        Ok(self.communicator.send(&self.stream, staging.slice(offset..offset + bytes), RECEIVER)?)
    }

    pub(super) fn receive(&self, slots: &mut DeviceBuffer<u8>, offset: usize, bytes: usize) -> Result<(), DataError> {
        Ok(self.communicator.recv(&self.stream, slots.slice_mut(offset..offset + bytes), SENDER)?)
    }

    /// Whether what was received last may be anything.
    pub(super) fn is_aborted(&self) -> bool {
        self.is_aborted.load(Ordering::Acquire)
    }

    /// Has what waits for the other end give up, on a thread of its own. NCCL does not notice that a process on the same host has died, so
    /// this is called when the lane's connection has ended. If it does not return, the GPU is lost to this process, which then exits.
    pub(super) fn abort(&self) {
        if self.is_aborted.swap(true, Ordering::AcqRel) {
            return;
        }
        let aborting = self.communicator.begin_abort();
        let watch = move || match aborting.wait(ABORT_BOUND) {
            Abort::Returned { took } => tracing::debug!(?took, "nccl communicator aborted"),
            Abort::Stuck => {
                tracing::error!("an aborted nccl communicator did not return within {ABORT_BOUND:?}, exiting");
                exit_stuck();
            }
        };
        if let Err(error) = std::thread::Builder::new().name("kv-abort".into()).spawn(watch) {
            tracing::error!(%error, "no thread to watch the abort of a nccl communicator, exiting");
            exit_stuck();
        }
    }
}

impl PairEnd for Arc<Link> {
    fn abort(&self) {
        Link::abort(self);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.abort();
    }
}
