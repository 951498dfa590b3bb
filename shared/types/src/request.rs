//! A request for tokens, as the router accepts it and the workers carry it out.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::ids::RequestId;
use crate::token::TokenId;

/// Tokens in, tokens out. A request is the whole state of its sequence: prompt, tokens generated so far, and position-keyed
/// randomness; running it again from any point yields the same continuation, which is what resumption relies on.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateRequest {
    /// The request's name in logs, traces and errors.
    pub id: RequestId,
    /// The prompt. Never empty.
    pub prompt: Vec<TokenId>,
    /// Tokens already generated in an earlier attempt; the next output index is `generated.len()`.
    pub generated: Vec<TokenId>,
    /// How to draw tokens.
    pub sampling: Sampling,
    /// Tokens that end the sequence; the stop token itself is the last one delivered.
    pub stop_token_ids: Vec<TokenId>,
    /// Most output tokens, those in `generated` counted in. At least 1.
    pub max_tokens: u32,
    /// What the output must look like; `None`: anything.
    pub constraint: Option<Constraint>,
    /// Whose cached prompts this one may share; `None`: those of all requests without one.
    pub cache_salt: Option<CacheSalt>,
    /// Time left when the request was received; `None` means the service's own limit.
    pub timeout: Option<Duration>,
}

impl GenerateRequest {
    /// Most stop tokens, the model's own counted in: each new token of each sequence is compared with all of its own.
    pub const STOP_TOKENS_MAX: usize = 256;

    /// Tokens that must be in the KV cache before the next one can be sampled: prompt and generated so far.
    #[must_use]
    pub fn context_len(&self) -> usize {
        self.prompt.len() + self.generated.len()
    }

    /// Index of the next output token.
    #[must_use]
    pub fn next_index(&self) -> u32 {
        self.generated.len() as u32
    }

    /// Checks everything that needs no knowledge of the model but its vocabulary and context length.
    ///
    /// # Errors
    /// Names the offending field and says what is allowed.
    pub fn validate(&self, vocab_size: u32, max_context_tokens: u32) -> Result<(), InvalidRequest> {
        let fail = |field, reason: String| Err(InvalidRequest { field, reason });
        if self.prompt.is_empty() {
            return fail("prompt_tokens", "is empty".into());
        }
        for (field, tokens) in [
            ("prompt_tokens", &self.prompt),
            ("resume_from", &self.generated),
            ("stop_token_ids", &self.stop_token_ids),
        ] {
            if let Some((i, token)) = tokens.iter().enumerate().find(|(_, token)| **token >= vocab_size) {
                return fail(field, format!("[{i}] is {token}, the vocabulary has {vocab_size} tokens"));
            }
        }
        if self.stop_token_ids.len() > Self::STOP_TOKENS_MAX {
            let (given, most) = (self.stop_token_ids.len(), Self::STOP_TOKENS_MAX);
            return fail("stop_token_ids", format!("has {given} tokens, at most {most} are allowed"));
        }
        if self.max_tokens == 0 {
            return fail("max_tokens", "is 0, at least 1 is needed".into());
        }
        if self.generated.len() as u64 >= u64::from(self.max_tokens) {
            return fail(
                "resume_from",
                format!("has {} tokens, max_tokens is {}", self.generated.len(), self.max_tokens),
            );
        }
        if let Some(Constraint { lark }) = &self.constraint
            && !(1..=Constraint::BYTES_MAX).contains(&lark.len())
        {
            let most = Constraint::BYTES_MAX;
            return fail("constraint", format!("has a grammar of {} bytes, allowed are 1 to {most}", lark.len()));
        }
        if self.context_len() >= max_context_tokens as usize {
            let reason = format!(
                "and resume_from have {} tokens, at most {} fit (max_context_tokens is {max_context_tokens}, one is for the answer)",
                self.context_len(),
                max_context_tokens.saturating_sub(1)
            );
            return fail("prompt_tokens", reason);
        }
        self.sampling.validate(vocab_size)
    }
}

/// A grammar that the output follows from its first token to its end, stop token included. Here it is text that travels with the request; the
/// crate `constraint` knows what it means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Constraint {
    /// The grammar, in llguidance's variant of the Lark notation. Single tokens are written by number: `<[200005]>`.
    pub lark: Arc<str>,
}

impl Constraint {
    /// Longest grammar.
    pub const BYTES_MAX: usize = 512 << 10;
}

/// Keeps apart whose cached prompts are reused by whom: requests share KV only where it is equal. 1 to 128 bytes. Who knows it can find
/// out by timing which prompts were here, so it is not printed.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CacheSalt(Arc<[u8]>);

impl CacheSalt {
    /// Longest salt.
    pub const BYTES_MAX: usize = 128;

    /// Checks and wraps a salt.
    ///
    /// # Errors
    /// The reason, when it is empty or longer than [`Self::BYTES_MAX`].
    pub fn new(salt: &[u8]) -> Result<Self, &'static str> {
        match salt.len() {
            0 => Err("is empty"),
            1..=Self::BYTES_MAX => Ok(Self(salt.into())),
            _ => Err("is longer than 128 bytes"),
        }
    }

    /// Its bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for CacheSalt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CacheSalt({} bytes)", self.0.len())
    }
}

/// How tokens are drawn. The neutral value of each field leaves the distribution as the model gives it.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// 0 takes the most probable token (lowest id among equals); otherwise logits are divided by it. 0 to 100.
    pub temperature: f32,
    /// Keep the smallest set of most probable tokens whose mass reaches this. In (0, 1]; 1 is neutral.
    pub top_p: f32,
    /// Keep this many most probable tokens; 0 is neutral.
    pub top_k: u32,
    /// Drop tokens less probable than this times the most probable one. In [0, 1]; 0 is neutral.
    pub min_p: f32,
    /// Subtracted once from the logit of every token that was generated. In [-2, 2]; 0 is neutral.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each time it was generated. In [-2, 2]; 0 is neutral.
    pub frequency_penalty: f32,
    /// Divides positive, multiplies negative logits of tokens in prompt or output. Above 0; 1 is neutral.
    pub repetition_penalty: f32,
    /// Added to the logits of single tokens, each in [-100, 100] and each token once.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Key of the counter-based generator; with `choice` and the output index it fixes every draw.
    pub seed: u64,
    /// Which of several answers to one prompt this is.
    pub choice: u32,
    /// `Some(n)`: report the log-probability of each token and of the `n` most probable ones (`n` at most 20).
    pub logprobs: Option<u32>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            seed: 0,
            choice: 0,
            logprobs: None,
        }
    }
}

impl Sampling {
    /// Most alternatives that `logprobs` may ask for.
    pub const MAX_LOGPROBS: u32 = 20;

    fn validate(&self, vocab_size: u32) -> Result<(), InvalidRequest> {
        let range = |field, value: f32, low: f32, high: f32| {
            if value.is_finite() && (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(InvalidRequest { field, reason: format!("is {value}, allowed is {low} to {high}") })
            }
        };
        range("temperature", self.temperature, 0.0, 100.0)?;
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            let reason = format!("is {}, allowed is above 0 and up to 1", self.top_p);
            return Err(InvalidRequest { field: "top_p", reason });
        }
        range("min_p", self.min_p, 0.0, 1.0)?;
        range("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        range("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)?;
        for (token, bias) in &self.logit_bias {
            range("logit_bias", *bias, -100.0, 100.0)?;
            if *token >= vocab_size {
                return Err(InvalidRequest {
                    field: "logit_bias",
                    reason: format!("names token {token}, the vocabulary has {vocab_size} tokens"),
                });
            }
        }
        // More entries than tokens would be a message of any length, and their sums would leave the range.
        let mut biased: Vec<TokenId> = self.logit_bias.iter().map(|(token, _)| *token).collect();
        biased.sort_unstable();
        if let Some(twice) = biased.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(InvalidRequest { field: "logit_bias", reason: format!("names token {} twice", twice[0]) });
        }
        match self.logprobs {
            Some(n) if n > Self::MAX_LOGPROBS => Err(InvalidRequest {
                field: "logprobs",
                reason: format!("is {n}, at most {} are reported", Self::MAX_LOGPROBS),
            }),
            _ => Ok(()),
        }
    }
}

/// A request that can never be carried out: the field, as protobuf names it, and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} {reason}")]
pub struct InvalidRequest {
    /// The field's protobuf name.
    pub field: &'static str,
    /// What is wrong, as the rest of a sentence that begins with the field.
    pub reason: String,
}

impl crate::Classify for InvalidRequest {
    fn class(&self) -> crate::ErrorClass {
        crate::ErrorClass::Caller
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> GenerateRequest {
        GenerateRequest {
            id: RequestId::new("r").unwrap(),
            prompt: vec![1, 2],
            generated: Vec::new(),
            sampling: Sampling::default(),
            stop_token_ids: vec![9],
            max_tokens: 5,
            constraint: None,
            cache_salt: None,
            timeout: None,
        }
    }

    fn refusal(change: impl FnOnce(&mut GenerateRequest)) -> String {
        let mut request = request();
        change(&mut request);
        request.validate(10, 8).unwrap_err().to_string()
    }

    #[test]
    fn a_sound_request_passes_and_each_refusal_names_its_field() {
        assert_eq!(request().validate(10, 8), Ok(()));
        let sampled = |change: fn(&mut Sampling)| refusal(|request| change(&mut request.sampling));
        for (refusal, expected) in [
            (refusal(|request| request.prompt.clear()), "prompt_tokens is empty"),
            (refusal(|request| request.prompt[1] = 10), "prompt_tokens [1] is 10, the vocabulary has 10 tokens"),
            (refusal(|request| request.generated = vec![10]), "resume_from [0] is 10"),
            (refusal(|request| request.generated = vec![1; 5]), "resume_from has 5 tokens, max_tokens is 5"),
            (
                refusal(|request| request.prompt = vec![1; 8]),
                "prompt_tokens and resume_from have 8 tokens, at most 7 fit",
            ),
            (refusal(|request| request.stop_token_ids = vec![10]), "stop_token_ids [0] is 10"),
            (refusal(|request| request.stop_token_ids = vec![1; 257]), "stop_token_ids has 257 tokens, at most 256"),
            (refusal(|request| request.max_tokens = 0), "max_tokens is 0"),
            (
                refusal(|request| request.constraint = Some(Constraint { lark: "".into() })),
                "constraint has a grammar of 0",
            ),
            (sampled(|sampling| sampling.temperature = f32::NAN), "temperature is NaN, allowed is 0 to 100"),
            (sampled(|sampling| sampling.temperature = f32::INFINITY), "temperature is inf"),
            (sampled(|sampling| sampling.top_p = f32::NAN), "top_p is NaN"),
            (sampled(|sampling| sampling.min_p = f32::NAN), "min_p is NaN"),
            (sampled(|sampling| sampling.presence_penalty = f32::NEG_INFINITY), "presence_penalty is -inf"),
            (sampled(|sampling| sampling.frequency_penalty = f32::NAN), "frequency_penalty is NaN"),
            (sampled(|sampling| sampling.repetition_penalty = 0.0), "repetition_penalty is 0"),
            (sampled(|sampling| sampling.logit_bias = vec![(1, f32::NAN)]), "logit_bias is NaN"),
            (sampled(|sampling| sampling.logit_bias = vec![(10, 1.0)]), "logit_bias names token 10, the vocabulary"),
            (
                sampled(|sampling| sampling.logit_bias = vec![(3, 1.0), (1, 2.0), (3, 1.0)]),
                "logit_bias names token 3 twice",
            ),
            (sampled(|sampling| sampling.logprobs = Some(21)), "logprobs is 21, at most 20"),
        ] {
            assert!(refusal.starts_with(expected), "{refusal}, expected {expected}");
        }
    }

    #[test]
    fn a_salt_has_1_to_128_bytes_and_is_not_printed() {
        assert_eq!(CacheSalt::new(b""), Err("is empty"));
        assert_eq!(CacheSalt::new(&[7; 129]), Err("is longer than 128 bytes"));
        let longest = CacheSalt::new(&[7; 128]).unwrap();
        assert_eq!(longest.as_bytes(), [7; 128]);
        assert_ne!(longest, CacheSalt::new(&[7; 127]).unwrap());
        assert_eq!(format!("{longest:?}"), "CacheSalt(128 bytes)");
    }

    #[test]
    fn a_context_without_room_for_anything_is_refused_in_words() {
        let refused = request().validate(10, 0).unwrap_err().to_string();
        assert!(refused.contains("at most 0 fit"), "{refused}");
    }
}
