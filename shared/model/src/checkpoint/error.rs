//! Everything that can be wrong with a checkpoint.

use std::path::PathBuf;

use types::{Classify, ErrorClass};

use crate::config::ConfigError;
use crate::param::Dtype;

/// Why a checkpoint is refused. Names the file, and the tensor where there is one.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The config is missing something or describes a model that is not supported.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A file cannot be read.
    #[error("{}: cannot be read", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The directory has no weights.
    #[error("{}: no .safetensors file{hint}", dir.display())]
    NoWeights {
        /// The directory.
        dir: PathBuf,
        /// Where there are some, or empty.
        hint: String,
    },
    /// Nothing says which tokens end an answer.
    #[error("{}: no generation_config.json, and the stop tokens of this vocabulary are not known", dir.display())]
    NoStopTokens {
        /// The directory.
        dir: PathBuf,
    },
    /// model.safetensors.index.json is not what it should be.
    #[error("{}: {reason}", file.display())]
    Index {
        /// The index file.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A safetensors header is damaged.
    #[error("{}: {reason}", file.display())]
    Header {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A file ends before a tensor does.
    #[error("{}: truncated: tensor {tensor} ends at byte {needed_bytes}, the file has {found_bytes}", file.display())]
    Truncated {
        /// The file.
        file: PathBuf,
        /// The first tensor that is not whole.
        tensor: String,
        /// Length that the file needs at least.
        needed_bytes: u64,
        /// Length that it has.
        found_bytes: u64,
    },
    /// No tensor name is known.
    #[error("{}: none of {tensors} tensor names belongs to a gpt-oss model", list(files))]
    UnknownLayout {
        /// The files.
        files: Vec<PathBuf>,
        /// Tensors in them.
        tensors: usize,
    },
    /// The experts are stored as bf16 matrices.
    #[error(
        "{}: tensor {tensor} ({dtype} {shape:?}) is a dequantised expert matrix; only MXFP4 checkpoints \
         (blocks and scales) are supported",
        file.display()
    )]
    Dequantised {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A tensor is in no file.
    #[error(
        "{}: tensor {tensor} is missing (expected {dtype} {shape:?}){}",
        list(files),
        unknown.as_ref().map(|name| format!("; the unknown tensor {name} is there")).unwrap_or_default()
    )]
    MissingTensor {
        /// All weight files.
        files: Vec<PathBuf>,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<usize>,
        /// A tensor that this model does not have: perhaps the missing one under a wrong name.
        unknown: Option<String>,
    },
    /// A file has tensors that the model does not have.
    #[error("{}: tensor {tensor} does not belong to the model that config.json describes ({count} such)", file.display())]
    UnknownTensors {
        /// The file.
        file: PathBuf,
        /// The first of them, by name.
        tensor: String,
        /// How many there are in all files.
        count: usize,
    },
    /// Two files have a tensor of the same name.
    #[error("tensor {tensor} is both in {} and in {}", first.display(), second.display())]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
        /// One file.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// A tensor has another dtype.
    #[error("{}: tensor {tensor} is {found}, expected {expected}", file.display())]
    WrongDtype {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// What the model needs.
        expected: Dtype,
        /// What the file has.
        found: String,
    },
    /// A tensor has another shape.
    #[error("{}: tensor {tensor} has shape {found:?}, expected {expected:?}", file.display())]
    WrongShape {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// What config.json asks for.
        expected: Vec<usize>,
        /// What the file has.
        found: Vec<usize>,
    },
    /// An MXFP4 scale is NaN.
    #[error("{}: tensor {tensor} has scale byte 255 (NaN) at {index:?}", file.display())]
    NanScale {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Place in the unsharded tensor: expert, row, block.
        index: [usize; 3],
    },
}

impl Classify for CheckpointError {
    fn class(&self) -> ErrorClass {
        ErrorClass::Fatal
    }
}

/// The first file, and how many more: a message about 15 shards stays readable.
fn list(files: &[PathBuf]) -> String {
    match files {
        [] => "no file".to_owned(),
        [file] => file.display().to_string(),
        [first, rest @ ..] => format!("{} and {} more", first.display(), rest.len()),
    }
}
