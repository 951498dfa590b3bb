//! A request for tokens, as the router accepts it and the workers carry it out.

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
    /// Time left when the request was received; `None` means the service's own limit.
    pub timeout: Option<Duration>,
}

impl GenerateRequest {
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
                "prompt has {} tokens, at most {} fit (max_context_tokens is {max_context_tokens}, one is for the answer)",
                self.context_len(),
                max_context_tokens - 1
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
    /// Added to the logits of single tokens, each in [-100, 100].
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
