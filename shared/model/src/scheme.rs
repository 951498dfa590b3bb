//! In which formats a model's matrices are held: by a checkpoint, or by an engine.

use std::fmt;
use std::str::FromStr;

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
    /// Why matrices stored as `stored` cannot be held so: nothing is made MXFP4, and FP8 experts stay what they are.
    #[must_use]
    pub fn obstacle(self, stored: Self) -> Option<String> {
        let is_kept = self.experts == stored.experts || stored.experts == ExpertFormat::Mxfp4;
        (!is_kept)
            .then(|| format!("weights.experts is {}, the checkpoint has {} experts", self.experts, stored.experts))
    }

    /// Whether this is the released form.
    #[must_use]
    pub fn is_released(&self) -> bool {
        *self == Self::default()
    }

    /// FP8 experts beside released dense matrices.
    pub const FP8: Self = Self { experts: ExpertFormat::Fp8, dense: DenseFormat::Bf16 };
}

/// A format that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found} is none of {known}")]
pub struct UnknownFormat {
    found: String,
    known: &'static str,
}

impl FromStr for ExpertFormat {
    type Err = UnknownFormat;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = [Self::Mxfp4, Self::Fp8, Self::Bf16].into_iter().find(|format| format.to_string() == text);
        known.ok_or_else(|| UnknownFormat { found: text.to_owned(), known: "mxfp4, fp8, bf16" })
    }
}

impl FromStr for DenseFormat {
    type Err = UnknownFormat;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = [Self::Bf16, Self::Fp8].into_iter().find(|format| format.to_string() == text);
        known.ok_or_else(|| UnknownFormat { found: text.to_owned(), known: "bf16, fp8" })
    }
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
