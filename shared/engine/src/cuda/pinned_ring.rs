//! Page-locked buffers for uploads: as many copies under way as there are buffers.

use std::collections::VecDeque;

use bytemuck::Pod;
use device::{Landing, PinnedBuffer, Stream, ViewMut};

use crate::EngineError;

/// Up to `most` buffers of `len` elements, made when first needed.
pub(crate) struct PinnedRing<T> {
    len: usize,
    most: usize,
    /// Oldest copy first.
    in_flight: VecDeque<Landing<T>>,
}

impl<T: Pod> PinnedRing<T> {
    pub(crate) const fn new(len: usize, most: usize) -> Self {
        Self { len, most, in_flight: VecDeque::new() }
    }

    /// Elements of a buffer.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Lets `fill` write a buffer and starts its copy to `dst`, which has as many elements. Waits if all buffers are
    /// under way.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(crate) fn upload(
        &mut self,
        stream: &Stream,
        dst: ViewMut<'_, T>,
        fill: impl FnOnce(&mut [T]),
    ) -> Result<(), EngineError> {
        let reusable =
            self.in_flight.front().is_some_and(|oldest| self.in_flight.len() >= self.most || oldest.is_done());
        let oldest = if reusable { self.in_flight.pop_front() } else { None };
        let mut buffer = match oldest {
            Some(landing) => landing.wait()?,
            None => PinnedBuffer::zeros(stream, self.len)?,
        };
        fill(&mut buffer);
        self.in_flight.push_back(stream.upload_from(dst, buffer)?);
        Ok(())
    }
}
