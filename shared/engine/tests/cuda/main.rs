//! The CUDA engine against the published reference's fixtures, the CPU engine, and itself in other batches and chunks.
//!
//! Without a GPU, or in a build without nvcc, each test says that it was skipped and passes. `NANO_FIXTURES` names the
//! folder of fixtures (default: the one in the repository).
//!
//! Tolerances: two engines that round to bf16 at the same places but sum in other orders differ from the f32 reference
//! by errors of the same size, not by the same errors. So our distance from f32 may be at most [`ERROR_RATIO`] times
//! that of the CPU engine in its bf16 mode.
#![allow(clippy::unwrap_used, reason = "tests, with parts outside of test functions")]

#[path = "../driver/mod.rs"]
mod driver;
#[path = "../reuse/mod.rs"]
mod reuse_rig;
#[path = "../../../device/tests/skip/mod.rs"]
mod skip;

mod groups;
mod kv_transfer;
mod nano;
mod reuse;
mod sampling;
mod schemes;
mod wide;

use std::sync::Arc;

use driver::{Driver, Row, greedy};
use engine::KvListener;
use engine::cuda::{self, CudaOptions, Precision, Weights};
use model::{Checkpoint, WeightScheme};
use scheduler::plan::RowOutputKind;
use types::{KvDtype, ParallelLayout, SlotGroups, TokenId};

/// The bound that issue trackers and papers use for "as good as the other bf16 engine", with room for one flipped
/// expert on a short prompt.
const ERROR_RATIO: f64 = 1.5;

/// Whether to run; if not, says why.
fn gpu_is_here() -> bool {
    match cuda::available() {
        Ok(gpus) => {
            assert!(gpus >= skip::promised(), "{gpus} GPUs, {} were promised", skip::promised());
            true
        }
        Err(error) => {
            skip::skip(1, error);
            false
        }
    }
}

/// Pages of 32 positions, room for 48 sequences and 32,000 positions.
fn options() -> CudaOptions {
    CudaOptions {
        layout: ParallelLayout::tp(1),
        scheme: WeightScheme::default(),
        routing: Precision::Bf16,
        kv_dtype: KvDtype::Bf16,
        page_tokens: 32,
        full_pages: 1000,
        window_pages: 1000,
        max_slots: 48,
        max_step_tokens: 4096,
        max_context_tokens: 4096,
        publish_layers: None,
        masked_tokens: Vec::new(),
        devices: vec![0],
        probe: None,
    }
}

/// The same for every layout that the GPUs here allow: one rank, ranks that exchange between two GPUs, and ranks that share
/// GPUs, whose exchanges the host orders; of one attention group and of several.
fn spreads() -> Vec<CudaOptions> {
    let ep = |ep, tp| ParallelLayout { tp, ep, dp: 1 };
    let dp = |ep, dp, tp| ParallelLayout { tp, ep, dp };
    let two = if cuda::available().expect("asked before") > 1 { [0, 1] } else { [0, 0] };
    let four = two.repeat(2);
    [
        (ParallelLayout::tp(1), vec![0]),
        (ParallelLayout::tp(2), two.to_vec()),
        (ep(2, 2), two.to_vec()),
        (ep(4, 4), four.clone()),
        (ep(2, 4), four.clone()),
        (dp(2, 2, 1), two.to_vec()),
        (dp(4, 2, 2), four.clone()),
        (dp(4, 4, 1), four),
    ]
    .map(|(layout, devices)| CudaOptions { layout, devices, ..options() })
    .into()
}

fn nano(options: CudaOptions, listener: Option<Arc<dyn KvListener>>) -> Driver {
    over(Weights::Checkpoint(Arc::new(Checkpoint::embedded_nano())), options, listener)
}

fn over(weights: Weights, options: CudaOptions, listener: Option<Arc<dyn KvListener>>) -> Driver {
    let pages = [options.full_pages, options.window_pages];
    let slots = SlotGroups::new(options.max_slots, options.layout.dp).expect("the slots divide");
    let group = cuda::build_group(weights, options, listener, Arc::new(|_| {})).expect("the model runs on this gpu");
    Driver::over_groups(group, pages, slots)
}

/// Some prompt of tokens that nano knows.
fn prompt(len: u32) -> Vec<TokenId> {
    (0..len).map(|i| (i * 97 + 11) % 2016).collect()
}

/// All logits of one sequence, computed `chunk` tokens a step.
fn logits(driver: &mut Driver, tokens: &[TokenId], chunk: usize) -> Vec<f32> {
    driver.bind(0, tokens, greedy());
    let mut all = Vec::new();
    for chunk in tokens.chunks(chunk) {
        let mut output = driver.step(vec![Row::new(0, chunk, RowOutputKind::AllLogits)]);
        all.append(&mut output.rows[0].logits);
    }
    driver.end(0);
    all
}

/// Sums of squares: of `got - want`, and of `want`.
fn squares(got: &[f32], want: &[f32]) -> (f64, f64) {
    assert_eq!(got.len(), want.len(), "logits have the same shape");
    let square = |x: f64| x * x;
    let error = got.iter().zip(want).map(|(got, want)| square(f64::from(*got) - f64::from(*want))).sum();
    (error, want.iter().map(|want| square(f64::from(*want))).sum())
}

/// `|got - want| / |want|`.
fn distance(got: &[f32], want: &[f32]) -> f64 {
    let (error, size) = squares(got, want);
    let distance = (error / size).sqrt();
    assert!(distance.is_finite(), "logits are numbers");
    distance
}
