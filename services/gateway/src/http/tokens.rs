//! `POST /tokenize` and `/detokenize`, in the shape of vLLM's.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::{Extension, Json};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use types::TokenId;

use super::body;
use crate::caller::Caller;
use crate::chat;
use crate::constraint::SchemaParams;
use crate::error::ApiError;
use crate::params;
use crate::service::{Service, offload};

/// Either a text, or the body of a chat completion request.
#[derive(Debug, Deserialize)]
struct TokenizeBody {
    model: Option<String>,
    prompt: Option<String>,
    messages: Option<Value>,
    return_token_strs: Option<bool>,
}

#[derive(Debug, Serialize)]
pub(super) struct Tokenized {
    count: usize,
    max_model_len: Option<u32>,
    tokens: Vec<TokenId>,
    token_strs: Option<Vec<String>>,
}

pub(super) async fn tokenize(
    State(service): State<Arc<Service>>,
    Extension(caller): Extension<Arc<Caller>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Tokenized>, ApiError> {
    let _slot = service.admit(&caller)?;
    let bytes = body::read(&headers, body, &service.config.limits).await?;
    let room = service.room(bytes.len()).await;
    let tokenized = offload(&room, move || {
        let body = body::parse(&bytes)?;
        let request: TokenizeBody = params::read(&body)?;
        service.check_model(request.model.as_deref())?;
        let tokens = match (request.prompt, request.messages) {
            (Some(prompt), None) => service.model.vocabulary().encode(&prompt),
            (None, Some(_)) => {
                let request = chat::lower(&body, &service.lowering_context())?;
                service.render(&request.plan.conversation, SchemaParams::CHAT)?.prompt.tokens
            }
            _ => return Err(ApiError::invalid("prompt", "either prompt or messages is needed")),
        };
        let spell = |token: &TokenId| service.model.vocabulary().decode(&[*token]);
        let token_strs = request.return_token_strs.unwrap_or(false).then(|| tokens.iter().map(spell).collect());
        let max_model_len = service.router.info().ok().map(|info| info.max_context_tokens);
        Ok(Tokenized { count: tokens.len(), max_model_len, tokens, token_strs })
    });
    Ok(Json(tokenized.await?))
}

#[derive(Debug, Deserialize)]
struct DetokenizeBody {
    model: Option<String>,
    tokens: Option<Vec<TokenId>>,
}

pub(super) async fn detokenize(
    State(service): State<Arc<Service>>,
    Extension(caller): Extension<Arc<Caller>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let _slot = service.admit(&caller)?;
    let bytes = body::read(&headers, body, &service.config.limits).await?;
    let room = service.room(bytes.len()).await;
    let prompt = offload(&room, move || {
        let request: DetokenizeBody = params::read(&body::parse(&bytes)?)?;
        service.check_model(request.model.as_deref())?;
        let tokens = request.tokens.ok_or_else(|| ApiError::invalid("tokens", "tokens is missing"))?;
        Ok(service.model.vocabulary().decode(&tokens))
    });
    Ok(Json(json!({ "prompt": prompt.await? })))
}
