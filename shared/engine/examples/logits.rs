//! Logits of a checkpoint on one GPU, for comparison with another implementation.
//!
//! `cargo run --release -p engine --example logits -- MODEL_DIR TOKENS PROMPT OUT`: TOKENS is a file of little-endian u32. The first
//! PROMPT of them are computed in chunks of 1024, the others one by one, as decode does. OUT receives, as little-endian
//! f32, the logits of the last 64 positions of the prompt and of every position behind it, `[positions, vocabulary]`.

#[path = "../tests/driver/mod.rs"]
mod driver;

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use driver::{Driver, Row, greedy};
use engine::cuda::{self, CudaOptions, Precision, Weights};
use model::Checkpoint;
use scheduler::plan::RowOutputKind;
use types::ParallelLayout;

const CHUNK: usize = 1024;
const LAST: usize = 64;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, tokens, prompt, out] = &arguments[..] else {
        anyhow::bail!("arguments: MODEL_DIR TOKENS PROMPT OUT");
    };
    let bytes = std::fs::read(tokens).context("the tokens")?;
    let tokens: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    let (prompt, rest) = tokens.split_at(prompt.parse::<usize>()?);
    let options = CudaOptions {
        layout: ParallelLayout::tp(1),
        routing: Precision::Bf16,
        page_tokens: 64,
        full_pages: 200,
        window_pages: 200,
        max_slots: 1,
        max_step_tokens: CHUNK as u32,
        max_context_tokens: 8192,
        publish_layers: None,
        masked_tokens: Vec::new(),
        devices: vec![0],
    };
    let weights = Weights::Checkpoint(Arc::new(Checkpoint::open(Path::new(model))?));
    let pages = [options.full_pages, options.window_pages];
    let mut driver = Driver::over(cuda::build_group(weights, options, None, Arc::new(|_| {}))?, pages);
    let mut out = std::io::BufWriter::new(std::fs::File::create(out)?);
    driver.bind(0, prompt, greedy());
    let (first, last) = prompt.split_at(prompt.len().saturating_sub(LAST));
    let chunks = first.chunks(CHUNK).map(|chunk| (chunk, RowOutputKind::None));
    let decoded = rest.chunks(1).map(|token| (token, RowOutputKind::LastLogits));
    for (tokens, output) in chunks.chain([(last, RowOutputKind::AllLogits)]).chain(decoded) {
        let logits = driver.step(vec![Row::new(0, tokens, output)]).rows.remove(0).logits;
        out.write_all(&logits.iter().flat_map(|logit| logit.to_le_bytes()).collect::<Vec<u8>>())?;
    }
    Ok(out.flush()?)
}
