//! The parts of a worker's config that both roles have.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use chassis::config::{Problems, Validate};
use engine::cpu::{Numerics, Precision};
use model::{DenseFormat, EMBEDDED_NANO, ExpertFormat, RandomModel, UnknownModel, WeightScheme};
use serde::{Deserialize, Serialize};
use types::{KvDtype, ParallelLayout};

use crate::backend::Backend;
use crate::error::WorkerError;

/// Where the weights are. Written as `embedded-nano`, as `random:SHAPE:SEED` (see [`RandomModel`]), or else as the path
/// of a checkpoint directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// gpt-oss-nano, inside the binary.
    EmbeddedNano,
    /// Random weights, made on the GPU, for benchmarks: the CPU engine has none.
    Random(RandomModel),
    /// A checkpoint directory, in the Hugging Face layout or the original one.
    Directory(PathBuf),
}

impl FromStr for ModelSource {
    type Err = UnknownModel;

    fn from_str(text: &str) -> Result<Self, UnknownModel> {
        match RandomModel::parse(text) {
            Some(random) => random.map(Self::Random),
            None if text == EMBEDDED_NANO => Ok(Self::EmbeddedNano),
            None => Ok(Self::Directory(text.into())),
        }
    }
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EmbeddedNano => f.write_str(EMBEDDED_NANO),
            Self::Random(model) => model.fmt(f),
            Self::Directory(path) => path.display().fmt(f),
        }
    }
}

impl Serialize for ModelSource {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ModelSource {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// How numbers are rounded: `f32` or `bf16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rounding {
    /// Exact: what the CPU engine's bit-for-bit stability and the fixtures refer to.
    F32,
    /// As the published reference rounds.
    Bf16,
}

impl Rounding {
    const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

impl From<Rounding> for Precision {
    fn from(rounding: Rounding) -> Self {
        match rounding {
            Rounding::F32 => Self::F32,
            Rounding::Bf16 => Self::Bf16,
        }
    }
}

/// How keys and values are rounded in the cache: `f32`, `bf16` or `fp8`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvRounding {
    /// Exact.
    F32,
    /// As the published reference keeps them.
    Bf16,
    /// E4M3, unscaled: half the bytes of bf16, 3 bits of mantissa.
    Fp8,
}

/// Section `numerics`. Prefill and decode must agree in `kv`; that they agree in the rest is what makes their tokens agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NumericsConfig {
    /// Activations and router logits.
    pub compute: Rounding,
    /// Weights with which the chosen experts are added.
    pub routing: Rounding,
    /// Keys and values in the cache.
    pub kv: KvRounding,
}

impl Default for NumericsConfig {
    fn default() -> Self {
        Self { compute: Rounding::F32, routing: Rounding::F32, kv: KvRounding::F32 }
    }
}

impl fmt::Display for NumericsConfig {
    /// What two workers compare; the cache's rounding is part of the KV layout.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "compute {}, routing {}", self.compute.name(), self.routing.name())
    }
}

impl NumericsConfig {
    /// As the engine takes it.
    #[must_use]
    pub fn engine(&self) -> Numerics {
        Numerics { compute: self.compute.into(), routing: self.routing.into() }
    }

    /// Element type of the cache.
    #[must_use]
    pub fn kv_dtype(&self) -> KvDtype {
        match self.kv {
            KvRounding::F32 => KvDtype::F32,
            KvRounding::Bf16 => KvDtype::Bf16,
            KvRounding::Fp8 => KvDtype::Fp8,
        }
    }
}

/// How experts are held: `auto`, `mxfp4`, `fp8` or `bf16`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExpertsChoice {
    /// As the checkpoint stores them.
    #[default]
    Auto,
    /// As released: 4 bits a value.
    Mxfp4,
    /// FP8 in blocks of 128 x 128, from such a checkpoint or made while a released one is loaded.
    Fp8,
    /// Two bytes a value, without loss.
    Bf16,
}

/// How attention's projections and the head are held: `auto`, `bf16` or `fp8`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DenseChoice {
    /// As the checkpoint stores them.
    #[default]
    Auto,
    /// As released.
    Bf16,
    /// FP8 in blocks of 128 x 128, which rounds.
    Fp8,
}

/// Section `weights`. Two workers pair only if they hold their weights alike.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WeightsConfig {
    /// Matrices of experts.
    pub experts: ExpertsChoice,
    /// Matrices of attention, and the head.
    pub dense: DenseChoice,
}

impl WeightsConfig {
    /// What it comes to for a checkpoint that stores its weights as `stored`.
    ///
    /// # Errors
    /// `Config`, naming the field, for what cannot be made of them.
    pub fn resolve(&self, stored: WeightScheme) -> Result<WeightScheme, WorkerError> {
        let scheme = WeightScheme {
            experts: match self.experts {
                ExpertsChoice::Auto => stored.experts,
                ExpertsChoice::Mxfp4 => ExpertFormat::Mxfp4,
                ExpertsChoice::Fp8 => ExpertFormat::Fp8,
                ExpertsChoice::Bf16 => ExpertFormat::Bf16,
            },
            dense: match self.dense {
                DenseChoice::Auto => stored.dense,
                DenseChoice::Bf16 => DenseFormat::Bf16,
                DenseChoice::Fp8 => DenseFormat::Fp8,
            },
        };
        scheme.obstacle(stored).map_or(Ok(scheme), |obstacle| Err(WorkerError::Config(obstacle)))
    }
}

/// Section `step_loop`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StepLoopConfig {
    /// Messages that wait for the loop. Who sends one more waits: gRPC handlers, and KV connections, whose senders wait in turn.
    pub inbox_messages_max: usize,
    /// The loop looks at deadlines at least this often.
    pub tick_ms: u64,
    /// The worker reports STUCK when steps are due and none has finished for so long.
    pub stuck_after_ms: u64,
}

impl Default for StepLoopConfig {
    fn default() -> Self {
        Self { inbox_messages_max: 1_024, tick_ms: 100, stuck_after_ms: 10_000 }
    }
}

impl Validate for StepLoopConfig {
    fn validate(&self, problems: &mut Problems) {
        problems.range("inbox_messages_max", self.inbox_messages_max, 1..=1 << 20);
        problems.range("tick_ms", self.tick_ms, 1..=10_000);
        problems.range("stuck_after_ms", self.stuck_after_ms, 100..=3_600_000);
    }
}

/// What an engine is built from, gathered from a role's config.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// The role's name, for logs.
    pub role: types::Role,
    /// Which engine to build; `Auto` until [`OpenModel::settle`](crate::OpenModel::settle).
    pub backend: Backend,
    /// Degrees of parallelism.
    pub layout: ParallelLayout,
    /// Neighbouring ranks that share a GPU.
    pub ranks_per_gpu: u32,
    /// Rounding.
    pub numerics: NumericsConfig,
    /// How matrices are held; what [`WeightsConfig::resolve`] made of the config's.
    pub weights: WeightScheme,
    /// Positions a page holds.
    pub page_tokens: u32,
    /// Pages of the full-attention group; 0 until [`OpenModel::settle`](crate::OpenModel::settle).
    pub full_pages: u32,
    /// Pages of the window group.
    pub window_pages: u32,
    /// Slots.
    pub max_slots: u32,
    /// Tokens that the rows of one step have together.
    pub max_step_tokens: u32,
    /// Most positions of one sequence.
    pub max_context_tokens: u32,
}

/// The default of `gpu_memory_share`: the rest is room for what other processes and the driver need.
pub const GPU_MEMORY_SHARE: f64 = 0.9;
/// Largest degree of parallelism of a kind.
const DEGREE_MAX: u32 = 64;
/// Most pages of a group: what a thousand sequences of a million positions take in pages of 16.
const PAGES_MAX: u32 = 1 << 26;

impl EngineConfig {
    /// What two workers compare: equal numerics make equal tokens.
    #[must_use]
    pub fn numerics(&self) -> String {
        format!("{}, {}", self.numerics, self.weights)
    }
}

/// Checks where the ranks are. Whether their number divides the model's heads is checked when the model is opened.
pub fn validate_placement(layout: ParallelLayout, ranks_per_gpu: u32, gpu_memory_share: f64, problems: &mut Problems) {
    let degrees = [("layout.tp", layout.tp), ("layout.dp", layout.dp), ("layout.ep", layout.ep)];
    for (field, degree) in degrees {
        problems.range(field, degree, 1..=DEGREE_MAX);
    }
    if degrees.iter().all(|(_, degree)| (1..=DEGREE_MAX).contains(degree)) {
        let (ep, ranks) = (layout.ep, layout.ranks());
        let divides = ranks.is_multiple_of(ep);
        problems.check(divides, "layout.ep", format_args!("is {ep}, it must divide tp x dp ({ranks})"));
    }
    problems.range("ranks_per_gpu", ranks_per_gpu, 1..=8);
    let is_share = gpu_memory_share > 0.0 && gpu_memory_share <= 1.0;
    let reason = format_args!("is {gpu_memory_share}, a share lies above 0 and up to 1");
    problems.check(is_share, "gpu_memory_share", reason);
}

/// Checks how many positions and pages there are. Whether they are enough is checked when the model is opened.
pub fn validate_pages(
    page_tokens: u32,
    max_context_tokens: u32,
    full_pages: Option<u32>,
    window_pages: Option<u32>,
    problems: &mut Problems,
) {
    problems.range("page_tokens", page_tokens, 1..=1_024);
    problems.range("max_context_tokens", max_context_tokens, 2..=1 << 20);
    for (field, pages) in [("full_pages", full_pages), ("window_pages", window_pages)] {
        if let Some(pages) = pages {
            problems.range(field, pages, 1..=PAGES_MAX);
        }
    }
}

/// Checks a worker's name, which travels in every ticket.
pub fn validate_name(name: &str, problems: &mut Problems) {
    let is_sound = (1..=128).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic());
    problems.check(is_sound, "name", "must be 1 to 128 visible ASCII characters");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_kept_or_made_or_the_field_is_named() {
        let (released, fp8) = (WeightScheme::default(), WeightScheme::FP8);
        let of = |experts| WeightsConfig { experts, dense: DenseChoice::Auto };
        let resolved = |experts, stored| of(experts).resolve(stored).map_err(|error| error.to_string());
        assert_eq!(resolved(ExpertsChoice::Auto, fp8), Ok(fp8));
        assert_eq!(resolved(ExpertsChoice::Auto, released), Ok(released));
        assert_eq!(resolved(ExpertsChoice::Fp8, released), Ok(fp8));
        assert_eq!(resolved(ExpertsChoice::Bf16, released).map(|scheme| scheme.experts), Ok(ExpertFormat::Bf16));
        for experts in [ExpertsChoice::Mxfp4, ExpertsChoice::Bf16] {
            let error = resolved(experts, fp8).unwrap_err();
            assert!(error.contains("weights.experts is") && error.contains("fp8 experts"), "{error}");
        }
        let dense = WeightsConfig { dense: DenseChoice::Fp8, ..WeightsConfig::default() };
        assert_eq!(dense.resolve(released).map(|scheme| scheme.dense).ok(), Some(DenseFormat::Fp8));
    }
}
