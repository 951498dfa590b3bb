//! A decode scheduler, an engine and senders, driven step by step.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use kv::{KvSlice, PageMap, PageTables};
use scheduler::Taken;
use scheduler::plan::StepPlan;
use scheduler::{
    AbortReason, DecodeAction, DecodeConfig, DecodeScheduler, MaskPromise, Outcome, Phase, Refusal, ReserveRequest,
    SequenceSpec, TicketError,
};
use types::{DpGroup, KvLayout, PeerId, SlotGroups, TicketId, TokenId};

use crate::paged_engine::PagedEngine;
use crate::{layout, peer, reference, sampled};

pub(crate) const TTL: Duration = Duration::from_secs(5);

pub(crate) fn config(max_sequences: u32, full_pages: u32, lookahead: bool) -> DecodeConfig {
    DecodeConfig {
        max_sequences,
        dp: 1,
        max_context_tokens: 1200,
        growth_tokens: 32,
        max_row_tokens: 1,
        full_pages,
        window_pages: max_sequences * 9,
        ticket_ttl: TTL,
        lookahead,
        remembered_tickets: 1000,
    }
}

/// The sender's side of one ticket.
pub(crate) struct Sender {
    /// The attention group that the ticket's pages are in.
    pub(crate) group: DpGroup,
    pub(crate) peer: PeerId,
    pub(crate) layout: KvLayout,
    pub(crate) map: PageMap,
    context: Vec<TokenId>,
    first: TokenId,
    pub(crate) tables: Option<PageTables>,
    pub(crate) unsent: Vec<KvSlice>,
}

/// What came out for one ticket.
#[derive(Default)]
pub(crate) struct Record {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) outcome: Option<Outcome>,
}

pub(crate) struct DecodeRig {
    pub(crate) scheduler: DecodeScheduler,
    pub(crate) engine: PagedEngine,
    pub(crate) now: Instant,
    pub(crate) specs: BTreeMap<TicketId, SequenceSpec>,
    pub(crate) senders: BTreeMap<TicketId, Sender>,
    pub(crate) records: BTreeMap<TicketId, Record>,
    /// Tickets in the order of their commits.
    pub(crate) committed: Vec<TicketId>,
    /// Fences asked for and not given.
    pub(crate) fences: BTreeSet<TicketId>,
    /// Plans handed to the engine. It runs a step only when the host waits for it: as late as a device may.
    pub(crate) plans: VecDeque<StepPlan>,
    /// Masks promised, oldest first: ticket, output index, promise.
    pub(crate) masks: Vec<(TicketId, u32, MaskPromise)>,
    max_context_tokens: usize,
}

impl DecodeRig {
    pub(crate) fn new(config: DecodeConfig) -> Self {
        let max_context_tokens = config.max_context_tokens as usize;
        let slots = SlotGroups::new(config.max_sequences, config.dp).expect("the test's slots divide");
        Self {
            scheduler: DecodeScheduler::new(config, layout(4)).expect("the test's configuration is sound"),
            engine: PagedEngine::new(slots),
            now: Instant::now(),
            specs: BTreeMap::new(),
            senders: BTreeMap::new(),
            records: BTreeMap::new(),
            committed: Vec::new(),
            fences: BTreeSet::new(),
            plans: VecDeque::new(),
            masks: Vec::new(),
            max_context_tokens,
        }
    }

    /// Carries out the actions, and checks what must hold of each.
    fn absorb(&mut self, actions: Vec<DecodeAction>) {
        for action in actions {
            match action {
                DecodeAction::Mask { ticket, index, promise } => self.masks.push((ticket, index, promise)),
                DecodeAction::Fence { ticket } => {
                    assert!(self.records[&ticket].outcome.is_some(), "a fence follows the end");
                    assert!(self.fences.insert(ticket), "{ticket} is fenced once");
                }
                DecodeAction::Token { ticket, index, token } => {
                    let record = self.records.get_mut(&ticket).expect("tokens are of reserved tickets");
                    assert!(record.outcome.is_none(), "{ticket}: a token after the end");
                    let next = self.specs[&ticket].generated.len() + record.tokens.len();
                    assert_eq!(index as usize, next, "{ticket}: tokens in order");
                    record.tokens.push(token.token);
                }
                DecodeAction::Ended { ticket, outcome } => {
                    if outcome == Outcome::Preempted {
                        self.check_youngest(ticket);
                    }
                    let record = self.records.get_mut(&ticket).expect("only reserved tickets end");
                    assert_eq!(record.outcome.replace(outcome), None, "{ticket} ends once");
                }
            }
        }
    }

    /// Who gives way is the youngest of its own attention group.
    fn check_youngest(&self, ticket: TicketId) {
        let younger = self.committed.iter().skip_while(|other| **other != ticket).skip(1);
        let in_group = younger.filter(|other| self.senders[other].group == self.senders[&ticket].group);
        for other in in_group {
            assert!(self.records[other].outcome.is_some(), "{ticket} gave way before {other}, which is younger");
        }
    }

    fn act<R>(&mut self, call: impl FnOnce(&mut DecodeScheduler, &mut Vec<DecodeAction>) -> R) -> R {
        let mut out = Vec::new();
        let result = call(&mut self.scheduler, &mut out);
        self.absorb(out);
        result
    }

    pub(crate) fn reserve(&mut self, ticket: TicketId, from: &PeerId, spec: SequenceSpec) -> Result<(), Refusal> {
        let request = ReserveRequest { ticket, prefill: from.clone(), sequence: spec.clone() };
        let reservation = self.scheduler.reserve(self.now, request)?;
        assert_eq!(reservation.deadline, self.now + TTL);
        let layout = layout([1, 2, 4][ticket.0 as usize % 3]);
        let map = PageMap::new(&layout, &crate::layout(4), spec.context_tokens()).expect("the layouts fit");
        let context = spec.prompt.iter().chain(&spec.generated).copied().collect();
        let (unsent, peer) = (map.slices().collect(), from.clone());
        let first = reference(&spec, self.max_context_tokens).0[0];
        let group = reservation.group;
        self.senders.insert(ticket, Sender { group, peer, layout, map, context, first, tables: None, unsent });
        self.specs.insert(ticket, spec);
        assert!(self.records.insert(ticket, Record::default()).is_none(), "{ticket} was reserved twice");
        Ok(())
    }

    pub(crate) fn begin(&mut self, ticket: TicketId) -> Result<(), TicketError> {
        let sender = self.senders.get_mut(&ticket).expect("the test reserved it");
        sender.tables = Some(self.scheduler.begin_landing(ticket, &sender.peer, &sender.layout)?);
        Ok(())
    }

    /// Sends the unsent slice number `pick`, modulo their number.
    pub(crate) fn send(&mut self, ticket: TicketId, pick: usize) -> Result<u32, TicketError> {
        let sender = self.senders.get_mut(&ticket).expect("the test reserved it");
        let slice = sender.unsent.swap_remove(pick % sender.unsent.len());
        let tables = sender.tables.as_ref().expect("the test began landing");
        let tokens = self.engine.slice_of(&sender.map, &sender.context, &slice);
        self.engine.write_slice(sender.group, tables, &slice, &tokens);
        self.scheduler.slice_arrived(ticket, &sender.peer, &slice)
    }

    pub(crate) fn send_all(&mut self, ticket: TicketId) {
        while !self.senders[&ticket].unsent.is_empty() {
            let missing = self.send(ticket, 0).expect("the slice is expected");
            assert_eq!(missing as usize, self.senders[&ticket].unsent.len());
        }
    }

    /// A sender that nobody has fenced goes on writing: garbage, over everything that it could ever reach.
    pub(crate) fn scribble(&mut self, ticket: TicketId) {
        let sender = &self.senders[&ticket];
        let Some(tables) = &sender.tables else { return };
        for slice in sender.map.slices() {
            let garbage = vec![666; slice.head_count as usize * 16];
            self.engine.write_slice(sender.group, tables, &slice, &garbage);
        }
    }

    pub(crate) fn commit(&mut self, ticket: TicketId) -> Result<Taken, TicketError> {
        let (peer, first) = (self.senders[&ticket].peer.clone(), sampled(self.senders[&ticket].first));
        let taken = self.act(|scheduler, out| scheduler.commit(ticket, &peer, first, out));
        if taken == Ok(Taken::First) {
            self.committed.push(ticket);
        }
        taken
    }

    /// The attention group that took a ticket in.
    pub(crate) fn group(&self, ticket: TicketId) -> DpGroup {
        self.senders[&ticket].group
    }

    /// Reserve, land, commit.
    pub(crate) fn join(&mut self, ticket: TicketId, spec: SequenceSpec) {
        self.reserve(ticket, &peer("prefill", 1), spec).expect("there is room");
        self.begin(ticket).expect("the ticket is reserved");
        self.send_all(ticket);
        assert_eq!(self.commit(ticket), Ok(Taken::First));
    }

    pub(crate) fn cancel(&mut self, ticket: TicketId) -> Option<Phase> {
        self.act(|scheduler, out| scheduler.cancel(ticket, AbortReason::Cancelled, out)).ok()
    }

    pub(crate) fn expire(&mut self) {
        let now = self.now;
        self.act(|scheduler, out| scheduler.expire(now, out));
    }

    pub(crate) fn peer_lost(&mut self, peer: &PeerId) {
        self.act(|scheduler, out| scheduler.peer_lost(peer, out));
    }

    pub(crate) fn fence(&mut self, ticket: TicketId) {
        if let Some(sender) = self.senders.get_mut(&ticket) {
            sender.tables = None;
        }
        self.act(|scheduler, out| scheduler.fenced(ticket, out));
        self.fences.remove(&ticket);
    }

    pub(crate) fn plan(&mut self) -> bool {
        let plan = self.act(|scheduler, out| scheduler.plan(out));
        let planned = plan.is_some();
        self.plans.extend(plan);
        planned
    }

    pub(crate) fn complete(&mut self) -> bool {
        let Some(plan) = self.plans.pop_front() else { return false };
        let output = self.engine.execute(&plan);
        self.act(|scheduler, out| scheduler.complete(output, out)).expect("the output is the plan's");
        true
    }

    /// Steps until nothing more can be planned; returns their number.
    pub(crate) fn run(&mut self) -> u32 {
        for steps in 0..20_000 {
            let planned = self.plan();
            // With lookahead, a second plan before the first is complete.
            self.plan();
            if !self.complete() && !planned {
                return steps;
            }
        }
        panic!("the batch never ends");
    }

    pub(crate) fn outcome(&self, ticket: TicketId) -> Option<Outcome> {
        self.records[&ticket].outcome
    }

    /// Every ticket's tokens are a prefix of a monolithic run's, and all of it if it finished.
    pub(crate) fn check_tokens(&self) {
        for (ticket, record) in &self.records {
            let (tokens, finish) = reference(&self.specs[ticket], self.max_context_tokens);
            assert!(tokens.starts_with(&record.tokens), "{ticket}: {:?} is not in {tokens:?}", record.tokens);
            if let Some(Outcome::Finished(reason)) = record.outcome {
                assert_eq!((&record.tokens, reason), (&tokens, finish), "{ticket}");
            }
        }
    }
}
