//! The stream of one sequence, between the step loop, which never waits, and its reader, which may be slow.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::Stream;
use tokio::sync::mpsc;
use tonic::Status;
use tracing::Span;
use types::{DecodeEvent, Finished, SampledToken, TokenRun};
use wire::pb;
use worker::Mailbox;

use crate::error::DecodeError;
use crate::state::Message;

/// Events taken from the buffer at once; tokens among them travel in one message.
const MERGED_MAX: usize = 64;

/// How a sequence ended.
#[derive(Debug)]
pub(crate) enum End {
    Finished(Finished),
    Preempted,
    Failed(DecodeError),
}

#[derive(Debug)]
enum FlightEvent {
    Joined { kv_bytes: u64, landing_us: u64 },
    Token { index: u32, token: SampledToken },
    End(End),
}

/// The step loop's end. Nothing here waits.
#[derive(Debug)]
pub(crate) struct FlightSender {
    events: mpsc::Sender<FlightEvent>,
    /// Room for the end, set aside from the start: however slow the reader, the end always fits.
    end: Option<mpsc::OwnedPermit<FlightEvent>>,
    tokens_max: usize,
}

/// The reader has left, or is too far behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotSent {
    Left,
    Behind { waiting: usize },
}

impl FlightSender {
    /// Whether the reader has left.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.events.is_closed()
    }

    pub(crate) fn joined(&self, kv_bytes: u64, landing_us: u64) {
        // It is the first event, so there is room; a reader that left is found by `is_abandoned`.
        let _ = self.events.try_send(FlightEvent::Joined { kv_bytes, landing_us });
    }

    pub(crate) fn token(&self, index: u32, token: SampledToken) -> Result<(), NotSent> {
        self.events.try_send(FlightEvent::Token { index, token }).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => NotSent::Behind { waiting: self.tokens_max },
            mpsc::error::TrySendError::Closed(_) => NotSent::Left,
        })
    }

    pub(crate) fn end(mut self, end: End) {
        if let Some(permit) = self.end.take() {
            permit.send(FlightEvent::End(end));
        }
    }
}

/// The reader's end: the gRPC stream. Dropping it cancels the sequence.
pub struct FlightStream {
    events: mpsc::Receiver<FlightEvent>,
    taken: Vec<FlightEvent>,
    ready: VecDeque<Result<pb::DecodeEvent, Status>>,
    is_over: bool,
    mailbox: Mailbox<Message>,
    /// Ends with the stream.
    span: Span,
}

/// Makes both ends of a stream that holds `tokens_max` tokens.
pub(crate) fn flight(tokens_max: usize, mailbox: Mailbox<Message>) -> (FlightSender, FlightStream) {
    // One more for `Joined`, one for the end.
    let (events, receiver) = mpsc::channel(tokens_max + 2);
    let end = Some(events.clone().try_reserve_owned().expect("the channel is empty"));
    let (taken, ready, span) = (Vec::new(), VecDeque::new(), Span::none());
    let stream = FlightStream { events: receiver, taken, ready, is_over: false, mailbox, span };
    (FlightSender { events, end, tokens_max }, stream)
}

impl FlightStream {
    /// Puts an event in front, before the stream is handed out.
    pub(crate) fn begin_with(&mut self, event: DecodeEvent) {
        self.ready.push_front(Ok(event.into()));
    }

    /// Keeps `span` open as long as the stream lives, and records the landing in it.
    pub(crate) fn ends_span(&mut self, span: Span) {
        self.span = span;
    }

    /// Turns the events taken into messages; consecutive tokens become one.
    fn merge_taken(&mut self) {
        let mut run: Option<TokenRun> = None;
        for event in self.taken.drain(..) {
            if let FlightEvent::Token { index, token } = event {
                run.get_or_insert_with(|| TokenRun { first_index: index, tokens: Vec::new() }).tokens.push(token);
                continue;
            }
            self.ready.extend(run.take().map(|run| Ok(DecodeEvent::Tokens(run).into())));
            let message = match event {
                FlightEvent::Token { .. } => unreachable!("tokens went into the run"),
                FlightEvent::Joined { kv_bytes, landing_us } => {
                    // Signed: OpenTelemetry's integers are, and others would become text.
                    self.span.record("kv_bytes", kv_bytes as i64).record("landing_us", landing_us as i64);
                    Ok(DecodeEvent::Joined { kv_bytes, landing_us })
                }
                FlightEvent::End(End::Finished(finished)) => Ok(DecodeEvent::Finished(finished)),
                FlightEvent::End(End::Preempted) => Ok(DecodeEvent::Preempted),
                FlightEvent::End(End::Failed(error)) => Err(Status::from(error)),
            };
            self.is_over |= !matches!(message, Ok(DecodeEvent::Joined { .. }));
            self.ready.push_back(message.map(Into::into));
        }
        self.ready.extend(run.map(|run| Ok(DecodeEvent::Tokens(run).into())));
    }
}

impl Stream for FlightStream {
    type Item = Result<pb::DecodeEvent, Status>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if this.ready.is_empty() && !this.is_over {
            match this.events.poll_recv_many(cx, &mut this.taken, MERGED_MAX) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(0) => {
                    // The step loop went away without an end: it was stopped.
                    this.is_over = true;
                    this.ready.push_back(Err(DecodeError::Ending.into()));
                }
                Poll::Ready(_) => this.merge_taken(),
            }
        }
        Poll::Ready(this.ready.pop_front())
    }
}

impl Drop for FlightStream {
    fn drop(&mut self) {
        self.events.close();
        self.mailbox.wake();
    }
}
