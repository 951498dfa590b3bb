//! From a model source to a running engine: first what the files say, which takes milliseconds, then the weights.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use constraint::Compiler;
use engine::KvListener;
use engine::cpu::{self, CpuOptions, LoadProgress};
use engine::cuda::{self, CudaOptions, MemoryNeeds, Weights};
use engine::group::EngineGroup;
use kv::PageShape;
use model::{Checkpoint, ModelConfig, RandomModel};
use types::{KvLayout, ModelFingerprint, TokenId};
use vocabulary::Vocabulary;

use crate::backend::Backend;
use crate::config::{EngineConfig, ModelSource};
use crate::error::WorkerError;
use crate::status::{LoadingProgress, Status};

/// A model whose weights have not been read or made.
pub struct OpenModel {
    is_embedded: bool,
    origin: Origin,
    fingerprint: ModelFingerprint,
    vocabulary: Arc<Vocabulary>,
    masked_tokens: Vec<Range<TokenId>>,
}

/// How many pages a worker could use; full ones where nothing else is said.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PagesWanted {
    /// By one sequence of the longest kind: at least so many are needed.
    pub longest: u32,
    /// By all sequences that there may be: more would be of no use. `u32::MAX` where what is kept of prompts uses any number.
    pub most: u32,
    /// On the CPU, where memory is what the machine has.
    pub on_cpu: u32,
    /// Of those that `longest` leaves, for how many there is one more window page than `EngineConfig::window_pages`: for prompts that are kept,
    /// to resume them. `None`: nothing is kept.
    pub full_per_kept_window: Option<u32>,
    /// Share of each GPU's memory that a rank may take, weights counted in.
    pub gpu_memory_share: f64,
}

impl PagesWanted {
    /// Window pages for what is kept beside one sequence of the longest kind.
    fn kept_window_pages(&self, full_pages: u32) -> u32 {
        self.full_per_kept_window.map_or(0, |full| full_pages.saturating_sub(self.longest) / full)
    }
}

/// Where the weights will come from.
enum Origin {
    Checkpoint(Arc<Checkpoint>),
    Random { model: RandomModel, config: ModelConfig },
}

/// A model that computes.
pub struct LoadedModel {
    /// The ranks.
    pub engine: Arc<EngineGroup>,
    /// Makes sense of the grammars of constrained sequences.
    pub compiler: Arc<Compiler>,
}

impl OpenModel {
    /// Opens the checkpoint, if there is one, and reads the vocabulary. Blocks: about a second for the vocabulary of the released models.
    ///
    /// # Errors
    /// `Checkpoint`, `Vocabulary`.
    pub fn open(source: &ModelSource) -> Result<Self, WorkerError> {
        let origin = match source {
            ModelSource::EmbeddedNano => Origin::Checkpoint(Arc::new(Checkpoint::embedded_nano())),
            ModelSource::Directory(path) => Origin::Checkpoint(Arc::new(Checkpoint::open(path)?)),
            ModelSource::Random(model) => Origin::Random { model: *model, config: model.shape.config() },
        };
        let vocabulary = match origin.tokenizer_json() {
            Some(json) => {
                let vocabulary = Vocabulary::from_tokenizer_json(json);
                Arc::new(vocabulary.map_err(|error| WorkerError::Vocabulary(error.to_string()))?)
            }
            None => Vocabulary::o200k_harmony(),
        };
        let fingerprint = origin.fingerprint(vocabulary.fingerprint());
        let fits = vocabulary.check_fits(fingerprint.vocab_size);
        fits.map_err(|error| WorkerError::Vocabulary(error.to_string()))?;
        let masked_tokens = unused_tokens(&vocabulary, fingerprint.vocab_size);
        let is_embedded = *source == ModelSource::EmbeddedNano;
        Ok(Self { is_embedded, origin, fingerprint, vocabulary, masked_tokens })
    }

    /// Sizes and constants.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        match &self.origin {
            Origin::Checkpoint(checkpoint) => checkpoint.config(),
            Origin::Random { config, .. } => config,
        }
    }

    /// Identifies the weights; workers with others are never paired.
    #[must_use]
    pub fn weights_fingerprint(&self) -> String {
        match &self.origin {
            Origin::Checkpoint(checkpoint) => checkpoint.weights_fingerprint(),
            Origin::Random { model, .. } => model.weights_fingerprint(),
        }
    }

    /// Tokens that end an answer unless a request says otherwise.
    #[must_use]
    pub fn stop_token_ids(&self) -> &[TokenId] {
        match &self.origin {
            Origin::Checkpoint(checkpoint) => checkpoint.stop_token_ids(),
            Origin::Random { model, .. } => model.stop_token_ids(),
        }
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

    /// How this model's pages hold `page_tokens` positions, for sequences of up to `max_context_tokens`.
    ///
    /// # Errors
    /// `Config` when the model was not made for such a context.
    pub fn page_shape(&self, page_tokens: u32, max_context_tokens: u32) -> Result<PageShape, WorkerError> {
        let most = self.config().max_context_tokens;
        if max_context_tokens as usize > most {
            return Err(WorkerError::Config(format!(
                "max_context_tokens is {max_context_tokens}, the model has {most}"
            )));
        }
        Ok(PageShape { page_tokens, window: self.config().window as u32 })
    }

    /// Decides what `config` leaves open: its backend, of which `Auto` is none, its full pages, `full_pages` or else what `sizing` comes to, and
    /// window pages for what is kept. Looks for a GPU unless the answer is plain.
    ///
    /// # Errors
    /// As [`Backend::choose`]; `Config` for random weights on the CPU, which has none, and when not even one sequence of the longest kind
    /// fits; `Engine` when the GPU does not say how much memory it has.
    pub fn settle(
        &self,
        config: &mut EngineConfig,
        full_pages: Option<u32>,
        sizing: PagesWanted,
    ) -> Result<(), WorkerError> {
        config.backend = self.choose_backend(config.backend, config)?;
        config.full_pages = match full_pages {
            Some(pages) => pages,
            None => self.full_pages(config, sizing)?,
        };
        config.window_pages += sizing.kept_window_pages(config.full_pages);
        tracing::info!(role = %config.role, full_pages = config.full_pages, window_pages = config.window_pages, "kv cache is sized");
        Ok(())
    }

    fn choose_backend(&self, wanted: Backend, config: &EngineConfig) -> Result<Backend, WorkerError> {
        match &self.origin {
            Origin::Checkpoint(_) => wanted.choose(config, self.is_embedded),
            Origin::Random { model, .. } if wanted == Backend::Cpu => {
                Err(WorkerError::Config(format!("model {model}: random weights are made on a gpu, and backend is cpu")))
            }
            Origin::Random { .. } => Backend::Cuda.choose(config, false),
        }
    }

    /// How the KV cache of an engine of `config` lies in memory.
    ///
    /// # Errors
    /// `Config` when the heads do not divide among the ranks.
    pub fn kv_layout(&self, config: &EngineConfig) -> Result<KvLayout, WorkerError> {
        let (kv_heads, tp) = (self.config().num_kv_heads, config.layout.tp as usize);
        if tp == 0 || !kv_heads.is_multiple_of(tp) {
            return Err(WorkerError::Config(format!(
                "layout.tp is {tp}, it must divide the model's {kv_heads} kv heads"
            )));
        }
        let model = self.config();
        Ok(match config.backend {
            Backend::Cuda => cuda::kv_layout(model, &self.cuda_options(config)),
            Backend::Cpu | Backend::Auto => cpu::kv_layout(model, &self.cpu_options(config)),
        })
    }

    /// On a GPU as many as fit into the share of its memory beside all window pages, up to `most`.
    fn full_pages(&self, config: &EngineConfig, sizing: PagesWanted) -> Result<u32, WorkerError> {
        let PagesWanted { longest, most, on_cpu, gpu_memory_share: share, .. } = sizing;
        if config.backend != Backend::Cuda {
            return Ok(on_cpu);
        }
        let needs = MemoryNeeds::of(self.config(), &self.cuda_options(config))?;
        let total = cuda::gpu_memory_bytes(0)?;
        let bytes = (total as f64 * share) as u64;
        let fit = needs.full_pages_within(bytes, config.window_pages);
        if fit < u64::from(longest) {
            let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
            return Err(WorkerError::Config(format!(
                "a sequence of max_context_tokens ({}) takes {longest} pages, {fit} fit: gpu_memory_share {share} of {:.0} GiB less {:.1} GiB \
                 for weights and a step leaves no more; lower max_context_tokens, raise gpu_memory_share, or take more gpus",
                config.max_context_tokens,
                gib(total),
                gib(needs.fixed_bytes),
            )));
        }
        let fit = fit.min(most.into()) as u32;
        // Counted for more full pages than will be left, so the window pages of `settle` fit in any case.
        let beside_kept = needs.full_pages_within(bytes, config.window_pages + sizing.kept_window_pages(fit));
        Ok(beside_kept.min(fit.into()) as u32)
    }

    /// Reads or makes the weights and starts the ranks. Blocks, for minutes with a large model; `status` is told how far it has come.
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
        let engine = match (config.backend, &self.origin) {
            (Backend::Cuda, origin) => {
                cuda::build_group(origin.weights(), self.cuda_options(config), listener, progress)?
            }
            (Backend::Cpu | Backend::Auto, Origin::Checkpoint(checkpoint)) => {
                cpu::build_group(Arc::clone(checkpoint), self.cpu_options(config), listener, progress)?
            }
            (Backend::Cpu | Backend::Auto, Origin::Random { .. }) => {
                unreachable!("choose_backend never puts random weights on the cpu")
            }
        };
        tracing::info!(role = %config.role, backend = %config.backend, "engine is built");
        let compiler = Arc::new(Compiler::new(Arc::clone(&self.vocabulary)));
        Ok(LoadedModel { engine: Arc::new(engine), compiler })
    }

    fn cuda_options(&self, config: &EngineConfig) -> CudaOptions {
        CudaOptions {
            layout: config.layout,
            scheme: config.weights,
            routing: config.numerics.routing.into(),
            kv_dtype: config.numerics.kv_dtype(),
            page_tokens: config.page_tokens,
            full_pages: config.full_pages,
            window_pages: config.window_pages,
            max_slots: config.max_slots,
            max_step_tokens: config.max_step_tokens,
            max_context_tokens: config.max_context_tokens,
            publish_layers: None,
            masked_tokens: self.masked_tokens.clone(),
            devices: (0..config.layout.ranks()).map(|rank| rank / config.ranks_per_gpu).collect(),
            probe: None,
        }
    }

    fn cpu_options(&self, config: &EngineConfig) -> CpuOptions {
        CpuOptions {
            layout: config.layout,
            numerics: config.numerics.engine(),
            scheme: config.weights,
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

impl Origin {
    fn tokenizer_json(&self) -> Option<&[u8]> {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.tokenizer_json(),
            Self::Random { .. } => None,
        }
    }

    fn fingerprint(&self, builtin_tokenizer_sha256: &str) -> ModelFingerprint {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.fingerprint(builtin_tokenizer_sha256),
            Self::Random { model, .. } => model.fingerprint(builtin_tokenizer_sha256),
        }
    }

    fn weights(&self) -> Weights {
        match self {
            Self::Checkpoint(checkpoint) => Weights::Checkpoint(Arc::clone(checkpoint)),
            Self::Random { model, config } => Weights::Random { config: config.clone(), seed: model.seed },
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

#[cfg(test)]
mod tests {
    use model::ReleasedShape;
    use types::{ParallelLayout, Role};

    use super::*;
    use crate::config::{KvRounding, NumericsConfig, Rounding};

    fn engine_config(backend: Backend) -> EngineConfig {
        EngineConfig {
            role: Role::Prefill,
            backend,
            layout: ParallelLayout::tp(1),
            ranks_per_gpu: 1,
            numerics: NumericsConfig { compute: Rounding::Bf16, routing: Rounding::Bf16, kv: KvRounding::Bf16 },
            weights: model::WeightScheme::default(),
            page_tokens: 64,
            full_pages: 1,
            window_pages: 1,
            max_slots: 1,
            max_step_tokens: 1,
            max_context_tokens: 32,
        }
    }

    #[test]
    fn two_workers_of_one_random_model_agree_in_all_that_is_compared() {
        let open =
            |seed| OpenModel::open(&ModelSource::Random(RandomModel { shape: ReleasedShape::B20, seed })).unwrap();
        let (one, same, other) = (open(7), open(7), open(8));
        assert_eq!((one.fingerprint(), one.weights_fingerprint()), (same.fingerprint(), same.weights_fingerprint()));
        assert_eq!(one.fingerprint(), other.fingerprint(), "the gateway serves either");
        assert_ne!(one.weights_fingerprint(), other.weights_fingerprint());
        assert_eq!(one.masked_tokens(), [], "the vocabulary names all 201,088 rows, if only as reserved");
        let layout = one.kv_layout(&engine_config(Backend::Cuda)).unwrap();
        assert_eq!((layout.full_layers.len(), layout.window_layers.len()), (12, 12));
    }

    #[test]
    fn random_weights_are_refused_on_the_cpu() {
        let model = OpenModel::open(&ModelSource::Random(RandomModel { shape: ReleasedShape::B20, seed: 7 })).unwrap();
        let error = model.choose_backend(Backend::Cpu, &engine_config(Backend::Cpu)).unwrap_err().to_string();
        assert!(error.contains("random:20b:7") && error.contains("backend is cpu"), "{error}");
        if cuda::available().is_err() {
            let error = model.choose_backend(Backend::Auto, &engine_config(Backend::Auto)).unwrap_err().to_string();
            assert!(error.contains("backend cuda"), "{error}");
        }
    }
}
