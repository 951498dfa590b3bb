//! `damask health`: one question to one admin port or several, for container health checks.

use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;

/// Ask a service's admin port how it is.
#[derive(Debug, Args)]
pub(crate) struct HealthArgs {
    /// The admin port, host:port; given several times, all must be well.
    #[arg(long, default_value = "127.0.0.1:8002")]
    admin: Vec<String>,
    /// Ask whether it is alive (if not, only a restart helps) instead of whether it can serve now.
    #[arg(long)]
    live: bool,
    /// How long to wait for the answer.
    #[arg(long, default_value_t = 2000)]
    timeout_ms: u64,
}

/// Asks, and says `ok` if the service is well.
///
/// # Errors
/// The reason that the service gives for not being well, or that it cannot be reached.
pub(crate) async fn health(args: &HealthArgs) -> anyhow::Result<()> {
    let client = reqwest::Client::builder().timeout(Duration::from_millis(args.timeout_ms)).build()?;
    for admin in &args.admin {
        let asked = ask(&client, admin, args.live).await;
        if args.admin.len() > 1 { asked.with_context(|| admin.clone())? } else { asked? }
    }
    println!("ok");
    Ok(())
}

async fn ask(client: &reqwest::Client, admin: &str, live: bool) -> anyhow::Result<()> {
    let url = format!("http://{admin}/health/{}", if live { "live" } else { "ready" });
    let sent = client.get(&url).send().await.map_err(reqwest::Error::without_url);
    let response = sent.with_context(|| format!("no answer from {url}"))?;
    let status = response.status();
    let body: serde_json::Value = response.json().await.context("the answer is not JSON")?;
    if !status.is_success() {
        bail!("{}", body["reason"].as_str().unwrap_or("not well"));
    }
    Ok(())
}
