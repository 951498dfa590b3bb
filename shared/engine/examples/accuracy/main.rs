//! What `tests/reference/accuracy.py` asks of the CUDA engine, on one rank or, with `tp=` and `ep=`, on several.
//!
//! `accuracy trace ..` (see `trace`): logits, experts and router logits of given tokens, free, or with experts or
//! layer inputs forced. `accuracy batch ..` (see `batch`): prompts continued alone and among others.

mod batch;
mod trace;

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use engine::cuda::{self, CudaOptions, Precision, Probe, Weights};
use engine::driver::Driver;
use model::Checkpoint;
use types::{KvDtype, ParallelLayout, SlotGroups};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.split_first() {
        Some((command, rest)) if command == "trace" => trace::run(rest),
        Some((command, rest)) if command == "batch" => batch::run(rest),
        _ => bail!("arguments: trace .. or batch .."),
    }
}

/// How the engine rounds, and over how many ranks it is spread: words `routing=f32`, `kv=fp8`, `tp=2`, `ep=2`.
#[derive(Debug, Clone, Copy)]
struct Mode {
    routing: Precision,
    kv_dtype: KvDtype,
    layout: ParallelLayout,
}

impl Mode {
    /// Splits off the words that say how the engine rounds and is spread; by default in bf16, on one rank.
    fn take(words: &[String]) -> Result<(Self, Vec<&str>)> {
        let mut mode = Self { routing: Precision::Bf16, kv_dtype: KvDtype::Bf16, layout: ParallelLayout::tp(1) };
        let mut rest = Vec::new();
        for word in words {
            match word.split_once('=') {
                Some(("routing", "f32")) => mode.routing = Precision::F32,
                Some(("routing", "bf16")) => mode.routing = Precision::Bf16,
                Some(("kv", "fp8")) => mode.kv_dtype = KvDtype::Fp8,
                Some(("kv", "bf16")) => mode.kv_dtype = KvDtype::Bf16,
                Some(("tp", ranks)) => mode.layout.tp = ranks.parse().with_context(|| word.clone())?,
                Some(("ep", ranks)) => mode.layout.ep = ranks.parse().with_context(|| word.clone())?,
                Some(("routing" | "kv", _)) => bail!("{word}: known are routing=f32|bf16 and kv=fp8|bf16"),
                _ => rest.push(word.as_str()),
            }
        }
        Ok((mode, rest))
    }
}

/// An engine over a checkpoint, its ranks spread evenly over the GPUs that are here, or over the embedded nano where `model` is `nano`.
fn build(
    model: &str,
    mode: Mode,
    max_slots: u32,
    max_step_tokens: u32,
    probe: Option<Arc<dyn Probe>>,
) -> Result<Driver> {
    let checkpoint = match model {
        "nano" => Checkpoint::embedded_nano(),
        directory => Checkpoint::open(Path::new(directory)).context("the checkpoint")?,
    };
    let gpus = cuda::available()?;
    let options = CudaOptions {
        layout: mode.layout,
        scheme: checkpoint.config().stored,
        routing: mode.routing,
        kv_dtype: mode.kv_dtype,
        page_tokens: 64,
        full_pages: 100 + 32 * max_slots,
        window_pages: 100 + 32 * max_slots,
        max_slots,
        max_step_tokens,
        max_context_tokens: 4096,
        publish_layers: None,
        masked_tokens: Vec::new(),
        devices: (0..mode.layout.ranks()).map(|rank| rank % gpus).collect(),
        probe,
    };
    let pages = [options.full_pages, options.window_pages];
    let weights = Weights::Checkpoint(Arc::new(checkpoint));
    let slots = SlotGroups::new(max_slots, mode.layout.dp)?;
    Ok(Driver::over_groups(cuda::build_group(weights, options, None, Arc::new(|_| {}))?, pages, slots))
}
