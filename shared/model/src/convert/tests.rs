use std::cell::Cell;

use types::ParallelLayout;

use super::*;
use crate::rank_weights::{RankWeights, load_rank, load_rank_as, rank_bytes};
use crate::sharding::ShardPlan;

fn nano_as(dense: DenseFormat, dir: &Path) -> (Checkpoint, ConvertReport) {
    let source = Checkpoint::embedded_nano();
    let last = Cell::new((0, 0));
    let progress = |done, total| last.set((done, total));
    let convert = Convert { source: &source, dense, threads: 3, progress: &progress };
    let report = convert.write(dir).expect("nano converts");
    assert_eq!(last.get().0, last.get().1, "progress ends at the total");
    assert_eq!(convert.check().expect("nano converts"), report, "checking says the same");
    (Checkpoint::open(dir).expect("what was written opens"), report)
}

fn load(checkpoint: &Checkpoint, layout: ParallelLayout, scheme: WeightScheme) -> Vec<RankWeights> {
    let plans = ShardPlan::all(checkpoint.config(), layout).expect("a legal layout");
    let load = |plan: &ShardPlan| load_rank_as(checkpoint, plan, scheme, &|_, _| ()).expect("nano loads");
    plans.iter().map(load).collect()
}

fn assert_same(a: &RankWeights, b: &RankWeights, case: &str) {
    assert_eq!(*a.head.values, *b.head.values, "{case}: head");
    for (idx, (a, b)) in a.layers.iter().zip(&b.layers).enumerate() {
        for (name, a, b) in [("q", &a.q, &b.q), ("k", &a.k, &b.k), ("v", &a.v, &b.v), ("o", &a.o, &b.o)] {
            assert_eq!(*a.weight.values, *b.weight.values, "{case}: {name} of layer {idx}");
            assert_eq!(*a.bias, *b.bias, "{case}: {name} bias of layer {idx}");
        }
        for (expert, (a, b)) in a.experts.iter().zip(&b.experts).enumerate() {
            assert_eq!(a.gate_up.dequantize(), b.gate_up.dequantize(), "{case}: gate_up {idx}.{expert}");
            assert_eq!(a.down.dequantize(), b.down.dequantize(), "{case}: down {idx}.{expert}");
            assert_eq!(*a.down_bias, *b.down_bias, "{case}: down bias {idx}.{expert}");
        }
    }
}

#[test]
fn nanos_experts_are_exact_in_fp8() {
    let temporary = tempfile::tempdir().expect("a temporary directory");
    let (fp8, report) = nano_as(DenseFormat::Bf16, &temporary.path().join("nano-fp8"));
    assert_eq!(fp8.config().stored, WeightScheme::FP8);
    assert!(report.experts.is_exact() && report.dense == Exactness::default(), "{report:?}");
    // 4 layers of 8 experts: 5 x 3 and 3 x 3 blocks.
    assert_eq!(report.experts.blocks, 4 * 8 * (15 + 9));
    let nano = Checkpoint::embedded_nano();
    assert_eq!(fp8.stop_token_ids(), nano.stop_token_ids());
    assert_eq!(fp8.tokenizer_json(), nano.tokenizer_json());
    let whole = ParallelLayout::tp(1);
    let (a, b) = (load(&fp8, whole, WeightScheme::FP8), load(&nano, whole, WeightScheme::default()));
    assert_same(&a[0], &b[0], "exact");
}

#[test]
fn every_rank_of_every_layout_reads_its_part_of_the_same_blocks() {
    let temporary = tempfile::tempdir().expect("a temporary directory");
    let (fp8, report) = nano_as(DenseFormat::Fp8, &temporary.path().join("nano-fp8"));
    assert!(report.dense.changed_values > report.dense.values / 2, "bf16 rounds: {report:?}");
    assert!(report.dense.largest_change <= 1.0);
    let scheme = WeightScheme { experts: ExpertFormat::Fp8, dense: DenseFormat::Fp8 };
    let nano = Checkpoint::embedded_nano();
    for (tp, ep) in [(1, 1), (2, 1), (4, 1), (4, 2), (4, 4)] {
        let layout = ParallelLayout { tp, ep, dp: 1 };
        let stored = load(&fp8, layout, scheme);
        // Rounding while loading, by blocks of the whole matrix, yields what the converter wrote.
        for (rank, (a, b)) in stored.iter().zip(&load(&nano, layout, scheme)).enumerate() {
            assert_same(a, b, &format!("{layout} rank {rank}"));
        }
        for plan in ShardPlan::all(fp8.config(), layout).expect("a legal layout") {
            let done = Cell::new(0);
            load_rank(&fp8, &plan, &|bytes, _| done.set(bytes)).expect("it loads");
            assert_eq!(done.get(), rank_bytes(fp8.config(), &plan), "{layout}");
        }
    }
}

#[test]
fn what_was_converted_is_refused_as_a_source() {
    let temporary = tempfile::tempdir().expect("a temporary directory");
    let (fp8, _) = nano_as(DenseFormat::Bf16, &temporary.path().join("nano-fp8"));
    let again = Convert { source: &fp8, dense: DenseFormat::Fp8, threads: 1, progress: &|_, _| () };
    let error = again.check().expect_err("it is fp8 already").to_string();
    assert!(error.contains("nano-fp8") && error.contains("experts fp8, dense bf16"), "{error}");
}

#[test]
fn a_target_that_exists_is_left_alone_and_a_failure_leaves_nothing() {
    let temporary = tempfile::tempdir().expect("a temporary directory");
    let source = Checkpoint::embedded_nano();
    let convert = Convert { source: &source, dense: DenseFormat::Bf16, threads: 1, progress: &|_, _| () };
    let taken = temporary.path().join("taken");
    std::fs::write(&taken, "mine").expect("writable");
    let error = convert.write(&taken).expect_err("it exists");
    assert!(matches!(error, ConvertError::Exists { .. }), "{error}");
    assert_eq!(std::fs::read_to_string(&taken).expect("still there"), "mine");

    let target = temporary.path().join("new");
    let during = |done, total| {
        if done < total / 2 {
            assert!(!target.exists(), "it has its name only in the end");
        } else {
            panic!("interrupted");
        }
    };
    let interrupted = Convert { progress: &during, ..convert };
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| interrupted.write(&target))).expect_err("interrupted");
    let left: Vec<_> = std::fs::read_dir(temporary.path()).expect("readable").collect();
    assert_eq!(left.len(), 1, "only `taken`: {left:?}");
}

#[test]
fn a_config_comes_back_as_it_was() {
    for config in [crate::ModelConfig::gpt_oss_20b(), crate::ModelConfig::gpt_oss_120b()] {
        for stored in [WeightScheme::default(), WeightScheme::FP8] {
            let config = crate::ModelConfig { stored, ..config.clone() };
            let again = crate::ModelConfig::from_json(&config.to_json().to_string(), Path::new("config.json"));
            assert_eq!(again.expect("a supported config"), config);
        }
    }
}
