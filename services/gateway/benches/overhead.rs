//! What the gateway adds to a request: HTTP, parsing, rendering, gRPC to a router that answers at once, and back, on
//! loopback. The router is in this process and costs time too, so the figures are upper bounds. `render` is the share
//! of rendering and tokenizing alone. Gate: whole minus render below 1 ms at the median.

#![allow(clippy::unwrap_used, reason = "a bench that panics has failed")]

#[path = "../tests/support/mod.rs"]
mod support;

use divan::Bencher;
use format::chat::completions;
use gateway::config::ModelSource;
use gateway::served_model::ServedModel;
use serde_json::{Value, json};
use support::{Fleet, Step, config};
use types::FinishReason;

fn main() {
    divan::main();
}

const PROMPT_WORDS: usize = 1_000;

fn body() -> Value {
    json!({ "messages": [{ "role": "user", "content": " the".repeat(PROMPT_WORDS) }], "max_tokens": 1 })
}

#[divan::bench(sample_count = 300)]
fn whole(bencher: Bencher<'_, '_>) {
    request(bencher, body());
}

#[divan::bench(sample_count = 300)]
fn streamed(bencher: Bencher<'_, '_>) {
    let mut body = body();
    body["stream"] = true.into();
    request(bencher, body);
}

fn request(bencher: Bencher<'_, '_>, body: Value) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let last = Step::Finish(FinishReason::Length);
    let fleet = runtime.block_on(Fleet::answering(config(), "a", last));
    bencher.bench_local(|| {
        runtime.block_on(async { fleet.post("/v1/chat/completions", body.clone()).await.bytes().await })
    });
    drop(fleet);
    runtime.shutdown_background();
}

#[divan::bench]
fn render(bencher: Bencher<'_, '_>) {
    let model = ServedModel::load(&ModelSource::EmbeddedNano).unwrap();
    let conversation = completions::conversation(&body()).unwrap();
    bencher.bench_local(|| model.format.render(&conversation).unwrap().tokens.len());
}
