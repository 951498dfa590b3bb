//! The whole fleet in one process, on a simulated network and clock: gateway, router, two prefill and two decode workers, with crashes,
//! partitions, slow links and clients that go away. `SIM_SEEDS` runs that many seeds from `SIM_FIRST_SEED` on (default 20 from 1).
//!
//! Whatever happens, each request ends once: with exactly the tokens of a monolithic run, or with a typed error. When the faults are over,
//! every page of every worker is free, or kept by prefill for prompts that begin alike, and the fleet serves again.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, anyhow, bail, ensure};
use chassis::net::{Address, Network, grpc};
use chassis::shutdown::Shutdown;
use futures_util::future::join_all;
use tests::monolith::Monolith;
use tests::sim_net::SimNetwork;
use tonic::Code;
use types::{ParallelLayout, Sampling, SplitMix64};
use wire::pb::generate_response::Event;
use wire::pb::inference_client::InferenceClient;
use wire::pb::{GenerateRequest, GetModelInfoRequest};
use worker::Driver;

const WORKERS: [&str; 4] = ["prefill-0", "prefill-1", "decode-0", "decode-1"];
const REQUESTS: usize = 24;
/// Faults happen in this time, and requests begin in it.
const TROUBLE: Duration = Duration::from_secs(6);
/// What a step seems to take.
const STEP_TIME: Duration = Duration::from_millis(20);

/// A request and the answer that it must have.
struct Case {
    prompt: Vec<u32>,
    sampling: Sampling,
    tokens: Vec<u32>,
}

/// A few prompts around the edges of window and pages, greedy and sampled.
fn cases() -> anyhow::Result<Vec<Case>> {
    let mut monolith = Monolith::nano(512)?;
    [1, 15, 16, 17, 40, 127, 128, 129, 150, 200]
        .into_iter()
        .enumerate()
        .map(|(i, length)| {
            let prompt: Vec<u32> = (0..length).map(|j| (j * 97 + i as u32 * 13 + 5) % 2000).collect();
            let temperature = if i % 2 == 0 { 0.0 } else { 1.0 };
            let sampling = Sampling { temperature, seed: 900 + i as u64, ..Sampling::default() };
            let tokens = monolith.generate(&prompt, &sampling, 12 + 5 * i as u32, &[])?;
            Ok(Case { prompt, sampling, tokens })
        })
        .collect()
}

/// Random decisions of the scenario; not those of the services.
struct Dice(SplitMix64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0.below(bound)
    }

    fn time(&mut self, within: Duration) -> Duration {
        Duration::from_millis(self.below(within.as_millis() as u64))
    }
}

/// What goes wrong, and when.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Crash(&'static str),
    Restart(&'static str),
    Cut(&'static str, &'static str),
    Heal(&'static str, &'static str),
}

/// Workers crash, up to three times in all, and come back; links break and heal. All is well again by the end of [`TROUBLE`].
fn faults(dice: &mut Dice) -> Vec<(Duration, Fault)> {
    let mut faults = Vec::new();
    for _ in 0..1 + dice.below(3) {
        let worker = WORKERS[dice.below(4) as usize];
        let at = dice.time(TROUBLE - Duration::from_secs(2));
        faults.push((at, Fault::Crash(worker)));
        faults.push((at + Duration::from_millis(200) + dice.time(Duration::from_secs(1)), Fault::Restart(worker)));
    }
    for _ in 0..dice.below(4) {
        let links = [
            ("router", WORKERS[dice.below(4) as usize]),
            ("prefill-0", "decode-0"),
            ("prefill-0", "decode-1"),
            ("prefill-1", "decode-0"),
        ];
        let (a, b) = links[dice.below(4) as usize];
        let at = dice.time(TROUBLE - Duration::from_secs(4));
        faults.push((at, Fault::Cut(a, b)));
        faults.push((at + Duration::from_millis(100) + dice.time(Duration::from_secs(3)), Fault::Heal(a, b)));
    }
    faults.sort_by_key(|(at, _)| *at);
    faults
}

#[test]
fn the_fleet_survives_every_seed() -> anyhow::Result<()> {
    let number = |name: &str, default: u64| {
        std::env::var(name).map_or(Ok(default), |text| text.parse()).with_context(|| format!("{name} is no number"))
    };
    let (seeds, first) = (number("SIM_SEEDS", 20)?, number("SIM_FIRST_SEED", 1)?);
    let cases = Arc::new(cases()?);
    let mut reused = 0;
    for seed in first..first + seeds {
        let tally = run_seed(seed, &cases)
            .with_context(|| format!("seed {seed}; again with SIM_FIRST_SEED={seed} SIM_SEEDS=1"))?;
        println!("seed {seed}: {tally:?}");
        reused += tally.reused;
    }
    // Not in each seed, but in many.
    ensure!(reused > 0 || seeds < 5, "no prompt came twice to a prefill worker");
    Ok(())
}

/// How the requests of a seed ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Tally {
    answered: u32,
    refused: u32,
    given_up: u32,
    resumptions: u32,
    /// Requests whose prompts were partly cached.
    reused: u32,
}

fn run_seed(seed: u64, cases: &Arc<Vec<Case>>) -> anyhow::Result<Tally> {
    let mut dice = Dice(SplitMix64(seed));
    let mut builder = turmoil::Builder::new();
    builder
        .rng_seed(seed)
        .simulation_duration(Duration::from_secs(180))
        .tick_duration(Duration::from_millis(1))
        .min_message_latency(Duration::from_micros(200))
        .max_message_latency(Duration::from_millis(1 + dice.below(15)))
        .tcp_capacity(4096);
    let mut sim = builder.build();
    start_services(&mut sim, seed);
    let faults = faults(&mut dice);
    let plans: Vec<_> = (0..REQUESTS).map(|_| Plan::roll(&mut dice, cases.len())).collect();
    let tally = Rc::new(Cell::new(None));
    let (result, cases) = (Rc::clone(&tally), Arc::clone(cases));
    sim.client("client", async move {
        result.set(Some(client(plans, &cases).await.map_err(|error| format!("{error:#}"))?));
        Ok(())
    });
    let mut due = faults.iter().peekable();
    loop {
        while let Some((_, fault)) = due.next_if(|(at, _)| sim.elapsed() >= *at) {
            match *fault {
                Fault::Crash(host) => sim.crash(host),
                Fault::Restart(host) => sim.bounce(host),
                Fault::Cut(a, b) => sim.partition(a, b),
                Fault::Heal(a, b) => sim.repair(a, b),
            }
        }
        if sim.step().map_err(|error| anyhow!("{error}; faults were {faults:?}"))? {
            break;
        }
    }
    tally.get().context("the client ended without a result")
}

fn start_services(sim: &mut turmoil::Sim<'_>, seed: u64) {
    let lives = Arc::new(AtomicU64::new(seed << 16));
    for name in WORKERS {
        let lives = Arc::clone(&lives);
        sim.host(name, move || {
            let driver = Driver::Simulated { step_time: STEP_TIME, incarnation: lives.fetch_add(1, Ordering::Relaxed) };
            async move {
                let network: Arc<dyn Network> = Arc::new(SimNetwork::new(name));
                if name.starts_with("prefill") {
                    prefill::run(prefill_config(name, driver), network, Shutdown::new()).await?;
                } else {
                    decode::run(decode_config(name, driver), network, Shutdown::new()).await?;
                }
                Ok(())
            }
        });
    }
    sim.host("router", || async {
        let workers = "{ prefill: ['prefill-0:9100', 'prefill-1:9100'], decode: ['decode-0:9200', 'decode-1:9200'] }";
        let config = chassis::config::parse(&format!("workers: {workers}"), "router.yaml", "router", [])?;
        router::run(config, Arc::new(SimNetwork::new("router")), Shutdown::new()).await?;
        Ok(())
    });
    sim.host("gateway", || async {
        let text =
            "{ listen: 'gateway:8000', admin_listen: 'gateway:8002', router: 'router:9000', model: embedded-nano }";
        let config = chassis::config::parse(text, "gateway.yaml", "gateway", [])?;
        gateway::run(config, Arc::new(SimNetwork::new("gateway")), Shutdown::new()).await?;
        Ok(())
    });
}

/// Small pools, so that pages run short at times.
fn prefill_config(name: &str, driver: Driver) -> prefill::Config {
    prefill::Config {
        name: name.into(),
        listen: Address::new(name, 9100),
        admin_listen: Address::new(name, 9101),
        layout: ParallelLayout::tp(1),
        max_context_tokens: 512,
        chunk_tokens: 64,
        driver,
        ..prefill::Config::default()
    }
}

/// One of the workers has two attention groups, with slots and pages of their own.
fn decode_config(name: &str, driver: Driver) -> decode::Config {
    let (layout, full_pages) = match name {
        "decode-1" => (ParallelLayout { tp: 1, ep: 2, dp: 2 }, 32),
        _ => (ParallelLayout { tp: 2, ep: 2, dp: 1 }, 48),
    };
    decode::Config {
        name: name.into(),
        listen: Address::new(name, 9200),
        admin_listen: Address::new(name, 9201),
        kv_listen: Address::new(name, 9202),
        layout,
        max_context_tokens: 512,
        max_sequences: 4,
        growth_tokens: 8,
        full_pages: Some(full_pages),
        ticket_ttl_ms: 5_000,
        driver,
        ..decode::Config::default()
    }
}

/// What the client does with one request.
struct Plan {
    case: usize,
    start: Duration,
    /// Go away after so many tokens.
    leave_after: Option<usize>,
}

impl Plan {
    fn roll(dice: &mut Dice, num_cases: usize) -> Self {
        let leave_after = (dice.below(4) == 0).then(|| dice.below(20) as usize);
        Self { case: dice.below(num_cases as u64) as usize, start: dice.time(TROUBLE), leave_after }
    }
}

async fn client(plans: Vec<Plan>, cases: &[Case]) -> anyhow::Result<Tally> {
    let network: Arc<dyn Network> = Arc::new(SimNetwork::new("client"));
    let router =
        InferenceClient::new(grpc::channel(&network, &Address::new("router", 9000), grpc::ChannelLimits::default()));
    wait_for_pairs(router.clone(), 1).await?;
    let ends = join_all(plans.iter().map(|plan| request(router.clone(), plan, &cases[plan.case]))).await;
    let mut tally = Tally::default();
    for end in ends {
        let end = end?;
        tally.answered += end.answered;
        tally.refused += end.refused;
        tally.given_up += end.given_up;
        tally.resumptions += end.resumptions;
        tally.reused += end.reused;
    }
    ensure!(tally.answered > 0, "nothing was answered: {tally:?}");

    tokio::time::sleep(TROUBLE).await;
    wait_for_pairs(router.clone(), 4).await?;
    for worker in WORKERS {
        all_pages_free(&network, worker).await?;
    }
    let last = Plan { case: 3, start: Duration::ZERO, leave_after: None };
    let end = request(router, &last, &cases[3]).await?;
    ensure!(end.answered == 1, "the fleet does not serve after the trouble: {end:?}");
    chat(&network).await?;
    Ok(tally)
}

async fn wait_for_pairs(mut router: InferenceClient<tonic::transport::Channel>, pairs: u32) -> anyhow::Result<()> {
    for _ in 0..300 {
        if let Ok(info) = router.get_model_info(GetModelInfoRequest {}).await
            && info.get_ref().ready_pairs >= pairs
        {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    bail!("the router has no {pairs} ready pairs after 30 s")
}

/// Runs one request. Whatever the fleet goes through, the answer is right or there is an error with a code.
async fn request(
    mut router: InferenceClient<tonic::transport::Channel>,
    plan: &Plan,
    case: &Case,
) -> anyhow::Result<Tally> {
    tokio::time::sleep(plan.start).await;
    let request = GenerateRequest {
        prompt_tokens: case.prompt.clone(),
        sampling: Some(case.sampling.clone().into()),
        max_tokens: Some(case.tokens.len() as u32),
        ignore_eos: true,
        ..GenerateRequest::default()
    };
    let mut tally = Tally::default();
    let mut tokens: Vec<u32> = Vec::new();
    let failed = match router.generate(request).await {
        Err(status) => status,
        Ok(response) => {
            let mut stream = response.into_inner();
            loop {
                if plan.leave_after.is_some_and(|count| tokens.len() >= count) {
                    tally.given_up = 1;
                    return Ok(tally);
                }
                match stream.message().await {
                    Ok(Some(message)) => match message.event.context("an event without content")? {
                        Event::Started(_) => {}
                        Event::Tokens(batch) => {
                            ensure!(
                                batch.first_index as usize == tokens.len(),
                                "index {} after {} tokens",
                                batch.first_index,
                                tokens.len()
                            );
                            tokens.extend(batch.tokens.iter().map(|token| token.id));
                            ensure!(case.tokens.starts_with(&tokens), "expected {:?}, got {tokens:?}", case.tokens);
                        }
                        Event::Finished(finished) => {
                            ensure!(tokens == case.tokens, "expected {:?}, got {tokens:?}", case.tokens);
                            tally.answered = 1;
                            let usage = finished.usage.context("finished without usage")?;
                            (tally.resumptions, tally.reused) = (usage.resumptions, (usage.cached_tokens > 0).into());
                            return Ok(tally);
                        }
                    },
                    Ok(None) => bail!("the stream ended without Finished after {} tokens", tokens.len()),
                    Err(status) => break status,
                }
            }
        }
    };
    ensure!(
        matches!(failed.code(), Code::ResourceExhausted | Code::Unavailable | Code::DeadlineExceeded | Code::Aborted),
        "an error of the wrong kind: {failed:?}"
    );
    tally.refused = 1;
    Ok(tally)
}

/// Asks the worker's admin port until no page is in use. Prefill may keep some for prompts to come.
async fn all_pages_free(network: &Arc<dyn Network>, worker: &str) -> anyhow::Result<()> {
    let (port, idle): (u16, &[&str]) =
        if worker.starts_with("prefill") { (9101, &["free", "cached"]) } else { (9201, &["free"]) };
    let mut busy = BTreeMap::new();
    for _ in 0..100 {
        let text =
            get(network, &Address::new(worker, port), http::Request::get("/metrics").body(String::new())?).await?;
        let pages = tests::router::parse_pages(&text)?;
        busy = pages.into_iter().filter(|((_, state), count)| !idle.contains(&&**state) && *count > 0).collect();
        if busy.is_empty() {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    bail!("{worker} still holds pages: {busy:?}")
}

/// One question through the gateway.
async fn chat(network: &Arc<dyn Network>) -> anyhow::Result<()> {
    let body = r#"{"model":"gpt-oss-nano","messages":[{"role":"user","content":"What is the capital of France?"}],"temperature":0,"reasoning_effort":"low"}"#;
    let request = http::Request::post("/v1/chat/completions")
        .header("content-type", "application/json")
        .header("host", "gateway")
        .body(body.to_owned())?;
    let answer: serde_json::Value =
        serde_json::from_str(&get(network, &Address::new("gateway", 8000), request).await?)?;
    let content =
        answer["choices"][0]["message"]["content"].as_str().with_context(|| format!("no answer: {answer}"))?;
    ensure!(content.contains("Paris"), "the capital of France is {content}");
    Ok(())
}

async fn get(network: &Arc<dyn Network>, address: &Address, request: http::Request<String>) -> anyhow::Result<String> {
    let socket = network.connect(address).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(socket)).await?;
    let exchange = async {
        let response = sender.send_request(request).await?;
        let bytes = http_body_util::BodyExt::collect(response.into_body()).await?.to_bytes();
        Ok::<_, anyhow::Error>(String::from_utf8(bytes.to_vec())?)
    };
    tokio::select! {
        text = exchange => text,
        ended = connection => bail!("the connection ended early: {ended:?}"),
    }
}
