//! What a gateway's refusal says to whoever runs a command.

use reqwest::{Response, StatusCode};
use serde_json::Value;

/// The status and the message of a response that is no success.
pub(crate) async fn refusal(response: Response) -> String {
    let status = response.status();
    describe(status, response.text().await.unwrap_or_default())
}

fn describe(status: StatusCode, body: String) -> String {
    let message =
        serde_json::from_str::<Value>(&body).ok().and_then(|body| body["error"]["message"].as_str().map(str::to_owned));
    let hint = if status == StatusCode::UNAUTHORIZED { " (--api-key or DAMASK_API_KEY gives one)" } else { "" };
    format!("the gateway answered {status}: {}{hint}", message.unwrap_or(body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_is_taken_out_and_a_missing_key_is_asked_for() {
        let body = |message: &str| format!(r#"{{"error": {{"message": "{message}", "code": null}}}}"#);
        assert_eq!(
            describe(StatusCode::UNAUTHORIZED, body("no API key")),
            "the gateway answered 401 Unauthorized: no API key (--api-key or DAMASK_API_KEY gives one)"
        );
        assert_eq!(describe(StatusCode::BAD_REQUEST, body("n is 0")), "the gateway answered 400 Bad Request: n is 0");
        assert_eq!(
            describe(StatusCode::BAD_GATEWAY, "a proxy's page".into()),
            "the gateway answered 502 Bad Gateway: a proxy's page"
        );
    }
}
