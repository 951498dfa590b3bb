//! From an answer to its client's connection, through a small buffer: a client that reads slowly makes the answer wait, and so the generation
//! behind it; one that does not read at all is given up.

use std::pin::pin;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use types::RequestId;

use crate::service::Service;

/// Events that may wait for a client.
const BUFFERED_EVENTS: usize = 64;

/// Runs `events` in a task and passes them on. They are dropped, and so cancelled, at once when the returned stream is, and when nothing was
/// taken from it for the configured time although there was something; it then ends with `given_up`.
pub(crate) fn deliver<T: Send + 'static>(
    service: &Service,
    id: RequestId,
    events: impl Stream<Item = T> + Send + 'static,
    given_up: T,
) -> impl Stream<Item = T> + Send + 'static {
    let (sender, receiver) = mpsc::channel(BUFFERED_EVENTS);
    let (last_sender, last) = oneshot::channel();
    let patience = Duration::from_millis(service.config.limits.slow_reader_timeout_ms);
    service.tasks.spawn("answer", async move {
        if forward(events, sender, patience).await == Outcome::NotRead {
            tracing::warn!(request_id = %id, ?patience, "client does not read its answer, giving up");
            // Nobody may be there to hear it.
            let _ = last_sender.send(given_up);
        }
    });
    ReceiverStream::new(receiver).chain(futures_util::stream::once(last).filter_map(async |last| last.ok()))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// All was passed on, or the client is gone.
    Done,
    NotRead,
}

async fn forward<T>(events: impl Stream<Item = T>, sender: mpsc::Sender<T>, patience: Duration) -> Outcome {
    let mut events = pin!(events);
    loop {
        let event = tokio::select! {
            biased;
            () = sender.closed() => None,
            event = events.next() => event,
        };
        let Some(event) = event else { return Outcome::Done };
        match tokio::time::timeout(patience, sender.send(event)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Outcome::Done,
            Err(_) => return Outcome::NotRead,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn patience_is_for_clients_that_stand_still_not_for_slow_ones() {
        let (sender, mut receiver) = mpsc::channel(1);
        let forwarding = forward(futures_util::stream::iter(0..5), sender, PATIENCE);
        let reading = async {
            let mut read = 0;
            while read < 3 {
                tokio::time::sleep(PATIENCE / 2).await;
                read += usize::from(receiver.recv().await.is_some());
            }
            tokio::time::sleep(2 * PATIENCE).await;
        };
        let (outcome, ()) = tokio::join!(forwarding, reading);
        assert_eq!(outcome, Outcome::NotRead);
    }

    #[tokio::test]
    async fn a_client_that_is_gone_ends_it_at_once() {
        let (sender, receiver) = mpsc::channel::<()>(1);
        drop(receiver);
        assert_eq!(forward(futures_util::stream::pending(), sender, PATIENCE).await, Outcome::Done);
    }
}
