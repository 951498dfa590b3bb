//! Prefill latency by input length, and decode steps by batch and context, of random weights in MXFP4 and bf16 on one
//! GPU.
//!
//! `cargo bench -p engine --features cuda --bench sweep -- --shape 20b --out DIR [--chunk 8192]` writes
//! DIR/20b.{md,csv,json}. Wall-clock time of whole steps as a worker takes them: launch, kernels, and the tokens back
//! on the host; the next decode step is launched before the last one is read. Prefill: the median of 5 prompts after 2
//! to warm up, from an empty cache to the first token, in chunks of `--chunk` tokens. Decode: the mean of 40 steps
//! after 5. Bytes are counted, not measured; the bound is `engine::roofline`'s for the copy rate measured in the same
//! run.

#[path = "../tests/driver/mod.rs"]
mod driver;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use driver::{Driver, Row, greedy};
use engine::cuda::{self, CudaOptions, Precision, Weights};
use engine::roofline::{self, Bound, Machine};
use model::ModelConfig;
use scheduler::plan::RowOutputKind;
use types::ParallelLayout;

const PROMPTS: [usize; 6] = [1024, 2048, 4096, 8192, 16_384, 32_768];
const BATCHES: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
const CONTEXTS: [usize; 3] = [1024, 8192, 32_768];
const DEFAULT_CHUNK: usize = 8192;
const PAGE_TOKENS: u32 = 64;
/// Keys that all sequences of a batch may have together: 1.1 million positions are 40 GB of cache for 120b.
const MAX_KEYS: usize = 1_100_000;
const WARM_PROMPTS: usize = 2;
const PROMPT_REPEATS: usize = 5;
const WARM_STEPS: usize = 5;
const STEPS: usize = 40;

/// One cell of the sweep.
#[derive(Debug, Clone, Copy)]
struct Cell {
    phase: &'static str,
    batch: usize,
    /// Tokens of the prompt, or keys in the cache.
    context: usize,
    seconds: f64,
    bound: Bound,
    /// Different tokens that the rows of the last step drew: rows of one token visit the same experts, and a step of
    /// them would read less than is counted.
    distinct: usize,
}

struct Arguments {
    shape: String,
    out: PathBuf,
    /// Tokens of a prompt that a step takes.
    chunk: usize,
}

fn arguments() -> Result<Option<Arguments>> {
    let (mut shape, mut out, mut chunk) = (None, None, DEFAULT_CHUNK);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--shape" => shape = words.next(),
            "--out" => out = words.next().map(PathBuf::from),
            "--chunk" => chunk = words.next().context("--chunk takes a number")?.parse()?,
            "--bench" => {} // cargo bench adds it
            other => bail!("unknown argument {other}"),
        }
    }
    Ok(shape.zip(out).map(|(shape, out)| Arguments { shape, out, chunk }))
}

fn main() -> Result<()> {
    let Some(Arguments { shape, out, chunk }) = arguments()? else {
        println!("nothing to do without --shape 20b|120b and --out DIR");
        return Ok(());
    };
    if let Err(error) = cuda::available() {
        println!("skipped: {error}");
        return Ok(());
    }
    let config = match shape.as_str() {
        "20b" => ModelConfig::gpt_oss_20b(),
        "120b" => ModelConfig::gpt_oss_120b(),
        other => bail!("shape {other} is neither 20b nor 120b"),
    };
    let machine = Machine::h200(cuda::copy_bytes_per_s(0)?);
    let start = Instant::now();
    let mut driver = build(&config, chunk)?;
    println!("{shape}: weights and graphs in {:.1} s", start.elapsed().as_secs_f64());
    let mut cells = Vec::new();
    for tokens in PROMPTS {
        let cell = Cell {
            phase: "prefill",
            batch: 1,
            context: tokens,
            seconds: prefill(&mut driver, tokens, chunk),
            bound: roofline::prefill(&config, &machine, tokens),
            distinct: 1,
        };
        print_cell(&cell);
        cells.push(cell);
    }
    for context in CONTEXTS {
        for batch in BATCHES.into_iter().filter(|batch| batch * (context + WARM_STEPS + STEPS + 64) <= MAX_KEYS) {
            let bound = roofline::decode(&config, &machine, batch, context + WARM_STEPS + STEPS / 2);
            let (seconds, distinct) = decode(&mut driver, batch, context);
            let cell = Cell { phase: "decode", batch, context, seconds, bound, distinct };
            print_cell(&cell);
            cells.push(cell);
        }
    }
    std::fs::create_dir_all(&out).context("the output folder")?;
    std::fs::write(out.join(format!("{shape}.md")), markdown(&shape, &machine, chunk, &cells)?)?;
    std::fs::write(out.join(format!("{shape}.csv")), csv(&cells)?)?;
    std::fs::write(out.join(format!("{shape}.json")), json(&shape, &machine, chunk, &cells)?)?;
    Ok(())
}

fn build(config: &ModelConfig, chunk: usize) -> Result<Driver> {
    let pages = MAX_KEYS as u32 / PAGE_TOKENS;
    let window_pages = BATCHES[BATCHES.len() - 1] as u32 * 8 + (chunk as u32 / PAGE_TOKENS) * 2;
    let options = CudaOptions {
        layout: ParallelLayout::tp(1),
        routing: Precision::Bf16,
        page_tokens: PAGE_TOKENS,
        full_pages: pages,
        window_pages,
        max_slots: BATCHES[BATCHES.len() - 1] as u32,
        max_step_tokens: chunk as u32,
        max_context_tokens: config.max_context_tokens as u32,
        publish_layers: None,
        masked_tokens: Vec::new(),
        first_device: 0,
    };
    let weights = Weights::Random { config: config.clone(), seed: 1 };
    let group = cuda::build_group(weights, options, None, Arc::new(|_| {}))?;
    Ok(Driver::over(group, [pages, window_pages]))
}

/// Token numbers spread over the vocabulary.
fn tokens(len: usize, stream: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * 7919 + stream * 104_729) % 200_000) as u32).collect()
}

/// Seconds from an empty cache to the first token: the median.
fn prefill(driver: &mut Driver, len: usize, chunk: usize) -> f64 {
    let mut seconds = Vec::new();
    for repeat in 0..WARM_PROMPTS + PROMPT_REPEATS {
        let prompt = tokens(len, repeat);
        driver.bind(0, &prompt, greedy());
        let chunks: Vec<&[u32]> = prompt.chunks(chunk).collect();
        let start = Instant::now();
        for (i, chunk) in chunks.iter().enumerate() {
            let output = if i + 1 == chunks.len() { RowOutputKind::Sample } else { RowOutputKind::None };
            driver.launch(vec![Row::new(0, chunk, output)]);
            if i > 0 {
                driver.group.collect().expect("no rank is lost");
            }
        }
        driver.group.collect().expect("no rank is lost");
        if repeat >= WARM_PROMPTS {
            seconds.push(start.elapsed().as_secs_f64());
        }
        driver.end(0);
    }
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// Seconds of a decode step: the mean. And the number of different tokens in the last one.
fn decode(driver: &mut Driver, batch: usize, context: usize) -> (f64, usize) {
    let first = |slot: usize| Row::new(slot as u32, &tokens(1, slot), RowOutputKind::Sample);
    for slot in 0..batch {
        driver.bind(slot as u32, &[], greedy());
        // The cache is filled with random values: a sequence may begin anywhere.
        driver.sequences.get_mut(&(slot as u32)).expect("just bound").len = context as u32;
    }
    driver.launch((0..batch).map(first).collect());
    let mut start = Instant::now();
    for step in 0..WARM_STEPS + STEPS {
        driver.launch((0..batch).map(|slot| Row::decode(slot as u32)).collect());
        driver.group.collect().expect("no rank is lost");
        if step + 1 == WARM_STEPS {
            start = Instant::now();
        }
    }
    let seconds = start.elapsed().as_secs_f64() / STEPS as f64;
    let last = driver.group.collect().expect("no rank is lost");
    (0..batch).for_each(|slot| driver.end(slot as u32));
    let drawn = last.rows.iter().map(|row| row.sampled.as_ref().expect("every row samples").token);
    (seconds, drawn.collect::<BTreeSet<u32>>().len())
}

impl Cell {
    fn tokens_per_s(&self) -> f64 {
        let tokens = if self.phase == "prefill" { self.context } else { self.batch };
        tokens as f64 / self.seconds
    }

    fn share(&self) -> f64 {
        self.bound.seconds / self.seconds
    }
}

fn print_cell(cell: &Cell) {
    let Cell { phase, batch, context, seconds, distinct, .. } = cell;
    let (ms, share) = (seconds * 1e3, 100.0 * cell.share());
    println!("{phase} {batch} x {context}: {ms:.3} ms, {share:.0} % of the bound, {distinct} tokens");
}

fn markdown(shape: &str, machine: &Machine, chunk: usize, cells: &[Cell]) -> Result<String> {
    let mut text = format!("# gpt-oss-{shape}, random weights, MXFP4 experts and bf16, one GPU\n\n");
    writeln!(text, "Copy rate in this run: {:.0} GB/s. Prompts in chunks of {chunk}.\n", machine.bytes_per_s / 1e9)?;
    writeln!(
        text,
        "| phase | batch | context | ms | tokens/s | GB counted | TFLOP counted | bound ms | share of the bound |"
    )?;
    writeln!(text, "|---|---|---|---|---|---|---|---|---|---|")?;
    for cell in cells {
        let Cell { phase, batch, context, seconds, bound, distinct } = cell;
        writeln!(
            text,
            "| {phase} | {batch} | {context} | {:.2} | {:.0} | {:.2} | {:.2} | {:.2} | {:.0} % | {distinct} |",
            seconds * 1e3,
            cell.tokens_per_s(),
            bound.bytes / 1e9,
            bound.flops / 1e12,
            bound.seconds * 1e3,
            100.0 * cell.share(),
        )?;
    }
    Ok(text)
}

fn csv(cells: &[Cell]) -> Result<String> {
    let mut text =
        String::from("phase,batch,context,ms,tokens_per_s,gb_counted,tflop_counted,bound_ms,share,distinct_tokens\n");
    for cell in cells {
        let Cell { phase, batch, context, seconds, bound, distinct } = cell;
        writeln!(
            text,
            "{phase},{batch},{context},{:.4},{:.1},{:.4},{:.4},{:.4},{:.4},{distinct}",
            seconds * 1e3,
            cell.tokens_per_s(),
            bound.bytes / 1e9,
            bound.flops / 1e12,
            bound.seconds * 1e3,
            cell.share(),
        )?;
    }
    Ok(text)
}

fn json(shape: &str, machine: &Machine, chunk: usize, cells: &[Cell]) -> Result<String> {
    let cells: Vec<serde_json::Value> = cells
        .iter()
        .map(|cell| {
            serde_json::json!({
                "phase": cell.phase,
                "batch": cell.batch,
                "context": cell.context,
                "ms": cell.seconds * 1e3,
                "tokens_per_s": cell.tokens_per_s(),
                "bytes": cell.bound.bytes,
                "flops": cell.bound.flops,
                "bound_ms": cell.bound.seconds * 1e3,
                "share": cell.share(),
                "distinct_tokens": cell.distinct,
            })
        })
        .collect();
    let rate = machine.bytes_per_s;
    let report = serde_json::json!({ "shape": shape, "copy_bytes_per_s": rate, "chunk": chunk, "cells": cells });
    Ok(serde_json::to_string_pretty(&report)? + "\n")
}
