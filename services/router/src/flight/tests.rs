//! Every event in every phase, as a table; then the ways through a flight that take several events.

use types::{DpGroup, Incarnation, KvDtype, KvEndpoint, KvLayout, RequestId, Sampling, Ticket, TokenId, WorkerId};

use super::*;

pub(super) fn peer(worker: &str) -> PeerId {
    PeerId { worker: WorkerId(worker.into()), incarnation: Incarnation(1) }
}

pub(super) fn pair(n: u32) -> Pair {
    Pair { prefill: peer(&format!("p{n}")), decode: peer(&format!("d{n}")) }
}

pub(super) fn ticket(id: u128, pair: &Pair) -> Ticket {
    Ticket {
        id: TicketId(id),
        prefill: pair.prefill.clone(),
        decode: pair.decode.clone(),
        kv_endpoint: KvEndpoint { transport: "host".into(), address: "d:1".into() },
        kv_layout: KvLayout {
            full_layers: vec![1],
            window_layers: vec![0],
            kv_heads: 2,
            head_dim: 8,
            page_tokens: 16,
            window: 128,
            dtype: KvDtype::F32,
            tp: 1,
        },
        dp_group: DpGroup(0),
        ttl: Duration::from_secs(10),
    }
}

pub(super) fn request(max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        id: RequestId::new("r").unwrap(),
        prompt: vec![1, 2, 3],
        generated: vec![],
        sampling: Sampling { seed: 7, ..Sampling::default() },
        stop_token_ids: vec![STOP],
        max_tokens,
        constraint: None,
        cache_salt: None,
        timeout: None,
    }
}

pub(super) const STOP: TokenId = 99;

pub(super) fn limits(resumptions_max: u32) -> FlightLimits {
    FlightLimits {
        queue: Duration::from_secs(1),
        reserve: Duration::from_secs(2),
        prefill: Duration::from_secs(3),
        transfer: Duration::from_secs(4),
        first_token: Duration::from_secs(5),
        inter_token: Duration::from_secs(6),
        resumptions_max,
    }
}

pub(super) fn sampled(token: TokenId) -> SampledToken {
    SampledToken { token, logprob: None, top: vec![] }
}

fn finished(output_tokens: u32) -> Finished {
    Finished { reason: FinishReason::Stop, usage: Usage { output_tokens, ..Usage::default() } }
}

fn joined() -> DecodeEvent {
    DecodeEvent::Joined { kv_bytes: 1, landing_us: 1 }
}

fn tokens(first_index: u32, ids: &[TokenId]) -> DecodeEvent {
    DecodeEvent::Tokens(TokenRun { first_index, tokens: ids.iter().map(|id| sampled(*id)).collect() })
}

fn first_token(index: u32, id: TokenId) -> PrefillEvent {
    PrefillEvent::FirstToken { index, token: sampled(id), cached_tokens: 2, queue_us: 0, compute_us: 0 }
}

fn committed() -> PrefillEvent {
    PrefillEvent::Committed { kv_bytes: 1, transfer_us: 1, tail_us: 1 }
}

/// A flight under test, its clock, and what it last wanted.
struct Bench {
    start: Instant,
    now: Instant,
    flight: Flight,
    out: Vec<Action>,
}

impl Bench {
    fn new(request: GenerateRequest, resumptions_max: u32) -> Self {
        let (start, mut out) = (Instant::now(), Vec::new());
        let flight = Flight::new(start, request, Duration::from_secs(60), limits(resumptions_max), &mut out);
        Self { start, now: start, flight, out }
    }

    fn event(&mut self, event: Event) -> String {
        self.out.clear();
        self.flight.on_event(self.now, event, &mut self.out);
        describe(&self.out)
    }

    fn decode(&mut self, event: DecodeEvent) -> String {
        self.event(Event::Decode { attempt: self.flight.attempt, event })
    }

    fn prefill(&mut self, event: PrefillEvent) -> String {
        self.event(Event::Prefill { attempt: self.flight.attempt, event })
    }

    fn place(&mut self, n: u32) -> String {
        self.event(Event::Placed { pair: pair(n), ticket: TicketId(n.into()) })
    }

    fn reserved(&mut self, n: u32) -> String {
        self.decode(DecodeEvent::Reserved(ticket(n.into(), &pair(n))))
    }

    /// Pair 1, tokens 10 (prefill) and 11 (decode).
    fn in_phase(phase: &str) -> Self {
        let mut bench = Self::new(request(4), 3);
        let steps: [&dyn Fn(&mut Self) -> String; 6] = [
            &|bench| bench.place(1),
            &|bench| bench.reserved(1),
            &|bench| bench.prefill(first_token(0, 10)),
            &|bench| bench.prefill(committed()),
            &|bench| bench.decode(joined()),
            &|bench| bench.decode(tokens(1, &[11])),
        ];
        let phases = ["queued", "reserving", "prefilling", "transferring", "committed", "joined", "decoding"];
        let num_steps = phases.iter().position(|known| *known == phase).unwrap();
        for step in &steps[..num_steps] {
            step(&mut bench);
        }
        bench
    }
}

fn describe(actions: &[Action]) -> String {
    let texts = actions.iter().map(|action| match action {
        Action::Place { avoid, was_refused } => {
            let refused = if *was_refused { " refused" } else { "" };
            let avoiding = if avoid.is_empty() { "" } else { " avoiding" };
            let names: String = avoid.iter().map(|peer| format!(" {}", peer.worker)).collect();
            format!("place{refused}{avoiding}{names}")
        }
        Action::Reserve { attempt, ticket, prefill, sequence } => {
            format!("reserve {attempt} for {} {:?} ticket {}", prefill.worker, sequence.generated, ticket.0)
        }
        Action::Prefill { attempt, ticket, sequence } => {
            format!("prefill {attempt} {:?} ticket {}", sequence.generated, ticket.id.0)
        }
        Action::Release(role) => format!("release {role}"),
        Action::Unlink => "unlink".to_owned(),
        Action::Full(peer) => format!("full {}", peer.worker),
        Action::Resume(failure) => format!("resume {}", failure.name()),
        Action::Emit(GenerateEvent::Started { request_id, seed }) => format!("started {request_id} {seed}"),
        Action::Emit(GenerateEvent::Tokens(run)) => {
            format!("tokens {}: {:?}", run.first_index, run.tokens.iter().map(|token| token.token).collect::<Vec<_>>())
        }
        Action::Emit(GenerateEvent::Finished(Finished { reason, usage })) => format!(
            "finished {reason:?} prompt {} cached {} output {} resumptions {}",
            usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, usage.resumptions
        ),
        Action::End(Outcome::Finished(_)) => "end".to_owned(),
        Action::End(Outcome::Cancelled) => "end cancelled".to_owned(),
        Action::End(Outcome::Failed(error)) => format!("end {}", error.reason()),
    });
    texts.collect::<Vec<_>>().join(", ")
}

fn named_event(name: &str, attempt: u32) -> Event {
    let (p1, d1) = (Role::Prefill, Role::Decode);
    let decode = |event| Event::Decode { attempt, event };
    let prefill = |event| Event::Prefill { attempt, event };
    let leg_failed = |role, class, between| {
        let failure = LegFailure { class, between, reason: "because".into() };
        Event::LegFailed { attempt, role, failure }
    };
    let failed = |role, class| leg_failed(role, class, false);
    let lane_failed = |role| leg_failed(role, ErrorClass::Retryable, true);
    match name {
        "placed" => Event::Placed { pair: pair(1), ticket: TicketId(1) },
        "reserved" => decode(DecodeEvent::Reserved(ticket(1, &pair(1)))),
        "reserved another" => decode(DecodeEvent::Reserved(ticket(2, &pair(1)))),
        "joined" => decode(joined()),
        "token 1" => decode(tokens(1, &[11])),
        "tokens 0 to 2" => decode(tokens(0, &[10, 11, 12])),
        "token 3" => decode(tokens(3, &[13])),
        "tokens 1 to 4" => decode(tokens(1, &[11, 12, 13, 14])),
        "decode finished at 2" => decode(DecodeEvent::Finished(finished(2))),
        "preempted" => decode(DecodeEvent::Preempted),
        "first token" => prefill(first_token(0, 10)),
        "first token 1" => prefill(first_token(1, 10)),
        "committed" => prefill(committed()),
        "prefill finished" => prefill(PrefillEvent::Finished(finished(1))),
        "prefill closed" => Event::LegClosed { attempt, role: p1 },
        "decode closed" => Event::LegClosed { attempt, role: d1 },
        "prefill lost" => failed(p1, ErrorClass::Retryable),
        "decode lost" => failed(d1, ErrorClass::Retryable),
        "lane lost to prefill" => lane_failed(p1),
        "lane lost to decode" => lane_failed(d1),
        "prefill broken" => failed(p1, ErrorClass::Fatal),
        "decode broken" => failed(d1, ErrorClass::Fatal),
        "prefill full" => failed(p1, ErrorClass::Overloaded),
        "decode full" => failed(d1, ErrorClass::Overloaded),
        "prefill rejects" => failed(p1, ErrorClass::Caller),
        "decode rejects" => failed(d1, ErrorClass::Caller),
        "prefill gone" => Event::WorkerGone { attempt, role: p1 },
        "decode gone" => Event::WorkerGone { attempt, role: d1 },
        "client gone" => Event::ClientGone,
        "early tick" => Event::Tick { has_pair: true },
        _ => panic!("{name}"),
    }
}

const RETRY: &str = "release prefill, release decode, place";

/// (phase, events, what is wanted); `RETRY` stands for letting go of both workers and asking for others.
const TABLE: &[(&str, &[&str], &str)] = &[
    ("queued", &["placed"], "reserve 0 for p1 [] ticket 1"),
    ("queued", &["client gone"], "end cancelled"),
    (
        "queued",
        &[
            "reserved",
            "joined",
            "token 1",
            "preempted",
            "first token",
            "committed",
            "prefill finished",
            "prefill closed",
            "decode closed",
            "prefill lost",
            "decode full",
            "decode rejects",
            "prefill gone",
            "decode gone",
            "early tick",
        ],
        "",
    ),
    ("reserving", &["reserved"], "prefill 0 [] ticket 1"),
    ("reserving", &["placed", "early tick"], ""),
    ("reserving", &["reserved another", "joined", "token 1", "preempted"], "resume protocol, RETRY avoiding d1"),
    ("reserving", &["first token", "committed", "prefill finished"], "resume protocol, RETRY avoiding p1"),
    ("reserving", &["decode closed", "decode lost", "decode gone"], "resume decode_lost, RETRY avoiding d1"),
    ("reserving", &["decode broken"], "resume decode_failed, RETRY avoiding d1"),
    ("reserving", &["prefill gone"], "resume prefill_lost, RETRY avoiding p1"),
    ("reserving", &["decode full"], "full d1, RETRY refused"),
    ("reserving", &["decode rejects"], "release prefill, release decode, end REJECTED_BY_WORKER"),
    ("reserving", &["client gone"], "release prefill, release decode, end cancelled"),
    ("prefilling", &["first token"], "tokens 0: [10]"),
    ("prefilling", &["placed", "early tick", "joined", "token 1", "decode finished at 2"], ""),
    ("prefilling", &["reserved"], "resume protocol, RETRY avoiding d1"),
    ("prefilling", &["first token 1", "committed", "prefill finished"], "resume protocol, RETRY avoiding p1"),
    ("prefilling", &["preempted"], "resume preempted, RETRY"),
    ("prefilling", &["prefill closed", "prefill lost", "prefill gone"], "resume prefill_lost, RETRY avoiding p1"),
    ("prefilling", &["lane lost to prefill"], "unlink, resume prefill_lost, RETRY avoiding p1 d1"),
    ("prefilling", &["lane lost to decode"], "unlink, resume decode_lost, RETRY avoiding p1 d1"),
    ("prefilling", &["prefill broken"], "resume prefill_failed, RETRY avoiding p1"),
    ("prefilling", &["prefill full"], "full p1, RETRY refused"),
    ("prefilling", &["decode lost", "decode gone"], "resume decode_lost, RETRY avoiding d1"),
    ("prefilling", &["prefill rejects"], "release prefill, release decode, end REJECTED_BY_WORKER"),
    ("prefilling", &["client gone"], "release prefill, release decode, end cancelled"),
    ("transferring", &["joined", "placed", "early tick"], ""),
    ("transferring", &["committed"], "release prefill"),
    (
        "transferring",
        &["prefill finished"],
        "finished Stop prompt 3 cached 2 output 1 resumptions 0, release prefill, release decode, end",
    ),
    ("transferring", &["first token"], "resume protocol, RETRY avoiding p1"),
    ("transferring", &["reserved", "token 1"], "resume protocol, RETRY avoiding d1"),
    ("transferring", &["preempted"], "resume preempted, RETRY"),
    ("transferring", &["prefill closed", "prefill lost", "prefill gone"], "resume prefill_lost, RETRY avoiding p1"),
    ("transferring", &["lane lost to prefill"], "unlink, resume prefill_lost, RETRY avoiding p1 d1"),
    ("transferring", &["decode closed", "decode lost", "decode gone"], "resume decode_lost, RETRY avoiding d1"),
    ("transferring", &["decode full"], "resume decode_failed, RETRY avoiding d1"),
    ("transferring", &["client gone"], "release prefill, release decode, end cancelled"),
    ("committed", &["joined", "prefill closed", "prefill lost", "prefill gone", "early tick"], ""),
    ("committed", &["committed", "prefill finished", "first token"], "resume protocol, RETRY avoiding p1"),
    ("committed", &["decode lost"], "resume decode_lost, RETRY avoiding d1"),
    ("committed", &["client gone"], "release prefill, release decode, end cancelled"),
    ("joined", &["token 1"], "tokens 1: [11]"),
    ("joined", &["tokens 0 to 2"], "tokens 1: [11, 12]"),
    ("joined", &["token 3", "joined", "reserved"], "resume protocol, RETRY avoiding d1"),
    (
        "joined",
        &["tokens 1 to 4"],
        "tokens 1: [11, 12, 13], finished Length prompt 3 cached 2 output 4 resumptions 0, release prefill, release decode, end",
    ),
    ("joined", &["decode finished at 2"], "resume protocol, RETRY avoiding d1"),
    ("joined", &["preempted"], "resume preempted, RETRY"),
    ("joined", &["prefill closed", "prefill lost", "lane lost to prefill", "prefill gone", "placed"], ""),
    ("joined", &["decode lost", "decode gone"], "resume decode_lost, RETRY avoiding d1"),
    ("joined", &["client gone"], "release prefill, release decode, end cancelled"),
    ("decoding", &["token 1", "prefill closed", "prefill gone", "early tick"], ""),
    ("decoding", &["tokens 0 to 2"], "tokens 2: [12]"),
    ("decoding", &["token 3"], "resume protocol, RETRY avoiding d1"),
    (
        "decoding",
        &["decode finished at 2"],
        "finished Stop prompt 3 cached 2 output 2 resumptions 0, release prefill, release decode, end",
    ),
    ("decoding", &["preempted"], "resume preempted, RETRY"),
    ("decoding", &["decode closed", "decode lost", "decode gone"], "resume decode_lost, RETRY avoiding d1"),
    ("decoding", &["decode broken", "decode full"], "resume decode_failed, RETRY avoiding d1"),
    ("decoding", &["decode rejects"], "release prefill, release decode, end REJECTED_BY_WORKER"),
    ("decoding", &["client gone"], "release prefill, release decode, end cancelled"),
];

#[test]
fn every_event_in_every_phase() {
    for (phase, events, want) in TABLE {
        for name in *events {
            let got = Bench::in_phase(phase).event(named_event(name, 0));
            assert_eq!(got, want.replace("RETRY", RETRY), "{name} while {phase}");
        }
    }
}

#[test]
fn events_of_an_earlier_attempt_are_ignored() {
    for phase in ["queued", "reserving", "prefilling", "transferring", "joined", "decoding"] {
        for name in ["reserved", "first token", "token 1", "preempted", "decode lost", "prefill gone", "decode rejects"]
        {
            let mut bench = Bench::in_phase(phase);
            assert_eq!(bench.event(named_event(name, 7)), "", "{name} while {phase}");
        }
    }
}

#[test]
fn nothing_happens_after_the_end() {
    let mut bench = Bench::in_phase("decoding");
    bench.event(Event::ClientGone);
    for name in ["client gone", "token 1", "decode lost", "placed", "early tick", "prefill rejects"] {
        assert_eq!(bench.event(named_event(name, 0)), "", "{name}");
    }
}

#[test]
fn each_stage_has_its_deadline() {
    for (phase, seconds, want) in [
        ("reserving", 2, "resume timeout, RETRY avoiding d1"),
        ("prefilling", 3, "resume timeout, RETRY avoiding p1"),
        ("transferring", 4, "resume timeout, RETRY avoiding p1 d1"),
        ("joined", 5, "resume timeout, RETRY avoiding d1"),
        ("decoding", 6, "resume timeout, RETRY avoiding d1"),
    ] {
        let mut bench = Bench::in_phase(phase);
        assert_eq!(bench.flight.deadline(), bench.start + Duration::from_secs(seconds), "{phase}");
        bench.now = bench.flight.deadline() - Duration::from_millis(1);
        assert_eq!(bench.event(Event::Tick { has_pair: true }), "", "{phase}, early");
        bench.now = bench.flight.deadline();
        assert_eq!(bench.event(Event::Tick { has_pair: true }), want.replace("RETRY", RETRY), "{phase}");
    }
}

#[test]
fn the_last_attempt_ends_with_the_name_of_the_stage() {
    let mut bench = Bench::new(request(4), 0);
    bench.place(1);
    bench.now += Duration::from_secs(2);
    assert_eq!(bench.event(Event::Tick { has_pair: true }), "release prefill, release decode, end ATTEMPTS_EXHAUSTED");
    let Some(Action::End(Outcome::Failed(error))) = bench.out.last() else { panic!() };
    assert_eq!(
        error.to_string(),
        "given up after 1 failed attempts, the last one: stage reserve took longer than 2000 ms"
    );
    assert_eq!(error.status().code(), tonic::Code::DeadlineExceeded);
}

#[test]
fn the_queue_ends_by_what_is_missing() {
    for (has_pair, want) in [(true, "end QUEUE_TIMEOUT"), (false, "end NO_PAIR")] {
        let mut bench = Bench::in_phase("queued");
        bench.now += Duration::from_secs(1);
        assert_eq!(bench.event(Event::Tick { has_pair }), want);
    }
}

#[test]
fn the_requests_own_deadline_ends_it_in_any_stage() {
    for (phase, stage) in
        [("queued", "queue"), ("reserving", "reserve"), ("prefilling", "prefill"), ("decoding", "inter_token")]
    {
        let mut bench = Bench::in_phase(phase);
        bench.now = bench.flight.request_deadline();
        assert!(bench.event(Event::Tick { has_pair: true }).ends_with("end DEADLINE_EXCEEDED"), "{phase}");
        let Some(Action::End(Outcome::Failed(error))) = bench.out.last() else { panic!() };
        assert_eq!(error.to_string(), format!("deadline of 60000 ms passed in stage {stage}"));
    }
}

#[test]
fn refusals_for_lack_of_room_do_not_prolong_the_wait() {
    let mut bench = Bench::in_phase("queued");
    let deadline = bench.flight.deadline();
    for _ in 0..10 {
        bench.now += Duration::from_millis(50);
        bench.place(1);
        let attempt = bench.flight.attempt;
        assert_eq!(bench.event(named_event("decode full", attempt)), format!("full d1, {RETRY} refused"));
        assert_eq!(bench.flight.deadline(), deadline);
    }
    assert_eq!(bench.flight.resumptions, 0);
}

#[test]
fn the_first_prefill_says_how_much_was_cached() {
    let mut bench = Bench::in_phase("reserving");
    bench.event(named_event("decode full", 0));
    bench.place(1);
    bench.reserved(1);
    bench.prefill(first_token(0, 10)); // 2 were cached
    bench.event(named_event("decode lost", 1));
    bench.place(2);
    bench.reserved(2);
    let cached_tokens = 3;
    bench.prefill(PrefillEvent::FirstToken {
        index: 1,
        token: sampled(STOP),
        cached_tokens,
        queue_us: 0,
        compute_us: 0,
    });
    assert_eq!(
        bench.prefill(PrefillEvent::Finished(finished(2))),
        "finished Stop prompt 3 cached 2 output 2 resumptions 1, release prefill, release decode, end"
    );
}

#[test]
fn a_slow_client_does_not_count_against_the_worker() {
    let mut bench = Bench::in_phase("decoding");
    bench.now += Duration::from_secs(30);
    assert_eq!(bench.event(Event::ClientCaughtUp), "");
    assert_eq!(bench.flight.deadline(), bench.now + Duration::from_secs(6));
}

#[test]
fn a_lost_decode_is_resumed_behind_the_last_token() {
    let mut bench = Bench::in_phase("decoding");
    let attempt = bench.flight.attempt;
    bench.event(named_event("decode lost", attempt));
    assert_eq!(bench.place(2), "reserve 1 for p2 [10, 11] ticket 2");
    assert_eq!(bench.reserved(2), "prefill 1 [10, 11] ticket 2");
    assert_eq!(bench.prefill(first_token(2, 12)), "tokens 2: [12]");
    assert_eq!(bench.prefill(committed()), "release prefill");
    assert_eq!(bench.decode(joined()), "");
    assert_eq!(bench.decode(tokens(3, &[STOP])), format!("tokens 3: [{STOP}]"));
    assert_eq!(
        bench.decode(DecodeEvent::Finished(finished(4))),
        "finished Stop prompt 3 cached 2 output 4 resumptions 1, release prefill, release decode, end"
    );
}

#[test]
fn what_decode_says_before_prefills_token_waits_for_it() {
    let mut bench = Bench::in_phase("prefilling");
    assert_eq!(bench.decode(joined()), "");
    assert_eq!(bench.decode(tokens(1, &[11])), "");
    assert_eq!(bench.decode(tokens(2, &[STOP])), "");
    assert_eq!(bench.decode(DecodeEvent::Finished(finished(3))), "");
    assert_eq!(bench.event(Event::LegClosed { attempt: 0, role: Role::Decode }), "");
    assert_eq!(
        bench.prefill(first_token(0, 10)),
        format!(
            "tokens 0: [10, 11, {STOP}], finished Stop prompt 3 cached 2 output 3 resumptions 0, \
             release prefill, release decode, end"
        )
    );
}

#[test]
fn a_whole_answer_needs_no_word_about_its_end() {
    for (last, reason) in [(STOP, "Stop"), (13, "Length")] {
        let mut bench = Bench::in_phase("joined");
        bench.decode(tokens(1, &[11, 12, last]));
        let attempt = bench.flight.attempt;
        assert_eq!(
            bench.event(named_event("decode lost", attempt)),
            format!("finished {reason} prompt 3 cached 2 output 4 resumptions 0, release prefill, release decode, end")
        );
    }
}

#[test]
fn a_request_that_resumes_a_whole_answer_ends_at_once() {
    let bench = Bench::new(GenerateRequest { generated: vec![10, STOP], ..request(4) }, 3);
    assert_eq!(describe(&bench.out), "started r 7, finished Stop prompt 3 cached 0 output 2 resumptions 0, end");
    let bench = Bench::new(GenerateRequest { generated: vec![10, 11], ..request(4) }, 3);
    assert_eq!(describe(&bench.out), "started r 7, place");
}

#[test]
fn attempts_are_bounded() {
    let mut bench = Bench::new(request(100), 3);
    for n in 0..3 {
        bench.place(n);
        assert_eq!(
            bench.event(named_event("decode lost", n)),
            "resume decode_lost, ".to_owned() + RETRY + &avoiding(n)
        );
    }
    bench.place(3);
    assert_eq!(bench.event(named_event("decode lost", 3)), "release prefill, release decode, end ATTEMPTS_EXHAUSTED");
    let Some(Action::End(Outcome::Failed(error))) = bench.out.last() else { panic!() };
    assert_eq!(error.status().code(), tonic::Code::Unavailable);
    assert!(wire::status::retry_after(&error.status()).is_some());
}

#[test]
fn giving_way_to_others_is_no_failed_attempt() {
    let mut bench = Bench::new(request(100), 0);
    for n in 0..20 {
        bench.place(n);
        bench.reserved(n);
        bench.prefill(first_token(n, 10 + n));
        assert_eq!(bench.decode(DecodeEvent::Preempted), format!("resume preempted, {RETRY}"));
    }
    assert_eq!(bench.flight.resumptions, 20);
    bench.place(20);
    assert_eq!(bench.event(named_event("decode lost", 20)), "release prefill, release decode, end ATTEMPTS_EXHAUSTED");
}

fn avoiding(n: u32) -> String {
    format!(" avoiding {}", (0..=n).map(|i| format!("d{i}")).collect::<Vec<_>>().join(" "))
}
