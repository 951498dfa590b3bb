//! From logits to a token.
//!
//! In this order: grammar mask; repetition penalty, frequency and presence penalties, logit bias; temperature; top-k;
//! top-p over what top-k left; min-p; the draw. Log-probabilities are those of the model's own distribution, before any
//! of it. Everything is a function of the logits, the request and the output index: no state but the counts of tokens.

mod distribution;
pub mod philox;

use std::collections::HashMap;
use std::sync::Arc;

use scheduler::plan::SlotBinding;
use types::{SampledToken, Sampling, TokenId, TokenLogprob, TokenMask};

use crate::simd::Simd;
use distribution::Distribution;

/// The draw that picks the token; others are for decoders that draw more than once for a token.
const DRAW_TOKEN: u32 = 0;

/// The sampling state of one sequence.
#[derive(Debug, Clone)]
pub struct SlotSampler {
    sampling: Arc<Sampling>,
    /// How often each token was generated; tokens of the prompt alone have 0. Empty when no penalty asks for it.
    counts: HashMap<TokenId, u32>,
    counting: bool,
    output_idx: u32,
}

impl SlotSampler {
    /// For a sequence that takes a slot.
    #[must_use]
    pub fn new(binding: &SlotBinding) -> Self {
        let sampling = &binding.sampling;
        let counting =
            sampling.repetition_penalty != 1.0 || sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0;
        let mut sampler = Self { sampling: sampling.clone(), counts: HashMap::new(), counting, output_idx: 0 };
        if counting {
            sampler.counts.extend(binding.prompt.iter().map(|token| (*token, 0)));
        }
        for token in &binding.generated {
            sampler.push(*token);
        }
        sampler
    }

    /// Counts a token as generated.
    pub fn push(&mut self, token: TokenId) {
        self.output_idx += 1;
        if self.counting {
            *self.counts.entry(token).or_insert(0) += 1;
        }
    }

    fn adjust(&self, logits: &mut [f32]) {
        let sampling = &*self.sampling;
        for (token, count) in &self.counts {
            let logit = &mut logits[*token as usize];
            *logit =
                if *logit > 0.0 { *logit / sampling.repetition_penalty } else { *logit * sampling.repetition_penalty };
            if *count > 0 {
                *logit -= sampling.frequency_penalty * *count as f32 + sampling.presence_penalty;
            }
        }
        for (token, bias) in &sampling.logit_bias {
            logits[*token as usize] += bias;
        }
    }
}

/// Draws tokens; holds the memory that draws need.
pub struct Sampler {
    distribution: Distribution,
}

impl Default for Sampler {
    fn default() -> Self {
        Self { distribution: Distribution::new(Simd::detect()) }
    }
}

impl Sampler {
    /// Draws the next token of a sequence and counts it. `logits` (one for each token of the vocabulary, minus infinity for ids that must not
    /// come out) are changed. `mask` says which tokens the sequence's grammar allows.
    pub fn sample(&mut self, slot: &mut SlotSampler, logits: &mut [f32], mask: Option<&TokenMask>) -> SampledToken {
        let sampling = slot.sampling.clone();
        let unmodified = sampling.logprobs.map(|top| (logits.to_vec(), top));
        if let Some(mask) = mask {
            mask.apply(logits);
        }
        slot.adjust(logits);
        let token = if sampling.temperature == 0.0 {
            arg_max(logits)
        } else {
            let u = philox::uniform(sampling.seed, sampling.choice, slot.output_idx, DRAW_TOKEN);
            self.distribution.draw(logits, &sampling, u)
        };
        slot.push(token);
        match unmodified {
            None => SampledToken { token, logprob: None, top: Vec::new() },
            Some((logits, top)) => self.with_logprobs(token, &logits, top),
        }
    }

    fn with_logprobs(&mut self, token: TokenId, logits: &[f32], top: u32) -> SampledToken {
        let log_sum = self.distribution.log_sum_exp(logits);
        let logprob = |logit: f32| (f64::from(logit) - log_sum) as f32;
        let top = top_logits(logits, top);
        SampledToken {
            token,
            logprob: Some(logprob(logits[token as usize])),
            top: top.into_iter().map(|(token, logit)| TokenLogprob { token, logprob: logprob(logit) }).collect(),
        }
    }
}

/// Whether tokens may be drawn from these logits: none is a NaN or plus infinity. Minus infinity is a token that cannot come out.
#[must_use]
pub fn are_numbers(logits: &[f32]) -> bool {
    logits.iter().all(|logit| *logit < f32::INFINITY)
}

/// The token of greatest logit, the lowest id among equals.
fn arg_max(logits: &[f32]) -> TokenId {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best as TokenId
}

/// The `n` tokens of greatest logit, descending, the lowest id first among equals.
fn top_logits(logits: &[f32], n: u32) -> Vec<(TokenId, f32)> {
    let n = (n as usize).min(logits.len());
    let mut top: Vec<(TokenId, f32)> = Vec::with_capacity(n + 1);
    for (token, &logit) in logits.iter().enumerate() {
        if top.len() == n && top.last().is_none_or(|last| logit <= last.1) {
            continue;
        }
        let place = top.partition_point(|other| other.1 >= logit);
        top.insert(place, (token as TokenId, logit));
        top.truncate(n);
    }
    top
}

#[cfg(test)]
mod tests;
