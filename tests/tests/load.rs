//! Many requests at once, some given up midway: every one that stays is answered rightly, and afterwards every page is free.

use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use futures_util::{StreamExt, future::try_join_all};
use tests::cases::{ChatCase, chat_cases};
use tests::router::{generate, wait_all_pages_free};
use tests::stack::Stack;
use wire::pb::{GenerateRequest, Sampling};

const REQUESTS: usize = 64;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_at_once_with_cancellations_leave_every_page_free() -> anyhow::Result<()> {
    let stack = Stack::start(env!("CARGO_BIN_EXE_damask-under-test"), &[])?;
    let cases = chat_cases()?;
    let client = reqwest::Client::new();
    let url = format!("{}/v1/chat/completions", stack.url());
    let requests = (0..REQUESTS).map(|i| {
        let case = &cases[i % cases.len()];
        let (client, url) = (&client, &url);
        // Every third request is given up after a number of bytes that differs from one to the next.
        async move {
            if i % 3 == 2 { cancelled(client, url, case, i * 40).await } else { finished(client, url, case).await }
        }
    });
    try_join_all(requests).await?;
    wait_all_pages_free(&[&stack.addresses.admin["prefill"], &stack.addresses.admin["decode"]]).await?;
    stack.stop()
}

async fn finished(client: &reqwest::Client, url: &str, case: &ChatCase) -> anyhow::Result<()> {
    let response = client.post(url).json(&case.body(true)).send().await?;
    ensure!(response.status().is_success(), "{}: {}", case.id, response.status());
    let (message, finish_reason, usage) = tests::cases::folded(response).await.with_context(|| case.id.clone())?;
    case.check(&message, &finish_reason, &usage).map_err(|difference| anyhow!("{}: {difference}", case.id))
}

async fn cancelled(client: &reqwest::Client, url: &str, case: &ChatCase, after_bytes: usize) -> anyhow::Result<()> {
    let response = client.post(url).json(&case.body(true)).send().await?;
    ensure!(response.status().is_success(), "{}: {}", case.id, response.status());
    let mut body = response.bytes_stream();
    let mut seen = 0;
    while seen < after_bytes
        && let Some(bytes) = body.next().await
    {
        seen += bytes?.len();
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_seed_gives_the_same_tokens_alone_and_in_a_crowd() -> anyhow::Result<()> {
    let stack = Stack::start(env!("CARGO_BIN_EXE_damask-under-test"), &[])?;
    let request = |seed: u64| GenerateRequest {
        prompt_tokens: (0..40).map(|i| (i * 37 + seed as u32) % 2000).collect(),
        sampling: Some(Sampling { temperature: Some(1.0), seed: Some(seed), ..Sampling::default() }),
        max_tokens: Some(24),
        ignore_eos: true,
        ..GenerateRequest::default()
    };
    let address = &stack.addresses.router;
    let crowd = try_join_all((0..12).map(|seed| generate(address, request(seed)))).await?;
    for seed in [0, 5, 11] {
        let alone = generate(address, request(seed)).await?;
        ensure!(
            alone.tokens == crowd[seed as usize].tokens,
            "seed {seed}: {:?} alone, {:?} in a crowd",
            alone.tokens,
            crowd[seed as usize].tokens
        );
    }
    ensure!(crowd[0].tokens != crowd[1].tokens, "seeds make no difference");
    stack.stop()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_worker_costs_no_answer() -> anyhow::Result<()> {
    let mut stack = Stack::start(env!("CARGO_BIN_EXE_damask-under-test"), &[])?;
    let mut monolith = tests::monolith::Monolith::nano(2048)?;
    let greedy = types::Sampling { temperature: 0.0, ..types::Sampling::default() };
    for victim in ["decode", "prefill", "decode"] {
        let prompt: Vec<u32> = (0..300).map(|i| (i * 31 + 7) % 2000).collect();
        let expected = monolith.generate(&prompt, &greedy, 400, &[])?;
        let mut request = tests::router::greedy(&prompt, 400);
        request.ignore_eos = true;
        let address = stack.addresses.router.clone();
        let kill = async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            stack.refresh()?;
            let pid = stack.addresses.pids[victim];
            let killed = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status()?;
            ensure!(killed.success(), "cannot kill {victim}");
            Ok(())
        };
        let (answer, killed) = tokio::join!(generate(&address, request), kill);
        killed?;
        let answer = answer.with_context(|| format!("{victim} was killed"))?;
        ensure!(answer.tokens == expected, "{victim} was killed: expected {expected:?}, got {:?}", answer.tokens);
        // The next round starts with a whole stack.
        tests::router::wait_for_pair(&stack.addresses.router).await?;
        let again = generate(&stack.addresses.router, tests::router::greedy(&prompt, 2))
            .await
            .with_context(|| format!("after {victim} was killed"))?;
        ensure!(again.tokens == expected[..again.tokens.len()], "after {victim} was killed: {:?}", again.tokens);
    }
    wait_all_pages_free(&[&stack.addresses.admin["prefill"], &stack.addresses.admin["decode"]]).await?;
    stack.stop()
}
