//! What goes over the wire comes back the same, and what may not be absent is missed by name.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fmt::Debug;
use std::time::Duration;

use prost::Message;
use types::*;
use wire::convert::{RequestDefaults, generate_request, sequence, ticket_id};
use wire::{InvalidMessage, pb};

fn peer(worker: &str) -> PeerId {
    PeerId { worker: WorkerId(worker.into()), incarnation: Incarnation(0xdead_beef_0000_0001) }
}

fn kv_layout() -> KvLayout {
    KvLayout {
        full_layers: vec![1, 3],
        window_layers: vec![0, 2],
        kv_heads: 4,
        head_dim: 64,
        page_tokens: 32,
        window: 128,
        dtype: KvDtype::Bf16,
        tp: 2,
    }
}

fn ticket() -> Ticket {
    Ticket {
        id: TicketId(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10),
        prefill: peer("prefill-0"),
        decode: peer("decode-0"),
        kv_endpoint: KvEndpoint { transport: "host".into(), address: "decode-0:9201".into() },
        kv_layout: kv_layout(),
        dp_group: DpGroup(3),
        ttl: Duration::from_millis(7_000),
    }
}

fn report() -> WorkerReport {
    WorkerReport {
        description: WorkerDescription {
            peer: peer("decode-0"),
            role: Role::Decode,
            fingerprint: ModelFingerprint {
                model: "gpt-oss-nano".into(),
                vocab_size: 2_048,
                tokenizer_sha256: "ab".repeat(32),
            },
            weights_fingerprint: "cd".repeat(32),
            numerics: "compute f32, routing bf16".into(),
            kv_layout: kv_layout(),
            parallel: ParallelLayout { tp: 2, ep: 2, dp: 2 },
            max_context_tokens: 8_192,
            eos_token_ids: vec![2, 5],
            kv_endpoint: Some(KvEndpoint { transport: "host".into(), address: "decode-0:9201".into() }),
            max_sequences: 32,
        },
        state: WorkerState::Draining,
        load: Load {
            waiting: 1,
            running: 2,
            pending_prompt_tokens: 3,
            pools: vec![PagePoolLoad {
                dp_group: DpGroup(1),
                group: PageGroup::Window,
                total: 26,
                free: 1,
                reserved: 2,
                landing: 3,
                live: 4,
                cached: 5,
                quarantined: 11,
            }],
            steps: 99,
        },
    }
}

fn request() -> GenerateRequest {
    GenerateRequest {
        id: RequestId::new("req-1").unwrap(),
        prompt: vec![7, 8, 9],
        generated: vec![10],
        sampling: Sampling {
            temperature: 0.0,
            top_p: 0.5,
            top_k: 40,
            min_p: 0.1,
            presence_penalty: -1.0,
            frequency_penalty: 1.5,
            repetition_penalty: 1.1,
            logit_bias: vec![(3, -100.0)],
            seed: u64::MAX,
            choice: 2,
            logprobs: Some(0),
        },
        stop_token_ids: vec![2, 5],
        max_tokens: 64,
        constraint: Some(types::Constraint { lark: r#"start: "yes" <[7]>"#.into() }),
        cache_salt: Some(CacheSalt::new(b"\0key").unwrap()),
        timeout: None,
    }
}

fn run() -> TokenRun {
    let top = vec![TokenLogprob { token: 4, logprob: -0.25 }];
    let plain = SampledToken { token: 6, logprob: None, top: vec![] };
    TokenRun { first_index: 3, tokens: vec![SampledToken { token: 4, logprob: Some(-0.25), top }, plain] }
}

fn finished() -> Finished {
    let usage = Usage { prompt_tokens: 3, cached_tokens: 1, output_tokens: 5, resumptions: 2 };
    Finished { reason: FinishReason::Stop, usage }
}

/// Through the bytes, as a peer would.
fn round<T, P>(value: T)
where
    T: Clone + PartialEq + Debug + Into<P> + TryFrom<P, Error = InvalidMessage>,
    P: Message + Default,
{
    let message: P = value.clone().into();
    let message = P::decode(message.encode_to_vec().as_slice()).unwrap();
    assert_eq!(T::try_from(message).unwrap(), value);
}

#[test]
fn every_word_survives_the_wire() {
    round::<_, pb::WorkerReport>(report());
    round::<_, pb::Ticket>(ticket());
    for event in [
        GenerateEvent::Started { request_id: RequestId::new("r").unwrap(), seed: 1 << 63 },
        GenerateEvent::Tokens(run()),
        GenerateEvent::Finished(finished()),
    ] {
        round::<_, pb::GenerateResponse>(event);
    }
    for event in [
        DecodeEvent::Reserved(ticket()),
        DecodeEvent::Joined { kv_bytes: 1 << 40, landing_us: 5 },
        DecodeEvent::Tokens(run()),
        DecodeEvent::Finished(finished()),
        DecodeEvent::Preempted,
    ] {
        round::<_, pb::DecodeEvent>(event);
    }
    let token = run().tokens.remove(0);
    for event in [
        PrefillEvent::FirstToken { index: 1, token, cached_tokens: 2, queue_us: 3, compute_us: 4 },
        PrefillEvent::Committed { kv_bytes: 1, transfer_us: 2, tail_us: 3 },
        PrefillEvent::Finished(finished()),
    ] {
        round::<_, pb::PrefillEvent>(event);
    }
}

#[test]
fn requests_survive_the_wire() {
    for cache_salt in [request().cache_salt, None] {
        let sent = GenerateRequest { cache_salt, ..request() };
        assert_eq!(sequence(sent.clone().into()).unwrap(), sent);
    }
    let sent = GenerateRequest { timeout: Some(Duration::from_millis(1_500)), ..request() };
    let defaults = RequestDefaults { request_id: RequestId::new("unused").unwrap(), seed: 0, eos_token_ids: &[5, 2] };
    assert_eq!(generate_request(sent.clone().into(), defaults).unwrap(), sent);
}

#[test]
fn what_a_client_leaves_out_is_completed() {
    let defaults =
        || RequestDefaults { request_id: RequestId::new("drawn").unwrap(), seed: 42, eos_token_ids: &[5, 2] };
    let bare = pb::GenerateRequest { prompt_tokens: vec![1], stop_token_ids: vec![9, 2], ..Default::default() };
    let request = generate_request(bare.clone(), defaults()).unwrap();
    assert_eq!(request.id.as_str(), "drawn");
    assert_eq!(request.sampling, Sampling { seed: 42, ..Sampling::default() });
    assert_eq!(request.stop_token_ids, [2, 5, 9]);
    assert_eq!(request.max_tokens, wire::convert::UNLIMITED_TOKENS);
    assert_eq!(request.cache_salt, None);
    let deaf = generate_request(pb::GenerateRequest { ignore_eos: true, ..bare.clone() }, defaults()).unwrap();
    assert_eq!(deaf.stop_token_ids, [2, 9]);
    let greedy = pb::Sampling { temperature: Some(0.0), ..Default::default() };
    let greedy = generate_request(pb::GenerateRequest { sampling: Some(greedy), ..bare }, defaults()).unwrap();
    assert_eq!(greedy.sampling.temperature, 0.0, "0 is a temperature, not an absence");
}

#[test]
fn errors_name_the_field() {
    let mut no_tp: pb::WorkerReport = report().into();
    no_tp.description.as_mut().unwrap().kv_layout.as_mut().unwrap().tp = 0;
    let mut odd_tp: pb::WorkerReport = report().into();
    odd_tp.description.as_mut().unwrap().kv_layout.as_mut().unwrap().tp = 3;
    let mut no_endpoint: pb::WorkerReport = report().into();
    no_endpoint.description.as_mut().unwrap().kv_endpoint = None;
    let mut no_state: pb::WorkerReport = report().into();
    no_state.state = 0;
    let mut bad_group: pb::WorkerReport = report().into();
    bad_group.load.as_mut().unwrap().pools[0].group = "fool".into();
    let described = |change: fn(&mut pb::WorkerDescription)| {
        let mut message: pb::WorkerReport = report().into();
        change(message.description.as_mut().unwrap());
        message
    };
    let no_context = described(|description| description.max_context_tokens = 1);
    let foreign_eos = described(|description| description.eos_token_ids.push(2_048));
    for (message, want) in [
        (no_context, "description.max_context_tokens is 1, at least 2 are needed: a prompt token and an output token"),
        (foreign_eos, "description.eos_token_ids has 2048, the vocabulary has 2048 tokens"),
        (no_tp, "description.kv_layout.tp is 0"),
        (odd_tp, "description.kv_layout.tp is 3, which does not divide 4 kv heads"),
        (no_endpoint, "description.kv_endpoint is missing, a decode worker must have one"),
        (no_state, "state is 0, unknown"),
        (bad_group, "load.pools.group is `fool`, known are full and window"),
        (pb::WorkerReport::default(), "description is missing"),
    ] {
        assert_eq!(WorkerReport::try_from(message).unwrap_err().to_string(), want);
    }
    let mut no_seed: pb::Sequence = request().into();
    no_seed.sampling.as_mut().unwrap().seed = None;
    assert_eq!(sequence(no_seed).unwrap_err().to_string(), "sampling.seed is missing");
    let nameless = pb::Sequence { request_id: String::new(), ..request().into() };
    assert_eq!(sequence(nameless).unwrap_err().to_string(), "request_id is empty");
    let salted = pb::Sequence { cache_salt: vec![1; 129], ..request().into() };
    assert_eq!(sequence(salted).unwrap_err().to_string(), "cache_salt is longer than 128 bytes");
    assert_eq!(ticket_id(&[0; 15]).unwrap_err().to_string(), "ticket_id has 15 bytes, 16 are needed");
    let empty = pb::DecodeEvent { event: Some(pb::decode_event::Event::Tokens(pb::Tokens::default())) };
    assert_eq!(DecodeEvent::try_from(empty).unwrap_err().to_string(), "tokens.tokens is empty");
    let last = pb::Tokens { first_index: u32::MAX, ..run().into() };
    let last = pb::GenerateResponse { event: Some(pb::generate_response::Event::Tokens(last)) };
    assert_eq!(
        GenerateEvent::try_from(last).unwrap_err().to_string(),
        "tokens.first_index is 4294967295: 2 more tokens cannot be numbered"
    );
    let status: tonic::Status = InvalidMessage { field: "a.b".into(), reason: "is 0".into() }.into();
    assert_eq!((status.code(), status.message()), (tonic::Code::InvalidArgument, "a.b is 0"));
}

#[test]
fn reflection_has_descriptors_of_all_services() {
    let set = prost_types::FileDescriptorSet::decode(wire::server::DESCRIPTORS).unwrap();
    let services: Vec<_> =
        set.file.iter().flat_map(|file| &file.service).filter_map(|service| service.name.as_deref()).collect();
    for service in ["Inference", "Worker", "Prefill", "Decode"] {
        assert!(services.contains(&service), "{services:?}");
    }
}
