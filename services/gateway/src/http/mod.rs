//! OpenAI's API over HTTP: routes, and what happens to every request on the way in and out.

mod body;
mod chat;
mod choices;
mod completions;
mod edge;
mod models;
mod responses;
mod sse;
mod tokens;

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use chassis::admin::{Probe, health};

use crate::service::Service;

/// The app behind the public port.
pub(crate) fn app(service: Arc<Service>, live: Probe, ready: Probe) -> Router {
    let api = Router::new()
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/{id}", get(responses::retrieve).delete(responses::delete))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::show))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route_layer(from_fn_with_state(Arc::clone(&service.keys), edge::authenticate));
    let open = Router::new()
        .route("/health/live", get(async move || health(&live)))
        .route("/health/ready", get(async move || health(&ready)));
    let cors = edge::cors(&service.config.cors_origins);
    api.merge(open)
        .fallback(edge::unknown_path)
        .method_not_allowed_fallback(edge::method_not_allowed)
        // Bodies are read and bounded in `body`, which answers in OpenAI's shape.
        .layer(DefaultBodyLimit::disable())
        .layer(cors)
        .layer(from_fn_with_state(Arc::clone(&service), edge::observe))
        .with_state(service)
}
