//! A checkpoint's tensors on their way to the device.

use std::ops::Deref;

use bytemuck::Pod;
use device::{Stream, ViewMut};
use half::bf16;
use model::{ExpertMatrix, ExpertWeights, LayerParam, LayerWeights, Param, RankWeights};

use super::pinned_ring::PinnedRing;
use super::weights::TensorSource;
use crate::EngineError;

/// Bytes of a pinned buffer, and how many there are: enough that copies into them and out of them overlap.
const CHUNK_BYTES: usize = 1 << 20;
const CHUNKS: usize = 8;

/// Tensors of a rank's part of a checkpoint. Reading them moves bytes from the mapped files through pinned memory.
pub(crate) struct LoadedTensors {
    weights: RankWeights,
    values: Uploader<bf16>,
    bytes: Uploader<u8>,
}

impl LoadedTensors {
    pub(crate) fn new(weights: RankWeights, stream: &Stream) -> Self {
        Self { weights, values: Uploader::new(stream), bytes: Uploader::new(stream) }
    }
}

impl TensorSource for LoadedTensors {
    fn values(&mut self, param: Param, out: ViewMut<'_, bf16>) -> Result<(), EngineError> {
        let Self { weights, values, .. } = self;
        match param {
            Param::Embedding => values.upload(out, &[&weights.embedding.values]),
            Param::FinalNorm => values.upload(out, &[&weights.final_norm]),
            Param::Head => values.upload(out, &[&weights.head.values]),
            Param::Layer(idx, param) => values.upload(out, &layer_values(&weights.layers[idx], param)),
            Param::HeadScales => unreachable!("an fp8 head is loaded as bf16"),
        }
    }

    fn bytes(&mut self, param: Param, out: ViewMut<'_, u8>) -> Result<(), EngineError> {
        let Param::Layer(idx, param) = param else { unreachable!("{param} is stored as bf16") };
        let of_experts = |part: fn(&ExpertWeights) -> &[u8]| -> Vec<&[u8]> {
            self.weights.layers[idx].experts.iter().map(part).collect()
        };
        let parts = match param {
            LayerParam::GateUpBlocks | LayerParam::GateUpFp8 => of_experts(|expert| values(&expert.gate_up)),
            LayerParam::GateUpScales | LayerParam::GateUpFp8Scales => of_experts(|expert| scales(&expert.gate_up)),
            LayerParam::DownBlocks | LayerParam::DownFp8 => of_experts(|expert| values(&expert.down)),
            LayerParam::DownScales | LayerParam::DownFp8Scales => of_experts(|expert| scales(&expert.down)),
            _ => unreachable!("{param:?} is loaded as bf16"),
        };
        self.bytes.upload(out, &parts)
    }
}

fn values(matrix: &ExpertMatrix) -> &[u8] {
    match matrix {
        ExpertMatrix::Mxfp4(matrix) => &matrix.blocks,
        ExpertMatrix::Fp8(matrix) => &matrix.values,
    }
}

fn scales(matrix: &ExpertMatrix) -> &[u8] {
    match matrix {
        ExpertMatrix::Mxfp4(matrix) => &matrix.scales,
        ExpertMatrix::Fp8(matrix) => &matrix.scales,
    }
}

fn layer_values(layer: &LayerWeights, param: LayerParam) -> Vec<&[bf16]> {
    let of_experts = |part: fn(&ExpertWeights) -> &[bf16]| -> Vec<&[bf16]> { layer.experts.iter().map(part).collect() };
    let buffer = match param {
        LayerParam::AttnNorm => &layer.attn_norm,
        LayerParam::QWeight => &layer.q.weight.values,
        LayerParam::QBias => &layer.q.bias,
        LayerParam::KWeight => &layer.k.weight.values,
        LayerParam::KBias => &layer.k.bias,
        LayerParam::VWeight => &layer.v.weight.values,
        LayerParam::VBias => &layer.v.bias,
        LayerParam::Sinks => &layer.sinks,
        LayerParam::OWeight => &layer.o.weight.values,
        LayerParam::OBias => &layer.o.bias,
        LayerParam::MlpNorm => &layer.mlp_norm,
        LayerParam::RouterWeight => &layer.router.weight.values,
        LayerParam::RouterBias => &layer.router.bias,
        LayerParam::GateUpBias => return of_experts(|expert| &expert.gate_up_bias),
        LayerParam::DownBias => return of_experts(|expert| &expert.down_bias),
        _ => unreachable!("{param:?} is loaded as bytes, or as bf16 with the values that it scales"),
    };
    vec![buffer.deref()]
}

/// Copies slices to the device, whole chunks through pinned buffers and what is left over by the driver's own staging.
struct Uploader<T> {
    stream: Stream,
    chunks: PinnedRing<T>,
}

impl<T: Pod> Uploader<T> {
    fn new(stream: &Stream) -> Self {
        Self { stream: stream.clone(), chunks: PinnedRing::new(CHUNK_BYTES / size_of::<T>(), CHUNKS) }
    }

    /// Writes `parts`, one after the other, which fill `out`.
    fn upload(&mut self, mut out: ViewMut<'_, T>, parts: &[&[T]]) -> Result<(), EngineError> {
        let mut at = 0;
        for part in parts {
            for chunk in part.chunks(self.chunks.len()) {
                let dst = out.reborrow().slice(at..at + chunk.len());
                at += chunk.len();
                if chunk.len() == self.chunks.len() {
                    self.chunks.upload(&self.stream, dst, |buffer| buffer.copy_from_slice(chunk))?;
                } else {
                    self.stream.copy_from_host(dst, chunk)?;
                }
            }
        }
        assert_eq!(at, out.len(), "a rank's tensors have the shapes that its plan says");
        Ok(())
    }
}
