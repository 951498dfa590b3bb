//! Why a sequence did not run to its end here, as the router is told.

use std::time::Duration;

use scheduler::{AbortReason, MaskFailure, Refusal};
use tonic::{Code, Status};
use transfer::{EndCause, TransferError};
use types::{Classify, ErrorClass, InvalidRequest, PeerId};

/// How soon a refused reservation may be tried again: about the time that a sequence takes.
const RETRY_AFTER: Duration = Duration::from_millis(200);

/// Why a sequence did not run to its end.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DecodeError {
    /// The request can never be carried out.
    #[error(transparent)]
    Invalid(#[from] InvalidRequest),
    /// Weights are being loaded.
    #[error("worker is loading weights")]
    Loading,
    /// No room, or no new work is taken.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The transport could not take the ticket.
    #[error(transparent)]
    Post(#[from] TransferError),
    /// The router or its client left.
    #[error("cancelled")]
    Cancelled,
    /// Nothing was committed in time.
    #[error("reservation expired before its kv cache was committed")]
    Expired,
    /// The prefill worker is gone, or gave the transfer up.
    #[error("transfer from {prefill} failed: {cause}")]
    Transfer {
        /// The sender that the ticket names.
        prefill: PeerId,
        /// How it ended.
        cause: EndCause,
    },
    /// What prefill sent is not what the ticket needs.
    #[error("transfer from {prefill} is not complete or not as agreed: {reason}")]
    WrongParts {
        /// The sender that the ticket names.
        prefill: PeerId,
        /// What does not fit.
        reason: String,
    },
    /// The reader was too slow for the batch.
    #[error("reader fell {waiting} tokens behind")]
    SlowConsumer {
        /// Tokens that wait.
        waiting: usize,
    },
    /// The request's grammar cannot be used, or cannot be followed any further. It would fail again wherever it is tried.
    #[error("constraint: {0}")]
    Constraint(MaskFailure),
    /// What the sequence was computed from is damaged: elsewhere, or on other pages, it may be well.
    #[error("the sequence's logits are not numbers")]
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

impl DecodeError {
    /// What the scheduler's reason means when nothing more is known.
    pub(crate) fn from_reason(reason: AbortReason, prefill: &PeerId) -> Self {
        let lost = |cause| Self::Transfer { prefill: prefill.clone(), cause };
        match reason {
            AbortReason::Cancelled => Self::Cancelled,
            AbortReason::Expired => Self::Expired,
            AbortReason::PeerLost => lost(EndCause::Lost(transfer::LossCause::Ended)),
            AbortReason::TransferFailed => lost(EndCause::Revoked),
            AbortReason::ConstraintFailed => Self::Constraint(MaskFailure::Abandoned),
            AbortReason::NotANumber => Self::NotANumber,
        }
    }

    /// The cause by which a transfer that failed is counted. `None` if something else failed, or if the sender gave up what nobody waits
    /// for any more: its reader left, or its token ended the answer.
    pub(crate) const fn failed_transfer(&self) -> Option<&'static str> {
        match self {
            Self::Transfer { cause: EndCause::Aborted(transfer::AbortReason::Cancelled), .. } => None,
            Self::Transfer { cause, .. } => Some(cause.name()),
            Self::WrongParts { .. } => Some("wrong_parts"),
            _ => None,
        }
    }

    /// The stable name in `google.rpc.ErrorInfo`.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Invalid(_) => "INVALID_REQUEST",
            Self::Loading => "LOADING",
            Self::Refused(Refusal::NoSlot { .. }) => "NO_SLOT",
            Self::Refused(Refusal::NoPages(_) | Refusal::GrowthFirst) => "NO_PAGES",
            Self::Refused(Refusal::Draining) => "DRAINING",
            Self::Refused(Refusal::TooLong { .. } | Refusal::EmptyPrompt) => "INVALID_REQUEST",
            Self::Refused(Refusal::TicketUsed { .. }) => "TICKET_USED",
            Self::Post(_) => "TICKET_REFUSED",
            Self::Cancelled => "CANCELLED",
            Self::Expired => "TICKET_EXPIRED",
            Self::Transfer { cause: EndCause::Lost(_), .. } => "PEER_LOST",
            Self::Transfer { cause: EndCause::Corrupt { .. }, .. } => "KV_CORRUPT",
            Self::Transfer { .. } => "TRANSFER_ABORTED",
            Self::WrongParts { .. } => "KV_WRONG_PARTS",
            Self::SlowConsumer { .. } => "SLOW_CONSUMER",
            Self::Constraint(_) => "CONSTRAINT_FAILED",
            Self::NotANumber => "NOT_A_NUMBER",
            Self::Ending => "ENDING",
            Self::Stuck { .. } => "STUCK",
        }
    }
}

impl Classify for DecodeError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Invalid(_) | Self::Constraint(_) => ErrorClass::Caller,
            Self::Refused(refusal) => refusal.class(),
            Self::Post(error) => error.class(),
            Self::Cancelled => ErrorClass::Cancelled,
            Self::Loading
            | Self::Expired
            | Self::Transfer { .. }
            | Self::WrongParts { .. }
            | Self::SlowConsumer { .. }
            | Self::NotANumber
            | Self::Ending
            | Self::Stuck { .. } => ErrorClass::Retryable,
        }
    }
}

impl From<DecodeError> for Status {
    fn from(error: DecodeError) -> Self {
        let (reason, class) = (error.reason(), error.class());
        let retry_after = (class == ErrorClass::Overloaded).then_some(RETRY_AFTER);
        match error {
            // The worker is well, this transfer was not: another attempt may go to the same pair.
            DecodeError::Transfer { .. } | DecodeError::WrongParts { .. } | DecodeError::Expired => {
                wire::status::with_code(Code::Aborted, reason, error.to_string(), None)
            }
            _ => wire::status::from_error(&error, reason, retry_after),
        }
    }
}

#[cfg(test)]
mod tests {
    use types::{Incarnation, WorkerId};

    use super::*;

    #[test]
    fn a_sequence_without_numbers_is_for_another_attempt() {
        let prefill = PeerId { worker: WorkerId("prefill".into()), incarnation: Incarnation(1) };
        let error = DecodeError::from_reason(AbortReason::NotANumber, &prefill);
        let status = Status::from(error);
        assert_eq!(status.code(), Code::Unavailable);
        assert_eq!(wire::status::class(&status), ErrorClass::Retryable);
        assert_eq!(wire::status::reason(&status).as_deref(), Some("NOT_A_NUMBER"));
    }
}
