//! Why a prompt was not computed and handed over, as the router is told.

use std::time::Duration;

use engine::EngineError;
use kv::PageMapError;
use scheduler::{AbortReason, MaskFailure, PrefillRefusal};
use tonic::{Code, Status};
use transfer::TransferError;
use types::{Classify, ErrorClass, InvalidRequest, PeerId};

/// How soon a refused prompt may be tried again: about the time that one takes.
const RETRY_AFTER: Duration = Duration::from_millis(100);

/// Why a prompt was not computed and handed over.
#[derive(Debug, Clone, thiserror::Error)]
pub enum PrefillError {
    /// The request can never be carried out.
    #[error(transparent)]
    Invalid(#[from] InvalidRequest),
    /// Weights are being loaded.
    #[error("worker is loading weights")]
    Loading,
    /// No room, or no new work is taken.
    #[error(transparent)]
    Refused(#[from] PrefillRefusal),
    /// The ticket was made for another worker, or for this one in an earlier life.
    #[error("ticket names {named}, this is {this}")]
    WrongWorker {
        /// Whom the ticket names.
        named: PeerId,
        /// Who we are.
        this: PeerId,
    },
    /// The decode worker takes KV over a transport that is not built in.
    #[error("transport {0} is unknown")]
    UnknownTransport(String),
    /// The decode worker's KV cache does not fit.
    #[error("kv layout of {decode} does not fit: {cause}")]
    Layout {
        /// The decode worker.
        decode: PeerId,
        /// What does not fit.
        #[source]
        cause: PageMapError,
    },
    /// The KV cache could not be handed over.
    #[error("transfer failed: {0}")]
    Transfer(#[from] TransferError),
    /// The KV cache could not be read.
    #[error("kv export failed: {0}")]
    Export(String),
    /// The router or its client left.
    #[error("cancelled")]
    Cancelled,
    /// The ticket's time ran out first.
    #[error("ticket expired before the prompt was computed")]
    Expired,
    /// The request's grammar cannot be used, or cannot be followed any further. It would fail again wherever it is tried.
    #[error("constraint: {0}")]
    Constraint(MaskFailure),
    /// What the prompt was computed from is damaged: elsewhere, or on other pages, it may be well.
    #[error("the prompt's logits are not numbers")]
    NotANumber,
    /// The worker ends, or its engine failed.
    #[error("worker is ending")]
    Ending,
    /// The step loop did not answer in time.
    #[error("step loop gave no answer for {after:?}")]
    Stuck {
        /// The bound.
        after: Duration,
    },
}

impl From<EngineError> for PrefillError {
    fn from(error: EngineError) -> Self {
        Self::Export(error.to_string())
    }
}

impl PrefillError {
    /// What the scheduler's reason means when nothing more is known.
    pub(crate) fn from_reason(reason: AbortReason) -> Self {
        match reason {
            AbortReason::Expired => Self::Expired,
            AbortReason::ConstraintFailed => Self::Constraint(MaskFailure::Abandoned),
            AbortReason::NotANumber => Self::NotANumber,
            AbortReason::Cancelled | AbortReason::PeerLost | AbortReason::TransferFailed => Self::Cancelled,
        }
    }

    /// The cause by which a transfer that failed is counted. `None` if something else failed, if either side gave up what nobody waits for
    /// any more, or if decode had ended the ticket before it began, of which it tells itself.
    pub(crate) const fn failed_transfer(&self) -> Option<&'static str> {
        match self {
            Self::Transfer(
                TransferError::GivenUp { .. }
                | TransferError::Gone { .. }
                | TransferError::AbortedByPeer { reason: transfer::AbortReason::Cancelled, .. },
            ) => None,
            Self::Transfer(error) => Some(error.cause()),
            Self::Export(_) => Some("export"),
            _ => None,
        }
    }

    /// The stable name in `google.rpc.ErrorInfo`.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Invalid(_) => "INVALID_REQUEST",
            Self::Loading => "LOADING",
            Self::Refused(PrefillRefusal::QueueFull { .. }) => "QUEUE_FULL",
            Self::Refused(PrefillRefusal::Draining) => "DRAINING",
            Self::Refused(PrefillRefusal::TooLong { .. } | PrefillRefusal::EmptyPrompt) => "INVALID_REQUEST",
            Self::Refused(PrefillRefusal::TicketUsed { .. }) => "TICKET_USED",
            Self::WrongWorker { .. } => "WRONG_WORKER",
            Self::UnknownTransport(_) => "UNKNOWN_TRANSPORT",
            Self::Layout { .. } | Self::Transfer(TransferError::Layout { .. }) => "KV_LAYOUT_MISMATCH",
            Self::Transfer(TransferError::Version { .. }) => "TRANSFER_VERSION_MISMATCH",
            Self::Transfer(TransferError::PeerLost { .. } | TransferError::Unreachable { .. }) => "PEER_LOST",
            Self::Transfer(TransferError::WrongPeer { .. }) => "PEER_RESTARTED",
            Self::Transfer(TransferError::Timeout { .. }) => "PEER_SLOW",
            Self::Transfer(_) => "TRANSFER_ABORTED",
            Self::Export(_) => "KV_EXPORT_FAILED",
            Self::Cancelled => "CANCELLED",
            Self::Expired => "TICKET_EXPIRED",
            Self::Constraint(_) => "CONSTRAINT_FAILED",
            Self::NotANumber => "NOT_A_NUMBER",
            Self::Ending => "ENDING",
            Self::Stuck { .. } => "STUCK",
        }
    }
}

impl Classify for PrefillError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Invalid(_) | Self::Constraint(_) => ErrorClass::Caller,
            Self::Refused(refusal) => refusal.class(),
            Self::Transfer(error) => error.class(),
            Self::Cancelled => ErrorClass::Cancelled,
            Self::Loading
            | Self::WrongWorker { .. }
            | Self::Expired
            | Self::NotANumber
            | Self::Ending
            | Self::Stuck { .. } => ErrorClass::Retryable,
            Self::UnknownTransport(_) | Self::Layout { .. } | Self::Export(_) => ErrorClass::Fatal,
        }
    }
}

impl From<PrefillError> for Status {
    fn from(error: PrefillError) -> Self {
        let (reason, class) = (error.reason(), error.class());
        let retry_after = (class == ErrorClass::Overloaded).then_some(RETRY_AFTER);
        let code = match &error {
            PrefillError::Layout { .. }
            | PrefillError::UnknownTransport(_)
            | PrefillError::Transfer(TransferError::Layout { .. } | TransferError::Version { .. }) => {
                Code::FailedPrecondition
            }
            // This worker is well, the transfer was not.
            PrefillError::Transfer(_) | PrefillError::Expired if class == ErrorClass::Retryable => Code::Aborted,
            _ => wire::status::code(class),
        };
        wire::status::with_code(code, reason, error.to_string(), retry_after)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_without_numbers_is_for_another_worker() {
        let error = PrefillError::from_reason(AbortReason::NotANumber);
        let status = Status::from(error);
        assert_eq!(status.code(), Code::Unavailable);
        assert_eq!(wire::status::class(&status), ErrorClass::Retryable);
        assert_eq!(wire::status::reason(&status).as_deref(), Some("NOT_A_NUMBER"));
    }
}
