//! Values of a tensor: borrowed from the mapped file where they lie in one piece, copied where they do not.

use std::fmt;
use std::ops::{Deref, Range};

use bytemuck::Pod;

use crate::mapping::FileBytes;

/// A `[T]` that either owns its values or shares the memory mapping of a checkpoint file. It derefs to `[T]`, needs no
/// lifetime, and keeps the mapping alive.
#[derive(Clone)]
pub struct Buffer<T>(Source<T>);

#[derive(Clone)]
enum Source<T> {
    Owned(Box<[T]>),
    /// A byte range that is aligned for `T` and a whole number of `T` long.
    Mapped(FileBytes, Range<usize>),
}

impl<T: Pod> Buffer<T> {
    /// Shares `bytes[range]`; copies only if the file does not align the values.
    pub(crate) fn from_file(bytes: &FileBytes, range: Range<usize>) -> Self {
        match bytemuck::try_cast_slice::<u8, T>(&bytes[range.clone()]) {
            Ok(_) => Self(Source::Mapped(bytes.clone(), range)),
            Err(_) => Self(Source::Owned(bytemuck::pod_collect_to_vec(&bytes[range]).into())),
        }
    }

    /// Whether the values are those of the file itself, not a copy.
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        matches!(self.0, Source::Mapped(..))
    }

    /// Announces that all of the values will be read soon.
    pub(crate) fn will_need(&self) {
        if let Source::Mapped(bytes, range) = &self.0 {
            bytes.will_need(range.clone());
        }
    }

    /// Reads one byte of each 4 KiB, so that the pages of the file come into memory now and not in the first forward
    /// pass.
    pub(crate) fn touch(&self) {
        self.will_need();
        if let Source::Mapped(bytes, range) = &self.0 {
            let sum = bytes[range.clone()].iter().step_by(4096).fold(0u8, |sum, &byte| sum ^ byte);
            std::hint::black_box(sum);
        }
    }
}

impl<T> From<Vec<T>> for Buffer<T> {
    fn from(values: Vec<T>) -> Self {
        Self(Source::Owned(values.into()))
    }
}

impl<T: Pod> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.0 {
            Source::Owned(values) => values,
            Source::Mapped(bytes, range) => bytemuck::cast_slice(&bytes[range.clone()]),
        }
    }
}

impl<T: Pod> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} values, {})", self.len(), if self.is_mapped() { "mapped" } else { "owned" })
    }
}
