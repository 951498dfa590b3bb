//! Requests: as a client sends them, with things to default, and as workers receive them, complete.

use std::time::Duration;

use types::{CacheSalt, Constraint, GenerateRequest, RequestId, Sampling, TokenId};

use super::{InvalidMessage, Result, required};
use crate::pb;

/// What stands for an absent `max_tokens` until the router knows the model's context limit and cuts it down to that.
pub const UNLIMITED_TOKENS: u32 = u32::MAX;

/// What the router puts in the place of absent fields.
pub struct RequestDefaults<'a> {
    /// For an empty `request_id`.
    pub request_id: RequestId,
    /// For an absent `sampling.seed`.
    pub seed: u64,
    /// Added to `stop_token_ids` unless `ignore_eos` is set.
    pub eos_token_ids: &'a [TokenId],
}

/// A client's request, completed.
///
/// # Errors
/// Names the field that does not follow the protocol. Ranges are checked by [`GenerateRequest::validate`].
pub fn generate_request(message: pb::GenerateRequest, defaults: RequestDefaults<'_>) -> Result<GenerateRequest> {
    let id = match message.request_id.as_str() {
        "" => defaults.request_id,
        id => RequestId::new(id).map_err(|reason| InvalidMessage::new("request_id", reason))?,
    };
    let mut stop_token_ids = message.stop_token_ids;
    if !message.ignore_eos {
        stop_token_ids.extend_from_slice(defaults.eos_token_ids);
    }
    stop_token_ids.sort_unstable();
    stop_token_ids.dedup();
    let timeout = message.timeout.map(duration).transpose()?;
    let sampling = message.sampling.unwrap_or_default();
    let seed = sampling.seed.unwrap_or(defaults.seed);
    Ok(GenerateRequest {
        id,
        prompt: message.prompt_tokens,
        generated: message.resume_from,
        sampling: self::sampling(sampling, seed),
        stop_token_ids,
        max_tokens: message.max_tokens.unwrap_or(UNLIMITED_TOKENS),
        constraint: message.constraint.map(Into::into),
        cache_salt: cache_salt(&message.cache_salt)?,
        timeout,
    })
}

fn duration(value: prost_types::Duration) -> Result<Duration> {
    Duration::try_from(value)
        .ok()
        .filter(|timeout| !timeout.is_zero())
        .ok_or_else(|| InvalidMessage::new("timeout", "is not above 0"))
}

/// The client's side: everything is said, nothing is left to the router but the model's own stop tokens.
impl From<GenerateRequest> for pb::GenerateRequest {
    fn from(request: GenerateRequest) -> Self {
        Self {
            request_id: request.id.as_str().to_owned(),
            prompt_tokens: request.prompt,
            sampling: Some(request.sampling.into()),
            stop_token_ids: request.stop_token_ids,
            ignore_eos: false,
            max_tokens: (request.max_tokens != UNLIMITED_TOKENS).then_some(request.max_tokens),
            timeout: request.timeout.and_then(|timeout| prost_types::Duration::try_from(timeout).ok()),
            resume_from: request.generated,
            constraint: request.constraint.map(Into::into),
            cache_salt: request.cache_salt.map_or_else(Vec::new, |salt| salt.as_bytes().to_vec()),
        }
    }
}

/// A sequence as a worker receives it: nothing may be absent. Its time limit is the router's business.
///
/// # Errors
/// Names the field that does not follow the protocol. Ranges are checked by [`GenerateRequest::validate`].
pub fn sequence(message: pb::Sequence) -> Result<GenerateRequest> {
    let sampling = required(message.sampling, "sampling")?;
    let seed = required(sampling.seed, "sampling.seed")?;
    Ok(GenerateRequest {
        id: RequestId::new(&message.request_id).map_err(|reason| InvalidMessage::new("request_id", reason))?,
        prompt: message.prompt_tokens,
        generated: message.generated,
        sampling: self::sampling(sampling, seed),
        stop_token_ids: message.stop_token_ids,
        max_tokens: message.max_tokens,
        constraint: message.constraint.map(Into::into),
        cache_salt: cache_salt(&message.cache_salt)?,
        timeout: None,
    })
}

impl From<GenerateRequest> for pb::Sequence {
    fn from(request: GenerateRequest) -> Self {
        Self {
            request_id: request.id.as_str().to_owned(),
            prompt_tokens: request.prompt,
            generated: request.generated,
            sampling: Some(request.sampling.into()),
            stop_token_ids: request.stop_token_ids,
            max_tokens: request.max_tokens,
            constraint: request.constraint.map(Into::into),
            cache_salt: request.cache_salt.map_or_else(Vec::new, |salt| salt.as_bytes().to_vec()),
        }
    }
}

impl From<Constraint> for pb::Constraint {
    fn from(constraint: Constraint) -> Self {
        Self { lark: constraint.lark.as_ref().to_owned() }
    }
}

impl From<pb::Constraint> for Constraint {
    fn from(message: pb::Constraint) -> Self {
        Self { lark: message.lark.into() }
    }
}

fn cache_salt(salt: &[u8]) -> Result<Option<CacheSalt>> {
    let present = Some(salt).filter(|salt| !salt.is_empty());
    present.map(CacheSalt::new).transpose().map_err(|reason| InvalidMessage::new("cache_salt", reason))
}

fn sampling(message: pb::Sampling, seed: u64) -> Sampling {
    let neutral = Sampling::default();
    Sampling {
        temperature: message.temperature.unwrap_or(neutral.temperature),
        top_p: message.top_p.unwrap_or(neutral.top_p),
        top_k: message.top_k,
        min_p: message.min_p,
        presence_penalty: message.presence_penalty,
        frequency_penalty: message.frequency_penalty,
        repetition_penalty: message.repetition_penalty.unwrap_or(neutral.repetition_penalty),
        logit_bias: message.logit_bias.into_iter().map(|entry| (entry.token, entry.bias)).collect(),
        seed,
        choice: message.choice,
        logprobs: message.logprobs,
    }
}

impl From<Sampling> for pb::Sampling {
    fn from(sampling: Sampling) -> Self {
        let logit_bias = sampling.logit_bias.into_iter().map(|(token, bias)| pb::LogitBias { token, bias }).collect();
        Self {
            temperature: Some(sampling.temperature),
            top_p: Some(sampling.top_p),
            top_k: sampling.top_k,
            min_p: sampling.min_p,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            repetition_penalty: Some(sampling.repetition_penalty),
            logit_bias,
            seed: Some(sampling.seed),
            choice: sampling.choice,
            logprobs: sampling.logprobs,
        }
    }
}
