//! Captured work that is launched as one.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraph, CUgraphExec};

use crate::driver::DeviceShared;
use crate::error::{Result, check};
use crate::stream::{Capture, Stream};

/// A sequence of launches and copies, recorded by [`Stream::capture`]. It works on the memory it was captured with and keeps
/// that memory, and the kernels, alive.
#[derive(Debug)]
pub struct Graph {
    device: Arc<DeviceShared>,
    exec: CUgraphExec,
    nodes: usize,
    /// Dropped after `exec`: buffers dropped elsewhere live on here.
    _held: Capture,
}

// SAFETY: an executable graph may be launched from any thread, one at a time, which `&mut self` ensures.
unsafe impl Send for Graph {}

impl Graph {
    pub(crate) fn instantiate(device: &Arc<DeviceShared>, graph: CUgraph, held: Capture) -> Result<Self> {
        device.bind()?;
        let (mut exec, mut nodes) = (std::ptr::null_mut(), 0);
        // SAFETY: `graph` comes from a capture that just ended and is destroyed here, once, whatever the outcome.
        let (counted, code) = unsafe {
            let counted = sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut nodes);
            let code = sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0);
            sys::cuGraphDestroy(graph);
            (counted, code)
        };
        check("cuGraphInstantiate", code)?;
        let graph = Self { device: device.clone(), exec, nodes, _held: held };
        check("cuGraphGetNodes", counted)?;
        Ok(graph)
    }

    /// Number of launches and copies in it.
    #[must_use]
    pub const fn nodes(&self) -> usize {
        self.nodes
    }

    /// Enqueues the whole graph on `stream`.
    ///
    /// # Errors
    /// `Driver` if the driver refuses.
    pub fn launch(&mut self, stream: &Stream) -> Result<()> {
        self.device.bind()?;
        // SAFETY: graph and stream are alive and of one context; what the graph touches is held by it.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.exec, stream.raw()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: the last owner is gone; the driver defers the release past a launch that still runs.
            unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}
