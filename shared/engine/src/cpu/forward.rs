//! The model: one step of one rank, from tokens to logits.
//!
//! ```text
//! x = embedding[tokens]
//! for each layer:
//!     x += o_proj(attention(rotate(qkv_proj(norm(x)))))       one exchange: partial sums over heads
//!     x += sum of experts(norm(x))                            one exchange: partial sums over units, a row for each (token, expert)
//! logits = head(norm(x of the wanted tokens))                 one exchange: vocabulary shards to the first rank
//! ```
//! The residual stream, the router and the sums over experts are computed by every rank alike: cheaper, at these widths, than one more barrier.
//!
//! With data parallelism that is the tokens of one attention group, and the exchanges are between its ranks. Only the experts are everybody's:
//! one more exchange brings all groups' tokens to them, and the sums, which a rank reads for its own tokens alone, are those of all ranks. A
//! group without a row in a step takes part in both.

use std::marker::PhantomData;
use std::ops::Range;
use std::slice::from_ref;

use model::rope::RopeAngles;
use model::{ModelConfig, SWIGLU_ALPHA, ShardPlan};
use types::PageGroup;

use super::Probe;
use super::attention::{Attention, HEAD_DIM, Rotate};
use super::batch::Batch;
use super::experts::{AddAttention, AddExperts, SwiGlu};
use super::gather::{GatheredTokens, TokenSizes};
use super::kv_pool::{KvCache, KvElement, KvPool, each_dtype};
use super::matmul::{MatMul, Panels};
use super::norm::RmsNorm;
use super::rank::Links;
use super::routing::{Routes, choose};
use super::weights::{PackedLayer, PackedWeights};
use crate::EngineError;
use crate::kv_slice::page_group;
use crate::simd::{Simd, V};
use crate::vector::{Exact, Precision, Rounding};

/// What does not change from step to step.
pub(crate) struct RankModel {
    pub(crate) config: ModelConfig,
    pub(crate) plan: ShardPlan,
    pub(crate) weights: PackedWeights,
    pub(crate) rope: RopeAngles,
    /// Rounding of the experts' weights.
    pub(crate) routing: Precision,
    pub(crate) simd: Simd,
}

/// Buffers, kept from step to step.
#[derive(Default)]
pub(crate) struct Workspace {
    /// The residual stream, `[tokens, hidden]`.
    x: Vec<f32>,
    normed: Vec<f32>,
    qkv: Vec<f32>,
    angles: Vec<[f32; HEAD_DIM]>,
    attention: Vec<f32>,
    scores: Vec<V>,
    router_logits: Vec<f32>,
    routes: Routes,
    gathered: GatheredTokens,
    expert: ExpertWorkspace,
}

#[derive(Default)]
struct ExpertWorkspace {
    x: Vec<f32>,
    h: Vec<f32>,
    activation: Vec<f32>,
}

/// `len` elements of a buffer, whatever is in them.
fn room(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    buffer.resize(len, 0.0);
    buffer
}

/// One step under way.
pub(crate) struct Forward<'a, R> {
    pub(crate) model: &'a RankModel,
    pub(crate) cache: &'a mut KvCache,
    pub(crate) links: &'a mut Links,
    pub(crate) work: &'a mut Workspace,
    pub(crate) batch: &'a Batch,
    /// Called when the keys and values of a layer are in the cache.
    pub(crate) stored: &'a dyn Fn(usize, &KvCache),
    pub(crate) probe: Option<&'a dyn Probe>,
    pub(crate) rounding: PhantomData<R>,
}

impl<R: Rounding> Forward<'_, R> {
    /// Runs the step. The first rank of an attention group gets the logits of `batch.logit_tokens`, `[wanted, vocabulary]`; others get none.
    pub(crate) fn run(mut self) -> Result<Vec<f32>, EngineError> {
        self.embed();
        for (idx, layer) in self.model.weights.layers.iter().enumerate() {
            self.attention_block(idx, layer)?;
            self.expert_block(idx, layer)?;
            if let Some(probe) = self.probe {
                probe.hidden(idx, &self.work.x);
            }
        }
        if self.batch.logit_tokens.is_empty() { Ok(Vec::new()) } else { self.logits() }
    }

    fn embed(&mut self) {
        let Workspace { x, angles, .. } = &mut *self.work;
        x.clear();
        angles.clear();
        for (&token, &position) in self.batch.tokens.iter().zip(&self.batch.positions) {
            x.extend(self.model.weights.embedding.row(token as usize).iter().map(|value| value.to_f32()));
            let mut angle = [0.0; HEAD_DIM];
            let (cos, sin) = angle.split_at_mut(HEAD_DIM / 2);
            self.model.rope.fill(position, cos, sin);
            angles.push(angle);
        }
    }

    fn norm(model: &RankModel, x: &[f32], weight: &[f32], out: &mut Vec<f32>) {
        let (eps, out) = (model.config.rms_norm_eps, room(out, x.len()));
        model.simd.run(RmsNorm { x, weight, eps, out, rounding: PhantomData::<R> });
    }

    fn linear(model: &RankModel, x: &[f32], weights: &Panels, bias: &[f32], out: &mut Vec<f32>) {
        let out = room(out, x.len() / weights.depth() * weights.rows());
        let whole = 0..weights.depth();
        model.simd.run(MatMul { x, weights, slices: from_ref(&whole), bias, out, rounding: PhantomData::<R> });
    }

    fn attention_block(&mut self, idx: usize, layer: &PackedLayer) -> Result<(), EngineError> {
        let (model, simd) = (self.model, self.model.simd);
        Self::norm(model, &self.work.x, &layer.attn_norm, &mut self.work.normed);
        Self::linear(model, &self.work.normed, &layer.qkv.weight, &layer.qkv.bias, &mut self.work.qkv);
        let (heads, kv_heads) = (model.plan.heads.len(), model.plan.kv_heads.len());
        simd.run(Rotate {
            x: &mut self.work.qkv,
            stride: (heads + 2 * kv_heads) * HEAD_DIM,
            heads: heads + kv_heads,
            angles: &self.work.angles,
            rounding: PhantomData::<R>,
        });
        let (group, group_layer) = page_group(&model.config, idx);
        each_dtype!(&mut *self.cache, pool => store(pool, self.batch, &self.work.qkv, group, group_layer, heads, kv_heads));
        (self.stored)(idx, self.cache);
        each_dtype!(&*self.cache, pool => attend::<_, R>(model, pool, self.batch, self.work, layer, idx));

        let Workspace { x, attention, .. } = &mut *self.work;
        let (weights, slices) = (&layer.out.weight, &model.weights.attention_slices);
        let len = x.len();
        let publish = |out: &mut Vec<f32>| {
            let out = room(out, len);
            simd.run(MatMul { x: attention, weights, slices, bias: &[], out, rounding: PhantomData::<Exact> });
        };
        self.links.group.exchange(publish, |parts| {
            simd.run(AddAttention { parts, bias: &layer.out.bias, x, rounding: PhantomData::<R> });
        })
    }

    fn expert_block(&mut self, idx: usize, layer: &PackedLayer) -> Result<(), EngineError> {
        let model = self.model;
        Self::norm(model, &self.work.x, &layer.mlp_norm, &mut self.work.normed);
        Self::linear(model, &self.work.normed, &layer.router.weight, &layer.router.bias, &mut self.work.router_logits);
        self.route(idx);
        let Workspace { x, normed, routes, gathered, expert, .. } = &mut *self.work;
        let config = &model.config;
        let (hidden, per_token) = (config.hidden_size, config.experts_per_token);
        let (tokens, first_token) = if model.plan.layout.dp > 1 {
            let sizes = TokenSizes { hidden, per_token };
            gathered.gather(&mut self.links.world, &model.plan, normed, &mut routes.picks, sizes)?;
            (&gathered.x, gathered.own.start)
        } else {
            (&*normed, 0)
        };
        routes.sort(config.num_experts, per_token);
        self.links.world.exchange(
            |out| run_experts::<R>(model, layer, tokens, routes, expert, out),
            |parts| {
                model.simd.run(AddExperts {
                    parts,
                    expert_tp: model.plan.layout.expert_tp() as usize,
                    group_experts: model.plan.experts.len(),
                    routes,
                    first_token,
                    per_token,
                    bias: &layer.down_bias,
                    hidden,
                    x,
                    rounding: PhantomData::<R>,
                });
            },
        )
    }

    /// Chooses experts for the tokens of the rank's attention group.
    fn route(&mut self, idx: usize) {
        let (experts, per_token) = (self.model.config.num_experts, self.model.config.experts_per_token);
        let Workspace { router_logits, routes, .. } = &mut *self.work;
        routes.reset(self.batch.tokens.len(), per_token);
        for (logits, picks) in router_logits.chunks_exact(experts).zip(routes.picks.chunks_exact_mut(per_token)) {
            choose(logits, self.model.routing, picks);
        }
        if let Some(probe) = self.probe {
            for (token, picks) in routes.picks.chunks_exact(per_token).enumerate() {
                let picks: Vec<(u32, f32)> = picks.iter().map(|pick| (pick.expert, pick.weight)).collect();
                probe.routed(idx, token, &picks);
            }
        }
    }

    fn logits(&mut self) -> Result<Vec<f32>, EngineError> {
        let (model, hidden) = (self.model, self.model.config.hidden_size);
        let Workspace { x, normed, attention, .. } = &mut *self.work;
        attention.clear();
        for &token in &self.batch.logit_tokens {
            attention.extend_from_slice(&x[token * hidden..][..hidden]);
        }
        Self::norm(model, attention, &model.weights.final_norm, normed);
        let (wanted, vocab, leads) = (self.batch.logit_tokens.len(), model.config.vocab_size, model.plan.tp_rank == 0);
        self.links.group.exchange(
            |out| Self::linear(model, normed, &model.weights.head, &[], out),
            |parts| {
                let mut logits = Vec::new();
                if leads {
                    logits.reserve_exact(wanted * vocab);
                    for token in 0..wanted {
                        for part in parts {
                            let width = part.len() / wanted;
                            logits.extend_from_slice(&part[token * width..][..width]);
                        }
                    }
                }
                logits
            },
        )
    }
}

/// Stores keys and values of all tokens of the batch. `qkv`: `[tokens, (heads + 2 kv_heads) * 64]`.
fn store<E: KvElement>(
    pool: &mut KvPool<E>,
    batch: &Batch,
    qkv: &[f32],
    group: PageGroup,
    layer: usize,
    heads: usize,
    kv_heads: usize,
) {
    let stride = (heads + 2 * kv_heads) * HEAD_DIM;
    for row in &batch.rows {
        for (token, position) in row.tokens.clone().zip(row.position..) {
            let kv = &qkv[token * stride + heads * HEAD_DIM..][..2 * kv_heads * HEAD_DIM];
            let (keys, values) = kv.split_at(kv_heads * HEAD_DIM);
            for (head, (key, value)) in keys.chunks_exact(HEAD_DIM).zip(values.chunks_exact(HEAD_DIM)).enumerate() {
                pool.store(row.slot, group, layer, head, position, key, value);
            }
        }
    }
}

/// Attention of every row over its own pages.
fn attend<E: KvElement, R: Rounding>(
    model: &RankModel,
    pool: &KvPool<E>,
    batch: &Batch,
    work: &mut Workspace,
    layer: &PackedLayer,
    idx: usize,
) {
    let (heads, kv_heads) = (model.plan.heads.len(), model.plan.kv_heads.len());
    let (stride, width) = ((heads + 2 * kv_heads) * HEAD_DIM, heads * HEAD_DIM);
    let (group, group_layer) = page_group(&model.config, idx);
    let out = room(&mut work.attention, batch.tokens.len() * width);
    for row in &batch.rows {
        let Range { start, end } = row.tokens;
        model.simd.run(Attention {
            queries: &work.qkv[start * stride..end * stride],
            stride,
            position: row.position,
            pool: pool.pool(group),
            table: pool.table(row.slot, group),
            layer: group_layer,
            window: (group == PageGroup::Window).then_some(model.config.window),
            sinks: &layer.sinks,
            group: heads / kv_heads,
            scratch: &mut work.scores,
            out: &mut out[start * width..end * width],
            rounding: PhantomData::<R>,
        });
    }
}

/// Runs the rank's experts on the tokens that chose them. `out`: one row for each (expert of the rank, token), a partial sum over the rank's units.
fn run_experts<R: Rounding>(
    model: &RankModel,
    layer: &PackedLayer,
    x: &[f32],
    routes: &Routes,
    work: &mut ExpertWorkspace,
    out: &mut Vec<f32>,
) {
    let (hidden, simd) = (model.config.hidden_size, model.simd);
    let first_place = routes.starts[model.plan.experts.start];
    let out = room(out, (routes.starts[model.plan.experts.end] - first_place) * hidden);
    for (idx, expert) in model.plan.experts.clone().zip(&layer.experts) {
        let places = routes.of(idx);
        if places.is_empty() {
            continue;
        }
        work.x.clear();
        for &token in &routes.tokens[places.clone()] {
            work.x.extend_from_slice(&x[token as usize * hidden..][..hidden]);
        }
        Forward::<R>::linear(model, &work.x, &expert.gate_up, &[], &mut work.h);
        let activation = room(&mut work.activation, work.h.len() / 2);
        simd.run(SwiGlu {
            h: &work.h,
            bias: &expert.gate_up_bias,
            alpha: SWIGLU_ALPHA,
            limit: model.config.swiglu_limit,
            out: activation,
            rounding: PhantomData::<R>,
        });
        simd.run(MatMul {
            x: activation,
            weights: &expert.down,
            slices: &model.weights.expert_slices,
            bias: &[],
            out: &mut out[(places.start - first_place) * hidden..(places.end - first_place) * hidden],
            rounding: PhantomData::<Exact>,
        });
    }
}
