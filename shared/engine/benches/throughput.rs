//! Tokens per second of the CPU engine with gpt-oss-nano in f32, in the default layouts: decode on TP4 EP4, prefill on TP2, ranks as threads.
//!
//! Decode: each stream has a prompt of 200 tokens in the cache and samples greedily, one token a step, the next step
//! launched before the last one is read. Prefill: one prompt of 1,000 tokens in chunks of 256, the last of which
//! samples. Warm: each case runs once before it counts; the median of the repeats is printed, with the fastest.
//! Sampling: one token out of 201,088, the vocabulary of gpt-oss-20b. `cargo bench -p engine --bench throughput`.

#[path = "../tests/driver/mod.rs"]
mod driver;

use std::sync::Arc;
use std::time::Instant;

use driver::{Driver, Row, greedy, options};
use engine::sampling::{Sampler, SlotSampler};
use scheduler::plan::{RowOutputKind, SlotBinding};
use types::{ParallelLayout, Sampling, SlotId};

const REPEATS: usize = 7;
const CONTEXT: usize = 200;
const PROMPT: usize = 1000;
const CHUNK: usize = 256;

/// Runs once to warm up, then yields (median, fastest) seconds.
fn measure(mut run: impl FnMut() -> f64) -> (f64, f64) {
    run();
    let mut seconds: Vec<f64> = (0..REPEATS).map(|_| run()).collect();
    seconds.sort_by(f64::total_cmp);
    (seconds[REPEATS / 2], seconds[0])
}

fn prompt(len: usize, stream: u32) -> Vec<u32> {
    (0..len as u32).map(|i| (i * 37 + stream * 101) % 2016).collect()
}

fn decode(driver: &mut Driver, streams: u32, steps: usize) -> f64 {
    for slot in 0..streams {
        let prompt = prompt(CONTEXT, slot);
        driver.bind(slot, &prompt, greedy());
        driver.step(vec![Row::new(slot, &prompt, RowOutputKind::Sample)]);
    }
    let rows = || (0..streams).map(Row::decode).collect();
    let start = Instant::now();
    driver.launch(rows());
    for _ in 1..steps {
        driver.launch(rows());
        driver.group.collect().expect("no rank is lost");
    }
    driver.group.collect().expect("no rank is lost");
    let seconds = start.elapsed().as_secs_f64();
    (0..streams).for_each(|slot| driver.end(slot));
    seconds
}

fn prefill(driver: &mut Driver) -> f64 {
    let prompt = prompt(PROMPT, 0);
    driver.bind(0, &prompt, greedy());
    let start = Instant::now();
    let chunks: Vec<&[u32]> = prompt.chunks(CHUNK).collect();
    for (i, chunk) in chunks.iter().enumerate() {
        let output = if i + 1 == chunks.len() { RowOutputKind::Sample } else { RowOutputKind::None };
        driver.step(vec![Row::new(0, chunk, output)]);
    }
    let seconds = start.elapsed().as_secs_f64();
    driver.end(0);
    seconds
}

/// Draws per second from a vocabulary of the released models' size, with logits of a plausible spread.
fn sample(sampling: Sampling) -> f64 {
    const DRAWS: u64 = 20;
    let logits: Vec<f32> = (0..201_088u32).map(|token| (token.wrapping_mul(2_654_435_761) >> 8) as f32 / 1e6).collect();
    let binding =
        SlotBinding { slot: SlotId(0), sampling: Arc::new(sampling), prompt: Arc::new([]), generated: Vec::new() };
    let (mut slot, mut sampler) = (SlotSampler::new(&binding), Sampler::default());
    let mut copy = logits.clone();
    let start = Instant::now();
    for _ in 0..DRAWS {
        copy.copy_from_slice(&logits);
        sampler.sample(&mut slot, &mut copy, None);
    }
    start.elapsed().as_secs_f64() / DRAWS as f64
}

fn report(what: &str, tokens: usize, (median, fastest): (f64, f64)) {
    let rate = |seconds: f64| tokens as f64 / seconds;
    println!("{what:<34} {:>8.0} tokens/s median, {:>8.0} fastest", rate(median), rate(fastest));
}

fn main() {
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map_or("?", |rest| rest.trim_start_matches([' ', '\t', ':']));
    println!("gpt-oss-nano, f32, KV f32, pages of 16; {cores} cores, {model}");
    for layout in [ParallelLayout { tp: 4, ep: 4, dp: 1 }, ParallelLayout::tp(1)] {
        let mut driver = Driver::new(options(layout));
        for (streams, steps) in [(1, 200), (8, 100), (32, 50)] {
            let seconds = measure(|| decode(&mut driver, streams, steps));
            report(&format!("decode {layout}, {streams} streams"), streams as usize * steps, seconds);
        }
    }
    for layout in [ParallelLayout::tp(2), ParallelLayout::tp(1)] {
        let mut driver = Driver::new(options(layout));
        report(&format!("prefill {layout}, {PROMPT} tokens"), PROMPT, measure(|| prefill(&mut driver)));
    }
    let plain = Sampling::default();
    for (what, sampling) in [
        ("greedy", greedy()),
        ("plain", plain.clone()),
        ("top-k 50", Sampling { top_k: 50, ..plain.clone() }),
        ("top-p 0.95", Sampling { top_p: 0.95, ..plain.clone() }),
        ("plain with 20 logprobs", Sampling { logprobs: Some(20), ..plain.clone() }),
    ] {
        report(&format!("sampling 201,088: {what}"), 1, measure(|| sample(sampling.clone())));
    }
}
