//! A data path beside a lane's frames: what moves KV between caches that the lane itself cannot touch.
//!
//! ```text
//!  sender's rank                         lane (frames)                receiver's rank
//!  gather: pages → staging
//!                                        BATCH ──────────►            queued, in the order of announcements
//!                                                                     move: their staging → own staging
//!                                                                     scatter: own staging → pages
//!  staging is free again                 ◄────────── LANDED
//! ```
//! A *batch* is slices of one ticket between one rank of the sender and one of the receiver. It is announced when its bytes lie in staging, so
//! nothing that the receiver does waits for a prefill to compute. Staging is a ring for each rank of the sender, bounded by
//! `in_flight_bytes_max`: what a ticket may hand over, it has room for.
//!
//! **The fence.** Only the receiver writes its pages, and it counts the batches of a ticket that were announced and are not over. A ticket
//! ends when that count is zero; one that is revoked has its remaining batches received and thrown away, so that two-sided paths stay in step.
//!
//! The traits are implemented for GPUs by `device` (feature `cuda`); the contract suite has one over plain memory.

mod counters;
mod offer;
mod staging_ring;

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use bytes::Bytes;
use kv::KvSlice;
use types::{KvLayout, PageId, PeerId, TicketId};

pub use counters::{DataCounters, Stage};
pub use offer::{DataOffer, GpuId, Path, Paths, TransportMismatch, negotiate};
pub(crate) use staging_ring::StagingRing;

/// Slices that one batch may have.
pub const BATCH_SLICES_MAX: usize = 2_048;

/// Bytes in a sender's staging that wait to be moved.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Its number on this lane.
    pub id: u64,
    /// Whose.
    pub ticket: TicketId,
    /// The rank in whose staging it lies.
    pub sender_rank: u32,
    /// The rank whose pages it goes to, of those of all the receiver's attention groups.
    pub receiver_rank: u32,
    /// Its first byte in staging.
    pub offset: u64,
    /// What lies there, one slice behind another, all of one size.
    pub slices: Vec<StagedSlice>,
    /// Whether the slices' checksums were taken.
    pub is_checked: bool,
}

/// One slice of a [`Batch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StagedSlice {
    /// What the bytes are.
    pub slice: KvSlice,
    /// Their checksum, in the data path's own way; 0 where none was taken.
    pub checksum: u32,
}

/// Why a data path cannot do what it should: what the system or the driver says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct DataError(pub String);

/// The transfer rate between two ranks, measured when a lane is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PairRate {
    /// The sender's.
    pub sender_rank: u32,
    /// The receiver's.
    pub receiver_rank: u32,
    /// By which way.
    pub path: Path,
    /// Megabytes a second.
    pub mb_per_s: u32,
}

/// The two sides of a lane whose data path is to be opened.
#[derive(Debug, Clone)]
pub struct LaneSides<'a> {
    /// The other side.
    pub peer: &'a PeerId,
    /// How the sender's KV lies.
    pub sender: &'a KvLayout,
    /// How the receiver's KV lies.
    pub receiver: &'a KvLayout,
    /// The way of each pair of ranks.
    pub paths: &'a Paths,
}

/// Prefill's half.
pub trait SendData: Send + Sync {
    /// What this side can do.
    fn offer(&self) -> DataOffer;

    /// Sets staging aside for one lane; what the receiver must know of it travels in SETUP. Does not wait for the peer, but may take as long as
    /// an allocation.
    ///
    /// # Errors
    /// [`DataError`].
    fn open(&self, sides: &LaneSides<'_>) -> Result<(Arc<dyn SendDataLane>, Vec<u8>), DataError>;
}

/// Prefill's half of one lane.
pub trait SendDataLane: Send + Sync {
    /// The part of opening that needs the peer, which does its own at the same time: joins pairs as the receiver names them. May block, bounded by
    /// `setup_timeout_ms`; ends soon once the lane is closed, or nobody can name a pair any more.
    ///
    /// # Errors
    /// [`DataError`].
    fn connect(&self, joins: Receiver<Bytes>) -> Result<(), DataError>;

    /// Starts to copy slices, all of one size, out of the cache of `rank` to staging, from byte `offset` on.
    ///
    /// # Errors
    /// [`DataError`], also for a slice that is not on this rank.
    fn gather(
        &self,
        rank: u32,
        offset: usize,
        slices: &[(KvSlice, PageId)],
        checksums: bool,
    ) -> Result<Box<dyn Gathering>, DataError>;

    /// A batch was announced, so that the receiver will take it: two-sided paths send now. Called in the order of announcements for each rank.
    ///
    /// # Errors
    /// [`DataError`], after which the lane is beyond use: the two sides are out of step.
    fn announced(&self, batch: &Batch, bytes: usize) -> Result<(), DataError>;

    /// The lane is lost or closed, perhaps before it was open. Never blocks for long; idempotent.
    fn close(&self);
}

/// A gather under way.
pub trait Gathering: Send {
    /// Whether [`Self::wait`] would return at once.
    fn is_done(&self) -> bool;

    /// Waits until the bytes are in staging, and the pages may change. Yields the checksums, if they were wanted.
    ///
    /// # Errors
    /// [`DataError`].
    fn wait(self: Box<Self>) -> Result<Vec<u32>, DataError>;
}

/// Decode's half.
pub trait ReceiveData: Send + Sync {
    /// What this side can do.
    fn offer(&self) -> DataOffer;

    /// A lane to the staging that `setup` names. Does not wait for the peer.
    ///
    /// # Errors
    /// [`DataError`].
    fn open(&self, sides: &LaneSides<'_>, setup: &[u8]) -> Result<Arc<dyn ReceiveDataLane>, DataError>;
}

/// Decode's half of one lane.
pub trait ReceiveDataLane: Send + Sync {
    /// The part of opening that needs the peer: opens each pair and measures it. One that both must join is named by `join` when it is its turn and
    /// not before, so that what stands behind the name is left over for one pair at most. May block, bounded by `setup_timeout_ms`; ends soon once
    /// the lane is closed.
    ///
    /// # Errors
    /// [`DataError`].
    fn connect(&self, join: &dyn Fn(Bytes)) -> Result<Vec<PairRate>, DataError>;

    /// Takes a batch; those of one pair in the order of announcements. Never blocks.
    fn take(&self, order: BatchOrder);

    /// The lane is lost or closed, perhaps before it was open: batches taken and not over end soon, within a bound. Idempotent.
    fn close(&self);
}

/// A batch to be moved, and what to do then.
pub struct BatchOrder {
    /// Which.
    pub batch: Batch,
    /// Its bytes.
    pub bytes: usize,
    /// The physical page of each slice; `None`: the bytes go nowhere.
    pub pages: Option<Vec<PageId>>,
    /// Called once nothing of the batch is read or written any more, and everything is in its page. Does not block.
    pub done: Box<dyn FnOnce(BatchOutcome) + Send>,
}

/// How a batch ended.
#[derive(Debug)]
pub enum BatchOutcome {
    /// The bytes are in their pages, or were to go nowhere.
    Whole,
    /// A checksum does not match; something was written.
    Corrupt(KvSlice),
    /// It could not be moved.
    Failed(DataError),
    /// Neither could it, and what the sender sent for it may come to lie in the next one's place: the two sides are out of step, and the lane is beyond use.
    Broken(DataError),
}
