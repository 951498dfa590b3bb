//! Log-probabilities as Chat Completions reports them.

use serde::Serialize;
use types::{SampledToken, TokenId};
use vocabulary::Vocabulary;

/// `logprobs` of a choice: its content's tokens.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ChoiceLogprobs {
    /// One a token, in order.
    pub content: Vec<TokenLogprobs>,
}

/// A sampled token and the most probable ones in its place.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenLogprobs {
    #[serde(flatten)]
    sampled: NamedLogprob,
    top_logprobs: Vec<NamedLogprob>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct NamedLogprob {
    /// The token as text, broken characters replaced; a control token by its name.
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl TokenLogprobs {
    /// Spells out a token that carries log-probabilities. JSON has no minus infinity: -9999 stands for it, as in
    /// OpenAI's API.
    pub fn new(token: &SampledToken, vocabulary: &Vocabulary) -> Self {
        let named = |token: TokenId, logprob: f32| {
            let bytes = vocabulary.token_bytes(token).unwrap_or_default().to_vec();
            NamedLogprob { token: vocabulary.decode(&[token]), logprob: logprob.max(-9999.0), bytes }
        };
        Self {
            sampled: named(token.token, token.logprob.unwrap_or(f32::NEG_INFINITY)),
            top_logprobs: token.top.iter().map(|top| named(top.token, top.logprob)).collect(),
        }
    }
}
