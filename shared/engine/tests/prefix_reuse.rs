//! A scheduler that reuses prefixes and the CPU engine: the logits of every position that is computed are the bits that they are without reuse.
#![allow(clippy::unwrap_used, reason = "tests, with parts outside of test functions")]

mod driver;

use std::sync::Arc;
use std::time::Instant;

use driver::options;
use engine::cpu::{CpuOptions, Numerics, build_group};
use engine::group::EngineGroup;
use model::Checkpoint;
use scheduler::plan::RowOutputKind;
use scheduler::{PrefillAction, PrefillConfig, PrefillRequest, PrefillScheduler, SequenceSpec};
use types::{KvDtype, ParallelLayout, SampledToken, TicketId, TokenId};

const VOCABULARY: usize = 2048;

struct Rig {
    scheduler: PrefillScheduler,
    group: EngineGroup,
    tickets: u128,
}

impl Rig {
    fn new(options: CpuOptions, chunk_tokens: u32, prefix_reuse: bool) -> Self {
        let config = PrefillConfig {
            max_queued: 1,
            max_prompts: 1,
            max_context_tokens: 1_024,
            chunk_tokens,
            full_pages: 200,
            window_pages: 100,
            lookahead: false,
            prefix_reuse,
            remembered_tickets: 1,
        };
        let (full_pages, window_pages) = (config.full_pages, config.window_pages);
        let options = CpuOptions { full_pages, window_pages, ..options };
        let group = build_group(Arc::new(Checkpoint::embedded_nano()), options, None, Arc::new(|_| {})).unwrap();
        Self { scheduler: PrefillScheduler::new(config, group.kv_layout()).unwrap(), group, tickets: 0 }
    }

    /// Computes a prompt; yields the first position computed and the logits of all from there on.
    fn serve(&mut self, prompt: &[TokenId]) -> (u32, Vec<f32>) {
        self.tickets += 1;
        // Of one token, so that there is nothing to be sent.
        let sequence = SequenceSpec {
            prompt: prompt.into(),
            generated: Vec::new(),
            sampling: Arc::default(),
            stop_token_ids: [].into(),
            max_tokens: 1,
            constraint: None,
            cache_salt: None,
        };
        let request = PrefillRequest { ticket: TicketId(self.tickets), sequence, deadline: Instant::now() };
        self.scheduler.submit(request).unwrap();
        let (mut first, mut logits, mut actions) = (None, Vec::new(), Vec::new());
        while let Some(mut step) = self.scheduler.plan() {
            first.get_or_insert(step.positions.start);
            step.plan.rows[0].output = RowOutputKind::AllLogits;
            self.group.launch(Arc::new(step.plan)).unwrap();
            let mut output = self.group.collect().unwrap();
            logits.append(&mut output.rows[0].logits);
            output.rows[0].sampled = step.last.then(|| SampledToken { token: 1, logprob: None, top: Vec::new() });
            self.scheduler.complete(output, &mut actions).unwrap();
        }
        assert!(matches!(actions[..], [PrefillAction::FirstToken { .. }, PrefillAction::Ended { .. }]), "{actions:?}");
        (first.unwrap(), logits)
    }
}

fn tokens(kind: u32, len: u32) -> Vec<TokenId> {
    (0..len).map(|i| (i * 97 + kind * 131 + 11) % VOCABULARY as u32).collect()
}

#[test]
fn logits_behind_a_boundary_are_the_same_bits() {
    let modes = [(Numerics::F32, KvDtype::F32), (Numerics::BF16, KvDtype::Bf16)];
    let system = tokens(0, 200);
    let user = |kind: u32, len: u32| [&system[..], &tokens(kind, len)].concat();
    // Turns of one conversation around the window and a page, then prompts that have 12 pages in common with it.
    let mut prompts: Vec<_> = [100, 127, 128, 129, 145, 300].map(|len| tokens(0, len)).into();
    prompts.extend([user(1, 40), user(2, 150), user(3, 90), user(2, 151)]);
    let expected_starts = [0, 96, 112, 112, 128, 144, 144, 192, 192, 336];
    for (numerics, kv_dtype) in modes {
        for tp in [1, 2, 4] {
            let options = || CpuOptions { numerics, kv_dtype, ..options(ParallelLayout::tp(tp)) };
            let (mut whole, mut reusing) = (Rig::new(options(), 256, false), Rig::new(options(), 48, true));
            for (prompt, expected_start) in prompts.iter().zip(expected_starts) {
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
