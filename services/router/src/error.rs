//! Why a request is refused or given up, and what its caller may do about it.

use std::fmt;
use std::time::Duration;

use tonic::{Code, Status};
use types::{Classify, ErrorClass, InvalidRequest, Role};

/// A part of a flight's life that has a time limit of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Waiting for a pair with room.
    Queue,
    /// Waiting for decode to reserve pages.
    Reserve,
    /// Waiting for the token that prefill samples.
    Prefill,
    /// Waiting for the KV cache to arrive at decode.
    Transfer,
    /// Waiting for decode's first token.
    FirstToken,
    /// Waiting for the next token.
    InterToken,
}

impl Stage {
    /// The name used in errors, metrics and config.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Reserve => "reserve",
            Self::Prefill => "prefill",
            Self::Transfer => "transfer",
            Self::FirstToken => "first_token",
            Self::InterToken => "inter_token",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why an attempt at a request came to nothing. Each is answered by another attempt, while there are any left.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AttemptFailure {
    /// The worker died, or the connection to it did.
    #[error("{role} worker lost: {reason}")]
    WorkerLost {
        /// Which side.
        role: Role,
        /// What the transport says.
        reason: String,
    },
    /// The worker answered with an error of its own.
    #[error("{role} worker failed: {reason}")]
    WorkerFailed {
        /// Which side.
        role: Role,
        /// What the worker says.
        reason: String,
    },
    /// The worker broke the protocol.
    #[error("{role} worker broke the protocol: {reason}")]
    Protocol {
        /// Which side.
        role: Role,
        /// What it did.
        reason: String,
    },
    /// A stage took longer than its limit.
    #[error("stage {stage} took longer than {} ms", .limit.as_millis())]
    Timeout {
        /// Which.
        stage: Stage,
        /// Its limit.
        limit: Duration,
    },
    /// Decode ran out of pages, and this sequence gave way.
    #[error("preempted for lack of pages")]
    Preempted,
}

impl AttemptFailure {
    /// The label in metrics.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::WorkerLost { role: Role::Prefill, .. } => "prefill_lost",
            Self::WorkerLost { role: Role::Decode, .. } => "decode_lost",
            Self::WorkerFailed { role: Role::Prefill, .. } => "prefill_failed",
            Self::WorkerFailed { role: Role::Decode, .. } => "decode_failed",
            Self::Protocol { .. } => "protocol",
            Self::Timeout { .. } => "timeout",
            Self::Preempted => "preempted",
        }
    }
}

/// How a request ends if not with an answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The request does not follow the protocol.
    #[error(transparent)]
    Message(#[from] wire::InvalidMessage),
    /// The request can never be carried out.
    #[error(transparent)]
    Invalid(#[from] InvalidRequest),
    /// A worker says that the request can never be carried out.
    #[error("refused by the {role} worker: {reason}")]
    Rejected {
        /// Which side.
        role: Role,
        /// What the worker says.
        reason: String,
    },
    /// This router is about to end.
    #[error("router is draining")]
    Draining,
    /// No prefill and decode worker fit each other and are ready.
    #[error("no pair of prefill and decode workers is ready")]
    NoPair,
    /// As many requests wait as may.
    #[error("queue is full: {queued} requests wait")]
    QueueFull {
        /// Requests in the queue.
        queued: usize,
    },
    /// No room came free in time.
    #[error("no worker had room within {} ms", .limit.as_millis())]
    QueueTimeout {
        /// Longest wait allowed.
        limit: Duration,
    },
    /// The request's own time limit passed.
    #[error("deadline of {} ms passed in stage {stage}", .limit.as_millis())]
    DeadlineExceeded {
        /// What was going on.
        stage: Stage,
        /// The request's limit.
        limit: Duration,
    },
    /// The grace period of a drain ended before the request did.
    #[error("stopped before the answer was complete")]
    Stopped,
    /// Every attempt failed.
    #[error("given up after {attempts} failed attempts, the last one: {last}")]
    Exhausted {
        /// Attempts made.
        attempts: u32,
        /// Why the last one failed.
        last: AttemptFailure,
    },
}

impl Classify for RequestError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Message(_) | Self::Invalid(_) | Self::Rejected { .. } => ErrorClass::Caller,
            Self::Draining | Self::NoPair | Self::Stopped | Self::Exhausted { .. } => ErrorClass::Retryable,
            Self::QueueFull { .. } | Self::QueueTimeout { .. } => ErrorClass::Overloaded,
            Self::DeadlineExceeded { .. } => ErrorClass::Cancelled,
        }
    }
}

/// What a refused client is asked to wait before it tries again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

impl RequestError {
    /// The stable name that clients match on, in capitals.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Message(_) => "INVALID_MESSAGE",
            Self::Invalid(_) => "INVALID_REQUEST",
            Self::Rejected { .. } => "REJECTED_BY_WORKER",
            Self::Draining => "DRAINING",
            Self::NoPair => "NO_PAIR",
            Self::QueueFull { .. } => "QUEUE_FULL",
            Self::QueueTimeout { .. } => "QUEUE_TIMEOUT",
            Self::DeadlineExceeded { .. } => "DEADLINE_EXCEEDED",
            Self::Stopped => "STOPPED",
            Self::Exhausted { .. } => "ATTEMPTS_EXHAUSTED",
        }
    }

    /// The status that the client receives.
    #[must_use]
    pub fn status(&self) -> Status {
        let retry_after = matches!(self.class(), ErrorClass::Overloaded | ErrorClass::Retryable).then_some(RETRY_AFTER);
        // A stage that no worker finished in time is a deadline of ours, not a worker that is away.
        let is_deadline = matches!(
            self,
            Self::DeadlineExceeded { .. } | Self::Exhausted { last: AttemptFailure::Timeout { .. }, .. }
        );
        if is_deadline {
            return wire::status::with_code(Code::DeadlineExceeded, self.reason(), self.to_string(), retry_after);
        }
        wire::status::from_error(self, self.reason(), retry_after)
    }
}
