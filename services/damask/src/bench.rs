//! `damask bench`: loads a running gateway over HTTP and measures what its clients see.
//!
//! Prompts are random tokens, never the same twice, so no cache of prefixes helps. A number of clients each send one request after
//! the other (a closed loop) to `/v1/completions`, streamed. Start with [`BenchArgs::run`]; `report` makes the tables, `client` sends
//! one request.

mod client;
mod report;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context, ensure};
use clap::Args;
use tokio::task::JoinSet;

use crate::sweep::list;
use client::{Client, Seen};
use report::{Case, Report};

/// Load a gateway and measure what its clients see.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// The gateway.
    #[arg(long, default_value = "http://127.0.0.1:8000", env = "DAMASK_URL")]
    url: String,
    /// API key, if the gateway asks for one.
    #[arg(long, env = "DAMASK_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Numbers of clients, each case by itself.
    #[arg(long, default_value = "1,8,32")]
    concurrency: String,
    /// Lengths of prompts in tokens, each with each number of clients.
    #[arg(long, default_value = "1024")]
    input_tokens: String,
    /// Most tokens of an answer.
    #[arg(long, default_value_t = 128)]
    output_tokens: usize,
    /// Requests that each client sends, one after the other.
    #[arg(long, default_value_t = 4)]
    rounds: usize,
    /// Requests before the first case that do not count.
    #[arg(long, default_value_t = 1)]
    warm_up: usize,
    /// Prompts are made of tokens below this [default: 190000; 1500 for gpt-oss-nano].
    #[arg(long)]
    token_max: Option<u32>,
    /// Seed of prompts and answers.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write the results to this file, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

impl BenchArgs {
    /// Runs every case and prints a table; failed requests are counted, and the first is told.
    ///
    /// # Errors
    /// A gateway that cannot be reached, or a file that cannot be written.
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        let concurrency = list(&self.concurrency).context("--concurrency")?;
        let lengths = list(&self.input_tokens).context("--input-tokens")?;
        ensure!(!concurrency.contains(&0) && !lengths.contains(&0), "a case has one client and one token at least");
        ensure!(self.rounds > 0 && self.output_tokens > 0, "--rounds and --output-tokens are 1 at least");
        let client = Client::connect(&self.url, self.api_key.clone(), self.token_max).await?;
        let bench = Arc::new(Bench { client, output_tokens: self.output_tokens, next_seed: AtomicU64::new(self.seed) });
        let warm_up = bench.case(1, lengths[0], self.warm_up).await?;
        if let Some(error) = warm_up.first_error.filter(|_| self.warm_up > 0) {
            anyhow::bail!("the first request failed: {error}");
        }
        let mut report = Report::new(bench.client.model().to_owned(), self.output_tokens);
        for input_tokens in lengths {
            for &clients in &concurrency {
                let case = bench.case(clients, input_tokens, self.rounds).await?;
                eprintln!("{}", report.progress(&case));
                report.cases.push(case);
            }
        }
        print!("{}", report.markdown()?);
        if let Some(file) = &self.json {
            let text = serde_json::to_string_pretty(&report.json())? + "\n";
            std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
        }
        Ok(())
    }
}

struct Bench {
    client: Client,
    output_tokens: usize,
    next_seed: AtomicU64,
}

impl Bench {
    async fn case(self: &Arc<Self>, clients: usize, input_tokens: usize, rounds: usize) -> anyhow::Result<Case> {
        let start = Instant::now();
        let mut running = JoinSet::new();
        for _ in 0..clients {
            let bench = Arc::clone(self);
            running.spawn(async move {
                let mut seen: Vec<Result<Seen, String>> = Vec::with_capacity(rounds);
                for _ in 0..rounds {
                    let seed = bench.next_seed.fetch_add(1, Ordering::Relaxed);
                    let asked = bench.client.ask(seed, input_tokens, bench.output_tokens).await;
                    seen.push(asked.map_err(|error| format!("{error:#}")));
                }
                seen
            });
        }
        let mut all = Vec::new();
        while let Some(seen) = running.join_next().await {
            all.extend(seen?);
        }
        Ok(Case::new(clients, input_tokens, start.elapsed().as_secs_f64(), all))
    }
}
