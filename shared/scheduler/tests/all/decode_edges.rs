use kv::{Incomplete, KvSlice, SliceError};
use scheduler::Taken;
use scheduler::plan::RowTokens;
use scheduler::{AbortReason, DecodeScheduler, Gone, Outcome, Phase, Refusal, StepMismatch, TicketError};
use types::{FinishReason, KvLayout, PageGroup};

use crate::decode_rig::{DecodeRig, TTL, config};
use crate::{CONTEXTS, endless, layout, peer, reference, spec, ticket};

const FINISHED: Option<Outcome> = Some(Outcome::Finished(FinishReason::Length));

fn rig(lookahead: bool) -> DecodeRig {
    DecodeRig::new(config(4, 320, lookahead))
}

fn aborted(reason: AbortReason) -> Option<Outcome> {
    Some(Outcome::Aborted(reason))
}

#[test]
fn tokens_equal_a_monolithic_run_at_every_context_edge() {
    for lookahead in [false, true] {
        for context in CONTEXTS {
            let mut rig = rig(lookahead);
            rig.join(ticket(1), endless(context, context, 40));
            rig.join(ticket(2), spec(context, context, 200));
            rig.run();
            rig.check_tokens();
            assert_eq!(rig.outcome(ticket(1)), FINISHED, "context {context}");
            assert!(matches!(rig.outcome(ticket(2)), Some(Outcome::Finished(_))));
            assert!(rig.scheduler.is_idle());
            assert_eq!(rig.engine.last_sampled_rows > 0, lookahead);
        }
    }
}

#[test]
fn a_first_token_that_ends_the_sequence_never_reaches_the_engine() {
    let mut rig = rig(false);
    rig.join(ticket(1), endless(1, 20, 1));
    let stopped = spec(1, 20, 50);
    let (first, _) = reference(&stopped, 1200);
    rig.join(ticket(2), scheduler::SequenceSpec { stop_token_ids: [first[0]].into(), ..stopped });
    rig.join(ticket(3), endless(3, 1199, 50)); // its first token takes the last position
    assert!(!rig.plan());
    assert_eq!(rig.outcome(ticket(1)), FINISHED);
    assert_eq!(rig.outcome(ticket(2)), Some(Outcome::Finished(FinishReason::Stop)));
    assert_eq!(rig.outcome(ticket(3)), FINISHED);
    rig.check_tokens();
    assert!(rig.scheduler.is_idle());
}

#[test]
fn the_context_limit_ends_a_sequence_without_a_row_too_many() {
    for lookahead in [false, true] {
        let mut rig = rig(lookahead);
        rig.join(ticket(1), endless(1, 1190, 500));
        rig.run();
        assert_eq!(rig.records[&ticket(1)].tokens.len(), 10);
        assert_eq!(rig.engine.rows_run, 9, "the first token is prefill's, the last is never computed");
        rig.check_tokens();
        assert!(rig.scheduler.is_idle());
    }
}

#[test]
fn max_tokens_plans_no_row_too_many_and_counts_earlier_attempts() {
    for lookahead in [false, true] {
        let mut rig = rig(lookahead);
        let mut resumed = endless(5, 30, 12);
        resumed.generated = reference(&resumed, 1200).0[..4].to_vec();
        rig.join(ticket(1), resumed);
        rig.run();
        assert_eq!(rig.records[&ticket(1)].tokens.len(), 8);
        assert_eq!(rig.engine.rows_run, 7);
        rig.check_tokens();
    }
}

#[test]
fn with_lookahead_a_stop_drops_the_token_behind_it_and_holds_pages_for_the_step_in_flight() {
    let mut rig = rig(true);
    let endless = endless(9, 40, 100);
    let stop = reference(&endless, 1200).0[3];
    rig.join(ticket(1), scheduler::SequenceSpec { stop_token_ids: [stop].into(), ..endless });
    let expected = reference(&rig.specs[&ticket(1)], 1200).0.len();
    rig.plan();
    for _ in 0..expected {
        if rig.outcome(ticket(1)).is_none() {
            rig.plan();
            rig.complete();
        }
    }
    assert_eq!(rig.outcome(ticket(1)), Some(Outcome::Finished(FinishReason::Stop)));
    assert!(!rig.scheduler.is_idle(), "a step in flight still writes to the sequence's pages");
    assert!(rig.complete());
    assert!(rig.scheduler.is_idle());
    rig.check_tokens();
}

#[test]
fn refusals_are_typed_and_take_nothing() {
    let mut rig = DecodeRig::new(config(2, 80, false));
    let from = peer("prefill", 1);
    let before = rig.scheduler.counts();
    let too_long = Refusal::TooLong { context_tokens: 1200, max_context_tokens: 1200 };
    assert_eq!(rig.reserve(ticket(1), &from, spec(1, 1200, 5)), Err(too_long));
    assert_eq!(rig.reserve(ticket(1), &from, spec(1, 0, 5)), Err(Refusal::EmptyPrompt));
    assert_eq!(rig.scheduler.counts(), before);
    rig.reserve(ticket(1), &from, endless(1, 1199, 5)).unwrap();
    let used = Refusal::TicketUsed { ticket: ticket(1), phase: Phase::Reserved };
    assert_eq!(rig.reserve(ticket(1), &from, spec(1, 5, 5)), Err(used));
    let refused = rig.reserve(ticket(2), &from, endless(2, 50, 100)).unwrap_err();
    let Refusal::NoPages(no_pages) = refused else { panic!("{refused}") };
    // 50 tokens and 32 of growth are 6 pages; 1199 tokens hold 75 of 80.
    assert_eq!((no_pages.group, no_pages.needed, no_pages.free), (PageGroup::Full, 6, 5));
    rig.reserve(ticket(2), &from, endless(2, 48, 100)).unwrap();
    assert_eq!(rig.reserve(ticket(3), &from, spec(3, 1, 1)), Err(Refusal::NoSlot { max_sequences: 2 }));
    rig.cancel(ticket(2)).unwrap();
    let used = Refusal::TicketUsed { ticket: ticket(2), phase: Phase::Ended(Outcome::Aborted(AbortReason::Cancelled)) };
    assert_eq!(rig.reserve(ticket(2), &from, spec(1, 5, 5)), Err(used), "an ended ticket is not used again");
    rig.scheduler.drain();
    assert_eq!(rig.reserve(ticket(4), &from, spec(3, 1, 1)), Err(Refusal::Draining));
    assert_eq!(rig.scheduler.phase(ticket(1)), Some(Phase::Reserved), "what is reserved goes on");
}

#[test]
fn growth_is_not_set_aside_beyond_what_the_sequence_can_use() {
    let mut rig = rig(false);
    // 16 tokens, of which the second output token is never cached: 17 positions.
    rig.reserve(ticket(1), &peer("prefill", 1), endless(1, 16, 2)).unwrap();
    assert_eq!(rig.scheduler.counts().full.reserved, 2);
    assert_eq!(rig.scheduler.counts().window.reserved, 2);
    rig.cancel(ticket(1));
    rig.reserve(ticket(2), &peer("prefill", 1), endless(1, 16, 1)).unwrap();
    assert_eq!(rig.scheduler.counts().full.reserved, 1);
}

#[test]
fn a_commit_before_the_last_slice_names_it_and_may_be_tried_again() {
    let mut rig = rig(false);
    rig.reserve(ticket(1), &peer("prefill", 1), spec(1, 130, 9)).unwrap();
    assert_eq!(rig.commit(ticket(1)), Err(TicketError::NotBegun { ticket: ticket(1) }));
    rig.begin(ticket(1)).unwrap();
    let total = rig.senders[&ticket(1)].unsent.len() as u32;
    while rig.senders[&ticket(1)].unsent.len() > 1 {
        rig.send(ticket(1), 1).unwrap();
    }
    let first = rig.senders[&ticket(1)].unsent[0];
    assert_eq!(rig.commit(ticket(1)), Err(Incomplete { missing: 1, total, first }.into()));
    assert!(!rig.plan(), "an incomplete context is never computed on");
    assert_eq!(rig.send(ticket(1), 0), Ok(0));
    assert_eq!(rig.commit(ticket(1)), Ok(Taken::First));
    assert_eq!(rig.commit(ticket(1)), Ok(Taken::Again));
    assert!(rig.plan());
    assert_eq!(rig.commit(ticket(1)), Ok(Taken::Again), "while running");
    rig.run();
    assert_eq!(rig.commit(ticket(1)), Ok(Taken::Again), "after the end");
    rig.senders.get_mut(&ticket(1)).unwrap().peer = peer("prefill", 2);
    assert!(matches!(rig.commit(ticket(1)), Err(TicketError::Gone(_))), "a stranger's commit repeats nothing");
    rig.check_tokens();
}

#[test]
fn strangers_and_other_incarnations_are_answered_gone() {
    let mut rig = rig(false);
    let (from, reborn) = (peer("prefill", 1), peer("prefill", 2));
    rig.reserve(ticket(1), &from, spec(1, 17, 9)).unwrap();
    let unknown = |id| Gone { ticket: ticket(id), phase: None };
    let scheduler = &mut rig.scheduler;
    assert_eq!(scheduler.begin_landing(ticket(1), &reborn, &layout(1)).unwrap_err(), unknown(1).into());
    assert_eq!(scheduler.begin_landing(ticket(2), &from, &layout(1)).unwrap_err(), unknown(2).into());
    assert_eq!(scheduler.counts().landing, 0);
    rig.begin(ticket(1)).unwrap();
    rig.send_all(ticket(1));
    let slice = rig.senders[&ticket(1)].map.slices().next().unwrap();
    assert_eq!(rig.scheduler.slice_arrived(ticket(1), &reborn, &slice), Err(unknown(1).into()));
    let duplicate = rig.scheduler.slice_arrived(ticket(1), &from, &slice);
    assert_eq!(duplicate, Err(SliceError::Duplicate { slice }.into()));
    let stranger = KvSlice { layer: 9, ..slice };
    assert!(matches!(rig.scheduler.slice_arrived(ticket(1), &from, &stranger), Err(TicketError::Slice(_))));
    rig.commit(ticket(1)).unwrap();
    let late = Gone { ticket: ticket(1), phase: Some(Phase::Committed) };
    assert_eq!(rig.scheduler.slice_arrived(ticket(1), &from, &slice), Err(late.into()));
    rig.cancel(ticket(1)).unwrap();
    let ended = Gone { ticket: ticket(1), phase: Some(Phase::Ended(Outcome::Aborted(AbortReason::Cancelled))) };
    assert_eq!(rig.scheduler.slice_arrived(ticket(1), &from, &slice), Err(ended.into()));
    assert_eq!(rig.commit(ticket(1)), Err(ended.into()));
}

#[test]
fn a_sender_of_another_layout_is_refused_and_the_ticket_waits_on() {
    let mut rig = rig(false);
    let from = peer("prefill", 1);
    rig.reserve(ticket(1), &from, spec(1, 17, 9)).unwrap();
    let other = KvLayout { window: 64, ..layout(1) };
    let refused = rig.scheduler.begin_landing(ticket(1), &from, &other).unwrap_err();
    assert!(matches!(refused, TicketError::Land(_)), "{refused}");
    assert_eq!(rig.scheduler.phase(ticket(1)), Some(Phase::Reserved));
    rig.begin(ticket(1)).unwrap();
}

#[test]
fn cancel_takes_effect_in_every_phase_and_says_in_which() {
    let mut rig = rig(false);
    let from = peer("prefill", 1);
    for id in 1..=4 {
        rig.reserve(ticket(id), &from, endless(id as u32, 20, 50)).unwrap();
    }
    for id in 2..=4 {
        rig.begin(ticket(id)).unwrap();
        rig.send(ticket(id), 3).unwrap();
    }
    rig.send_all(ticket(4));
    rig.commit(ticket(4)).unwrap();
    rig.plan();
    rig.send_all(ticket(3));
    rig.commit(ticket(3)).unwrap();
    assert_eq!(rig.cancel(ticket(1)), Some(Phase::Reserved));
    assert_eq!(rig.cancel(ticket(2)), Some(Phase::Landing));
    assert_eq!(rig.cancel(ticket(3)), Some(Phase::Committed));
    assert_eq!(rig.cancel(ticket(4)), Some(Phase::Running));
    assert_eq!(rig.cancel(ticket(4)), None);
    assert_eq!(rig.cancel(ticket(5)), None);
    assert_eq!(rig.fences.len(), 1, "only a ticket that was being written to needs a fence");
    assert!(rig.complete(), "the step in flight ends, its token is dropped");
    assert!(!rig.scheduler.is_idle());
    rig.fence(ticket(2));
    assert!(rig.scheduler.is_idle());
    rig.join(ticket(6), endless(6, 20, 5));
    rig.run();
    rig.check_tokens();
}

#[test]
fn pages_of_an_aborted_landing_are_not_used_before_the_fence() {
    let mut rig = DecodeRig::new(config(2, 80, false));
    rig.reserve(ticket(1), &peer("prefill", 1), endless(1, 1127, 3)).unwrap();
    rig.begin(ticket(1)).unwrap();
    rig.cancel(ticket(1)).unwrap();
    assert_eq!(rig.scheduler.counts().full.quarantined, 71);
    let refused = rig.reserve(ticket(2), &peer("prefill", 1), endless(2, 200, 3)).unwrap_err();
    assert!(matches!(refused, Refusal::NoPages(_)), "{refused}");
    rig.join(ticket(3), endless(3, 100, 30));
    rig.scribble(ticket(1));
    rig.run();
    rig.check_tokens();
    rig.fence(ticket(1));
    rig.reserve(ticket(2), &peer("prefill", 1), endless(2, 200, 3)).unwrap();
}

#[test]
fn a_writer_fenced_before_the_abort_leaves_nothing_in_quarantine() {
    let mut rig = rig(false);
    for id in [1, 2] {
        rig.reserve(ticket(id), &peer("prefill", 1), endless(1, 30, 5)).unwrap();
        rig.begin(ticket(id)).unwrap();
    }
    rig.fence(ticket(1));
    assert_eq!(rig.outcome(ticket(1)), aborted(AbortReason::PeerLost), "nobody can complete it");
    rig.send_all(ticket(2));
    rig.fence(ticket(2));
    assert_eq!(rig.outcome(ticket(2)), None, "everything has landed: the commit may still come");
    rig.cancel(ticket(2));
    assert!(rig.fences.is_empty());
    assert!(rig.scheduler.is_idle());
}

#[test]
fn a_lost_prefill_worker_ends_what_waits_for_it_and_nothing_else() {
    let mut rig = rig(false);
    rig.join(ticket(1), endless(1, 30, 5));
    rig.reserve(ticket(2), &peer("prefill", 1), endless(2, 30, 5)).unwrap();
    rig.begin(ticket(2)).unwrap();
    rig.send_all(ticket(2));
    rig.reserve(ticket(3), &peer("prefill", 1), endless(2, 30, 5)).unwrap();
    rig.reserve(ticket(4), &peer("prefill", 2), endless(2, 30, 5)).unwrap();
    rig.peer_lost(&peer("prefill", 1));
    assert_eq!(rig.outcome(ticket(2)), aborted(AbortReason::PeerLost));
    assert_eq!(rig.outcome(ticket(3)), aborted(AbortReason::PeerLost));
    assert_eq!(rig.outcome(ticket(4)), None, "the same worker in its next life");
    rig.run();
    assert_eq!(rig.outcome(ticket(1)), FINISHED);
    rig.check_tokens();
}

#[test]
fn a_ticket_expires_at_its_deadline_unless_renewed_or_committed() {
    let mut rig = rig(false);
    let start = rig.now;
    for id in 1..=3 {
        rig.reserve(ticket(id), &peer("prefill", 1), endless(1, 30, 500)).unwrap();
    }
    for id in [2, 3] {
        rig.begin(ticket(id)).unwrap();
        rig.send_all(ticket(id));
    }
    rig.commit(ticket(3)).unwrap();
    rig.now = start + TTL / 2;
    assert_eq!(rig.scheduler.renew(rig.now, ticket(2)), Ok(start + TTL / 2 + TTL));
    assert!(rig.scheduler.renew(rig.now, ticket(3)).is_err(), "nothing to renew once committed");
    assert_eq!(rig.scheduler.next_deadline(), Some(start + TTL));
    rig.now = start + TTL;
    rig.expire();
    assert_eq!([1, 2, 3].map(|id| rig.outcome(ticket(id))), [aborted(AbortReason::Expired), None, None]);
    rig.now += TTL;
    rig.expire();
    assert_eq!(rig.outcome(ticket(2)), aborted(AbortReason::Expired));
    assert_eq!(rig.scheduler.next_deadline(), None);
}

#[test]
fn when_pages_run_out_the_youngest_gives_way_and_can_be_resumed() {
    for lookahead in [false, true] {
        // 75 pages are one sequence of 1200 tokens; three that grow to 400 do not fit.
        let mut rig = DecodeRig::new(config(3, 75, lookahead));
        for id in 1..=3 {
            rig.join(ticket(id), endless(id as u32, 300, 200));
        }
        rig.run();
        assert_eq!(rig.outcome(ticket(3)), Some(Outcome::Preempted));
        assert_eq!([1, 2].map(|id| rig.outcome(ticket(id))), [FINISHED; 2]);
        assert_eq!(rig.scheduler.counts().preemptions, 1);
        rig.check_tokens();
        assert!(rig.scheduler.is_idle());

        let mut resumed = endless(3, 300, 200);
        resumed.generated = rig.records[&ticket(3)].tokens.clone();
        assert!(!resumed.generated.is_empty());
        rig.join(ticket(4), resumed);
        rig.run();
        rig.check_tokens();
        let stream: Vec<_> = [3, 4].iter().flat_map(|id| rig.records[&ticket(*id)].tokens.clone()).collect();
        assert_eq!(stream, reference(&endless(3, 300, 200), 1200).0, "one unbroken stream");
    }
}

#[test]
fn a_sequence_alone_waits_for_pages_that_a_reservation_holds() {
    let mut rig = DecodeRig::new(config(2, 75, false));
    rig.join(ticket(1), endless(1, 300, 500)); // 21 pages
    rig.reserve(ticket(2), &peer("prefill", 1), endless(2, 832, 50)).unwrap(); // the other 54
    assert_eq!(rig.scheduler.counts().full.free, 0);
    rig.run();
    assert_eq!(rig.outcome(ticket(1)), None, "it waits");
    rig.cancel(ticket(2)).unwrap();
    let newcomer = rig.reserve(ticket(3), &peer("prefill", 1), spec(3, 1, 1));
    assert_eq!(newcomer, Err(Refusal::GrowthFirst), "free pages are not a newcomer's while somebody waits");
    rig.run();
    assert_eq!(rig.outcome(ticket(1)), FINISHED);
    assert_eq!(rig.scheduler.counts().preemptions, 0);
    rig.check_tokens();
}

#[test]
fn rows_hold_the_newest_known_token_or_the_devices_own() {
    let mut rig = rig(true);
    rig.join(ticket(1), endless(1, 20, 50));
    assert!(rig.plan());
    assert!(rig.plan());
    assert!(!rig.plan(), "two steps are in flight");
    let first = rig.records[&ticket(1)].tokens[0];
    assert!(matches!(&rig.plans[0].rows[0].tokens, RowTokens::Known(tokens) if *tokens == [first]));
    assert!(matches!(rig.plans[1].rows[0].tokens, RowTokens::LastSampled));
    assert_eq!(rig.plans[0].bind[0].generated, [first]);
    assert!(rig.plans[1].bind.is_empty());
    rig.complete();
    rig.complete();
    assert!(rig.plan());
    assert!(matches!(rig.plans[0].rows[0].tokens, RowTokens::Known(_)), "all has been read");
}

fn constrained(salt: u32) -> scheduler::SequenceSpec {
    scheduler::SequenceSpec {
        constraint: Some(types::Constraint { lark: "start: /x+/".into() }),
        ..endless(salt, 20, 50)
    }
}

#[test]
fn each_row_of_a_constrained_sequence_has_the_mask_of_its_own_token() {
    for lookahead in [false, true] {
        let mut rig = rig(lookahead);
        let spec = scheduler::SequenceSpec { generated: vec![5, 6, 7], ..constrained(1) };
        rig.join(ticket(1), spec);
        rig.join(ticket(2), endless(2, 20, 50));
        for index in 4..8 {
            while rig.plan() {}
            let (of, found, promise) = rig.masks.remove(0);
            assert_eq!((of, found), (ticket(1), index), "3 tokens are old, prefill sampled one");
            let row = &rig.plans[0].rows[0];
            assert!(row.mask.as_ref().is_some_and(|mask| std::sync::Arc::ptr_eq(mask, promise.pending())));
            assert!(rig.plans[0].rows[1].mask.is_none());
            promise.settle(Ok(types::TokenMask::from_words([u32::MAX].into())));
            rig.complete();
        }
    }
}

#[test]
fn a_row_without_its_mask_ends_its_sequence_and_no_other() {
    for lookahead in [false, true] {
        let mut rig = rig(lookahead);
        rig.join(ticket(1), constrained(1));
        rig.join(ticket(2), endless(2, 20, 50));
        while rig.plan() {}
        let tokens_before = rig.records[&ticket(1)].tokens.len();
        rig.masks.clear();
        while !rig.plans.is_empty() {
            rig.complete();
        }
        let record = &rig.records[&ticket(1)];
        assert_eq!(record.outcome, Some(Outcome::Aborted(AbortReason::ConstraintFailed)));
        assert_eq!(record.tokens.len(), tokens_before, "nothing is delivered without a mask");
        assert_eq!(rig.records[&ticket(2)].outcome, None);
    }
}

#[test]
fn a_row_without_numbers_ends_its_sequence_and_no_other() {
    for lookahead in [false, true] {
        let mut rig = rig(lookahead);
        rig.join(ticket(1), endless(1, 20, 50));
        rig.join(ticket(2), endless(2, 20, 50));
        while rig.plan() {}
        let slot = rig.plans[0].rows[0].slot;
        rig.engine.broken.insert(slot);
        while rig.outcome(ticket(1)).is_none() {
            rig.complete();
        }
        assert_eq!(rig.outcome(ticket(1)), aborted(AbortReason::NotANumber));
        assert_eq!(rig.records[&ticket(1)].tokens.len(), 1, "prefill's, and nothing that was drawn from no numbers");
        assert_eq!(rig.outcome(ticket(2)), None);
        // What is in flight behind it is nobody's. Then the slot and its pages are another's.
        while rig.complete() {}
        rig.engine.broken.clear();
        rig.join(ticket(3), endless(3, 20, 50));
        rig.run();
        assert_eq!([2, 3].map(|id| rig.outcome(ticket(id))), [FINISHED; 2]);
        rig.check_tokens();
    }
}

/// Runs the batch until the scheduler calls the engine broken.
fn run_until_broken(rig: &mut DecodeRig) -> Option<StepMismatch> {
    loop {
        while rig.plan() {}
        let plan = rig.plans.pop_front()?;
        let output = rig.engine.execute(&plan);
        if let Err(error) = rig.scheduler.complete(output, &mut Vec::new()) {
            return Some(error);
        }
    }
}

#[test]
fn a_step_of_several_rows_without_any_number_is_the_weights_fault() {
    for lookahead in [false, true] {
        let mut rig = rig(lookahead);
        rig.join(ticket(1), endless(1, 20, 50));
        rig.join(ticket(2), endless(2, 20, 50));
        rig.engine.broken.extend((0..4).map(types::SlotId));
        assert_eq!(run_until_broken(&mut rig), Some(StepMismatch::NotNumbers { step: 0, sequences: 2 }));
    }
}

#[test]
fn three_sequences_in_succession_without_a_number_are_the_weights_fault() {
    for lookahead in [false, true] {
        let mut rig = rig(lookahead);
        rig.engine.broken.extend((0..4).map(types::SlotId));
        for id in 1..=2 {
            rig.join(ticket(id), endless(id as u32, 20, 50));
            assert_eq!(run_until_broken(&mut rig), None, "rows in flight behind an ended sequence do not count");
        }
        rig.join(ticket(3), endless(3, 20, 50));
        let error = run_until_broken(&mut rig);
        assert!(matches!(error, Some(StepMismatch::NotNumbers { sequences: 3, .. })), "{error:?}");
    }
}

#[test]
fn a_config_that_could_strand_a_sequence_is_refused() {
    let field = |change: fn(&mut scheduler::DecodeConfig)| {
        let mut config = config(2, 75, false);
        change(&mut config);
        DecodeScheduler::new(config, layout(4)).err().map(|error| error.field)
    };
    assert_eq!(field(|_| {}), None);
    assert_eq!(field(|c| c.full_pages = 74), Some("full_pages"));
    assert_eq!(field(|c| c.window_pages = 8), Some("window_pages"));
    assert_eq!(field(|c| c.max_sequences = 0), Some("max_sequences"));
    assert_eq!(field(|c| c.dp = 0), Some("dp"));
    assert_eq!(field(|c| c.dp = 4), Some("max_sequences"), "2 slots are too few for 4 groups");
    assert_eq!(field(|c| c.max_row_tokens = 0), Some("max_row_tokens"));
    assert_eq!(field(|c| c.max_context_tokens = 1), Some("max_context_tokens"));
}
