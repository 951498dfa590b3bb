//! The admin port of a service: liveness, readiness, metrics.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};

use crate::metrics::{self, Metrics};

/// Tells the truth about a service at the moment of asking; the error is the reason shown to the operator. Must not block.
pub type Probe = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// What the admin port shows.
#[derive(Clone)]
pub struct Admin {
    /// Forward progress: while this fails, a restart is the remedy.
    pub live: Probe,
    /// Whether new requests can be served now.
    pub ready: Probe,
    /// What `/metrics` shows.
    pub metrics: Metrics,
}

impl Admin {
    /// `GET /health/live`, `/health/ready` (200, or 503 with the reason) and `/metrics` (OpenMetrics text).
    pub fn app(self) -> Router {
        Router::new()
            .route("/health/live", get(async |State(admin): State<Self>| health(&admin.live)))
            .route("/health/ready", get(async |State(admin): State<Self>| health(&admin.ready)))
            .route("/metrics", get(async |State(admin): State<Self>| scrape(&admin.metrics)))
            .with_state(self)
    }
}

fn scrape(registry: &Metrics) -> Response {
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], registry.encode()).into_response()
}

/// The answer to a health request: 200 and `{"status":"ok"}`, or 503 and `{"status":"unavailable","reason":..}`.
#[must_use]
pub fn health(probe: &Probe) -> Response {
    match probe() {
        Ok(()) => Json(serde_json::json!({ "status": "ok" })).into_response(),
        Err(reason) => {
            let body = Json(serde_json::json!({ "status": "unavailable", "reason": reason }));
            (StatusCode::SERVICE_UNAVAILABLE, body).into_response()
        }
    }
}
