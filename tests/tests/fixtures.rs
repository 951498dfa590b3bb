//! Compares the CPU engine with the published reference's results for gpt-oss-nano.
//!
//! `NANO_FIXTURES` names another folder of the same form (default: the copy beside this file); its README says what the files hold.
#![allow(clippy::unwrap_used, reason = "tests, with parts outside of test functions")]

#[path = "../../shared/engine/tests/driver/mod.rs"]
mod driver;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use driver::{Driver, Row, greedy, options};
use engine::cpu::{CpuOptions, Numerics, Probe};
use safetensors::SafeTensors;
use scheduler::plan::RowOutputKind;
use types::{KvDtype, ParallelLayout, TokenId};

/// The bound on `max |a - b| / max |b|`.
const TOLERANCE: f32 = 1e-3;
/// Two router logits closer than this may change places.
const ROUTER_GAP: f32 = 1e-4;

const LAYOUTS: [ParallelLayout; 4] = [
    ParallelLayout::tp(1),
    ParallelLayout::tp(2),
    ParallelLayout { tp: 4, ep: 2, dp: 1 },
    ParallelLayout { tp: 4, ep: 4, dp: 1 },
];

fn folder() -> PathBuf {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/nano");
    std::env::var_os("NANO_FIXTURES").map_or_else(|| default.into(), PathBuf::from)
}

fn read(name: &str) -> Vec<u8> {
    let path = folder().join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()))
}

fn f32s(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap_or_else(|error| panic!("tensor {name}: {error}"));
    tensor.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn u32s(file: &SafeTensors<'_>, name: &str) -> Vec<u32> {
    let tensor = file.tensor(name).unwrap_or_else(|error| panic!("tensor {name}: {error}"));
    tensor.data().as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
}

/// `max |a - b| / max |b|`, where NaN counts as infinitely far.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "the fixture has another shape");
    let far = |difference: f32| if difference.is_nan() { f32::INFINITY } else { difference };
    let worst = a.iter().zip(b).map(|(a, b)| far((a - b).abs())).fold(0.0, f32::max);
    worst / b.iter().fold(0.0f32, |worst, b| worst.max(b.abs()))
}

/// The experts of a token, each with its weight.
type Routed = Vec<(u32, f32)>;

/// Keeps what the engine computed in the last step: hidden states by layer, experts by layer and token.
#[derive(Default)]
struct Recorder {
    hidden: Mutex<BTreeMap<usize, Vec<f32>>>,
    routed: Mutex<BTreeMap<(usize, usize), Routed>>,
}

impl Probe for Recorder {
    fn hidden(&self, layer: usize, hidden: &[f32]) {
        self.hidden.lock().unwrap().insert(layer, hidden.to_vec());
    }

    fn routed(&self, layer: usize, token: usize, experts: &[(u32, f32)]) {
        self.routed.lock().unwrap().insert((layer, token), experts.to_vec());
    }
}

/// All logits of one sequence, computed in one step.
fn logits(driver: &mut Driver, tokens: &[TokenId]) -> Vec<f32> {
    driver.bind(0, tokens, greedy());
    let mut output = driver.step(vec![Row::new(0, tokens, RowOutputKind::AllLogits)]);
    driver.end(0);
    output.rows.remove(0).logits
}

/// Names of the tensors `PREFIX.N` of a file, with N, ascending.
fn numbered(file: &SafeTensors<'_>, prefix: &str) -> Vec<(usize, String)> {
    let number = |name: &str| name.strip_prefix(prefix)?.strip_prefix('.')?.parse().ok();
    let mut names: Vec<_> = file.names().iter().filter_map(|name| Some((number(name)?, name.to_string()))).collect();
    names.sort();
    names
}

#[test]
fn numeric_sequences_agree_in_f32() {
    for layout in LAYOUTS {
        let recorder = Arc::new(Recorder::default());
        let mut driver = Driver::new(CpuOptions { probe: Some(recorder.clone()), ..options(layout) });
        for name in ["short5", "len40", "len130", "len300", "len1000"] {
            let bytes = read(&format!("{name}.safetensors"));
            let file = SafeTensors::deserialize(&bytes).unwrap();
            let got = logits(&mut driver, &u32s(&file, "input_ids"));
            let want = f32s(&file, "logits");
            let worst = distance(&got[got.len() - want.len()..], &want);
            println!("{layout} {name}: logits differ by {worst:.2e}");
            assert!(worst < TOLERANCE, "{layout} {name}: logits");
            for (layer, tensor) in numbered(&file, "hidden") {
                let worst = distance(&recorder.hidden.lock().unwrap()[&layer], &f32s(&file, &tensor));
                println!("{layout} {name}: {tensor} differs by {worst:.2e}");
                assert!(worst < TOLERANCE, "{layout} {name}: {tensor}");
            }
            for (layer, tensor) in numbered(&file, "router_topk") {
                compare_routes(&format!("{layout} {name}: {tensor}"), &file, layer, &recorder.routed.lock().unwrap());
            }
        }
    }
}

/// Experts must be the same wherever the reference's choice was clear, and their weights agree there.
fn compare_routes(
    what: &str,
    file: &SafeTensors<'_>,
    layer: usize,
    routed: &BTreeMap<(usize, usize), Vec<(u32, f32)>>,
) {
    let experts = u32s(file, &format!("router_topk.{layer}"));
    let weights = f32s(file, &format!("router_weights.{layer}"));
    let gaps = f32s(file, &format!("router_gap.{layer}"));
    let per_token = experts.len() / gaps.len();
    let (mut close, mut worst) = (0, 0.0f32);
    for (token, gap) in gaps.iter().enumerate() {
        let got = &routed[&(layer, token)];
        let want = &experts[token * per_token..][..per_token];
        if !got.iter().map(|pick| pick.0).eq(want.iter().copied()) {
            assert!(*gap < ROUTER_GAP, "{what}: token {token} chose {got:?}, reference {want:?}, gap {gap}");
            close += 1;
            continue;
        }
        // The fixture lists weights in the order of its experts or by size: compare as sets.
        let mut got: Vec<f32> = got.iter().map(|pick| pick.1).collect();
        let mut want = weights[token * per_token..][..per_token].to_vec();
        got.sort_by(f32::total_cmp);
        want.sort_by(f32::total_cmp);
        worst = worst.max(distance(&got, &want));
    }
    println!(
        "{what}: {} of {} equal, the rest within {ROUTER_GAP}; weights differ by {worst:.2e}",
        gaps.len() - close,
        gaps.len()
    );
    assert!(worst < TOLERANCE, "{what}: weights");
}

#[test]
fn a_batch_agrees_alone_and_together() {
    let bytes = read("batch.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let prompts: Vec<(String, Vec<u32>)> =
        numbered(&file, "input_ids").into_iter().map(|(n, name)| (format!("logits.{n}"), u32s(&file, &name))).collect();
    assert!(!prompts.is_empty(), "batch.safetensors holds no prompt");
    for layout in LAYOUTS {
        let mut driver = Driver::new(options(layout));
        let alone: Vec<Vec<f32>> = prompts.iter().map(|(_, tokens)| logits(&mut driver, tokens)).collect();
        let rows = prompts.iter().zip(0..).map(|((_, tokens), slot)| {
            driver.bind(slot, tokens, greedy());
            Row::new(slot, tokens, RowOutputKind::AllLogits)
        });
        let rows = rows.collect();
        let together = driver.step(rows);
        for (((name, _), alone), together) in prompts.iter().zip(&alone).zip(&together.rows) {
            let want = f32s(&file, name);
            let worst = distance(&alone[alone.len() - want.len()..], &want);
            println!("{layout} batch {name}: differs by {worst:.2e}");
            assert!(worst < TOLERANCE, "{layout} {name}");
            assert!(*alone == together.logits, "{layout} {name}: alone and together are not equal bit for bit");
        }
    }
}

/// One prompt and the tokens that must follow.
struct Continuation {
    prompt: Vec<TokenId>,
    tokens: Vec<TokenId>,
    /// First less second best logit, for each token.
    margins: Vec<f64>,
}

/// Runs all cases as one batch, prompts in chunks of `chunk` tokens, and compares token by token.
fn follow(driver: &mut Driver, cases: &[Continuation], chunk: usize) {
    for (case, slot) in cases.iter().zip(0..) {
        driver.bind(slot, &case.prompt, greedy());
    }
    let mut done: Vec<Vec<TokenId>> = vec![Vec::new(); cases.len()];
    let mut prompts: Vec<_> = cases.iter().map(|case| case.prompt.chunks(chunk)).collect();
    loop {
        let mut rows = Vec::new();
        for (slot, case) in cases.iter().enumerate() {
            // A prompt that is long joins with its later chunks while shorter ones already decode.
            if let Some(tokens) = prompts[slot].next() {
                let last = prompts[slot].len() == 0;
                let output = if last { RowOutputKind::Sample } else { RowOutputKind::None };
                rows.push(Row::new(slot as u32, tokens, output));
            } else if done[slot].len() < case.tokens.len() {
                rows.push(Row::decode(slot as u32));
            }
        }
        if rows.is_empty() {
            break;
        }
        for row in driver.step(rows).rows {
            if let Some(sampled) = row.sampled {
                let (slot, done) = (row.slot.0 as usize, &mut done[row.slot.0 as usize]);
                let want = cases[slot].tokens[done.len()];
                assert_eq!(sampled.token, want, "case {slot}, token {} after {done:?}", done.len());
                done.push(sampled.token);
            }
        }
    }
    for slot in 0..cases.len() as u32 {
        driver.end(slot);
    }
}

fn greedy_cases() -> Vec<Continuation> {
    let file: serde_json::Value = serde_json::from_slice(&read("greedy.json")).unwrap();
    let cases = file["cases"].as_array().expect("greedy.json has a list of cases");
    let tokens =
        |case: &serde_json::Value, key: &str| serde_json::from_value(case[key].clone()).expect("a list of tokens");
    let continuation = |case: &serde_json::Value| Continuation {
        prompt: tokens(case, "prompt_tokens"),
        tokens: tokens(case, "tokens"),
        margins: serde_json::from_value(case["margins"].clone()).expect("a list of numbers"),
    };
    cases.iter().map(continuation).collect()
}

#[test]
fn greedy_continuations_agree_token_by_token_in_f32() {
    let cases = greedy_cases();
    for layout in LAYOUTS {
        for chunk in [4096, 50] {
            follow(&mut Driver::new(options(layout)), &cases, chunk);
        }
        let tokens: usize = cases.iter().map(|case| case.tokens.len()).sum();
        println!("{layout}: {} greedy continuations, {tokens} tokens equal", cases.len());
    }
}

/// Steps with a smaller margin between the two best logits may go either way in bf16, whose logits are about 1/256 apart each.
const BF16_MARGIN: f64 = 0.5;

#[test]
fn greedy_continuations_agree_in_bf16_where_the_margin_is_clear() {
    let mut cases = greedy_cases();
    for case in &mut cases {
        let clear = case.margins.iter().take_while(|margin| **margin >= BF16_MARGIN).count();
        case.tokens.truncate(clear);
    }
    let tokens: usize = cases.iter().map(|case| case.tokens.len()).sum();
    assert!(tokens > 0, "no token has a clear margin");
    for layout in LAYOUTS {
        let bf16 = CpuOptions { numerics: Numerics::BF16, kv_dtype: KvDtype::Bf16, ..options(layout) };
        follow(&mut Driver::new(bf16), &cases, 50);
        println!("{layout}: {tokens} tokens equal in bf16");
    }
}
