//! Random interleavings of everything that can happen to a prefill worker, with prompts that often begin alike.

use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::Index;
use scheduler::PrefillOutcome;
use types::TicketId;

use crate::prefill_rig::{MAX_CONTEXT, PrefillRig, config};
use crate::{endless, reference, spec, ticket};

#[derive(Debug, Clone)]
enum Event {
    Submit { like: u32, common_tokens: u32, prompt_tokens: u32, max_tokens: u32, resumed: u32, stops: bool },
    Plan,
    Complete,
    Deliver(Index),
    FailTransfer(Index),
    AckAbort(Index),
    Cancel(Index),
    Pass(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let prompt_tokens = prop_oneof![Just(1u32), Just(127), Just(128), Just(129), 1..400u32];
    let common_tokens = prop_oneof![Just(0u32), Just(16), Just(128), Just(129), 1..400u32];
    let (beginning, end) = ((0..2u32, common_tokens), (1..30u32, 0..20u32, any::<bool>()));
    let submit = (beginning, prompt_tokens, end).prop_map(|((like, common_tokens), prompt_tokens, end)| {
        let (max_tokens, resumed, stops) = end;
        let resumed = resumed.min(max_tokens - 1);
        Event::Submit { like, common_tokens, prompt_tokens, max_tokens, resumed, stops }
    });
    prop_oneof![
        4 => submit,
        10 => Just(Event::Plan),
        10 => Just(Event::Complete),
        4 => any::<Index>().prop_map(Event::Deliver),
        1 => any::<Index>().prop_map(Event::FailTransfer),
        2 => any::<Index>().prop_map(Event::AckAbort),
        1 => any::<Index>().prop_map(Event::Cancel),
        1 => (0..1_000u64).prop_map(Event::Pass),
    ]
}

fn pick(tickets: &[TicketId], pick: Index) -> Option<TicketId> {
    (!tickets.is_empty()).then(|| *pick.get(tickets))
}

fn apply(rig: &mut PrefillRig, event: Event) {
    match event {
        Event::Submit { like, common_tokens, prompt_tokens, max_tokens, resumed, stops } => {
            let id = rig.records.len() as u32 + 1;
            let mut spec = if stops { spec } else { endless }(id, prompt_tokens, max_tokens);
            let common = endless(1_000 + like, common_tokens, 1).prompt;
            spec.prompt = common.iter().chain(&*spec.prompt).copied().collect();
            let (output, _) = reference(&spec, MAX_CONTEXT);
            spec.generated = output[..(resumed as usize).min(output.len() - 1)].to_vec();
            // A refusal is an answer too: the queue is short on purpose.
            let _ = rig.submit(ticket(id.into()), spec);
        }
        Event::Plan => {
            rig.plan();
        }
        Event::Complete => {
            rig.complete();
        }
        Event::Deliver(index) => {
            if let Some(id) = pick(&rig.sending(), index) {
                rig.deliver(id);
            }
        }
        Event::FailTransfer(index) => {
            let open: Vec<TicketId> = rig.outbox.keys().copied().collect();
            if let Some(id) = pick(&open, index) {
                rig.fail_transfer(id);
            }
        }
        Event::AckAbort(index) => {
            let aborts: Vec<TicketId> = rig.aborts.iter().copied().collect();
            if let Some(id) = pick(&aborts, index) {
                rig.fail_transfer(id);
            }
        }
        Event::Cancel(index) => {
            let ids: Vec<TicketId> = rig.records.keys().copied().collect();
            if let Some(id) = pick(&ids, index) {
                let live = rig.outcome(id).is_none();
                assert_eq!(rig.cancel(id), live);
            }
        }
        Event::Pass(ms) => {
            rig.now += Duration::from_millis(ms);
            rig.expire();
        }
    }
    let counts = rig.scheduler.counts();
    for pool in [counts.full, counts.window] {
        assert_eq!(pool.free + pool.reserved + pool.live + pool.cached, pool.total, "{pool:?}");
    }
}

/// Every transfer ends: then every prompt must end by itself.
fn settle(rig: &mut PrefillRig) {
    for _ in 0..100 {
        rig.run();
        for id in rig.aborts.clone() {
            rig.fail_transfer(id);
        }
        for id in rig.sending() {
            rig.deliver(id);
        }
    }
    for (id, record) in &rig.records {
        let outcome = record.outcome.unwrap_or_else(|| panic!("{id} never ended"));
        if matches!(outcome, PrefillOutcome::Sent | PrefillOutcome::Finished(_)) {
            rig.check_first_token(*id);
        }
    }
    assert!(rig.all_free(), "{:?}", rig.scheduler.counts());
    let began = rig.began.iter();
    assert!(began.is_sorted(), "first come, first served");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    /// No page leaks, each prompt ends exactly once with the right first token, and the bytes of a transfer are right however late they
    /// are read.
    #[test]
    fn any_interleaving_ends_well(
        events in prop::collection::vec(event(), 1..150),
        max_prompts in 1..4u32,
        chunk_tokens in 1..200u32,
        spare_full_pages in 0..60u32,
        spare_window_pages in 0..30u32,
    ) {
        let mut config = config(max_prompts, chunk_tokens);
        let shape = kv::PageShape::of(&crate::layout(2));
        config.full_pages = 75 + spare_full_pages;
        config.window_pages = config.window_pages_per_prompt(shape, 1199) + spare_window_pages;
        let mut rig = PrefillRig::new(config);
        for event in events {
            apply(&mut rig, event);
        }
        settle(&mut rig);
    }
}
