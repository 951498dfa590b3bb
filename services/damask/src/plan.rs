//! `damask plan`: what tokens cost in each layout that was measured.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::Args;
use engine::sweep::Phase;
use serde::Deserialize;
use types::ParallelLayout;

/// Compute $ per million tokens of each layout from sweeps.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// JSON files of `damask sweep`, one for each layout.
    #[arg(required = true)]
    sweeps: Vec<PathBuf>,
    /// What one GPU costs in an hour, in $.
    #[arg(long)]
    gpu_hour_usd: f64,
    /// Leave out decode steps that take longer.
    #[arg(long)]
    max_step_ms: Option<f64>,
}

/// What is read of a sweep.
#[derive(Debug, Deserialize)]
struct Measured {
    model: String,
    layout: ParallelLayout,
    cells: Vec<MeasuredCell>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct MeasuredCell {
    phase: Phase,
    batch: usize,
    context: usize,
    ms: f64,
    tokens_per_s: f64,
}

impl PlanArgs {
    /// Prints the tables.
    ///
    /// # Errors
    /// A file that is no sweep.
    pub(crate) fn run(self) -> anyhow::Result<()> {
        ensure!(self.gpu_hour_usd > 0.0, "--gpu-hour-usd is {}, it must be above 0", self.gpu_hour_usd);
        let read = |file: &PathBuf| -> anyhow::Result<Measured> {
            let text = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
            serde_json::from_slice(&text).with_context(|| format!("{}: not a sweep", file.display()))
        };
        let sweeps: Vec<Measured> = self.sweeps.iter().map(read).collect::<anyhow::Result<_>>()?;
        std::io::stdout().write_all(tables(&sweeps, self.gpu_hour_usd, self.max_step_ms)?.as_bytes())?;
        Ok(())
    }
}

/// $ for a million tokens, on GPUs that do nothing else.
fn usd_per_million(gpus: u32, gpu_hour_usd: f64, tokens_per_s: f64) -> f64 {
    f64::from(gpus) * gpu_hour_usd / 3600.0 / tokens_per_s * 1e6
}

fn tables(sweeps: &[Measured], gpu_hour_usd: f64, max_step_ms: Option<f64>) -> Result<String, std::fmt::Error> {
    let mut text = format!(
        "One GPU costs ${gpu_hour_usd} an hour. $ is for GPUs that are always busy with this phase alone; prefill and decode have GPUs of their own, so \
         a request costs its input tokens by the first table and its output tokens by the second.\n\n\
         | model | layout | GPUs | prompt tokens | ms to the first token | tokens/s | $ per million input tokens |\n|---|---|---|---|---|---|---|\n"
    );
    let cells = |phase: Phase| {
        sweeps.iter().flat_map(move |sweep| {
            sweep.cells.iter().filter(move |cell| cell.phase == phase).map(move |cell| (sweep, *cell))
        })
    };
    for (Measured { model, layout, .. }, MeasuredCell { context, ms, tokens_per_s, .. }) in cells(Phase::Prefill) {
        // A sweep computes prompts in any layout; a prefill worker is tensor-parallel only.
        if layout.ep > 1 {
            continue;
        }
        let gpus = layout.ranks();
        let usd = usd_per_million(gpus, gpu_hour_usd, tokens_per_s);
        writeln!(text, "| {model} | TP{} | {gpus} | {context} | {ms:.1} | {tokens_per_s:.0} | {usd:.4} |", layout.tp)?;
    }
    text += "\n| model | layout | GPUs | sequences | context | ms a token | tokens/s | tokens/s a GPU | $ per million output tokens |\n\
             |---|---|---|---|---|---|---|---|---|\n";
    for (Measured { model, layout, .. }, cell) in cells(Phase::Decode) {
        let MeasuredCell { batch, context, ms, tokens_per_s, .. } = cell;
        if max_step_ms.is_some_and(|most| ms > most) {
            continue;
        }
        let gpus = layout.ranks();
        let usd = usd_per_million(gpus, gpu_hour_usd, tokens_per_s);
        let each = tokens_per_s / f64::from(gpus);
        writeln!(
            text,
            "| {model} | {layout} | {gpus} | {batch} | {context} | {ms:.2} | {tokens_per_s:.0} | {each:.0} | {usd:.4} |"
        )?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SWEEP: &str = r#"{"model": "gpt-oss-120b", "layout": {"tp": 4, "ep": 1, "dp": 1}, "chunk": 8192, "cells": [
        {"phase": "prefill", "batch": 1, "context": 8192, "ms": 40.0, "tokens_per_s": 200000.0, "share": null},
        {"phase": "decode", "batch": 128, "context": 1024, "ms": 8.0, "tokens_per_s": 16000.0},
        {"phase": "decode", "batch": 128, "context": 32768, "ms": 30.0, "tokens_per_s": 4000.0}]}"#;

    #[test]
    fn four_gpus_at_three_dollars() {
        let sweep = serde_json::from_str(SWEEP).unwrap();
        let text = tables(&[sweep], 3.0, Some(20.0)).unwrap();
        // 4 x $3 an hour are $1 in 300 s, in which 60 million input or 4.8 million output tokens pass.
        assert!(text.contains("| gpt-oss-120b | TP4 | 4 | 8192 | 40.0 | 200000 | 0.0167 |"), "{text}");
        assert!(
            text.contains("| gpt-oss-120b | EP1 DP1 TP4 | 4 | 128 | 1024 | 8.00 | 16000 | 4000 | 0.2083 |"),
            "{text}"
        );
        assert!(!text.contains("32768"), "30 ms are more than 20: {text}");
    }

    #[test]
    fn only_layouts_of_prefill_workers_have_a_price_for_prompts() {
        let sweep = serde_json::from_str(&SWEEP.replace(r#""ep": 1"#, r#""ep": 4"#)).unwrap();
        let text = tables(&[sweep], 3.0, None).unwrap();
        assert!(text.contains("| gpt-oss-120b | EP4 DP1 TP4 | 4 | 128 |"), "{text}");
        assert!(!text.contains("| 8192 | 40.0 |"), "{text}");
    }
}
