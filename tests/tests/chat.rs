//! Every chat case over HTTP through four processes, for all prefill TP x decode TP in {1, 2, 4} x {1, 2, 4}, and some of them for decode with
//! data-parallel attention; and the same prompts as tokens through the router, equal to a monolithic run. `NANO_CHAT` names another file or
//! folder of cases.

use std::sync::Arc;

use anyhow::{Context, anyhow, ensure};
use futures_util::{StreamExt, stream};
use tests::cases::{ChatCase, chat_cases, folded, whole};
use tests::router::{generate, greedy, wait_all_pages_free};
use tests::stack::Stack;
use vocabulary::Vocabulary;

/// Cases in flight at once.
const CONCURRENCY: usize = 16;

/// Prefill's TP and the options for decode; of the cases, each `every`-th.
struct Layout {
    prefill_tp: u32,
    decode: &'static [&'static str],
    every: usize,
}

/// Each with more than one attention group: experts over the groups, over groups and ranks, and each expert over all ranks.
const DATA_PARALLEL: [Layout; 3] = [
    Layout { prefill_tp: 2, decode: &["--decode-tp", "1", "--decode-dp", "2", "--decode-ep", "2"], every: 4 },
    Layout { prefill_tp: 1, decode: &["--decode-tp", "2", "--decode-dp", "2", "--decode-ep", "4"], every: 4 },
    Layout { prefill_tp: 4, decode: &["--decode-tp", "1", "--decode-dp", "2", "--decode-ep", "1"], every: 4 },
];

fn layouts() -> impl Iterator<Item = Layout> {
    let decodes: [&[&str]; 3] = [&["--decode-tp", "1"], &["--decode-tp", "2"], &["--decode-tp", "4"]];
    let tensor_parallel =
        [1, 2, 4].into_iter().flat_map(move |prefill_tp| decodes.map(|decode| Layout { prefill_tp, decode, every: 1 }));
    tensor_parallel.chain(DATA_PARALLEL)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_case_is_answered_rightly_in_every_layout() -> anyhow::Result<()> {
    let cases = Arc::new(chat_cases()?);
    ensure!(!cases.is_empty(), "no chat cases");
    let vocabulary = tests::cases::nano_vocabulary()?;
    let mut failures = Vec::new();
    for Layout { prefill_tp, decode, every } in layouts() {
        let name = format!("prefill TP{prefill_tp} {}", decode.join(" "));
        let prefill_tp = prefill_tp.to_string();
        let args = [&["--prefill-tp", &prefill_tp], decode].concat();
        let stack = Stack::start(env!("CARGO_BIN_EXE_damask-under-test"), &args)?;
        let outcomes: Vec<_> = stream::iter(cases.iter().step_by(every).enumerate())
            .map(|(i, case)| answer(&stack, case, i % 2 == 0, &vocabulary))
            .buffer_unordered(CONCURRENCY)
            .collect()
            .await;
        let num_cases = outcomes.len();
        failures.extend(outcomes.into_iter().filter_map(Result::err).map(|error| format!("{name}: {error:#}")));
        let admin = &stack.addresses.admin;
        wait_all_pages_free(&[&admin["prefill"], &admin["decode"]]).await?;
        stack.stop()?;
        println!("{name}: {num_cases} cases, {} failures so far", failures.len());
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
