//! One request, timed.

use std::time::Instant;

use anyhow::{Context, bail};
use futures_util::StreamExt;
use serde_json::{Value, json};
use types::SplitMix64;

use crate::refusal::refusal;
use crate::sse::EventStream;

/// Ids from here on are words in the vocabularies of gpt-oss.
const FIRST_TOKEN: u32 = 100;

/// What one request's client saw.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Seen {
    /// From sending the request to the first event with text or an end.
    pub(super) first_token_s: f64,
    /// From there to the last event.
    pub(super) rest_s: f64,
    /// Between two events with text.
    pub(super) gaps_s: Vec<f64>,
    /// As the gateway counts them.
    pub(super) prompt_tokens: u64,
    /// Those of them that prefill did not compute.
    pub(super) cached_tokens: u64,
    /// The same, of the answer.
    pub(super) output_tokens: u64,
}

/// Sends requests to one gateway.
pub(super) struct Client {
    http: reqwest::Client,
    url: String,
    api_key: Option<String>,
    model: String,
    token_max: u32,
}

impl Client {
    /// Asks which model is served.
    pub(super) async fn connect(url: &str, api_key: Option<String>, token_max: Option<u32>) -> anyhow::Result<Self> {
        let http = reqwest::Client::builder().pool_max_idle_per_host(1024).build()?;
        let url = url.trim_end_matches('/').to_owned();
        let mut client = Self { http, url, api_key, model: String::new(), token_max: 0 };
        let request = client.with_key(client.http.get(format!("{}/v1/models", client.url)));
        let models: Value =
            answer(request).await.with_context(|| format!("the gateway at {}", client.url))?.json().await?;
        let model = models["data"][0]["id"].as_str().context("the gateway lists no model")?;
        client.token_max = token_max.unwrap_or(if model == "gpt-oss-nano" { 1_500 } else { 190_000 });
        anyhow::ensure!(
            client.token_max > FIRST_TOKEN,
            "--token-max is {}, {FIRST_TOKEN} is too few",
            client.token_max
        );
        client.model = model.to_owned();
        Ok(client)
    }

    pub(super) fn model(&self) -> &str {
        &self.model
    }

    /// Sends a prompt that no other seed has, and reads the answer to its end.
    pub(super) async fn ask(&self, seed: u64, input_tokens: usize, output_tokens: usize) -> anyhow::Result<Seen> {
        let body = json!({
            "model": self.model,
            "prompt": prompt(seed, input_tokens, self.token_max),
            "max_tokens": output_tokens,
            "temperature": 1.0,
            "seed": seed,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let request = self.with_key(self.http.post(format!("{}/v1/completions", self.url))).json(&body);
        let start = Instant::now();
        let mut bytes = answer(request).await?.bytes_stream();
        let (mut stream, mut events) = (EventStream::default(), Vec::new());
        let (mut times, mut usage) = (Vec::new(), Value::Null);
        while let Some(part) = bytes.next().await {
            let now = start.elapsed().as_secs_f64();
            stream.push(&part.context("the connection broke")?, &mut events);
            for event in events.drain(..) {
                if event == "[DONE]" {
                    return seen(&times, &usage);
                }
                let event: Value = serde_json::from_str(&event).context("an event is not JSON")?;
                if let Some(message) = event["error"]["message"].as_str() {
                    bail!("{message}");
                }
                if !event["usage"].is_null() {
                    usage = event["usage"].clone();
                }
                if event["choices"].as_array().is_some_and(|choices| !choices.is_empty()) {
                    times.push(now);
                }
            }
        }
        bail!("the stream ended before the answer was complete")
    }

    fn with_key(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }
}

async fn answer(request: reqwest::RequestBuilder) -> anyhow::Result<reqwest::Response> {
    let response = request.send().await.map_err(reqwest::Error::without_url)?;
    if !response.status().is_success() {
        bail!("{}", refusal(response).await);
    }
    Ok(response)
}

fn seen(times: &[f64], usage: &Value) -> anyhow::Result<Seen> {
    let (first, last) = times.first().zip(times.last()).context("the answer had no event")?;
    Ok(Seen {
        first_token_s: *first,
        rest_s: last - first,
        gaps_s: times.windows(2).map(|pair| pair[1] - pair[0]).collect(),
        prompt_tokens: usage["prompt_tokens"].as_u64().context("the answer had no usage")?,
        cached_tokens: usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0),
        output_tokens: usage["completion_tokens"].as_u64().context("the answer had no usage")?,
    })
}

/// Tokens that follow from the seed.
fn prompt(seed: u64, len: usize, token_max: u32) -> Vec<u32> {
    // Seeds of neighbouring numbers lie far apart.
    let mut random = SplitMix64(seed.wrapping_mul(0xd134_2543_de82_ef95));
    (0..len).map(|_| FIRST_TOKEN + random.below(u64::from(token_max - FIRST_TOKEN)) as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_in_range_and_differ_from_the_first_token_on() {
        let (one, two) = (prompt(1, 1000, 1500), prompt(2, 1000, 1500));
        assert!(one.iter().all(|token| (FIRST_TOKEN..1500).contains(token)));
        assert_eq!(one, prompt(1, 1000, 1500));
        assert_ne!(one[0], two[0]);
    }

    #[test]
    fn times_are_of_events() {
        let usage = json!({"prompt_tokens": 7, "completion_tokens": 3});
        let seen = seen(&[0.5, 0.75, 1.5], &usage).unwrap();
        assert_eq!((seen.first_token_s, seen.rest_s, seen.gaps_s), (0.5, 1.0, vec![0.25, 0.75]));
    }
}
