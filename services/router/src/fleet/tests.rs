use types::{
    Incarnation, KvDtype, KvEndpoint, KvLayout, Load, ModelFingerprint, ParallelLayout, WorkerDescription, WorkerId,
};

use super::*;

fn report(role: Role, worker: &str, incarnation: u64) -> WorkerReport {
    let kv_layout = KvLayout {
        full_layers: vec![1],
        window_layers: vec![0],
        kv_heads: 4,
        head_dim: 8,
        page_tokens: 16,
        window: 128,
        dtype: KvDtype::F32,
        tp: if role == Role::Prefill { 2 } else { 4 },
    };
    let fingerprint = ModelFingerprint { model: "m".into(), vocab_size: 100, tokenizer_sha256: "t".into() };
    WorkerReport {
        description: WorkerDescription {
            peer: PeerId { worker: WorkerId(worker.into()), incarnation: Incarnation(incarnation) },
            role,
            fingerprint,
            weights_fingerprint: "w".into(),
            numerics: "f32".into(),
            parallel: ParallelLayout::tp(kv_layout.tp),
            kv_layout,
            max_context_tokens: 1_000,
            eos_token_ids: vec![2],
            kv_endpoint: Some(KvEndpoint { transport: "host".into(), address: "h:1".into() }),
            max_sequences: if role == Role::Prefill { 1 } else { 2 },
        },
        state: WorkerState::Ready,
        load: Load::default(),
    }
}

/// Of a prompt of so many tokens, the first of which is `first`.
fn beginnings(first: TokenId, prompt_tokens: usize) -> Beginnings {
    let tokens: Vec<TokenId> = (first..).take(prompt_tokens).collect();
    Beginnings::of_tokens(b"", tokens.iter())
}

struct Bench {
    fleet: Fleet<()>,
}

impl Bench {
    fn new(prefills_per_worker_max: u32) -> Self {
        Self { fleet: Fleet::new(prefills_per_worker_max, true) }
    }

    /// The worker `name` reports from the address `name:1`.
    fn hears(&mut self, report: WorkerReport) {
        let address = Address::new(&*report.description.peer.worker.0, 1);
        self.fleet.on_report(report.description.role, &address, &(), report).unwrap();
    }

    /// The same, and every way that is to be opened is open.
    fn says(&mut self, report: WorkerReport) {
        self.hears(report);
        for order in self.fleet.to_link() {
            self.fleet.on_linked(order.pair);
        }
    }

    fn pair() -> Self {
        let mut bench = Self::new(4);
        bench.says(report(Role::Prefill, "p", 1));
        bench.says(report(Role::Decode, "d", 1));
        bench
    }

    fn need(&self) -> Need {
        let model = self.fleet.served().map_or_else(model, |served| served.model);
        Need { model, prompt_tokens: 10, beginnings: beginnings(1, 10), avoid: vec![], was_refused: false }
    }

    fn place(&mut self) -> Result<(Assigned<()>, Assigned<()>), NoPlace> {
        let need = self.need();
        self.fleet.place(&need)
    }

    fn num_pairs(&self) -> u32 {
        self.fleet.served().map_or(0, |served| served.ready_pairs)
    }
}

fn model() -> ModelKey {
    let description = report(Role::Prefill, "p", 1).description;
    ModelKey { fingerprint: description.fingerprint, weights_fingerprint: description.weights_fingerprint }
}

#[test]
fn one_complete_pair_is_ready() {
    let mut bench = Bench::new(4);
    assert_eq!(bench.fleet.served(), None);
    bench.says(report(Role::Prefill, "p", 1));
    assert_eq!(bench.fleet.served(), None, "half a pair");
    bench.says(report(Role::Decode, "d", 1));
    let served = bench.fleet.served().unwrap();
    assert_eq!((served.ready_pairs, served.max_context_tokens, &*served.eos_token_ids), (1, 1_000, &[2][..]));
}

#[test]
fn only_ready_workers_are_used() {
    for state in [WorkerState::Loading, WorkerState::Draining, WorkerState::Stuck] {
        let mut bench = Bench::pair();
        bench.says(WorkerReport { state, ..report(Role::Decode, "d", 1) });
        assert_eq!(bench.num_pairs(), 0, "{state:?}");
        assert_eq!(bench.place().unwrap_err(), NoPlace::NoPair, "{state:?}");
        bench.says(report(Role::Decode, "d", 1));
        assert_eq!(bench.num_pairs(), 1, "ready again after {state:?}");
    }
}

type Change = (&'static str, fn(&mut WorkerDescription));

#[test]
fn workers_that_differ_are_never_paired() {
    let changes: [Change; 8] = [
        ("fingerprint", |description| description.fingerprint.tokenizer_sha256 = "u".into()),
        ("weights_fingerprint", |description| description.weights_fingerprint = "v".into()),
        ("numerics", |description| description.numerics = "bf16".into()),
        ("kv_layout.dtype", |description| description.kv_layout.dtype = KvDtype::Bf16),
        ("kv_layout.page_tokens", |description| description.kv_layout.page_tokens = 32),
        ("kv_layout.window", |description| description.kv_layout.window = 64),
        ("kv_layout.kv_heads", |description| description.kv_layout.kv_heads = 8),
        ("kv_layout.full_layers", |description| description.kv_layout.full_layers = vec![0]),
    ];
    for (field, change) in changes {
        let mut bench = Bench::new(4);
        let mut stranger = report(Role::Decode, "d", 1);
        change(&mut stranger.description);
        bench.says(report(Role::Prefill, "p", 1));
        bench.says(stranger);
        assert_eq!(bench.num_pairs(), 0, "{field}");
        let found = links::mismatch(&bench.fleet.workers[1], &bench.fleet.workers[0]).unwrap();
        assert!(found.starts_with(&format!("{field}: ")), "{found}");
    }
}

#[test]
fn a_pair_is_used_once_its_link_is_open() {
    let mut bench = Bench::new(4);
    let decode = || report(Role::Decode, "d", 1);
    bench.hears(report(Role::Prefill, "p", 1));
    bench.hears(WorkerReport { state: WorkerState::Loading, ..decode() });
    assert!(bench.fleet.to_link().is_empty(), "one of the two is loading");
    bench.hears(decode());
    let [order] = &bench.fleet.to_link()[..] else { panic!("one pair is ready") };
    assert_eq!((&*order.prefill.worker.0, &*order.decode.worker.0, &*order.kv_endpoint.address), ("p", "d", "h:1"));
    assert!(bench.fleet.to_link().is_empty(), "it is named once");
    assert_eq!((bench.num_pairs(), bench.place().unwrap_err()), (0, NoPlace::NoPair));
    bench.fleet.on_linked(order.pair);
    assert_eq!(bench.num_pairs(), 1);
    // In its next life the decode worker is somebody else, to whom the way is not open.
    bench.hears(report(Role::Decode, "d", 2));
    assert!(order.gone[1].is_cancelled());
    assert_eq!(bench.num_pairs(), 0);
    bench.fleet.on_linked(order.pair);
    assert_eq!(bench.num_pairs(), 0, "an answer that comes too late");
    assert_eq!(bench.fleet.to_link().len(), 1);
}

#[test]
fn why_no_pair_serves_is_said() {
    let mut bench = Bench::new(4);
    assert_eq!(bench.fleet.why_no_pair(), "no prefill worker answers; no decode worker answers");
    bench.hears(report(Role::Prefill, "p", 1));
    bench.hears(WorkerReport { state: WorkerState::Loading, ..report(Role::Decode, "d", 1) });
    let [p, d] = [("p", 1), ("d", 1)].map(|(worker, life)| report(Role::Decode, worker, life).description.peer);
    assert_eq!(bench.fleet.why_no_pair(), format!("no decode worker is ready: {d} is loading"));
    bench.hears(report(Role::Decode, "d", 1));
    let is_being_opened = format!("the way for kv between {p} and {d} is being opened");
    assert_eq!(bench.fleet.why_no_pair(), is_being_opened);
    let [order] = &bench.fleet.to_link()[..] else { panic!("one pair is ready") };
    assert_eq!(bench.fleet.why_no_pair(), is_being_opened);
    assert!(bench.fleet.on_link_failed(order.pair, "too slow"));
    assert!(!bench.fleet.on_link_failed(order.pair, "too slow"), "nothing new");
    assert_eq!(bench.fleet.why_no_pair(), format!("no way for kv between {p} and {d}: too slow"));
    bench.fleet.on_linked(order.pair);
    assert_eq!(bench.fleet.why_no_pair(), "");
    let mut stranger = report(Role::Decode, "d", 2);
    stranger.description.numerics = "bf16".into();
    bench.hears(stranger);
    let d = report(Role::Decode, "d", 2).description.peer;
    assert_eq!(bench.fleet.why_no_pair(), format!("{p} and {d} do not fit each other: numerics: f32 and bf16"));
}

#[test]
fn another_tp_is_no_difference() {
    assert_eq!(Bench::pair().num_pairs(), 1);
}

#[test]
fn a_lost_worker_is_told_to_its_requests() {
    let mut bench = Bench::pair();
    let (prefill, mut decode) = bench.place().unwrap();
    bench.fleet.on_lost(&Address::new("d", 1), "test");
    assert!(decode.gone.is_cancelled());
    assert!(!prefill.gone.is_cancelled());
    assert_eq!(bench.num_pairs(), 0);
    bench.fleet.release(&mut decode);
}

#[test]
fn a_restarted_worker_is_another_one() {
    let mut bench = Bench::pair();
    let (_, mut decode) = bench.place().unwrap();
    bench.says(report(Role::Decode, "d", 2));
    assert!(decode.gone.is_cancelled(), "its predecessor is dead");
    assert_eq!(bench.num_pairs(), 1);
    // What the predecessor held is not given back to the successor.
    bench.fleet.release(&mut decode);
    let (_, successor) = bench.place().unwrap();
    assert_eq!(successor.peer.incarnation, Incarnation(2));
    assert_ne!(successor.worker, decode.worker);
}

#[test]
fn places_are_bounded_and_come_back() {
    let mut bench = Bench::pair();
    let mut first = bench.place().unwrap();
    let _second = bench.place().unwrap();
    assert_eq!(bench.place().unwrap_err(), NoPlace::NoRoom, "decode has 2 sequences");
    bench.fleet.release(&mut first.1);
    bench.place().unwrap();
}

#[test]
fn a_prefill_worker_holds_no_more_than_it_may() {
    let mut bench = Bench::new(1);
    bench.says(report(Role::Prefill, "p", 1));
    bench.says(report(Role::Decode, "d", 1));
    let (mut prefill, _) = bench.place().unwrap();
    assert_eq!(bench.place().unwrap_err(), NoPlace::NoRoom);
    bench.fleet.release(&mut prefill);
    bench.place().unwrap();
}

#[test]
fn a_full_worker_is_believed_until_it_reports_or_has_a_place_back() {
    let mut bench = Bench::pair();
    let (_, mut served) = bench.place().unwrap();
    let (_, mut refused) = bench.place().unwrap();
    bench.fleet.mark_full(&mut refused);
    assert_eq!(bench.place().unwrap_err(), NoPlace::NoRoom);
    bench.fleet.release(&mut refused);
    assert_eq!(bench.place().unwrap_err(), NoPlace::NoRoom, "who was refused leaves no room behind");
    bench.says(report(Role::Decode, "d", 1));
    let (_, mut again) = bench.place().unwrap();
    bench.fleet.mark_full(&mut again);
    bench.fleet.release(&mut again);
    bench.fleet.release(&mut served);
    bench.place().unwrap();
}

#[test]
fn one_that_was_refused_asks_alone() {
    let ends: [fn(&mut Bench, &mut Assigned<()>); 3] = [
        |bench, asks| bench.fleet.answered(asks),
        |bench, asks| bench.fleet.release(asks),
        |bench, asks| {
            bench.fleet.mark_full(asks);
            bench.fleet.release(asks);
            bench.says(report(Role::Decode, "d", 1));
        },
    ];
    for end in ends {
        let mut bench = Bench::pair();
        let refused = Need { was_refused: true, ..bench.need() };
        let (_, mut asks) = bench.fleet.place(&refused).unwrap();
        bench.says(report(Role::Decode, "d", 1));
        assert_eq!(bench.place().unwrap_err(), NoPlace::NoRoom, "a smaller one would take what came free");
        end(&mut bench, &mut asks);
        bench.place().unwrap();
    }
}

#[test]
fn load_of_other_routers_counts() {
    let mut bench = Bench::pair();
    let mut busy = report(Role::Decode, "d", 1);
    busy.load.running = 1;
    bench.says(busy);
    bench.says(report(Role::Decode, "e", 1));
    assert_eq!(&*bench.place().unwrap().1.peer.worker.0, "e");
}

#[test]
fn requests_stay_with_their_weights() {
    let mut bench = Bench::pair();
    let old = bench.need();
    bench.fleet.on_lost(&Address::new("d", 1), "test");
    for (role, name) in [(Role::Prefill, "p2"), (Role::Decode, "d2")] {
        let mut report = report(role, name, 1);
        report.description.weights_fingerprint = "v".into();
        bench.says(report);
    }
    assert_eq!(bench.fleet.served().unwrap().model.weights_fingerprint, "v");
    assert_eq!(bench.fleet.place(&old).unwrap_err(), NoPlace::NoPair);
    bench.place().unwrap();
}

#[test]
fn the_model_with_most_pairs_is_served() {
    let mut bench = Bench::pair();
    for (role, name) in [(Role::Prefill, "a"), (Role::Decode, "b"), (Role::Decode, "c")] {
        let mut report = report(role, name, 1);
        report.description.weights_fingerprint = "v".into();
        bench.says(report);
    }
    let served = bench.fleet.served().unwrap();
    assert_eq!((&*served.model.weights_fingerprint, served.ready_pairs), ("v", 2));
}

#[test]
fn reports_that_cannot_be_true_are_refused() {
    let mut bench = Bench::pair();
    let error = bench.fleet.on_report(Role::Decode, &Address::new("x", 1), &(), report(Role::Prefill, "q", 1));
    assert_eq!(
        error.unwrap_err().to_string(),
        "q@0000000000000001 at x:1 is a prefill worker, the config lists it under decode"
    );
    let error = bench.fleet.on_report(Role::Prefill, &Address::new("x", 1), &(), report(Role::Prefill, "p", 1));
    assert_eq!(error.unwrap_err().to_string(), "p@0000000000000001 at x:1 is known at p:1 already");
}

#[test]
fn a_prompt_goes_to_who_has_computed_its_beginning_unless_it_is_too_busy() {
    for (prefix_affinity, reuses) in [(true, true), (true, false), (false, true)] {
        let mut bench = Bench { fleet: Fleet::new(4, prefix_affinity) };
        for (role, worker) in [(Role::Prefill, "p0"), (Role::Prefill, "p1"), (Role::Decode, "d0"), (Role::Decode, "d1")]
        {
            bench.says(report(role, worker, 1));
        }
        let place = |bench: &mut Bench, first: TokenId| {
            let need = Need { prompt_tokens: 1_000, beginnings: beginnings(first, 1_000), ..bench.need() };
            bench.fleet.place(&need).unwrap()
        };
        let name = |assigned: &Assigned<()>| assigned.peer.worker.0.to_string();
        let (first, one) = place(&mut bench, 1);
        let (second, two) = place(&mut bench, 5_000);
        assert_eq!((name(&first), name(&second)), ("p0".into(), "p1".into()), "the idle one");
        for mut assigned in [first, second, one, two] {
            if reuses {
                bench.fleet.mark_reuses(assigned.worker);
            }
            bench.fleet.release(&mut assigned);
        }
        // Both are idle again, and would be named p0 first.
        let (again, _) = place(&mut bench, 5_000);
        let is_known = prefix_affinity && reuses;
        let (want, computed) = if is_known { ("p1", 1_000 - 768) } else { ("p0", 1_000) };
        assert_eq!((&*name(&again), again.prompt_tokens), (want, computed), "{prefix_affinity} {reuses}");
        if is_known {
            bench.says(WorkerReport {
                load: Load { pending_prompt_tokens: 900, ..Load::default() },
                ..report(Role::Prefill, "p1", 1)
            });
            let (other, _) = place(&mut bench, 5_000);
            assert_eq!(name(&other), "p0", "900 tokens wait at p1, which is more than the 768 that it has");
        }
    }
}
