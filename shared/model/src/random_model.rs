//! A model without a checkpoint: a released shape and the seed of its weights, for benchmarks.

use std::fmt;
use std::str::FromStr;

use types::{ModelFingerprint, TokenId};

use crate::checkpoint::O200K_HARMONY_STOP;
use crate::config::ModelConfig;

/// The shape of a released model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReleasedShape {
    /// gpt-oss-20b.
    B20,
    /// gpt-oss-120b.
    B120,
}

impl ReleasedShape {
    /// Its sizes.
    #[must_use]
    pub fn config(self) -> ModelConfig {
        match self {
            Self::B20 => ModelConfig::gpt_oss_20b(),
            Self::B120 => ModelConfig::gpt_oss_120b(),
        }
    }

    /// `20b` or `120b`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::B20 => "20b",
            Self::B120 => "120b",
        }
    }
}

impl FromStr for ReleasedShape {
    type Err = UnknownModel;

    fn from_str(text: &str) -> Result<Self, UnknownModel> {
        match text {
            "20b" => Ok(Self::B20),
            "120b" => Ok(Self::B120),
            _ => Err(UnknownModel { text: text.to_owned(), expected: "20b or 120b" }),
        }
    }
}

impl fmt::Display for ReleasedShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a config or an option names is no model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not {expected}")]
pub struct UnknownModel {
    /// What was given.
    text: String,
    /// What may be given.
    expected: &'static str,
}

/// Random weights of a released shape. Written `random:SHAPE:SEED`, such as `random:20b:7`; the seed is 0 if left out.
/// Equal ones are equal models, wherever they are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomModel {
    /// Sizes.
    pub shape: ReleasedShape,
    /// Of the weights.
    pub seed: u64,
}

const PREFIX: &str = "random:";

impl RandomModel {
    /// Reads `text` if it is meant to name a random model; `None` if it names something else.
    ///
    /// # Errors
    /// A shape or seed that there is not.
    pub fn parse(text: &str) -> Option<Result<Self, UnknownModel>> {
        let rest = text.strip_prefix(PREFIX)?;
        let (shape, seed) = rest.split_once(':').unwrap_or((rest, "0"));
        let unknown = || UnknownModel { text: text.to_owned(), expected: "random:SHAPE:SEED, such as random:20b:7" };
        let parsed = shape.parse().ok().zip(seed.parse().ok());
        Some(parsed.map(|(shape, seed)| Self { shape, seed }).ok_or_else(unknown))
    }

    /// The public name, by which nobody takes it for the released model.
    #[must_use]
    pub fn name(self) -> String {
        format!("gpt-oss-{}-random", self.shape)
    }

    /// Identifies model and vocabulary, which is the built-in one, with this digest.
    #[must_use]
    pub fn fingerprint(self, builtin_tokenizer_sha256: &str) -> ModelFingerprint {
        ModelFingerprint {
            model: self.name(),
            vocab_size: self.shape.config().vocab_size as u32,
            tokenizer_sha256: builtin_tokenizer_sha256.to_owned(),
        }
    }

    /// Identifies the weights: shape and seed say all of them.
    #[must_use]
    pub fn weights_fingerprint(self) -> String {
        self.to_string()
    }

    /// Tokens that end an answer, as in the released models.
    #[must_use]
    pub fn stop_token_ids(self) -> &'static [TokenId] {
        &O200K_HARMONY_STOP
    }
}

impl fmt::Display for RandomModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}:{}", self.shape, self.seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_random_model_is_written_as_it_is_read() {
        for (text, shape, seed) in [("random:20b:7", ReleasedShape::B20, 7), ("random:120b:0", ReleasedShape::B120, 0)]
        {
            let model = RandomModel::parse(text).unwrap().unwrap();
            assert_eq!(model, RandomModel { shape, seed });
            assert_eq!(model.to_string(), text);
        }
        assert_eq!(RandomModel::parse("random:20b").unwrap().unwrap().seed, 0);
        assert_eq!(RandomModel::parse("/models/random:20b"), None);
    }

    #[test]
    fn a_shape_or_seed_that_there_is_not_is_refused() {
        for text in ["random:", "random:40b", "random:20b:x", "random:20b:-1", "random:20b:1:2"] {
            let error = RandomModel::parse(text).unwrap().unwrap_err().to_string();
            assert!(error.contains(text) && error.contains("random:20b:7"), "{error}");
        }
    }

    #[test]
    fn the_name_is_not_that_of_the_released_model() {
        let model = RandomModel { shape: ReleasedShape::B20, seed: 3 };
        assert_eq!(model.fingerprint("abc").model, "gpt-oss-20b-random");
        assert_eq!(model.fingerprint("abc").vocab_size, 201_088);
        assert_ne!(model.weights_fingerprint(), RandomModel { seed: 4, ..model }.weights_fingerprint());
    }
}
