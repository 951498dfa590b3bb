//! `damask sweep` as a bench: prefill latency by input length and decode steps by batch and context, of random weights of a released
//! shape on one GPU.
//!
//! `cargo bench -p engine --features cuda --bench sweep -- --shape 20b --out DIR [--chunk 8192]` writes
//! DIR/20b.{md,csv,json}. What is measured, and how: `engine::sweep`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use engine::cuda::{self, Weights};
use engine::sweep::{SweepOptions, sweep};
use model::ReleasedShape;

struct Arguments {
    shape: ReleasedShape,
    out: PathBuf,
    /// Tokens of a prompt that a step takes.
    chunk: Option<usize>,
}

fn arguments() -> Result<Option<Arguments>> {
    let (mut shape, mut out, mut chunk) = (None, None, None);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--shape" => shape = Some(words.next().context("--shape takes 20b or 120b")?.parse()?),
            "--out" => out = words.next().map(PathBuf::from),
            "--chunk" => chunk = Some(words.next().context("--chunk takes a number")?.parse()?),
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
    let mut options = SweepOptions::standard(format!("gpt-oss-{shape}-random mxfp4 bf16"));
    options.chunk = chunk.unwrap_or(options.chunk);
    let weights = Weights::Random { config: shape.config(), seed: 1 };
    let result = sweep(weights, options, &mut |cell| println!("{cell}"))?;
    println!("{shape}: weights and graphs in {:.1} s", result.build_seconds);
    std::fs::create_dir_all(&out).context("the output folder")?;
    std::fs::write(out.join(format!("{shape}.md")), result.markdown())?;
    std::fs::write(out.join(format!("{shape}.csv")), result.csv())?;
    std::fs::write(out.join(format!("{shape}.json")), serde_json::to_string_pretty(&result.json())? + "\n")?;
    Ok(())
}
