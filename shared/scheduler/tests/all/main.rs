//! Table and property tests of both schedulers, against an engine that stores tokens where a real one stores keys and values.

mod decode_edges;
mod decode_groups;
mod decode_random;
mod decode_rig;
mod paged_engine;
mod prefill_edges;
mod prefill_random;
mod prefill_reuse;
mod prefill_rig;

use std::sync::Arc;

use scheduler::SequenceSpec;
use types::{FinishReason, Incarnation, KvDtype, KvLayout, PeerId, SampledToken, TicketId, TokenId, WorkerId};

/// gpt-oss-nano's layout, split over `tp` ranks.
fn layout(tp: u32) -> KvLayout {
    KvLayout {
        full_layers: vec![1, 3],
        window_layers: vec![0, 2],
        kv_heads: 4,
        head_dim: 64,
        page_tokens: 16,
        window: 128,
        dtype: KvDtype::F32,
        tp,
    }
}

/// Contexts at the edges of page and window.
const CONTEXTS: [u32; 12] = [1, 15, 16, 17, 127, 128, 129, 142, 143, 144, 1127, 1128];

fn peer(worker: &str, incarnation: u64) -> PeerId {
    PeerId { worker: WorkerId(worker.into()), incarnation: Incarnation(incarnation) }
}

/// A prompt of `prompt_tokens` tokens that depend on `salt`; token 7 stops it.
fn spec(salt: u32, prompt_tokens: u32, max_tokens: u32) -> SequenceSpec {
    let token = |i: u32| (i.wrapping_mul(2_654_435_761).wrapping_add(salt.wrapping_mul(40_503))) % paged_engine::VOCAB;
    SequenceSpec {
        prompt: (0..prompt_tokens).map(token).collect(),
        generated: Vec::new(),
        sampling: Arc::default(),
        stop_token_ids: [7].into(),
        max_tokens,
        constraint: None,
        cache_salt: None,
    }
}

/// As `spec`, with nothing that stops it early.
fn endless(salt: u32, prompt_tokens: u32, max_tokens: u32) -> SequenceSpec {
    SequenceSpec { stop_token_ids: [].into(), ..spec(salt, prompt_tokens, max_tokens) }
}

fn sampled(token: TokenId) -> SampledToken {
    SampledToken { token, logprob: None, top: Vec::new() }
}

fn ticket(id: u128) -> TicketId {
    TicketId(id)
}

/// What a monolithic run yields: tokens from index `generated.len()`, and why it ends.
fn reference(spec: &SequenceSpec, max_context_tokens: usize) -> (Vec<TokenId>, FinishReason) {
    let mut tokens: Vec<TokenId> = spec.prompt.iter().chain(&spec.generated).copied().collect();
    let mut output = Vec::new();
    loop {
        let token = paged_engine::next_token(&tokens, &layout(1));
        tokens.push(token);
        output.push(token);
        if spec.stop_token_ids.contains(&token) {
            return (output, FinishReason::Stop);
        }
        if spec.generated.len() + output.len() >= spec.max_tokens as usize || tokens.len() >= max_context_tokens {
            return (output, FinishReason::Length);
        }
    }
}
