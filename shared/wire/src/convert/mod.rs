//! Protobuf to [`types`] and back. What may be absent, and what it means then, is said in `proto/`; everything else that is missing,
//! unknown or out of range is refused with the name of its field.

mod event;
mod layout;
mod request;
mod worker;

pub use request::{RequestDefaults, UNLIMITED_TOKENS, generate_request, sequence};
pub use worker::ticket_id;

use types::{Classify, ErrorClass};

/// A message that does not follow the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} {reason}")]
pub struct InvalidMessage {
    /// Path of the field, as protobuf names it.
    pub field: String,
    /// What is wrong, as the rest of a sentence that begins with the field.
    pub reason: String,
}

impl Classify for InvalidMessage {
    fn class(&self) -> ErrorClass {
        ErrorClass::Caller
    }
}

impl From<InvalidMessage> for tonic::Status {
    fn from(error: InvalidMessage) -> Self {
        crate::status::from_error(&error, "INVALID_MESSAGE", None)
    }
}

impl InvalidMessage {
    fn new(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { field: field.into(), reason: reason.into() }
    }

    /// The same error, seen from the message that holds `field`.
    fn within(mut self, field: &str) -> Self {
        self.field = format!("{field}.{}", self.field);
        self
    }
}

type Result<T> = std::result::Result<T, InvalidMessage>;

/// A message field that protobuf cannot require but we do.
fn required<T>(value: Option<T>, field: &str) -> Result<T> {
    value.ok_or_else(|| InvalidMessage::new(field, "is missing"))
}

/// A required message field, converted.
fn message<P, T>(value: Option<P>, field: &str) -> Result<T>
where
    T: TryFrom<P, Error = InvalidMessage>,
{
    T::try_from(required(value, field)?).map_err(|error| error.within(field))
}
