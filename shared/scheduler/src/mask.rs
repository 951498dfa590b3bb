//! Masks of constrained rows: promised when a step is planned, computed while it runs, awaited just before it samples.
//!
//! A mask depends on the token before it, so it cannot be in the plan. The plan holds a [`PendingMask`]; whoever follows the grammar
//! holds the [`MaskPromise`] and settles it. A promise that is dropped is settled as [`MaskFailure::Abandoned`]: no engine waits for ever.

use std::sync::{Arc, OnceLock};

use types::TokenMask;

/// Why there is no mask.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MaskFailure {
    /// Nobody wants the row's token any more: its sequence has ended.
    #[error("the sequence has ended")]
    Abandoned,
    /// The grammar cannot be followed any further.
    #[error("{0}")]
    Grammar(String),
}

/// A mask that comes while its step runs.
#[derive(Debug, Default)]
pub struct PendingMask {
    outcome: OnceLock<Result<TokenMask, MaskFailure>>,
}

impl PendingMask {
    /// Blocks until the mask is settled. Without one the row yields no token.
    ///
    /// # Errors
    /// [`MaskFailure`].
    pub fn wait(&self) -> Result<&TokenMask, &MaskFailure> {
        self.outcome.wait().as_ref()
    }

    /// Why there is no mask, if that is known already.
    #[must_use]
    pub fn failure(&self) -> Option<&MaskFailure> {
        self.outcome.get().and_then(|outcome| outcome.as_ref().err())
    }
}

/// The duty to settle a mask. Clones share it: it is abandoned when the last one is dropped.
#[derive(Debug, Clone)]
pub struct MaskPromise(Arc<Duty>);

#[derive(Debug)]
struct Duty(Arc<PendingMask>);

impl MaskPromise {
    /// A promise; [`Self::pending`] is what it promises.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(Duty(Arc::default())))
    }

    /// What is promised, for the plan.
    #[must_use]
    pub fn pending(&self) -> &Arc<PendingMask> {
        &self.0.0
    }

    /// Keeps the promise, or says why it cannot be kept. Only the first word counts.
    pub fn settle(self, outcome: Result<TokenMask, MaskFailure>) {
        let _ = self.0.0.outcome.set(outcome);
    }
}

impl Default for MaskPromise {
    fn default() -> Self {
        Self::new()
    }
}

impl PartialEq for MaskPromise {
    /// The same promise, not an equal mask.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(self.pending(), other.pending())
    }
}

impl Drop for Duty {
    fn drop(&mut self) {
        let _ = self.0.outcome.set(Err(MaskFailure::Abandoned));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_word_counts_and_a_dropped_promise_is_abandoned() {
        let mask = TokenMask::from_words([5].into());
        let promise = MaskPromise::new();
        let (pending, copy) = (Arc::clone(promise.pending()), promise.clone());
        assert_eq!(pending.failure(), None);
        promise.settle(Ok(mask.clone()));
        copy.settle(Err(MaskFailure::Grammar("late".into())));
        assert_eq!(pending.wait(), Ok(&mask));

        let pending = Arc::clone(MaskPromise::new().pending());
        assert_eq!(pending.wait(), Err(&MaskFailure::Abandoned));
    }

    #[test]
    fn waiting_ends_when_another_thread_settles() {
        let promise = MaskPromise::new();
        let pending = Arc::clone(promise.pending());
        let waiter = std::thread::spawn(move || pending.wait().is_ok_and(|mask| mask.allows(0)));
        promise.settle(Ok(TokenMask::from_words([1].into())));
        assert!(waiter.join().unwrap());
    }
}
