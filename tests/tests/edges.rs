//! Prompts around every edge, through the real stack by gRPC and HTTP: tokens equal to a monolithic run, or a clear refusal.

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use tests::monolith::Monolith;
use tests::router::{generate, greedy, wait_all_pages_free};
use tests::stack::Stack;
use tonic::Code;
use types::Sampling;
use wire::pb::FinishReason;

/// The default of the CPU services.
const MAX_CONTEXT_TOKENS: u32 = 8192;

/// Lengths around the window of 128, pages of 16 to 64 and chunks of 256 to 2048 tokens, and the longest prompt.
const PROMPT_LENGTHS: [u32; 22] = [
    1,
    2,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    128,
    129,
    255,
    256,
    257,
    511,
    512,
    513,
    1025,
    MAX_CONTEXT_TOKENS - 1,
];

/// Tokens that spell nothing, but differ from each other and with the length.
fn prompt(length: u32) -> Vec<u32> {
    (0..length).map(|i| (i.wrapping_mul(2_654_435_761) >> 7).wrapping_add(length) % 2000).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_around_every_edge_give_the_tokens_of_a_monolithic_run() -> anyhow::Result<()> {
    let stack = Stack::start(env!("CARGO_BIN_EXE_damask-under-test"), &[])?;
    let mut monolith = Monolith::nano(MAX_CONTEXT_TOKENS)?;
    for length in PROMPT_LENGTHS {
        let prompt = prompt(length);
        let count = 6.min(MAX_CONTEXT_TOKENS - length);
        let expected = monolith.generate(&prompt, &Sampling { temperature: 0.0, ..Sampling::default() }, count, &[])?;
        let mut request = greedy(&prompt, 6);
        request.ignore_eos = true;
        let generated = generate(&stack.addresses.router, request).await.with_context(|| format!("{length} tokens"))?;
        ensure!(generated.tokens == expected, "{length} tokens: expected {expected:?}, got {:?}", generated.tokens);
        ensure!(
            generated.reason == FinishReason::Length && generated.prompt_tokens == length,
            "{length} tokens: {generated:?}"
        );
    }
    wait_all_pages_free(&[&stack.addresses.admin["prefill"], &stack.addresses.admin["decode"]]).await?;
    stack.stop()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_ends_with_its_first_token_transfers_nothing() -> anyhow::Result<()> {
    let stack = Stack::start(env!("CARGO_BIN_EXE_damask-under-test"), &[])?;
    let mut monolith = Monolith::nano(512)?;
    let prompt = prompt(100);
    let first = monolith.generate(&prompt, &Sampling { temperature: 0.0, ..Sampling::default() }, 1, &[])?;

    let one = generate(&stack.addresses.router, greedy(&prompt, 1)).await?;
    ensure!(one.tokens == first && one.reason == FinishReason::Length, "max_tokens 1 gave {one:?}");

    let mut request = greedy(&prompt, 50);
    request.stop_token_ids = first.clone();
    let stopped = generate(&stack.addresses.router, request).await?;
    ensure!(
        stopped.tokens == first && stopped.reason == FinishReason::Stop,
        "a first token that stops gave {stopped:?}"
    );
    wait_all_pages_free(&[&stack.addresses.admin["prefill"], &stack.addresses.admin["decode"]]).await?;
    stack.stop()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_can_never_run_is_refused_with_the_field() -> anyhow::Result<()> {
    let stack = Stack::start(env!("CARGO_BIN_EXE_damask-under-test"), &[])?;
    let long = prompt(MAX_CONTEXT_TOKENS);
    for (request, field) in [
        (greedy(&long, 1), "prompt_tokens"),
        (greedy(&[], 1), "prompt_tokens"),
        (greedy(&[1], 0), "max_tokens"),
        (greedy(&[4096], 1), "prompt_tokens"),
    ] {
        let error = generate(&stack.addresses.router, request)
            .await
            .err()
            .with_context(|| format!("a bad {field} was accepted"))?;
        let status = error.downcast::<tonic::Status>()?;
        ensure!(status.code() == Code::InvalidArgument && status.message().contains(field), "{field}: {status:?}");
    }

    let body = json!({"model": "gpt-oss-nano", "messages": [{"role": "user", "content": "word ".repeat(9000)}]});
    let response =
        reqwest::Client::new().post(format!("{}/v1/chat/completions", stack.url())).json(&body).send().await?;
    ensure!(response.status() == 400, "a prompt that is too long got {}", response.status());
    let error: Value = response.json().await?;
    ensure!(
        error["error"]["code"] == "context_length_exceeded"
            && error["error"]["message"].as_str().is_some_and(|text| text.contains("8192")),
        "{error}"
    );
    stack.stop()
}

/// Starting again would end the same way, so nobody is kept waiting.
#[test]
fn a_model_that_cannot_be_opened_ends_the_stack() -> anyhow::Result<()> {
    let empty = tempfile::tempdir()?;
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_damask-under-test"))
        .args(["--log-format", "json", "up", "--listen", "127.0.0.1:0", "--model"])
        .arg(empty.path())
        .output()?;
    let log = String::from_utf8(output.stderr)?;
    ensure!(output.status.code() == Some(1), "{}: {log}", output.status);
    ensure!(log.contains("config.json: cannot be read"), "{log}");
    for line in log.lines() {
        serde_json::from_str::<Value>(line).with_context(|| format!("not JSON: {line}"))?;
    }
    Ok(())
}
