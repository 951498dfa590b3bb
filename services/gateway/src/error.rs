//! What a client is told when a request cannot be carried out: one variant for each thing the client may do about it.

use std::borrow::Cow;
use std::time::Duration;

use http::StatusCode;
use serde::Serialize;

/// An error on its way to a client. Its text is the `message` that the client reads.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ApiError {
    /// The request is wrong and will be wrong again; 400.
    #[error("{message}")]
    InvalidRequest {
        /// What is wrong and what is allowed.
        message: String,
        /// The field, as a path into the request body.
        param: Option<String>,
        /// A machine-readable reason.
        code: Option<&'static str>,
    },
    /// No API key, or one that is not known; 401.
    #[error("{message}")]
    Unauthorized {
        /// What is wrong with the key.
        message: &'static str,
    },
    /// The key is known, but may not be used; 403.
    #[error("{message}")]
    Forbidden {
        /// Why not.
        message: &'static str,
    },
    /// No such response is kept, or not for this key; 404.
    #[error("no response `{id}` is kept here")]
    UnknownResponse {
        /// The id asked for.
        id: String,
    },
    /// The served model has another name; 404.
    #[error("the model `{model}` does not exist; this server has `{served}`")]
    UnknownModel {
        /// The name asked for.
        model: String,
        /// The name to use.
        served: String,
    },
    /// No such path; 404.
    #[error("unknown path: {method} {path}")]
    UnknownPath {
        /// HTTP method.
        method: String,
        /// Path of the URL.
        path: String,
    },
    /// The path exists, for other methods; 405.
    #[error("{path} does not take {method}")]
    MethodNotAllowed {
        /// HTTP method.
        method: String,
        /// Path of the URL.
        path: String,
    },
    /// The body did not arrive in time; 408.
    #[error("the request body did not arrive within {limit_ms} ms")]
    BodyTimeout {
        /// The limit.
        limit_ms: u64,
    },
    /// The body is not JSON by its own word; 415.
    #[error("{header} is `{value}`: this server takes plain `application/json`")]
    UnsupportedMediaType {
        /// Which header says so.
        header: &'static str,
        /// What it says.
        value: String,
    },
    /// The body exceeds the limit; 413.
    #[error("the request body exceeds {limit_bytes} bytes")]
    BodyTooLarge {
        /// The limit.
        limit_bytes: usize,
    },
    /// No room now; 429.
    #[error("{message}")]
    Overloaded {
        /// What is full.
        message: String,
        /// When to come again.
        retry_after: Duration,
    },
    /// Nothing behind the gateway can serve; 503.
    #[error("{message}")]
    Unavailable {
        /// What is missing.
        message: Cow<'static, str>,
        /// When to come again.
        retry_after: Duration,
    },
    /// The client has not read its answer for too long; the last event of a stream, if at all.
    #[error("the answer was not read in time")]
    NotRead,
    /// The request's own time limit passed; 504.
    #[error("the request exceeded its time limit")]
    DeadlineExceeded,
    /// A fault here or behind; 500.
    #[error("{message}")]
    Internal {
        /// What failed, without details of the deployment.
        message: String,
    },
}

/// The body of every error response, `{"error": {...}}`, and of an `error` event in a stream.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorObject,
}

/// OpenAI's error object.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ErrorObject {
    /// For people.
    pub message: String,
    /// The family, for example `invalid_request_error`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The field at fault.
    pub param: Option<String>,
    /// For programs.
    pub code: Option<&'static str>,
}

impl ApiError {
    /// A wrong value at `param`.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::InvalidRequest { message: message.into(), param: Some(param.into()), code: Some("invalid_value") }
    }

    /// Something that OpenAI's API has and this server refuses.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::InvalidRequest { message: message.into(), param: Some(param.into()), code: Some("unsupported_value") }
    }

    /// HTTP status.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::InvalidRequest { .. } => StatusCode::BAD_REQUEST,
            Self::Unauthorized { .. } => StatusCode::UNAUTHORIZED,
            Self::Forbidden { .. } => StatusCode::FORBIDDEN,
            Self::UnknownModel { .. } | Self::UnknownPath { .. } | Self::UnknownResponse { .. } => {
                StatusCode::NOT_FOUND
            }
            Self::MethodNotAllowed { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::BodyTimeout { .. } | Self::NotRead => StatusCode::REQUEST_TIMEOUT,
            Self::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::UnsupportedMediaType { .. } => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::Overloaded { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::Unavailable { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            Self::Internal { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// How long to wait before coming again, where that makes sense.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Overloaded { retry_after, .. } | Self::Unavailable { retry_after, .. } => Some(*retry_after),
            _ => None,
        }
    }

    /// The same in seconds, rounded up and at least one: what the `retry-after` header can say.
    #[must_use]
    pub fn retry_after_secs(&self) -> Option<u64> {
        self.retry_after().map(|wait| wait.as_millis().div_ceil(1000).max(1) as u64)
    }

    /// OpenAI's error object.
    #[must_use]
    pub fn object(&self) -> ErrorObject {
        let (kind, code) = match self {
            Self::InvalidRequest { code, .. } => ("invalid_request_error", *code),
            Self::Unauthorized { .. } => ("authentication_error", Some("invalid_api_key")),
            Self::Forbidden { .. } => ("permission_error", Some("key_suspended")),
            Self::UnknownResponse { .. } => ("invalid_request_error", Some("response_not_found")),
            Self::UnknownModel { .. } => ("invalid_request_error", Some("model_not_found")),
            Self::UnknownPath { .. } => ("invalid_request_error", Some("unknown_url")),
            Self::MethodNotAllowed { .. } => ("invalid_request_error", Some("method_not_allowed")),
            Self::BodyTimeout { .. } | Self::NotRead => ("invalid_request_error", Some("request_timeout")),
            Self::BodyTooLarge { .. } => ("invalid_request_error", Some("request_too_large")),
            Self::UnsupportedMediaType { .. } => ("invalid_request_error", Some("unsupported_media_type")),
            Self::Overloaded { .. } => ("rate_limit_error", Some("rate_limit_exceeded")),
            Self::Unavailable { .. } => ("server_error", Some("service_unavailable")),
            Self::DeadlineExceeded => ("server_error", Some("deadline_exceeded")),
            Self::Internal { .. } => ("server_error", Some("internal_error")),
        };
        let param = match self {
            Self::InvalidRequest { param, .. } => param.clone(),
            Self::UnknownModel { .. } => Some("model".into()),
            _ => None,
        };
        ErrorObject { message: self.to_string(), kind, param, code }
    }

    /// The body of an error response.
    #[must_use]
    pub fn body(&self) -> ErrorBody {
        ErrorBody { error: self.object() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shape_is_openais() {
        let error = ApiError::invalid("messages[0].role", "unknown role `robot`");
        assert_eq!(
            serde_json::to_value(error.body()).unwrap(),
            serde_json::json!({"error": {"message": "unknown role `robot`", "type": "invalid_request_error",
                "param": "messages[0].role", "code": "invalid_value"}})
        );
        assert_eq!(error.status(), 400);
        assert_eq!(error.retry_after_secs(), None);
    }

    #[test]
    fn retry_after_is_rounded_up_and_never_zero() {
        for (wait_ms, secs) in [(0, 1), (1, 1), (1000, 1), (1001, 2)] {
            let error =
                ApiError::Overloaded { message: "queue full".into(), retry_after: Duration::from_millis(wait_ms) };
            assert_eq!(error.retry_after_secs(), Some(secs), "{wait_ms} ms");
        }
    }
}
