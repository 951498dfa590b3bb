//! `GET /v1/models` and `/v1/models/{id}`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;

use super::edge::PathId;
use crate::error::ApiError;
use crate::service::Service;

/// The list of models: one, under all its names.
#[derive(Debug, Serialize)]
pub(super) struct ModelList {
    object: &'static str,
    data: Vec<ModelObject>,
}

/// A model as OpenAI describes it, and its context length as vLLM does.
#[derive(Debug, Serialize)]
pub(super) struct ModelObject {
    id: String,
    object: &'static str,
    /// Unknown; the field is required.
    created: u64,
    owned_by: &'static str,
    /// Absent until the router has told it.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_model_len: Option<u32>,
}

pub(super) async fn list(State(service): State<Arc<Service>>) -> Json<ModelList> {
    let names = std::iter::once(service.model.name()).chain(service.config.model_aliases.iter().map(String::as_str));
    Json(ModelList { object: "list", data: names.map(|name| describe(&service, name)).collect() })
}

pub(super) async fn show(
    State(service): State<Arc<Service>>,
    PathId(id): PathId,
) -> Result<Json<ModelObject>, ApiError> {
    service.check_model(Some(&id))?;
    Ok(Json(describe(&service, &id)))
}

fn describe(service: &Service, name: &str) -> ModelObject {
    let max_model_len = service.router.info().ok().map(|info| info.max_context_tokens);
    ModelObject { id: name.to_owned(), object: "model", created: 0, owned_by: "openai", max_model_len }
}
