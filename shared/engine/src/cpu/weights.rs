//! One rank's weights as the kernels want them.
//!
//! Memory: 2 bytes a weight, MXFP4 experts included, which are expanded to bf16 without loss: 41.8 GB for gpt-oss-20b over all ranks and 27 MB
//! for gpt-oss-nano. The embedding is not copied: it stays in the mapped file.

use std::ops::Range;

use half::bf16;
use model::{
    Buffer, Checkpoint, ExpertWeights, LayerParam, LayerWeights, Linear, Matrix, Param, RankWeights, ShardPlan,
};

use super::attention::HEAD_DIM;
use super::matmul::Panels;

/// A matrix with its bias, which is empty where there is none to add.
pub(crate) struct PackedLinear {
    pub(crate) weight: Panels,
    pub(crate) bias: Vec<f32>,
}

/// The rank's part of one expert.
pub(crate) struct PackedExpert {
    /// `[2 * units, hidden]`: the rows of all gates, then those of all ups.
    pub(crate) gate_up: Panels,
    /// `[2 * units]`, likewise.
    pub(crate) gate_up_bias: Vec<f32>,
    /// `[hidden, units]`.
    pub(crate) down: Panels,
}

pub(crate) struct PackedLayer {
    pub(crate) attn_norm: Vec<f32>,
    /// Rows of q, k and v, one after the other.
    pub(crate) qkv: PackedLinear,
    pub(crate) sinks: Vec<f32>,
    /// The bias is the whole model's: added once, after the sum over ranks.
    pub(crate) out: PackedLinear,
    pub(crate) mlp_norm: Vec<f32>,
    pub(crate) router: PackedLinear,
    pub(crate) experts: Vec<PackedExpert>,
    /// `[experts of the model, hidden]`: each rank finishes the sums of all experts.
    pub(crate) down_bias: Vec<f32>,
}

pub(crate) struct PackedWeights {
    pub(crate) embedding: Matrix,
    pub(crate) layers: Vec<PackedLayer>,
    pub(crate) final_norm: Vec<f32>,
    pub(crate) head: Panels,
    /// Channels of the rank's attention output that each of its slices sums over.
    pub(crate) attention_slices: Vec<Range<usize>>,
    /// Units of the rank that each of its slices sums over.
    pub(crate) expert_slices: Vec<Range<usize>>,
}

impl PackedWeights {
    /// Packs what a rank loaded. `progress(layers done)` is called after each layer.
    pub(crate) fn pack(checkpoint: &Checkpoint, weights: RankWeights, progress: &dyn Fn(usize)) -> Self {
        let (attention_slices, expert_slices) = slices(&weights.plan);
        let mut layers = Vec::with_capacity(weights.layers.len());
        for (idx, layer) in weights.layers.into_iter().enumerate() {
            let down_bias = checkpoint.tensor(Param::Layer(idx, LayerParam::DownBias));
            let down_bias: Buffer<bf16> = down_bias.buffer(0..down_bias.shape().iter().product());
            layers.push(PackedLayer::pack(&layer, &down_bias));
            progress(idx + 1);
        }
        Self {
            embedding: weights.embedding,
            layers,
            final_norm: widen(&weights.final_norm),
            head: pack_rows(&[&weights.head]),
            attention_slices,
            expert_slices,
        }
    }
}

impl PackedLayer {
    fn pack(layer: &LayerWeights, down_bias: &[bf16]) -> Self {
        let linear = |linear: &Linear| PackedLinear { weight: pack_rows(&[&linear.weight]), bias: widen(&linear.bias) };
        let qkv_bias = [&layer.q, &layer.k, &layer.v].map(|part| widen(&part.bias)).concat();
        Self {
            attn_norm: widen(&layer.attn_norm),
            qkv: PackedLinear {
                weight: pack_rows(&[&layer.q.weight, &layer.k.weight, &layer.v.weight]),
                bias: qkv_bias,
            },
            sinks: widen(&layer.sinks),
            out: linear(&layer.o),
            mlp_norm: widen(&layer.mlp_norm),
            router: linear(&layer.router),
            experts: layer.experts.iter().map(PackedExpert::pack).collect(),
            down_bias: widen(down_bias),
        }
    }
}

impl PackedExpert {
    fn pack(expert: &ExpertWeights) -> Self {
        let (hidden, units) = (expert.down.rows(), expert.down.cols());
        // Row `i` of the packed matrix: gate of unit `i`, or up of unit `i - units`.
        let stored_row = |row: usize| if row < units { 2 * row } else { 2 * (row - units) + 1 };
        let gate_up = expert.gate_up.dequantize();
        let down = expert.down.dequantize();
        Self {
            gate_up: Panels::pack(2 * units, hidden, |row, out| {
                out.copy_from_slice(&gate_up[stored_row(row) * hidden..][..hidden]);
            }),
            gate_up_bias: (0..2 * units).map(|row| expert.gate_up_bias[stored_row(row)].to_f32()).collect(),
            down: Panels::pack(hidden, units, |row, out| out.copy_from_slice(&down[row * units..][..units])),
        }
    }
}

/// The slices of both reductions, counted from the rank's own first channel and unit.
fn slices(plan: &ShardPlan) -> (Vec<Range<usize>>, Vec<Range<usize>>) {
    let channel = |head: usize| (head - plan.heads.start) * HEAD_DIM;
    let attention = plan.attention_slices.clone().map(|slice| {
        let heads = plan.attention_slice_heads(slice);
        channel(heads.start)..channel(heads.end)
    });
    let experts = plan.expert_slices.clone().map(|slice| {
        let units = plan.expert_slice_units(slice);
        units.start - plan.units.start..units.end - plan.units.start
    });
    (attention.collect(), experts.collect())
}

/// Packs matrices of equal depth as one, their rows one after the other.
fn pack_rows(parts: &[&Matrix]) -> Panels {
    let rows: Vec<&[bf16]> = parts.iter().flat_map(|part| (0..part.rows).map(|row| part.row(row))).collect();
    Panels::pack(rows.len(), parts[0].cols, |row, out| out.copy_from_slice(rows[row]))
}

fn widen(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|value| value.to_f32()).collect()
}
