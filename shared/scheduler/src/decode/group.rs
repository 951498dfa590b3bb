//! One attention group: the slots and pages of its ranks, and the sequences that use them.

use kv::{PageDemand, PagePools, PageShape, SequencePages, SequenceReserve};
use types::{PageGroup, SlotId, TicketId};

use super::Refusal;
use crate::in_flight::Retired;

/// See the module. Pages run out, and come back, in each group by itself.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) pools: PagePools,
    /// Popped from the end; low numbers first.
    free_slots: Vec<SlotId>,
    /// Committed and running sequences, oldest first.
    pub(super) batch: Vec<TicketId>,
    pub(super) retired: Retired<SequencePages>,
    /// A row of the last plan lacked pages: what comes free is its, not a newcomer's.
    pub(super) growth_waits: bool,
}

impl Group {
    /// All of `slots` and all pages are free.
    pub(super) fn new(slots: impl DoubleEndedIterator<Item = SlotId>, full_pages: u32, window_pages: u32) -> Self {
        Self {
            pools: PagePools::new(full_pages, window_pages),
            free_slots: slots.rev().collect(),
            batch: Vec::new(),
            retired: Retired::new(),
            growth_waits: false,
        }
    }

    /// Free slots, then free pages for full attention: the group with the greatest takes the next sequence. Slots come first because a
    /// step takes as long as the group with the most rows does.
    pub(super) fn room(&self) -> (usize, u32) {
        (self.free_slots.len(), self.pools.group(PageGroup::Full).counts().free)
    }

    /// Sets a slot and pages aside.
    ///
    /// # Errors
    /// `NoSlot`, `GrowthFirst` or `NoPages`; nothing was taken.
    pub(super) fn admit(
        &mut self,
        shape: PageShape,
        demand: PageDemand,
        max_sequences: u32,
    ) -> Result<(SlotId, SequenceReserve), Refusal> {
        if self.free_slots.is_empty() {
            return Err(Refusal::NoSlot { max_sequences });
        }
        if self.growth_waits && !self.batch.is_empty() {
            return Err(Refusal::GrowthFirst);
        }
        let reserve = SequenceReserve::take(&self.pools, shape, demand)?;
        let slot = self.free_slots.pop().expect("one is free, as was just seen");
        Ok((slot, reserve))
    }

    /// A sequence has ended.
    pub(super) fn leave(&mut self, ticket: TicketId, slot: SlotId) {
        self.batch.retain(|member| *member != ticket);
        self.free_slots.push(slot);
    }

    /// Whether all pages are free, and none is held for a step in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.retired.is_empty() && self.pools.all_free()
    }
}
