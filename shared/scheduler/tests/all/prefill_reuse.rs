//! Prompts that begin like earlier ones: what is computed, what is sent, and what is kept.
#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

use scheduler::plan::StepOutput;
use scheduler::{PrefillOutcome, SequenceSpec, StepMismatch};
use types::{CacheSalt, TokenId};

use crate::prefill_rig::{MAX_CONTEXT, PrefillRig, config};
use crate::{CONTEXTS, endless, reference, ticket};

/// The first `len` tokens of one long prompt.
fn prompt(len: u32) -> SequenceSpec {
    beginning_with(&[], len)
}

/// `common`, then tokens that depend on `len`'s parity alone.
fn beginning_with(common: &[TokenId], len: u32) -> SequenceSpec {
    let spec = endless(1, len - common.len() as u32, 10);
    SequenceSpec { prompt: common.iter().chain(&*spec.prompt).copied().collect(), ..spec }
}

/// Computes and delivers a prompt, all of whose bytes and whose token are checked; yields the tokens reused and the chunks computed.
fn serve(rig: &mut PrefillRig, spec: SequenceSpec) -> (u32, Vec<std::ops::Range<u32>>) {
    let id = ticket(rig.records.len() as u128 + 1);
    rig.submit(id, spec).unwrap();
    let mut chunks = Vec::new();
    loop {
        while rig.plan() {
            chunks.push(rig.steps.back().unwrap().positions.clone());
        }
        if !rig.complete() {
            break;
        }
    }
    rig.check_first_token(id);
    rig.deliver(id);
    (rig.records[&id].cached_tokens, chunks)
}

#[test]
fn bytes_and_tokens_are_right_behind_every_boundary() {
    for chunk_tokens in [1200, 64, 100, 7] {
        for first in CONTEXTS {
            for second in [first, first + 1, first + 16, first + 70] {
                let mut rig = PrefillRig::new(config(1, chunk_tokens));
                serve(&mut rig, prompt(first));
                let (reused, chunks) = serve(&mut rig, prompt(second));
                let case = format!("{first}, then {second} tokens in chunks of {chunk_tokens}");
                assert_eq!(reused, (first - 1) / 16 * 16, "{case}");
                assert_eq!((chunks[0].start, chunks.last().unwrap().end), (reused, second), "{case}");
                assert!(rig.all_free(), "{case}");
            }
        }
    }
}

#[test]
fn a_common_beginning_is_computed_twice_and_found_by_the_third() {
    for chunk_tokens in [1200, 64, 30] {
        let mut rig = PrefillRig::new(config(2, chunk_tokens));
        let system = prompt(500).prompt;
        let reused: Vec<u32> = (0..4u32)
            .map(|user| {
                let own = endless(100 + user, 200, 10).prompt;
                let prompt = system.iter().chain(&*own).copied().collect();
                serve(&mut rig, SequenceSpec { prompt, ..endless(1, 1, 10) }).0
            })
            .collect();
        assert_eq!(reused, [0, 0, 496, 496], "chunks of {chunk_tokens}");
        let reuse = rig.scheduler.counts().reuse;
        assert_eq!((reuse.looked_up_tokens, reuse.reused_tokens), (4 * 700, 2 * 496));
        assert_eq!(reuse.boundaries, 5, "four ends and where they part");
    }
}

#[test]
fn salts_are_kept_apart_and_resumed_sequences_reuse_what_they_generated() {
    let mut rig = PrefillRig::new(config(1, 64));
    let salted = |salt: &[u8]| SequenceSpec { cache_salt: CacheSalt::new(salt).ok(), ..prompt(300) };
    let reused: Vec<u32> =
        [b"a", b"b", b"" as &[u8], b"a", b""].into_iter().map(|salt| serve(&mut rig, salted(salt)).0).collect();
    assert_eq!(reused, [0, 0, 0, 288, 288]);
    let mut resumed = SequenceSpec { max_tokens: 100, ..prompt(300) };
    resumed.generated = reference(&resumed, MAX_CONTEXT).0[..50].to_vec();
    let (cached_tokens, chunks) = serve(&mut rig, resumed.clone());
    assert_eq!((cached_tokens, chunks[0].start), (288, 288));
    let (cached_tokens, chunks) = serve(&mut rig, resumed);
    assert_eq!((chunks.len(), &chunks[0]), (1, &(336..350)));
    assert_eq!(cached_tokens, 300, "of the prompt's tokens no more are reported than it has");
}

#[test]
fn a_prompt_that_is_given_up_leaves_what_is_complete() {
    let mut rig = PrefillRig::new(config(2, 64));
    rig.submit(ticket(1), prompt(300)).unwrap();
    rig.plan();
    rig.complete();
    rig.plan();
    assert!(rig.cancel(ticket(1)));
    rig.fail_transfer(ticket(1));
    let counts = rig.scheduler.counts();
    assert_eq!((counts.full.cached, counts.pinned), (4, 1), "one chunk is complete");
    assert!(rig.complete());
    assert!(rig.all_free());
    assert_eq!(rig.scheduler.counts().full.cached, 8, "what was in flight is right as well");
    // Without a boundary nothing of it is reused, but it is known where the next one parts from it.
    assert_eq!(serve(&mut rig, prompt(300)).0, 0);
    let own = endless(9, 40, 10).prompt;
    let parts = SequenceSpec { prompt: prompt(128).prompt.iter().chain(&*own).copied().collect(), ..endless(1, 1, 10) };
    assert_eq!(serve(&mut rig, parts).0, 128);
}

#[test]
fn nothing_of_a_step_that_fails_is_kept() {
    let mut rig = PrefillRig::new(config(1, 64));
    rig.submit(ticket(1), prompt(40)).unwrap();
    rig.plan();
    let mut output = rig.engine.execute(&rig.steps[0].plan);
    output.rows[0].sampled = None;
    let failed = rig.scheduler.complete(output, &mut Vec::new());
    assert_eq!(failed, Err(StepMismatch::NoToken { step: 0, slot: 0 }));
    assert_eq!(rig.scheduler.counts().full.cached, 0);
    let failed = rig.scheduler.complete(StepOutput { step: 7, rows: Vec::new() }, &mut Vec::new());
    assert!(matches!(failed, Err(StepMismatch::Step { got: 7, .. })));
    assert_eq!(rig.scheduler.counts().full.cached, 0);
}

#[test]
fn a_prompt_without_numbers_takes_along_what_it_may_have_gone_on_from() {
    let mut rig = PrefillRig::new(config(1, 64));
    serve(&mut rig, prompt(100));
    assert_eq!(rig.scheduler.counts().full.cached, 6);
    rig.engine.broken.insert(types::SlotId(0));
    rig.submit(ticket(2), prompt(200)).unwrap();
    while rig.outcome(ticket(2)).is_none() {
        rig.plan();
        rig.complete();
    }
    rig.fail_transfer(ticket(2));
    assert_eq!(rig.scheduler.counts().full.cached, 0);
    assert!(rig.all_free());
    rig.engine.broken.clear();
    assert_eq!(serve(&mut rig, prompt(200)).0, 0, "computed anew");
}

#[test]
fn a_prompt_that_waits_for_pages_gets_those_that_are_kept() {
    // Pages for one prompt of 1,199 tokens, and what is kept of three others.
    let mut small = config(2, 64);
    (small.full_pages, small.window_pages) = (75, 30);
    let mut rig = PrefillRig::new(small);
    for kind in 1..=3 {
        serve(&mut rig, endless(kind, 300, 10));
    }
    assert_eq!(rig.scheduler.counts().full.cached, 54);
    assert_eq!(serve(&mut rig, endless(4, 1198, 10)).0, 0);
    let counts = rig.scheduler.counts();
    assert_eq!((counts.full.cached, counts.reuse.evicted_full), (74, 54));
    assert!(rig.all_free());
}

#[test]
fn without_reuse_nothing_is_kept() {
    let mut off = config(1, 64);
    off.prefix_reuse = false;
    let mut rig = PrefillRig::new(off);
    for _ in 0..3 {
        assert_eq!(serve(&mut rig, prompt(300)).0, 0);
        let counts = rig.scheduler.counts();
        assert_eq!((counts.full.free, counts.window.free), (75, 75));
        assert_eq!(counts.reuse, kv::PrefixCounts::default());
    }
    assert_eq!(rig.outcome(ticket(3)), Some(PrefillOutcome::Sent));
}

#[test]
fn a_prompt_that_waits_counts_what_is_not_cached_of_it() {
    let mut rig = PrefillRig::new(config(1, 64));
    serve(&mut rig, prompt(300));
    rig.submit(ticket(2), prompt(300)).unwrap();
    rig.submit(ticket(3), endless(7, 100, 10)).unwrap();
    assert_eq!(rig.scheduler.counts().pending_tokens, (300 - 288) + 100);
    rig.run();
    rig.deliver(ticket(2));
    rig.run();
    rig.deliver(ticket(3));
    assert_eq!(rig.scheduler.counts().pending_tokens, 0);
}

#[test]
fn a_prompt_whose_last_chunk_is_planned_sets_no_window_pages_aside() {
    let mut rig = PrefillRig::new(config(1, 64));
    rig.submit(ticket(1), prompt(300)).unwrap();
    rig.plan();
    assert!(rig.scheduler.counts().window.reserved > 0);
    rig.run();
    let counts = rig.scheduler.counts();
    assert_eq!((counts.sending, counts.window.reserved), (1, 0));
    rig.deliver(ticket(1));
    assert!(rig.all_free());
}
