//! A minimal gRPC client of the router, and the reading of page pools from the admin servers.

use std::collections::BTreeMap;

use anyhow::{Context, bail, ensure};
use wire::pb::generate_response::Event;
use wire::pb::inference_client::InferenceClient;
use wire::pb::{FinishReason, GenerateRequest, GetModelInfoRequest};

/// What one `Generate` call gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generated {
    /// The tokens, in index order.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub reason: FinishReason,
    /// Prompt tokens as counted by the router.
    pub prompt_tokens: u32,
    /// Those of them that were cached.
    pub cached_tokens: u32,
}

/// Calls `Inference.Generate` on `address` (`host:port`) and collects the stream, checking that indices have no gap.
///
/// # Errors
/// The status of a refusal; a gap; a stream that ends without `Finished`.
pub async fn generate(address: &str, request: GenerateRequest) -> anyhow::Result<Generated> {
    let mut client = InferenceClient::connect(format!("http://{address}")).await?;
    let mut stream = client.generate(request).await?.into_inner();
    let mut tokens = Vec::new();
    while let Some(message) = stream.message().await? {
        match message.event.context("an event without content")? {
            Event::Started(_) => {}
            Event::Tokens(batch) => {
                ensure!(
                    batch.first_index as usize == tokens.len(),
                    "index {} after {} tokens",
                    batch.first_index,
                    tokens.len()
                );
                tokens.extend(batch.tokens.iter().map(|token| token.id));
            }
            Event::Finished(finished) => {
                let usage = finished.usage.context("finished without usage")?;
                ensure!(
                    usage.output_tokens as usize == tokens.len(),
                    "usage says {} tokens, {} came",
                    usage.output_tokens,
                    tokens.len()
                );
                ensure!(stream.message().await?.is_none(), "something after Finished");
                let (prompt_tokens, cached_tokens) = (usage.prompt_tokens, usage.cached_tokens);
                return Ok(Generated { tokens, reason: finished.reason(), prompt_tokens, cached_tokens });
            }
        }
    }
    bail!("the stream ended without Finished after {} tokens", tokens.len())
}

/// A greedy request.
#[must_use]
pub fn greedy(prompt: &[u32], max_tokens: u32) -> GenerateRequest {
    let sampling = wire::pb::Sampling { temperature: Some(0.0), ..Default::default() };
    GenerateRequest {
        prompt_tokens: prompt.to_vec(),
        max_tokens: Some(max_tokens),
        sampling: Some(sampling),
        ..Default::default()
    }
}

/// Waits up to ten seconds until the router has a pair of workers: after one was lost and came back.
///
/// # Errors
/// When there is none by then.
pub async fn wait_for_pair(address: &str) -> anyhow::Result<()> {
    let mut client = InferenceClient::connect(format!("http://{address}")).await?;
    for _ in 0..100 {
        if let Ok(info) = client.get_model_info(GetModelInfoRequest {}).await
            && info.get_ref().ready_pairs > 0
        {
            return Ok(());
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    bail!("the router has no pair of workers")
}

/// Pages of a worker by `(group, state)`.
pub type Pages = BTreeMap<(String, String), u64>;

/// Reads `damask_kv_pages` out of what `/metrics` gives.
///
/// # Errors
/// When there is no such metric, or a sample is not as it should be.
pub fn parse_pages(metrics: &str) -> anyhow::Result<Pages> {
    let mut pages = BTreeMap::new();
    for line in metrics.lines().filter(|line| line.starts_with("damask_kv_pages{")) {
        let (labels, value) = line.split_once("} ").context("a sample without value")?;
        let label = |name: &str| {
            let from =
                labels.split(&format!("{name}=\"")).nth(1).with_context(|| format!("no label {name} in {line}"))?;
            Ok::<_, anyhow::Error>(from.split('"').next().unwrap_or("").to_owned())
        };
        pages.insert((label("group")?, label("state")?), value.trim().parse::<f64>()? as u64);
    }
    ensure!(!pages.is_empty(), "no metric damask_kv_pages");
    Ok(pages)
}

async fn pages(admin: &str) -> anyhow::Result<Pages> {
    let text = reqwest::get(format!("http://{admin}/metrics")).await?.error_for_status()?.text().await?;
    parse_pages(&text).with_context(|| admin.to_owned())
}

/// Waits up to ten seconds until every page of every given worker is free, or cached: kept for prompts that begin alike.
///
/// # Errors
/// The pages that are still in another state.
pub async fn wait_all_pages_free(admins: &[&str]) -> anyhow::Result<()> {
    for admin in admins {
        let mut attempts = 0;
        loop {
            let pages = pages(admin).await?;
            let is_idle = |state: &str| ["free", "cached"].contains(&state);
            let busy: Vec<_> = pages.iter().filter(|((_, state), count)| !is_idle(state) && **count > 0).collect();
            let idle: u64 = pages.iter().filter(|((_, state), _)| is_idle(state)).map(|(_, count)| count).sum();
            if busy.is_empty() {
                ensure!(idle > 0, "{admin} has no pages at all");
                break;
            }
            attempts += 1;
            ensure!(attempts < 100, "{admin} still holds pages: {busy:?}");
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    }
    Ok(())
}
