//! Pieces of KV between pages and staging, many at once.

use device::{Device, Event, Kernel, LaunchConfig, PinnedBuffer, SharedMemory, Stream};

use crate::error::{Checker, Result, int};
use crate::library::module;

const THREADS: u32 = 512;
/// Bytes that the kernels move at a time.
const WORD: usize = 16;

/// Which way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvDirection {
    /// From pages into staging.
    Gather,
    /// From staging into pages.
    Scatter,
}

/// The two kernels, loaded into one device. Apart from [`Kernels`](crate::Kernels), since KV moves on threads and streams of its own.
#[derive(Debug)]
pub struct KvKernels {
    gather: Kernel,
    scatter: Kernel,
}

impl KvKernels {
    /// # Errors
    /// As [`Kernels::load`](crate::Kernels::load).
    pub fn load(device: &Device) -> Result<Self> {
        let module = module(device, "kv_move")?;
        Ok(Self { gather: module.kernel("kv_gather", 0)?, scatter: module.kernel("kv_scatter", 0)? })
    }
}

/// Addresses of pieces, and room for their checksums. Made once and used again: it is page-locked memory.
#[derive(Debug)]
pub struct KvTable {
    pieces: PinnedBuffer<u64>,
    checksums: PinnedBuffer<u32>,
    len: usize,
    piece_bytes: usize,
}

impl KvTable {
    /// For up to `capacity` pieces.
    ///
    /// # Errors
    /// `Device` if the host has no such memory left.
    pub fn new(stream: &Stream, capacity: usize) -> Result<Self> {
        let (pieces, checksums) = (PinnedBuffer::zeros(stream, capacity)?, PinnedBuffer::zeros(stream, capacity)?);
        Ok(Self { pieces, checksums, len: 0, piece_bytes: 0 })
    }

    /// Replaces the pieces, each given by address and bytes as [`KvPool::piece`](crate::KvPool::piece) has them.
    ///
    /// # Errors
    /// `Size` for more pieces than there is room for, or pieces of unequal size; `Dimension` unless they are whole words of 16 bytes.
    pub fn fill(&mut self, pieces: impl IntoIterator<Item = (u64, usize)>) -> Result<()> {
        let check = Checker("kv_move");
        (self.len, self.piece_bytes) = (0, 0);
        for (address, bytes) in pieces {
            check.room("table", self.len + 1, self.pieces.len())?;
            if self.len == 0 {
                self.piece_bytes = bytes;
            }
            check.size("piece", self.piece_bytes, bytes)?;
            let aligned = bytes > 0 && bytes.is_multiple_of(WORD) && address.is_multiple_of(WORD as u64);
            check.dimension("piece", bytes, "whole words of 16 bytes", aligned)?;
            self.pieces[self.len] = address;
            self.len += 1;
        }
        Ok(())
    }

    /// Bytes of all pieces.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.len * self.piece_bytes
    }

    /// The checksums of the last move that took some.
    #[must_use]
    pub fn checksums(&self) -> &[u32] {
        &self.checksums[..self.len]
    }
}

/// `staging[i] = piece[i]` or the reverse, for all pieces of a table; and the checksum of each, if wanted.
#[derive(Debug)]
pub struct KvMove<'a> {
    /// Which way.
    pub direction: KvDirection,
    /// Where the pieces lie behind one another.
    pub staging: &'a SharedMemory,
    /// Byte of the first one.
    pub offset: usize,
    /// Whether to take checksums.
    pub checksums: bool,
    /// Blocks that may run: each takes most of a multiprocessor from a forward pass beside it.
    pub blocks: u32,
}

/// A move under way. It keeps the table until it is over.
#[derive(Debug)]
pub struct KvMoving {
    done: Event,
    table: Option<KvTable>,
}

impl KvMoving {
    /// Passes when the move is over; it can be timed.
    #[must_use]
    pub const fn event(&self) -> &Event {
        &self.done
    }

    /// Whether [`Self::wait`] would return at once.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.done.is_done()
    }

    /// The table, once the move is over.
    ///
    /// # Errors
    /// `Device`, also for failures of earlier work on the stream.
    pub fn wait(mut self) -> Result<KvTable> {
        self.done.wait()?;
        Ok(self.table.take().expect("only `wait` and `drop` take the table"))
    }
}

impl Drop for KvMoving {
    fn drop(&mut self) {
        // An error means that the stream is broken and reads the table no more.
        let _ = self.done.wait();
    }
}

kernel_args! {
    struct Args = KvMoveArgs in "kv_move/kv_move.cu" {
        pieces: u64,
        staging: u64,
        checksums: u64,
        num_pieces: i32,
        piece_words: i32,
    }
}

const _: () = assert!(size_of::<Args>() == 32);

impl KvMove<'_> {
    /// Returns once enqueued.
    ///
    /// # Errors
    /// `Dimension` unless the offset is a multiple of 16, `Device` if the launch fails.
    ///
    /// # Panics
    /// If the pieces do not fit into staging behind the offset.
    ///
    /// # Safety
    /// Until the move is over, the memory behind the table's pieces and `staging` stays alive, nobody else writes what it reads, and nobody
    /// else reads or writes what it writes.
    pub unsafe fn enqueue(self, kernels: &KvKernels, stream: &Stream, table: KvTable) -> Result<KvMoving> {
        let check = Checker("kv_move");
        check.dimension("offset", self.offset, "a multiple of 16", self.offset.is_multiple_of(WORD))?;
        let args = Args {
            pieces: table.pieces.device_address(),
            staging: self.staging.address(self.offset..self.offset + table.bytes()),
            checksums: if self.checksums { table.checksums.device_address() } else { 0 },
            num_pieces: int(table.len),
            piece_words: int(table.piece_bytes / WORD),
        };
        let kernel = match self.direction {
            KvDirection::Gather => &kernels.gather,
            KvDirection::Scatter => &kernels.scatter,
        };
        let blocks = (table.len as u32).clamp(1, self.blocks.max(1));
        let config = LaunchConfig { overlap: false, ..LaunchConfig::linear(blocks, THREADS) };
        // SAFETY: `fill` and `address` have checked sizes and places; the table is kept until the event below, and what lies behind the
        // addresses is the caller's promise.
        unsafe { kernel.launch(stream, config, &args) }?;
        let done = match stream.record() {
            Ok(done) => done,
            Err(error) => {
                // Nobody could tell when the kernel ends: the table must outlive it.
                std::mem::forget(table);
                return Err(error.into());
            }
        };
        Ok(KvMoving { done, table: Some(table) })
    }
}

/// The checksum of one piece, as the kernels take it: position-dependent, and a sum, so that threads may add in any order.
/// `bytes` is a whole number of 32-bit words, little-endian.
#[must_use]
pub fn kv_checksum(bytes: &[u8]) -> u32 {
    let words = bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
    words.zip(0_u32..).fold(0, |sum, (word, place)| {
        let x = word.wrapping_add(place.wrapping_mul(0x9e37_79b1));
        let x = (x ^ (x >> 16)).wrapping_mul(0x85eb_ca6b);
        sum.wrapping_add(x ^ (x >> 13))
    })
}

#[cfg(test)]
mod tests {
    use super::kv_checksum;

    #[test]
    fn a_checksum_sees_a_bit_and_a_place() {
        let mut bytes = [0_u8; 64];
        let zero = kv_checksum(&bytes);
        bytes[17] = 4;
        let flipped = kv_checksum(&bytes);
        bytes.swap(17, 21);
        let moved = kv_checksum(&bytes);
        assert!(zero != flipped && flipped != moved && zero != moved);
        assert_eq!(kv_checksum(&[]), 0);
    }
}
