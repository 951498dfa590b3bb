//! A prefill scheduler, an engine and a transport that reads pages as late as it may.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

use kv::{KvSlice, PageMap, PageTables};
use scheduler::{
    AbortReason, PrefillAction, PrefillConfig, PrefillOutcome, PrefillRefusal, PrefillRequest, PrefillScheduler,
    PrefillStep, SequenceSpec, TransferEnd,
};
use types::{DpGroup, FinishReason, TicketId, TokenId};

use crate::paged_engine::PagedEngine;
use crate::{layout, reference};

pub(crate) const MAX_CONTEXT: usize = 1200;

pub(crate) fn config(max_prompts: u32, chunk_tokens: u32) -> PrefillConfig {
    PrefillConfig {
        max_queued: 4,
        max_prompts,
        max_context_tokens: MAX_CONTEXT as u32,
        chunk_tokens,
        full_pages: 75 * max_prompts,
        window_pages: 75 * max_prompts,
        prefix_reuse: true,
        remembered_tickets: 1000,
    }
}

/// What came out for one ticket.
#[derive(Default)]
pub(crate) struct Record {
    pub(crate) first_token: Option<TokenId>,
    pub(crate) cached_tokens: u32,
    pub(crate) finish: Option<FinishReason>,
    pub(crate) outcome: Option<PrefillOutcome>,
}

pub(crate) struct PrefillRig {
    pub(crate) scheduler: PrefillScheduler,
    pub(crate) engine: PagedEngine,
    pub(crate) now: Instant,
    pub(crate) specs: BTreeMap<TicketId, SequenceSpec>,
    pub(crate) records: BTreeMap<TicketId, Record>,
    pub(crate) steps: VecDeque<PrefillStep>,
    /// Slices that are ready and whose bytes nobody has read yet, by open transfer.
    pub(crate) outbox: BTreeMap<TicketId, Vec<(PageTables, KvSlice)>>,
    /// Transfers that must be aborted.
    pub(crate) aborts: BTreeSet<TicketId>,
    /// Order in which prompts began.
    pub(crate) began: Vec<TicketId>,
}

impl PrefillRig {
    pub(crate) fn new(config: PrefillConfig) -> Self {
        Self {
            scheduler: PrefillScheduler::new(config, &layout(2)).expect("the test's configuration is sound"),
            engine: PagedEngine::undivided(),
            now: Instant::now(),
            specs: BTreeMap::new(),
            records: BTreeMap::new(),
            steps: VecDeque::new(),
            outbox: BTreeMap::new(),
            aborts: BTreeSet::new(),
            began: Vec::new(),
        }
    }

    fn act<R>(&mut self, call: impl FnOnce(&mut PrefillScheduler, &mut Vec<PrefillAction>) -> R) -> R {
        let mut out = Vec::new();
        let result = call(&mut self.scheduler, &mut out);
        for action in out {
            match action {
                PrefillAction::FirstToken { ticket, index, token, cached_tokens, finish } => {
                    let record = self.records.get_mut(&ticket).expect("only submitted tickets have tokens");
                    assert!(record.outcome.is_none(), "{ticket}: a token after the end");
                    assert_eq!(index as usize, self.specs[&ticket].generated.len());
                    assert_eq!(record.first_token.replace(token.token), None, "{ticket}: one first token");
                    (record.finish, record.cached_tokens) = (finish, cached_tokens);
                }
                PrefillAction::AbortTransfer { ticket } => {
                    assert!(self.records[&ticket].outcome.is_some(), "an abort follows the end");
                    assert!(self.aborts.insert(ticket));
                }
                PrefillAction::Ended { ticket, outcome } => {
                    let record = self.records.get_mut(&ticket).expect("only submitted tickets end");
                    assert_eq!(record.outcome.replace(outcome), None, "{ticket} ends once");
                }
            }
        }
        result
    }

    pub(crate) fn submit(&mut self, ticket: TicketId, spec: SequenceSpec) -> Result<(), PrefillRefusal> {
        let deadline = self.now + Duration::from_secs(5);
        self.scheduler.submit(PrefillRequest { ticket, sequence: spec.clone(), deadline })?;
        self.specs.insert(ticket, spec);
        self.records.insert(ticket, Record::default());
        Ok(())
    }

    pub(crate) fn plan(&mut self) -> bool {
        let Some(step) = self.scheduler.plan() else { return false };
        assert!(self.steps.is_empty(), "one step is in flight");
        assert_eq!(step.plan.rows.len(), 1, "one prompt at a time");
        if !step.plan.bind.is_empty() {
            self.began.push(step.ticket);
        }
        assert!(
            step.cached.is_empty() || step.cached == (0..step.positions.start),
            "the first chunk goes on behind them"
        );
        if step.publish_kv {
            self.outbox.entry(step.ticket).or_default();
            self.publish(&step, step.cached.clone());
        }
        self.steps.push_back(step);
        true
    }

    fn map(&self, ticket: TicketId) -> PageMap {
        PageMap::new(&layout(2), &layout(4), self.specs[&ticket].context_tokens()).expect("the layouts fit")
    }

    pub(crate) fn complete(&mut self) -> bool {
        let Some(step) = self.steps.pop_front() else { return false };
        let output = self.engine.execute(&step.plan);
        self.publish(&step, step.positions.clone());
        self.act(|scheduler, out| scheduler.complete(output, out)).expect("the output is the plan's");
        true
    }

    /// A transfer that was aborted takes nothing more.
    fn publish(&mut self, step: &PrefillStep, positions: Range<u32>) {
        let map = self.map(step.ticket);
        if let Some(outbox) = self.outbox.get_mut(&step.ticket) {
            for (rank, layers) in [(0, 0..2), (1, 0..2), (0, 2..4), (1, 2..4)] {
                let ready = map.ready_slices(rank, layers, positions.clone());
                outbox.extend(ready.map(|slice| (step.tables.clone(), slice)));
            }
        }
    }

    /// Steps until nothing more can be planned.
    pub(crate) fn run(&mut self) {
        loop {
            self.plan();
            if !self.complete() {
                return;
            }
        }
    }

    /// Tickets that wait for their transfer to be committed.
    pub(crate) fn sending(&self) -> Vec<TicketId> {
        let sending = |(_, record): &(&TicketId, &Record)| record.first_token.is_some() && record.outcome.is_none();
        self.records.iter().filter(sending).map(|(ticket, _)| *ticket).collect()
    }

    /// Reads every byte of the transfer, checks it against the context, and commits.
    pub(crate) fn deliver(&mut self, ticket: TicketId) {
        let map = self.map(ticket);
        let spec = &self.specs[&ticket];
        let context: Vec<TokenId> = spec.prompt.iter().chain(&spec.generated).copied().collect();
        let sent = self.outbox.remove(&ticket).expect("the transfer is open");
        let mut slices = BTreeSet::new();
        for (tables, slice) in &sent {
            let bytes = self.engine.read_slice(DpGroup(0), tables, slice);
            let expected = self.engine.slice_of(&map, &context, slice);
            // Behind the context's end a page holds whatever it held before.
            let known = |(_, expected): &(&TokenId, &TokenId)| **expected != TokenId::MAX;
            assert!(bytes.iter().zip(&expected).filter(known).all(|(a, b)| a == b), "{ticket}: {slice:?}");
            assert!(slices.insert(*slice), "{slice:?} sent twice");
        }
        assert_eq!(slices, map.slices().collect(), "exactly what is expected");
        let end = TransferEnd::Committed;
        self.act(|scheduler, out| scheduler.transfer_ended(ticket, end, out)).expect("the transfer was open");
        assert_eq!(self.records[&ticket].outcome, Some(PrefillOutcome::Sent));
    }

    pub(crate) fn fail_transfer(&mut self, ticket: TicketId) {
        self.outbox.remove(&ticket);
        self.aborts.remove(&ticket);
        let end = TransferEnd::Aborted;
        self.act(|scheduler, out| scheduler.transfer_ended(ticket, end, out)).expect("the transfer was open");
    }

    pub(crate) fn cancel(&mut self, ticket: TicketId) -> bool {
        self.act(|scheduler, out| scheduler.cancel(ticket, AbortReason::Cancelled, out)).is_ok()
    }

    pub(crate) fn expire(&mut self) {
        let now = self.now;
        self.act(|scheduler, out| scheduler.expire(now, out));
    }

    pub(crate) fn outcome(&self, ticket: TicketId) -> Option<PrefillOutcome> {
        self.records[&ticket].outcome
    }

    pub(crate) fn check_first_token(&self, ticket: TicketId) {
        let (tokens, _) = reference(&self.specs[&ticket], MAX_CONTEXT);
        assert_eq!(self.records[&ticket].first_token, Some(tokens[0]), "{ticket}");
    }

    /// Whether nothing is left but pages that are kept for others.
    pub(crate) fn all_free(&self) -> bool {
        let counts = self.scheduler.counts();
        self.scheduler.is_idle()
            && [counts.full, counts.window].iter().all(|pool| pool.free + pool.cached == pool.total)
    }
}
