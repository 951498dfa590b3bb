//! What a caller may do about an error: the one classification that every error type gives.

/// Whose move it is after an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// The caller sent something wrong; the same call fails again.
    Caller,
    /// Refused for lack of room; the same call may succeed later.
    Overloaded,
    /// A peer or a link failed; the same call may succeed elsewhere or later.
    Retryable,
    /// The caller gave up, or its deadline passed.
    Cancelled,
    /// A bug or broken state here; retrying on this instance is pointless.
    Fatal,
}

/// Implemented by every error enum that crosses a crate boundary; `wire` maps the class to a gRPC status.
pub trait Classify {
    /// Whose move it is.
    fn class(&self) -> ErrorClass;
}
