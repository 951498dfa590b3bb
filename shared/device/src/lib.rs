//! The GPU as the rest of Damask sees it.
//!
//! Knows: the CUDA driver and NCCL, loaded at run time. A machine without one builds and runs everything; [`Device::open`] then answers
//! [`DeviceError::Unavailable`]. Must not know: any kernel (`kernels`), any model.
//!
//! Three rules hold everywhere. There is no default stream: whatever runs, runs on a [`Stream`] that the caller names. Memory
//! is held until its last use: a dropped [`DeviceBuffer`] goes back to the driver only after all work enqueued before the drop
//! has run, and a captured [`Graph`] keeps alive what it touches. Every error names the driver call that failed.
//!
//! Start with [`Device`], then [`Stream`], [`DeviceBuffer`] and [`Kernel`]; [`nccl`] joins the GPUs of several processes.
#![allow(unsafe_code)] // this crate is the boundary to the driver: each use says why it holds

mod driver;
mod error;
mod exit;
mod graph;
mod link;
mod link_bench;
mod memory;
mod module;
pub mod nccl;
mod peer;
mod pinned;
mod shared_memory;
mod stream;
mod tensor_map;

pub use driver::{Device, MIN_CUDA, probe};
pub use error::{DeviceError, Result};
pub use exit::{DriverWork, leave, was_work_given_up};
pub use graph::Graph;
pub use link::{Link, driver_version};
pub use link_bench::LinkBench;
pub use memory::{DeviceBuffer, DevicePtr, DevicePtrMut, View, ViewMut};
pub use module::{Kernel, KernelArgs, LaunchConfig, Module};
pub use peer::{HostWords, PeerBuffer};
pub use pinned::{Landing, PinnedBuffer};
pub use shared_memory::{IpcHandle, SharedMemory};
pub use stream::{Event, Stream};
pub use tensor_map::{Swizzle, TensorMap};
