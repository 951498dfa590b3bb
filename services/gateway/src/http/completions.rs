//! `POST /v1/completions`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};

use super::{body, choices, sse};
use crate::caller::Caller;
use crate::completions::{self, CompletionWriter};
use crate::error::ApiError;
use crate::service::{Call, Job, Reader, Service, offload};

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
    let request = offload(&room, move || {
        let context = preparing.lowering_context();
        let body = body::parse(&bytes)?;
        let request = completions::lower(&body, preparing.model.vocabulary(), context.drawn_seed, context.choices_max)?;
        preparing.check_model(request.model.as_deref())?;
        Ok(request)
    })
    .await?;
    drop(room);
    let with_logprobs = request.sampling.logprobs.is_some();
    let job = Job {
        constraint: None,
        prompts: request.prompts,
        choices_per_prompt: request.num_choices,
        sampling: request.sampling,
        max_tokens: Some(request.max_tokens),
        stop: request.stop,
        reader: Reader::Plain,
        timeout: None,
        prompt_param: "prompt",
    };
    let mut answers = service.answer(&call, job, slot).await?;
    let (head, vocabulary) = (service.response_head(), Arc::clone(service.model.vocabulary()));
    let writer = CompletionWriter::new(head, vocabulary, answers.num_answers(), request.include_usage);
    if request.stream {
        let events = choices::events(Arc::clone(&service), call.id.clone(), writer, answers);
        return Ok(sse::response(&service, call.id, events));
    }
    let folded = choices::folded(&service, &mut answers).await?;
    Ok(Json(writer.whole(folded, answers.cost(), with_logprobs)).into_response())
}
