//! Slots under attention data parallelism: which group of ranks a sequence lives on.

use std::fmt;

use crate::ids::SlotId;

/// An attention group: the ranks that hold the heads of the same sequences. There are `dp` of them, and a sequence stays in one from its
/// reservation to its end: its pages, its rows and its sampling state are on that group's ranks and on no others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct DpGroup(pub u32);

impl fmt::Display for DpGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Which attention group each slot belongs to, for good: as many slots for each, in ranges, groups ascending. Scheduler and engine both
/// go by it, so that a plan need not say where a row is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotGroups {
    dp: u32,
    per_group: u32,
}

/// Slots that cannot be dealt out evenly to the attention groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{slots} slots cannot be dealt out evenly to {dp} attention groups, one at least to each")]
pub struct UnevenSlots {
    /// All slots.
    pub slots: u32,
    /// Attention groups.
    pub dp: u32,
}

impl SlotGroups {
    /// Slots `0 .. slots`, dealt out to `dp` groups.
    ///
    /// # Errors
    /// [`UnevenSlots`] when `dp` does not divide `slots`, or either is 0.
    pub const fn new(slots: u32, dp: u32) -> Result<Self, UnevenSlots> {
        if slots == 0 || dp == 0 || !slots.is_multiple_of(dp) {
            return Err(UnevenSlots { slots, dp });
        }
        Ok(Self { dp, per_group: slots / dp })
    }

    /// Number of groups.
    #[must_use]
    pub const fn dp(&self) -> u32 {
        self.dp
    }

    /// Slots of each group.
    #[must_use]
    pub const fn per_group(&self) -> u32 {
        self.per_group
    }

    /// All groups, ascending.
    pub fn groups(&self) -> impl DoubleEndedIterator<Item = DpGroup> + use<> {
        (0..self.dp).map(DpGroup)
    }

    /// Slots of one group, ascending.
    pub fn slots(&self, group: DpGroup) -> impl DoubleEndedIterator<Item = SlotId> + use<> {
        (group.0 * self.per_group..(group.0 + 1) * self.per_group).map(SlotId)
    }

    /// The group of a slot. A slot beyond the last one is in a group beyond the last one.
    #[must_use]
    pub const fn of(&self, slot: SlotId) -> DpGroup {
        DpGroup(slot.0 / self.per_group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_is_in_the_group_that_lists_it() {
        for (slots, dp) in [(1, 1), (6, 1), (6, 2), (8, 4), (4, 4)] {
            let split = SlotGroups::new(slots, dp).unwrap();
            let listed: Vec<SlotId> = split.groups().flat_map(|group| split.slots(group)).collect();
            assert_eq!(listed, (0..slots).map(SlotId).collect::<Vec<_>>(), "{slots} over {dp}");
            for group in split.groups() {
                assert_eq!(split.slots(group).count() as u32, split.per_group());
                assert!(split.slots(group).all(|slot| split.of(slot) == group), "{slots} over {dp}");
            }
        }
    }

    #[test]
    fn slots_that_do_not_divide_are_refused() {
        for (slots, dp) in [(0, 1), (1, 0), (5, 2), (2, 4)] {
            assert_eq!(SlotGroups::new(slots, dp), Err(UnevenSlots { slots, dp }));
        }
    }
}
