//! Memory for the tensors between kernels, made once for the largest step.

use device::{DeviceBuffer, Stream};
use half::bf16;
use kernels::Routing;
use kernels::choice::EXPERT_TILES;
use model::{ModelConfig, ShardPlan};

use crate::EngineError;

/// With `t` tokens, `p` pairs of token and expert, and `w` rows of logits. What a step does not fill keeps old values.
pub(crate) struct Activations {
    /// The residual stream, `[t, hidden]`.
    pub(crate) residual: DeviceBuffer<bf16>,
    /// `[t, hidden]`
    pub(crate) normed: DeviceBuffer<bf16>,
    /// What a block adds to the residual stream, `[t, hidden]`.
    pub(crate) delta: DeviceBuffer<bf16>,
    /// `[t, (heads + 2 kv_heads) * head_dim]`
    pub(crate) qkv: DeviceBuffer<bf16>,
    /// Rotated queries, `[t, heads * head_dim]`.
    pub(crate) q: DeviceBuffer<bf16>,
    /// `[t, heads * head_dim]`
    pub(crate) attention: DeviceBuffer<bf16>,
    /// `[t, experts]`
    pub(crate) router_logits: DeviceBuffer<f32>,
    /// `[p]`
    pub(crate) experts: DeviceBuffer<i32>,
    /// `[p]`
    pub(crate) expert_weights: DeviceBuffer<f32>,
    /// One for each width in [`EXPERT_TILES`].
    pub(crate) routings: Vec<Routing>,
    /// With several attention groups, the normed stream of all of them, `[t, hidden]`: what the experts take, where with one
    /// they take `normed`.
    pub(crate) normed_of_all: Option<DeviceBuffer<bf16>>,
    /// Inputs of experts in the order of slots, `[p, hidden]`.
    pub(crate) gathered: DeviceBuffer<bf16>,
    /// `[p, units]`
    pub(crate) activated: DeviceBuffer<bf16>,
    /// Outputs of experts, `[p, hidden]`.
    pub(crate) expert_out: DeviceBuffer<bf16>,
    /// Inputs of the head where they do not lie together, `[w, hidden]`.
    pub(crate) head_in: DeviceBuffer<bf16>,
    /// Logits of the rank's part of the vocabulary, `[w, vocab rows]`; `None` if that is all of it.
    pub(crate) part_logits: Option<DeviceBuffer<f32>>,
    /// `[w, vocab]`
    pub(crate) logits: DeviceBuffer<f32>,
}

impl Activations {
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(crate) fn new(
        stream: &Stream,
        config: &ModelConfig,
        plan: &ShardPlan,
        max_tokens: usize,
        logit_rows: usize,
    ) -> Result<Self, EngineError> {
        let (hidden, top) = (config.hidden_size, config.experts_per_token);
        let (q, kv) = (plan.heads.len() * config.head_dim, plan.kv_heads.len() * config.head_dim);
        let pairs = max_tokens * top;
        let part = plan.vocab_rows.len();
        let is_part = part < config.vocab_size;
        let routing = |tile_slots: &usize| Routing::new(stream, max_tokens, top, plan.experts.len(), *tile_slots);
        Ok(Self {
            residual: stream.zeros(max_tokens * hidden)?,
            normed: stream.zeros(max_tokens * hidden)?,
            delta: stream.zeros(max_tokens * hidden)?,
            qkv: stream.zeros(max_tokens * (q + 2 * kv))?,
            q: stream.zeros(max_tokens * q)?,
            attention: stream.zeros(max_tokens * q)?,
            router_logits: stream.zeros(max_tokens * config.num_experts)?,
            experts: stream.zeros(pairs)?,
            expert_weights: stream.zeros(pairs)?,
            routings: EXPERT_TILES.iter().map(routing).collect::<Result<_, _>>()?,
            normed_of_all: (plan.layout.dp > 1).then(|| stream.zeros(max_tokens * hidden)).transpose()?,
            gathered: stream.zeros(pairs * hidden)?,
            activated: stream.zeros(pairs * plan.units.len())?,
            expert_out: stream.zeros(pairs * hidden)?,
            head_in: stream.zeros(logit_rows * hidden)?,
            part_logits: is_part.then(|| stream.zeros(logit_rows * part)).transpose()?,
            logits: stream.zeros(logit_rows * config.vocab_size)?,
        })
    }
}
