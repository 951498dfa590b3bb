//! What can end a transfer.

use std::time::Duration;

use types::{Classify, ErrorClass, Incarnation, KvLayoutMismatch, PeerId, TicketId};

use crate::data::{DataError, TransportMismatch};
use crate::frame::FrameError;

/// Why one side gave a ticket up; travels in the ABORT record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AbortReason {
    /// The request was cancelled.
    Cancelled,
    /// The reservation's time ran out.
    Expired,
    /// A part's bytes do not match its checksum.
    Corrupt,
    /// COMMIT came before all parts, or a part is not one of the ticket's.
    WrongParts,
    /// The engine of the aborting side failed.
    EngineFailed,
    /// The aborting side shuts down.
    Shutdown,
}

impl AbortReason {
    /// All reasons; the position is the code on the wire.
    pub const ALL: [Self; 6] =
        [Self::Cancelled, Self::Expired, Self::Corrupt, Self::WrongParts, Self::EngineFailed, Self::Shutdown];

    /// The name used in logs and metric labels.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cancelled => "cancelled",
            Self::Expired => "expired",
            Self::Corrupt => "corrupt",
            Self::WrongParts => "wrong_parts",
            Self::EngineFailed => "engine_failed",
            Self::Shutdown => "shutdown",
        }
    }

    pub(crate) fn code(self) -> u8 {
        Self::ALL.iter().position(|reason| *reason == self).expect("ALL lists every reason") as u8
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }
}

impl std::fmt::Display for AbortReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// How a peer was lost.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LossCause {
    /// The connection ended: the process died, or closed it.
    #[error("connection ended")]
    Ended,
    /// The connection failed.
    #[error("connection failed: {0}")]
    Io(String),
    /// The peer sent nothing for too long: it is stopped, or the network is cut.
    #[error("silent for {0:?}")]
    Silent(Duration),
    /// The peer is alive but took no bytes for too long.
    #[error("took no bytes for {0:?}")]
    Stalled(Duration),
    /// The peer did not answer an ABORT, so the connection was cut to be sure that no write follows.
    #[error("abort not acknowledged for {0:?}")]
    AbortUnanswered(Duration),
    /// The peer broke the protocol.
    #[error("protocol: {0}")]
    Protocol(#[from] FrameError),
    /// What goes beside the connection failed, and the two sides are out of step.
    #[error("data path: {0}")]
    DataPath(DataError),
    /// This side closed the connection.
    #[error("closed here")]
    Closed,
}

impl LossCause {
    /// The name used in metric labels.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Ended => "peer_ended",
            Self::Io(_) => "peer_io",
            Self::Silent(_) => "peer_silent",
            Self::Stalled(_) => "peer_stalled",
            Self::AbortUnanswered(_) => "abort_unanswered",
            Self::Protocol(_) => "protocol",
            Self::DataPath(_) => "data_path",
            Self::Closed => "closed",
        }
    }
}

/// Why an operation of a transport failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TransferError {
    /// No connection.
    #[error("cannot reach {peer} at {address}: {reason}")]
    Unreachable {
        /// The peer wanted.
        peer: PeerId,
        /// Where.
        address: String,
        /// What the system says.
        reason: String,
    },
    /// The process at the address is another one, or the same worker in another life.
    #[error("wanted {wanted}, found {found}")]
    WrongPeer {
        /// Whom the ticket names.
        wanted: PeerId,
        /// Who answered.
        found: PeerId,
    },
    /// The two speak different versions of the transfer protocol.
    #[error("transfer protocol {ours} here, {theirs} at {peer}")]
    Version {
        /// The peer.
        peer: PeerId,
        /// Ours.
        ours: u16,
        /// Theirs.
        theirs: u16,
    },
    /// The KV caches do not fit each other.
    #[error("{peer}: {mismatch}")]
    Layout {
        /// The peer.
        peer: PeerId,
        /// Which field.
        #[source]
        mismatch: KvLayoutMismatch,
    },
    /// The two configs exclude each other, or one asks for what is not there.
    #[error("{peer}: {mismatch}")]
    Transport {
        /// The peer.
        peer: PeerId,
        /// Both choices, and what does not fit.
        #[source]
        mismatch: TransportMismatch,
    },
    /// The path between the devices cannot be opened or used.
    #[error("kv data path to {peer}: {cause}")]
    DataPath {
        /// The peer.
        peer: PeerId,
        /// What the system says.
        #[source]
        cause: DataError,
    },
    /// The connection is gone, and with it every transfer on it.
    #[error("peer {peer} lost: {cause}")]
    PeerLost {
        /// The peer.
        peer: PeerId,
        /// How.
        #[source]
        cause: LossCause,
    },
    /// The receiver knows no such ticket: expired, cancelled or of an earlier life.
    #[error("ticket {ticket} is gone at {peer}")]
    Gone {
        /// The ticket.
        ticket: TicketId,
        /// The receiver.
        peer: PeerId,
    },
    /// The other side gave the ticket up.
    #[error("ticket {ticket} aborted by {peer}: {reason}")]
    AbortedByPeer {
        /// The ticket.
        ticket: TicketId,
        /// The other side.
        peer: PeerId,
        /// Why.
        reason: AbortReason,
    },
    /// This side gave the ticket up.
    #[error("ticket {ticket} was given up")]
    GivenUp {
        /// The ticket.
        ticket: TicketId,
    },
    /// The peer is alive, but an answer or room in the lane did not come in time.
    #[error("ticket {ticket}: {waited_for} of {peer} took longer than {limit:?}")]
    Timeout {
        /// The ticket.
        ticket: TicketId,
        /// The peer.
        peer: PeerId,
        /// What did not come.
        waited_for: &'static str,
        /// The bound.
        limit: Duration,
    },
    /// More bytes at once than the lane may ever hold, or a part without reserved room.
    #[error("ticket {ticket}: {bytes} bytes do not fit, {room} are left")]
    NoRoom {
        /// The ticket.
        ticket: TicketId,
        /// What was asked for.
        bytes: usize,
        /// What there is.
        room: usize,
    },
    /// The ticket is already open here.
    #[error("ticket {ticket} is already open")]
    Duplicate {
        /// The ticket.
        ticket: TicketId,
    },
    /// The receiver keeps as many tickets open as it may.
    #[error("{limit} tickets are open, no more are allowed")]
    TooManyTickets {
        /// The bound.
        limit: usize,
    },
}

impl TransferError {
    /// The name used in metric labels: failures are counted by cause.
    #[must_use]
    pub const fn cause(&self) -> &'static str {
        match self {
            Self::Unreachable { .. } => "unreachable",
            Self::WrongPeer { .. } => "wrong_peer",
            Self::Version { .. } => "version",
            Self::Layout { .. } => "layout",
            Self::Transport { .. } => "transport",
            Self::DataPath { .. } => "data_path",
            Self::PeerLost { cause, .. } => cause.name(),
            Self::Gone { .. } => "gone",
            Self::AbortedByPeer { reason, .. } => reason.name(),
            Self::GivenUp { .. } => "given_up",
            Self::Timeout { .. } => "timeout",
            Self::NoRoom { .. } => "no_room",
            Self::Duplicate { .. } => "duplicate",
            Self::TooManyTickets { .. } => "too_many_tickets",
        }
    }
}

impl TransferError {
    /// A later life of the wanted worker answered: what its earlier life promised is void.
    #[must_use]
    pub fn is_new_incarnation(&self) -> Option<Incarnation> {
        match self {
            Self::WrongPeer { wanted, found } if wanted.worker == found.worker => Some(found.incarnation),
            _ => None,
        }
    }
}

impl Classify for TransferError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Unreachable { .. }
            | Self::WrongPeer { .. }
            | Self::PeerLost { .. }
            | Self::DataPath { .. }
            | Self::Gone { .. }
            | Self::AbortedByPeer { .. }
            | Self::Timeout { .. } => ErrorClass::Retryable,
            Self::GivenUp { .. } => ErrorClass::Cancelled,
            Self::TooManyTickets { .. } => ErrorClass::Overloaded,
            Self::Duplicate { .. } => ErrorClass::Caller,
            Self::Version { .. } | Self::Layout { .. } | Self::Transport { .. } | Self::NoRoom { .. } => {
                ErrorClass::Fatal
            }
        }
    }
}
