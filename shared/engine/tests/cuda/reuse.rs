//! A scheduler that reuses prefixes: logits behind what was reused are as near to f32 as those of prompts computed whole. (They are not the same
//! bits: kernels are chosen by the number of tokens that a step computes.)

use std::sync::Arc;

use engine::cpu::{self, CpuOptions};
use engine::cuda::{self, CudaOptions, Weights};
use model::Checkpoint;
use types::{KvDtype, ParallelLayout};

use crate::reuse_rig::{FULL_PAGES, Rig, VOCABULARY, WINDOW_PAGES, prompts, starts};
use crate::{ERROR_RATIO, driver, gpu_is_here, options, spreads, squares};

fn rig(options: CudaOptions, chunk_tokens: u32, prefix_reuse: bool) -> Rig {
    let options = CudaOptions { full_pages: FULL_PAGES, window_pages: WINDOW_PAGES, ..options };
    let weights = Weights::Checkpoint(Arc::new(Checkpoint::embedded_nano()));
    Rig::new(cuda::build_group(weights, options, None, Arc::new(|_| {})).unwrap(), chunk_tokens, prefix_reuse)
}

#[test]
fn logits_behind_a_boundary_are_as_near_to_f32_as_without_reuse() {
    if !gpu_is_here() {
        return;
    }
    let exact =
        CpuOptions { full_pages: FULL_PAGES, window_pages: WINDOW_PAGES, ..driver::options(ParallelLayout::tp(1)) };
    let group = cpu::build_group(Arc::new(Checkpoint::embedded_nano()), exact, None, Arc::new(|_| {})).unwrap();
    let mut exact = Rig::new(group, 256, false);
    let expected: Vec<Vec<f32>> = prompts().iter().map(|prompt| exact.serve(prompt).1).collect();
    // Prefill is tensor-parallel alone.
    let layouts = spreads().into_iter().filter(|options| options.layout == ParallelLayout::tp(options.layout.tp));
    for spread in layouts
        .flat_map(|spread| [KvDtype::Bf16, KvDtype::Fp8].map(|kv_dtype| CudaOptions { kv_dtype, ..spread.clone() }))
    {
        let case = format!("{:?}, {:?}", spread.layout, spread.kv_dtype);
        let (mut whole, mut reusing) = (rig(spread.clone(), 256, false), rig(spread, 48, true));
        let (mut errors, mut worst) = ([0.0, 0.0], 0.0f64);
        for ((prompt, expected), expected_start) in prompts().iter().zip(&expected).zip(starts(options().page_tokens)) {
            let (none, all) = whole.serve(prompt);
            let (start, logits) = reusing.serve(prompt);
            assert_eq!((none, start), (0, expected_start), "{case}, {} tokens", prompt.len());
            let behind = start as usize * VOCABULARY;
            let (expected, all) = (&expected[behind..], &all[behind..]);
            for (error, got) in errors.iter_mut().zip([all, &logits[..]]) {
                *error += squares(got, expected).0;
            }
            let (apart, size) = squares(&logits, all);
            worst = worst.max((apart / size).sqrt());
        }
        let [without, with] = errors.map(f64::sqrt);
        eprintln!("{case}: error {with:.4} with reuse, {without:.4} without, at most {worst:.4} apart");
        assert!(with <= ERROR_RATIO * without, "{case}: {with} with reuse, {without} without");
    }
}
