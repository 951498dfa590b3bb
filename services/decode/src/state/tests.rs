//! Turns by hand: an engine that knows no model, a transport that only takes notes, and a clock that stands still.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use engine::fault::Fault;
use engine::{Engine, EngineError};
use futures_util::{FutureExt, StreamExt};
use kv::PageMap;
use scheduler::plan::{RowFailure, RowOutput, StepOutput, StepPlan};
use scheduler::{DecodeConfig, SequenceSpec};
use transfer::TransferError;
use types::{DecodeEvent, DpGroup, FinishReason, Incarnation, KvDtype, PageId, WorkerId};
use worker::{StepLoopConfig, step_loop};

use super::*;
use crate::flight::{FlightStream, flight};

const TTL: Duration = Duration::from_secs(5);
const VOCAB_SIZE: u32 = 1_100;

fn layout(tp: u32) -> KvLayout {
    KvLayout {
        full_layers: vec![1],
        window_layers: vec![0],
        kv_heads: 2,
        head_dim: 2,
        page_tokens: 4,
        window: 8,
        dtype: KvDtype::F32,
        tp,
    }
}

fn prefill() -> PeerId {
    PeerId { worker: WorkerId("prefill".into()), incarnation: Incarnation(1) }
}

/// Samples 1000 + position, and counts what is written to its cache.
struct CountingEngine {
    rank: u32,
    planned: VecDeque<Arc<StepPlan>>,
    imported: Imported,
    broken: Broken,
}

/// The slot whose logits are no numbers, if it is one.
type Broken = Arc<AtomicU32>;

/// Rank, slice and page of each write.
type Imported = Arc<Mutex<Vec<(u32, KvSlice, PageId)>>>;

impl Engine for CountingEngine {
    fn launch(&mut self, plan: &Arc<StepPlan>) -> Result<(), EngineError> {
        self.planned.push_back(Arc::clone(plan));
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput, EngineError> {
        let plan = self.planned.pop_front().expect("launched before");
        let rows = plan.rows.iter().map(|row| {
            let is_broken = row.slot.0 == self.broken.load(Ordering::Relaxed);
            let token = SampledToken { token: 1_000 + row.position, logprob: None, top: Vec::new() };
            RowOutput {
                slot: row.slot,
                sampled: (!is_broken).then_some(token),
                failure: is_broken.then_some(RowFailure::NotANumber),
                logits: Vec::new(),
            }
        });
        Ok(StepOutput { step: plan.step, rows: rows.collect() })
    }

    fn export_kv(&self, _: &KvSlice, _: PageId, _: &mut [u8]) -> Result<(), EngineError> {
        unreachable!("decode exports nothing")
    }

    fn import_kv(&mut self, slice: &KvSlice, page: PageId, _: &[u8]) -> Result<(), EngineError> {
        self.imported.lock().unwrap().push((self.rank, *slice, page));
        Ok(())
    }
}

/// Answers as told, and notes what was revoked.
struct NotedTransport {
    answer: Mutex<Revoked>,
    revoked: Mutex<Vec<TicketId>>,
    /// Whose pages each ticket lands in.
    landings: Mutex<Vec<(TicketId, DpGroup)>>,
}

impl ReceiveTransport for NotedTransport {
    fn post(&self, _: TicketId, _: &PeerId) -> Result<(), TransferError> {
        Ok(())
    }

    fn land(&self, ticket: TicketId, group: DpGroup, _: &kv::PageTables) {
        self.landings.lock().unwrap().push((ticket, group));
    }

    fn revoke(&self, ticket: TicketId, _: transfer::AbortReason) -> Revoked {
        self.revoked.lock().unwrap().push(ticket);
        *self.answer.lock().unwrap()
    }

    fn num_open(&self) -> usize {
        0
    }
}

fn masks(metrics: &WorkerMetrics) -> worker::MaskThreads {
    let json = include_bytes!("../../../../shared/model/gpt-oss-nano/tokenizer.json");
    let vocabulary = Arc::new(vocabulary::Vocabulary::from_tokenizer_json(json).unwrap());
    let compiler = Arc::new(constraint::Compiler::new(vocabulary));
    worker::MaskThreads::start(&compiler, 1, &metrics.mask_seconds).unwrap()
}

struct ManualClock(Mutex<Instant>);

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        *self.0.lock().unwrap()
    }
}

struct World {
    state: DecodeState,
    transport: Arc<NotedTransport>,
    imported: Imported,
    broken: Broken,
    clock: ManualClock,
    status: Arc<Status>,
    metrics: chassis::Metrics,
    mailbox: worker::Mailbox<Message>,
}

impl World {
    fn new() -> Self {
        Self::with_groups(1)
    }

    /// With `dp` attention groups of two ranks.
    fn with_groups(dp: u32) -> Self {
        let config = DecodeConfig {
            max_sequences: 4,
            dp,
            max_context_tokens: 64,
            growth_tokens: 8,
            max_row_tokens: 1,
            full_pages: 40,
            window_pages: 16,
            ticket_ttl: TTL,
            lookahead: false,
            remembered_tickets: 16,
        };
        let (imported, broken) = (Imported::default(), Arc::new(AtomicU32::new(u32::MAX)));
        let engine = {
            let (imported, broken) = (Arc::clone(&imported), Arc::clone(&broken));
            let ranks = 2 * dp;
            EngineGroup::start("fake", ranks, layout(2), Arc::new(Fault::new(ranks)), move |rank| {
                let (imported, broken) = (Arc::clone(&imported), Arc::clone(&broken));
                Ok(CountingEngine { rank, planned: VecDeque::new(), imported, broken })
            })
        };
        let answer = Mutex::new(Revoked::NotOpen);
        let transport = Arc::new(NotedTransport { answer, revoked: Mutex::default(), landings: Mutex::default() });
        let status = Arc::new(Status::default());
        let registry = chassis::Metrics::new();
        let metrics = WorkerMetrics::new(&registry, &status);
        let scheduler = DecodeScheduler::new(config, layout(2)).unwrap();
        let state = DecodeState::new(
            scheduler,
            Arc::new(engine.unwrap()),
            VOCAB_SIZE,
            masks(&metrics),
            Arc::clone(&transport) as Arc<dyn ReceiveTransport>,
            Arc::clone(&status),
            metrics,
        );
        let (mailbox, _) = step_loop::mailbox(&StepLoopConfig::default());
        let clock = ManualClock(Mutex::new(Instant::now()));
        Self { state, transport, imported, broken, clock, status, metrics: registry, mailbox }
    }

    fn turn(&mut self, messages: impl IntoIterator<Item = Message>) -> Next {
        self.state.turn(&self.clock, &mut messages.into_iter().collect()).unwrap()
    }

    fn reserve(&mut self, ticket: u128, max_tokens: u32, buffer: usize) -> FlightStream {
        let (events, stream) = flight(buffer, self.mailbox.clone());
        let (reply, mut answer) = oneshot::channel();
        let sequence = SequenceSpec {
            prompt: (0..10).collect(),
            generated: Vec::new(),
            sampling: Arc::default(),
            stop_token_ids: [].into(),
            max_tokens,
            constraint: None,
            cache_salt: None,
        };
        let request = ReserveRequest { ticket: TicketId(ticket), prefill: prefill(), sequence };
        self.turn([Message::Reserve(Box::new(Reserve { request, events, reply }))]);
        answer.try_recv().unwrap().unwrap();
        stream
    }

    /// Reserves, lands and commits.
    fn join(&mut self, ticket: u128, max_tokens: u32, buffer: usize) -> FlightStream {
        let stream = self.reserve(ticket, max_tokens, buffer);
        self.turn([begin(ticket)]);
        self.turn(slices().into_iter().map(|slice| part(ticket, slice)));
        let (message, mut verdict) = commit(ticket);
        self.turn([message]);
        assert_eq!(verdict.try_recv(), Ok(Ok(())));
        stream
    }

    /// Transfers that were counted as failed, by cause.
    fn failed_transfers(&self) -> Vec<(String, u64)> {
        let text = self.metrics.encode();
        let lines = text.lines().filter_map(|line| line.strip_prefix("damask_transfer_failures_total{cause=\""));
        lines
            .map(|line| line.split_once("\"} ").map(|(cause, n)| (cause.to_owned(), n.parse().unwrap())).unwrap())
            .collect()
    }

    fn is_idle(&self) -> bool {
        self.status.report().idle
    }

    fn quarantined(&self) -> u32 {
        self.status.report().load.pools.iter().map(|pool| pool.quarantined).sum()
    }
}

fn slices() -> Vec<KvSlice> {
    PageMap::new(&layout(1), &layout(2), 10).unwrap().slices().collect()
}

fn arrival(ticket: u128, event: ArrivalEvent) -> Message {
    Message::Arrival(Arrival { ticket: TicketId(ticket), event })
}

fn begin(ticket: u128) -> Message {
    arrival(ticket, ArrivalEvent::Begin { sender: prefill(), layout: Arc::new(layout(1)) })
}

fn part(ticket: u128, slice: KvSlice) -> Message {
    let bytes = Bytes::from(vec![0; slice.head_count as usize * layout(2).head_bytes()]);
    arrival(ticket, ArrivalEvent::Part { slice, bytes })
}

fn commit(ticket: u128) -> (Message, oneshot::Receiver<Result<(), transfer::AbortReason>>) {
    commit_with(ticket, FirstToken { index: 0, token: 999, logprob: None })
}

fn commit_with(ticket: u128, first: FirstToken) -> (Message, oneshot::Receiver<Result<(), transfer::AbortReason>>) {
    let (sender, verdict) = oneshot::channel();
    let reply = CommitReply::new(move |answer| sender.send(answer).unwrap());
    (arrival(ticket, ArrivalEvent::Commit { first, reply }), verdict)
}

/// What the stream holds now.
fn read(stream: &mut FlightStream) -> Vec<Result<DecodeEvent, String>> {
    let mut events = Vec::new();
    while let Some(Some(event)) = stream.next().now_or_never() {
        events.push(match event {
            Ok(event) => Ok(event.try_into().unwrap()),
            Err(status) => Err(wire::status::reason(&status).unwrap()),
        });
    }
    events
}

#[test]
fn a_sequence_from_reservation_to_its_last_token() {
    let mut world = World::new();
    let mut stream = world.join(1, 4, 16);
    assert_eq!(world.imported.lock().unwrap().len(), slices().len());
    while world.turn([]) == Next::Again {}
    let events = read(&mut stream);
    assert!(matches!(events[0], Ok(DecodeEvent::Joined { kv_bytes, .. }) if kv_bytes == 64 * slices().len() as u64));
    let Ok(DecodeEvent::Tokens(run)) = &events[1] else { panic!("wanted tokens, got {events:?}") };
    let tokens: Vec<u32> = run.tokens.iter().map(|token| token.token).collect();
    // Prefill's token is at index 0 and position 10; the next three are sampled at positions 10, 11, 12.
    assert_eq!((run.first_index, tokens), (1, vec![1_010, 1_011, 1_012]));
    let Ok(DecodeEvent::Finished(finished)) = &events[2] else { panic!("wanted an end, got {events:?}") };
    assert_eq!((finished.reason, finished.usage.output_tokens), (FinishReason::Length, 4));
    assert!(world.is_idle());
}

#[test]
fn parts_go_to_the_ranks_of_the_group_that_took_the_sequence_in() {
    let mut world = World::with_groups(2);
    let mut streams = Vec::new();
    for (ticket, ranks) in [(1, [0, 1]), (2, [2, 3])] {
        streams.push(world.join(ticket, 40, 64));
        let imported = std::mem::take(&mut *world.imported.lock().unwrap());
        assert_eq!(imported.len(), slices().len());
        let landing = world.transport.landings.lock().unwrap().pop();
        assert_eq!(landing, Some((TicketId(ticket), DpGroup(ranks[0] / 2))));
        for (rank, slice, _) in imported {
            assert_eq!(rank, ranks[slice.head_start as usize], "ticket {ticket}: {slice:?}, one head a rank");
        }
    }
    while world.turn([]) == Next::Again {}
    for stream in &mut streams {
        assert!(matches!(read(stream).last(), Some(Ok(DecodeEvent::Finished(_)))));
    }
    let pools = world.status.report().load.pools;
    assert_eq!(
        pools.iter().map(|pool| (pool.dp_group.0, pool.group.name())).collect::<Vec<_>>(),
        [(0, "full"), (0, "window"), (1, "full"), (1, "window")]
    );
}

#[test]
fn pages_of_a_reader_that_left_wait_for_the_fence() {
    let mut world = World::new();
    let stream = world.reserve(1, 4, 16);
    world.turn([begin(1)]);
    let slices = slices();
    world.turn([part(1, slices[0])]);
    *world.transport.answer.lock().unwrap() = Revoked::Pending;
    drop(stream);
    world.turn([]);
    assert!(world.quarantined() > 0);
    assert!(world.transport.revoked.lock().unwrap().contains(&TicketId(1)));
    // Parts that were on their way are not written any more.
    let written = world.imported.lock().unwrap().len();
    world.turn([part(1, slices[1])]);
    assert_eq!(world.imported.lock().unwrap().len(), written);
    assert!(!world.is_idle());
    world.turn([arrival(1, ArrivalEvent::Ended(EndCause::Revoked))]);
    assert!(world.is_idle());
    assert!(world.failed_transfers().is_empty(), "it was ended here");
}

#[test]
fn a_transfer_that_fails_is_counted_once_and_one_that_is_given_up_is_not() {
    let failed = |cause: &str| vec![(cause.to_owned(), 1)];
    let lost = transfer::LossCause::Ended;
    for (cause, want) in [
        (EndCause::Aborted(transfer::AbortReason::Cancelled), vec![]),
        (EndCause::PartsMissing { sent: 2, received: 1 }, failed("parts_missing")),
        (EndCause::Lost(lost.clone()), failed(lost.name())),
    ] {
        let mut world = World::new();
        let _stream = world.reserve(1, 4, 16);
        world.turn([begin(1), arrival(1, ArrivalEvent::Ended(cause.clone()))]);
        assert_eq!(world.failed_transfers(), want, "{cause}");
        assert!(world.is_idle());
    }
}

#[test]
fn messages_of_one_turn_take_effect_in_their_order() {
    let mut world = World::new();
    let mut stream = world.reserve(1, 1, 16);
    let (message, mut verdict) = commit(1);
    let late = part(1, slices()[0]);
    let parts = slices().into_iter().map(|slice| part(1, slice));
    world.turn([begin(1)].into_iter().chain(parts).chain([message, late]));
    assert_eq!(verdict.try_recv(), Ok(Ok(())), "the parts count before the commit");
    assert_eq!(world.imported.lock().unwrap().len(), slices().len(), "a part behind the end is not written");
    assert!(matches!(read(&mut stream).last(), Some(Ok(DecodeEvent::Finished(_)))));
    assert!(world.is_idle());
}

#[test]
fn a_reservation_expires() {
    let mut world = World::new();
    let mut stream = world.reserve(1, 4, 16);
    *world.transport.answer.lock().unwrap() = Revoked::Now;
    *world.clock.0.lock().unwrap() += TTL - Duration::from_millis(1);
    world.turn([]);
    assert!(read(&mut stream).is_empty());
    *world.clock.0.lock().unwrap() += Duration::from_millis(1);
    world.turn([]);
    assert_eq!(read(&mut stream), [Err("TICKET_EXPIRED".into())]);
    assert!(world.is_idle());
}

#[test]
fn a_commit_without_all_parts_is_rejected() {
    let mut world = World::new();
    let mut stream = world.reserve(1, 4, 16);
    world.turn([begin(1)]);
    world.turn(slices().into_iter().skip(1).map(|slice| part(1, slice)));
    let (message, mut verdict) = commit(1);
    world.turn([message]);
    assert_eq!(verdict.try_recv(), Ok(Err(transfer::AbortReason::WrongParts)));
    assert_eq!(read(&mut stream), [Err("KV_WRONG_PARTS".into())]);
    assert_eq!(world.failed_transfers(), [("wrong_parts".to_owned(), 1)]);
    assert!(world.is_idle(), "COMMIT is terminal: nothing is left to wait for");
}

#[test]
fn a_commit_with_a_token_that_cannot_be_is_rejected() {
    for (index, token) in [(1, 999), (0, VOCAB_SIZE), (u32::MAX, u32::MAX)] {
        let mut world = World::new();
        let mut stream = world.reserve(1, 4, 16);
        world.turn([begin(1)]);
        world.turn(slices().into_iter().map(|slice| part(1, slice)));
        let (message, mut verdict) = commit_with(1, FirstToken { index, token, logprob: None });
        world.turn([message]);
        assert_eq!(verdict.try_recv(), Ok(Err(transfer::AbortReason::WrongParts)), "token {token} at {index}");
        assert_eq!(read(&mut stream), [Err("KV_WRONG_PARTS".into())]);
        assert!(world.is_idle());
    }
}

#[test]
fn a_part_that_comes_twice_changes_nothing() {
    let mut world = World::new();
    let _stream = world.reserve(1, 4, 16);
    world.turn([begin(1)]);
    let twice = slices().into_iter().flat_map(|slice| [slice, slice]);
    world.turn(twice.map(|slice| part(1, slice)));
    let (message, mut verdict) = commit(1);
    world.turn([message]);
    assert_eq!(verdict.try_recv(), Ok(Ok(())));
}

#[test]
fn a_commit_that_meets_a_cancel_is_rejected_and_frees() {
    let mut world = World::new();
    let stream = world.reserve(1, 4, 16);
    world.turn([begin(1)]);
    drop(stream);
    // The transport has delivered the commit already, so it has nothing to revoke.
    *world.transport.answer.lock().unwrap() = Revoked::NotOpen;
    world.turn([]);
    assert!(!world.is_idle());
    let (message, mut verdict) = commit(1);
    world.turn([message]);
    assert_eq!(verdict.try_recv(), Ok(Err(transfer::AbortReason::Cancelled)));
    assert!(world.is_idle());
}

#[test]
fn a_slow_reader_loses_its_sequence_and_holds_up_nobody() {
    let mut world = World::new();
    let mut slow = world.join(1, 40, 3);
    let mut quick = world.join(2, 40, 3);
    let mut quick_tokens = 0;
    while world.turn([]) == Next::Again {
        for event in read(&mut quick) {
            if let Ok(DecodeEvent::Tokens(run)) = event {
                quick_tokens += run.tokens.len();
            }
        }
    }
    assert_eq!(quick_tokens, 39);
    let events = read(&mut slow);
    assert_eq!(events.last(), Some(&Err("SLOW_CONSUMER".into())));
    assert!(matches!(&events[1], Ok(DecodeEvent::Tokens(run)) if run.tokens.len() == 3), "what fits is delivered");
    assert!(world.is_idle());
}

#[test]
fn a_sequence_without_numbers_ends_with_an_error_of_its_own() {
    let mut world = World::new();
    let [mut first, mut second] = [1, 2].map(|ticket| world.join(ticket, 30, 64));
    world.broken.store(0, Ordering::Relaxed);
    while !world.is_idle() {
        world.turn([]);
    }
    assert_eq!(read(&mut first).last(), Some(&Err("NOT_A_NUMBER".into())));
    let tokens = read(&mut second);
    assert!(matches!(tokens.last(), Some(Ok(DecodeEvent::Finished(_)))), "{tokens:?}");
}

#[test]
fn a_draining_worker_refuses_and_goes_on() {
    let mut world = World::new();
    let mut running = world.join(1, 4, 16);
    world.status.begin_drain();
    let (events, _stream) = flight(16, world.mailbox.clone());
    let (reply, mut answer) = oneshot::channel();
    let sequence = SequenceSpec {
        prompt: [1].into(),
        generated: Vec::new(),
        sampling: Arc::default(),
        stop_token_ids: [].into(),
        max_tokens: 4,
        constraint: None,
        cache_salt: None,
    };
    let request = ReserveRequest { ticket: TicketId(2), prefill: prefill(), sequence };
    world.turn([Message::Reserve(Box::new(Reserve { request, events, reply }))]);
    assert_eq!(answer.try_recv().unwrap().unwrap_err().reason(), "DRAINING");
    while world.turn([]) == Next::Again {}
    assert!(matches!(read(&mut running).last(), Some(Ok(DecodeEvent::Finished(_)))));
}
