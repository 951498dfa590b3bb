//! Prompts through a scheduler that reuses prefixes, or does not, and an engine. Shared by the tests of the CPU engine and the CUDA engine.

use std::sync::Arc;
use std::time::Instant;

use engine::group::EngineGroup;
use scheduler::plan::RowOutputKind;
use scheduler::{PrefillAction, PrefillConfig, PrefillRequest, PrefillScheduler, SequenceSpec};
use types::{SampledToken, TicketId, TokenId};

pub(crate) const FULL_PAGES: u32 = 200;
pub(crate) const WINDOW_PAGES: u32 = 100;
pub(crate) const VOCABULARY: usize = 2048;

pub(crate) struct Rig {
    scheduler: PrefillScheduler,
    group: EngineGroup,
    tickets: u128,
}

impl Rig {
    /// Over a group of nano with [`FULL_PAGES`] and [`WINDOW_PAGES`].
    pub(crate) fn new(group: EngineGroup, chunk_tokens: u32, prefix_reuse: bool) -> Self {
        let config = PrefillConfig {
            max_queued: 1,
            max_prompts: 1,
            max_context_tokens: 1_024,
            chunk_tokens,
            full_pages: FULL_PAGES,
            window_pages: WINDOW_PAGES,
            prefix_reuse,
            remembered_tickets: 1,
        };
        Self { scheduler: PrefillScheduler::new(config, group.kv_layout()).unwrap(), group, tickets: 0 }
    }

    /// Computes a prompt; yields the first position computed and the logits of all from there on.
    pub(crate) fn serve(&mut self, prompt: &[TokenId]) -> (u32, Vec<f32>) {
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

/// Turns of one conversation around the window and a page, then prompts that have 200 tokens in common with it.
pub(crate) fn prompts() -> Vec<Vec<TokenId>> {
    let system = tokens(0, 200);
    let user = |kind: u32, len: u32| [&system[..], &tokens(kind, len)].concat();
    let mut prompts: Vec<_> = [100, 127, 128, 129, 145, 300].map(|len| tokens(0, len)).into();
    prompts.extend([user(1, 40), user(2, 150), user(3, 90), user(2, 151)]);
    prompts
}

/// Where each of [`prompts`] begins to be computed.
pub(crate) fn starts(page_tokens: u32) -> [u32; 10] {
    match page_tokens {
        16 => [0, 96, 112, 112, 128, 144, 144, 192, 192, 336],
        32 => [0, 96, 96, 96, 128, 128, 128, 192, 192, 320],
        _ => panic!("pages of 16 or 32 positions"),
    }
}
