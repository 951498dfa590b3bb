//! From a model source to a running engine: first what the files say, which takes milliseconds, then the weights.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use constraint::Compiler;
use engine::KvListener;
use engine::cpu::{self, CpuOptions, LoadProgress};
use engine::cuda::{self, CudaOptions, Weights};
use engine::group::EngineGroup;
use model::Checkpoint;
use types::{KvLayout, ModelFingerprint, TokenId};
use vocabulary::Vocabulary;

use crate::backend::Backend;
use crate::config::{EngineConfig, ModelSource};
use crate::error::WorkerError;
use crate::status::{LoadingProgress, Status};

/// A checkpoint whose weights have not been read.
pub struct OpenModel {
    is_embedded: bool,
    checkpoint: Arc<Checkpoint>,
    fingerprint: ModelFingerprint,
    vocabulary: Arc<Vocabulary>,
    masked_tokens: Vec<Range<TokenId>>,
}

/// A model that computes.
pub struct LoadedModel {
    /// The ranks.
    pub engine: Arc<EngineGroup>,
    /// Makes sense of the grammars of constrained sequences.
    pub compiler: Arc<Compiler>,
}

impl OpenModel {
    /// Opens the checkpoint and reads its vocabulary. Blocks: about a second for the vocabulary of the released models.
    ///
    /// # Errors
    /// `Checkpoint`, `Vocabulary`.
    pub fn open(source: &ModelSource) -> Result<Self, WorkerError> {
        let checkpoint = match source {
            ModelSource::EmbeddedNano => Checkpoint::embedded_nano(),
            ModelSource::Directory(path) => Checkpoint::open(path)?,
        };
        let vocabulary = match checkpoint.tokenizer_json() {
            Some(json) => {
                let vocabulary = Vocabulary::from_tokenizer_json(json);
                Arc::new(vocabulary.map_err(|error| WorkerError::Vocabulary(error.to_string()))?)
            }
            None => Vocabulary::o200k_harmony(),
        };
        let fingerprint = checkpoint.fingerprint(vocabulary.fingerprint());
        let fits = vocabulary.check_fits(fingerprint.vocab_size);
        fits.map_err(|error| WorkerError::Vocabulary(error.to_string()))?;
        let masked_tokens = unused_tokens(&vocabulary, fingerprint.vocab_size);
        let is_embedded = *source == ModelSource::EmbeddedNano;
        Ok(Self { is_embedded, checkpoint: Arc::new(checkpoint), fingerprint, vocabulary, masked_tokens })
    }

    /// The checkpoint.
    #[must_use]
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Model and vocabulary.
    #[must_use]
    pub fn fingerprint(&self) -> &ModelFingerprint {
        &self.fingerprint
    }

    /// Numbers that stand for no token; they are never sampled.
    #[must_use]
    pub fn masked_tokens(&self) -> &[Range<TokenId>] {
        &self.masked_tokens
    }

    /// The engine that `wanted` comes to for this model: never `Auto`. Looks for a GPU unless the answer is plain.
    ///
    /// # Errors
    /// As [`Backend::choose`].
    pub fn choose_backend(&self, wanted: Backend, config: &EngineConfig) -> Result<Backend, WorkerError> {
        wanted.choose(config, self.is_embedded)
    }

    /// How the KV cache of an engine of `config` lies in memory.
    ///
    /// # Errors
    /// `Config` when the heads do not divide among the ranks.
    pub fn kv_layout(&self, config: &EngineConfig) -> Result<KvLayout, WorkerError> {
        let (kv_heads, tp) = (self.checkpoint.config().num_kv_heads, config.layout.tp as usize);
        if tp == 0 || !kv_heads.is_multiple_of(tp) {
            return Err(WorkerError::Config(format!(
                "layout.tp is {tp}, it must divide the model's {kv_heads} kv heads"
            )));
        }
        let model = self.checkpoint.config();
        Ok(match config.backend {
            Backend::Cuda => cuda::kv_layout(model, &self.cuda_options(config)),
            Backend::Cpu | Backend::Auto => cpu::kv_layout(model, &self.cpu_options(config)),
        })
    }

    /// Reads the weights and starts the ranks. Blocks, for minutes with a large model; `status` is told how far it has come.
    ///
    /// # Errors
    /// `Engine`.
    pub fn load(
        &self,
        config: &EngineConfig,
        listener: Option<Arc<dyn KvListener>>,
        status: &Arc<Status>,
    ) -> Result<LoadedModel, WorkerError> {
        let progress = sum_over_ranks(Arc::clone(status));
        let checkpoint = Arc::clone(&self.checkpoint);
        let engine = match config.backend {
            Backend::Cuda => {
                let weights = Weights::Checkpoint(checkpoint);
                cuda::build_group(weights, self.cuda_options(config), listener, progress)?
            }
            Backend::Cpu | Backend::Auto => cpu::build_group(checkpoint, self.cpu_options(config), listener, progress)?,
        };
        tracing::info!(role = %config.role, backend = %config.backend, "engine is built");
        let compiler = Arc::new(Compiler::new(Arc::clone(&self.vocabulary)));
        Ok(LoadedModel { engine: Arc::new(engine), compiler })
    }

    fn cuda_options(&self, config: &EngineConfig) -> CudaOptions {
        CudaOptions {
            layout: config.layout,
            routing: config.numerics.routing.into(),
            page_tokens: config.page_tokens,
            full_pages: config.full_pages,
            window_pages: config.window_pages,
            max_slots: config.max_slots,
            max_step_tokens: config.max_step_tokens,
            max_context_tokens: config.max_context_tokens,
            publish_layers: None,
            masked_tokens: self.masked_tokens.clone(),
            first_device: 0,
        }
    }

    fn cpu_options(&self, config: &EngineConfig) -> CpuOptions {
        CpuOptions {
            layout: config.layout,
            numerics: config.numerics.engine(),
            kv_dtype: config.numerics.kv_dtype(),
            page_tokens: config.page_tokens,
            full_pages: config.full_pages,
            window_pages: config.window_pages,
            max_slots: config.max_slots,
            max_step_tokens: config.max_step_tokens,
            publish_layers: None,
            masked_tokens: self.masked_tokens.clone(),
            probe: None,
        }
    }
}

/// Numbers below `vocab_size` that stand for no token: a model may have more rows than its vocabulary has words.
fn unused_tokens(vocabulary: &Vocabulary, vocab_size: u32) -> Vec<Range<TokenId>> {
    let mut unused: Vec<Range<TokenId>> = Vec::new();
    for token in 0..vocab_size {
        if vocabulary.token_bytes(token).is_some() || vocabulary.special_name(token).is_some() {
            continue;
        }
        match unused.last_mut() {
            Some(last) if last.end == token => last.end += 1,
            _ => unused.push(token..token + 1),
        }
    }
    unused
}

fn sum_over_ranks(status: Arc<Status>) -> Arc<dyn Fn(LoadProgress) + Send + Sync> {
    let ranks: Mutex<BTreeMap<u32, LoadProgress>> = Mutex::default();
    Arc::new(move |progress| {
        let mut ranks = ranks.lock().unwrap_or_else(PoisonError::into_inner);
        ranks.insert(progress.rank, progress);
        let (done, total) = ranks.values().fold((0, 0), |(done, total), rank| (done + rank.done, total + rank.total));
        status.set_loading(LoadingProgress { done, total });
    })
}
