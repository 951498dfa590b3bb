//! One rank's weights on its device, as the kernels want them.

use std::ops::Range;

use bytemuck::Pod;
use device::{DeviceBuffer, Stream, ViewMut};
use half::bf16;
use kernels::{Fp8Source, PackFp8, PackMxfp4, PackedWeights, Rounding, pack_bf16};
use model::fp8::BLOCK;
use model::mxfp4::{BLOCK_BYTES, BLOCK_VALUES};
use model::{DenseFormat, ExpertFormat, Fp8Matrix, LayerParam, ModelConfig, Param, ShardPlan, WeightScheme};

use super::rank::Gpu;
use crate::EngineError;

/// Where tensors come from. What a rank gets of each is what its plan says, in the order in which `model::rank_weights`
/// holds it.
pub(crate) trait TensorSource {
    /// Fills `out` with a bf16 tensor.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    fn values(&mut self, param: Param, out: ViewMut<'_, bf16>) -> Result<(), EngineError>;

    /// Fills `out` with MXFP4 blocks, FP8 values, or scales of either.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    fn bytes(&mut self, param: Param, out: ViewMut<'_, u8>) -> Result<(), EngineError>;
}

/// A matrix with its bias.
pub(crate) struct Linear {
    pub(crate) weight: PackedWeights,
    pub(crate) bias: DeviceBuffer<bf16>,
}

/// The router's weights, row-major for few tokens and packed for many.
pub(crate) struct RouterWeights {
    pub(crate) weight: DeviceBuffer<bf16>,
    /// `None` where the number of experts is no multiple of 16.
    pub(crate) packed: Option<PackedWeights>,
    pub(crate) bias: DeviceBuffer<bf16>,
}

pub(crate) struct Layer {
    pub(crate) attn_norm: DeviceBuffer<bf16>,
    /// Rows of q, k and v, one after the other.
    pub(crate) qkv: Linear,
    pub(crate) sinks: DeviceBuffer<bf16>,
    pub(crate) out: Linear,
    pub(crate) mlp_norm: DeviceBuffer<bf16>,
    pub(crate) router: RouterWeights,
    /// `[experts][2 units, hidden]`, gate and up rows in turn.
    pub(crate) gate_up: Linear,
    /// `[experts][hidden, units]`
    pub(crate) down: Linear,
}

pub(crate) struct DeviceWeights {
    pub(crate) embedding: DeviceBuffer<bf16>,
    pub(crate) layers: Vec<Layer>,
    pub(crate) final_norm: DeviceBuffer<bf16>,
    pub(crate) head: PackedWeights,
}

impl DeviceWeights {
    /// Fetches every tensor and packs it as `scheme` says. `progress(layers done)` is called after each layer.
    ///
    /// # Errors
    /// [`EngineError::Gpu`], also for block scales that the packed form cannot hold.
    pub(crate) fn build(
        config: &ModelConfig,
        plan: &ShardPlan,
        scheme: WeightScheme,
        gpu: &Gpu,
        source: &mut dyn TensorSource,
        progress: &dyn Fn(usize),
    ) -> Result<Self, EngineError> {
        let mut builder = Builder { config, plan, scheme, gpu, source, rounded: Rounding::default() };
        let hidden = config.hidden_size;
        let embedding = builder.vector(Param::Embedding, config.vocab_size * hidden)?;
        let head = builder.matrix(&[(Param::Head, plan.vocab_rows.len())], hidden)?;
        let final_norm = builder.vector(Param::FinalNorm, hidden)?;
        let mut layers = Vec::with_capacity(config.num_layers);
        for idx in 0..config.num_layers {
            layers.push(builder.layer(idx)?);
            progress(idx + 1);
        }
        // Kernels fetch weights before their predecessor has ended: all must be there before the first runs.
        gpu.stream.synchronize()?;
        let Rounding { changed, largest } = builder.rounded;
        if changed > 0 {
            tracing::info!(rank = plan.rank, changed, largest, "values rounded to fp8");
        }
        Ok(Self { embedding, layers, final_norm, head })
    }
}

struct Builder<'a> {
    config: &'a ModelConfig,
    plan: &'a ShardPlan,
    scheme: WeightScheme,
    gpu: &'a Gpu,
    source: &'a mut dyn TensorSource,
    /// What packing as FP8 changed.
    rounded: Rounding,
}

/// The tensors of one matrix of all experts.
struct ExpertTensors {
    blocks: LayerParam,
    scales: LayerParam,
    fp8: LayerParam,
    fp8_scales: LayerParam,
    bias: LayerParam,
}

const GATE_UP: ExpertTensors = ExpertTensors {
    blocks: LayerParam::GateUpBlocks,
    scales: LayerParam::GateUpScales,
    fp8: LayerParam::GateUpFp8,
    fp8_scales: LayerParam::GateUpFp8Scales,
    bias: LayerParam::GateUpBias,
};
const DOWN: ExpertTensors = ExpertTensors {
    blocks: LayerParam::DownBlocks,
    scales: LayerParam::DownScales,
    fp8: LayerParam::DownFp8,
    fp8_scales: LayerParam::DownFp8Scales,
    bias: LayerParam::DownBias,
};

impl Builder<'_> {
    fn layer(&mut self, idx: usize) -> Result<Layer, EngineError> {
        let (config, hidden, units) = (self.config, self.config.hidden_size, self.plan.units.clone());
        let gate_up_rows = 2 * units.start..2 * units.end;
        let (q, kv) = (self.plan.heads.len() * config.head_dim, self.plan.kv_heads.len() * config.head_dim);
        let at = |param| Param::Layer(idx, param);
        let qkv = [(LayerParam::QWeight, q), (LayerParam::KWeight, kv), (LayerParam::VWeight, kv)];
        let qkv_bias = [(LayerParam::QBias, q), (LayerParam::KBias, kv), (LayerParam::VBias, kv)];
        Ok(Layer {
            attn_norm: self.vector(at(LayerParam::AttnNorm), hidden)?,
            qkv: Linear {
                weight: self.matrix(&qkv.map(|(param, rows)| (at(param), rows)), hidden)?,
                bias: self.vectors(&qkv_bias.map(|(param, len)| (at(param), len)))?,
            },
            sinks: self.vector(at(LayerParam::Sinks), self.plan.heads.len())?,
            out: Linear {
                weight: self.matrix(&[(at(LayerParam::OWeight), hidden)], q)?,
                bias: self.vector(at(LayerParam::OBias), hidden)?,
            },
            mlp_norm: self.vector(at(LayerParam::MlpNorm), hidden)?,
            router: self.router(idx)?,
            gate_up: self.experts(idx, &GATE_UP, [gate_up_rows, 0..hidden], true)?,
            down: self.experts(idx, &DOWN, [0..hidden, units], false)?,
        })
    }

    fn router(&mut self, idx: usize) -> Result<RouterWeights, EngineError> {
        let (experts, hidden) = (self.config.num_experts, self.config.hidden_size);
        let weight = self.vector(Param::Layer(idx, LayerParam::RouterWeight), experts * hidden)?;
        let pack = || pack_bf16(&self.gpu.kernels, &self.gpu.stream, weight.view(), [1, experts, hidden], false);
        let packed = experts.is_multiple_of(16).then(pack).transpose()?;
        Ok(RouterWeights { weight, packed, bias: self.vector(Param::Layer(idx, LayerParam::RouterBias), experts)? })
    }

    fn vector(&mut self, param: Param, len: usize) -> Result<DeviceBuffer<bf16>, EngineError> {
        self.vectors(&[(param, len)])
    }

    /// Tensors one after the other.
    fn vectors(&mut self, parts: &[(Param, usize)]) -> Result<DeviceBuffer<bf16>, EngineError> {
        let mut values = allocate(&self.gpu.stream, parts.iter().map(|(_, len)| len).sum())?;
        let mut at = 0;
        for (param, len) in parts {
            self.source.values(*param, values.slice_mut(at..at + len))?;
            at += len;
        }
        Ok(values)
    }

    /// Matrices of `k` columns, their rows one after the other.
    fn matrix(&mut self, parts: &[(Param, usize)], k: usize) -> Result<PackedWeights, EngineError> {
        let sizes: Vec<(Param, usize)> = parts.iter().map(|(param, rows)| (*param, rows * k)).collect();
        let values = self.vectors(&sizes)?;
        let (shape, values) = ([1, values.len() / k, k], values.view());
        match self.scheme.dense {
            DenseFormat::Bf16 => Ok(pack_bf16(&self.gpu.kernels, &self.gpu.stream, values, shape, false)?),
            DenseFormat::Fp8 => self.pack_fp8(Fp8Source::Bf16(values), shape, false),
        }
    }

    fn pack_fp8(
        &mut self,
        source: Fp8Source<'_>,
        shape: [usize; 3],
        interleaved: bool,
    ) -> Result<PackedWeights, EngineError> {
        let (packed, rounding) = PackFp8 { source, shape, interleaved }.pack(&self.gpu.kernels, &self.gpu.stream)?;
        self.rounded.changed += rounding.changed;
        self.rounded.largest = self.rounded.largest.max(rounding.largest);
        Ok(packed)
    }

    /// A matrix and a bias for each of the rank's experts: rows and columns `part` of it.
    fn experts(
        &mut self,
        layer: usize,
        tensors: &ExpertTensors,
        part: [Range<usize>; 2],
        interleaved: bool,
    ) -> Result<Linear, EngineError> {
        let shape = [self.plan.experts.len(), part[0].len(), part[1].len()];
        let weight = match self.config.stored.experts {
            ExpertFormat::Fp8 => self.fp8_experts(layer, tensors, &part, interleaved)?,
            _ => self.mxfp4_experts(layer, tensors, shape, interleaved)?,
        };
        Ok(Linear { weight, bias: self.vector(Param::Layer(layer, tensors.bias), shape[0] * shape[1])? })
    }

    fn mxfp4_experts(
        &mut self,
        layer: usize,
        tensors: &ExpertTensors,
        shape @ [matrices, rows, k]: [usize; 3],
        interleaved: bool,
    ) -> Result<PackedWeights, EngineError> {
        let row_blocks = matrices * rows * (k / BLOCK_VALUES);
        let values = self.bytes(Param::Layer(layer, tensors.blocks), row_blocks * BLOCK_BYTES)?;
        let scales = self.bytes(Param::Layer(layer, tensors.scales), row_blocks)?;
        let (values, scales) = (values.view(), scales.view());
        let (kernels, stream) = (&self.gpu.kernels, &self.gpu.stream);
        match self.scheme.experts {
            ExpertFormat::Mxfp4 => Ok(PackMxfp4 { values, scales, shape, interleaved }.pack(kernels, stream)?),
            ExpertFormat::Bf16 => Ok(PackMxfp4 { values, scales, shape, interleaved }.pack_as_bf16(kernels, stream)?),
            ExpertFormat::Fp8 => self.pack_fp8(Fp8Source::Mxfp4 { values, scales }, shape, interleaved),
        }
    }

    fn fp8_experts(
        &mut self,
        layer: usize,
        tensors: &ExpertTensors,
        part: &[Range<usize>; 2],
        interleaved: bool,
    ) -> Result<PackedWeights, EngineError> {
        let [rows, cols] = part;
        let shape @ [matrices, ..] = [self.plan.experts.len(), rows.len(), cols.len()];
        let grid = [rows, cols].map(|part| Fp8Matrix::blocks(part).len());
        let offset = [rows.start % BLOCK, cols.start % BLOCK];
        let values = self.bytes(Param::Layer(layer, tensors.fp8), shape.iter().product())?;
        let scales = self.bytes(Param::Layer(layer, tensors.fp8_scales), matrices * grid[0] * grid[1])?;
        let source = Fp8Source::Fp8 { values: values.view(), scales: scales.view(), grid, offset };
        self.pack_fp8(source, shape, interleaved)
    }

    fn bytes(&mut self, param: Param, len: usize) -> Result<DeviceBuffer<u8>, EngineError> {
        let mut bytes = allocate(&self.gpu.stream, len)?;
        self.source.bytes(param, bytes.view_mut())?;
        Ok(bytes)
    }
}

fn allocate<T: Pod>(stream: &Stream, len: usize) -> Result<DeviceBuffer<T>, EngineError> {
    Ok(stream.allocate(len)?)
}
