//! What a worker says of itself, and the reservation that ties two workers to one request.

use std::time::Duration;

use crate::ids::{PeerId, TicketId};
use crate::layout::{KvLayout, ModelFingerprint, PageGroup, ParallelLayout, Role};
use crate::slots::DpGroup;
use crate::token::TokenId;

/// Everything about a worker that stays the same as long as it lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerDescription {
    /// Name and incarnation.
    pub peer: PeerId,
    /// What it does.
    pub role: Role,
    /// Model and vocabulary.
    pub fingerprint: ModelFingerprint,
    /// SHA-256 over the parsed config and each tensor's name, dtype, shape and ends, lower-case hexadecimal: other weights, other tokens.
    pub weights_fingerprint: String,
    /// How it rounds, such as `compute f32, routing bf16`: workers that round differently may sample different tokens.
    pub numerics: String,
    /// How its KV cache lies in memory.
    pub kv_layout: KvLayout,
    /// How the model is spread over its ranks.
    pub parallel: ParallelLayout,
    /// Most positions of one sequence, prompt and answer together.
    pub max_context_tokens: u32,
    /// Tokens that end an answer by the model's own convention.
    pub eos_token_ids: Vec<TokenId>,
    /// Where KV is delivered; decode workers only.
    pub kv_endpoint: Option<KvEndpoint>,
    /// Most sequences at once; 1 for prefill.
    pub max_sequences: u32,
}

/// Where a decode worker takes KV pages in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEndpoint {
    /// Name of the transport, for example `host`.
    pub transport: String,
    /// What that transport needs to connect; `host:port` for `host`.
    pub address: String,
}

/// Whether a worker takes requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WorkerState {
    /// Weights are being loaded.
    Loading,
    /// Takes requests.
    Ready,
    /// Takes none any more; running ones go on.
    Draining,
    /// Steps are due but none has finished for too long.
    Stuck,
}

impl WorkerState {
    /// Every state.
    pub const ALL: [Self; 4] = [Self::Loading, Self::Ready, Self::Draining, Self::Stuck];

    /// The name used in metrics and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Loading => "loading",
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Stuck => "stuck",
        }
    }
}

/// How busy a worker is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests waiting for a slot.
    pub waiting: u32,
    /// Requests being computed.
    pub running: u32,
    /// Prompt tokens waiting or being computed; prefill only.
    pub pending_prompt_tokens: u64,
    /// KV pages by attention group, page group and state.
    pub pools: Vec<PagePoolLoad>,
    /// Steps finished since the start: forward progress.
    pub steps: u64,
}

/// The pages of one pool by state; the states add up to `total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PagePoolLoad {
    /// On which ranks.
    pub dp_group: DpGroup,
    /// Of which layers.
    pub group: PageGroup,
    /// All pages.
    pub total: u32,
    /// Nobody's.
    pub free: u32,
    /// Promised to a ticket.
    pub reserved: u32,
    /// Being written by a prefill worker.
    pub landing: u32,
    /// Used by a running sequence.
    pub live: u32,
    /// Complete and read-only, kept for prompts that begin alike (prefill).
    pub cached: u32,
    /// Waiting until their writer provably cannot write any more.
    pub quarantined: u32,
}

/// One heartbeat of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerReport {
    /// Who speaks.
    pub description: WorkerDescription,
    /// Whether it takes requests.
    pub state: WorkerState,
    /// How busy it is.
    pub load: Load,
}

/// A reservation on a decode worker, named by both parties in their present lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ticket {
    /// Its name, minted by the router.
    pub id: TicketId,
    /// Who will send the KV cache.
    pub prefill: PeerId,
    /// Who has reserved pages for it.
    pub decode: PeerId,
    /// Where the pages go.
    pub kv_endpoint: KvEndpoint,
    /// The decode worker's layout: prefill cuts its pages to fit these ranks.
    pub kv_layout: KvLayout,
    /// The decode worker's attention group that holds the pages: with `kv_layout` it tells the ranks ([`KvLayout::rank_of`]).
    pub dp_group: DpGroup,
    /// Decode gives the reservation up after this time if nothing was committed.
    pub ttl: Duration,
}
