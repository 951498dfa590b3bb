//! A scheduler that reuses prefixes and the CPU engine: the logits of every position that is computed are the bits that they are without reuse.
#![allow(clippy::unwrap_used, reason = "tests, with parts outside of test functions")]

mod driver;
mod reuse;

use std::sync::Arc;

use driver::options;
use engine::cpu::{CpuOptions, Numerics, build_group};
use model::Checkpoint;
use reuse::{FULL_PAGES, Rig, VOCABULARY, WINDOW_PAGES, prompts, starts};
use types::{KvDtype, ParallelLayout};

fn rig(options: CpuOptions, chunk_tokens: u32, prefix_reuse: bool) -> Rig {
    let options = CpuOptions { full_pages: FULL_PAGES, window_pages: WINDOW_PAGES, ..options };
    let group = build_group(Arc::new(Checkpoint::embedded_nano()), options, None, Arc::new(|_| {})).unwrap();
    Rig::new(group, chunk_tokens, prefix_reuse)
}

#[test]
fn logits_behind_a_boundary_are_the_same_bits() {
    let modes = [(Numerics::F32, KvDtype::F32, 16), (Numerics::BF16, KvDtype::Bf16, 32)];
    for (numerics, kv_dtype, page_tokens) in modes {
        for tp in [1, 2, 4] {
            let options = || CpuOptions { numerics, kv_dtype, page_tokens, ..options(ParallelLayout::tp(tp)) };
            let (mut whole, mut reusing) = (rig(options(), 256, false), rig(options(), 48, true));
            for (prompt, expected_start) in prompts().iter().zip(starts(page_tokens)) {
                let case = format!("TP{tp}, {kv_dtype:?}, {} tokens", prompt.len());
                let (none, expected) = whole.serve(prompt);
                let (start, logits) = reusing.serve(prompt);
                assert_eq!((none, start), (0, expected_start), "{case}");
                let expected = &expected[start as usize * VOCABULARY..];
                assert_eq!(logits.len(), expected.len(), "{case}");
                let differs = logits.iter().zip(expected).position(|(a, b)| a.to_bits() != b.to_bits());
                let place = differs.map(|at| (start as usize + at / VOCABULARY, at % VOCABULARY));
                assert_eq!(place, None, "{case}: position and token");
            }
        }
    }
}
