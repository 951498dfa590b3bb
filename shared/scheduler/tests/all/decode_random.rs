//! Random interleavings of everything that can happen to a decode worker.

use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::Index;
use scheduler::{Outcome, Phase, Refusal, SequenceSpec, TicketError};
use types::{PeerId, TicketId};

use crate::decode_rig::{DecodeRig, config};
use crate::{endless, peer, reference, spec, ticket};

#[derive(Debug, Clone)]
enum Event {
    Reserve { prompt_tokens: u32, max_tokens: u32, resumed: u32, stops: bool, incarnation: u64 },
    Begin(Index),
    Landing(Index, LandingEvent),
    LateMessages(Index),
    Cancel(Index),
    Pass(u64),
    PeerLost(u64),
    Fence(Index),
    Scribble,
    Plan,
    Complete,
}

/// What may happen to a ticket that is landing.
#[derive(Debug, Clone)]
enum LandingEvent {
    Send(u8),
    SendAllAndCommit,
    Commit,
    WriterGone,
    Duplicate,
}

fn landing_event() -> impl Strategy<Value = LandingEvent> {
    prop_oneof![
        3 => any::<u8>().prop_map(LandingEvent::Send),
        6 => Just(LandingEvent::SendAllAndCommit),
        1 => Just(LandingEvent::Commit),
        1 => Just(LandingEvent::WriterGone),
        1 => Just(LandingEvent::Duplicate),
    ]
}

fn event() -> impl Strategy<Value = Event> {
    let prompt_tokens = prop_oneof![Just(1u32), Just(127), Just(128), Just(129), 1..300u32];
    let reserve = (prompt_tokens, 1..60u32, 0..20u32, any::<bool>(), 1..3u64).prop_map(
        |(prompt_tokens, max_tokens, resumed, stops, incarnation)| {
            let resumed = resumed.min(max_tokens - 1);
            Event::Reserve { prompt_tokens, max_tokens, resumed, stops, incarnation }
        },
    );
    prop_oneof![
        4 => reserve,
        4 => any::<Index>().prop_map(Event::Begin),
        12 => (any::<Index>(), landing_event()).prop_map(|(pick, event)| Event::Landing(pick, event)),
        1 => any::<Index>().prop_map(Event::LateMessages),
        1 => any::<Index>().prop_map(Event::Cancel),
        1 => (0..2_000u64).prop_map(Event::Pass),
        1 => (1..3u64).prop_map(Event::PeerLost),
        2 => any::<Index>().prop_map(Event::Fence),
        2 => Just(Event::Scribble),
        12 => Just(Event::Plan),
        12 => Just(Event::Complete),
    ]
}

struct Run {
    rig: DecodeRig,
    /// Slots of each attention group.
    per_group: u32,
    reserved: u128,
}

impl Run {
    fn in_phase(&self, phase: Phase) -> Vec<TicketId> {
        self.rig.records.keys().copied().filter(|id| self.rig.scheduler.phase(*id) == Some(phase)).collect()
    }

    fn pick(&self, phase: Phase, pick: Index) -> Option<TicketId> {
        let tickets = self.in_phase(phase);
        (!tickets.is_empty()).then(|| *pick.get(&tickets))
    }

    fn reserve(&mut self, from: &PeerId, spec: SequenceSpec) {
        self.reserved += 1;
        // A refusal is an answer too: pools and slots are tight on purpose.
        if let Err(Refusal::NoSlot { max_sequences }) = self.rig.reserve(ticket(self.reserved), from, spec) {
            assert_eq!(self.live().count() as u32, max_sequences, "a slot is free in some group");
        }
    }

    fn live(&self) -> impl Iterator<Item = TicketId> {
        self.rig.records.iter().filter(|(_, record)| record.outcome.is_none()).map(|(id, _)| *id)
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Reserve { prompt_tokens, max_tokens, resumed, stops, incarnation } => {
                let make = if stops { spec } else { endless };
                let mut spec = make(self.reserved as u32, prompt_tokens, max_tokens);
                let (output, _) = reference(&spec, 1200);
                // An earlier attempt delivered some tokens, not the last.
                spec.generated = output[..(resumed as usize).min(output.len() - 1)].to_vec();
                self.reserve(&peer("prefill", incarnation), spec);
            }
            Event::Begin(pick) => {
                if let Some(id) = self.pick(Phase::Reserved, pick) {
                    self.rig.begin(id).expect("the event fits the ticket's phase");
                }
            }
            Event::Landing(pick, event) => {
                if let Some(id) = self.pick(Phase::Landing, pick) {
                    self.apply_to_landing(id, event);
                }
            }
            Event::LateMessages(pick) => {
                let ended = |id: &TicketId| matches!(self.rig.records[id].outcome, Some(Outcome::Aborted(_)));
                let ended: Vec<TicketId> = self.rig.records.keys().copied().filter(ended).collect();
                if !ended.is_empty() {
                    let id = *pick.get(&ended);
                    assert!(matches!(self.rig.commit(id), Err(TicketError::Gone(_))));
                    assert!(self.rig.cancel(id).is_none());
                    assert!(matches!(self.rig.begin(id), Err(TicketError::Gone(_))));
                }
            }
            Event::Cancel(pick) => {
                let ids: Vec<TicketId> = self.rig.records.keys().copied().collect();
                if !ids.is_empty() {
                    let id = *pick.get(&ids);
                    let ended = self.rig.outcome(id).is_some();
                    assert_eq!(self.rig.cancel(id).is_none(), ended);
                }
            }
            Event::Pass(ms) => {
                self.rig.now += Duration::from_millis(ms);
                self.rig.expire();
            }
            Event::PeerLost(incarnation) => self.rig.peer_lost(&peer("prefill", incarnation)),
            Event::Fence(pick) => {
                let waiting: Vec<TicketId> = self.rig.fences.iter().copied().collect();
                if !waiting.is_empty() {
                    self.rig.fence(*pick.get(&waiting));
                }
            }
            Event::Scribble => {
                for id in self.rig.fences.clone() {
                    self.rig.scribble(id);
                }
            }
            Event::Plan => {
                self.rig.plan();
            }
            Event::Complete => {
                self.rig.complete();
            }
        }
        self.check_counts();
    }

    fn apply_to_landing(&mut self, id: TicketId, event: LandingEvent) {
        let missing = self.rig.senders[&id].unsent.len();
        match event {
            LandingEvent::Send(count) => {
                for i in 0..missing.min(count.into()) {
                    self.rig.send(id, i).expect("the slice is expected");
                }
            }
            LandingEvent::SendAllAndCommit => {
                self.rig.send_all(id);
                self.rig.commit(id).expect("everything has landed");
            }
            LandingEvent::Commit => match self.rig.commit(id) {
                Ok(_) => assert_eq!(missing, 0),
                Err(TicketError::Incomplete(incomplete)) => assert_eq!(incomplete.missing as usize, missing),
                Err(error) => panic!("{error}"),
            },
            LandingEvent::WriterGone => {
                self.rig.fence(id);
                assert_eq!(self.rig.outcome(id).is_none(), missing == 0);
            }
            LandingEvent::Duplicate => self.duplicate(id),
        }
    }

    fn duplicate(&mut self, id: TicketId) {
        let sender = &self.rig.senders[&id];
        let Some(slice) = sender.map.slices().find(|slice| !sender.unsent.contains(slice)) else { return };
        let refused = self.rig.scheduler.slice_arrived(id, &sender.peer, &slice).expect_err("it had arrived");
        let duplicate = TicketError::Slice(kv::SliceError::Duplicate { slice });
        // Nobody may send once the writer is fenced, not even what had arrived.
        assert!(refused == duplicate || matches!(refused, TicketError::Gone(_)), "{refused}");
    }

    fn check_counts(&self) {
        let counts = self.rig.scheduler.counts();
        for (group, pages, pool) in self.rig.scheduler.pool_counts() {
            let sum = pool.free + pool.reserved + pool.landing + pool.live + pool.quarantined;
            assert_eq!(sum, pool.total, "group {group}: {pool:?}");
            if !self.rig.fences.iter().any(|id| self.rig.group(*id) == group) {
                assert_eq!(pool.quarantined, 0, "group {group}: {pages} pages wait without a reason");
            }
            let num_live = self.live().filter(|id| self.rig.group(*id) == group).count() as u32;
            assert!(num_live <= self.per_group, "group {group} has {num_live} of {} slots", self.per_group);
        }
        let live = self.live().count() as u32;
        assert_eq!(counts.reserved + counts.landing + counts.committed + counts.running, live);
    }

    /// Every sender finishes, every writer is fenced: then the batch must run dry by itself.
    fn settle(&mut self) {
        for id in self.in_phase(Phase::Reserved) {
            self.rig.begin(id).expect("the event fits the ticket's phase");
        }
        for id in self.in_phase(Phase::Landing) {
            self.rig.send_all(id);
            self.rig.commit(id).expect("the event fits the ticket's phase");
        }
        for id in self.rig.fences.clone() {
            self.rig.fence(id);
        }
        self.rig.run();
        for (id, record) in &self.rig.records {
            assert!(record.outcome.is_some(), "{id} never ended");
        }
        self.rig.check_tokens();
        let counts = self.rig.scheduler.counts();
        assert!(self.rig.scheduler.is_idle(), "{counts:?}");
        // Every slot is back as well.
        for _ in 0..counts.slots {
            self.reserved += 1;
            self.rig
                .reserve(ticket(self.reserved), &peer("prefill", 1), spec(1, 1, 1))
                .expect("the event fits the ticket's phase");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    /// With one attention group or several: no page leaks, each ticket ends exactly once, its tokens come in order and
    /// are those of a monolithic run, however late the engine runs its steps and whatever an unfenced writer does to
    /// its pages.
    #[test]
    fn any_interleaving_ends_well(
        events in prop::collection::vec(event(), 1..250),
        (max_sequences, dp) in prop_oneof![Just((6, 1)), Just((6, 2)), Just((8, 4))],
        lookahead in any::<bool>(),
        full_pages in 75..140u32,
        growth_tokens in 0..64u32,
    ) {
        let per_group = max_sequences / dp;
        let window_pages = per_group * 9;
        let config = scheduler::DecodeConfig { dp, growth_tokens, window_pages, ..config(max_sequences, full_pages, lookahead) };
        let mut run = Run { rig: DecodeRig::new(config), per_group, reserved: 0 };
        for event in events {
            run.apply(event);
        }
        run.settle();
    }
}
