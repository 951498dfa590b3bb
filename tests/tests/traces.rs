//! One trace from the HTTP request to decode: the spans of all four services reach a collector, each below its caller's.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use tests::stack::Stack;
use tokio::task::JoinSet;
use tonic::{Request, Response, Status};

const TRACE_ID: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER_SPAN_ID: &str = "00f067aa0ba902b7";
/// Spans are sent in batches, every few seconds, and at the latest when a service ends.
const ARRIVE_WITHIN: Duration = Duration::from_secs(20);

/// Spans by (service, name).
type Spans = Arc<Mutex<HashMap<(String, String), Span>>>;

/// Keeps what it is sent.
struct TestCollector(Spans);

#[tonic::async_trait]
impl TraceService for TestCollector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for resource_spans in request.into_inner().resource_spans {
            let attributes = resource_spans.resource.map(|resource| resource.attributes).unwrap_or_default();
            let service = attributes.into_iter().find(|attribute| attribute.key == "service.name");
            let service = match service.and_then(|attribute| attribute.value?.value) {
                Some(Value::StringValue(service)) => service,
                other => format!("{other:?}"),
            };
            for span in resource_spans.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                self.0.lock().expect("no holder panics").insert((service.clone(), span.name.clone()), span);
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_one_trace_through_all_services() -> anyhow::Result<()> {
    let spans = Spans::default();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let endpoint = format!("http://{}", listener.local_addr()?);
    let server = tonic::transport::Server::builder()
        .add_service(TraceServiceServer::new(TestCollector(Arc::clone(&spans))))
        .serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener));
    let mut tasks = JoinSet::new();
    tasks.spawn(server);

    let stack = Stack::start(env!("CARGO_BIN_EXE_damask-under-test"), &["--otlp-endpoint", &endpoint])?;
    let body = serde_json::json!({"messages": [{"role": "user", "content": "What is the capital of France?"}]});
    let response = reqwest::Client::new()
        .post(format!("{}/v1/chat/completions", stack.url()))
        .header("traceparent", format!("00-{TRACE_ID}-{CALLER_SPAN_ID}-01"))
        .json(&body)
        .send()
        .await?;
    ensure!(response.status().is_success(), "{}", response.status());
    response.bytes().await?;
    tokio::task::spawn_blocking(|| stack.stop()).await??;

    let (gateway, flight) = (("gateway", "POST /v1/chat/completions"), ("router", "flight"));
    let (prefill, transfer) = (("prefill", "prefill"), ("prefill", "kv_transfer"));
    let decode = ("decode", "decode");
    let deadline = Instant::now() + ARRIVE_WITHIN;
    let found = |(service, name): (&str, &str)| {
        spans.lock().unwrap().get(&(format!("damask-{service}"), name.to_owned())).cloned()
    };
    let expected = [gateway, flight, prefill, transfer, decode];
    while expected.iter().any(|key| found(*key).is_none()) && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let span = |key| found(key).with_context(|| format!("no span {key:?} among {:?}", spans.lock().unwrap().keys()));

    ensure!(hex(&span(gateway)?.parent_span_id) == CALLER_SPAN_ID, "the caller is the parent of the gateway's span");
    for (child, parent) in [(flight, gateway), (prefill, flight), (decode, flight), (transfer, prefill)] {
        ensure!(span(child)?.parent_span_id == span(parent)?.span_id, "{child:?} is not below {parent:?}");
    }
    for key in expected {
        ensure!(hex(&span(key)?.trace_id) == TRACE_ID, "{key:?} is in another trace");
    }
    let kv_bytes = span(decode)?.attributes.into_iter().find(|attribute| attribute.key == "kv_bytes");
    ensure!(
        matches!(kv_bytes.and_then(|attribute| attribute.value?.value), Some(Value::IntValue(bytes)) if bytes > 0),
        "the landing is recorded"
    );
    tasks.abort_all();
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
