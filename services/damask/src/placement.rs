//! What a stack serves, and on what: from the options of `up` and `chat` to a model and a fleet.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::{Args, ValueEnum};
use engine::cuda;
use model::{ModelConfig, RandomModel, ReleasedShape};
use worker::ModelSource;

use crate::fleet::{Degrees, Fleet};

/// Longest context on GPUs that workers share, where the cache of the released models' longest would take all that is left.
const SHARED_CONTEXT_TOKENS: usize = 32_768;

/// Where to compute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendChoice {
    /// On GPUs if a model is named and there are any; otherwise on the CPU.
    #[default]
    Auto,
    /// On GPUs, or not at all.
    Cuda,
    /// On the CPU.
    Cpu,
}

/// Options of a stack that this process starts.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct PlacementArgs {
    /// Sizes of gpt-oss-20b or gpt-oss-120b with random weights, made on the GPUs: 20b or 120b.
    #[arg(long, conflicts_with = "model")]
    shape: Option<ReleasedShape>,
    /// Seed of random weights: random:SEED [default: random:0].
    #[arg(long, requires = "shape")]
    weights: Option<String>,
    /// Where to compute.
    #[arg(long, value_enum, default_value = "auto")]
    backend: BackendChoice,
    /// YAML file that names all workers: prefill: [{tp: 2, devices: [0, 1]}], decode: [{tp: 2, ep: 2, dp: 1, devices: [2, 3]}].
    #[arg(long)]
    layout: Option<PathBuf>,
    /// Tensor parallelism of prefill [default: by the number of GPUs; 2 on the CPU].
    #[arg(long)]
    prefill_tp: Option<u32>,
    /// Tensor parallelism of decode [default: by the number of GPUs; 4 on the CPU].
    #[arg(long)]
    decode_tp: Option<u32>,
    /// Data parallelism of decode's attention: so many groups of --decode-tp ranks have sequences of their own [default: 1].
    #[arg(long)]
    decode_dp: Option<u32>,
    /// Ways in which decode splits the experts [default: over all ranks, --decode-tp x --decode-dp].
    #[arg(long)]
    decode_ep: Option<u32>,
    /// Longest context in tokens, prompt and answer together [default: on GPUs the model's longest, or 32768 where workers share them; 8192 on
    /// the CPU].
    #[arg(long)]
    max_context_tokens: Option<u32>,
}

/// What follows from the options.
#[derive(Debug, Clone)]
pub(crate) struct Placement {
    /// What is served.
    pub(crate) model: ModelSource,
    /// The workers.
    pub(crate) fleet: Fleet,
    /// Whether they compute on GPUs.
    pub(crate) on_gpus: bool,
    /// Longest context, if not the services' default.
    pub(crate) max_context_tokens: Option<u32>,
}

impl PlacementArgs {
    /// Looks for GPUs if they come into question, and chooses. `model` is a directory; gpt-oss-nano is served without one.
    ///
    /// # Errors
    /// What cannot be, in one sentence.
    pub(crate) fn place(&self, model: Option<&Path>) -> anyhow::Result<Placement> {
        let model = self.model(model)?;
        let gpus = self.gpus(&model)?;
        let degrees = Degrees {
            prefill_tp: self.prefill_tp,
            decode_tp: self.decode_tp,
            decode_dp: self.decode_dp,
            decode_ep: self.decode_ep,
        };
        let fleet = match (&self.layout, gpus) {
            (Some(file), gpus) => Fleet::read(file, gpus, degrees)?,
            (None, 0) => Fleet::on_cpu(degrees),
            (None, gpus) => Fleet::on_gpus(gpus, degrees)?,
        };
        let max_context_tokens = match self.max_context_tokens {
            None if gpus > 0 => Some(longest_context(&model, &fleet)?),
            given => given,
        };
        Ok(Placement { model, fleet, on_gpus: gpus > 0, max_context_tokens })
    }

    fn model(&self, dir: Option<&Path>) -> anyhow::Result<ModelSource> {
        let Some(shape) = self.shape else {
            return Ok(dir.map_or(ModelSource::EmbeddedNano, |dir| ModelSource::Directory(dir.to_path_buf())));
        };
        let seed = match &self.weights {
            None => 0,
            Some(text) => {
                let seed = text.strip_prefix("random:").and_then(|seed| seed.parse().ok());
                seed.with_context(|| format!("--weights {text}: with --shape they are random:SEED"))?
            }
        };
        Ok(ModelSource::Random(RandomModel { shape, seed }))
    }

    /// GPUs to compute on; 0 means the CPU.
    fn gpus(&self, model: &ModelSource) -> anyhow::Result<u32> {
        let is_random = matches!(model, ModelSource::Random(_));
        match self.backend {
            BackendChoice::Cpu if is_random => {
                bail!("--shape makes random weights on a gpu: it does not go with --backend cpu")
            }
            BackendChoice::Cpu => Ok(0),
            BackendChoice::Auto if *model == ModelSource::EmbeddedNano => Ok(0),
            BackendChoice::Auto if !is_random => Ok(cuda::available().unwrap_or_else(|error| {
                tracing::info!(reason = %error, "computing on the cpu");
                0
            })),
            BackendChoice::Auto | BackendChoice::Cuda => {
                cuda::available().context("computing on gpus, as asked, is not possible")
            }
        }
    }
}

/// The longest context that the model was made for; less on GPUs that are shared.
fn longest_context(model: &ModelSource, fleet: &Fleet) -> anyhow::Result<u32> {
    let longest = match model {
        ModelSource::EmbeddedNano => worker::OpenModel::open(model)?.config().max_context_tokens,
        ModelSource::Random(random) => random.shape.config().max_context_tokens,
        ModelSource::Directory(dir) => {
            let path = dir.join("config.json");
            let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            ModelConfig::from_json(&text, &path)?.max_context_tokens
        }
    };
    ensure!(longest > 1, "the model's longest context is {longest}");
    let is_shared = fleet.workers.iter().any(|worker| fleet.shares_gpus(worker));
    Ok(if is_shared { longest.min(SHARED_CONTEXT_TOKENS) } else { longest } as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_model_the_embedded_one_stays_on_the_cpu() {
        let placement = PlacementArgs::default().place(None).unwrap();
        assert_eq!((placement.model, placement.on_gpus), (ModelSource::EmbeddedNano, false));
        assert_eq!(placement.fleet, Fleet::on_cpu(Degrees::default()));
        assert_eq!(placement.max_context_tokens, None);
    }

    #[test]
    fn what_cannot_be_is_refused_in_a_sentence() {
        let shape = Some(ReleasedShape::B20);
        let on_cpu = PlacementArgs { shape, backend: BackendChoice::Cpu, ..PlacementArgs::default() };
        assert!(on_cpu.place(None).unwrap_err().to_string().contains("does not go with --backend cpu"));
        let seedless = PlacementArgs { shape, weights: Some("random".into()), ..PlacementArgs::default() };
        assert!(seedless.place(None).unwrap_err().to_string().contains("random:SEED"));
        if cuda::available().is_err() {
            let error = PlacementArgs { backend: BackendChoice::Cuda, ..PlacementArgs::default() }.place(None);
            assert!(format!("{:#}", error.unwrap_err()).contains("is not possible: "));
        }
    }

    #[test]
    fn the_longest_context_is_the_models_own_unless_gpus_are_shared() {
        let random = ModelSource::Random(RandomModel { shape: ReleasedShape::B120, seed: 0 });
        let context = |gpus| longest_context(&random, &Fleet::on_gpus(gpus, Degrees::default()).unwrap()).unwrap();
        assert_eq!((context(1), context(2), context(8)), (32_768, 131_072, 131_072));
    }
}
