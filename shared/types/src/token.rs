//! Tokens as the engine yields them.

/// A token number. Plain `u32`: vectors of them cross protobuf, files and kernels without conversion.
pub type TokenId = u32;

/// A token and the natural logarithm of its probability under the unmodified distribution (temperature 1, no penalties).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: TokenId,
    /// Its log-probability, natural logarithm.
    pub logprob: f32,
}

/// One sampled token.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledToken {
    /// The token drawn.
    pub token: TokenId,
    /// Its log-probability, when the request asked for logprobs.
    pub logprob: Option<f32>,
    /// The most probable tokens, most probable first, as many as the request asked for.
    pub top: Vec<TokenLogprob>,
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The last token is one of the request's stop tokens.
    Stop,
    /// `max_tokens` tokens were generated, or the context is full.
    Length,
}
