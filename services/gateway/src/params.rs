//! What the three text APIs share: how tokens are drawn, when the answer ends, how it is streamed.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use types::Sampling;

use crate::error::ApiError;

/// Most stop strings in a request, as in OpenAI's API.
pub const STOP_STRINGS_MAX: usize = 4;

/// Most bytes of a stop string: with each token, as much text as the longest has is looked at again.
pub const STOP_STRING_BYTES_MAX: usize = 4096;

/// One text that ends the answer, or several.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
pub enum StopStrings {
    /// One.
    One(String),
    /// At most [`STOP_STRINGS_MAX`].
    Many(Vec<String>),
}

impl StopStrings {
    /// Checks and lists them.
    ///
    /// # Errors
    /// Too many, an empty one, or one of more than [`STOP_STRING_BYTES_MAX`].
    pub fn checked(self) -> Result<Vec<String>, ApiError> {
        let stops = match self {
            Self::One(stop) => vec![stop],
            Self::Many(stops) => stops,
        };
        if stops.len() > STOP_STRINGS_MAX {
            let message = format!("stop has {} strings, at most {STOP_STRINGS_MAX} are allowed", stops.len());
            return Err(ApiError::invalid("stop", message));
        }
        if stops.iter().any(String::is_empty) {
            return Err(ApiError::invalid("stop", "stop has an empty string"));
        }
        if let Some(long) = stops.iter().map(String::len).find(|bytes| *bytes > STOP_STRING_BYTES_MAX) {
            let message = format!("stop has a string of {long} bytes, at most {STOP_STRING_BYTES_MAX} are allowed");
            return Err(ApiError::invalid("stop", message));
        }
        Ok(stops)
    }
}

/// Reads a part of a request body.
///
/// # Errors
/// 400, naming the field that has the wrong type.
pub(crate) fn read<T: DeserializeOwned>(body: &Value) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(body).map_err(|error| {
        let param = error.path().to_string();
        let message = format!("{param}: {}", error.inner());
        ApiError::invalid(param, message)
    })
}

/// Options of a stream.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
pub struct StreamOptions {
    /// Send usage in a last chunk of its own.
    pub include_usage: Option<bool>,
}

/// Sampling fields as a request gives them, before defaults.
#[derive(Debug, Clone, Default)]
pub(crate) struct SamplingFields {
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) top_k: Option<u32>,
    pub(crate) min_p: Option<f32>,
    pub(crate) presence_penalty: Option<f32>,
    pub(crate) frequency_penalty: Option<f32>,
    pub(crate) repetition_penalty: Option<f32>,
    pub(crate) logit_bias: Option<BTreeMap<String, f32>>,
    pub(crate) seed: Option<i64>,
    pub(crate) logprobs: Option<u32>,
}

impl SamplingFields {
    /// Fills in defaults: temperature and top_p 1, all else neutral, and `drawn_seed` where the request has none.
    /// Ranges that the engine knows are checked with the whole request (`types::GenerateRequest::validate`).
    pub(crate) fn resolve(self, drawn_seed: u64) -> Result<Sampling, ApiError> {
        let neutral = Sampling::default();
        let temperature = self.temperature.unwrap_or(neutral.temperature);
        if !(0.0..=2.0).contains(&temperature) {
            return Err(ApiError::invalid("temperature", format!("temperature is {temperature}, allowed is 0 to 2")));
        }
        let top_p = self.top_p.unwrap_or(neutral.top_p);
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(ApiError::invalid("top_p", format!("top_p is {top_p}, allowed is above 0 and up to 1")));
        }
        let mut logit_bias = Vec::new();
        for (token, bias) in self.logit_bias.unwrap_or_default() {
            let token = token.parse().map_err(|_| {
                ApiError::invalid("logit_bias", format!("logit_bias has the key {token:?}, which is not a token id"))
            })?;
            logit_bias.push((token, bias));
        }
        Ok(Sampling {
            temperature,
            top_p,
            top_k: self.top_k.unwrap_or(neutral.top_k),
            min_p: self.min_p.unwrap_or(neutral.min_p),
            presence_penalty: self.presence_penalty.unwrap_or(neutral.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(neutral.frequency_penalty),
            repetition_penalty: self.repetition_penalty.unwrap_or(neutral.repetition_penalty),
            logit_bias,
            // A negative seed is as good as any: its bits are the key.
            seed: self.seed.map_or(drawn_seed, i64::cast_unsigned),
            choice: 0,
            logprobs: self.logprobs,
        })
    }
}

/// A limit on output tokens, which must let at least one through.
pub(crate) fn token_limit(field: &str, limit: Option<u32>) -> Result<Option<u32>, ApiError> {
    if limit == Some(0) {
        return Err(ApiError::invalid(field, format!("{field} is 0, at least 1 is needed")));
    }
    Ok(limit)
}

/// Number of answers: 1 unless given, at most `max`.
pub(crate) fn num_choices(n: Option<u32>, max: u32) -> Result<u32, ApiError> {
    let n = n.unwrap_or(1);
    if (1..=max).contains(&n) {
        return Ok(n);
    }
    Err(ApiError::invalid("n", format!("n is {n}, allowed is 1 to {max}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_fields_are_neutral_and_the_drawn_seed_is_used() {
        let sampling = SamplingFields::default().resolve(7).unwrap();
        assert_eq!(sampling, Sampling { seed: 7, ..Sampling::default() });
        let sampling = SamplingFields { seed: Some(-1), ..SamplingFields::default() }.resolve(7).unwrap();
        assert_eq!(sampling.seed, u64::MAX);
    }

    #[test]
    fn refusals_name_the_field() {
        let biased = |key: &str| SamplingFields {
            logit_bias: Some(BTreeMap::from([(key.to_owned(), 1.0)])),
            ..SamplingFields::default()
        };
        assert_eq!(biased("17").resolve(0).unwrap().logit_bias, [(17, 1.0)]);
        let refusals = [
            biased("x").resolve(0).map(drop),
            SamplingFields { temperature: Some(2.1), ..SamplingFields::default() }.resolve(0).map(drop),
            SamplingFields { temperature: Some(f32::NAN), ..SamplingFields::default() }.resolve(0).map(drop),
            SamplingFields { top_p: Some(0.0), ..SamplingFields::default() }.resolve(0).map(drop),
            token_limit("max_tokens", Some(0)).map(drop),
            StopStrings::Many(vec!["a".into(); 5]).checked().map(drop),
            StopStrings::One(String::new()).checked().map(drop),
            StopStrings::One("x".repeat(4097)).checked().map(drop),
            num_choices(Some(0), 8).map(drop),
            num_choices(Some(9), 8).map(drop),
        ];
        let params: Vec<_> = refusals.into_iter().map(|refused| refused.unwrap_err().object().param.unwrap()).collect();
        assert_eq!(StopStrings::One("x".repeat(4096)).checked().unwrap().len(), 1);
        assert_eq!(
            params,
            ["logit_bias", "temperature", "temperature", "top_p", "max_tokens", "stop", "stop", "stop", "n", "n"]
        );
    }
}
