//! `damask sweep` as a bench: prefill latency by input length and decode steps by batch and context, of random weights of a released
//! shape.
//!
//! `cargo bench -p engine --features cuda --bench sweep -- --shape 20b --out DIR [--chunk 8192] [--tp N] [--ep N] [--kv fp8]
//! [--weights mxfp4|fp8|bf16] [--dense bf16|fp8] [--prompts 1024,8192] [--batches 1,8] [--contexts 1024]` writes DIR/20b.{md,csv,json},
//! with several GPUs DIR/20b-epE-tpN. What is measured, and how: `engine::sweep`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use engine::cuda::{self, Weights};
use engine::sweep::{SweepOptions, sweep};
use model::{ReleasedShape, WeightScheme};
use types::{KvDtype, ParallelLayout};

struct Arguments {
    shape: ReleasedShape,
    out: PathBuf,
    /// Tokens of a prompt that a step takes.
    chunk: Option<usize>,
    layout: ParallelLayout,
    kv_dtype: KvDtype,
    scheme: WeightScheme,
    /// Instead of the standard cells.
    prompts: Option<Vec<usize>>,
    batches: Option<Vec<usize>>,
    contexts: Option<Vec<usize>>,
}

/// Numbers between commas; `-` for none.
fn numbers(words: &mut impl Iterator<Item = String>) -> Result<Option<Vec<usize>>> {
    let list = words.next().context("a list of numbers is missing")?;
    let numbers = list.split(',').filter(|word| *word != "-").map(|word| Ok(word.parse()?));
    numbers.collect::<Result<_>>().map(Some)
}

fn arguments() -> Result<Option<Arguments>> {
    let (mut shape, mut out, mut chunk, mut layout) = (None, None, None, ParallelLayout::tp(1));
    let (mut prompts, mut batches, mut contexts, mut kv_dtype) = (None, None, None, KvDtype::Bf16);
    let mut scheme = WeightScheme::default();
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--shape" => shape = Some(words.next().context("--shape takes 20b or 120b")?.parse()?),
            "--out" => out = words.next().map(PathBuf::from),
            "--chunk" => chunk = Some(words.next().context("--chunk takes a number")?.parse()?),
            "--tp" => layout.tp = words.next().context("--tp takes a number")?.parse()?,
            "--ep" => layout.ep = words.next().context("--ep takes a number")?.parse()?,
            "--kv" => {
                let name = words.next().context("--kv takes bf16 or fp8")?;
                let known = [KvDtype::Bf16, KvDtype::Fp8].into_iter().find(|dtype| dtype.name() == name);
                kv_dtype = known.context("--kv takes bf16 or fp8")?;
            }
            "--prompts" => prompts = numbers(&mut words)?,
            "--batches" => batches = numbers(&mut words)?,
            "--contexts" => contexts = numbers(&mut words)?,
            "--weights" => scheme.experts = words.next().context("--weights takes a format")?.parse()?,
            "--dense" => scheme.dense = words.next().context("--dense takes a format")?.parse()?,
            "--bench" => {} // cargo bench adds it
            other => bail!("unknown argument {other}"),
        }
    }
    let rest = |(shape, out)| Arguments { shape, out, chunk, layout, kv_dtype, scheme, prompts, batches, contexts };
    Ok(shape.zip(out).map(rest))
}

fn main() -> Result<()> {
    let Some(Arguments { shape, out, chunk, layout, kv_dtype, scheme, prompts, batches, contexts }) = arguments()?
    else {
        println!("nothing to do without --shape 20b|120b and --out DIR");
        return Ok(());
    };
    if let Err(error) = cuda::available() {
        println!("skipped: {error}");
        return Ok(());
    }
    let WeightScheme { experts, dense } = scheme;
    let model = format!("gpt-oss-{shape}-random {experts} {dense}, cache {}", kv_dtype.name());
    let mut options = SweepOptions::standard(model);
    (options.kv_dtype, options.scheme) = (kv_dtype, scheme);
    let ParallelLayout { tp, ep, .. } = layout;
    let name = if tp == 1 { shape.to_string() } else { format!("{shape}-ep{ep}-tp{tp}") };
    options.layout = layout;
    options.prompts = prompts.unwrap_or(options.prompts);
    if let (Some(batches), Some(contexts)) = (&batches, &contexts) {
        // Asked for by name: none is left out.
        let most = |list: &[usize]| list.iter().copied().max().unwrap_or(0);
        options.max_keys = options.max_keys.max(most(batches) * (most(contexts) + 256));
    }
    options.batches = batches.unwrap_or(options.batches);
    options.contexts = contexts.unwrap_or(options.contexts);
    options.chunk = chunk.unwrap_or(options.chunk);
    let weights = Weights::Random { config: shape.config(), seed: 1 };
    let result = sweep(weights, options, &mut |cell| println!("{cell}"))?;
    println!("{name}: weights and graphs in {:.1} s", result.build_seconds);
    std::fs::create_dir_all(&out).context("the output folder")?;
    std::fs::write(out.join(format!("{name}.md")), result.markdown())?;
    std::fs::write(out.join(format!("{name}.csv")), result.csv())?;
    std::fs::write(out.join(format!("{name}.json")), serde_json::to_string_pretty(&result.json())? + "\n")?;
    Ok(())
}
