//! The CPU engine on FP8 checkpoints: it computes with the values that they stand for.
#![allow(clippy::unwrap_used, reason = "tests, with parts outside of test functions")]

mod driver;

use std::path::Path;
use std::sync::Arc;

use driver::{Driver, Row, greedy, options};
use engine::cpu::{CpuOptions, build_group};
use model::{Checkpoint, Convert, DenseFormat, ExpertFormat, WeightScheme};
use scheduler::plan::RowOutputKind;
use types::ParallelLayout;

fn convert(dir: &Path, dense: DenseFormat) -> Arc<Checkpoint> {
    let source = Checkpoint::embedded_nano();
    Convert { source: &source, dense, threads: 2, progress: &|_, _| () }.write(dir).unwrap();
    Arc::new(Checkpoint::open(dir).unwrap())
}

fn last_logits(checkpoint: &Arc<Checkpoint>, layout: ParallelLayout, scheme: WeightScheme) -> Vec<f32> {
    let options = CpuOptions { scheme, ..options(layout) };
    let pages = [options.full_pages, options.window_pages];
    let group = build_group(Arc::clone(checkpoint), options, None, Arc::new(|_| {})).unwrap();
    let mut driver = Driver::over(group, pages);
    let tokens: Vec<u32> = (0..40).map(|i| (i * 97 + 11) % 2016).collect();
    driver.bind(0, &tokens, greedy());
    driver.step(vec![Row::new(0, &tokens, RowOutputKind::LastLogits)]).rows[0].logits.clone()
}

#[test]
fn experts_in_fp8_change_nothing() {
    let temporary = tempfile::tempdir().unwrap();
    let fp8 = convert(&temporary.path().join("nano-fp8"), DenseFormat::Bf16);
    let nano = Arc::new(Checkpoint::embedded_nano());
    let want = last_logits(&nano, ParallelLayout::tp(1), WeightScheme::default());
    for layout in [ParallelLayout::tp(1), ParallelLayout::tp(4), ParallelLayout { tp: 4, ep: 4, dp: 1 }] {
        assert!(last_logits(&fp8, layout, WeightScheme::FP8) == want, "{layout}: every bit is equal");
    }
    assert!(last_logits(&nano, ParallelLayout::tp(4), WeightScheme::FP8) == want, "rounded while loading");
}

#[test]
fn dense_matrices_in_fp8_round_alike_in_every_layout() {
    let temporary = tempfile::tempdir().unwrap();
    let fp8 = convert(&temporary.path().join("nano-fp8"), DenseFormat::Fp8);
    let nano = Arc::new(Checkpoint::embedded_nano());
    let scheme = WeightScheme { experts: ExpertFormat::Fp8, dense: DenseFormat::Fp8 };
    let released = last_logits(&nano, ParallelLayout::tp(1), WeightScheme::default());
    let want = last_logits(&fp8, ParallelLayout::tp(1), scheme);
    for layout in [ParallelLayout::tp(2), ParallelLayout::tp(4)] {
        assert!(last_logits(&fp8, layout, scheme) == want, "{layout}: every bit is equal");
        assert!(last_logits(&nano, layout, scheme) == want, "{layout}, rounded while loading: every bit is equal");
    }
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x * x)).sum::<f64>();
    let error = square(&mut want.iter().zip(&released).map(|(a, b)| a - b)) / square(&mut released.iter().copied());
    // The head alone is off by about 2^-5 in each weight.
    assert!(error > 0.0 && error.sqrt() < 0.2, "relative error {}", error.sqrt());
}

#[test]
fn what_cannot_be_made_is_refused_with_the_fields_name() {
    let temporary = tempfile::tempdir().unwrap();
    let fp8 = convert(&temporary.path().join("nano-fp8"), DenseFormat::Bf16);
    let built = build_group(fp8, options(ParallelLayout::tp(1)), None, Arc::new(|_| {}));
    let error = built.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("weights.experts is mxfp4, the checkpoint has fp8 experts"), "{error}");
}
