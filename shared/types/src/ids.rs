//! Identifiers. Each has its own type, so that a page is never taken for a slot.

use std::fmt;
use std::sync::Arc;

/// Names one request from the gateway to the last token. Chosen by the client or the gateway; 1 to 128 visible ASCII characters.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct RequestId(Arc<str>);

impl RequestId {
    /// Longest id accepted, in bytes.
    pub const MAX_LEN: usize = 128;

    /// Checks and wraps an id.
    ///
    /// # Errors
    /// The reason, when the id is empty, longer than [`Self::MAX_LEN`] or has other than visible ASCII characters.
    pub fn new(id: &str) -> Result<Self, &'static str> {
        if id.is_empty() {
            return Err("is empty");
        }
        if id.len() > Self::MAX_LEN {
            return Err("is longer than 128 bytes");
        }
        if !id.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("has a character that is not visible ASCII");
        }
        Ok(Self(id.into()))
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RequestId({})", self.0)
    }
}

/// Names one reservation and its KV transfer. Minted once by the router (128 random bits) and carried unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TicketId(pub u128);

impl fmt::Display for TicketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for TicketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TicketId({self})")
    }
}

/// A worker's configured name, stable over restarts.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct WorkerId(pub Arc<str>);

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One life of a worker process: drawn at random at start, so a restarted worker is never taken for its predecessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Incarnation(pub u64);

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A worker in one of its lives: what tickets and transfers name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId {
    /// Which worker.
    pub worker: WorkerId,
    /// Which of its lives.
    pub incarnation: Incarnation,
}

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.worker, self.incarnation)
    }
}

/// A physical KV page of one page group; the same number on every rank of an attention group, and another page on each other group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId(pub u32);

/// A place in the engine's batch: holds a sequence's page tables and sampling state while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);
