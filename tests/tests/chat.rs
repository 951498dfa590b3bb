//! Every chat case over HTTP through four processes, for all prefill TP x decode TP in {1, 2, 4} x {1, 2, 4}; and the same prompts as tokens
//! through the router, equal to a monolithic run. `NANO_CHAT` names another file or folder of cases.

use std::sync::Arc;

use anyhow::{Context, anyhow, ensure};
use futures_util::{StreamExt, stream};
use tests::cases::{ChatCase, chat_cases, folded, whole};
use tests::router::{generate, greedy, wait_all_pages_free};
use tests::stack::Stack;
use vocabulary::Vocabulary;

/// Cases in flight at once.
const CONCURRENCY: usize = 16;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_case_is_answered_rightly_in_every_layout() -> anyhow::Result<()> {
    let cases = Arc::new(chat_cases()?);
    ensure!(!cases.is_empty(), "no chat cases");
    let vocabulary = tests::cases::nano_vocabulary()?;
    let mut failures = Vec::new();
    for prefill_tp in ["1", "2", "4"] {
        for decode_tp in ["1", "2", "4"] {
            let stack = Stack::start(
                env!("CARGO_BIN_EXE_damask-under-test"),
                &["--prefill-tp", prefill_tp, "--decode-tp", decode_tp],
            )?;
            let outcomes: Vec<_> = stream::iter(cases.iter().enumerate())
                .map(|(i, case)| answer(&stack, case, i % 2 == 0, &vocabulary))
                .buffer_unordered(CONCURRENCY)
                .collect()
                .await;
            let failed = outcomes
                .into_iter()
                .filter_map(Result::err)
                .map(|error| format!("prefill TP{prefill_tp} decode TP{decode_tp}: {error:#}"));
            failures.extend(failed);
            let admin = &stack.addresses.admin;
            wait_all_pages_free(&[&admin["prefill"], &admin["decode"]]).await?;
            stack.stop()?;
            println!(
                "prefill TP{prefill_tp} decode TP{decode_tp}: {} cases, {} failures so far",
                cases.len(),
                failures.len()
            );
        }
    }
    ensure!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
    Ok(())
}

async fn answer(stack: &Stack, case: &ChatCase, streamed: bool, vocabulary: &Vocabulary) -> anyhow::Result<()> {
    let response = reqwest::Client::new()
        .post(format!("{}/v1/chat/completions", stack.url()))
        .json(&case.body(streamed))
        .send()
        .await?;
    let status = response.status();
    ensure!(status.is_success(), "{}: {status}: {}", case.id, response.text().await?);
    let (message, finish_reason, usage) =
        if streamed { folded(response).await } else { whole(response).await }.with_context(|| case.id.clone())?;
    case.check(&message, &finish_reason, &usage).map_err(|difference| anyhow!("{}: {difference}", case.id))?;

    let prompt = case.prompt_tokens(vocabulary)?;
    let generated = generate(&stack.addresses.router, greedy(&prompt, 1024)).await.with_context(|| case.id.clone())?;
    ensure!(
        generated.tokens == case.completion_token_ids,
        "{}: expected tokens {:?}, got {:?}",
        case.id,
        case.completion_token_ids,
        generated.tokens
    );
    Ok(())
}
