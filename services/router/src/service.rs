//! `damask.v1.Inference`: checks a request, gives it a flight, streams what the flight says.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use chassis::Tasks;
use futures_util::Stream;
use tokio::sync::mpsc;
use tonic::{Request, Response, Status};
use tracing::Instrument;
use types::{GenerateEvent, GenerateRequest, RequestId};
use wire::convert::{RequestDefaults, generate_request};
use wire::pb;

use crate::affinity::Beginnings;
use crate::drive::{Drive, ROOM, now};
use crate::error::RequestError;
use crate::fleet::{Need, Served};
use crate::flight::{Flight, FlightLimits};
use crate::metrics::RouterMetrics;
use crate::worker_pool::WorkerPool;

/// Messages that wait for a slow client before its workers are slowed down.
const CLIENT_MESSAGES_MAX: usize = 32;
const _: () = assert!(CLIENT_MESSAGES_MAX >= 2 * ROOM);

/// The router's public service.
pub(crate) struct InferenceService {
    pub(crate) pool: Arc<WorkerPool>,
    pub(crate) metrics: RouterMetrics,
    pub(crate) tasks: Tasks,
    pub(crate) limits: FlightLimits,
    pub(crate) request_timeout: Duration,
}

impl InferenceService {
    fn start(&self, request: Request<pb::GenerateRequest>) -> Result<Answer, RequestError> {
        if self.tasks.shutdown().is_draining() {
            return Err(RequestError::Draining);
        }
        let arrived = now();
        let served = self.pool.served().ok_or(RequestError::NoPair)?;
        let (metadata, _, message) = request.into_parts();
        let request = complete(message, &served)?;
        let timeouts = [request.timeout, wire::deadline::from_metadata(&metadata)].into_iter().flatten();
        let timeout = timeouts.min().unwrap_or(self.request_timeout).min(self.request_timeout);
        let need = Need {
            model: served.model.clone(),
            prompt_tokens: request.context_len() as u64,
            beginnings: Beginnings::of(&request),
            avoid: Vec::new(),
            was_refused: false,
        };
        let waiting = self.pool.enter(need)?;
        self.metrics.prompt_tokens.inc_by(request.prompt.len() as u64);
        let span = tracing::info_span!("flight", request_id = %request.id, otel.kind = "server");
        wire::trace::adopt(&span, &metadata);
        let mut out = Vec::new();
        let flight = Flight::new(arrived, request, timeout, self.limits.clone(), &mut out);
        let (client, events) = mpsc::channel(CLIENT_MESSAGES_MAX);
        let drive = Drive {
            pool: Arc::clone(&self.pool),
            tasks: self.tasks.clone(),
            metrics: self.metrics.clone(),
            model: served.model,
            metadata,
            client,
            arrived,
        };
        self.tasks.spawn("flight", drive.run(flight, out, waiting).instrument(span));
        Ok(Answer { events, has_ended: false })
    }
}

/// Puts what the router decides in the place of what the client left out, and checks the rest.
fn complete(message: pb::GenerateRequest, served: &Served) -> Result<GenerateRequest, RequestError> {
    let drawn = uuid::Uuid::new_v4();
    let (high, low) = drawn.as_u64_pair();
    let defaults = RequestDefaults {
        request_id: RequestId::new(&drawn.to_string()).expect("a UUID is 36 visible ASCII characters"),
        // The few bits of a UUID that are fixed lie at different places in its two halves.
        seed: high ^ low,
        eos_token_ids: &served.eos_token_ids,
    };
    let mut request = generate_request(message, defaults)?;
    request.validate(served.model.fingerprint.vocab_size, served.max_context_tokens)?;
    // The context's end is the answer's end: workers are always given a number that they can reach.
    request.max_tokens = request.max_tokens.min(served.max_context_tokens - request.prompt.len() as u32);
    Ok(request)
}

#[tonic::async_trait]
impl pb::inference_server::Inference for InferenceService {
    type GenerateStream = Answer;

    async fn generate(&self, request: Request<pb::GenerateRequest>) -> Result<Response<Answer>, Status> {
        self.start(request).map(Response::new).map_err(|error| {
            tracing::debug!(%error, reason = error.reason(), "refused");
            self.metrics.refused(&error);
            error.status()
        })
    }

    async fn get_model_info(
        &self,
        _request: Request<pb::GetModelInfoRequest>,
    ) -> Result<Response<pb::ModelInfo>, Status> {
        let served = self.pool.served().ok_or_else(|| RequestError::NoPair.status())?;
        Ok(Response::new(pb::ModelInfo {
            fingerprint: Some(served.model.fingerprint.into()),
            max_context_tokens: served.max_context_tokens,
            eos_token_ids: served.eos_token_ids,
            ready_pairs: served.ready_pairs,
        }))
    }
}

/// A flight's stream to its client. Dropping it cancels the flight.
pub(crate) struct Answer {
    events: mpsc::Receiver<Result<GenerateEvent, RequestError>>,
    has_ended: bool,
}

impl Stream for Answer {
    type Item = Result<pb::GenerateResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        self.events.poll_recv(cx).map(|message| {
            self.has_ended = !matches!(&message, Some(Ok(GenerateEvent::Started { .. } | GenerateEvent::Tokens(_))));
            Some(match message {
                Some(Ok(event)) => Ok(event.into()),
                Some(Err(error)) => Err(error.status()),
                // The flight was stopped, at the end of the grace period or by a bug. An answer that is cut off must not look whole.
                None => Err(RequestError::Stopped.status()),
            })
        })
    }
}
