//! How the ranks of a group learn that one of them is gone.

use std::sync::OnceLock;
use std::thread::Thread;

use crate::EngineError;

/// Shared by all ranks of a group. The first rank that fails trips it; ranks that sleep in a collective are woken and find it tripped.
#[derive(Debug)]
pub struct Fault {
    lost: OnceLock<(u32, String)>,
    threads: Vec<OnceLock<Thread>>,
}

impl Fault {
    /// For a group of `ranks`.
    #[must_use]
    pub fn new(ranks: u32) -> Self {
        Self { lost: OnceLock::new(), threads: (0..ranks).map(|_| OnceLock::new()).collect() }
    }

    /// Tells which thread is rank `rank`. Called by that thread before it does anything that may sleep.
    pub(crate) fn register(&self, rank: u32) {
        // A rank has one thread for life, so there is nothing to overwrite.
        let _ = self.threads[rank as usize].set(std::thread::current());
    }

    /// Records that `rank` is lost, unless another one was before, and wakes all ranks.
    pub fn trip(&self, rank: u32, reason: String) {
        let _ = self.lost.set((rank, reason)); // the first loss is the cause; later ones follow from it
        self.wake_all();
    }

    /// # Errors
    /// [`EngineError::RankLost`] once a rank is lost.
    pub fn check(&self) -> Result<(), EngineError> {
        match self.lost.get() {
            None => Ok(()),
            Some((rank, reason)) => Err(EngineError::RankLost { rank: *rank, reason: reason.clone() }),
        }
    }

    /// The error to give when a rank does not answer.
    pub(crate) fn error(&self, rank: u32) -> EngineError {
        self.check().err().unwrap_or_else(|| EngineError::RankLost { rank, reason: "its thread has ended".into() })
    }

    /// Wakes all ranks that sleep.
    pub(crate) fn wake_all(&self) {
        for thread in self.threads.iter().filter_map(OnceLock::get) {
            thread.unpark();
        }
    }
}
