//! The model: what a step enqueues, from token numbers to logits.
//!
//! ```text
//! x = embedding[tokens]
//! for each layer:
//!     x += o_proj(attention(rotate(qkv_proj(norm(x)))))       summed over ranks: partial sums over heads
//!     x += sum of experts(norm(x))                            summed over ranks: experts, or partial sums over units
//! logits = head(norm(x of the wanted tokens))
//! ```
//! Sums over ranks, the weighted sum of experts before one, and residual add and norm behind it are one operation of the
//! `collective`, so a block begins and ends with a normed stream.
//!
//! With data parallelism the tokens are those of one attention group, and attention's sums are between its ranks. Only the experts
//! are everybody's: the normed streams of all groups come together before them, each rank routes all tokens alike, and the sum over all
//! ranks goes to the group whose token it is. A group without a row in a step takes part.

use std::ops::Range;
use std::sync::Arc;

use device::{DeviceBuffer, View};
use half::bf16;
use kernels::choice::expert_tile;
use kernels::{
    ChooseExperts, DISPATCH_TOKENS, DecodeAttention, Dispatch, Embed, ExpertWeights, Output, PrefillAttention, RmsNorm,
    RopeKv, Router, RouterDispatch,
};
use model::{ModelConfig, ShardPlan};
use types::PageGroup;

use super::activations::Activations;
use super::batch::Batch;
use super::collective::{AddNorm, AttentionSum, Collective, ExpertOutputs, ExpertSum};
use super::kv_cache::{PrefillPages, RankCache};
use super::probe::Probe;
use super::products::{dense, experts};
use super::rank::Gpu;
use super::step_inputs::StepInputs;
use super::weights::{DeviceWeights, Layer};
use crate::EngineError;
use crate::kv_slice::page_group;

/// Tokens up to which `Router` is faster than `TileGemm` and `ChooseExperts` (kernels/RESULTS.md).
const ROUTER_TOKENS: usize = 200;

/// What does not change from step to step.
pub(crate) struct RankModel {
    pub(crate) config: ModelConfig,
    pub(crate) plan: ShardPlan,
    pub(crate) weights: DeviceWeights,
    /// `[cos, sin]` of each position and channel, `[positions, head_dim / 2]`.
    pub(crate) angles: DeviceBuffer<[f32; 2]>,
    pub(crate) routing: ExpertWeights,
    pub(crate) probe: Option<Arc<dyn Probe>>,
}

/// One step under way. Only enqueues.
pub(crate) struct Forward<'a> {
    pub(crate) gpu: &'a mut Gpu,
    pub(crate) model: &'a RankModel,
    pub(crate) acts: &'a mut Activations,
    pub(crate) cache: &'a mut RankCache,
    pub(crate) inputs: &'a StepInputs,
    /// Tokens of the draw before.
    pub(crate) sampled: View<'a, i32>,
    pub(crate) collective: &'a mut dyn Collective,
    pub(crate) batch: &'a Batch,
    /// Context for which decode attention spreads its work.
    pub(crate) max_context: usize,
}

impl Forward<'_> {
    /// Enqueues all layers. `stored(gpu, layer)` is called when the work that writes a layer's keys and values has been
    /// enqueued.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(crate) fn layers(
        &mut self,
        mut stored: impl FnMut(&Gpu, usize) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        self.embed()?;
        let model = self.model;
        for (idx, layer) in model.weights.layers.iter().enumerate() {
            self.probe_input(idx, layer)?;
            self.store_kv(idx, layer)?;
            stored(self.gpu, idx)?;
            self.attend(idx, layer)?;
            let next = model.weights.layers.get(idx + 1).map_or(&model.weights.final_norm, |next| &next.attn_norm);
            self.expert_block(idx, layer, next)?;
        }
        Ok(())
    }

    /// Fills `acts.logits` for some tokens of the step, ascending, at most as many as it has rows.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(crate) fn logits(&mut self, tokens: &[usize]) -> Result<(), EngineError> {
        let (hidden, vocab) = (self.model.config.hidden_size, self.model.plan.vocab_rows.len());
        let Activations { normed, head_in, part_logits, logits, .. } = &mut *self.acts;
        let runs = runs(tokens);
        let x = match &runs[..] {
            [whole] => normed.slice(whole.start * hidden..whole.end * hidden),
            _ => {
                let mut at = 0;
                for run in runs {
                    let rows = at..at + run.len();
                    at = rows.end;
                    self.gpu.stream.copy(
                        head_in.slice_mut(rows.start * hidden..rows.end * hidden),
                        normed.slice(run.start * hidden..run.end * hidden),
                    )?;
                }
                head_in.slice(..at * hidden)
            }
        };
        let out = part_logits.as_mut().unwrap_or(logits).slice_mut(..tokens.len() * vocab);
        dense(self.gpu, &self.model.weights.head, None, x, Output::F32(out))?;
        match part_logits {
            Some(part) => self.collective.gather(self.gpu, part.slice(..tokens.len() * vocab), tokens.len()),
            None => Ok(()),
        }
    }

    fn embed(&mut self) -> Result<(), EngineError> {
        let (tokens, hidden) = (self.batch.tokens.len(), self.model.config.hidden_size);
        let Activations { residual, normed, .. } = &mut *self.acts;
        Embed {
            table: self.model.weights.embedding.view(),
            tokens: self.inputs.tokens(tokens),
            sampled: self.sampled,
            out: residual.slice_mut(..tokens * hidden),
            hidden,
        }
        .enqueue(&self.gpu.kernels, &self.gpu.stream)?;
        RmsNorm {
            residual: residual.slice_mut(..tokens * hidden),
            delta: None,
            weight: self.model.weights.layers[0].attn_norm.view(),
            out: normed.slice_mut(..tokens * hidden),
            eps: self.model.config.rms_norm_eps,
        }
        .enqueue(&self.gpu.kernels, &self.gpu.stream)?;
        Ok(())
    }

    /// Projects queries, keys and values, rotates, and writes keys and values into their pages.
    fn store_kv(&mut self, idx: usize, layer: &Layer) -> Result<(), EngineError> {
        let (tokens, model) = (self.batch.tokens.len(), self.model);
        let [qkv_width, hidden] = layer.qkv.weight.shape();
        let q_width = model.plan.heads.len() * model.config.head_dim;
        let Activations { normed, qkv, q, .. } = &mut *self.acts;
        let out = Output::Bf16(qkv.slice_mut(..tokens * qkv_width));
        let x = normed.slice(..tokens * hidden);
        dense(self.gpu, &layer.qkv.weight, Some(layer.qkv.bias.view()), x, out)?;
        let (group, group_layer) = page_group(&model.config, idx);
        let (cache, table) = self.cache.split(group);
        RopeKv {
            qkv: qkv.slice(..tokens * qkv_width),
            q: q.slice_mut(..tokens * q_width),
            cache,
            layer: group_layer,
            angles: model.angles.view(),
            positions: self.inputs.positions(tokens),
            sequences: Some(self.inputs.slots(tokens)),
            table,
        }
        .enqueue(&self.gpu.kernels, &self.gpu.stream)?;
        Ok(())
    }

    /// Attention and its output projection, up to the normed input of the experts.
    fn attend(&mut self, idx: usize, layer: &Layer) -> Result<(), EngineError> {
        let (batch, model) = (self.batch, self.model);
        let (group, group_layer) = page_group(&model.config, idx);
        let window = (group == PageGroup::Window).then_some(model.config.window);
        let [hidden, q_width] = layer.out.weight.shape();
        let Activations { q, attention, delta, residual, normed, normed_of_all, .. } = &mut *self.acts;
        let (gpu, tokens) = (&mut *self.gpu, batch.tokens.len());
        if batch.decode_rows > 0 {
            let (cache, table) = self.cache.read(group);
            DecodeAttention {
                q: q.slice(..batch.decode_rows * q_width),
                sinks: layer.sinks.view(),
                cache,
                layer: group_layer,
                contexts: self.inputs.contexts(tokens, batch.decode_rows),
                table,
                sequences: Some(self.inputs.slots(tokens).slice(..batch.decode_rows)),
                window,
                max_context: self.max_context,
                out: attention.slice_mut(..batch.decode_rows * q_width),
                workspace: &mut gpu.workspace,
            }
            .enqueue(&gpu.kernels, &gpu.stream)?;
        }
        for chunk in &batch.chunks {
            let Range { start, end } = chunk.tokens;
            let first_key = window.map_or(0, |window| (chunk.start + 1).saturating_sub(window));
            let visible = first_key..chunk.start + chunk.tokens.len();
            let PrefillPages { cache, layer: place, pages, first_page } =
                self.cache.for_prefill(gpu, group, group_layer, chunk.slot, visible)?;
            PrefillAttention {
                q: q.slice(start * q_width..end * q_width),
                sinks: layer.sinks.view(),
                cache,
                layer: place,
                start: chunk.start,
                pages,
                first_page,
                window,
                out: attention.slice_mut(start * q_width..end * q_width),
            }
            .enqueue(&gpu.kernels, &gpu.stream)?;
        }
        let adds_bias = model.plan.tp_rank == 0;
        let bias = adds_bias.then(|| layer.out.bias.view());
        let out = Output::Bf16(delta.slice_mut(..tokens * hidden));
        dense(gpu, &layer.out.weight, bias, attention.slice(..tokens * q_width), out)?;
        let sum = AttentionSum {
            delta: delta.slice_mut(..tokens * hidden),
            norm: AddNorm {
                residual: residual.slice_mut(..tokens * hidden),
                weight: layer.mlp_norm.view(),
                eps: model.config.rms_norm_eps,
                out: normed.slice_mut(..tokens * hidden),
            },
            normed_of_all: normed_of_all.as_mut().map(|all| all.slice_mut(..batch.groups.all() * hidden)),
            tokens: &batch.groups,
        };
        self.collective.add_attention(gpu, sum)
    }

    /// The experts, up to the normed input of the next block, whose norm has weights `next_norm`.
    fn expert_block(&mut self, idx: usize, layer: &Layer, next_norm: &DeviceBuffer<bf16>) -> Result<(), EngineError> {
        let (groups, model) = (&self.batch.groups, self.model);
        let (hidden, top) = (model.config.hidden_size, model.config.experts_per_token);
        let (tokens, own_values) = (groups.all(), self.batch.tokens.len() * hidden);
        let pairs = tokens * top;
        let tile = expert_tile(layer.gate_up.weight.format(), pairs, model.config.num_experts);
        self.route(idx, layer, tokens, tile)?;
        experts(self.gpu, layer, self.acts, tile, tokens, model.plan.expert_tp_rank == 0)?;

        let Activations { residual, normed, delta, expert_weights, expert_out, routings, .. } = &mut *self.acts;
        let sum = ExpertSum {
            outputs: ExpertOutputs {
                y: expert_out.slice(..pairs * hidden),
                weights: expert_weights.slice(..pairs),
                slot: routings[tile].slot.slice(..pairs),
                top,
            },
            delta: delta.slice_mut(..own_values),
            norm: AddNorm {
                residual: residual.slice_mut(..own_values),
                weight: next_norm.view(),
                eps: model.config.rms_norm_eps,
                out: normed.slice_mut(..own_values),
            },
            tokens: groups,
        };
        self.collective.add_experts(self.gpu, sum)
    }

    /// Experts of each of the `tokens` tokens of all groups, and their weights; and the tokens of each expert, as routing `tile`.
    fn route(&mut self, idx: usize, layer: &Layer, tokens: usize, tile: usize) -> Result<(), EngineError> {
        let (config, mode) = (&self.model.config, self.model.routing);
        let (hidden, top, num_experts) = (config.hidden_size, config.experts_per_token, config.num_experts);
        let Activations { normed, normed_of_all, router_logits, experts, expert_weights, routings, .. } =
            &mut *self.acts;
        let (first_expert, routing) = (self.model.plan.experts.start, &mut routings[tile]);
        let picks = tokens * top;
        let x = normed_of_all.as_ref().unwrap_or(normed).slice(..tokens * hidden);
        let present = self.inputs.present(self.batch);
        let (chosen, weights) = (experts.slice_mut(..picks), expert_weights.slice_mut(..picks));
        let bias = layer.router.bias.view();
        match &layer.router.packed {
            Some(packed) if tokens > ROUTER_TOKENS => {
                let out = Output::F32(router_logits.slice_mut(..tokens * num_experts));
                dense(self.gpu, packed, Some(bias), x, out)?;
                let logits = router_logits.slice_mut(..tokens * num_experts);
                ChooseExperts { logits, num_experts, present, experts: chosen, weights, top, mode }
                    .enqueue(&self.gpu.kernels, &self.gpu.stream)?;
            }
            _ => {
                let weight = layer.router.weight.view();
                // A probe sees the logits, and may change the choice before it is dispatched.
                let is_probed = self.model.probe.is_some();
                let logits = is_probed.then(|| router_logits.slice_mut(..tokens * num_experts));
                let dispatches = tokens <= DISPATCH_TOKENS && !is_probed;
                let dispatch = dispatches.then_some(RouterDispatch { first_expert, routing: &mut *routing });
                Router { x, weight, bias, present, experts: chosen, weights, logits, top, mode, dispatch }
                    .enqueue(&self.gpu.kernels, &self.gpu.stream)?;
                if dispatches {
                    return Ok(());
                }
            }
        }
        self.probe_picks(idx)?;
        let Activations { experts, routings, .. } = &mut *self.acts;
        let (experts, routing) = (experts.slice(..picks), &mut routings[tile]);
        Dispatch { experts, first_expert, routing }.enqueue(&self.gpu.kernels, &self.gpu.stream)?;
        Ok(())
    }
}

/// Runs of consecutive numbers in an ascending list.
fn runs(tokens: &[usize]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for &token in tokens {
        match runs.last_mut() {
            Some(run) if run.end == token => run.end += 1,
            _ => runs.push(token..token + 1),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::runs;

    #[test]
    fn consecutive_tokens_are_one_run() {
        assert_eq!(runs(&[0, 1, 2, 5, 7, 8]), [0..3, 5..6, 7..9]);
        assert!(runs(&[]).is_empty());
    }
}
