//! Tokens in, tokens out: `damask.v1.Inference` from Rust. With a stack running (`damask up`):
//!
//! ```sh
//! cargo run --release -p tests --example generate -- 127.0.0.1:9000
//! ```

use std::time::Duration;

use anyhow::{Context, ensure};
use tonic::{Code, Request, Status};
use wire::pb::generate_response::Event;
use wire::pb::inference_client::InferenceClient;
use wire::pb::{GenerateRequest, GetModelInfoRequest, Sampling};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let router = std::env::args().nth(1).context("usage: generate ROUTER, for example 127.0.0.1:9000")?;
    let mut client = InferenceClient::connect(format!("http://{router}")).await?;

    let info = client.get_model_info(GetModelInfoRequest {}).await?.into_inner();
    let model = info.fingerprint.context("a router that serves says what it serves")?.model;
    println!("{model}: contexts of up to {} tokens, {} ready pairs", info.max_context_tokens, info.ready_pairs);

    // A stream, with a time limit for the whole of it. The deadline travels with the call, and the servers keep it.
    let mut call = Request::new(request(16));
    call.set_timeout(Duration::from_secs(30));
    let mut stream = client.generate(call).await?.into_inner();
    let mut tokens = Vec::new();
    while let Some(response) = stream.message().await? {
        match response.event.context("every message has an event")? {
            Event::Started(started) => println!("request {} with seed {}", started.request_id, started.seed),
            Event::Tokens(run) => tokens.extend(run.tokens.into_iter().map(|token| token.id)),
            Event::Finished(finished) => println!("{tokens:?}, {:?}", finished.reason()),
        }
    }
    ensure!(tokens.len() == 16, "16 tokens were asked for");

    // A deadline that cannot be met.
    let mut call = Request::new(request(4000));
    call.set_timeout(Duration::from_millis(100));
    let status = ended(client.generate(call).await?.into_inner()).await.context("a deadline ends the stream")?;
    // Whoever notices first says so: the server by DEADLINE_EXCEEDED, this client's own timer by CANCELLED.
    ensure!(matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled), "{status:?}");
    println!("deadline: {:?}", status.code());

    // Dropping a stream cancels the request: its pages on both workers are free again within a step.
    let mut stream = client.generate(request(4000)).await?.into_inner();
    stream.message().await?.context("a stream begins with Started")?;
    drop(stream);

    // A refusal says why, for people, for programs, and whether it makes sense to come again.
    let refused = client.generate(GenerateRequest::default()).await.err().context("an empty prompt is refused")?;
    let (reason, retry_after) = (wire::status::reason(&refused), wire::status::retry_after(&refused));
    ensure!(refused.code() == Code::InvalidArgument && reason.is_some() && retry_after.is_none(), "{refused:?}");
    println!("refused: {} ({})", refused.message(), reason.unwrap_or_default());
    Ok(())
}

fn request(max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        prompt_tokens: (1..40).collect(),
        max_tokens: Some(max_tokens),
        ignore_eos: true,
        sampling: Some(Sampling { temperature: Some(0.0), ..Sampling::default() }),
        ..GenerateRequest::default()
    }
}

/// Reads a stream to its end; the status, if that is an error.
async fn ended(mut stream: tonic::Streaming<wire::pb::GenerateResponse>) -> Option<Status> {
    loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            Ok(None) => return None,
            Err(status) => return Some(status),
        }
    }
}
