//! `POST /v1/responses`; `GET` and `DELETE` of `/v1/responses/{id}`, where responses are kept.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::http::HeaderMap;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures_util::Stream;
use serde_json::{Value, json};
use types::RequestId;

use super::edge::PathId;
use super::{body, sse};
use crate::answers::{Answers, Update};
use crate::caller::Caller;
use crate::constraint::SchemaParams;
use crate::error::ApiError;
use crate::responses::{self, History, ResponseWriter};
use crate::service::{Call, Job, Service, offload};
use crate::store::{KeptResponses, StoreError};

pub(super) async fn create(
    State(service): State<Arc<Service>>,
    Extension(call): Extension<Call>,
    Extension(caller): Extension<Arc<Caller>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let slot = service.admit(&caller)?;
    let bytes = body::read(&headers, body, &service.config.limits).await?;
    let room = service.room(bytes.len()).await;
    let body = offload(&room, move || body::parse(&bytes)).await?;
    let history = history(&service, &caller, &body).await?;
    // What is remembered may be long where the request is short.
    let room = if history.earlier.is_empty() || room.is_held() { room } else { service.large_room().await };
    let preparing = Arc::clone(&service);
    let (request, prompt) = offload(&room, move || {
        let request = responses::lower(&body, history, &preparing.lowering_context())?;
        preparing.check_model(request.model.as_deref())?;
        let prompt = preparing.render(&request.plan.conversation, SchemaParams::RESPONSES)?;
        Ok((request, prompt))
    })
    .await?;
    drop(room);
    let head = service.response_head();
    let writer = ResponseWriter::new(head.key, request.settings(&head));
    let stream = request.stream;
    let keeper = request.input.map(|input| Keeper { service: Arc::clone(&service), caller, input });
    let answers = service.answer(&call, Job::chat(request.plan, prompt, "input"), slot).await?;
    if stream {
        let events = events(Arc::clone(&service), call.id.clone(), writer, answers, keeper);
        return Ok(sse::response(&service, call.id, events));
    }
    Ok(Json(whole(writer, answers, keeper).await?).into_response())
}

/// What the server remembers for this request.
async fn history(service: &Service, caller: &Caller, body: &Value) -> Result<History, ApiError> {
    let Some(kept) = &service.kept_responses else { return Ok(History::default()) };
    let Some(id) = responses::previous_response_id(body) else {
        return Ok(History { is_kept: true, earlier: Vec::new() });
    };
    match kept.get(caller.name(), id).await.map_err(|error| store_failed(&error))? {
        Some(previous) => Ok(History { is_kept: true, earlier: previous.conversation }),
        None => Err(ApiError::InvalidRequest {
            message: format!("no response `{id}` is kept here: it may have expired or been deleted"),
            param: Some("previous_response_id".into()),
            code: Some("previous_response_not_found"),
        }),
    }
}

/// Keeps a response once it is finished.
struct Keeper {
    service: Arc<Service>,
    caller: Arc<Caller>,
    /// The conversation up to the answer.
    input: Vec<Value>,
}

impl Keeper {
    /// A finished answer is worth more than its record: a store that fails is logged, and the client gets its answer all the same.
    async fn keep(self, response: &Value) {
        let Some(kept) = &self.service.kept_responses else { return };
        let mut conversation = self.input;
        conversation.extend(response["output"].as_array().into_iter().flatten().cloned());
        if let Err(error) = kept.put(self.caller.name(), response.clone(), conversation).await {
            tracing::error!(%error, "a response could not be kept");
        }
    }
}

fn store_failed(error: &StoreError) -> ApiError {
    tracing::error!(%error, "the store of responses failed");
    ApiError::Internal { message: "the store of responses failed".into() }
}

pub(super) async fn retrieve(
    State(service): State<Arc<Service>>,
    Extension(caller): Extension<Arc<Caller>>,
    PathId(id): PathId,
    RawQuery(query): RawQuery,
) -> Result<Json<Value>, ApiError> {
    if query.is_some_and(|query| query.split('&').any(|field| field == "stream=true")) {
        return Err(ApiError::unsupported("stream", "kept responses are not streamed again"));
    }
    let found = kept(&service)?.get(caller.name(), &id).await.map_err(|error| store_failed(&error))?;
    found.map(|kept| Json(kept.response)).ok_or(ApiError::UnknownResponse { id })
}

pub(super) async fn delete(
    State(service): State<Arc<Service>>,
    Extension(caller): Extension<Arc<Caller>>,
    PathId(id): PathId,
) -> Result<Json<Value>, ApiError> {
    if !kept(&service)?.delete(caller.name(), &id).await.map_err(|error| store_failed(&error))? {
        return Err(ApiError::UnknownResponse { id });
    }
    Ok(Json(json!({ "id": id, "object": "response", "deleted": true })))
}

fn kept(service: &Service) -> Result<&KeptResponses, ApiError> {
    service.kept_responses.as_ref().ok_or_else(|| ApiError::InvalidRequest {
        message: "this server stores no responses".into(),
        param: None,
        code: Some("unsupported_value"),
    })
}

fn events(
    service: Arc<Service>,
    id: RequestId,
    mut writer: ResponseWriter,
    mut answers: Answers,
    mut keeper: Option<Keeper>,
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
                        let response = writer.finish(&end, answers.cost(), &mut events);
                        // Before the client hears of the end: its next request may name this response.
                        if let Some(keeper) = keeper.take() {
                            keeper.keep(&response).await;
                        }
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

async fn whole(mut writer: ResponseWriter, mut answers: Answers, keeper: Option<Keeper>) -> Result<Value, ApiError> {
    let mut events = Vec::new();
    while let Some(event) = answers.next().await {
        match event?.update {
            Update::Piece(piece) => writer.piece(&piece.delta, &mut events),
            Update::End(end) => {
                let response = writer.finish(&end, answers.cost(), &mut events);
                if let Some(keeper) = keeper {
                    keeper.keep(&response).await;
                }
                return Ok(response);
            }
        }
        events.clear();
    }
    Err(ApiError::Internal { message: "the answer broke off".into() })
}
