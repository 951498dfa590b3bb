//! Prompts that begin alike, through four processes: less is computed, and nothing else changes.

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use tests::router::{generate, greedy, wait_all_pages_free};
use tests::stack::Stack;

const PREFILL_TP: [&str; 3] = ["1", "2", "4"];

fn start(prefill_tp: &str) -> anyhow::Result<Stack> {
    Stack::start(env!("CARGO_BIN_EXE_damask-under-test"), &["--prefill-tp", prefill_tp])
}

/// Asks with a conversation; yields the message and the prompt tokens that were cached.
async fn ask(stack: &Stack, messages: &[Value]) -> anyhow::Result<(Value, u64)> {
    let body = json!({"model": "gpt-oss-nano", "messages": messages, "temperature": 0, "reasoning_effort": "low"});
    let request = reqwest::Client::new().post(format!("{}/v1/chat/completions", stack.url())).json(&body);
    let answer: Value = request.send().await?.error_for_status()?.json().await?;
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    Ok((answer["choices"][0]["message"].clone(), cached.with_context(|| format!("no usage: {answer}"))?))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_turn_begins_where_the_first_one_ended() -> anyhow::Result<()> {
    let mut conversation = vec![json!({"role": "user", "content": "What is the capital of France?"})];
    let second = json!({"role": "user", "content": "What is 12 + 30?"});
    let mut expected = None;
    for prefill_tp in PREFILL_TP {
        conversation.truncate(1);
        let stack = start(prefill_tp)?;
        let (answer, cached) = ask(&stack, &conversation).await?;
        ensure!(cached == 0, "TP{prefill_tp}: {cached} tokens of the first prompt were cached");
        let content = answer["content"].as_str().context("an answer")?;
        ensure!(content.contains("Paris"), "the capital of France is {content}");
        conversation.extend([json!({"role": "assistant", "content": content}), second.clone()]);
        let (answer, cached) = ask(&stack, &conversation).await?;
        ensure!(cached >= 16, "TP{prefill_tp}: {cached} tokens of the second prompt were cached");
        // A stack that never saw the first turn says the same.
        let expected = match &expected {
            Some(expected) => expected,
            None => {
                let (fresh, cached) = ask(&start(prefill_tp)?, &conversation).await?;
                ensure!(cached == 0, "{cached} tokens were cached in a fresh stack");
                expected.insert(fresh)
            }
        };
        ensure!(answer == *expected, "TP{prefill_tp}: expected {expected}, got {answer}");
        wait_all_pages_free(&[&stack.addresses.admin["prefill"], &stack.addresses.admin["decode"]]).await?;
        stack.stop()?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn salts_share_nothing() -> anyhow::Result<()> {
    let stack = start("2")?;
    let prompt: Vec<u32> = (0..700).map(|i| (i * 97 + 5) % 2000).collect();
    let mut answers = Vec::new();
    for salt in ["", "one", "two", "", "one", "two"] {
        let mut request = greedy(&prompt, 12);
        (request.cache_salt, request.ignore_eos) = (salt.into(), true);
        answers.push(generate(&stack.addresses.router, request).await?);
    }
    let cached: Vec<u32> = answers.iter().map(|answer| answer.cached_tokens).collect();
    // Pages of 16 tokens: 43 of them lie before the last token.
    ensure!(cached == [0, 0, 0, 688, 688, 688], "{cached:?}");
    ensure!(answers.iter().all(|answer| answer.tokens == answers[0].tokens), "{answers:?}");
    wait_all_pages_free(&[&stack.addresses.admin["prefill"], &stack.addresses.admin["decode"]]).await?;
    stack.stop()
}
