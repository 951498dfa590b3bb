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

/// Which tokens may come next: one bit a token, bit `t % 32` of word `t / 32` for token `t`. Tokens beyond the last word may not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMask {
    words: Box<[u32]>,
}

impl TokenMask {
    /// A mask of these words.
    #[must_use]
    pub fn from_words(words: Box<[u32]>) -> Self {
        Self { words }
    }

    /// The words, as a device takes them.
    #[must_use]
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Whether `token` may come next.
    #[must_use]
    pub fn allows(&self, token: TokenId) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Sets the logits of all tokens that may not come next to minus infinity.
    pub fn apply(&self, logits: &mut [f32]) {
        let words = self.words.iter().copied().chain(std::iter::repeat(0));
        for (logits, word) in logits.chunks_mut(32).zip(words) {
            match word {
                u32::MAX => {}
                0 => logits.fill(f32::NEG_INFINITY),
                word => {
                    let forbidden = |bit: &usize| word >> bit & 1 == 0;
                    (0..logits.len()).filter(forbidden).for_each(|bit| logits[bit] = f32::NEG_INFINITY);
                }
            }
        }
    }
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The last token is one of the request's stop tokens.
    Stop,
    /// `max_tokens` tokens were generated, or the context is full.
    Length,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_forbids_what_is_not_set_and_what_lies_beyond_it() {
        let mask = TokenMask::from_words([u32::MAX, 0, 0b101].into());
        let mut logits = vec![1.0; 100];
        mask.apply(&mut logits);
        for token in 0..100 {
            let expected = token < 32 || token == 64 || token == 66;
            assert_eq!(mask.allows(token), expected, "token {token}");
            assert_eq!(logits[token as usize] == 1.0, expected, "logit {token}");
        }
    }
}
