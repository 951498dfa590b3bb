//! `damask.v1.Prefill`: submit, then stream.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use chassis::tasks::Tasks;
use futures_util::Stream;
use kv::PageMap;
use scheduler::{PrefillRequest, SequenceSpec};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tonic::{Request, Response, Status as GrpcStatus};
use tracing::{Instrument, Span};
use transfer::Lanes;
use transfer::framed::TRANSPORT;
use types::{GenerateRequest, KvEndpoint, PeerId, PrefillEvent, Ticket, WorkerDescription, WorkerState};
use wire::InvalidMessage;
use wire::convert::sequence;
use wire::pb;
use worker::{Clock, Mailbox, Status, step_loop::RuntimeClock};

use crate::config::Config;
use crate::error::PrefillError;
use crate::handoff::Handoff;
use crate::state::{Message, Submit};

/// Events of one prompt: `FirstToken`, then `Committed`, `Finished` or an error. All fit, so the step loop never waits.
const EVENTS_MAX: usize = 4;

/// Serves [`wire::pb::prefill_server::Prefill`].
pub struct PrefillService {
    description: Arc<WorkerDescription>,
    answer_timeout: Duration,
    status: Arc<Status>,
    mailbox: Mailbox<Message>,
    lanes: Arc<Lanes>,
    tasks: Tasks,
}

impl PrefillService {
    pub(crate) fn new(
        config: &Config,
        description: Arc<WorkerDescription>,
        status: Arc<Status>,
        mailbox: Mailbox<Message>,
        lanes: Arc<Lanes>,
        tasks: Tasks,
    ) -> Self {
        // As long as the loop may take without being called stuck.
        let answer_timeout = Duration::from_millis(config.step_loop.stuck_after_ms);
        Self { description, answer_timeout, status, mailbox, lanes, tasks }
    }

    fn parse(&self, message: pb::PrefillRequest) -> Result<(Ticket, GenerateRequest), GrpcStatus> {
        let missing = |field: &str| InvalidMessage { field: field.into(), reason: "is missing".into() };
        let request = sequence(message.sequence.ok_or_else(|| missing("sequence"))?)?;
        let ticket = Ticket::try_from(message.ticket.ok_or_else(|| missing("ticket"))?)?;
        request
            .validate(self.description.fingerprint.vocab_size, self.description.max_context_tokens)
            .map_err(PrefillError::from)?;
        Ok((ticket, request))
    }

    async fn open_lane(&self, decode: &PeerId, endpoint: &KvEndpoint) -> Result<(), PrefillError> {
        check_transport(endpoint)?;
        // KV has no way out of memory that is not there yet.
        if self.status.state() == WorkerState::Loading {
            return Err(PrefillError::Loading);
        }
        self.lanes.lane(&endpoint.address, decode).await?;
        Ok(())
    }

    /// Checks that the ticket is for us and can be served, and says what is to be sent.
    fn check_ticket(&self, ticket: &Ticket, spec: &SequenceSpec) -> Result<PageMap, PrefillError> {
        let this = &self.description.peer;
        if ticket.prefill != *this {
            return Err(PrefillError::WrongWorker { named: ticket.prefill.clone(), this: this.clone() });
        }
        check_transport(&ticket.kv_endpoint)?;
        PageMap::new(&self.description.kv_layout, &ticket.kv_layout, spec.context_tokens())
            .map_err(|cause| PrefillError::Layout { decode: ticket.decode.clone(), cause })
    }

    async fn submit(
        &self,
        ticket: Ticket,
        request: &GenerateRequest,
        span: Span,
    ) -> Result<PrefillStream, PrefillError> {
        let sequence = SequenceSpec::from(request);
        let map = self.check_ticket(&ticket, &sequence)?;
        let deadline = RuntimeClock.now() + ticket.ttl;
        let is_sent = !sequence.is_last_index(sequence.next_index(), self.description.max_context_tokens);
        let prefill = PrefillRequest { ticket: ticket.id, sequence, deadline };
        let (events, receiver) = mpsc::channel(EVENTS_MAX);
        // Nothing is sent for a sequence that is known to end with its first token. Else the task opens the ticket while the prompt waits.
        let handoff = is_sent.then(|| {
            let transfer =
                tracing::info_span!(parent: &span, "kv_transfer", ticket = %ticket.id, decode = %ticket.decode);
            let (handoff, commands) = Handoff::new(ticket, map);
            // Work of its own: it outlives the stream, and a drain waits for it.
            let run = Arc::clone(&handoff).run(Arc::clone(&self.lanes), commands, self.mailbox.clone());
            self.tasks.spawn("handoff", run.instrument(transfer));
            GiveUpOnDrop(Some(handoff))
        });
        let stream = PrefillStream { events: receiver, is_over: false, mailbox: self.mailbox.clone(), _span: span };
        let (reply, answer) = oneshot::channel();
        let submit =
            Submit { request: prefill, handoff: handoff.as_ref().and_then(|guard| guard.0.clone()), events, reply };
        let answered = async {
            self.mailbox.send(Message::Submit(Box::new(submit))).await.map_err(|_| PrefillError::Ending)?;
            answer.await.map_err(|_| PrefillError::Ending)?
        };
        let after = self.answer_timeout;
        timeout(after, answered).await.map_err(|_| PrefillError::Stuck { after })??;
        // From here on the step loop has it in hand.
        handoff.into_iter().for_each(GiveUpOnDrop::disarm);
        Ok(stream)
    }
}

fn check_transport(endpoint: &KvEndpoint) -> Result<(), PrefillError> {
    if endpoint.transport == TRANSPORT {
        return Ok(());
    }
    Err(PrefillError::UnknownTransport(endpoint.transport.clone()))
}

/// Ends a transfer whose prompt was refused, or whose caller left before it was known to be taken.
struct GiveUpOnDrop(Option<Arc<Handoff>>);

impl GiveUpOnDrop {
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for GiveUpOnDrop {
    fn drop(&mut self) {
        if let Some(handoff) = &self.0 {
            handoff.give_up();
        }
    }
}

#[tonic::async_trait]
impl pb::prefill_server::Prefill for PrefillService {
    type RunStream = PrefillStream;

    async fn run(&self, request: Request<pb::PrefillRequest>) -> Result<Response<PrefillStream>, GrpcStatus> {
        let (caller, _, message) = request.into_parts();
        let (ticket, request) = self.parse(message)?;
        if self.status.state() == WorkerState::Loading {
            return Err(PrefillError::Loading.into());
        }
        tracing::debug!(request_id = %request.id, ticket = %ticket.id, decode = %ticket.decode, "submitted");
        let prompt_tokens = request.context_len() as i64;
        let span = tracing::info_span!("prefill", request_id = %request.id, prompt_tokens, otel.kind = "server");
        wire::trace::adopt(&span, &caller);
        Ok(Response::new(self.submit(ticket, &request, span).await?))
    }

    async fn link(&self, request: Request<pb::LinkRequest>) -> Result<Response<pb::LinkResponse>, GrpcStatus> {
        let pb::LinkRequest { decode, kv_endpoint } = request.into_inner();
        let missing = |field: &str| InvalidMessage { field: field.into(), reason: "is missing".into() };
        let decode = PeerId::try_from(decode.ok_or_else(|| missing("decode"))?)?;
        let endpoint = KvEndpoint::from(kv_endpoint.ok_or_else(|| missing("kv_endpoint"))?);
        self.open_lane(&decode, &endpoint).await?;
        Ok(Response::new(pb::LinkResponse {}))
    }
}

/// The stream of one prompt. Dropping it cancels.
pub struct PrefillStream {
    events: mpsc::Receiver<Result<PrefillEvent, PrefillError>>,
    is_over: bool,
    mailbox: Mailbox<Message>,
    /// Ends with the stream.
    _span: Span,
}

impl Stream for PrefillStream {
    type Item = Result<pb::PrefillEvent, GrpcStatus>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if this.is_over {
            return Poll::Ready(None);
        }
        this.events.poll_recv(cx).map(|event| {
            // A step loop that goes away without an end was stopped.
            let event = event.unwrap_or(Err(PrefillError::Ending));
            this.is_over = !matches!(event, Ok(PrefillEvent::FirstToken { .. }));
            Some(event.map(Into::into).map_err(Into::into))
        })
    }
}

impl Drop for PrefillStream {
    fn drop(&mut self) {
        self.events.close();
        self.mailbox.wake();
    }
}
