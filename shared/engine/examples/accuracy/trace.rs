//! `accuracy trace MODEL_DIR TOKENS PROMPT OUT [routing=f32] [kv=fp8] [tp=N] [ep=N] RUN..`
//!
//! TOKENS is a file of little-endian u32. The first PROMPT of them are computed in chunks of 1024, the others one by one,
//! as decode does. A RUN is `free`; or `picks=FILE`, with the experts of FILE (i32 `[layers, tokens, top]`) instead of
//! the router's; or `inputs=FILE`, with the residual stream of FILE (bf16 `[layers, tokens, hidden]`) in front of each
//! layer. Each writes OUT.RUN.logits (f32 `[tokens, vocabulary]`; not for `inputs`), OUT.RUN.picks and OUT.RUN.router (the
//! router's unrounded logits, f32 `[layers, tokens, experts]`).

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, bail, ensure};
use engine::cuda::{Place, Probe};
use engine::driver::{Driver, Row, greedy};
use half::bf16;
use model::ModelConfig;
use scheduler::plan::RowOutputKind;

use crate::{Mode, build};

const CHUNK: usize = 1024;

/// What a run forces.
#[derive(Debug, Default)]
enum Forced {
    #[default]
    Nothing,
    Picks(Vec<i32>),
    Inputs(Vec<bf16>),
}

/// One run: what is forced, and what was routed.
#[derive(Debug, Default)]
struct Run {
    forced: Forced,
    picks: Vec<i32>,
    router: Vec<f32>,
}

/// Ranks route alike, so of several each writes what the others write.
#[derive(Debug)]
struct Recorder {
    tokens: usize,
    hidden: usize,
    run: Mutex<Run>,
}

/// The part of `[layers, tokens, width]` that belongs to a layer and some tokens, which stand in a row.
fn part(layer: usize, of: usize, tokens: &[Place], width: usize) -> std::ops::Range<usize> {
    let first = layer * of + tokens[0].position as usize;
    first * width..(first + tokens.len()) * width
}

impl Probe for Recorder {
    fn layer_input(&self, layer: usize, tokens: &[Place], _: &[bf16]) -> Option<Vec<bf16>> {
        let run = self.run.lock().expect("no thread panics");
        match &run.forced {
            Forced::Inputs(inputs) => Some(inputs[part(layer, self.tokens, tokens, self.hidden)].to_vec()),
            Forced::Nothing | Forced::Picks(_) => None,
        }
    }

    fn routed(&self, layer: usize, tokens: &[Place], logits: &[f32], picks: &[i32]) -> Option<Vec<i32>> {
        let run = &mut *self.run.lock().expect("no thread panics");
        let [top, experts] = [picks.len(), logits.len()].map(|len| len / tokens.len());
        run.router[part(layer, self.tokens, tokens, experts)].copy_from_slice(logits);
        let place = part(layer, self.tokens, tokens, top);
        run.picks[place.clone()].copy_from_slice(picks);
        match &run.forced {
            Forced::Picks(forced) => Some(forced[place].to_vec()),
            Forced::Nothing | Forced::Inputs(_) => None,
        }
    }
}

fn read<T: bytemuck::Pod>(path: &str) -> Result<Vec<T>> {
    let bytes = std::fs::read(path).with_context(|| path.to_string())?;
    Ok(bytemuck::pod_collect_to_vec(&bytes))
}

fn forced(run: &str, config: &ModelConfig, tokens: usize) -> Result<(Forced, &'static str)> {
    let rows = config.num_layers * tokens;
    Ok(match run.split_once('=') {
        None if run == "free" => (Forced::Nothing, "free"),
        Some(("picks", path)) => {
            let picks = read(path)?;
            ensure!(picks.len() == rows * config.experts_per_token, "{path} has {} picks", picks.len());
            (Forced::Picks(picks), "picks")
        }
        Some(("inputs", path)) => {
            let inputs = read(path)?;
            ensure!(inputs.len() == rows * config.hidden_size, "{path} has {} values", inputs.len());
            (Forced::Inputs(inputs), "inputs")
        }
        _ => bail!("unknown run {run}"),
    })
}

pub(crate) fn run(words: &[String]) -> Result<()> {
    let (mode, words) = Mode::take(words)?;
    let [model, tokens, prompt, out, runs @ ..] = &words[..] else {
        bail!("arguments: MODEL_DIR TOKENS PROMPT OUT [routing=f32] [kv=fp8] [tp=N] [ep=N] RUN..");
    };
    let tokens: Vec<u32> = read(tokens)?;
    let config = match *model {
        "nano" => model::Checkpoint::embedded_nano().config().clone(),
        directory => model::Checkpoint::open(directory.as_ref())?.config().clone(),
    };
    let recorder =
        Arc::new(Recorder { tokens: tokens.len(), hidden: config.hidden_size, run: Mutex::new(Run::default()) });
    let mut driver = build(model, mode, 1, CHUNK as u32, Some(recorder.clone()))?;
    for run in runs {
        let (forced, name) = forced(run, &config, tokens.len())?;
        let rows = config.num_layers * tokens.len();
        let wants_logits = !matches!(forced, Forced::Inputs(_));
        *recorder.run.lock().expect("no thread panics") = Run {
            forced,
            picks: vec![0; rows * config.experts_per_token],
            router: vec![0.0; rows * config.num_experts],
        };
        let file = |what: &str| PathBuf::from(format!("{out}.{name}.{what}"));
        compute(&mut driver, &tokens, prompt.parse()?, wants_logits.then(|| file("logits")))?;
        let run = recorder.run.lock().expect("no thread panics");
        std::fs::write(file("picks"), bytemuck::cast_slice::<i32, u8>(&run.picks))?;
        std::fs::write(file("router"), bytemuck::cast_slice::<f32, u8>(&run.router))?;
    }
    Ok(())
}

/// Computes all tokens in one slot, and writes their logits.
fn compute(driver: &mut Driver, tokens: &[u32], prompt: usize, out: Option<PathBuf>) -> Result<()> {
    let (prompt, rest) = tokens.split_at(prompt);
    let mut out = out.map(File::create).transpose()?.map(BufWriter::new);
    let output = if out.is_some() { RowOutputKind::AllLogits } else { RowOutputKind::None };
    driver.bind(0, prompt, greedy());
    for tokens in prompt.chunks(CHUNK).chain(rest.chunks(1)) {
        let logits = driver.step(vec![Row::new(0, tokens, output)])?.rows.remove(0).logits;
        if let Some(out) = &mut out {
            out.write_all(bytemuck::cast_slice(&logits))?;
        }
    }
    driver.end(0);
    Ok(out.as_mut().map_or(Ok(()), Write::flush)?)
}
