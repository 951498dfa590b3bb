//! `POST /v1/responses`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures_util::Stream;
use serde_json::Value;
use types::RequestId;

use super::{body, sse};
use crate::answers::{Answers, Update};
use crate::error::ApiError;
use crate::responses::{self, ResponseWriter};
use crate::service::{Call, Job, Service, offload};

pub(super) async fn create(
    State(service): State<Arc<Service>>,
    Extension(call): Extension<Call>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let slot = service.admit()?;
    let bytes = body::read(&headers, body, &service.config.limits).await?;
    let preparing = Arc::clone(&service);
    let (request, prompt) = offload(bytes.len(), move || {
        let request = responses::lower(&body::parse(&bytes)?, &preparing.lowering_context())?;
        preparing.check_model(request.model.as_deref())?;
        let prompt = preparing.render(&request.plan.conversation, "text.format")?;
        Ok((request, prompt))
    })
    .await?;
    let head = service.response_head();
    let writer = ResponseWriter::new(head.key, request.settings(&head));
    let stream = request.stream;
    let answers = service.answer(&call, Job::chat(request.plan, prompt, "input"), slot).await?;
    if stream {
        let events = events(Arc::clone(&service), call.id.clone(), writer, answers);
        return Ok(sse::response(&service, call.id, events));
    }
    Ok(Json(whole(writer, answers).await?).into_response())
}

fn events(
    service: Arc<Service>,
    id: RequestId,
    mut writer: ResponseWriter,
    mut answers: Answers,
) -> impl Stream<Item = Event> {
    async_stream::stream! {
        let mut events = Vec::new();
        writer.start(&mut events);
        loop {
            for event in events.drain(..) {
                yield sse::named(event.name, &event.data);
            }
            match answers.next().await {
                None => break,
                Some(Ok(event)) => match event.update {
                    Update::Piece(piece) => writer.piece(&piece.delta, &mut events),
                    Update::End(end) => {
                        writer.finish(&end, answers.cost(), &mut events);
                    }
                },
                Some(Err(error)) => {
                    service.broke_off(&id, &error);
                    writer.fail(&error, &mut events);
                    for event in events.drain(..) {
                        yield sse::named(event.name, &event.data);
                    }
                    return;
                }
            }
        }
    }
}

async fn whole(mut writer: ResponseWriter, mut answers: Answers) -> Result<Value, ApiError> {
    let mut events = Vec::new();
    while let Some(event) = answers.next().await {
        match event?.update {
            Update::Piece(piece) => writer.piece(&piece.delta, &mut events),
            Update::End(end) => return Ok(writer.finish(&end, answers.cost(), &mut events)),
        }
        events.clear();
    }
    Err(ApiError::Internal { message: "the answer broke off".into() })
}
