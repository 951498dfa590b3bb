//! Bytes of a file, mapped into memory: the only unsafe code of this crate.
#![allow(unsafe_code)]

use std::fs::File;
use std::ops::Deref;
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
        // SAFETY: the operator guarantees that nobody changes or truncates a checkpoint while it is served (README); the mapping
        // is private and read-only, so nothing here can break that. Until the last clone drops, the file must stay whole: a
        // file cut short under us ends the process by SIGBUS, never by reading foreign memory. Any byte pattern is a valid `u8`.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self::Mapped(Arc::new(map)))
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
