//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};

use super::{body, choices, sse};
use crate::caller::Caller;
use crate::chat::{self, ChatCompletion, ChunkWriter};
use crate::constraint::SchemaParams;
use crate::error::ApiError;
use crate::service::{Call, Job, Service, offload};

pub(super) async fn create(
    State(service): State<Arc<Service>>,
    Extension(call): Extension<Call>,
    Extension(caller): Extension<Arc<Caller>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let slot = service.admit(&caller)?;
    let bytes = body::read(&headers, body, &service.config.limits).await?;
    let (preparing, room) = (Arc::clone(&service), service.room(bytes.len()).await);
    let (request, prompt) = offload(&room, move || {
        let request = chat::lower(&body::parse(&bytes)?, &preparing.lowering_context())?;
        preparing.check_model(request.model.as_deref())?;
        let prompt = preparing.render(&request.plan.conversation, SchemaParams::CHAT)?;
        Ok((request, prompt))
    })
    .await?;
    drop(room);
    let with_logprobs = request.plan.sampling.logprobs.is_some();
    let (stream, include_usage) = (request.stream, request.include_usage);
    let mut answers = service.answer(&call, Job::chat(request.plan, prompt, "messages"), slot).await?;
    let head = service.response_head();
    if stream {
        let vocabulary = Arc::clone(service.model.vocabulary());
        let writer = ChunkWriter::new(head, vocabulary, answers.num_answers(), include_usage);
        let events = choices::events(Arc::clone(&service), call.id.clone(), writer, answers);
        return Ok(sse::response(&service, call.id, events));
    }
    let folded = choices::folded(&service, &mut answers).await?;
    Ok(Json(ChatCompletion::new(&head, folded, answers.cost(), with_logprobs)).into_response())
}
