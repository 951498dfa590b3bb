//! What a communicator can be asked to do, as a value, so that a group is checked whole before NCCL hears of it.

use std::ffi::{c_int, c_void};

use bytemuck::Pod;
use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclDataType_t};
use half::bf16;

use super::abi::{Api, SUCCESS, SUM};
use super::error::{NcclError, Result};
use crate::memory::{View, ViewMut};
use crate::stream::{Stream, same_length};

mod sealed {
    use cudarc::nccl::sys::ncclDataType_t;

    pub trait Sealed {
        const TYPE: ncclDataType_t;
    }
}

/// Elements that NCCL can add: `f32` and `bf16` (each sum of two is rounded to bf16).
pub trait Summable: Pod + sealed::Sealed {}

impl sealed::Sealed for f32 {
    const TYPE: ncclDataType_t = ncclDataType_t::ncclFloat32;
}
impl Summable for f32 {}

impl sealed::Sealed for bf16 {
    const TYPE: ncclDataType_t = ncclDataType_t::ncclBfloat16;
}
impl Summable for bf16 {}

/// Where a rank stands among how many.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) rank: u32,
    pub(super) ranks: u32,
}

impl Place {
    fn peer(self, peer: u32) -> Result<c_int> {
        if peer == self.rank { Err(self.no_such(peer)) } else { self.root(peer) }
    }

    fn root(self, root: u32) -> Result<c_int> {
        if root < self.ranks { Ok(root as c_int) } else { Err(self.no_such(root)) }
    }

    const fn no_such(self, peer: u32) -> NcclError {
        NcclError::NoSuchPeer { rank: self.rank, ranks: self.ranks, peer }
    }
}

/// One call with its operands checked.
pub(super) struct Operation {
    stream: Stream,
    from: u64,
    to: u64,
    count: usize,
    element: c_int,
    kind: Kind,
}

#[derive(Clone, Copy)]
enum Kind {
    Send { peer: c_int },
    Recv { peer: c_int },
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast { root: c_int },
}

impl Operation {
    pub(super) fn send<T: Pod>(place: Place, stream: &Stream, view: View<'_, T>, peer: u32) -> Result<Self> {
        let from = stream.input(&view).address();
        Ok(Self::of_bytes(stream, from, 0, view.len() * size_of::<T>(), Kind::Send { peer: place.peer(peer)? }))
    }

    pub(super) fn recv<T: Pod>(place: Place, stream: &Stream, mut view: ViewMut<'_, T>, peer: u32) -> Result<Self> {
        let to = stream.output(&mut view).address();
        Ok(Self::of_bytes(stream, 0, to, view.len() * size_of::<T>(), Kind::Recv { peer: place.peer(peer)? }))
    }

    pub(super) fn broadcast<T: Pod>(
        place: Place,
        stream: &Stream,
        mut view: ViewMut<'_, T>,
        root: u32,
    ) -> Result<Self> {
        let at = stream.output(&mut view).address();
        Ok(Self::of_bytes(stream, at, at, view.len() * size_of::<T>(), Kind::Broadcast { root: place.root(root)? }))
    }

    pub(super) fn all_gather<T: Pod>(
        place: Place,
        stream: &Stream,
        mine: View<'_, T>,
        mut all: ViewMut<'_, T>,
    ) -> Result<Self> {
        same_length("all-gather", mine.len() * place.ranks as usize, all.len())?;
        let (from, to) = (stream.input(&mine).address(), stream.output(&mut all).address());
        Ok(Self::of_bytes(stream, from, to, mine.len() * size_of::<T>(), Kind::AllGather))
    }

    pub(super) fn reduce_scatter<T: Summable>(
        place: Place,
        stream: &Stream,
        all: View<'_, T>,
        mut mine: ViewMut<'_, T>,
    ) -> Result<Self> {
        same_length("reduce-scatter", mine.len() * place.ranks as usize, all.len())?;
        let (from, to) = (stream.input(&all).address(), stream.output(&mut mine).address());
        Ok(Self {
            count: mine.len(),
            element: T::TYPE as c_int,
            ..Self::of_bytes(stream, from, to, 0, Kind::ReduceScatter)
        })
    }

    pub(super) fn all_reduce<T: Summable>(stream: &Stream, mut view: ViewMut<'_, T>) -> Self {
        let at = stream.output(&mut view).address();
        Self { count: view.len(), element: T::TYPE as c_int, ..Self::of_bytes(stream, at, at, 0, Kind::AllReduce) }
    }

    fn of_bytes(stream: &Stream, from: u64, to: u64, bytes: usize, kind: Kind) -> Self {
        Self { stream: stream.clone(), from, to, count: bytes, element: ncclDataType_t::ncclUint8 as c_int, kind }
    }

    /// The NCCL function that it becomes.
    pub(super) const fn name(&self) -> &'static str {
        match self.kind {
            Kind::Send { .. } => "ncclSend",
            Kind::Recv { .. } => "ncclRecv",
            Kind::AllReduce => "ncclAllReduce",
            Kind::AllGather => "ncclAllGather",
            Kind::ReduceScatter => "ncclReduceScatter",
            Kind::Broadcast { .. } => "ncclBroadcast",
        }
    }

    pub(super) const fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Hands it to NCCL, and returns NCCL's code.
    ///
    /// # Safety
    /// `comm` is open and of the stream's device, no other call is made with it meanwhile, and the context is current.
    pub(super) unsafe fn issue(&self, api: &Api, comm: ncclComm_t) -> c_int {
        let (from, to) = (self.from as *const c_void, self.to as *mut c_void);
        let stream = self.stream.raw() as cudaStream_t;
        let (count, element) = (self.count, self.element);
        // SAFETY: the views that this was made from cover `count` elements. Memory is freed only after all work enqueued before
        // its owner's drop, which includes this. The rest is the caller's promise.
        unsafe {
            match self.kind {
                Kind::Send { peer } => (api.send)(from, count, element, peer, comm, stream),
                Kind::Recv { peer } => (api.recv)(to, count, element, peer, comm, stream),
                Kind::AllReduce => (api.all_reduce)(from, to, count, element, SUM, comm, stream),
                Kind::AllGather => (api.all_gather)(from, to, count, element, comm, stream),
                Kind::ReduceScatter => (api.reduce_scatter)(from, to, count, element, SUM, comm, stream),
                Kind::Broadcast { root } => (api.broadcast)(from, to, count, element, root, comm, stream),
            }
        }
    }
}

/// Sends and receives that are enqueued as one, see [`Communicator::group`](super::Communicator::group).
pub struct Group<'a> {
    place: Place,
    pub(super) operations: Vec<Operation>,
    views: std::marker::PhantomData<&'a mut ()>,
}

impl<'a> Group<'a> {
    pub(super) const fn new(place: Place) -> Self {
        Self { place, operations: Vec::new(), views: std::marker::PhantomData }
    }

    /// Adds a send of `view` to `peer`.
    ///
    /// # Errors
    /// `NoSuchPeer`.
    pub fn send<T: Pod>(&mut self, stream: &Stream, view: View<'a, T>, peer: u32) -> Result<()> {
        self.operations.push(Operation::send(self.place, stream, view, peer)?);
        Ok(())
    }

    /// Adds a receive into `view` from `peer`.
    ///
    /// # Errors
    /// `NoSuchPeer`.
    pub fn recv<T: Pod>(&mut self, stream: &Stream, view: ViewMut<'a, T>, peer: u32) -> Result<()> {
        self.operations.push(Operation::recv(self.place, stream, view, peer)?);
        Ok(())
    }

    /// Makes all calls between NCCL's marks for a group, which end in any case, and returns the first code that is no success.
    ///
    /// # Safety
    /// As for [`Operation::issue`].
    pub(super) unsafe fn issue(&self, api: &Api, comm: ncclComm_t) -> c_int {
        // SAFETY: the group is this thread's own; the rest is the caller's promise.
        unsafe {
            let started = (api.group_start)();
            if started != SUCCESS {
                return started;
            }
            let code = self.operations.iter().map(|operation| operation.issue(api, comm)).find(|code| *code != SUCCESS);
            let ended = (api.group_end)();
            code.unwrap_or(ended)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_has_the_others_for_peers() {
        let place = Place { rank: 1, ranks: 3 };
        assert_eq!(place.peer(0), Ok(0));
        assert_eq!(place.peer(2), Ok(2));
        assert_eq!(place.peer(1), Err(NcclError::NoSuchPeer { rank: 1, ranks: 3, peer: 1 }));
        assert_eq!(place.peer(3), Err(NcclError::NoSuchPeer { rank: 1, ranks: 3, peer: 3 }));
        assert_eq!(place.root(1), Ok(1));
        assert!(place.root(3).is_err());
    }

    #[test]
    fn elements_have_the_numbers_of_nccl() {
        use sealed::Sealed;
        assert_eq!((f32::TYPE as c_int, bf16::TYPE as c_int), (7, 9));
    }
}
