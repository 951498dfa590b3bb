//! Answers as server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use axum::http::HeaderValue;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, StreamExt};
use serde::Serialize;
use types::RequestId;

use crate::delivery::deliver;
use crate::error::ApiError;
use crate::service::Service;

/// A comment is sent after this much silence, so that proxies keep the connection while a prompt is computed.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// A response that sends `events` as they come; see [`deliver`].
pub(super) fn response(
    service: &Service,
    id: RequestId,
    events: impl Stream<Item = Event> + Send + 'static,
) -> Response {
    let given_up = error(&ApiError::NotRead);
    let events = deliver(service, id, events, given_up).map(Ok::<_, Infallible>);
    let mut response =
        Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE_INTERVAL).text("keep-alive")).into_response();
    // nginx would collect events otherwise.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// One event without a name.
pub(super) fn data(body: &impl Serialize) -> Event {
    Event::default().json_data(body).expect("bodies have string keys only and no floats that are not numbers")
}

/// One event with a name.
pub(super) fn named(name: &str, body: &impl Serialize) -> Event {
    data(body).event(name)
}

/// The end of a complete stream.
pub(super) fn done() -> Event {
    Event::default().data("[DONE]")
}

/// The end of a stream that failed after its first byte.
pub(super) fn error(error: &ApiError) -> Event {
    named("error", &error.body())
}
