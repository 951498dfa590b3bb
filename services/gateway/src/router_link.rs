//! The one router behind this gateway: whether it serves the same model, and the way to it.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use chassis::net::grpc::{ChannelLimits, channel};
use chassis::{Address, Network, Tasks};
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use tokio::sync::watch;
use tonic::transport::Channel;
use tonic::{Code, Status};
use types::{ErrorClass, GenerateEvent, GenerateRequest, ModelFingerprint};
use wire::pb::inference_client::InferenceClient;
use wire::pb::{GetModelInfoRequest, ModelInfo};
use wire::status;

use crate::error::ApiError;
use crate::service::Call;

/// How often the router is asked what it serves, and how often while it is not known to serve.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);
const SEARCH_INTERVAL: Duration = Duration::from_millis(100);
/// A router that does not say what it serves within this time is as good as away.
const WATCH_TIMEOUT: Duration = Duration::from_secs(2);
/// Over the request's own time limit, which the router keeps: only if it fails to does this cut the stream.
const TIMEOUT_MARGIN: Duration = Duration::from_secs(5);
/// When clients should come again while there is no router.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The router's stream of one generation, after its start.
pub(crate) type Generation = BoxStream<'static, Result<GenerateEvent, ApiError>>;

/// What the router said last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RouterInfo {
    pub(crate) max_context_tokens: u32,
    pub(crate) ready_pairs: u32,
}

/// What is known about the router.
#[derive(Debug, Clone, PartialEq, Eq)]
enum LinkState {
    /// It has not been reached yet.
    Connecting,
    /// It does not answer.
    Unreachable { reason: String },
    /// It answers that it cannot serve anything yet, or nothing that can be understood.
    NotServing { reason: String },
    /// It serves another model, or one with another vocabulary: its tokens would mean something else.
    Stranger { ours: ModelFingerprint, theirs: ModelFingerprint },
    /// It serves our model.
    Known(RouterInfo),
}

/// Cloned freely; all clones share one connection.
#[derive(Clone)]
pub(crate) struct RouterLink {
    client: InferenceClient<Channel>,
    state: watch::Receiver<LinkState>,
}

impl RouterLink {
    /// Starts asking the router at `address` what it serves.
    pub(crate) fn start(tasks: &Tasks, network: &Arc<dyn Network>, address: &Address, ours: ModelFingerprint) -> Self {
        let client = wire::client::inference(channel(network, address, ChannelLimits::default()));
        let (sender, state) = watch::channel(LinkState::Connecting);
        tasks.spawn_background("router watch", watch_router(client.clone(), address.clone(), ours, sender));
        Self { client, state }
    }

    /// What the router said last.
    ///
    /// # Errors
    /// 503 while there is no router that serves our model.
    pub(crate) fn info(&self) -> Result<RouterInfo, ApiError> {
        match &*self.state.borrow() {
            LinkState::Known(info) => Ok(*info),
            other => Err(ApiError::Unavailable { message: Cow::Owned(other.to_string()), retry_after: RETRY_AFTER }),
        }
    }

    /// Starts a generation for `call`; returns once the router has accepted it. Dropping the stream cancels it.
    pub(crate) async fn generate(&self, request: GenerateRequest, call: &Call) -> Result<Generation, ApiError> {
        let timeout = request.timeout;
        let mut message = tonic::Request::new(wire::pb::GenerateRequest::from(request));
        wire::trace::hand_on(&call.span, &call.trace, message.metadata_mut());
        if let Some(timeout) = timeout {
            message.set_timeout(timeout + TIMEOUT_MARGIN);
        }
        // The call's span lasts as long as its answer.
        let span = call.span.clone();
        let stream = self.client.clone().generate(message).await.map_err(|status| from_status(&status))?.into_inner();
        let mut events = stream.map(move |event| {
            let _entered = span.enter();
            let event = event.map_err(|status| from_status(&status))?;
            GenerateEvent::try_from(event).map_err(|error| {
                tracing::error!(%error, "the router broke the protocol");
                ApiError::Internal { message: "the router sent an invalid message".into() }
            })
        });
        match events.next().await {
            Some(Ok(GenerateEvent::Started { .. })) => Ok(events.boxed()),
            Some(Err(error)) => Err(error),
            Some(Ok(_)) | None => Err(ApiError::Internal { message: "the router did not start the answer".into() }),
        }
    }
}

async fn watch_router(
    mut client: InferenceClient<Channel>,
    address: Address,
    ours: ModelFingerprint,
    state: watch::Sender<LinkState>,
) {
    loop {
        let mut call = tonic::Request::new(GetModelInfoRequest {});
        call.set_timeout(WATCH_TIMEOUT);
        let reply = client.get_model_info(call).await.map(tonic::Response::into_inner);
        let next = judge(&ours, reply);
        let interval = if matches!(next, LinkState::Known(_)) { WATCH_INTERVAL } else { SEARCH_INTERVAL };
        log_change(&address, &state.borrow(), &next);
        state.send_replace(next);
        tokio::time::sleep(interval).await;
    }
}

/// Says once what is new; what repeats itself is not said again.
fn log_change(router: &Address, last: &LinkState, next: &LinkState) {
    match (last, next) {
        (LinkState::Known(_), LinkState::Known(_))
        | (LinkState::Stranger { .. }, LinkState::Stranger { .. })
        | (LinkState::Unreachable { .. }, LinkState::Unreachable { .. })
        | (LinkState::NotServing { .. }, LinkState::NotServing { .. })
        | (_, LinkState::Connecting) => {}
        (_, LinkState::Known(info)) => {
            tracing::info!(%router, max_context_tokens = info.max_context_tokens, "router serves our model");
        }
        (_, LinkState::Stranger { .. }) => tracing::error!(%router, "{next}"),
        // At a start of the whole stack the router may take longer than the gateway.
        (LinkState::Connecting, LinkState::Unreachable { .. }) => tracing::info!(%router, "waiting for the router"),
        (LinkState::Connecting | LinkState::Unreachable { .. }, LinkState::NotServing { .. }) => {
            tracing::info!(%router, "waiting: {next}");
        }
        (_, LinkState::Unreachable { .. } | LinkState::NotServing { .. }) => tracing::warn!(%router, "{next}"),
    }
}

fn judge(ours: &ModelFingerprint, reply: Result<ModelInfo, Status>) -> LinkState {
    let not_serving = |reason: String| LinkState::NotServing { reason };
    let info = match reply {
        Ok(info) => info,
        Err(status) if status::reason(&status).is_some() => return not_serving(status.message().to_owned()),
        Err(status) => return LinkState::Unreachable { reason: format!("{:?}: {}", status.code(), status.message()) },
    };
    let Some(theirs) = info.fingerprint else {
        return not_serving("it does not say which model it serves".into());
    };
    match ModelFingerprint::try_from(theirs) {
        Err(error) => not_serving(format!("its fingerprint is invalid: {error}")),
        Ok(theirs) if theirs != *ours => LinkState::Stranger { ours: ours.clone(), theirs },
        Ok(_) => {
            LinkState::Known(RouterInfo { max_context_tokens: info.max_context_tokens, ready_pairs: info.ready_pairs })
        }
    }
}

impl fmt::Display for LinkState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connecting => f.write_str("the router has not been reached yet"),
            Self::Unreachable { reason } => write!(f, "the router cannot be reached ({reason})"),
            Self::NotServing { reason } => write!(f, "the router cannot serve: {reason}"),
            Self::Stranger { ours, theirs } => {
                write!(f, "the router serves another model: {theirs} instead of {ours}")
            }
            Self::Known(_) => f.write_str("the router serves our model"),
        }
    }
}

/// What a client is told about the router's refusal or failure. The texts of transports stay inside.
pub(crate) fn from_status(status: &Status) -> ApiError {
    let said_by_router = status::reason(status).is_some();
    let retry_after = status::retry_after(status).unwrap_or(RETRY_AFTER);
    let internal = || {
        tracing::error!(code = ?status.code(), message = status.message(), "the router failed");
        ApiError::Internal { message: "the router failed".into() }
    };
    match status::class(status) {
        _ if status.code() == Code::DeadlineExceeded => ApiError::DeadlineExceeded,
        ErrorClass::Caller if status.code() == Code::InvalidArgument => {
            ApiError::InvalidRequest { message: status.message().into(), param: None, code: None }
        }
        ErrorClass::Overloaded => ApiError::Overloaded { message: status.message().into(), retry_after },
        ErrorClass::Retryable | ErrorClass::Cancelled if said_by_router => {
            ApiError::Unavailable { message: status.message().to_owned().into(), retry_after }
        }
        ErrorClass::Retryable | ErrorClass::Cancelled => {
            tracing::warn!(code = ?status.code(), message = status.message(), "the router was lost");
            ApiError::Unavailable { message: "the router was lost".into(), retry_after }
        }
        ErrorClass::Caller | ErrorClass::Fatal => internal(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint(model: &str) -> ModelFingerprint {
        ModelFingerprint { model: model.into(), vocab_size: 10, tokenizer_sha256: "ab".into() }
    }

    #[test]
    fn only_a_router_with_our_model_is_known() {
        let ours = fingerprint("m");
        let info = |fingerprint: Option<ModelFingerprint>| ModelInfo {
            fingerprint: fingerprint.map(Into::into),
            max_context_tokens: 100,
            eos_token_ids: vec![1],
            ready_pairs: 2,
        };
        let known = LinkState::Known(RouterInfo { max_context_tokens: 100, ready_pairs: 2 });
        assert_eq!(judge(&ours, Ok(info(Some(ours.clone())))), known);
        let theirs = ModelFingerprint { tokenizer_sha256: "cd".into(), ..ours.clone() };
        let stranger = judge(&ours, Ok(info(Some(theirs.clone()))));
        assert_eq!(stranger, LinkState::Stranger { ours: ours.clone(), theirs });
        assert!(stranger.to_string().contains("tokenizer cd) instead of m"), "{stranger}");
        for reply in [
            Ok(info(None)),
            Ok(info(Some(fingerprint("")))),
            Err(status::with_code(Code::Unavailable, "NO_PAIR", "no pair of workers", None)),
        ] {
            assert!(matches!(judge(&ours, reply), LinkState::NotServing { .. }));
        }
        assert!(matches!(judge(&ours, Err(Status::unavailable("gone"))), LinkState::Unreachable { .. }));
    }

    #[test]
    fn every_status_has_an_http_status_and_transports_are_not_quoted() {
        let ours = |code| status::with_code(code, "WHY", "said so", Some(Duration::from_millis(2500)));
        for (status, http, message) in [
            (ours(Code::InvalidArgument), 400, "said so"),
            (ours(Code::ResourceExhausted), 429, "said so"),
            (ours(Code::Unavailable), 503, "said so"),
            (ours(Code::DeadlineExceeded), 504, "the request exceeded its time limit"),
            (ours(Code::Internal), 500, "the router failed"),
            (Status::unknown("h2 protocol error"), 503, "the router was lost"),
            (Status::unavailable("tcp connect error"), 503, "the router was lost"),
            (Status::unimplemented("no such method"), 500, "the router failed"),
        ] {
            let error = from_status(&status);
            assert_eq!((error.status().as_u16(), error.to_string().as_str()), (http, message), "{status:?}");
        }
        assert_eq!(from_status(&ours(Code::ResourceExhausted)).retry_after_secs(), Some(3));
    }
}
