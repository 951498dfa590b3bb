//! Every request passes here first and every response last: names, keys, logs, counts, and errors in OpenAI's shape.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{FromRequestParts, MatchedPath, Path, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, Method, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::{Json, RequestExt};
use tonic::metadata::MetadataMap;
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer};
use tracing::{Instrument, Span};
use types::RequestId;

use crate::auth::Keys;
use crate::error::ApiError;
use crate::metrics::RequestLabels;
use crate::service::{Call, Service};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// OpenAI's SDKs read it before `retry-after`, which knows whole seconds only.
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status(), Json(self.body())).into_response();
        if let (Some(secs), Some(wait)) = (self.retry_after_secs(), self.retry_after()) {
            response.headers_mut().insert(header::RETRY_AFTER, secs.into());
            response.headers_mut().insert(RETRY_AFTER_MS, (wait.as_millis() as u64).into());
        }
        if matches!(self, Self::Unauthorized { .. }) {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// The id that a path ends with; one that is no text is refused in OpenAI's shape.
pub(super) struct PathId(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for PathId {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let path = Path::<String>::from_request_parts(parts, state).await;
        path.map(|Path(id)| Self(id)).map_err(|_| ApiError::InvalidRequest {
            message: "the id in the path is not UTF-8".into(),
            param: None,
            code: Some("invalid_url"),
        })
    }
}

/// Names the request (as the client does, if its name is a valid one), and logs and counts its outcome.
pub(super) async fn observe(State(service): State<Arc<Service>>, mut request: Request, next: Next) -> Response {
    let arrived = Instant::now();
    let id = request
        .headers()
        .get(REQUEST_ID)
        .and_then(|id| RequestId::new(id.to_str().ok()?).ok())
        .unwrap_or_else(Call::draw_id);
    let method = request.method().clone();
    let route = request.extract_parts::<MatchedPath>().await.map_or("unknown".into(), |path| path.as_str().to_owned());
    let trace = MetadataMap::from_headers(request.headers().clone());
    let span = if route.starts_with("/health") { Span::none() } else { span(&id, &method, &route) };
    wire::trace::adopt(&span, &trace);
    request.extensions_mut().insert(Call { id: id.clone(), trace, span: span.clone() });
    let mut response = next.run(request).instrument(span.clone()).await;
    let status = response.status().as_u16();
    span.record("http.response.status_code", i64::from(status));
    let head_ms = arrived.elapsed().as_millis() as u64;
    if route.starts_with("/health") {
        tracing::debug!(request_id = %id, %method, route, status, head_ms, "answered");
    } else {
        tracing::info!(request_id = %id, %method, route, status, head_ms, "answered");
    }
    service.metrics.requests.get_or_create(&RequestLabels { route, status }).inc();
    let id = HeaderValue::from_str(id.as_str()).expect("an id is visible ASCII");
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

fn span(id: &RequestId, method: &Method, route: &str) -> Span {
    tracing::info_span!(
        "request",
        request_id = %id,
        otel.name = format!("{method} {route}"),
        otel.kind = "server",
        http.response.status_code = tracing::field::Empty,
    )
}

/// Lets in who has a key; handlers find its owner among the request's extensions.
pub(super) async fn authenticate(State(keys): State<Arc<Keys>>, mut request: Request, next: Next) -> Response {
    let authorization = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    match keys.admit(authorization) {
        Ok(caller) => {
            tracing::debug!(caller = caller.name(), "key accepted");
            request.extensions_mut().insert(Arc::clone(caller));
            next.run(request).await
        }
        Err(error) => error.into_response(),
    }
}

/// Which web pages may call.
pub(super) fn cors(origins: &[String]) -> CorsLayer {
    if origins.is_empty() {
        return CorsLayer::new();
    }
    let allowed = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()))
    };
    CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods(AllowMethods::list([Method::GET, Method::POST, Method::DELETE]))
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([REQUEST_ID, header::RETRY_AFTER, RETRY_AFTER_MS])
}

pub(super) async fn unknown_path(method: Method, uri: Uri) -> ApiError {
    ApiError::UnknownPath { method: method.to_string(), path: uri.path().to_owned() }
}

pub(super) async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
    ApiError::MethodNotAllowed { method: method.to_string(), path: uri.path().to_owned() }
}
