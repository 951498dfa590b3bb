//! In which formats a model's matrices are held: by a checkpoint, or by an engine.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How experts' matrices are held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExpertFormat {
    /// As released.
    #[default]
    Mxfp4,
    /// E4M3 with a power of two for 128 x 128 values ([`crate::fp8`]).
    Fp8,
    /// Every value as bf16, without loss. No checkpoint is stored so.
    Bf16,
}

/// How the matrices of attention and the head are held. Embedding, router, norms and biases are always bf16.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DenseFormat {
    /// As released.
    #[default]
    Bf16,
    /// E4M3 with a power of two for 128 x 128 values; rounds.
    Fp8,
}

/// Both together. The default is what was released.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize)]
pub struct WeightScheme {
    /// Experts.
    pub experts: ExpertFormat,
    /// Projections of attention, and the head.
    pub dense: DenseFormat,
}

impl WeightScheme {
    /// Whether this is the released form.
    #[must_use]
    pub fn is_released(&self) -> bool {
        *self == Self::default()
    }

    /// FP8 experts beside released dense matrices.
    pub const FP8: Self = Self { experts: ExpertFormat::Fp8, dense: DenseFormat::Bf16 };
}

impl fmt::Display for ExpertFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mxfp4 => "mxfp4",
            Self::Fp8 => "fp8",
            Self::Bf16 => "bf16",
        })
    }
}

impl fmt::Display for DenseFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        })
    }
}

impl fmt::Display for WeightScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "experts {}, dense {}", self.experts, self.dense)
    }
}
