//! The rim around a flight: carries its actions out and tells it what happens.

use std::sync::Arc;
use std::time::Instant;

use chassis::Tasks;
use futures_util::stream::{self, BoxStream, StreamExt, TryStreamExt};
use tokio::sync::mpsc;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status, Streaming};
use tracing::Span;
use types::{DecodeEvent, ErrorClass, GenerateEvent, GenerateRequest, PrefillEvent, Role, Ticket, TicketId};
use wire::{InvalidMessage, pb};

use crate::affinity::Beginnings;
use crate::error::RequestError;
use crate::fleet::{ModelKey, Need};
use crate::flight::{Action, Event, Flight, LegFailure, Outcome, Pair};
use crate::link;
use crate::metrics::RouterMetrics;
use crate::worker_pool::{Granted, InFlight, Permit, Waiting, WorkerPool};

/// What one event may make a flight say to its client at most: tokens, an end or an error, and the greeting.
const EVENT_MESSAGES_MAX: usize = 3;

/// Room in the client's channel without which nothing is taken from a worker. What is left after one more event is for a flight's last
/// words: its deadline, or the loss of a worker, may end it while the client does not read.
pub(crate) const ROOM: usize = 2 * EVENT_MESSAGES_MAX;

/// What the client's stream is fed with.
pub(crate) type ClientSender = mpsc::Sender<Result<GenerateEvent, RequestError>>;

/// Everything that one flight is connected to.
pub(crate) struct Drive {
    pub(crate) pool: Arc<WorkerPool>,
    pub(crate) tasks: Tasks,
    pub(crate) metrics: RouterMetrics,
    pub(crate) model: ModelKey,
    /// The caller's, of which the trace context is passed on.
    pub(crate) metadata: MetadataMap,
    pub(crate) client: ClientSender,
    pub(crate) arrived: Instant,
}

/// What a flight holds of its workers at a time.
#[derive(Default)]
struct Holdings {
    waiting: Option<Waiting>,
    attempt: u32,
    prefill: Side<PrefillEvent>,
    decode: Side<DecodeEvent>,
    in_flight: Option<InFlight>,
    last_token: Option<Instant>,
}

/// One worker of the present attempt. The fields are dropped in this order: the work is cancelled before its place is given away.
struct Side<E> {
    leg: Option<BoxStream<'static, Result<E, LegFailure>>>,
    permit: Option<Permit>,
    /// Whether the flight was told that this worker is gone.
    told_gone: bool,
}

impl<E> Default for Side<E> {
    fn default() -> Self {
        Self { leg: None, permit: None, told_gone: false }
    }
}

impl<E> Side<E> {
    fn with_permit(permit: Permit) -> Self {
        Self { leg: None, permit: Some(permit), told_gone: false }
    }

    /// What comes next from this side; never, if there is nothing. Cancellation safe.
    async fn next(&mut self, takes_messages: bool) -> SideEvent<E> {
        let message = async {
            match &mut self.leg {
                Some(leg) if takes_messages => leg.next().await,
                _ => std::future::pending().await,
            }
        };
        let gone = async {
            match &self.permit {
                Some(permit) if !self.told_gone => permit.gone().cancelled().await,
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            message = message => {
                if !matches!(message, Some(Ok(_))) {
                    self.leg = None;
                }
                SideEvent::Message(message)
            }
            () = gone => {
                self.told_gone = true;
                SideEvent::Gone
            }
        }
    }
}

enum SideEvent<E> {
    /// The leg's next message; `None` when its stream has ended well.
    Message(Option<Result<E, LegFailure>>),
    /// The fleet has given the worker up. Said once.
    Gone,
}

impl<E> SideEvent<E> {
    fn into_event(self, attempt: u32, role: Role, message: impl FnOnce(E) -> Event) -> Event {
        match self {
            Self::Message(Some(Ok(event))) => message(event),
            Self::Message(Some(Err(failure))) => Event::LegFailed { attempt, role, failure },
            Self::Message(None) => Event::LegClosed { attempt, role },
            Self::Gone => Event::WorkerGone { attempt, role },
        }
    }
}

/// Reasons, as workers name them, that speak of the worker at the other end.
const BETWEEN: [&str; 3] = ["PEER_LOST", "PEER_SLOW", "PEER_RESTARTED"];

impl From<Status> for LegFailure {
    fn from(status: Status) -> Self {
        let between = wire::status::reason(&status).is_some_and(|reason| BETWEEN.contains(&&*reason));
        Self { class: wire::status::class(&status), between, reason: status.message().to_owned() }
    }
}

impl From<InvalidMessage> for LegFailure {
    fn from(error: InvalidMessage) -> Self {
        let reason = format!("message does not follow the protocol: {error}");
        Self { class: ErrorClass::Fatal, between: false, reason }
    }
}

impl Drive {
    /// Runs a flight to its end. `out` holds the flight's first actions, `waiting` its place in the queue.
    pub(crate) async fn run(self, mut flight: Flight, mut out: Vec<Action>, waiting: Waiting) {
        let mut holdings = Holdings { waiting: Some(waiting), ..Holdings::default() };
        // Room first, events second: nothing is taken from a worker that cannot be delivered, so a slow client slows its worker down.
        let mut has_room = true;
        loop {
            for action in out.drain(..) {
                if let Some(outcome) = self.perform(action, &flight, &mut holdings) {
                    self.finish(&flight, outcome);
                    return;
                }
            }
            has_room = has_room && self.client.capacity() >= ROOM;
            let deadline = if has_room { flight.deadline() } else { flight.request_deadline() };
            let attempt = holdings.attempt;
            let Holdings { waiting, prefill, decode, .. } = &mut holdings;
            let event = tokio::select! {
                biased;
                () = self.client.closed() => Event::ClientGone,
                room = self.client.reserve_many(ROOM), if !has_room => {
                    if room.is_err() { continue }
                    has_room = true;
                    Event::ClientCaughtUp
                }
                granted = granted(waiting) => holdings.take_permits(granted),
                // Before the legs: a stream that always has a token ready must not outrun its deadline.
                () = tokio::time::sleep_until(deadline.into()) => {
                    Event::Tick { has_pair: self.pool.has_pair(&self.model) }
                }
                said = prefill.next(has_room) => said.into_event(attempt, Role::Prefill, |event| {
                    self.metrics.prefill(&event);
                    if let (PrefillEvent::FirstToken { cached_tokens: 1.., .. }, Some(permit)) = (&event, &prefill.permit) {
                        permit.mark_reuses();
                    }
                    Event::Prefill { attempt, event }
                }),
                said = decode.next(has_room) => {
                    said.into_event(attempt, Role::Decode, |event| Event::Decode { attempt, event })
                }
            };
            flight.on_event(now(), event, &mut out);
        }
    }

    /// Carries one action out; an outcome means that it was the last.
    fn perform(&self, action: Action, flight: &Flight, holdings: &mut Holdings) -> Option<Outcome> {
        match action {
            Action::Place { avoid, was_refused } => {
                // The place for the first attempt was taken when the request arrived.
                if holdings.waiting.is_none() {
                    let prompt_tokens = flight.request().context_len() as u64;
                    let beginnings = Beginnings::of(flight.request());
                    let need = Need { model: self.model.clone(), prompt_tokens, beginnings, avoid, was_refused };
                    holdings.waiting = Some(self.pool.enter_again(need));
                }
            }
            Action::Reserve { attempt, ticket, prefill, sequence } => {
                holdings.attempt = attempt;
                if let Some(permit) = &holdings.decode.permit {
                    tracing::debug!(attempt, %ticket, %prefill, decode = %permit.peer(), "reserving");
                    let message = pb::DecodeRequest {
                        sequence: Some(sequence.into()),
                        ticket_id: ticket.0.to_be_bytes().to_vec(),
                        prefill: Some(prefill.into()),
                    };
                    let mut client = wire::client::decode(permit.channel());
                    let request = self.request(message);
                    holdings.decode.leg = Some(leg(async move { client.run(request).await }));
                }
            }
            Action::Prefill { attempt, ticket, sequence } => {
                // Decode's ticket is its answer.
                if let Some(permit) = &mut holdings.decode.permit {
                    permit.answered();
                }
                if let Some(permit) = &holdings.prefill.permit {
                    tracing::debug!(attempt, ticket = %ticket.id, "prefilling");
                    let request = self.request(prefill_request(ticket, sequence));
                    let mut client = wire::client::prefill(permit.channel());
                    holdings.prefill.leg = Some(leg(async move { client.run(request).await }));
                }
            }
            Action::Release(Role::Prefill) => holdings.prefill = Side::default(),
            Action::Release(Role::Decode) => holdings.decode = Side::default(),
            Action::Full(peer) => {
                let permits = [&mut holdings.prefill.permit, &mut holdings.decode.permit];
                if let Some(permit) = permits.into_iter().flatten().find(|permit| *permit.peer() == peer) {
                    tracing::debug!(worker = %peer, "no room, waiting for it");
                    permit.mark_full();
                }
            }
            Action::Unlink => {
                if let (Some(prefill), Some(decode)) = (&holdings.prefill.permit, &holdings.decode.permit) {
                    prefill.unlink(decode);
                    link::open_pairs(&self.tasks, &self.pool);
                }
            }
            Action::Resume(failure) => {
                tracing::warn!(%failure, next_index = flight.request().next_index(), "attempt failed, resuming");
                self.metrics.resumed(&failure);
            }
            Action::Emit(event) => self.emit(event, &mut holdings.last_token),
            Action::End(outcome) => return Some(outcome),
        }
        None
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        // The flight's span: `run` is instrumented with it.
        wire::trace::hand_on(&Span::current(), &self.metadata, request.metadata_mut());
        request
    }

    fn emit(&self, event: GenerateEvent, last_token: &mut Option<Instant>) {
        if let GenerateEvent::Tokens(run) = &event {
            let now = now();
            match last_token.replace(now) {
                None => self.metrics.time_to_first_token.observe((now - self.arrived).as_secs_f64()),
                Some(last) => self.metrics.inter_token_latency.observe((now - last).as_secs_f64()),
            }
            self.metrics.output_tokens.inc_by(run.tokens.len() as u64);
        }
        self.send(Ok(event));
    }

    /// There is room, or the client is gone and will be noticed in the next turn.
    fn send(&self, message: Result<GenerateEvent, RequestError>) {
        let is_lost = matches!(self.client.try_send(message), Err(mpsc::error::TrySendError::Full(_)));
        assert!(!is_lost, "there is always room for what one more event makes a flight say");
    }

    fn finish(&self, flight: &Flight, outcome: Outcome) {
        self.metrics.ended(&outcome);
        self.metrics.request_duration.observe((now() - self.arrived).as_secs_f64());
        let output_tokens = flight.request().next_index();
        match outcome {
            Outcome::Finished(reason) => tracing::debug!(?reason, output_tokens, "finished"),
            Outcome::Cancelled => tracing::debug!(output_tokens, "cancelled by its client"),
            Outcome::Failed(error) => {
                tracing::warn!(%error, reason = error.reason(), output_tokens, "failed");
                self.send(Err(error));
            }
        }
    }
}

impl Holdings {
    fn take_permits(&mut self, granted: Granted) -> Event {
        let Granted { prefill, decode, in_flight } = granted;
        let pair = Pair { prefill: prefill.peer().clone(), decode: decode.peer().clone() };
        self.waiting = None;
        self.prefill = Side::with_permit(prefill);
        self.decode = Side::with_permit(decode);
        self.in_flight = in_flight.or(self.in_flight.take());
        Event::Placed { pair, ticket: TicketId(uuid::Uuid::new_v4().as_u128()) }
    }
}

fn prefill_request(ticket: Ticket, sequence: GenerateRequest) -> pb::PrefillRequest {
    pb::PrefillRequest { sequence: Some(sequence.into()), ticket: Some(ticket.into()) }
}

async fn granted(waiting: &mut Option<Waiting>) -> Granted {
    match waiting {
        Some(waiting) => waiting.granted().await,
        None => std::future::pending().await,
    }
}

/// A call and its answers as one stream; dropping it cancels the call.
fn leg<P, E>(
    call: impl Future<Output = Result<Response<Streaming<P>>, Status>> + Send + 'static,
) -> BoxStream<'static, Result<E, LegFailure>>
where
    P: Send + 'static,
    E: TryFrom<P, Error = InvalidMessage> + Send + 'static,
{
    stream::once(call)
        .map_ok(Response::into_inner)
        .try_flatten()
        .map(|message| E::try_from(message?).map_err(LegFailure::from))
        .boxed()
}

/// The runtime's clock, which a simulation may drive.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
