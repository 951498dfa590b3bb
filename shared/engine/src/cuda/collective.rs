//! Sums over the ranks of a group.

use device::{Stream, ViewMut};
use half::bf16;

use crate::EngineError;

/// What the forward pass needs of the other ranks. All ranks make the same calls in the same order; each is enqueued on
/// the rank's stream.
pub(crate) trait Collective: Send {
    /// Ranks of the group. With one, the forward pass fuses what would lie around a sum.
    fn ranks(&self) -> usize;

    /// Replaces `values` by their sum over all ranks.
    ///
    /// # Errors
    /// When a rank is lost.
    fn all_reduce(&mut self, stream: &Stream, values: ViewMut<'_, bf16>) -> Result<(), EngineError>;
}

/// A group of one.
pub(crate) struct OneRank;

impl Collective for OneRank {
    fn ranks(&self) -> usize {
        1
    }

    fn all_reduce(&mut self, _: &Stream, _: ViewMut<'_, bf16>) -> Result<(), EngineError> {
        Ok(())
    }
}
