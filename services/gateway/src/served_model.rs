//! The model that this gateway speaks for: its fingerprint, and the format that its conversations are written in.

use std::sync::Arc;

use constraint::Compiler;
use format::chat::ChatFormat;
use format::harmony::Harmony;
use model::{CheckpointError, ModelConfig, ModelIdentity};
use types::ModelFingerprint;
use vocabulary::{Vocabulary, VocabularyError};

use crate::config::ModelSource;

/// Name, vocabulary and format of the served model.
#[derive(Clone)]
pub struct ServedModel {
    /// What the router must serve too.
    pub fingerprint: ModelFingerprint,
    /// How conversations are written.
    pub format: Arc<dyn ChatFormat>,
    /// Checks the grammars of answers.
    pub compiler: Arc<Compiler>,
}

/// Why a model cannot be spoken for.
#[derive(Debug, thiserror::Error)]
pub enum ServedModelError {
    /// Its config.json or tokenizer.json cannot be read. Weights are not needed here.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Its vocabulary cannot be used.
    #[error("{model}: {cause}")]
    Vocabulary {
        /// The model.
        model: String,
        /// What is wrong.
        cause: VocabularyError,
    },
    /// Its vocabulary lacks a token that the format needs.
    #[error("{model}: {cause}")]
    Format {
        /// The model.
        model: String,
        /// What is wrong.
        cause: format::harmony::MissingToken,
    },
}

impl ServedModel {
    /// Loads name and vocabulary; takes up to a few seconds for 200,000 tokens, so call it off the runtime.
    ///
    /// # Errors
    /// As [`ServedModelError`] says.
    pub fn load(source: &ModelSource) -> Result<Self, ServedModelError> {
        let identity = match source {
            ModelSource::EmbeddedNano => ModelIdentity::embedded_nano(),
            ModelSource::Directory(path) => ModelIdentity::open(path)?,
            ModelSource::Released(name) => return Self::released(name),
            ModelSource::Random(model) => {
                let vocabulary = Vocabulary::o200k_harmony();
                return Self::new(model.fingerprint(vocabulary.fingerprint()), vocabulary);
            }
        };
        let Some(tokenizer_json) = identity.tokenizer_json() else {
            let vocabulary = Vocabulary::o200k_harmony();
            return Self::new(identity.fingerprint(vocabulary.fingerprint()), vocabulary);
        };
        let model = || identity.name().to_owned();
        let vocabulary = Vocabulary::from_tokenizer_json(tokenizer_json)
            .map_err(|cause| ServedModelError::Vocabulary { model: model(), cause })?;
        Self::new(identity.fingerprint(vocabulary.fingerprint()), Arc::new(vocabulary))
    }

    fn released(name: &str) -> Result<Self, ServedModelError> {
        let vocabulary = Vocabulary::o200k_harmony();
        let fingerprint = ModelFingerprint {
            model: name.to_owned(),
            vocab_size: ModelConfig::gpt_oss_20b().vocab_size as u32,
            tokenizer_sha256: vocabulary.fingerprint().to_owned(),
        };
        Self::new(fingerprint, vocabulary)
    }

    fn new(fingerprint: ModelFingerprint, vocabulary: Arc<Vocabulary>) -> Result<Self, ServedModelError> {
        vocabulary
            .check_fits(fingerprint.vocab_size)
            .map_err(|cause| ServedModelError::Vocabulary { model: fingerprint.model.clone(), cause })?;
        let compiler = Arc::new(Compiler::new(Arc::clone(&vocabulary)));
        let format = Harmony::new(vocabulary)
            .map_err(|cause| ServedModelError::Format { model: fingerprint.model.clone(), cause })?;
        Ok(Self { fingerprint, format: Arc::new(format), compiler })
    }

    /// The model's public name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.fingerprint.model
    }

    /// The vocabulary of prompts and answers.
    #[must_use]
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        self.format.vocabulary()
    }
}
