//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures_util::Stream;
use types::RequestId;

use super::{body, sse};
use crate::answers::{Answers, Update};
use crate::caller::Caller;
use crate::chat::{self, ChatCompletion, ChunkWriter, FoldedChoice, ResponseHead};
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
    let preparing = Arc::clone(&service);
    let (request, prompt) = offload(bytes.len(), move || {
        let request = chat::lower(&body::parse(&bytes)?, &preparing.lowering_context())?;
        preparing.check_model(request.model.as_deref())?;
        let prompt = preparing.render(&request.plan.conversation, SchemaParams::CHAT)?;
        Ok((request, prompt))
    })
    .await?;
    let with_logprobs = request.plan.sampling.logprobs.is_some();
    let (stream, include_usage) = (request.stream, request.include_usage);
    let answers = service.answer(&call, Job::chat(request.plan, prompt, "messages"), slot).await?;
    let head = service.response_head();
    if stream {
        let events = events(Arc::clone(&service), call.id.clone(), head, answers, include_usage);
        return Ok(sse::response(&service, call.id, events));
    }
    Ok(Json(whole(&service, &head, answers, with_logprobs).await?).into_response())
}

fn events(
    service: Arc<Service>,
    id: RequestId,
    head: ResponseHead,
    mut answers: Answers,
    include_usage: bool,
) -> impl Stream<Item = Event> {
    async_stream::stream! {
        let writer = ChunkWriter::new(&head, service.model.vocabulary(), include_usage);
        for choice in 0..answers.num_answers() {
            yield sse::data(&writer.first(choice));
        }
        while let Some(event) = answers.next().await {
            match event {
                Ok(event) => yield sse::data(&match event.update {
                    Update::Piece(piece) => writer.piece(event.index, &piece),
                    Update::End(end) => writer.last(event.index, end.reason),
                }),
                Err(error) => {
                    service.broke_off(&id, &error);
                    yield sse::error(&error);
                    return;
                }
            }
        }
        if let Some(usage) = writer.usage(answers.cost()) {
            yield sse::data(&usage);
        }
        yield sse::done();
    }
}

async fn whole(
    service: &Service,
    head: &ResponseHead,
    mut answers: Answers,
    with_logprobs: bool,
) -> Result<ChatCompletion, ApiError> {
    let mut choices: Vec<_> = (0..answers.num_answers()).map(|_| FoldedChoice::default()).collect();
    while let Some(event) = answers.next().await {
        let event = event?;
        let choice = &mut choices[event.index as usize];
        match event.update {
            Update::Piece(piece) => choice.push(&piece, service.model.vocabulary()),
            Update::End(end) => choice.finish(end.reason),
        }
    }
    Ok(ChatCompletion::new(head, choices, answers.cost(), with_logprobs))
}
