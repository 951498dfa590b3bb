//! Answers as server-sent events.

use std::convert::Infallible;
use std::pin::pin;
use std::time::Duration;

use axum::http::HeaderValue;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, StreamExt};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use types::RequestId;

use crate::error::ApiError;
use crate::service::Service;

/// A comment is sent after this much silence, so that proxies keep the connection while a prompt is computed.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// Events that may wait for a client that reads slowly; then the answer waits, and so does the generation behind it.
const BUFFERED_EVENTS: usize = 64;

/// A response that sends `events` as they come. They are dropped, and so cancelled, at once when the client is gone,
/// and when it has read nothing for the configured time although there was something to read.
pub(super) fn response(
    service: &Service,
    id: RequestId,
    events: impl Stream<Item = Event> + Send + 'static,
) -> Response {
    let (sender, receiver) = mpsc::channel(BUFFERED_EVENTS);
    let patience = Duration::from_millis(service.config.limits.slow_reader_timeout_ms);
    service.tasks.spawn("answer", forward(id, events, sender, patience));
    let events = ReceiverStream::new(receiver).map(Ok::<_, Infallible>);
    let mut response =
        Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE_INTERVAL).text("keep-alive")).into_response();
    // nginx would collect events otherwise.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

async fn forward(id: RequestId, events: impl Stream<Item = Event>, sender: mpsc::Sender<Event>, patience: Duration) {
    let mut events = pin!(events);
    loop {
        let event = tokio::select! {
            biased;
            () = sender.closed() => None,
            event = events.next() => event,
        };
        let Some(event) = event else { return };
        match tokio::time::timeout(patience, sender.send(event)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return,
            Err(_) => {
                tracing::warn!(request_id = %id, ?patience, "client does not read its answer, giving up");
                return;
            }
        }
    }
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
