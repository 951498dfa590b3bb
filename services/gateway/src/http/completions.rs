//! `POST /v1/completions`.

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
use crate::chat::ResponseHead;
use crate::completions::{self, CompletionWriter, FoldedCompletion, TextCompletion};
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
    let preparing = Arc::clone(&service);
    let request = offload(bytes.len(), move || {
        let context = preparing.lowering_context();
        let body = body::parse(&bytes)?;
        let request = completions::lower(&body, preparing.model.vocabulary(), context.drawn_seed, context.choices_max)?;
        preparing.check_model(request.model.as_deref())?;
        Ok(request)
    })
    .await?;
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
    let answers = service.answer(&call, job, slot).await?;
    let head = service.response_head();
    if request.stream {
        let events = events(Arc::clone(&service), call.id.clone(), head, answers, request.include_usage);
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
        let num_answers = answers.num_answers() as usize;
        let mut writer = CompletionWriter::new(&head, service.model.vocabulary(), num_answers, include_usage);
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
) -> Result<TextCompletion, ApiError> {
    let vocabulary = service.model.vocabulary();
    let mut folded: Vec<_> = (0..answers.num_answers()).map(|_| FoldedCompletion::default()).collect();
    while let Some(event) = answers.next().await {
        let event = event?;
        let answer = &mut folded[event.index as usize];
        match event.update {
            Update::Piece(piece) => answer.push(&piece, vocabulary),
            Update::End(end) => answer.finish(end.reason),
        }
    }
    Ok(CompletionWriter::new(head, vocabulary, folded.len(), false).whole(folded, answers.cost(), with_logprobs))
}
