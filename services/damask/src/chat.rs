//! `damask chat`: asks one question and streams the answer to the terminal.

use std::io::{IsTerminal, Write};
use std::path::Path;

use anyhow::{Context, bail};
use clap::Args;
use futures_util::StreamExt;
use serde_json::{Value, json};

use crate::placement::{Placement, PlacementArgs};
use crate::refusal::refusal;
use crate::sse::EventStream;

/// Ask one question.
#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    /// What to ask.
    question: String,
    /// A running gateway, for example http://127.0.0.1:8000; without it a private stack is started for this question.
    #[arg(long, env = "DAMASK_URL")]
    url: Option<String>,
    /// Model name to send to --url, by default the first one that the gateway lists; for a private stack, the model's directory.
    #[arg(long)]
    model: Option<String>,
    /// Instructions sent as system message.
    #[arg(long)]
    system: Option<String>,
    /// How long to think: low, medium or high.
    #[arg(long, default_value = "medium")]
    reasoning_effort: String,
    /// Sampling temperature; 0 always takes the most probable token.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Most tokens to generate.
    #[arg(long)]
    max_tokens: Option<u32>,
    /// API key, if the gateway asks for one.
    #[arg(long, env = "DAMASK_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    #[command(flatten)]
    placement: PlacementArgs,
}

impl ChatArgs {
    /// What a private stack would serve.
    ///
    /// # Errors
    /// What cannot be.
    pub(crate) fn place(&self) -> anyhow::Result<Placement> {
        self.placement.place(self.model.as_deref().map(Path::new))
    }

    /// The gateway to ask, if the caller named one.
    pub(crate) fn url(&self) -> Option<&str> {
        self.url.as_deref()
    }

    fn body(&self, model: &str) -> Value {
        let mut messages = Vec::new();
        if let Some(system) = &self.system {
            messages.push(json!({"role": "system", "content": system}));
        }
        messages.push(json!({"role": "user", "content": self.question}));
        let mut body = json!({
            "model": model,
            "messages": messages,
            "stream": true,
            "temperature": self.temperature,
            "reasoning_effort": self.reasoning_effort,
        });
        if let Some(max_tokens) = self.max_tokens {
            body["max_completion_tokens"] = max_tokens.into();
        }
        body
    }
}

/// Asks the gateway at `url` and prints what comes back, reasoning dimmed.
///
/// # Errors
/// When the gateway cannot be reached, refuses, or breaks off before the answer is complete.
pub(crate) async fn ask(args: &ChatArgs, url: &str) -> anyhow::Result<()> {
    let url = url.trim_end_matches('/');
    let client = reqwest::Client::new();
    let with_key = |request: reqwest::RequestBuilder| match &args.api_key {
        Some(key) => request.bearer_auth(key),
        None => request,
    };
    let model = match args.model.as_ref().filter(|_| args.url.is_some()) {
        Some(model) => model.clone(),
        None => first_model(with_key(client.get(format!("{url}/v1/models"))), url).await?,
    };
    let request = with_key(client.post(format!("{url}/v1/chat/completions"))).json(&args.body(&model));
    let response = send(request, url).await?;
    if !response.status().is_success() {
        bail!("{}", refusal(response).await);
    }
    let mut printer = Printer::new();
    let mut stream = EventStream::default();
    let mut body = response.bytes_stream();
    let mut events = Vec::new();
    while let Some(bytes) = body.next().await {
        stream.push(&bytes.context("the connection broke before the answer was complete")?, &mut events);
        for event in events.drain(..) {
            if event == "[DONE]" {
                return printer.finish();
            }
            printer.event(&event)?;
        }
    }
    bail!("the gateway ended the stream before the answer was complete")
}

async fn send(request: reqwest::RequestBuilder, url: &str) -> anyhow::Result<reqwest::Response> {
    let sent = request.send().await.map_err(reqwest::Error::without_url);
    sent.with_context(|| format!("cannot reach the gateway at {url}"))
}

async fn first_model(request: reqwest::RequestBuilder, url: &str) -> anyhow::Result<String> {
    let response = send(request, url).await?;
    if !response.status().is_success() {
        bail!("{}", refusal(response).await);
    }
    let models: Value = response.json().await.context("the gateway's list of models is not JSON")?;
    models["data"][0]["id"].as_str().map(str::to_owned).context("the gateway lists no model")
}

/// Writes the answer to standard output. On a terminal the reasoning stands above it, dimmed; otherwise the reasoning
/// goes to standard error, so that a pipe receives the answer alone.
struct Printer {
    terminal: bool,
    in_reasoning: bool,
    finish_reason: Option<String>,
}

impl Printer {
    fn new() -> Self {
        Self { terminal: std::io::stdout().is_terminal(), in_reasoning: false, finish_reason: None }
    }

    fn event(&mut self, event: &str) -> anyhow::Result<()> {
        let event: Value = serde_json::from_str(event).context("the gateway sent an event that is not JSON")?;
        if let Some(message) = event["error"]["message"].as_str() {
            bail!("{message}");
        }
        let choice = &event["choices"][0];
        let delta = &choice["delta"];
        if let Some(text) = delta["reasoning_content"].as_str().filter(|text| !text.is_empty()) {
            self.reasoning(text)?;
        }
        if let Some(text) = delta["content"].as_str().filter(|text| !text.is_empty()) {
            self.content(text)?;
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish_reason = Some(reason.to_owned());
        }
        Ok(())
    }

    fn reasoning(&mut self, text: &str) -> std::io::Result<()> {
        let open = if self.in_reasoning { "" } else { "\x1b[2m" };
        self.in_reasoning = true;
        if self.terminal {
            let mut out = std::io::stdout().lock();
            write!(out, "{open}{text}")?;
            out.flush()
        } else {
            write!(std::io::stderr(), "{text}")
        }
    }

    fn content(&mut self, text: &str) -> std::io::Result<()> {
        self.end_reasoning()?;
        let mut out = std::io::stdout().lock();
        write!(out, "{text}")?;
        out.flush()
    }

    fn end_reasoning(&mut self) -> std::io::Result<()> {
        if std::mem::take(&mut self.in_reasoning) {
            if self.terminal { writeln!(std::io::stdout(), "\x1b[0m")? } else { writeln!(std::io::stderr())? }
        }
        Ok(())
    }

    fn finish(&mut self) -> anyhow::Result<()> {
        self.end_reasoning()?;
        writeln!(std::io::stdout())?;
        match self.finish_reason.as_deref() {
            Some("length") => writeln!(std::io::stderr(), "(cut: the token limit was reached)")?,
            Some(_) => {}
            None => bail!("the answer ended without a finish reason"),
        }
        Ok(())
    }
}
