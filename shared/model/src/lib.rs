//! The gpt-oss model as data: its config, its checkpoints on disk, MXFP4, and which part of every tensor a rank holds.
//!
//! Knows: what the released files look like, what is wrong with one that differs, and what each operation of the model
//! *means* ([`mod@reference`], the oracle of all kernels). Must not know: how anything is computed fast (`engine`,
//! `kernels`), requests, pages, or any text format. No async, no clock; the only I/O is reading a checkpoint.
//!
//! Start with [`Checkpoint::open`], then [`ShardPlan`] (the contract between ranks), then [`load_rank`].

pub mod buffer;
pub mod checkpoint;
pub mod config;
pub mod convert;
pub mod e4m3;
pub mod fingerprint;
pub mod fp8;
pub mod identity;
mod mapping;
pub mod mxfp4;
mod nano;
pub mod param;
pub mod random_model;
pub mod rank_weights;
pub mod reference;
pub mod rope;
pub mod scheme;
pub mod sharding;
mod weight_file;

pub use buffer::Buffer;
pub use checkpoint::{Checkpoint, CheckpointError, Tensor};
pub use config::{ConfigError, LayerKind, ModelConfig, RopeConfig, SWIGLU_ALPHA};
pub use convert::{Convert, ConvertError, ConvertReport};
pub use e4m3::E4M3;
pub use fingerprint::sha256_hex;
pub use fp8::Fp8Matrix;
pub use identity::ModelIdentity;
pub use nano::EMBEDDED_NANO;
pub use param::{Dtype, LayerParam, Param};
pub use random_model::{RandomModel, ReleasedShape, UnknownModel};
pub use rank_weights::{
    ExpertMatrix, ExpertWeights, LayerWeights, Linear, Matrix, MxMatrix, RankWeights, load_rank, load_rank_as,
    rank_bytes,
};
pub use scheme::{DenseFormat, ExpertFormat, WeightScheme};
pub use sharding::{REDUCTION_SLICES, ShardError, ShardPlan, split};
