//! What constraints cost a decode worker: tokens per second of eight sequences at once through the real stack, free and under the grammar of a
//! schema, in turns. gpt-oss-nano's steps are short: with a larger model the same masks weigh less.
//!
//! `cargo bench -p tests --bench constrained`

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, ensure};
use format::chat::{ChatFormat, completions};
use format::harmony::Harmony;
use futures_util::future::try_join_all;
use serde_json::json;
use tests::router::{generate, greedy};
use tests::stack::Stack;

const SEQUENCES: u64 = 8;
const TOKENS: u32 = 256;
const ROUNDS: usize = 5;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    let stack = Stack::start(env!("CARGO_BIN_EXE_damask-under-test"), &[])?;
    let harmony = Harmony::new(Arc::new(tests::cases::nano_vocabulary()?))?;
    let row = json!({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"], "additionalProperties": false});
    let body = json!({"messages": [{"role": "user", "content": "Count from 1 to 5."}], "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "rows", "strict": true, "schema":
            {"type": "object", "properties": {"rows": {"type": "array", "minItems": 100, "items": row}},
            "required": ["rows"], "additionalProperties": false}}}});
    let conversation = completions::conversation(&body)?;
    let mut free = greedy(&harmony.render(&conversation)?.tokens, TOKENS);
    free.ignore_eos = true;
    let mut constrained = free.clone();
    let turn = harmony.constraint(&conversation).context("a schema asks for a grammar")?;
    constrained.constraint = Some(turn.grammar.into());
    println!("round  free tokens/s  constrained tokens/s");
    for round in 0..=ROUNDS {
        let mut rates = Vec::new();
        for request in [&free, &constrained] {
            let begun = Instant::now();
            let requests = (0..SEQUENCES).map(|seed| {
                let mut request = request.clone();
                request.sampling.get_or_insert_default().seed = Some(seed);
                generate(&stack.addresses.router, request)
            });
            let tokens: usize = try_join_all(requests).await?.iter().map(|generated| generated.tokens.len()).sum();
            ensure!(tokens == SEQUENCES as usize * TOKENS as usize, "{tokens} tokens came");
            rates.push(tokens as f64 / begun.elapsed().as_secs_f64());
        }
        // The first round warms up.
        if round > 0 {
            println!("{round:5}  {:13.0}  {:20.0}", rates[0], rates[1]);
        }
    }
    stack.stop()
}
