//! Token numbers and the bytes they stand for.
//!
//! A [`Vocabulary`] is a byte-level byte-pair encoding whose ranks are the token numbers, behind the pre-tokenizer of o200k,
//! plus *special tokens*, which have a name and no bytes. Text is always encoded as text: no text ever becomes a special
//! token; formats place those by number.
//!
//! Knows: tokenizer.json, the built-in ranks of o200k. Must not know: what any token means; chat formats do, and workers, which share
//! this crate, never learn it. Start with [`Vocabulary`].

mod o200k;
mod split;
mod tokenizer_json;
mod utf8;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};

use bpe::byte_pair_encoding::BytePairEncoding;
use sha2::{Digest, Sha256};
use types::TokenId;

pub use utf8::Utf8Decoder;

/// A byte-pair encoding with special tokens.
pub struct Vocabulary {
    /// Encodes pieces; holds the bytes of the ordinary tokens `0..num_tokens`.
    pairs: BytePairEncoding,
    special_names: BTreeMap<TokenId, String>,
    special_ids: HashMap<String, TokenId>,
    fingerprint: String,
}

/// Why a tokenizer.json cannot be used. `field` is the path of the offending value.
#[derive(Debug, thiserror::Error)]
pub enum VocabularyError {
    /// Not JSON, or not of the shape of a tokenizer.json.
    #[error("tokenizer.json: {field}: {cause}")]
    Malformed {
        /// Where.
        field: String,
        /// What the reader expected there.
        #[source]
        cause: serde_json::Error,
    },
    /// A value that contradicts another one.
    #[error("tokenizer.json: {field}: {reason}")]
    Inconsistent {
        /// Where.
        field: String,
        /// What is wrong.
        reason: String,
    },
    /// The vocabulary is another model's, or a model without a tokenizer.json is none of those whose vocabulary is built in.
    #[error(
        "the vocabulary has {size} tokens, the model has rows for {rows}: tokenizer.json is missing or another model's"
    )]
    TooLarge {
        /// Tokens of the vocabulary.
        size: u32,
        /// Rows of the model's embedding.
        rows: u32,
    },
    /// A feature of tokenizers that byte-level BPE in the manner of o200k does not have.
    #[error("tokenizer.json: {field} is {found}, only {supported} is supported")]
    Unsupported {
        /// Where.
        field: String,
        /// What the file asks for.
        found: String,
        /// What can be had.
        supported: &'static str,
    },
}

impl Vocabulary {
    /// Reads a Hugging Face tokenizer.json. Takes about a second for 200,000 tokens: once, off the runtime.
    ///
    /// # Errors
    /// The file is not a byte-level BPE with the pre-tokenizer of o200k, or contradicts itself; the error names the field.
    pub fn from_tokenizer_json(json: &[u8]) -> Result<Self, VocabularyError> {
        let parsed = tokenizer_json::parse(json)?;
        Ok(Self::build(parsed.pairs, parsed.special_tokens, Sha256::digest(json).into()))
    }

    /// The published o200k_harmony vocabulary, built in: 199,998 ordinary tokens, 201,088 in all.
    ///
    /// The first call takes about a second (off the runtime); later ones return the same vocabulary.
    pub fn o200k_harmony() -> Arc<Self> {
        static BUILT: OnceLock<Arc<Vocabulary>> = OnceLock::new();
        let build = || {
            let table = o200k::token_table();
            let digest = Sha256::digest(&table).into();
            Arc::new(Self::build(o200k::pairs(&table), o200k::special_tokens(), digest))
        };
        Arc::clone(BUILT.get_or_init(build))
    }

    fn build(pairs: BytePairEncoding, special_tokens: Vec<(TokenId, String)>, digest: [u8; 32]) -> Self {
        Self {
            pairs,
            special_ids: special_tokens.iter().map(|(id, name)| (name.clone(), *id)).collect(),
            special_names: special_tokens.into_iter().collect(),
            fingerprint: digest.iter().map(|byte| format!("{byte:02x}")).collect(),
        }
    }

    /// One more than the highest token number.
    #[must_use]
    pub fn size(&self) -> u32 {
        let ordinary = self.pairs.num_tokens() as u32;
        self.special_names.last_key_value().map_or(ordinary, |(id, _)| ordinary.max(id + 1))
    }

    /// Checks that a model with `rows` rows in its embedding has one for every token.
    ///
    /// # Errors
    /// [`VocabularyError::TooLarge`]: this is another model's vocabulary.
    pub fn check_fits(&self, rows: u32) -> Result<(), VocabularyError> {
        let size = self.size();
        if size <= rows { Ok(()) } else { Err(VocabularyError::TooLarge { size, rows }) }
    }

    /// SHA-256 of the tokenizer.json, or of the built-in token table; lower-case hexadecimal. Equal fingerprints mean equal tokens.
    #[must_use]
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Encodes text. Linear in its length, also for one endless word. Never yields a special token.
    #[must_use]
    pub fn encode(&self, text: &str) -> Vec<TokenId> {
        let mut tokens = Vec::with_capacity(text.len() / 4);
        self.encode_into(text, &mut tokens);
        tokens
    }

    /// Appends the encoding of `text`.
    pub fn encode_into(&self, text: &str, tokens: &mut Vec<TokenId>) {
        split::pieces(text, |piece| tokens.extend(self.pairs.encode_via_backtracking(piece.as_bytes())));
    }

    /// The bytes of an ordinary token; they may be part of a character. `None` for special tokens and unused numbers.
    #[must_use]
    pub fn token_bytes(&self, token: TokenId) -> Option<&[u8]> {
        ((token as usize) < self.pairs.num_tokens()).then(|| self.pairs.token_bytes(token))
    }

    /// The number of the special token called `name`, bars and brackets included: `<|start|>`.
    #[must_use]
    pub fn special(&self, name: &str) -> Option<TokenId> {
        self.special_ids.get(name).copied()
    }

    /// The name of a special token.
    #[must_use]
    pub fn special_name(&self, token: TokenId) -> Option<&str> {
        self.special_names.get(&token).map(String::as_str)
    }

    /// Spells tokens for people: special tokens by their names, unused numbers not at all, broken characters replaced.
    #[must_use]
    pub fn decode(&self, tokens: &[TokenId]) -> String {
        let mut text = String::new();
        let mut decoder = Utf8Decoder::default();
        for token in tokens {
            if let Some(bytes) = self.token_bytes(*token) {
                decoder.push(bytes, &mut text);
            } else {
                decoder.finish(&mut text);
                text.push_str(self.special_name(*token).unwrap_or_default());
            }
        }
        decoder.finish(&mut text);
        text
    }
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary")
            .field("size", &self.size())
            .field("fingerprint", &self.fingerprint)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vocabulary_larger_than_the_model_is_refused() {
        let json = include_bytes!("../../model/gpt-oss-nano/tokenizer.json");
        let vocabulary = Vocabulary::from_tokenizer_json(json).unwrap();
        assert_eq!(vocabulary.size(), 2037);
        vocabulary.check_fits(2048).unwrap();
        vocabulary.check_fits(2037).unwrap();
        let refused = vocabulary.check_fits(2036).unwrap_err().to_string();
        assert!(refused.contains("has 2037 tokens, the model has rows for 2036"), "{refused}");
    }
}
