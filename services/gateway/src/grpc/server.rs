//! The async side of `Gateway.Chat`.

use std::sync::Arc;
use std::time::Duration;

use format::chat::{ChatFinish, Delta, TextDelta};
use futures_util::stream::{BoxStream, Stream, StreamExt};
use http::StatusCode;
use tonic::{Code, Request, Response, Status};
use types::RequestId;
use wire::pb::chat_response::Event;
use wire::pb::{self, gateway_server::Gateway};

use super::lower::{self, ChatCall};
use crate::answers::{Answers, Update};
use crate::chat::ResponseHead;
use crate::constraint::SchemaParams;
use crate::delivery::deliver;
use crate::error::ApiError;
use crate::ids::ResponseKey;
use crate::metrics::RequestLabels;
use crate::service::{Call, Job, Service, offload};
use crate::usage::Cost;

/// What metrics call it.
const CHAT_ROUTE: &str = "/damask.v1.Gateway/Chat";

/// Serves `Gateway.Chat`.
pub(crate) struct ChatServer {
    service: Arc<Service>,
}

impl ChatServer {
    pub(super) fn new(service: Arc<Service>) -> Self {
        Self { service }
    }

    async fn start(&self, request: Request<pb::ChatRequest>) -> Result<(Call, u64, Answers), ApiError> {
        let trace = request.metadata().clone();
        let authorization = trace.get("authorization").and_then(|value| value.to_str().ok());
        let slot = self.service.admit(self.service.keys.admit(authorization)?)?;
        let deadline = grpc_timeout(&trace);
        let request = request.into_inner();
        let bytes = prost::Message::encoded_len(&request);
        let (preparing, room) = (Arc::clone(&self.service), self.service.room(bytes).await);
        let (ChatCall { id, plan, timeout, .. }, prompt) = offload(&room, move || {
            let call = lower::lower(request, &preparing.lowering_context())?;
            preparing.check_model(call.model.as_deref())?;
            let prompt = preparing.render(&call.plan.conversation, SchemaParams::GRPC)?;
            Ok((call, prompt))
        })
        .await?;
        drop(room);
        let id = id.unwrap_or_else(Call::draw_id);
        let span = tracing::info_span!("request", request_id = %id, otel.name = CHAT_ROUTE, otel.kind = "server");
        wire::trace::adopt(&span, &trace);
        let call = Call { id, trace, span };
        let seed = plan.sampling.seed;
        let timeout = [timeout, deadline].into_iter().flatten().min();
        let job = Job { timeout, ..Job::chat(plan, prompt, "messages") };
        let answers = self.service.answer(&call, job, slot).await?;
        Ok((call, seed, answers))
    }
}

#[tonic::async_trait]
impl Gateway for ChatServer {
    type ChatStream = BoxStream<'static, Result<pb::ChatResponse, Status>>;

    async fn chat(&self, request: Request<pb::ChatRequest>) -> Result<Response<Self::ChatStream>, Status> {
        let outcome = self.start(request).await;
        let status = outcome.as_ref().map_or_else(ApiError::status, |_| StatusCode::OK).as_u16();
        self.service.metrics.requests.get_or_create(&RequestLabels { route: CHAT_ROUTE.into(), status }).inc();
        let (call, seed, answers) = outcome.map_err(|error| to_status(&error))?;
        let head = self.service.response_head();
        let events = events(Arc::clone(&self.service), call.id.clone(), head, seed, answers);
        let given_up = Err(to_status(&ApiError::NotRead));
        Ok(Response::new(deliver(&self.service, call.id, events, given_up).boxed()))
    }
}

fn events(
    service: Arc<Service>,
    id: RequestId,
    head: ResponseHead,
    seed: u64,
    mut answers: Answers,
) -> impl Stream<Item = Result<pb::ChatResponse, Status>> {
    let response = |event| Ok(pb::ChatResponse { event: Some(event) });
    async_stream::stream! {
        let started = pb::ChatStarted { request_id: id.to_string(), model: head.model.clone(), seed };
        yield response(Event::Started(started));
        while let Some(event) = answers.next().await {
            match event.map(|event| event.update) {
                Ok(Update::Piece(piece)) => yield response(delta(piece.delta, head.key)),
                Ok(Update::End(end)) => yield response(Event::Finished(finished(end.reason, answers.cost()))),
                Err(error) => {
                    service.broke_off(&id, &error);
                    yield Err(to_status(&error));
                    return;
                }
            }
        }
    }
}

fn delta(delta: Delta, key: ResponseKey) -> Event {
    let text = |TextDelta { message_idx, text, .. }| pb::TextDelta { text, message_index: message_idx };
    match delta {
        Delta::Reasoning(delta) => Event::Reasoning(text(delta)),
        Delta::Content(delta) => Event::Content(text(delta)),
        Delta::ToolCall(call) => Event::ToolCall(pb::ToolCallDelta {
            index: call.index,
            id: call.name.is_some().then(|| key.call_id(0, call.index)),
            name: call.name,
            arguments: call.arguments,
            message_index: call.message_idx,
        }),
    }
}

fn finished(reason: ChatFinish, cost: Cost) -> pb::ChatFinished {
    let reason = match reason {
        ChatFinish::Stop => pb::ChatFinishReason::Stop,
        ChatFinish::Length => pb::ChatFinishReason::Length,
        ChatFinish::ToolCalls => pb::ChatFinishReason::ToolCalls,
    };
    let Cost { prompt_tokens, cached_tokens, output_tokens, reasoning_tokens } = cost;
    let usage = pb::ChatUsage { prompt_tokens, cached_tokens, output_tokens, reasoning_tokens };
    pb::ChatFinished { reason: reason.into(), usage: Some(usage) }
}

/// The deadline that a client set on its call, as the time that was left when it sent it: at most 8 digits and a unit
/// (gRPC over HTTP2, "Timeout").
fn grpc_timeout(metadata: &tonic::metadata::MetadataMap) -> Option<Duration> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let value = digits.parse::<u64>().ok().filter(|_| digits.len() <= 8)?;
    match unit {
        "H" => Some(Duration::from_secs(value * 3600)),
        "M" => Some(Duration::from_secs(value * 60)),
        "S" => Some(Duration::from_secs(value)),
        "m" => Some(Duration::from_millis(value)),
        "u" => Some(Duration::from_micros(value)),
        "n" => Some(Duration::from_nanos(value)),
        _ => None,
    }
}

fn to_status(error: &ApiError) -> Status {
    let (code, reason) = match error {
        ApiError::InvalidRequest { .. } => (Code::InvalidArgument, "INVALID_REQUEST"),
        ApiError::BodyTooLarge { .. } => (Code::InvalidArgument, "REQUEST_TOO_LARGE"),
        ApiError::Unauthorized { .. } => (Code::Unauthenticated, "INVALID_API_KEY"),
        ApiError::Forbidden { .. } => (Code::PermissionDenied, "KEY_SUSPENDED"),
        ApiError::UnknownResponse { .. } => (Code::NotFound, "RESPONSE_NOT_FOUND"),
        ApiError::UnsupportedMediaType { .. } => (Code::InvalidArgument, "UNSUPPORTED_MEDIA_TYPE"),
        ApiError::NotRead => (Code::DeadlineExceeded, "NOT_READ"),
        ApiError::UnknownModel { .. } => (Code::NotFound, "MODEL_NOT_FOUND"),
        ApiError::UnknownPath { .. } | ApiError::MethodNotAllowed { .. } => (Code::Unimplemented, "UNKNOWN_METHOD"),
        ApiError::BodyTimeout { .. } | ApiError::DeadlineExceeded => (Code::DeadlineExceeded, "DEADLINE_EXCEEDED"),
        ApiError::Overloaded { .. } => (Code::ResourceExhausted, "OVERLOADED"),
        ApiError::Unavailable { .. } => (Code::Unavailable, "UNAVAILABLE"),
        ApiError::Internal { .. } => (Code::Internal, "INTERNAL"),
    };
    wire::status::with_code(code, reason, error.to_string(), error.retry_after())
}

#[cfg(test)]
mod tests {
    use tonic::metadata::MetadataMap;

    use super::*;

    #[test]
    fn timeouts_are_read_as_grpc_writes_them() {
        for (text, expected) in [
            ("1S", Some(Duration::from_secs(1))),
            ("99999999H", Some(Duration::from_secs(99_999_999 * 3600))),
            ("250m", Some(Duration::from_millis(250))),
            ("7u", Some(Duration::from_micros(7))),
            ("123456789S", None),
            ("1", None),
            ("", None),
            ("S", None),
            ("-1S", None),
        ] {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", text.parse().unwrap());
            assert_eq!(grpc_timeout(&metadata), expected, "{text}");
        }
    }

    #[test]
    fn a_refusal_carries_reason_and_delay() {
        let error = ApiError::Overloaded { message: "full".into(), retry_after: Duration::from_secs(2) };
        let status = to_status(&error);
        assert_eq!((status.code(), status.message()), (Code::ResourceExhausted, "full"));
        assert_eq!(wire::status::reason(&status).as_deref(), Some("OVERLOADED"));
        assert_eq!(wire::status::retry_after(&status), Some(Duration::from_secs(2)));
    }
}
