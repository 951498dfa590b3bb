//! `damask.v1.Decode`: reserve, then stream.

use std::sync::Arc;
use std::time::Duration;

use scheduler::{ReserveRequest, SequenceSpec};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tonic::{Request, Response, Status as GrpcStatus};
use types::{DecodeEvent, DpGroup, KvEndpoint, PeerId, Ticket, TicketId, WorkerDescription, WorkerState};
use wire::InvalidMessage;
use wire::convert::{sequence, ticket_id};
use wire::pb;
use worker::{Mailbox, Status};

use crate::config::Config;
use crate::error::DecodeError;
use crate::flight::{FlightStream, flight};
use crate::state::{Message, Reserve};

/// Serves [`wire::pb::decode_server::Decode`].
pub struct DecodeService {
    description: Arc<WorkerDescription>,
    kv_endpoint: KvEndpoint,
    ticket_ttl: Duration,
    stream_tokens_max: usize,
    answer_timeout: Duration,
    status: Arc<Status>,
    mailbox: Mailbox<Message>,
}

impl DecodeService {
    pub(crate) fn new(
        config: &Config,
        description: Arc<WorkerDescription>,
        status: Arc<Status>,
        mailbox: Mailbox<Message>,
    ) -> Self {
        let kv_endpoint = description.kv_endpoint.clone().expect("decode workers have one");
        Self {
            description,
            kv_endpoint,
            ticket_ttl: Duration::from_millis(config.ticket_ttl_ms.into()),
            stream_tokens_max: config.stream_tokens_max,
            answer_timeout: crate::answer_timeout(config),
            status,
            mailbox,
        }
    }

    fn parse(&self, message: pb::DecodeRequest) -> Result<(TicketId, PeerId, types::GenerateRequest), GrpcStatus> {
        let missing = |field: &str| InvalidMessage { field: field.into(), reason: "is missing".into() };
        let request = sequence(message.sequence.ok_or_else(|| missing("sequence"))?)?;
        let prefill = PeerId::try_from(message.prefill.ok_or_else(|| missing("prefill"))?)?;
        request
            .validate(self.description.fingerprint.vocab_size, self.description.max_context_tokens)
            .map_err(DecodeError::from)?;
        Ok((ticket_id(&message.ticket_id)?, prefill, request))
    }

    /// Has the step loop reserve; the stream is the lease.
    async fn reserve(
        &self,
        ticket: TicketId,
        prefill: PeerId,
        request: &types::GenerateRequest,
    ) -> Result<(DpGroup, FlightStream), DecodeError> {
        let (events, stream) = flight(self.stream_tokens_max, self.mailbox.clone());
        let (reply, answer) = oneshot::channel();
        let reserve = Reserve {
            request: ReserveRequest { ticket, prefill, sequence: SequenceSpec::from(request) },
            events,
            reply,
        };
        let answered = async {
            self.mailbox.send(Message::Reserve(Box::new(reserve))).await.map_err(|_| DecodeError::Ending)?;
            answer.await.map_err(|_| DecodeError::Ending)?
        };
        let after = self.answer_timeout;
        let group = timeout(after, answered).await.map_err(|_| DecodeError::Stuck { after })??;
        Ok((group, stream))
    }
}

#[tonic::async_trait]
impl pb::decode_server::Decode for DecodeService {
    type RunStream = FlightStream;

    async fn run(&self, request: Request<pb::DecodeRequest>) -> Result<Response<FlightStream>, GrpcStatus> {
        let (caller, _, message) = request.into_parts();
        let (id, prefill, request) = self.parse(message)?;
        if self.status.state() == WorkerState::Loading {
            return Err(DecodeError::Loading.into());
        }
        let span = tracing::info_span!(
            "decode",
            request_id = %request.id,
            ticket = %id,
            kv_bytes = tracing::field::Empty,
            landing_us = tracing::field::Empty,
            otel.kind = "server",
        );
        wire::trace::adopt(&span, &caller);
        let (dp_group, mut stream) = self.reserve(id, prefill.clone(), &request).await?;
        stream.ends_span(span);
        tracing::debug!(request_id = %request.id, ticket = %id, %prefill, %dp_group, "reserved");
        stream.begin_with(DecodeEvent::Reserved(Ticket {
            id,
            prefill,
            decode: self.description.peer.clone(),
            kv_endpoint: self.kv_endpoint.clone(),
            kv_layout: self.description.kv_layout.clone(),
            dp_group,
            ttl: self.ticket_ttl,
        }));
        Ok(Response::new(stream))
    }
}
