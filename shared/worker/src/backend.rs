//! Which engine computes: the CPU's, or that of a GPU.

use std::fmt;

use engine::cuda;
use serde::{Deserialize, Serialize};
use types::ParallelLayout;

use crate::config::{EngineConfig, KvRounding, Rounding};
use crate::error::WorkerError;

/// Where a worker computes: `auto`, `cpu` or `cuda`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// On a GPU if the model comes from a directory and nothing stands in the way; otherwise on the CPU, and the log
    /// says why.
    #[default]
    Auto,
    /// On the CPU.
    Cpu,
    /// On a GPU, or not at all.
    Cuda,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        })
    }
}

impl Backend {
    /// What to build for `config`, whose own `backend` does not matter: never `Auto`. `is_embedded`: whether the model
    /// is the one inside the binary, which `Auto` leaves on the CPU.
    ///
    /// # Errors
    /// `Config`, with what stands in the way of a GPU that was asked for.
    pub fn choose(self, config: &EngineConfig, is_embedded: bool) -> Result<Self, WorkerError> {
        if self == Self::Cpu || (self == Self::Auto && is_embedded) {
            return Ok(Self::Cpu);
        }
        match (obstacle(config), self) {
            (None, _) => Ok(Self::Cuda),
            (Some(reason), Self::Auto) => {
                tracing::info!(role = %config.role, reason, "computing on the cpu");
                Ok(Self::Cpu)
            }
            (Some(reason), _) => Err(WorkerError::Config(format!("backend cuda: {reason}"))),
        }
    }
}

/// Why a GPU cannot do what the config says.
fn obstacle(config: &EngineConfig) -> Option<String> {
    let numerics = config.numerics;
    if numerics.compute != Rounding::Bf16 {
        return Some("it computes in bf16, and numerics.compute does not say so".into());
    }
    if numerics.kv == KvRounding::F32 {
        return Some("it caches in bf16 or fp8, and numerics.kv says f32".into());
    }
    if !config.page_tokens.is_multiple_of(32) {
        return Some(format!("page_tokens is {}, it takes multiples of 32", config.page_tokens));
    }
    if let Some(obstacle) = cuda::layout_obstacle(config.layout) {
        return Some(obstacle);
    }
    match cuda::available() {
        Ok(gpus) => too_few_gpus(config.layout, config.ranks_per_gpu, gpus),
        Err(error) => Some(error.to_string()),
    }
}

/// Each rank has a GPU of its own, unless `ranks_per_gpu` says otherwise.
fn too_few_gpus(layout: ParallelLayout, ranks_per_gpu: u32, gpus: u32) -> Option<String> {
    let needed = layout.ranks().div_ceil(ranks_per_gpu);
    (needed > gpus).then(|| format!("layout is {layout}, which takes {needed} gpus, and this process sees {gpus}"))
}

#[cfg(test)]
mod tests {
    use types::Role;

    use super::*;
    use crate::config::NumericsConfig;

    fn config(compute: Rounding, page_tokens: u32, tp: u32) -> EngineConfig {
        EngineConfig {
            role: Role::Decode,
            backend: Backend::Auto,
            layout: ParallelLayout::tp(tp),
            ranks_per_gpu: 1,
            numerics: NumericsConfig { compute, routing: Rounding::Bf16, kv: KvRounding::Bf16 },
            weights: model::WeightScheme::default(),
            page_tokens,
            full_pages: 1,
            window_pages: 1,
            max_slots: 1,
            max_step_tokens: 1,
            max_context_tokens: 32,
        }
    }

    #[test]
    fn the_cpu_is_taken_when_asked_for_or_for_the_embedded_model() {
        let fits = config(Rounding::Bf16, 64, 1);
        assert_eq!(Backend::Cpu.choose(&fits, false).unwrap(), Backend::Cpu);
        assert_eq!(Backend::Auto.choose(&fits, true).unwrap(), Backend::Cpu);
    }

    #[test]
    fn what_a_gpu_cannot_do_is_named_or_left_to_the_cpu() {
        let reason = too_few_gpus(ParallelLayout::tp(4), 1, 2).unwrap();
        assert_eq!(reason, "layout is EP1 DP1 TP4, which takes 4 gpus, and this process sees 2");
        assert_eq!(too_few_gpus(ParallelLayout::tp(4), 1, 4), None);
        assert_eq!(too_few_gpus(ParallelLayout::tp(4), 2, 2), None);
        let twelve = EngineConfig { layout: ParallelLayout { tp: 4, ep: 1, dp: 3 }, ..config(Rounding::Bf16, 64, 1) };
        let cases = [
            (config(Rounding::F32, 64, 1), "numerics.compute"),
            (config(Rounding::Bf16, 16, 1), "page_tokens is 16"),
            (twelve, "layout is EP1 DP3 TP4, which has 12 ranks"),
        ];
        for (config, reason) in cases {
            assert_eq!(Backend::Auto.choose(&config, false).unwrap(), Backend::Cpu);
            let error = Backend::Cuda.choose(&config, false).unwrap_err().to_string();
            assert!(error.contains("backend cuda") && error.contains(reason), "{error}");
        }
    }
}
