//! The transport contract: how the KV of one ticket gets from a prefill worker to a decode worker.
//!
//! ```text
//!  prefill (sender)                                decode (receiver)
//!                                                  post(ticket, sender)      the reservation exists
//!  connect(address, peer) ── HELLO/WELCOME ──►     layouts and incarnations compared, once a lane
//!  begin(ticket)          ── BEGIN/ACCEPTED ─►     Arrival::Begin; GONE if it was not posted, or is over
//!  reserve(bytes), part.. ── PART, any order ─►    Arrival::Part, checksum verified
//!     or, between devices: pages.. ── BATCH ─►     land(ticket, tables), then Arrival::Landed: written, checksums compared by samples
//!  commit(first token)    ── COMMIT ─────────►     Arrival::Commit; answered COMMITTED or ABORT
//!  abort(reason)          ── ABORT ──────────►     Arrival::Ended(Aborted)
//!                         ◄── ABORT ──────────     revoke(ticket, reason), then Arrival::Ended(Revoked)
//! ```
//!
//! What every implementation promises, and the suite in `tests/contract` checks:
//! 1. A posted ticket yields exactly one terminal arrival, `Commit` or `Ended`, or `revoke` says [`Revoked::Now`]. From then on **no write
//!    of that ticket follows**: its pages may be reused. That is the fence. A transport whose peer writes into our memory must wait for
//!    the peer's acknowledgement, or for the end of its communicator, before it says so.
//! 2. COMMIT arrives behind every part of its ticket. Parts may arrive in any order, and twice.
//! 3. A part that fails its checksum ends its own ticket, with [`EndCause::Corrupt`], and no other.
//! 4. Messages for tickets that are unknown or over are answered GONE and have no other effect. A ticket id is used once.
//! 5. A peer in another life than the one expected is refused, a layout that does not fit is refused with the field's name.
//! 6. At most `in_flight_bytes_max` bytes wait in a lane, and every wait ends within the bound that the config states.
//! 7. The end of a connection ends every ticket on it, on both sides.
//!
//! Where the caches of both sides are on devices, the lane's frames only announce what a data path beside them moves: see
//! [`data`](crate::data). What is handed over are then pages, not bytes, and the transport itself writes them to where [`ReceiveTransport::land`]
//! says; everything else is the same.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use kv::{KvSlice, PageTables};
use types::{DpGroup, KvLayout, PageId, PeerId, TicketId, TokenId};

use crate::data::DataError;
use crate::error::{AbortReason, LossCause, TransferError};

/// One slice of KV on its way, with the checksum that its producer computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// What the bytes are.
    pub slice: KvSlice,
    /// `slice.head_count * KvLayout::head_bytes()` bytes.
    pub bytes: Bytes,
    /// CRC-32 (IEEE) of `bytes`.
    pub crc32: u32,
}

impl Part {
    /// Takes the checksum of `bytes`, which must be done where the bytes are made: it is what the receiver compares with.
    #[must_use]
    pub fn new(slice: KvSlice, bytes: Bytes) -> Self {
        let crc32 = crc32fast::hash(&bytes);
        Self { slice, bytes, crc32 }
    }

    /// Whether the bytes are those that the checksum was taken of.
    #[must_use]
    pub fn is_intact(&self) -> bool {
        crc32fast::hash(&self.bytes) == self.crc32
    }
}

/// The token that prefill sampled; travels in the COMMIT record, since decode computes its KV and goes on behind it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FirstToken {
    /// Its output index: the number of tokens generated in earlier attempts.
    pub index: u32,
    /// The token.
    pub token: TokenId,
    /// Its log-probability, when the request asked for it.
    pub logprob: Option<f32>,
}

/// What a committed transfer carried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Receipt {
    /// Parts sent.
    pub num_parts: u32,
    /// Their bytes.
    pub kv_bytes: u64,
    /// When the bytes went, if a data path moved them.
    pub batches: Option<BatchTimes>,
}

/// When the batches of one ticket went, by this side's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchTimes {
    /// The last one was announced.
    pub announced_at: Instant,
    /// The receiver's word came that the last one lies in its pages.
    pub landed_at: Instant,
}

/// Prefill's side: opens lanes.
pub trait SendTransport: Send + Sync {
    /// Connects to `peer` and compares layouts, bounded by `connect_timeout_ms`; then opens the data path, bounded by `setup_timeout_ms`.
    ///
    /// # Errors
    /// `Unreachable`, `WrongPeer`, `Version`, `Layout`, `Transport`, `DataPath`, `PeerLost`.
    fn connect<'a>(
        &'a self,
        address: &'a str,
        peer: &'a PeerId,
    ) -> BoxFuture<'a, Result<Box<dyn SendLane>, TransferError>>;
}

/// A connection to one decode worker in one of its lives; carries many tickets. Dropping it closes it.
pub trait SendLane: Send + Sync {
    /// Who is at the other end.
    fn peer(&self) -> &PeerId;

    /// Opens a ticket, whose pages `group` of the receiver's attention groups holds. Bounded by `ack_timeout_ms`.
    ///
    /// # Errors
    /// `Gone`, `Duplicate`, `PeerLost`, `Timeout`.
    fn begin(&self, ticket: TicketId, group: DpGroup) -> BoxFuture<'_, Result<Box<dyn SendTicket>, TransferError>>;

    /// How the lane was lost, once it is; a lost lane never recovers.
    fn lost(&self) -> Option<LossCause>;

    /// Closes the lane: every ticket on it ends, on both sides.
    fn close(&self);
}

/// What a lane carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carries {
    /// Parts, in the lane's own frames: [`SendTicket::part`].
    Bytes,
    /// Pages, which the transport reads from the cache: [`SendTicket::pages`].
    Pages,
}

/// The sending half of one ticket. Dropping it before [`SendTicket::commit`] or [`SendTicket::abort`] has ended aborts the ticket, without waiting.
pub trait SendTicket: Send + Sync {
    /// The ticket.
    fn id(&self) -> TicketId;

    /// Waits until the lane has room for `bytes` more and sets it aside for this ticket. Bounded by `stall_timeout_ms`. What was set aside
    /// before must be on its way to be handed over: this may wait for it.
    ///
    /// # Errors
    /// `NoRoom` if it is more than the lane can ever hold; else as [`SendTicket::part`], and `Timeout`.
    fn reserve(&self, bytes: usize) -> BoxFuture<'_, Result<(), TransferError>>;

    /// As [`SendTicket::reserve`], but says `false` where that would wait. For callers that may not wait, such as a step loop.
    ///
    /// # Errors
    /// As [`SendTicket::reserve`], but for `Timeout`.
    fn try_reserve(&self, bytes: usize) -> Result<bool, TransferError>;

    /// Hands over one part, out of the room set aside. Never blocks; callable from any thread, engine ranks above all.
    ///
    /// # Errors
    /// `NoRoom`; `Gone`, `AbortedByPeer`, `PeerLost` once the ticket is over.
    fn part(&self, part: Part) -> Result<(), TransferError>;

    /// What its lane carries.
    fn carries(&self) -> Carries;

    /// Hands over slices by their pages in the cache of this side's `rank`, out of the room set aside. Returns when they have been read and the
    /// pages may change; waits for that copy, and for nothing of the peer.
    ///
    /// # Errors
    /// As [`SendTicket::part`]; `DataPath` if the lane carries bytes, or the copy fails.
    fn pages(&self, rank: u32, slices: &[(KvSlice, PageId)]) -> Result<(), TransferError>;

    /// How the ticket ended at the other side, as soon as it did.
    fn ended(&self) -> Option<TransferError>;

    /// Sends COMMIT behind all parts and waits for the receiver's verdict. Bounded by `ack_timeout_ms` behind the last byte's departure.
    ///
    /// # Errors
    /// `Gone`, `AbortedByPeer`, `PeerLost`, `Timeout`: in each case the receiver has not joined, or will find its client gone.
    fn commit(&self, first: FirstToken) -> BoxFuture<'_, Result<Receipt, TransferError>>;

    /// Gives the ticket up; parts that have not left are dropped. Returns when the receiver has acknowledged or the lane is lost.
    ///
    /// # Errors
    /// `PeerLost`, `Timeout`: the pages behind the parts may be reused in either case, the transport holds its own copies.
    fn abort(&self, reason: AbortReason) -> BoxFuture<'_, Result<(), TransferError>>;
}

/// Decode's side: takes the parts of tickets that were posted. What arrives is told to an [`ArrivalSink`].
pub trait ReceiveTransport: Send + Sync {
    /// Accepts `ticket` from `sender`, in that life, from now on.
    ///
    /// # Errors
    /// `Duplicate`, `TooManyTickets`.
    fn post(&self, ticket: TicketId, sender: &PeerId) -> Result<(), TransferError>;

    /// Says where the slices of a ticket go, once its sender has begun: pages of attention group `group`. Until then the transport writes nothing; one that hands over bytes does not
    /// need it. Never blocks.
    fn land(&self, ticket: TicketId, group: DpGroup, tables: &PageTables);

    /// Takes the acceptance back. Never blocks.
    fn revoke(&self, ticket: TicketId, reason: AbortReason) -> Revoked;

    /// Tickets posted and not over.
    fn num_open(&self) -> usize;
}

/// What [`ReceiveTransport::revoke`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Revoked {
    /// The ticket was open and its sender had not begun: nothing of it follows.
    Now,
    /// The sender may still be writing; [`ArrivalEvent::Ended`] follows within `ack_timeout_ms` and a ping interval. Parts may come before it.
    Pending,
    /// Not open: its terminal arrival is in the sink, or was.
    NotOpen,
}

/// Something that happened to a posted ticket.
#[derive(Debug)]
pub struct Arrival {
    /// Which.
    pub ticket: TicketId,
    /// What.
    pub event: ArrivalEvent,
}

/// The kinds of [`Arrival`].
#[derive(Debug)]
pub enum ArrivalEvent {
    /// The sender has opened the ticket: parts may follow.
    Begin {
        /// Who it is; the ticket was posted for it.
        sender: PeerId,
        /// How its KV lies: decides how pages are cut.
        layout: Arc<KvLayout>,
    },
    /// A part whose checksum holds and whose size and place fit the layout.
    Part {
        /// What the bytes are.
        slice: KvSlice,
        /// The bytes.
        bytes: Bytes,
    },
    /// Slices that the transport has written to their pages, for every step that is launched from now on.
    Landed {
        /// What the bytes are.
        slices: Vec<KvSlice>,
        /// How many bytes.
        bytes: usize,
    },
    /// Terminal: the sender sent all it has.
    Commit {
        /// The token to go on from.
        first: FirstToken,
        /// Takes the verdict.
        reply: CommitReply,
    },
    /// Terminal: the transfer is over without a commit.
    Ended(EndCause),
}

/// How a ticket ended without a commit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EndCause {
    /// The sender gave it up.
    #[error("aborted by sender: {0}")]
    Aborted(AbortReason),
    /// This side gave it up, and the sender has fallen silent.
    #[error("revoked")]
    Revoked,
    /// A part does not match its checksum.
    #[error("checksum of {slice:?} does not match")]
    Corrupt {
        /// Which.
        slice: KvSlice,
    },
    /// A part that is not in this layout.
    #[error("{slice:?} with {bytes} bytes does not fit the layout")]
    Malformed {
        /// Which.
        slice: KvSlice,
        /// Its size.
        bytes: usize,
    },
    /// The sender counts other parts than arrived.
    #[error("{received} of {sent} parts arrived")]
    PartsMissing {
        /// Parts that the sender counts.
        sent: u32,
        /// Parts that arrived.
        received: u32,
    },
    /// The data path failed at this side.
    #[error("kv cannot be moved: {0}")]
    DataPath(DataError),
    /// The connection is gone.
    #[error("sender lost: {0}")]
    Lost(LossCause),
}

impl EndCause {
    /// The name used in metric labels.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Aborted(reason) => reason.name(),
            Self::Revoked => "revoked",
            Self::Corrupt { .. } => "corrupt",
            Self::Malformed { .. } => "malformed",
            Self::PartsMissing { .. } => "parts_missing",
            Self::DataPath(_) => "data_path",
            Self::Lost(cause) => cause.name(),
        }
    }
}

/// Takes the receiver's verdict on a COMMIT. Dropped without one, it rejects with [`AbortReason::Shutdown`].
pub struct CommitReply {
    answer: Option<Answer>,
}

type Answer = Box<dyn FnOnce(Result<(), AbortReason>) + Send>;

impl CommitReply {
    /// `answer` must not block: it is called from a step thread.
    #[must_use]
    pub fn new(answer: impl FnOnce(Result<(), AbortReason>) + Send + 'static) -> Self {
        Self { answer: Some(Box::new(answer)) }
    }

    /// The sequence has joined.
    pub fn accept(mut self) {
        if let Some(answer) = self.answer.take() {
            answer(Ok(()));
        }
    }

    /// The sequence will not run here.
    pub fn reject(mut self, reason: AbortReason) {
        if let Some(answer) = self.answer.take() {
            answer(Err(reason));
        }
    }
}

impl Drop for CommitReply {
    fn drop(&mut self) {
        if let Some(answer) = self.answer.take() {
            answer(Err(AbortReason::Shutdown));
        }
    }
}

impl std::fmt::Debug for CommitReply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CommitReply")
    }
}

/// Room for one arrival.
pub type ArrivalSlot = Box<dyn FnOnce(Arrival) + Send>;

/// Where arrivals go, in order for each ticket. A full sink makes the transport wait, and through it the sender.
pub trait ArrivalSink: Send + Sync {
    /// Waits for room. Room comes first, so that giving it an arrival can neither block nor be cut short.
    ///
    /// # Errors
    /// [`SinkClosed`] if nobody listens any more; the transport then closes the connection.
    fn slot(&self) -> BoxFuture<'_, Result<ArrivalSlot, SinkClosed>>;
}

/// Nobody listens any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("nobody takes arrivals any more")]
pub struct SinkClosed;
