//! The tensors of a gpt-oss model by their meaning, and under which name each checkpoint layout stores them.

use std::fmt;
use std::ops::Range;

use crate::config::ModelConfig;
use crate::fp8::BLOCK;
use crate::mxfp4::{BLOCK_BYTES, BLOCK_VALUES};
use crate::scheme::{DenseFormat, ExpertFormat, WeightScheme};

/// Element type of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 2 bytes.
    Bf16,
    /// 1 byte: MXFP4 nibble pairs, and scales.
    U8,
    /// 1 byte: FP8 values.
    F8E4M3,
}

impl Dtype {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::U8 | Self::F8E4M3 => 1,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "BF16",
            Self::U8 => "U8",
            Self::F8E4M3 => "F8_E4M3",
        })
    }
}

/// One tensor of the model, whatever a file calls it. Matrices are row-major `[out, in]`.
/// Displayed under its Hugging Face name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Param {
    /// `[vocab, hidden]`
    Embedding,
    /// A tensor of one layer.
    Layer(usize, LayerParam),
    /// `[hidden]`
    FinalNorm,
    /// `[vocab, hidden]`
    Head,
    /// Scales of an FP8 head, `[vocab / 128, hidden / 128]`, rounded up.
    HeadScales,
}

/// One tensor of a layer. E is the number of experts, I the intermediate size; MX blocks run along the last axis. FP8
/// scales have a place for each 128 x 128 of the matrix, rounded up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerParam {
    /// `[hidden]`
    AttnNorm,
    /// `[heads * head_dim, hidden]`
    QWeight,
    /// `[heads * head_dim]`
    QBias,
    /// `[kv_heads * head_dim, hidden]`
    KWeight,
    /// `[kv_heads * head_dim]`
    KBias,
    /// `[kv_heads * head_dim, hidden]`
    VWeight,
    /// `[kv_heads * head_dim]`
    VBias,
    /// `[heads]`
    Sinks,
    /// `[hidden, heads * head_dim]`
    OWeight,
    /// `[hidden]`
    OBias,
    /// `[hidden]`
    MlpNorm,
    /// `[E, hidden]`
    RouterWeight,
    /// `[E]`
    RouterBias,
    /// `[E, 2 I, hidden / 32, 16]`; row `2 i` is the gate and row `2 i + 1` the up row of unit `i`
    GateUpBlocks,
    /// `[E, 2 I, hidden / 32]`
    GateUpScales,
    /// `[E, 2 I]`
    GateUpBias,
    /// `[E, hidden, I / 32, 16]`
    DownBlocks,
    /// `[E, hidden, I / 32]`
    DownScales,
    /// `[E, hidden]`
    DownBias,
    /// Scales of FP8 queries' weights.
    QScales,
    /// Scales of FP8 keys' weights.
    KScales,
    /// Scales of FP8 values' weights.
    VScales,
    /// Scales of FP8 output weights.
    OScales,
    /// FP8 experts, `[E, 2 I, hidden]`, rows as in `GateUpBlocks`.
    GateUpFp8,
    /// `[E, 2 I / 128, hidden / 128]`
    GateUpFp8Scales,
    /// FP8 experts, `[E, hidden, I]`
    DownFp8,
    /// `[E, hidden / 128, I / 128]`
    DownFp8Scales,
}

impl LayerParam {
    /// Every tensor that a layer can have.
    const ALL: [Self; 27] = [
        Self::AttnNorm,
        Self::QWeight,
        Self::QBias,
        Self::KWeight,
        Self::KBias,
        Self::VWeight,
        Self::VBias,
        Self::Sinks,
        Self::OWeight,
        Self::OBias,
        Self::MlpNorm,
        Self::RouterWeight,
        Self::RouterBias,
        Self::GateUpBlocks,
        Self::GateUpScales,
        Self::GateUpBias,
        Self::DownBlocks,
        Self::DownScales,
        Self::DownBias,
        Self::QScales,
        Self::KScales,
        Self::VScales,
        Self::OScales,
        Self::GateUpFp8,
        Self::GateUpFp8Scales,
        Self::DownFp8,
        Self::DownFp8Scales,
    ];

    /// Whether checkpoints of a scheme have the tensor.
    const fn is_in(self, scheme: WeightScheme) -> bool {
        let (fp8_experts, fp8_dense) =
            (matches!(scheme.experts, ExpertFormat::Fp8), matches!(scheme.dense, DenseFormat::Fp8));
        match self {
            Self::GateUpBlocks | Self::GateUpScales | Self::DownBlocks | Self::DownScales => !fp8_experts,
            Self::GateUpFp8 | Self::GateUpFp8Scales | Self::DownFp8 | Self::DownFp8Scales => fp8_experts,
            Self::QScales | Self::KScales | Self::VScales | Self::OScales => fp8_dense,
            _ => true,
        }
    }

    const fn hugging_face_suffix(self) -> &'static str {
        match self {
            Self::AttnNorm => "input_layernorm.weight",
            Self::QWeight => "self_attn.q_proj.weight",
            Self::QBias => "self_attn.q_proj.bias",
            Self::KWeight => "self_attn.k_proj.weight",
            Self::KBias => "self_attn.k_proj.bias",
            Self::VWeight => "self_attn.v_proj.weight",
            Self::VBias => "self_attn.v_proj.bias",
            Self::Sinks => "self_attn.sinks",
            Self::OWeight => "self_attn.o_proj.weight",
            Self::OBias => "self_attn.o_proj.bias",
            Self::MlpNorm => "post_attention_layernorm.weight",
            Self::RouterWeight => "mlp.router.weight",
            Self::RouterBias => "mlp.router.bias",
            Self::GateUpBlocks => "mlp.experts.gate_up_proj_blocks",
            Self::GateUpScales => "mlp.experts.gate_up_proj_scales",
            Self::GateUpBias => "mlp.experts.gate_up_proj_bias",
            Self::DownBlocks => "mlp.experts.down_proj_blocks",
            Self::DownScales => "mlp.experts.down_proj_scales",
            Self::DownBias => "mlp.experts.down_proj_bias",
            Self::QScales => "self_attn.q_proj.weight_scale",
            Self::KScales => "self_attn.k_proj.weight_scale",
            Self::VScales => "self_attn.v_proj.weight_scale",
            Self::OScales => "self_attn.o_proj.weight_scale",
            Self::GateUpFp8 => "mlp.experts.gate_up_proj.weight",
            Self::GateUpFp8Scales => "mlp.experts.gate_up_proj.weight_scale",
            Self::DownFp8 => "mlp.experts.down_proj.weight",
            Self::DownFp8Scales => "mlp.experts.down_proj.weight_scale",
        }
    }

    const fn original_suffix(self) -> &'static str {
        match self {
            Self::AttnNorm => "attn.norm.scale",
            Self::QWeight | Self::KWeight | Self::VWeight => "attn.qkv.weight",
            Self::QBias | Self::KBias | Self::VBias => "attn.qkv.bias",
            Self::Sinks => "attn.sinks",
            Self::OWeight => "attn.out.weight",
            Self::OBias => "attn.out.bias",
            Self::MlpNorm => "mlp.norm.scale",
            Self::RouterWeight => "mlp.gate.weight",
            Self::RouterBias => "mlp.gate.bias",
            Self::GateUpBlocks => "mlp.mlp1_weight.blocks",
            Self::GateUpScales => "mlp.mlp1_weight.scales",
            Self::GateUpBias => "mlp.mlp1_bias",
            Self::DownBlocks => "mlp.mlp2_weight.blocks",
            Self::DownScales => "mlp.mlp2_weight.scales",
            Self::DownBias => "mlp.mlp2_bias",
            // The `original/` layout has no FP8 form: these are never there.
            Self::QScales | Self::KScales | Self::VScales => "attn.qkv.weight_scale",
            Self::OScales => "attn.out.weight_scale",
            Self::GateUpFp8 => "mlp.mlp1_weight.weight",
            Self::GateUpFp8Scales => "mlp.mlp1_weight.weight_scale",
            Self::DownFp8 => "mlp.mlp2_weight.weight",
            Self::DownFp8Scales => "mlp.mlp2_weight.weight_scale",
        }
    }
}

impl Param {
    /// Every tensor of a model as it is stored, in the order of a forward pass.
    pub fn all(config: &ModelConfig) -> impl Iterator<Item = Self> + use<> {
        let stored = config.stored;
        let of_layer = LayerParam::ALL.into_iter().filter(move |param| param.is_in(stored));
        let layers =
            (0..config.num_layers).flat_map(move |layer| of_layer.clone().map(move |param| Self::Layer(layer, param)));
        let head_scales = (stored.dense == DenseFormat::Fp8).then_some(Self::HeadScales);
        std::iter::once(Self::Embedding).chain(layers).chain([Self::FinalNorm, Self::Head]).chain(head_scales)
    }

    /// Element type in the checkpoint.
    #[must_use]
    pub fn dtype(self, config: &ModelConfig) -> Dtype {
        use LayerParam::{
            DownBlocks, DownFp8, DownFp8Scales, DownScales, GateUpBlocks, GateUpFp8, GateUpFp8Scales, GateUpScales,
            KScales, KWeight, OScales, OWeight, QScales, QWeight, VScales, VWeight,
        };
        let dense = if config.stored.dense == DenseFormat::Fp8 { Dtype::F8E4M3 } else { Dtype::Bf16 };
        match self {
            Self::HeadScales => Dtype::U8,
            Self::Head => dense,
            Self::Layer(_, param) => match param {
                GateUpBlocks | GateUpScales | DownBlocks | DownScales => Dtype::U8,
                QScales | KScales | VScales | OScales | GateUpFp8Scales | DownFp8Scales => Dtype::U8,
                GateUpFp8 | DownFp8 => Dtype::F8E4M3,
                QWeight | KWeight | VWeight | OWeight => dense,
                _ => Dtype::Bf16,
            },
            Self::Embedding | Self::FinalNorm => Dtype::Bf16,
        }
    }

    /// The scales of an FP8 matrix.
    ///
    /// # Panics
    /// If no FP8 form of the tensor exists.
    #[must_use]
    pub fn fp8_scales(self) -> Self {
        let Self::Layer(layer, param) = self else {
            assert_eq!(self, Self::Head, "{self} has no fp8 form");
            return Self::HeadScales;
        };
        Self::Layer(
            layer,
            match param {
                LayerParam::QWeight => LayerParam::QScales,
                LayerParam::KWeight => LayerParam::KScales,
                LayerParam::VWeight => LayerParam::VScales,
                LayerParam::OWeight => LayerParam::OScales,
                LayerParam::GateUpFp8 => LayerParam::GateUpFp8Scales,
                LayerParam::DownFp8 => LayerParam::DownFp8Scales,
                _ => panic!("{self} has no fp8 form"),
            },
        )
    }

    /// Shape of the whole, unsharded tensor.
    #[must_use]
    pub fn shape(self, config: &ModelConfig) -> Vec<usize> {
        let (hidden, units, experts) = (config.hidden_size, config.intermediate_size, config.num_experts);
        let blocks = |rows: usize, cols: usize| vec![rows.div_ceil(BLOCK), cols.div_ceil(BLOCK)];
        let expert_blocks = |rows: usize, cols: usize| [vec![experts], blocks(rows, cols)].concat();
        match self {
            Self::HeadScales => blocks(config.vocab_size, hidden),
            Self::Embedding | Self::Head => vec![config.vocab_size, hidden],
            Self::FinalNorm => vec![hidden],
            Self::Layer(_, param) => match param {
                LayerParam::AttnNorm | LayerParam::MlpNorm | LayerParam::OBias => vec![hidden],
                LayerParam::QWeight => vec![config.q_width(), hidden],
                LayerParam::QBias => vec![config.q_width()],
                LayerParam::KWeight | LayerParam::VWeight => vec![config.kv_width(), hidden],
                LayerParam::KBias | LayerParam::VBias => vec![config.kv_width()],
                LayerParam::Sinks => vec![config.num_heads],
                LayerParam::OWeight => vec![hidden, config.q_width()],
                LayerParam::RouterWeight => vec![experts, hidden],
                LayerParam::RouterBias => vec![experts],
                LayerParam::GateUpBlocks => vec![experts, 2 * units, hidden / BLOCK_VALUES, BLOCK_BYTES],
                LayerParam::GateUpScales => vec![experts, 2 * units, hidden / BLOCK_VALUES],
                LayerParam::GateUpBias => vec![experts, 2 * units],
                LayerParam::DownBlocks => vec![experts, hidden, units / BLOCK_VALUES, BLOCK_BYTES],
                LayerParam::DownScales => vec![experts, hidden, units / BLOCK_VALUES],
                LayerParam::DownBias => vec![experts, hidden],
                LayerParam::QScales => blocks(config.q_width(), hidden),
                LayerParam::KScales | LayerParam::VScales => blocks(config.kv_width(), hidden),
                LayerParam::OScales => blocks(hidden, config.q_width()),
                LayerParam::GateUpFp8 => vec![experts, 2 * units, hidden],
                LayerParam::GateUpFp8Scales => expert_blocks(2 * units, hidden),
                LayerParam::DownFp8 => vec![experts, hidden, units],
                LayerParam::DownFp8Scales => expert_blocks(hidden, units),
            },
        }
    }
}

impl fmt::Display for Param {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedding => f.write_str("model.embed_tokens.weight"),
            Self::FinalNorm => f.write_str("model.norm.weight"),
            Self::Head => f.write_str("lm_head.weight"),
            Self::HeadScales => f.write_str("lm_head.weight_scale"),
            Self::Layer(layer, param) => write!(f, "model.layers.{layer}.{}", param.hugging_face_suffix()),
        }
    }
}

/// The two ways in which gpt-oss checkpoints name and cut their tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NameLayout {
    /// `model.layers.0.self_attn.q_proj.weight`, ... as transformers writes them.
    HuggingFace,
    /// `block.0.attn.qkv.weight`, ... as in the `original/` folder of the released models.
    Original,
}

/// Where a layout keeps a [`Param`]: rows `rows` of the stored tensor `name`, which has shape `shape`.
pub(crate) struct StoredAs {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) rows: Range<usize>,
}

impl NameLayout {
    /// Tells the layout from one tensor name; `None` if it belongs to neither.
    pub(crate) fn of_name(name: &str) -> Option<Self> {
        if name.starts_with("model.") || name == "lm_head.weight" {
            Some(Self::HuggingFace)
        } else if name.starts_with("block.") || matches!(name, "embedding.weight" | "unembedding.weight" | "norm.scale")
        {
            Some(Self::Original)
        } else {
            None
        }
    }

    pub(crate) fn locate(self, param: Param, config: &ModelConfig) -> StoredAs {
        let shape = param.shape(config);
        let rows = 0..shape[0];
        match self {
            Self::HuggingFace => StoredAs { name: param.to_string(), shape, rows },
            Self::Original => Self::locate_original(param, config, shape, rows),
        }
    }

    fn locate_original(param: Param, config: &ModelConfig, mut shape: Vec<usize>, mut rows: Range<usize>) -> StoredAs {
        let name = match param {
            Param::Embedding => "embedding.weight".to_owned(),
            Param::FinalNorm => "norm.scale".to_owned(),
            Param::Head => "unembedding.weight".to_owned(),
            Param::HeadScales => "unembedding.weight_scale".to_owned(),
            Param::Layer(layer, layer_param) => {
                // Q, K and V are rows of one fused matrix, in this order.
                let (q, kv) = (config.q_width(), config.kv_width());
                let fused_rows = match layer_param {
                    LayerParam::QWeight | LayerParam::QBias => Some(0..q),
                    LayerParam::KWeight | LayerParam::KBias => Some(q..q + kv),
                    LayerParam::VWeight | LayerParam::VBias => Some(q + kv..q + 2 * kv),
                    _ => None,
                };
                if let Some(fused_rows) = fused_rows {
                    shape[0] = q + 2 * kv;
                    rows = fused_rows;
                }
                format!("block.{layer}.{}", layer_param.original_suffix())
            }
        };
        StoredAs { name, shape, rows }
    }
}

/// Names under which dequantised checkpoints keep their expert matrices, where an MXFP4 one has `blocks` and `scales`.
pub(crate) fn is_dequantised_expert(name: &str) -> bool {
    ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.mlp1_weight", "mlp.mlp2_weight"]
        .iter()
        .any(|suffix| name.ends_with(suffix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_sizes() {
        let config = ModelConfig::gpt_oss_20b();
        let values: usize = Param::all(&config)
            .map(|param| {
                let num_values: usize = param.shape(&config).iter().product();
                match param {
                    Param::Layer(_, LayerParam::GateUpBlocks | LayerParam::DownBlocks) => 2 * num_values,
                    Param::Layer(_, LayerParam::GateUpScales | LayerParam::DownScales) => 0,
                    _ => num_values,
                }
            })
            .sum();
        assert_eq!(values / 100_000_000, 209, "20.9 billion parameters, found {values}");
    }

    #[test]
    fn original_layout_fuses_qkv() {
        let config = ModelConfig::gpt_oss_20b();
        let at = |param| NameLayout::Original.locate(Param::Layer(3, param), &config);
        for (param, rows) in
            [(LayerParam::QWeight, 0..4096), (LayerParam::KWeight, 4096..4608), (LayerParam::VWeight, 4608..5120)]
        {
            let stored = at(param);
            assert_eq!(stored.name, "block.3.attn.qkv.weight");
            assert_eq!(stored.shape, [5120, 2880]);
            assert_eq!(stored.rows, rows);
        }
        assert_eq!(at(LayerParam::VBias).shape, [5120]);
        assert_eq!(at(LayerParam::DownBlocks).name, "block.3.mlp.mlp2_weight.blocks");
    }
}
