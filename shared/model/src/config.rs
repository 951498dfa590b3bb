//! What a checkpoint says about its model: sizes, layer kinds, rope. Read from either dialect of config.json.

mod json;

use std::path::Path;

use types::{KvDtype, KvLayout, PageGroup, TokenId};

use crate::scheme::WeightScheme;

/// Slope of the sigmoid in the clamped SwiGLU. No config file states it; it is a constant of the published model
/// (`swiglu` in openai/gpt-oss `gpt_oss/torch/model.py`).
pub const SWIGLU_ALPHA: f32 = 1.702;

/// Which keys a layer's attention sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
pub enum LayerKind {
    /// The last [`ModelConfig::window`] positions, the query's own included.
    Sliding,
    /// The whole context.
    Full,
}

/// Rotary embedding with YaRN scaling; the formulas are in [`crate::rope`].
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct RopeConfig {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// Factor by which YaRN stretches the context.
    pub factor: f64,
    /// Context length before stretching, in tokens.
    pub original_context_tokens: usize,
    /// Channels that turn more often than this within the original context keep their frequency.
    pub beta_fast: f64,
    /// Channels that turn less often than this within the original context are fully interpolated.
    pub beta_slow: f64,
}

/// The sizes and constants of one gpt-oss model. Every value has been checked: code that holds one need not validate it
/// again.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct ModelConfig {
    /// Transformer blocks.
    pub num_layers: usize,
    /// Width of the residual stream; a multiple of 32.
    pub hidden_size: usize,
    /// Query heads; a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Channels of one head; even.
    pub head_dim: usize,
    /// Units of one expert: rows of the gate matrix, of the up matrix, and columns of the down matrix; a multiple of
    /// 32.
    pub intermediate_size: usize,
    /// Experts of each layer.
    pub num_experts: usize,
    /// Experts that each token visits.
    pub experts_per_token: usize,
    /// Rows of embedding and head.
    pub vocab_size: usize,
    /// Longest context the rope scaling was made for, in tokens.
    pub max_context_tokens: usize,
    /// Keys that a sliding layer sees, the query's own position included.
    pub window: usize,
    /// Kind of every layer; `num_layers` entries.
    pub layer_kinds: Vec<LayerKind>,
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: f32,
    /// Clamp of the SwiGLU's inputs.
    pub swiglu_limit: f32,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// How the checkpoint stores the matrices.
    #[serde(skip_serializing_if = "WeightScheme::is_released")]
    pub stored: WeightScheme,
}

impl ModelConfig {
    /// Reads config.json, in the Hugging Face dialect (`model_type: gpt_oss`) or that of the `original/` folder
    /// (`ModelConfig` in openai/gpt-oss `gpt_oss/torch/model.py`). `file` is only named in errors.
    ///
    /// # Errors
    /// The file and field of the first value that is missing, of the wrong type, or not supported.
    pub fn from_json(text: &str, file: &Path) -> Result<Self, ConfigError> {
        json::parse(text, file)
    }

    /// config.json in the Hugging Face dialect, from which [`ModelConfig::from_json`] reads the same again.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        json::write(self)
    }

    /// The sizes of gpt-oss-20b.
    #[must_use]
    pub fn gpt_oss_20b() -> Self {
        Self::released(24, 32)
    }

    /// The sizes of gpt-oss-120b.
    #[must_use]
    pub fn gpt_oss_120b() -> Self {
        Self::released(36, 128)
    }

    fn released(num_layers: usize, num_experts: usize) -> Self {
        Self {
            num_layers,
            hidden_size: 2880,
            num_heads: 64,
            num_kv_heads: 8,
            head_dim: 64,
            intermediate_size: 2880,
            num_experts,
            experts_per_token: 4,
            vocab_size: 201_088,
            max_context_tokens: 131_072,
            window: 128,
            layer_kinds: alternating_kinds(num_layers),
            rms_norm_eps: 1e-5,
            swiglu_limit: 7.0,
            rope: RopeConfig {
                theta: 150_000.0,
                factor: 32.0,
                original_context_tokens: 4096,
                beta_fast: 32.0,
                beta_slow: 1.0,
            },
            stored: WeightScheme::default(),
        }
    }

    /// Width of all query heads together, in channels.
    #[must_use]
    pub fn q_width(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of all key (or value) heads together, in channels.
    #[must_use]
    pub fn kv_width(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Query heads that share one KV head.
    #[must_use]
    pub fn group_size(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Factor on `q . k` before the softmax: `head_dim^-1/2`. The sink is not scaled.
    #[must_use]
    pub fn softmax_scale(&self) -> f32 {
        (1.0 / (self.head_dim as f64).sqrt()) as f32
    }

    /// Layers of one kind, ascending.
    #[must_use]
    pub fn layers_of(&self, kind: LayerKind) -> Vec<usize> {
        (0..self.num_layers).filter(|&layer| self.layer_kinds[layer] == kind).collect()
    }

    /// The page group that holds a layer's keys and values.
    #[must_use]
    pub fn page_group(&self, layer: usize) -> PageGroup {
        match self.layer_kinds[layer] {
            LayerKind::Full => PageGroup::Full,
            LayerKind::Sliding => PageGroup::Window,
        }
    }

    /// How an instance with tensor parallelism `tp` lays out its KV cache.
    #[must_use]
    pub fn kv_layout(&self, page_tokens: u32, dtype: KvDtype, tp: u32) -> KvLayout {
        let layers = |kind| self.layers_of(kind).into_iter().map(|layer| layer as u32).collect();
        KvLayout {
            full_layers: layers(LayerKind::Full),
            window_layers: layers(LayerKind::Sliding),
            kv_heads: self.num_kv_heads as u32,
            head_dim: self.head_dim as u32,
            page_tokens,
            window: self.window as u32,
            dtype,
            tp,
        }
    }
}

/// The published pattern: a sliding layer first, then full and sliding in turn.
fn alternating_kinds(num_layers: usize) -> Vec<LayerKind> {
    (0..num_layers).map(|layer| if layer % 2 == 0 { LayerKind::Sliding } else { LayerKind::Full }).collect()
}

/// Tokens that end an answer, as generation_config.json names them (`eos_token_id`, a number or a list).
///
/// # Errors
/// The field, if it is missing, of the wrong type, or names a token outside the vocabulary.
pub fn stop_token_ids(text: &str, file: &Path, vocab_size: usize) -> Result<Vec<TokenId>, ConfigError> {
    json::stop_token_ids(text, file, vocab_size)
}

/// Why a config file is refused. `file` is the path as it was opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON, or not an object.
    #[error("{file}: not a json object: {reason}")]
    Json {
        /// The file.
        file: String,
        /// What the parser said.
        reason: String,
    },
    /// A field that is needed is absent.
    #[error("{file}: {field} is missing")]
    Missing {
        /// The file.
        file: String,
        /// Path of the field.
        field: String,
    },
    /// A field has another type.
    #[error("{file}: {field} is {found}, expected {expected}")]
    Type {
        /// The file.
        file: String,
        /// Path of the field.
        field: String,
        /// What would be right.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// A value that this implementation would compute wrongly.
    #[error("{file}: {field} is {found}, supported is {supported}")]
    Unsupported {
        /// The file.
        file: String,
        /// Path of the field.
        field: String,
        /// What is there.
        found: String,
        /// What is supported.
        supported: String,
    },
}

impl types::Classify for ConfigError {
    fn class(&self) -> types::ErrorClass {
        types::ErrorClass::Fatal
    }
}

#[cfg(test)]
mod tests;
