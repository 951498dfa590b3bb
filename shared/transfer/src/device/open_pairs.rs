//! The pairs of a lane, within reach of whoever closes the lane while they are still being opened.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::data::DataError;

/// A sender's rank and a receiver's.
pub(super) type Pair = (u32, u32);

/// One end of a pair.
pub(super) trait PairEnd: Clone {
    /// Has what waits for the other end give up.
    fn abort(&self);
}

pub(super) struct OpenPairs<E> {
    state: Mutex<State<E>>,
}

struct State<E> {
    ends: BTreeMap<Pair, E>,
    is_closed: bool,
}

impl<E> Default for OpenPairs<E> {
    fn default() -> Self {
        Self { state: Mutex::new(State { ends: BTreeMap::new(), is_closed: false }) }
    }
}

impl<E: PairEnd> OpenPairs<E> {
    /// To be called before anything waits for the other end.
    ///
    /// # Errors
    /// [`DataError`] if the lane is closed: the end has been aborted then.
    pub(super) fn add(&self, pair: Pair, end: E) -> Result<(), DataError> {
        let mut state = self.state();
        if state.is_closed {
            drop(state);
            end.abort();
            return Err(DataError("the lane was closed".into()));
        }
        state.ends.insert(pair, end);
        Ok(())
    }

    pub(super) fn get(&self, pair: Pair) -> Option<E> {
        self.state().ends.get(&pair).cloned()
    }

    /// Aborts all, and what is added from now on.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.is_closed = true;
        state.ends.values().for_each(E::abort);
    }

    fn state(&self) -> MutexGuard<'_, State<E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[derive(Clone, Default)]
    struct Fake(Arc<AtomicBool>);

    impl PairEnd for Fake {
        fn abort(&self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    impl Fake {
        fn is_aborted(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn closing_reaches_those_that_are_there_and_those_that_come_later() {
        let (early, late, pairs) = (Fake::default(), Fake::default(), OpenPairs::default());
        assert_eq!(pairs.add((0, 1), early.clone()), Ok(()));
        assert!(!early.is_aborted() && pairs.get((0, 1)).is_some() && pairs.get((1, 0)).is_none());
        pairs.close();
        assert!(early.is_aborted());
        assert!(pairs.add((1, 0), late.clone()).is_err());
        assert!(late.is_aborted() && pairs.get((1, 0)).is_none());
    }
}
