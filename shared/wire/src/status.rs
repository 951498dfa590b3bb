//! Errors as gRPC status, and status as error classes.
//!
//! A status made here carries `google.rpc.ErrorInfo` with domain `damask` and a stable reason in capitals; one that says "later" carries
//! `google.rpc.RetryInfo`. A status without our ErrorInfo was made by a transport or by a proxy: the peer did not say anything.

use std::collections::HashMap;
use std::fmt::Display;
use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};
use types::{Classify, ErrorClass};

/// ErrorInfo's domain.
pub const DOMAIN: &str = "damask";

/// A status for `error` by its class. `reason` is its stable machine-readable name, for example `QUEUE_FULL`.
pub fn from_error<E: Classify + Display>(error: &E, reason: &str, retry_after: Option<Duration>) -> Status {
    with_code(code(error.class()), reason, error.to_string(), retry_after)
}

/// A status whose code says more than its class does (deadline, precondition, lost data).
pub fn with_code(code: Code, reason: &str, message: impl Into<String>, retry_after: Option<Duration>) -> Status {
    let mut details = ErrorDetails::new();
    details.set_error_info(reason, DOMAIN, HashMap::new());
    if let Some(delay) = retry_after {
        details.set_retry_info(Some(delay));
    }
    Status::with_error_details(code, message, details)
}

/// The code that stands for a class.
#[must_use]
pub const fn code(class: ErrorClass) -> Code {
    match class {
        ErrorClass::Caller => Code::InvalidArgument,
        ErrorClass::Overloaded => Code::ResourceExhausted,
        ErrorClass::Retryable => Code::Unavailable,
        ErrorClass::Cancelled => Code::Cancelled,
        ErrorClass::Fatal => Code::Internal,
    }
}

/// What the caller may do about a status.
#[must_use]
pub fn class(status: &Status) -> ErrorClass {
    match status.code() {
        Code::InvalidArgument
        | Code::OutOfRange
        | Code::NotFound
        | Code::AlreadyExists
        | Code::Unauthenticated
        | Code::PermissionDenied
        | Code::Unimplemented => ErrorClass::Caller,
        Code::ResourceExhausted => ErrorClass::Overloaded,
        Code::Unavailable | Code::Aborted | Code::Unknown => ErrorClass::Retryable,
        Code::DeadlineExceeded => ErrorClass::Cancelled,
        // A lost connection shows as any of these, depending on what the transport was doing at that moment.
        Code::Cancelled | Code::Internal if reason(status).is_none() => ErrorClass::Retryable,
        Code::Cancelled => ErrorClass::Cancelled,
        Code::Ok | Code::Internal | Code::DataLoss | Code::FailedPrecondition => ErrorClass::Fatal,
    }
}

/// The stable reason, if the status was made by Damask.
#[must_use]
pub fn reason(status: &Status) -> Option<String> {
    status.get_details_error_info().filter(|info| info.domain == DOMAIN).map(|info| info.reason)
}

/// When the caller is asked to try again.
#[must_use]
pub fn retry_after(status: &Status) -> Option<Duration> {
    status.get_details_retry_info().and_then(|info| info.retry_delay)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("queue is full: 8 requests wait")]
    struct Full;

    impl Classify for Full {
        fn class(&self) -> ErrorClass {
            ErrorClass::Overloaded
        }
    }

    #[test]
    fn a_refusal_carries_reason_and_delay() {
        let status = from_error(&Full, "QUEUE_FULL", Some(Duration::from_millis(250)));
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert_eq!(status.message(), "queue is full: 8 requests wait");
        assert_eq!(reason(&status).as_deref(), Some("QUEUE_FULL"));
        assert_eq!(retry_after(&status), Some(Duration::from_millis(250)));
    }

    #[test]
    fn each_class_survives_the_wire() {
        for class_sent in [
            ErrorClass::Caller,
            ErrorClass::Overloaded,
            ErrorClass::Retryable,
            ErrorClass::Cancelled,
            ErrorClass::Fatal,
        ] {
            assert_eq!(class(&with_code(code(class_sent), "X", "x", None)), class_sent);
        }
    }

    #[test]
    fn what_a_transport_says_of_a_lost_peer_is_retryable() {
        for code in [Code::Unknown, Code::Unavailable, Code::Internal, Code::Cancelled] {
            assert_eq!(class(&Status::new(code, "h2 protocol error")), ErrorClass::Retryable, "{code:?}");
        }
    }
}
