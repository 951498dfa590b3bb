//! Request bodies, bounded in size and time.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, header};
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use serde_json::Value;

use crate::config::LimitsConfig;
use crate::error::ApiError;

/// Reads a whole body.
///
/// # Errors
/// 415 if it says that it is something else than JSON, 413 as soon as it is known to be too large, 408 if it takes too long, 400 if the
/// client breaks off.
pub(super) async fn read(headers: &HeaderMap, body: Body, limits: &LimitsConfig) -> Result<Bytes, ApiError> {
    check_media_type(headers)?;
    let too_large = || ApiError::BodyTooLarge { limit_bytes: limits.body_bytes_max };
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|length| length > limits.body_bytes_max) {
        return Err(too_large());
    }
    let reading = async {
        let mut chunks = body.into_data_stream();
        let mut whole = BytesMut::with_capacity(announced.unwrap_or(0));
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|error| ApiError::InvalidRequest {
                message: format!("the request body broke off: {error}"),
                param: None,
                code: None,
            })?;
            if whole.len() + chunk.len() > limits.body_bytes_max {
                return Err(too_large());
            }
            whole.extend_from_slice(&chunk);
        }
        Ok(whole.freeze())
    };
    tokio::time::timeout(Duration::from_millis(limits.body_timeout_ms), reading)
        .await
        .unwrap_or(Err(ApiError::BodyTimeout { limit_ms: limits.body_timeout_ms }))
}

/// A body that does not say what it is may be JSON; one that says that it is something else is not read as JSON.
fn check_media_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let says = |header| headers.get(header).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    let refuse = |header, value| Err(ApiError::UnsupportedMediaType { header, value });
    let is_json = |value: &String| {
        let essence = value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        essence == "application/json" || essence.ends_with("+json")
    };
    match (says(header::CONTENT_TYPE), says(header::CONTENT_ENCODING)) {
        (Some(value), _) if !is_json(&value) => refuse("content-type", value),
        (_, Some(value)) if !value.eq_ignore_ascii_case("identity") => refuse("content-encoding", value),
        _ => Ok(()),
    }
}

/// The JSON object that a body holds.
pub(super) fn parse(body: &[u8]) -> Result<Value, ApiError> {
    let fail = |message| ApiError::InvalidRequest { message, param: None, code: Some("invalid_json") };
    match serde_json::from_slice(body) {
        Ok(object @ Value::Object(_)) => Ok(object),
        Ok(_) => Err(fail("the request body is not a JSON object".into())),
        Err(error) => Err(fail(format!("the request body is not JSON: {error}"))),
    }
}
