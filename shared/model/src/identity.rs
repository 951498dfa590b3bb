//! What names a model and its vocabulary. A service that computes nothing opens this instead of a checkpoint, so that it
//! needs config.json and tokenizer.json on its host and no weights.

use std::path::Path;

use types::ModelFingerprint;

use crate::checkpoint::{CheckpointError, files};
use crate::config::ModelConfig;
use crate::fingerprint::sha256_hex;
use crate::mapping::FileBytes;
use crate::nano;

/// Name, vocabulary size and tokenizer of a model.
#[derive(Debug)]
pub struct ModelIdentity {
    name: String,
    vocab_size: u32,
    tokenizer_json: Option<FileBytes>,
}

impl ModelIdentity {
    /// Reads config.json of a checkpoint directory and maps its tokenizer.json, if it has one; for a directory named
    /// `original` that is also looked for beside it. Weight files are neither needed nor opened.
    ///
    /// # Errors
    /// What is wrong with config.json, or which file cannot be read.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let config_path = dir.join("config.json");
        let config = ModelConfig::from_json(&files::read_text(&config_path)?, &config_path)?;
        Self::in_directory(dir, &config)
    }

    pub(crate) fn in_directory(dir: &Path, config: &ModelConfig) -> Result<Self, CheckpointError> {
        let tokenizer_json = files::beside(dir, "tokenizer.json").map(|path| files::map(&path)).transpose()?;
        Ok(Self { name: files::model_name(dir), vocab_size: config.vocab_size as u32, tokenizer_json })
    }

    /// That of gpt-oss-nano, embedded in the binary.
    ///
    /// # Panics
    /// Never: a test of this crate opens it.
    #[must_use]
    pub fn embedded_nano() -> Self {
        let config = ModelConfig::from_json(nano::CONFIG, &Path::new(nano::NAME).join("config.json"))
            .unwrap_or_else(|error| panic!("the embedded model is broken: {error}"));
        Self::of_nano(&config)
    }

    pub(crate) fn of_nano(config: &ModelConfig) -> Self {
        let tokenizer_json = Some(FileBytes::Static(nano::TOKENIZER));
        Self { name: nano::NAME.to_owned(), vocab_size: config.vocab_size as u32, tokenizer_json }
    }

    /// The model's public name: that of its directory, for example `gpt-oss-20b`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Rows of the embedding: token ids are below it.
    #[must_use]
    pub fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// The bytes of tokenizer.json, if the model has one.
    #[must_use]
    pub fn tokenizer_json(&self) -> Option<&[u8]> {
        self.tokenizer_json.as_deref()
    }

    /// Identifies model and vocabulary. `builtin_tokenizer_sha256` is the digest of the vocabulary that the caller
    /// would use for a model without tokenizer.json.
    #[must_use]
    pub fn fingerprint(&self, builtin_tokenizer_sha256: &str) -> ModelFingerprint {
        ModelFingerprint {
            model: self.name.clone(),
            vocab_size: self.vocab_size,
            tokenizer_sha256: self.tokenizer_json().map_or_else(|| builtin_tokenizer_sha256.to_owned(), sha256_hex),
        }
    }
}
