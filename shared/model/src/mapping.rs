//! Bytes of a file, mapped into memory: the only unsafe code of this crate.
#![allow(unsafe_code)]

use std::fs::File;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;

/// Read-only bytes of a file, or of a file embedded in the binary. Cloning shares them.
#[derive(Debug, Clone)]
pub(crate) enum FileBytes {
    Mapped(Arc<Mmap>),
    Static(&'static [u8]),
}

impl FileBytes {
    pub(crate) fn map(path: &Path) -> std::io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: the operator guarantees that nobody changes or truncates a checkpoint while it is served
        // (`Checkpoint::open` says so), until the last clone drops; the mapping is read-only, so nothing here can break
        // that. A file cut short under us ends the process by SIGBUS, it never reads foreign memory. Any byte pattern
        // is a valid `u8`.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self::Mapped(Arc::new(map)))
    }

    /// Asks the kernel to read a range from the disk in large pieces; without it each page fault waits for 128 KiB.
    /// Rank 5 of TP8 from a file of 20b's shape (holes, page cache cold, two shared cores): 1.7 s with, 10 to 17 s
    /// without. Only advice: where it is refused the same bytes arrive more slowly.
    pub(crate) fn will_need(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Self::Mapped(map) = self {
            let _ = map.advise_range(memmap2::Advice::WillNeed, range.start, range.len());
        }
    }
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Static(bytes) => bytes,
        }
    }
}
