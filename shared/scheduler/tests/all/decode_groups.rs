//! Attention groups: who takes a sequence in, and that what happens in one group leaves the others alone.

use scheduler::{DecodeConfig, Outcome, Refusal};
use types::{DpGroup, FinishReason, PageGroup};

use crate::decode_rig::{DecodeRig, config};
use crate::{endless, peer, spec, ticket};

const FINISHED: Option<Outcome> = Some(Outcome::Finished(FinishReason::Length));

/// `dp` groups of two slots and `full_pages` pages.
fn rig(dp: u32, full_pages: u32, lookahead: bool) -> DecodeRig {
    DecodeRig::new(DecodeConfig { dp, window_pages: 18, ..config(2 * dp, full_pages, lookahead) })
}

fn free(rig: &DecodeRig, group: u32) -> u32 {
    let of = |(number, pages, _): &(DpGroup, PageGroup, _)| *number == DpGroup(group) && *pages == PageGroup::Full;
    rig.scheduler.pool_counts().find(of).expect("the group exists").2.free
}

#[test]
fn sequences_go_to_the_group_with_most_free_slots_then_most_free_pages() {
    let mut rig = rig(4, 80, false);
    let from = peer("prefill", 1);
    for (id, prompt_tokens) in (1..).zip([400, 300, 200, 100]) {
        rig.reserve(ticket(id), &from, spec(1, prompt_tokens, 500)).unwrap();
        assert_eq!(rig.group(ticket(id)), DpGroup(id as u32 - 1), "an empty group before one with a sequence");
    }
    for (id, group) in (5..).zip([3, 2, 1, 0]) {
        rig.reserve(ticket(id), &from, spec(1, 10, 500)).unwrap();
        assert_eq!(rig.group(ticket(id)), DpGroup(group), "shorter sequences leave more pages");
    }
    assert_eq!(rig.reserve(ticket(9), &from, spec(1, 10, 500)), Err(Refusal::NoSlot { max_sequences: 8 }));
    rig.cancel(ticket(2)).unwrap();
    rig.reserve(ticket(10), &from, spec(1, 10, 500)).unwrap();
    assert_eq!(rig.group(ticket(10)), DpGroup(1), "the only slot");
}

#[test]
fn a_group_without_pages_does_not_keep_a_sequence_from_another() {
    let mut rig = rig(2, 80, false);
    let from = peer("prefill", 1);
    rig.reserve(ticket(1), &from, endless(1, 1190, 5)).unwrap();
    rig.reserve(ticket(2), &from, endless(2, 900, 5)).unwrap();
    rig.reserve(ticket(3), &from, endless(3, 20, 5)).unwrap();
    assert_eq!([1, 2, 3].map(|id| rig.group(ticket(id)).0), [0, 1, 1]);
    // The free slot is in group 0, which has 5 pages.
    let refused = rig.reserve(ticket(4), &from, endless(4, 200, 5)).unwrap_err();
    assert!(matches!(refused, Refusal::NoPages(no_pages) if (no_pages.free, no_pages.total) == (5, 80)), "{refused}");
    rig.cancel(ticket(3)).unwrap();
    // Equal slots, but more pages in group 1; and group 0 could not.
    rig.reserve(ticket(5), &from, endless(5, 200, 5)).unwrap();
    assert_eq!(rig.group(ticket(5)), DpGroup(1));
    rig.reserve(ticket(6), &from, endless(6, 20, 5)).unwrap();
    assert_eq!(rig.group(ticket(6)), DpGroup(0));
}

#[test]
fn the_youngest_of_the_group_that_lacks_pages_gives_way_and_no_other() {
    for lookahead in [false, true] {
        // 75 pages are one sequence of 1200 tokens: two that grow to 700 do not fit.
        let mut rig = rig(2, 75, lookahead);
        for (id, tokens) in [(1, 500), (2, 20), (3, 300), (4, 300)] {
            rig.join(ticket(id), endless(id as u32, tokens, 700));
        }
        assert_eq!([1, 2, 3, 4].map(|id| rig.group(ticket(id)).0), [0, 1, 1, 0]);
        rig.run();
        // Group 1 needs (720 + 1000) / 16 pages, 108 of 75, as well: there ticket 3 is the youngest.
        assert_eq!([1, 2].map(|id| rig.outcome(ticket(id))), [FINISHED; 2]);
        assert_eq!([3, 4].map(|id| rig.outcome(ticket(id))), [Some(Outcome::Preempted); 2]);
        assert_eq!(rig.scheduler.counts().preemptions, 2);
        rig.check_tokens();
        assert!(rig.scheduler.is_idle());
    }
}

#[test]
fn a_younger_sequence_in_another_group_keeps_its_pages() {
    let mut rig = rig(2, 75, false);
    rig.join(ticket(1), endless(1, 600, 500));
    rig.join(ticket(2), endless(2, 10, 20));
    rig.join(ticket(3), endless(3, 20, 500));
    rig.join(ticket(4), endless(4, 300, 500));
    assert_eq!([1, 2, 3, 4].map(|id| rig.group(ticket(id)).0), [0, 1, 1, 0]);
    rig.run();
    assert_eq!(rig.outcome(ticket(4)), Some(Outcome::Preempted), "it shares its pages with ticket 1");
    assert_eq!([1, 2, 3].map(|id| rig.outcome(ticket(id))), [FINISHED; 3]);
    rig.check_tokens();
}

#[test]
fn a_sequence_that_waits_for_pages_does_not_stop_the_other_group() {
    let mut rig = rig(2, 75, false);
    let from = peer("prefill", 1);
    rig.join(ticket(1), endless(1, 300, 500)); // 21 pages of group 0
    rig.join(ticket(2), endless(2, 20, 300));
    rig.join(ticket(3), endless(3, 20, 300));
    rig.reserve(ticket(4), &from, endless(4, 832, 50)).unwrap(); // the other 54
    assert_eq!([1, 2, 3, 4].map(|id| rig.group(ticket(id)).0), [0, 1, 1, 0]);
    rig.run();
    assert_eq!([1, 2, 3].map(|id| rig.outcome(ticket(id))), [None, FINISHED, FINISHED], "ticket 1 waits");
    rig.cancel(ticket(4)).unwrap();
    rig.reserve(ticket(5), &from, spec(5, 1, 1)).unwrap();
    assert_eq!(rig.group(ticket(5)), DpGroup(1), "what came free in group 0 is ticket 1's");
    rig.run();
    assert_eq!(rig.outcome(ticket(1)), FINISHED);
    rig.check_tokens();
}

#[test]
fn pages_in_quarantine_are_those_of_one_group() {
    let mut rig = rig(2, 80, false);
    let from = peer("prefill", 1);
    rig.reserve(ticket(1), &from, endless(1, 1127, 3)).unwrap();
    rig.begin(ticket(1)).unwrap();
    rig.cancel(ticket(1)).unwrap();
    assert_eq!([free(&rig, 0), free(&rig, 1)], [9, 80]);
    rig.scribble(ticket(1));
    rig.join(ticket(2), endless(2, 1127, 30));
    rig.join(ticket(3), endless(3, 100, 30));
    assert_eq!([2, 3].map(|id| rig.group(ticket(id)).0), [1, 0]);
    rig.scribble(ticket(1));
    rig.run();
    rig.check_tokens();
    assert_eq!(rig.outcome(ticket(2)), FINISHED);
    rig.fence(ticket(1));
    assert!(rig.scheduler.is_idle());
    assert_eq!([free(&rig, 0), free(&rig, 1)], [80; 2]);
}
