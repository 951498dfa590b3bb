//! The error of a scheduler's configuration.

/// A configuration under which a scheduler could not work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} {reason}")]
pub struct InvalidConfig {
    /// The field at fault.
    pub field: &'static str,
    /// What is wrong, as the rest of a sentence that begins with the field.
    pub reason: String,
}

impl types::Classify for InvalidConfig {
    fn class(&self) -> types::ErrorClass {
        types::ErrorClass::Fatal
    }
}

/// Refuses a field that is 0.
pub(crate) fn at_least_one(field: &'static str, value: u32) -> Result<(), InvalidConfig> {
    at_least(field, value, 1, "nothing could run")
}

/// Refuses a field below `least`.
pub(crate) fn at_least(field: &'static str, value: u32, least: u32, why: &str) -> Result<(), InvalidConfig> {
    if value >= least {
        return Ok(());
    }
    Err(InvalidConfig { field, reason: format!("is {value}, at least {least} is needed: {why}") })
}
