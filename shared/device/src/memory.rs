//! Device memory: owned buffers, borrowed views, and the addresses that kernels receive.

use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::sys::CUdeviceptr;

use crate::driver::DeviceShared;
use crate::error::Result;

/// One driver allocation. Dropping the last owner hands it to the device, which frees it after its last use.
#[derive(Debug)]
pub(crate) struct Allocation {
    device: Arc<DeviceShared>,
    ptr: CUdeviceptr,
}

impl Allocation {
    pub(crate) const fn device(&self) -> &Arc<DeviceShared> {
        &self.device
    }

    pub(crate) const fn address(&self) -> CUdeviceptr {
        self.ptr
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.device.retire(self.ptr);
    }
}

/// Owned device memory of `len` elements of `T`. Made by [`Stream::allocate`](crate::Stream::allocate) and its siblings.
#[derive(Debug)]
pub struct DeviceBuffer<T> {
    allocation: Arc<Allocation>,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Pod> DeviceBuffer<T> {
    pub(crate) fn allocate(device: &Arc<DeviceShared>, len: usize) -> Result<Self> {
        let ptr = device.allocate(len * size_of::<T>())?;
        let allocation = Arc::new(Allocation { device: device.clone(), ptr });
        Ok(Self { allocation, len, element: PhantomData })
    }

    pub(crate) const fn allocation(&self) -> &Arc<Allocation> {
        &self.allocation
    }

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

    /// All of it, for reading.
    #[must_use]
    pub fn view(&self) -> View<'_, T> {
        View { allocation: &self.allocation, first: 0, len: self.len, element: PhantomData }
    }

    /// All of it, for writing.
    #[must_use]
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut { allocation: &self.allocation, first: 0, len: self.len, element: PhantomData }
    }

    /// Elements `range`, for reading.
    ///
    /// # Panics
    /// If the range does not lie within the buffer.
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> View<'_, T> {
        self.view().slice(range)
    }

    /// Elements `range`, for writing.
    ///
    /// # Panics
    /// If the range does not lie within the buffer.
    #[must_use]
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> ViewMut<'_, T> {
        self.view_mut().slice(range)
    }
}

/// Device memory borrowed for reading.
#[derive(Debug)]
pub struct View<'a, T> {
    allocation: &'a Arc<Allocation>,
    first: usize,
    len: usize,
    element: PhantomData<&'a [T]>,
}

impl<T> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for View<'_, T> {}

impl<'a, T: Pod> View<'a, T> {
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

    /// Elements `range` of this view.
    ///
    /// # Panics
    /// If the range does not lie within the view.
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Self {
        let (start, end) = bounds(range, self.len);
        Self { first: self.first + start, len: end - start, ..*self }
    }

    pub(crate) const fn allocation(&self) -> &'a Arc<Allocation> {
        self.allocation
    }
}

/// Device memory borrowed for writing: as with slices, no other view of these elements exists meanwhile on the host. Work
/// enqueued earlier may still read them; the order of the stream keeps the two apart.
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    allocation: &'a Arc<Allocation>,
    first: usize,
    len: usize,
    element: PhantomData<&'a mut [T]>,
}

impl<'a, T: Pod> ViewMut<'a, T> {
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

    /// Elements `range` of this view.
    ///
    /// # Panics
    /// If the range does not lie within the view.
    #[must_use]
    pub fn slice(self, range: impl RangeBounds<usize>) -> Self {
        let (start, end) = bounds(range, self.len);
        Self { first: self.first + start, len: end - start, ..self }
    }

    /// The same view, borrowed for a shorter time, so that it can be handed on more than once.
    #[must_use]
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut { allocation: self.allocation, first: self.first, len: self.len, element: PhantomData }
    }

    /// The same elements for reading, as long as this view is not used.
    #[must_use]
    pub const fn as_view(&self) -> View<'_, T> {
        View { allocation: self.allocation, first: self.first, len: self.len, element: PhantomData }
    }

    pub(crate) const fn allocation(&self) -> &'a Arc<Allocation> {
        self.allocation
    }
}

fn bounds(range: impl RangeBounds<usize>, len: usize) -> (usize, usize) {
    let start = match range.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(before) => before + 1,
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(last) => last + 1,
        Bound::Excluded(end) => *end,
        Bound::Unbounded => len,
    };
    assert!(start <= end && end <= len, "elements {start}..{end} of a view of {len}");
    (start, end)
}

/// The address of device memory that a kernel reads, as it lies in an argument struct.
#[derive(Debug)]
#[repr(transparent)]
pub struct DevicePtr<T> {
    address: u64,
    element: PhantomData<*const T>,
}

/// The address of device memory that a kernel writes, as it lies in an argument struct.
#[derive(Debug)]
#[repr(transparent)]
pub struct DevicePtrMut<T> {
    address: u64,
    element: PhantomData<*mut T>,
}

impl<T> Clone for DevicePtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DevicePtr<T> {}

impl<T> Clone for DevicePtrMut<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DevicePtrMut<T> {}

impl<T> DevicePtr<T> {
    /// For an optional input that is absent.
    pub const NULL: Self = Self { address: 0, element: PhantomData };

    pub(crate) fn of(view: &View<'_, T>) -> Self {
        let address = view.allocation.ptr + (view.first * size_of::<T>()) as u64;
        Self { address, element: PhantomData }
    }

    /// The address as a number, for alignment checks and tensor maps.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// The same address, for a kernel that reads the memory as other elements.
    #[must_use]
    pub const fn cast<U>(self) -> DevicePtr<U> {
        DevicePtr { address: self.address, element: PhantomData }
    }
}

impl<T> DevicePtrMut<T> {
    /// For an optional output that is absent.
    pub const NULL: Self = Self { address: 0, element: PhantomData };

    pub(crate) const fn at(address: u64) -> Self {
        Self { address, element: PhantomData }
    }

    pub(crate) fn of(view: &ViewMut<'_, T>) -> Self {
        let address = view.allocation.ptr + (view.first * size_of::<T>()) as u64;
        Self { address, element: PhantomData }
    }

    /// The address as a number, for alignment checks and tensor maps.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }
}

#[cfg(test)]
mod tests {
    use super::bounds;

    #[test]
    fn ranges_of_every_form_are_resolved() {
        assert_eq!(bounds(.., 5), (0, 5));
        assert_eq!(bounds(2.., 5), (2, 5));
        assert_eq!(bounds(..3, 5), (0, 3));
        assert_eq!(bounds(1..=2, 5), (1, 3));
        assert_eq!(bounds(5..5, 5), (5, 5));
    }

    #[test]
    #[should_panic(expected = "elements 2..6 of a view of 5")]
    fn a_range_past_the_end_is_refused() {
        let _ = bounds(2..6, 5);
    }
}
