//! gpt-oss-nano against the fixtures, whole, in chunks, token by token and in batches.

use std::path::PathBuf;

use engine::cpu::{CpuOptions, Numerics};
use engine::cuda::CudaOptions;
use safetensors::SafeTensors;
use scheduler::plan::{RowOutputKind, StepPlan, StepRow};
use types::{KvDtype, ParallelLayout, SlotId, TokenId};

use crate::driver::{self, Driver, Row, greedy};
use crate::{ERROR_RATIO, distance, gpu_is_here, logits, nano, options, prompt, spreads};

pub(crate) const SEQUENCES: [&str; 5] = ["short5", "len40", "len130", "len300", "len1000"];
/// Steps with a smaller margin between the two best logits may go either way in bf16, whose logits are about 1/256
/// apart each.
pub(crate) const CLOSE_MARGIN: f64 = 0.5;
/// The same with a cache in E4M3, whose numbers are 1/16 apart.
const CLOSE_MARGIN_FP8: f64 = 1.0;

fn close_margin(kv_dtype: KvDtype) -> f64 {
    if kv_dtype == KvDtype::Fp8 { CLOSE_MARGIN_FP8 } else { CLOSE_MARGIN }
}

fn cpu_in_bf16(kv_dtype: KvDtype) -> Driver {
    Driver::new(CpuOptions { numerics: Numerics::BF16, kv_dtype, ..driver::options(ParallelLayout::tp(4)) })
}

fn read(name: &str) -> Vec<u8> {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/nano");
    let folder = std::env::var_os("NANO_FIXTURES").map_or_else(|| default.into(), PathBuf::from);
    let path = folder.join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()))
}

/// Tokens and expected logits (of all positions, or the last ones) of a numeric sequence.
fn sequence(name: &str) -> (Vec<TokenId>, Vec<f32>) {
    let bytes = read(&format!("{name}.safetensors"));
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| file.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
    let tokens = words("input_ids").into_iter().map(u32::from_le_bytes).collect();
    (tokens, words("logits").into_iter().map(f32::from_le_bytes).collect())
}

/// The distance of each sequence's logits from the reference.
pub(crate) fn distances(driver: &mut Driver, chunk: usize) -> Vec<f64> {
    let of_sequence = |name: &str| {
        let (tokens, want) = sequence(name);
        let got = logits(driver, &tokens, chunk);
        distance(&got[got.len() - want.len()..], &want)
    };
    SEQUENCES.map(of_sequence).to_vec()
}

#[test]
fn logits_are_as_near_to_the_reference_as_the_cpu_engines_in_bf16() {
    if !gpu_is_here() {
        return;
    }
    let allowed = [KvDtype::Bf16, KvDtype::Fp8].map(|kv_dtype| distances(&mut cpu_in_bf16(kv_dtype), 4096));
    let fp8 = CudaOptions { kv_dtype: KvDtype::Fp8, ..options() };
    for options in spreads().into_iter().chain([fp8]) {
        let layout = format!("{}, cache in {}", options.layout, options.kv_dtype.name());
        let allowed = &allowed[usize::from(options.kv_dtype == KvDtype::Fp8)];
        let mut gpu = nano(options, None);
        // One chunk, chunks that end within pages and tiles, and decode's kernels for every token.
        for chunk in [4096, 50, 7, 1] {
            for ((name, ours), cpu) in SEQUENCES.iter().zip(distances(&mut gpu, chunk)).zip(allowed) {
                println!(
                    "{layout}, {name} in chunks of {chunk}: {ours:.2e} from f32, the cpu engine in bf16 {cpu:.2e}"
                );
                assert!(ours <= ERROR_RATIO * cpu, "{layout}, {name} in chunks of {chunk}");
            }
        }
    }
}

pub(crate) struct Continuation {
    prompt: Vec<TokenId>,
    tokens: Vec<TokenId>,
    /// First less second best logit, for each token.
    margins: Vec<f64>,
}

pub(crate) fn greedy_cases() -> Vec<Continuation> {
    let file: serde_json::Value = serde_json::from_slice(&read("greedy.json")).unwrap();
    let continuation = |case: &serde_json::Value| Continuation {
        prompt: serde_json::from_value(case["prompt_tokens"].clone()).unwrap(),
        tokens: serde_json::from_value(case["tokens"].clone()).unwrap(),
        margins: serde_json::from_value(case["margins"].clone()).unwrap(),
    };
    file["cases"].as_array().unwrap().iter().map(continuation).collect()
}

/// Runs all cases as one batch, spread over attention groups, prompts in chunks, decode running ahead, and compares token
/// by token. A case ends at its first close step that goes the other way; their number is returned.
pub(crate) fn follow(driver: &mut Driver, cases: &[Continuation], chunk: usize) -> usize {
    let slots: Vec<u32> = (0..cases.len() as u32).map(|number| driver.spread(number)).collect();
    follow_in(driver, cases, &slots, chunk)
}

/// The same, each case in its slot.
pub(crate) fn follow_in(driver: &mut Driver, cases: &[Continuation], slots: &[u32], chunk: usize) -> usize {
    let close_margin = close_margin(driver.group.kv_layout().dtype);
    for (case, slot) in cases.iter().zip(slots) {
        driver.bind(*slot, &case.prompt, greedy());
    }
    let mut done = vec![0; cases.len()];
    let mut ended = vec![false; cases.len()];
    let mut prompts: Vec<_> = cases.iter().map(|case| case.prompt.chunks(chunk)).collect();
    loop {
        let mut rows = Vec::new();
        for (number, case) in cases.iter().enumerate().filter(|(number, _)| !ended[*number]) {
            if let Some(tokens) = prompts[number].next() {
                let last = prompts[number].len() == 0;
                let output = if last { RowOutputKind::Sample } else { RowOutputKind::None };
                rows.push(Row::new(slots[number], tokens, output));
            } else if done[number] < case.tokens.len() {
                rows.push(Row::decode(slots[number]));
            }
        }
        if rows.is_empty() {
            break;
        }
        for row in driver.step(rows).rows {
            let Some(sampled) = row.sampled else { continue };
            let number = slots.iter().position(|slot| *slot == row.slot.0).expect("the row is of a case");
            let (case, at) = (&cases[number], done[number]);
            done[number] += 1;
            if sampled.token != case.tokens[at] {
                let (got, margin) = (sampled.token, case.margins[at]);
                println!("close: case {number}, token {at}: {got} for {}, margin {margin}", case.tokens[at]);
                assert!(margin < close_margin, "case {number}, token {at} is not close");
                ended[number] = true;
            }
        }
    }
    slots.iter().for_each(|slot| driver.end(*slot));
    ended.into_iter().filter(|ended| *ended).count()
}

#[test]
fn greedy_continuations_agree_but_for_close_steps() {
    if !gpu_is_here() {
        return;
    }
    let cases = greedy_cases();
    for options in spreads() {
        let layout = options.layout;
        let mut gpu = nano(options, None);
        for chunk in [4096, 50] {
            let (close, all) = (follow(&mut gpu, &cases, chunk), cases.len());
            println!(
                "{layout}, chunks of {chunk}: {} of {all} continuations equal, {close} end at a close step",
                all - close
            );
            assert!(close <= 1, "{layout}: {close} of {all} continuations end at a close step");
        }
    }
}

/// The CPU engine's too, which needs no GPU.
#[test]
fn greedy_continuations_agree_with_a_cache_in_fp8_but_for_close_steps() {
    let cases = greedy_cases();
    let mut drivers = vec![("cpu", cpu_in_bf16(KvDtype::Fp8))];
    if gpu_is_here() {
        drivers.push(("gpu", nano(CudaOptions { kv_dtype: KvDtype::Fp8, ..options() }, None)));
    }
    for (engine, mut driver) in drivers {
        for chunk in [4096, 50] {
            let close = follow(&mut driver, &cases, chunk);
            let equal = cases.len() - close;
            println!("{engine}, chunks of {chunk}: {equal} continuations equal, {close} end at a close step");
            assert!(close <= 1, "{close} of {} continuations end at a close step", cases.len());
        }
    }
}

#[test]
fn tokens_are_the_same_run_ahead_or_fed_back() {
    if !gpu_is_here() {
        return;
    }
    for options in spreads() {
        let layout = options.layout;
        let runs = runs_ahead_and_fed_back(&mut nano(options, None));
        assert_eq!(runs[0], runs[1], "{layout}");
    }
}

fn runs_ahead_and_fed_back(gpu: &mut Driver) -> Vec<Vec<Vec<TokenId>>> {
    let prompts: Vec<Vec<TokenId>> = (0..3).map(|number| prompt(40 + 30 * number)).collect();
    let slots = [0, 1, 2].map(|number| gpu.spread(number));
    let mut runs = Vec::new();
    for runs_ahead in [false, true] {
        for (slot, prompt) in slots.iter().zip(&prompts) {
            let sampling = types::Sampling { seed: 7, temperature: 1.5, presence_penalty: 0.5, ..Default::default() };
            gpu.bind(*slot, prompt, sampling);
        }
        let first = slots.iter().zip(&prompts).map(|(slot, prompt)| Row::new(*slot, prompt, RowOutputKind::Sample));
        gpu.launch(first.collect());
        let mut tokens: Vec<Vec<TokenId>> = Vec::new();
        for step in 0..60 {
            if runs_ahead && step < 59 {
                gpu.launch(slots.iter().map(|slot| Row::decode(*slot)).collect());
            }
            let rows = gpu.group.collect().unwrap().rows;
            tokens.push(rows.into_iter().map(|row| row.sampled.expect("the row samples").token).collect());
            if !runs_ahead && step < 59 {
                let known = |(slot, token): (&u32, &TokenId)| Row::new(*slot, &[*token], RowOutputKind::Sample);
                gpu.launch(slots.iter().zip(&tokens[step]).map(known).collect());
            }
        }
        slots.iter().for_each(|slot| gpu.end(*slot));
        runs.push(tokens);
    }
    runs
}

/// The same prompt in batches of many sizes, each padded and computed in its own way: all rows of a batch are equal, if they
/// are of one attention group, and near the first batch's.
#[test]
fn rows_of_a_batch_do_not_disturb_each_other() {
    if !gpu_is_here() {
        return;
    }
    for options in spreads() {
        println!("{}", options.layout);
        rows_of_batches(&mut nano(options, None));
    }
}

fn rows_of_batches(gpu: &mut Driver) {
    let (tokens, want) = sequence("len130");
    let vocab = want.len() / tokens.len();
    let want = &want[want.len() - vocab..];
    let mut alone = 0.0;
    for batch in [1, 2, 5, 16, 17, 33, 48] {
        let mut last = vec![Vec::new(); gpu.slots.dp() as usize];
        let slots: Vec<u32> = (0..batch).map(|number| gpu.spread(number)).collect();
        for slot in &slots {
            gpu.bind(*slot, &tokens, greedy());
        }
        // Prompts of different lengths before the common end, so that rows lie at other places in pages and batches.
        for slot in &slots {
            gpu.step(vec![Row::new(*slot, &tokens[..129], RowOutputKind::None)]);
        }
        let rows = slots.iter().map(|slot| Row::new(*slot, &tokens[129..], RowOutputKind::LastLogits));
        for row in gpu.step(rows.collect()).rows {
            last[gpu.slots.of(row.slot).0 as usize].push(distance(&row.logits, want));
        }
        slots.iter().for_each(|slot| gpu.end(*slot));
        let worst = last.iter().flatten().copied().fold(0.0, f64::max);
        if batch == 1 {
            alone = worst;
        }
        println!("batch {batch}: worst row {worst:.2e} from f32, alone {alone:.2e}");
        let alike = |rows: &Vec<f64>| rows.iter().all(|row| row == &rows[0]);
        assert!(last.iter().all(alike), "rows of a batch of {batch} differ");
        assert!(worst <= 2.0 * alone, "batch {batch}");
    }
}

#[test]
fn masked_tokens_are_never_sampled_but_their_logits_are_returned() {
    if !gpu_is_here() {
        return;
    }
    for options in spreads() {
        let options = CudaOptions { masked_tokens: vec![0..1000, 1001..2048], ..options };
        let mut gpu = nano(options, None);
        let sampling = types::Sampling { temperature: 100.0, ..Default::default() };
        gpu.bind(0, &prompt(40), sampling);
        for tokens in [prompt(40), vec![1000], vec![1000]] {
            let output = gpu.step(vec![Row::new(0, &tokens, RowOutputKind::Sample)]);
            assert_eq!(output.rows[0].sampled.as_ref().unwrap().token, 1000);
        }
        let output = gpu.step(vec![Row::new(0, &[1000], RowOutputKind::LastLogits)]);
        assert!(output.rows[0].logits.len() == 2048 && output.rows[0].logits.iter().all(|logit| logit.is_finite()));
    }
}

#[test]
fn a_plan_that_cannot_be_run_names_step_and_reason() {
    if !gpu_is_here() {
        return;
    }
    for options in spreads() {
        let gpu = nano(options, None);
        let row = StepRow {
            slot: SlotId(3),
            position: 0,
            tokens: scheduler::plan::RowTokens::Known(vec![1]),
            output: RowOutputKind::None,
            publish_kv: false,
            mask: None,
        };
        let plan = std::sync::Arc::new(StepPlan { step: 8, rows: vec![row], ..StepPlan::default() });
        let error = gpu.group.launch(plan).and_then(|()| gpu.group.collect()).unwrap_err().to_string();
        assert!(error.contains("step 8 cannot be run: slot 3 lacks pages"), "{error}");
    }
}

/// A layout's ranks and devices must fit, and what does not is said before anything is loaded.
#[test]
fn layouts_that_do_not_fit_are_refused() {
    if !gpu_is_here() {
        return;
    }
    let cases = [
        (ParallelLayout::tp(2), vec![0], 48, "devices are named for 1"),
        (ParallelLayout::tp(3), vec![0; 3], 48, "tp is 3"),
        (ParallelLayout { tp: 1, ep: 2, dp: 2 }, vec![0; 2], 47, "47 slots cannot be dealt out evenly to 2"),
        (ParallelLayout { tp: 1, ep: 8, dp: 16 }, vec![0; 16], 48, "which has 16 ranks; it takes 1, 2, 4 or 8"),
    ];
    for (layout, devices, max_slots, reason) in cases {
        let weights = engine::cuda::Weights::Checkpoint(std::sync::Arc::new(model::Checkpoint::embedded_nano()));
        let options = CudaOptions { layout, devices, max_slots, ..options() };
        let built = engine::cuda::build_group(weights, options, None, std::sync::Arc::new(|_| {}));
        let error = built.map(drop).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}
