//! `damask doctor`: can this machine, or this container, serve on its GPUs, and if not, which setting is to be changed?
//!
//! [`facts`] looks, [`measure`] times, [`judgement`] decides without looking again, [`report`] shows.

mod facts;
mod judgement;
mod measure;
mod report;

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use facts::Facts;
use judgement::{Expectations, Level};

/// Look at driver, GPUs, links, NCCL and container settings, and say what to change; exit code 1 if serving would fail.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print facts and findings as JSON.
    #[arg(long)]
    json: bool,
    /// GPUs that must be usable.
    #[arg(long, default_value_t = 0)]
    gpus: usize,
    /// GB/s that each pair of GPUs must reach over NVLink.
    #[arg(long, default_value_t = 100.0)]
    min_pair_gb_per_s: f64,
    /// Do not measure: takes a second, and no memory of the GPUs.
    #[arg(long)]
    no_measure: bool,
    /// The output of `damask doctor --json` in another worker's container: are the two neighbours to NCCL?
    #[arg(long)]
    against: Option<PathBuf>,
    /// What the command itself starts for each GPU.
    #[arg(long, hide = true)]
    probe: Option<u32>,
}

/// Looks, measures, and prints what was found.
///
/// # Errors
/// If something was found that would break serving.
pub(crate) fn doctor(args: &DoctorArgs) -> anyhow::Result<()> {
    if let Some(gpu) = args.probe {
        return measure::serve_probe(gpu);
    }
    let mut facts = Facts::gather();
    if !args.no_measure && !facts.gpus.is_empty() {
        facts.measured = Some(measure::measure(facts.gpus.len(), facts.nccl.fault.is_none()));
    }
    let mut findings =
        judgement::judge(&facts, Expectations { gpus: args.gpus, pair_gb_per_s: args.min_pair_gb_per_s });
    if let Some(path) = &args.against {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let other: report::Report = serde_json::from_str(&text)
            .with_context(|| format!("{} is not an output of damask doctor --json", path.display()))?;
        findings.splice(0..0, judgement::compare(&facts, &other.facts));
    }
    let mut output = std::io::stdout().lock();
    if args.json {
        let json = serde_json::to_string_pretty(&serde_json::json!({ "facts": facts, "findings": findings }))?;
        writeln!(output, "{json}")?;
    } else {
        output.write_all(report::text(&facts, &findings).as_bytes())?;
    }
    match findings.iter().filter(|finding| finding.level == Level::Fault).count() {
        0 => Ok(()),
        faults => bail!("{faults} fault(s) would break serving"),
    }
}
