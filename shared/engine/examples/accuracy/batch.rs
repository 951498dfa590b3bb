//! `accuracy batch MODEL_DIR PROMPTS STEPS [routing=f32] [kv=fp8]`
//!
//! PROMPTS is a text file, a prompt a line, its tokens as numbers. Each prompt is continued greedily for STEPS tokens:
//! alone, and as one of 65 sequences, the others being the prompts behind it, over and over, each cut to another length. A
//! prompt is always computed alone, as prefill does; the steps are those that are timed, graphs and all. Prints a JSON
//! object for each prompt: tokens that are equal before the first that differs, and there the difference of the two best
//! log-probabilities alone, beside the largest change of an equal token's log-probability before.

use anyhow::{Context, Result, bail};
use engine::driver::{Driver, Row, greedy};
use scheduler::plan::RowOutputKind;
use types::{SampledToken, Sampling};

use crate::{Mode, build};

const OTHERS: usize = 64;
const LONGEST: u32 = 2048;

pub(crate) fn run(words: &[String]) -> Result<()> {
    let (mode, words) = Mode::take(words)?;
    let [model, prompts, steps] = words[..] else { bail!("arguments: MODEL_DIR PROMPTS STEPS [routing=f32] [kv=fp8]") };
    let steps: usize = steps.parse()?;
    let text = std::fs::read_to_string(prompts).context("the prompts")?;
    let numbers = |line: &str| line.split_whitespace().map(str::parse).collect::<Result<Vec<u32>, _>>();
    let prompts: Vec<Vec<u32>> = text.lines().map(numbers).collect::<Result<_, _>>()?;
    let mut driver = build(model, mode, 1 + OTHERS as u32, LONGEST, None)?;
    for (idx, prompt) in prompts.iter().enumerate() {
        let others = (0..OTHERS).map(|i| {
            let other = &prompts[(idx + 1 + i) % prompts.len()];
            &other[..other.len() - i % (other.len() / 2).max(1)]
        });
        let alone = decode(&mut driver, prompt, &[], steps)?;
        let among = decode(&mut driver, prompt, &others.collect::<Vec<_>>(), steps)?;
        println!("{}", compare(prompt.len(), &alone, &among));
    }
    Ok(())
}

/// The greedy continuation of `prompt` in slot 0, in steps that continue `others` as well.
fn decode(driver: &mut Driver, prompt: &[u32], others: &[&[u32]], steps: usize) -> Result<Vec<SampledToken>> {
    let sampling = Sampling { logprobs: Some(2), ..greedy() };
    let mut sampled = Vec::with_capacity(steps);
    for (slot, tokens) in std::iter::once(&prompt).chain(others).enumerate() {
        driver.bind(slot as u32, tokens, sampling.clone());
        let rows = driver.step(vec![Row::new(slot as u32, tokens, RowOutputKind::Sample)])?.rows;
        if slot == 0 {
            sampled.extend(rows.into_iter().filter_map(|row| row.sampled));
        }
    }
    let slots = 1 + others.len() as u32;
    while sampled.len() < steps {
        let rows = driver.step((0..slots).map(Row::decode).collect())?.rows;
        sampled.extend(rows.into_iter().find(|row| row.slot.0 == 0).and_then(|row| row.sampled));
    }
    (0..slots).for_each(|slot| driver.end(slot));
    Ok(sampled)
}

fn compare(prompt_tokens: usize, alone: &[SampledToken], among: &[SampledToken]) -> serde_json::Value {
    let equal = alone.iter().zip(among).take_while(|(a, b)| a.token == b.token).count();
    let change = |(a, b): (&SampledToken, &SampledToken)| Some((a.logprob? - b.logprob?).abs());
    let changes = alone.iter().zip(among).take(equal).filter_map(change);
    let margin = |token: &SampledToken| token.top[0].logprob - token.top[1].logprob;
    serde_json::json!({
        "prompt": prompt_tokens,
        "tokens": alone.len(),
        "equal": equal,
        "margin_where_they_part": alone.get(equal).map(margin),
        "smallest_margin_before": alone[..equal].iter().map(margin).fold(f32::INFINITY, f32::min),
        "largest_change_before": changes.fold(0.0, f32::max),
    })
}
