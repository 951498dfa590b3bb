//! `damask convert`: an FP8 checkpoint from a released one.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use model::fp8::Exactness;
use model::{Checkpoint, Convert, ConvertReport, DenseFormat, EMBEDDED_NANO};

/// Options of `damask convert`.
#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// A released checkpoint's directory (MXFP4 experts), or embedded-nano.
    #[arg(long)]
    model: PathBuf,
    /// Where the FP8 checkpoint goes: a directory that does not exist.
    #[arg(long, required_unless_present = "check")]
    out: Option<PathBuf>,
    /// What the projections of attention and the head become.
    #[arg(long, default_value = "bf16")]
    dense: Dense,
    /// Only read, and say how exact the conversion would be.
    #[arg(long)]
    check: bool,
    /// Threads [default: one for each processor].
    #[arg(long)]
    threads: Option<usize>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Dense {
    /// As released.
    Bf16,
    /// FP8, which rounds.
    Fp8,
}

/// Converts, or checks.
///
/// # Errors
/// A source that is damaged or of another form, a target that exists or cannot be written.
pub(crate) fn convert(args: &ConvertArgs) -> anyhow::Result<()> {
    let source = if args.model.as_os_str() == EMBEDDED_NANO {
        Checkpoint::embedded_nano()
    } else {
        Checkpoint::open(&args.model)?
    };
    let bar = bar()?;
    let available = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let convert = Convert {
        source: &source,
        dense: match args.dense {
            Dense::Bf16 => DenseFormat::Bf16,
            Dense::Fp8 => DenseFormat::Fp8,
        },
        threads: args.threads.unwrap_or(available).max(1),
        progress: &|done, total| {
            bar.set_length(total);
            bar.set_position(done);
        },
    };
    let report = match (&args.out, args.check) {
        (_, true) => convert.check(),
        (Some(out), false) => convert.write(out),
        (None, false) => bail!("--out is missing"),
    };
    bar.finish_and_clear();
    print(&report?, &source, args).context("standard output")
}

fn print(report: &ConvertReport, source: &Checkpoint, args: &ConvertArgs) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}: fp8 in blocks of 128 x 128", source.name())?;
    line(&mut out, "experts", &report.experts)?;
    if report.dense.values > 0 {
        line(&mut out, "dense", &report.dense)?;
    }
    match &args.out {
        Some(dir) if !args.check => writeln!(out, "written to {}", dir.display()),
        _ => writeln!(out, "nothing was written"),
    }
}

fn line(out: &mut dyn Write, name: &str, of: &Exactness) -> std::io::Result<()> {
    write!(out, "{name}: {} values in {} blocks, ", of.values, of.blocks)?;
    if of.is_exact() {
        return writeln!(out, "all exact");
    }
    let (values, blocks) = (of.changed_values, of.changed_blocks);
    writeln!(out, "{values} values in {blocks} blocks not exact, largest relative error {:.2e}", of.largest_change)
}

/// Progress on standard error, if that is a terminal.
fn bar() -> anyhow::Result<ProgressBar> {
    let style = ProgressStyle::with_template("[{wide_bar}] {percent} %  {bytes} of {total_bytes}, {eta} left")?;
    Ok(ProgressBar::new(0).with_style(style))
}
