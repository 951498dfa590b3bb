//! One rank's weights on its device, as the kernels want them.

use bytemuck::Pod;
use device::{DeviceBuffer, Stream, ViewMut};
use half::bf16;
use kernels::{PackMxfp4, PackedWeights, pack_bf16};
use model::mxfp4::{BLOCK_BYTES, BLOCK_VALUES};
use model::{LayerParam, ModelConfig, Param, ShardPlan};

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

    /// Fills `out` with MXFP4 blocks or scales.
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
    /// Fetches and packs every tensor. `progress(layers done)` is called after each layer.
    ///
    /// # Errors
    /// [`EngineError::Gpu`], also for block scales that the packed form cannot hold.
    pub(crate) fn build(
        config: &ModelConfig,
        plan: &ShardPlan,
        gpu: &Gpu,
        source: &mut dyn TensorSource,
        progress: &dyn Fn(usize),
    ) -> Result<Self, EngineError> {
        let mut builder = Builder { config, plan, gpu, source };
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
        Ok(Self { embedding, layers, final_norm, head })
    }
}

struct Builder<'a> {
    config: &'a ModelConfig,
    plan: &'a ShardPlan,
    gpu: &'a Gpu,
    source: &'a mut dyn TensorSource,
}

impl Builder<'_> {
    fn layer(&mut self, idx: usize) -> Result<Layer, EngineError> {
        let (config, hidden, units) = (self.config, self.config.hidden_size, self.plan.units.len());
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
            gate_up: self.experts(
                [LayerParam::GateUpBlocks, LayerParam::GateUpScales, LayerParam::GateUpBias].map(at),
                [2 * units, hidden],
                true,
            )?,
            down: self.experts(
                [LayerParam::DownBlocks, LayerParam::DownScales, LayerParam::DownBias].map(at),
                [hidden, units],
                false,
            )?,
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
        let rows = values.len() / k;
        Ok(pack_bf16(&self.gpu.kernels, &self.gpu.stream, values.view(), [1, rows, k], false)?)
    }

    /// A matrix and a bias for each of the rank's experts.
    fn experts(
        &mut self,
        [blocks, scales, bias]: [Param; 3],
        [rows, k]: [usize; 2],
        interleaved: bool,
    ) -> Result<Linear, EngineError> {
        let matrices = self.plan.experts.len();
        let row_blocks = matrices * rows * (k / BLOCK_VALUES);
        let stream = &self.gpu.stream;
        let mut block_bytes = allocate::<u8>(stream, row_blocks * BLOCK_BYTES)?;
        let mut scale_bytes = allocate::<u8>(stream, row_blocks)?;
        self.source.bytes(blocks, block_bytes.view_mut())?;
        self.source.bytes(scales, scale_bytes.view_mut())?;
        let pack = PackMxfp4 {
            values: block_bytes.view(),
            scales: scale_bytes.view(),
            shape: [matrices, rows, k],
            interleaved,
        };
        let weight = pack.pack(&self.gpu.kernels, stream)?;
        Ok(Linear { weight, bias: self.vector(bias, matrices * rows)? })
    }
}

fn allocate<T: Pod>(stream: &Stream, len: usize) -> Result<DeviceBuffer<T>, EngineError> {
    Ok(stream.allocate(len)?)
}
