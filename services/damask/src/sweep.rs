//! `damask sweep`: measures the engine on the GPUs that are there.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::Args;
use engine::cuda::Weights;
use engine::sweep::{Sweep, SweepOptions, sweep};
use model::{Checkpoint, DenseFormat, ExpertFormat, RandomModel, ReleasedShape, WeightScheme};
use types::ParallelLayout;

/// Measure prefill by prompt length and decode steps by batch and context.
#[derive(Debug, Args)]
pub(crate) struct SweepArgs {
    /// Sizes of gpt-oss-20b or gpt-oss-120b with random weights: 20b or 120b.
    #[arg(long, required_unless_present = "model")]
    shape: Option<ReleasedShape>,
    /// Seed of random weights.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Model directory with config.json and safetensors.
    #[arg(long, conflicts_with = "shape")]
    model: Option<PathBuf>,
    /// How experts are held: mxfp4, fp8 or bf16 [default: as stored].
    #[arg(long = "weights")]
    experts: Option<ExpertFormat>,
    /// How attention's matrices and the head are held: bf16 or fp8 [default: as stored].
    #[arg(long)]
    dense: Option<DenseFormat>,
    /// Tensor parallelism, one GPU a rank.
    #[arg(long, default_value_t = 1)]
    tp: u32,
    /// Ways in which the experts are split [default: 1].
    #[arg(long, default_value_t = 1)]
    ep: u32,
    /// Attention groups that work on different sequences.
    #[arg(long, default_value_t = 1)]
    dp: u32,
    /// Lengths of prompts, in tokens; `none` measures no prompts [default: 1024,2048,4096,8192,16384,32768; none with several attention
    /// groups, which prefill has not].
    #[arg(long)]
    prompts: Option<String>,
    /// Sequences of a decode step; `none` measures no steps.
    #[arg(long, default_value = "1,2,4,8,16,32,64,128")]
    batches: String,
    /// Keys that each of them has in the cache.
    #[arg(long, default_value = "1024,8192,32768")]
    contexts: String,
    /// Tokens of a prompt that one step takes.
    #[arg(long, default_value_t = 32_768)]
    chunk: usize,
    /// Folder for the tables, NAME.md, NAME.csv and NAME.json; without it the first goes to standard output alone.
    #[arg(long)]
    out: Option<PathBuf>,
    /// NAME of the files [default: by model and layout].
    #[arg(long)]
    name: Option<String>,
}

impl SweepArgs {
    /// Measures; each cell is told as it comes, on standard error.
    ///
    /// # Errors
    /// No GPU, a model or layout that does not run, or a folder that cannot be written.
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let (weights, model) = self.weights()?;
        let layout = ParallelLayout { tp: self.tp, ep: self.ep, dp: self.dp };
        let stored = weights.config().stored;
        let scheme =
            WeightScheme { experts: self.experts.unwrap_or(stored.experts), dense: self.dense.unwrap_or(stored.dense) };
        let standard = SweepOptions::standard(model.clone());
        let prompts = match &self.prompts {
            Some(prompts) => list(prompts).context("--prompts")?,
            None if self.dp > 1 => Vec::new(),
            None => standard.prompts.clone(),
        };
        let options = SweepOptions {
            layout,
            scheme,
            chunk: self.chunk,
            prompts,
            batches: list(&self.batches).context("--batches")?,
            contexts: list(&self.contexts).context("--contexts")?,
            ..standard
        };
        let swept = sweep(weights, options, &mut |cell| eprintln!("{cell}"))?;
        eprintln!("weights and graphs in {:.1} s", swept.build_seconds);
        std::io::stdout().write_all(swept.markdown().as_bytes())?;
        if let Some(out) = &self.out {
            let ParallelLayout { tp, ep, dp } = layout;
            let by_layout = || format!("{}-tp{tp}-ep{ep}-dp{dp}", model.replace([' ', '/'], "-"));
            write(out, &self.name.clone().unwrap_or_else(by_layout), &swept)?;
        }
        Ok(())
    }

    fn weights(&self) -> anyhow::Result<(Weights, String)> {
        match (&self.model, self.shape) {
            (Some(dir), _) => {
                let checkpoint = Checkpoint::open(dir)?;
                let name = checkpoint.name().to_owned();
                Ok((Weights::Checkpoint(Arc::new(checkpoint)), name))
            }
            (None, Some(shape)) => {
                let random = RandomModel { shape, seed: self.seed };
                Ok((Weights::Random { config: shape.config(), seed: self.seed }, random.name()))
            }
            (None, None) => bail!("--shape or --model is needed"),
        }
    }
}

/// Numbers between commas.
pub(crate) fn list(text: &str) -> anyhow::Result<Vec<usize>> {
    if text == "none" {
        return Ok(Vec::new());
    }
    let numbers = text.split(',').map(|number| number.trim().parse::<usize>());
    numbers.collect::<Result<_, _>>().with_context(|| format!("`{text}` is no list of numbers such as 1,8,32"))
}

fn write(folder: &Path, name: &str, swept: &Sweep) -> anyhow::Result<()> {
    let json = serde_json::to_string_pretty(&swept.json())? + "\n";
    std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(folder.join(format!("{name}.md")), swept.markdown()))
        .and_then(|()| std::fs::write(folder.join(format!("{name}.csv")), swept.csv()))
        .and_then(|()| std::fs::write(folder.join(format!("{name}.json")), json))
        .with_context(|| format!("cannot write to {}", folder.display()))
}
