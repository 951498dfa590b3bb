//! Who holds which bytes of a rank's staging.

use std::collections::VecDeque;

/// A ring of bytes, given out in pieces without a break and free again in the order in which they were given out.
#[derive(Debug)]
pub(crate) struct StagingRing<T> {
    capacity: usize,
    /// Where the next piece goes.
    head: usize,
    /// Oldest first.
    pieces: VecDeque<Piece<T>>,
}

#[derive(Debug)]
struct Piece<T> {
    id: u64,
    start: usize,
    is_over: bool,
    /// Dropped when the bytes are free again.
    held: T,
}

impl<T> StagingRing<T> {
    pub(crate) const fn new(capacity: usize) -> Self {
        Self { capacity, head: 0, pieces: VecDeque::new() }
    }

    /// Takes `len` bytes for piece `id`; `None` if there are not so many in a row.
    pub(crate) fn take(&mut self, id: u64, len: usize, held: T) -> Option<usize> {
        let start = match self.pieces.front() {
            None => (len <= self.capacity).then_some(0)?,
            // Bytes in use lie in one stretch from `tail` to `head`, or around the end. The head never meets the tail from behind.
            Some(oldest) if self.head > oldest.start => {
                if self.head + len <= self.capacity {
                    self.head
                } else {
                    (len < oldest.start).then_some(0)?
                }
            }
            Some(oldest) => (self.head + len < oldest.start).then_some(self.head)?,
        };
        self.head = start + len;
        self.pieces.push_back(Piece { id, start, is_over: false, held });
        Some(start)
    }

    /// Piece `id` is over; whether there was one. Its bytes are free once all older pieces are over.
    pub(crate) fn give_back(&mut self, id: u64) -> bool {
        self.give_back_with(id, |_| ())
    }

    /// As [`Self::give_back`], and shows what the piece holds.
    pub(crate) fn give_back_with(&mut self, id: u64, look: impl FnOnce(&T)) -> bool {
        let found = self.pieces.iter_mut().find(|piece| piece.id == id && !piece.is_over);
        let Some(piece) = found else { return false };
        piece.is_over = true;
        look(&piece.held);
        while self.pieces.front().is_some_and(|piece| piece.is_over) {
            self.pieces.pop_front();
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::StagingRing;

    #[test]
    fn pieces_are_given_in_order_and_around_the_end() {
        let mut ring = StagingRing::new(100);
        assert_eq!(ring.take(1, 40, ()), Some(0));
        assert_eq!(ring.take(2, 40, ()), Some(40));
        assert_eq!(ring.take(3, 40, ()), None);
        assert!(ring.give_back(2));
        assert!(!ring.give_back(2), "once");
        assert_eq!(ring.take(3, 40, ()), None, "the older piece is still there");
        assert!(ring.give_back(1));
        assert_eq!(ring.take(3, 100, ()), Some(0), "empty again");
        assert_eq!(ring.take(4, 1, ()), None, "full");
    }

    proptest! {
        /// Pieces never overlap, and what they hold is let go of with their bytes; a ring that is larger than the bytes allowed in it by two
        /// of the largest pieces never refuses one.
        #[test]
        fn no_two_pieces_share_a_byte(
            steps in prop::collection::vec((1_usize..=16, any::<bool>(), any::<prop::sample::Index>()), 1..200)
        ) {
            const ROOM: usize = 64;
            let mut ring = StagingRing::new(ROOM + 2 * 16);
            let mut live: Vec<(u64, usize, usize, Arc<()>)> = Vec::new();
            let mut all: Vec<(Arc<()>, usize)> = Vec::new();
            for (id, (len, ends, which)) in (0_u64..).zip(steps) {
                if ends && !live.is_empty() {
                    let (id, ..) = live.swap_remove(which.index(live.len()));
                    prop_assert!(ring.give_back(id));
                }
                all.retain(|(held, _)| Arc::strong_count(held) > 1);
                let in_use: usize = all.iter().map(|(_, len)| len).sum();
                if in_use + len > ROOM {
                    continue;
                }
                let held = Arc::new(());
                let start = ring.take(id, len, Arc::clone(&held));
                prop_assert!(start.is_some(), "{in_use} of {ROOM} in use, no room for {len}");
                let start = start.unwrap_or(0);
                for (_, other, other_len, _) in &live {
                    prop_assert!(start + len <= *other || other + other_len <= start);
                }
                all.push((Arc::clone(&held), len));
                live.push((id, start, len, held));
            }
        }
    }
}
