use scheduler::plan::RowOutputKind;
use scheduler::{AbortReason, PrefillOutcome, PrefillRefusal, PrefillScheduler, SequenceSpec, StepMismatch};
use std::time::Duration;
use types::FinishReason;

use crate::prefill_rig::{MAX_CONTEXT, PrefillRig, config};
use crate::{CONTEXTS, endless, layout, reference, ticket};

fn aborted(reason: AbortReason) -> Option<PrefillOutcome> {
    Some(PrefillOutcome::Aborted(reason))
}

#[test]
fn first_tokens_and_sent_pages_are_right_at_every_edge_of_chunk_page_and_window() {
    for chunk_tokens in [1200, 64, 100, 7] {
        for context in CONTEXTS.into_iter().chain([63, 64, 65, 100, 101, 1198, 1199]) {
            let mut rig = PrefillRig::new(config(1, chunk_tokens));
            // The longest context leaves room for one token, so nothing is sent: see the test below.
            let context = context.min(1198);
            rig.submit(ticket(1), endless(context, context, 10)).unwrap();
            rig.run();
            rig.check_first_token(ticket(1));
            rig.deliver(ticket(1));
            assert!(rig.all_free());
            assert_eq!(rig.engine.rows_run, u64::from(context.div_ceil(chunk_tokens)));
        }
    }
}

#[test]
fn chunks_tile_the_context_and_only_the_last_one_samples() {
    let mut rig = PrefillRig::new(config(1, 50));
    rig.submit(ticket(1), endless(1, 120, 10)).unwrap();
    let mut chunks = Vec::new();
    while rig.plan() {
        let step = &rig.steps[0];
        chunks.push((step.positions.clone(), step.last, step.plan.rows[0].output, step.plan.bind.len()));
        rig.complete();
    }
    let none = RowOutputKind::None;
    let expected = [(0..50, false, none, 1), (50..100, false, none, 0), (100..120, true, RowOutputKind::Sample, 0)];
    assert_eq!(chunks, expected);
}

#[test]
fn a_resumed_sequence_samples_the_token_after_those_generated() {
    let mut rig = PrefillRig::new(config(1, 16));
    let mut resumed = endless(1, 20, 30);
    resumed.generated = reference(&resumed, MAX_CONTEXT).0[..13].to_vec();
    rig.submit(ticket(1), resumed).unwrap();
    rig.run();
    rig.check_first_token(ticket(1));
    rig.deliver(ticket(1));
}

#[test]
fn a_first_token_that_surely_ends_the_sequence_opens_no_transfer() {
    for spec in [endless(1, 40, 1), endless(1, 1199, 10)] {
        let mut rig = PrefillRig::new(config(1, 64));
        rig.submit(ticket(1), spec).unwrap();
        rig.run();
        rig.check_first_token(ticket(1));
        assert_eq!(rig.outcome(ticket(1)), Some(PrefillOutcome::Finished(FinishReason::Length)));
        assert!(rig.outbox.is_empty() && rig.aborts.is_empty());
        assert!(rig.all_free());
    }
}

#[test]
fn a_first_token_that_stops_aborts_the_transfer_and_pins_pages_until_it_has_ended() {
    let mut rig = PrefillRig::new(config(1, 64));
    let spec = endless(1, 100, 10);
    let first = reference(&spec, MAX_CONTEXT).0[0];
    rig.submit(ticket(1), SequenceSpec { stop_token_ids: [first].into(), ..spec }).unwrap();
    rig.run();
    assert_eq!(rig.records[&ticket(1)].finish, Some(FinishReason::Stop));
    assert_eq!(rig.outcome(ticket(1)), Some(PrefillOutcome::Finished(FinishReason::Stop)));
    assert!(rig.aborts.contains(&ticket(1)));
    assert_eq!(rig.scheduler.counts().pinned, 1);
    rig.fail_transfer(ticket(1));
    assert!(rig.all_free());
}

#[test]
fn prompts_run_one_by_one_in_their_order() {
    let mut rig = PrefillRig::new(config(2, 32));
    for id in 1..=4 {
        rig.submit(ticket(id), endless(id as u32, 100, 10)).unwrap();
    }
    rig.run();
    assert_eq!(rig.began, [1, 2].map(ticket), "two sets of pages: the third waits for a transfer to end");
    assert_eq!((rig.scheduler.counts().queued, rig.scheduler.counts().sending), (2, 2));
    rig.deliver(ticket(2));
    rig.run();
    rig.deliver(ticket(1));
    rig.run();
    assert_eq!(rig.began, [1, 2, 3, 4].map(ticket));
    for id in [4, 3] {
        rig.deliver(ticket(id));
    }
    assert!(rig.all_free());
    for id in 1..=4 {
        rig.check_first_token(ticket(id));
    }
}

#[test]
fn refusals_are_typed() {
    let mut rig = PrefillRig::new(config(1, 32));
    let too_long = PrefillRefusal::TooLong { context_tokens: 1200, max_context_tokens: 1200 };
    assert_eq!(rig.submit(ticket(1), endless(1, 1200, 5)), Err(too_long));
    assert_eq!(rig.submit(ticket(1), endless(1, 0, 5)), Err(PrefillRefusal::EmptyPrompt));
    for id in 1..=4 {
        rig.submit(ticket(id), endless(1, 10, 5)).unwrap();
    }
    assert_eq!(rig.submit(ticket(5), endless(1, 10, 5)), Err(PrefillRefusal::QueueFull { waiting: 4 }));
    rig.plan();
    assert_eq!(rig.submit(ticket(1), endless(1, 10, 5)), Err(PrefillRefusal::TicketUsed { ticket: ticket(1) }));
    rig.cancel(ticket(4));
    assert_eq!(rig.submit(ticket(4), endless(1, 10, 5)), Err(PrefillRefusal::TicketUsed { ticket: ticket(4) }));
    rig.scheduler.drain();
    assert_eq!(rig.submit(ticket(6), endless(1, 10, 5)), Err(PrefillRefusal::Draining));
    for id in 1..=3 {
        rig.run();
        rig.deliver(ticket(id));
    }
    assert!(rig.all_free(), "what was queued goes on");
}

#[test]
fn cancel_in_the_queue_in_flight_and_while_sending() {
    let mut rig = PrefillRig::new(config(2, 32));
    for id in 1..=3 {
        rig.submit(ticket(id), endless(id as u32, 100, 10)).unwrap();
    }
    while rig.outcome(ticket(1)).is_none() && rig.sending().is_empty() {
        rig.plan();
        rig.complete();
    }
    assert!(rig.plan(), "the second prompt's chunk is in flight");
    assert!(rig.cancel(ticket(3)), "queued");
    assert!(rig.cancel(ticket(2)), "in flight");
    assert!(rig.cancel(ticket(1)), "sending");
    assert!(!rig.cancel(ticket(1)));
    assert!(!rig.cancel(ticket(9)));
    assert_eq!([1, 2, 3].map(|id| rig.outcome(ticket(id))), [aborted(AbortReason::Cancelled); 3]);
    assert_eq!(rig.scheduler.counts().pinned, 2);
    rig.fail_transfer(ticket(1));
    rig.fail_transfer(ticket(2));
    assert_eq!(rig.scheduler.counts().pinned, 1, "a step in flight still writes");
    assert!(!rig.all_free());
    while rig.complete() {}
    assert!(rig.all_free());
    rig.submit(ticket(4), endless(4, 100, 10)).unwrap();
    rig.run();
    rig.deliver(ticket(4));
    rig.check_first_token(ticket(4));
}

#[test]
fn a_transfer_that_fails_while_computing_stops_the_prompt() {
    let mut rig = PrefillRig::new(config(1, 32));
    rig.submit(ticket(1), endless(1, 100, 10)).unwrap();
    rig.submit(ticket(2), endless(2, 100, 10)).unwrap();
    rig.plan();
    rig.fail_transfer(ticket(1));
    assert_eq!(rig.outcome(ticket(1)), aborted(AbortReason::TransferFailed));
    assert_eq!(rig.scheduler.counts().pinned, 1);
    rig.run();
    assert_eq!(rig.records[&ticket(1)].first_token, None);
    rig.deliver(ticket(2));
    assert!(rig.all_free());
}

#[test]
fn a_prompt_without_numbers_ends_and_the_next_is_computed() {
    let mut rig = PrefillRig::new(config(1, 32));
    rig.submit(ticket(1), endless(1, 100, 10)).unwrap();
    rig.submit(ticket(2), endless(2, 100, 10)).unwrap();
    rig.engine.broken.insert(types::SlotId(0));
    while rig.outcome(ticket(1)).is_none() {
        rig.plan();
        rig.complete();
    }
    assert_eq!(rig.outcome(ticket(1)), aborted(AbortReason::NotANumber));
    assert_eq!(rig.records[&ticket(1)].first_token, None);
    assert!(rig.aborts.contains(&ticket(1)), "what was sent of it must not be committed");
    rig.engine.broken.clear();
    rig.fail_transfer(ticket(1));
    rig.run();
    rig.deliver(ticket(2));
    rig.check_first_token(ticket(2));
    assert!(rig.all_free());
}

#[test]
fn three_prompts_in_succession_without_a_number_are_the_weights_fault() {
    let mut rig = PrefillRig::new(config(3, 128));
    rig.engine.broken.extend((0..3).map(types::SlotId));
    for id in 1..=3 {
        rig.submit(ticket(id), endless(id as u32, 100, 10)).unwrap();
    }
    let completed = [(); 3].map(|()| {
        let step = rig.scheduler.plan().expect("a prompt waits");
        let output = rig.engine.execute(&step.plan);
        rig.scheduler.complete(output, &mut Vec::new())
    });
    assert_eq!(completed, [Ok(()), Ok(()), Err(StepMismatch::NotNumbers { step: 2, sequences: 3 })]);
}

#[test]
fn deadlines_end_what_waits_and_what_computes() {
    let mut rig = PrefillRig::new(config(1, 32));
    let start = rig.now;
    rig.submit(ticket(1), endless(1, 100, 10)).unwrap();
    rig.now += Duration::from_secs(1);
    rig.submit(ticket(2), endless(2, 100, 10)).unwrap();
    rig.plan();
    assert_eq!(rig.scheduler.next_deadline(), Some(start + Duration::from_secs(5)));
    rig.now = start + Duration::from_secs(5);
    rig.expire();
    assert_eq!(rig.outcome(ticket(1)), aborted(AbortReason::Expired));
    assert_eq!(rig.outcome(ticket(2)), None);
    rig.now = start + Duration::from_secs(6);
    rig.expire();
    assert_eq!(rig.outcome(ticket(2)), aborted(AbortReason::Expired));
    rig.fail_transfer(ticket(1));
    rig.complete();
    assert!(rig.all_free());
}

#[test]
fn counts_tell_how_much_waits() {
    let mut rig = PrefillRig::new(config(1, 32));
    rig.submit(ticket(1), endless(1, 100, 10)).unwrap();
    rig.submit(ticket(2), endless(2, 50, 10)).unwrap();
    assert_eq!(rig.scheduler.counts().pending_tokens, 150);
    rig.plan();
    let counts = rig.scheduler.counts();
    assert_eq!((counts.queued, counts.computing, counts.pending_tokens, counts.steps), (1, 1, 118, 0));
    assert_eq!((counts.full.live, counts.full.reserved), (2, 5), "100 tokens are 7 pages, 32 of them are computed");
    rig.complete();
    assert_eq!(rig.scheduler.counts().steps, 1);
}

#[test]
fn a_config_that_could_strand_a_prompt_is_refused() {
    let field = |change: fn(&mut scheduler::PrefillConfig)| {
        let mut config = config(1, 32);
        change(&mut config);
        PrefillScheduler::new(config, &layout(1)).err().map(|error| error.field)
    };
    assert_eq!(field(|_| {}), None);
    assert_eq!(field(|c| c.full_pages = 74), Some("full_pages"));
    // A chunk of 32 and a window of 127 before it: 159 positions, 11 pages.
    assert_eq!(field(|c| c.window_pages = 11), None);
    assert_eq!(field(|c| c.window_pages = 10), Some("window_pages"));
    assert_eq!(field(|c| c.chunk_tokens = 0), Some("chunk_tokens"));
    assert_eq!(field(|c| c.max_prompts = 0), Some("max_prompts"));
    assert_eq!(field(|c| c.max_queued = 0), Some("max_queued"));
}
