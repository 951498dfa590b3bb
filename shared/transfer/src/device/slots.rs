//! Which batches of a GPU have a slot, in which they are moved and scattered, and which wait for one.

use std::collections::VecDeque;

/// Batches under way at a time: one is moved while another is scattered.
pub(super) const SLOTS: usize = 4;

/// Slots that a lane may have whose batches wait for their sender. Two, so that one is received while the one before is scattered; and no more than half,
/// so that one prefill that stands still leaves the others as many. Two that stand still do block a GPU, until `peer_silence_timeout_ms` has passed.
/// What the receiver fetches by itself waits for nobody and may have all.
const SLOTS_OF_A_SENDER: usize = 2;

/// Whose a batch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) lane: u64,
    /// Whether it is over only when its sender has done its part.
    pub(super) waits_for_sender: bool,
}

impl Owner {
    const fn slots_max(self) -> usize {
        if self.waits_for_sender { SLOTS_OF_A_SENDER } else { SLOTS }
    }
}

pub(super) struct Slots<J> {
    owners: [Option<Owner>; SLOTS],
    /// In the order in which they came.
    waiting: VecDeque<(Owner, J)>,
}

impl<J> Slots<J> {
    pub(super) const fn new() -> Self {
        Self { owners: [None; SLOTS], waiting: VecDeque::new() }
    }

    pub(super) fn push(&mut self, owner: Owner, job: J) {
        self.waiting.push_back((owner, job));
    }

    /// The next to begin, and its slot. Those of one owner begin in the order in which they came; nobody waits for another owner's unless all slots are
    /// taken.
    pub(super) fn begin(&mut self) -> Option<(usize, J)> {
        let slot = self.owners.iter().position(Option::is_none)?;
        let next = self.waiting.iter().position(|(owner, _)| self.num_taken(*owner) < owner.slots_max())?;
        let (owner, job) = self.waiting.remove(next)?;
        self.owners[slot] = Some(owner);
        Some((slot, job))
    }

    /// What was begun in a slot is over.
    pub(super) fn end(&mut self, slot: usize) {
        self.owners[slot] = None;
    }

    fn num_taken(&self, owner: Owner) -> usize {
        self.owners.iter().filter(|taken| **taken == Some(owner)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn sender(lane: u64) -> Owner {
        Owner { lane, waits_for_sender: true }
    }

    const fn fetched(lane: u64) -> Owner {
        Owner { lane, waits_for_sender: false }
    }

    fn begun(slots: &mut Slots<u32>) -> Vec<(usize, u32)> {
        std::iter::from_fn(|| slots.begin()).collect()
    }

    #[test]
    fn a_sender_that_stands_still_leaves_half_of_the_slots() {
        let mut slots = Slots::new();
        (0..10).for_each(|job| slots.push(sender(1), job));
        assert_eq!(begun(&mut slots), [(0, 0), (1, 1)], "whose first two never end");
        (10..14).for_each(|job| slots.push(sender(2), job));
        assert_eq!(begun(&mut slots), [(2, 10), (3, 11)]);
        // The younger one may be over first.
        slots.end(3);
        assert_eq!(begun(&mut slots), [(3, 12)]);
        slots.end(2);
        assert_eq!(begun(&mut slots), [(2, 13)]);
        slots.end(3);
        slots.push(fetched(3), 20);
        assert_eq!(begun(&mut slots), [(3, 20)]);
        slots.end(0);
        slots.end(1);
        assert_eq!(begun(&mut slots), [(0, 2), (1, 3)], "in their order, when it goes on");
    }

    #[test]
    fn what_is_fetched_may_take_all_slots() {
        let mut slots = Slots::new();
        (0..5).for_each(|job| slots.push(fetched(1), job));
        assert_eq!(begun(&mut slots), [(0, 0), (1, 1), (2, 2), (3, 3)]);
        slots.push(sender(2), 9);
        assert_eq!(begun(&mut slots), []);
        slots.end(2);
        slots.end(1);
        assert_eq!(begun(&mut slots), [(1, 4), (2, 9)]);
    }
}
