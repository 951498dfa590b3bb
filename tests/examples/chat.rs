//! Messages in, messages out: `damask.v1.Gateway` from Rust, with a client that comes again when it is asked to. With a stack running:
//!
//! ```sh
//! cargo run --release -p tests --example chat -- 127.0.0.1:8001 [API key]
//! ```

use anyhow::{Context, bail};
use tokio_stream::StreamExt;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Request, Status};
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use wire::pb::chat_message::Kind;
use wire::pb::chat_response::Event;
use wire::pb::gateway_client::GatewayClient;
use wire::pb::{ChatMessage, ChatRequest, Sampling, UserMessage};

const ATTEMPTS: u32 = 10;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let gateway = args.next().context("usage: chat GATEWAY [API key], for example 127.0.0.1:8001")?;
    let key = args.next().map(|key| format!("Bearer {key}").parse()).transpose()?;
    let channel = Channel::from_shared(format!("http://{gateway}"))?.connect().await?;
    println!("services: {}", services(channel.clone()).await?.join(", "));
    // Two at once: a key that may have one request at a time gets the second one refused, and the client comes again.
    let (capital, sum) = tokio::try_join!(
        ask_patiently(channel.clone(), key.clone(), "What is the capital of Senegal?"),
        ask_patiently(channel, key, "What is 12 + 30?"),
    )?;
    println!("{capital}\n{sum}");
    Ok(())
}

/// Asks until there is room, as often as makes sense.
async fn ask_patiently(channel: Channel, key: Option<MetadataValue<Ascii>>, question: &str) -> anyhow::Result<String> {
    for _ in 0..ATTEMPTS {
        let refused = match ask(channel.clone(), key.clone(), question).await {
            Ok(answer) => return Ok(answer),
            Err(status) => status,
        };
        // No RetryInfo: the same request would fail again.
        let Some(wait) = wire::status::retry_after(&refused) else { bail!("{question} {refused}") };
        println!("{question} refused ({}), asked to come again in {wait:?}", refused.message());
        tokio::time::sleep(wait).await;
    }
    bail!("{question} refused {ATTEMPTS} times")
}

async fn ask(channel: Channel, key: Option<MetadataValue<Ascii>>, question: &str) -> Result<String, Status> {
    let user = Kind::User(UserMessage { text: question.to_owned(), name: None });
    let mut call = Request::new(ChatRequest {
        messages: vec![ChatMessage { kind: Some(user) }],
        sampling: Some(Sampling { temperature: Some(0.0), ..Sampling::default() }),
        ..ChatRequest::default()
    });
    if let Some(key) = key {
        call.metadata_mut().insert("authorization", key);
    }
    let mut stream = GatewayClient::new(channel).chat(call).await?.into_inner();
    let mut answer = String::new();
    while let Some(response) = stream.message().await? {
        if let Some(Event::Content(delta)) = response.event {
            answer.push_str(&delta.text);
        }
    }
    Ok(answer)
}

/// What the port serves, by reflection: clients such as grpcurl need no .proto files.
async fn services(channel: Channel) -> anyhow::Result<Vec<String>> {
    let list = MessageRequest::ListServices(String::new());
    let request = ServerReflectionRequest { host: String::new(), message_request: Some(list) };
    let mut client = ServerReflectionClient::new(channel);
    let mut replies = client.server_reflection_info(tokio_stream::once(request)).await?.into_inner();
    let reply = replies.next().await.context("reflection answers")??;
    match reply.message_response {
        Some(MessageResponse::ListServicesResponse(list)) => {
            Ok(list.service.into_iter().map(|service| service.name).collect())
        }
        other => bail!("reflection answered {other:?}"),
    }
}
