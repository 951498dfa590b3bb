//! The Responses API: the body of a request to a [`ChatPlan`], the pieces of the answer to events. Stateless by itself: what a server keeps
//! comes in as a [`History`].

mod events;
mod lower;
mod request;

pub use events::{ResponseEvent, ResponseWriter};

use serde_json::{Map, Value, json};

use crate::chat::ResponseHead;
use crate::error::ApiError;
use crate::params;
use crate::plan::{ChatPlan, LoweringContext};
use request::ResponsesRequest;

/// A request of the Responses API, read and checked as far as that needs no vocabulary.
#[derive(Debug, Clone)]
pub struct ResponseRequest {
    /// The model asked for.
    pub model: Option<String>,
    /// What to ask it, and how.
    pub plan: ChatPlan,
    /// Server-sent events instead of one body.
    pub stream: bool,
    /// The conversation up to the answer, as items; `None` if the response is not to be kept.
    pub input: Option<Vec<Value>>,
    /// What the response repeats of the request.
    echo: Map<String, Value>,
}

/// What the server remembers.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// Whether responses are kept here at all.
    pub is_kept: bool,
    /// Items that come before the request's own input: the conversation of the response that it goes on from.
    pub earlier: Vec<Value>,
}

/// Reads the body of a request.
///
/// # Errors
/// 400, naming the first field that is wrong or that cannot be honoured.
pub fn lower(body: &Value, history: History, context: &LoweringContext) -> Result<ResponseRequest, ApiError> {
    let request: ResponsesRequest = params::read(body)?;
    let plan = lower::lower(&request, &history, context)?;
    // As at OpenAI, responses are kept unless the client says otherwise.
    let keeps = history.is_kept && request.store.unwrap_or(true);
    let mut echo = echo(body, &request, &plan);
    echo.insert("store".into(), keeps.into());
    let input = keeps.then(|| {
        let mut items = history.earlier;
        items.extend(request::items(request.input.as_ref()));
        items
    });
    Ok(ResponseRequest { model: request.model, plan, stream: request.stream.unwrap_or(false), input, echo })
}

/// The response that a request goes on from, if it names one.
#[must_use]
pub fn previous_response_id(body: &Value) -> Option<&str> {
    body.get("previous_response_id")?.as_str()
}

impl ResponseRequest {
    /// The fields of the response object that are known beforehand.
    #[must_use]
    pub fn settings(&self, head: &ResponseHead) -> Map<String, Value> {
        let mut settings = self.echo.clone();
        settings.insert("created_at".into(), head.created.into());
        settings.insert("model".into(), head.model.clone().into());
        settings
    }
}

/// What a response repeats of its request, as OpenAI's does: the fields as they came, with what stands for absent ones.
fn echo(body: &Value, request: &ResponsesRequest, plan: &ChatPlan) -> Map<String, Value> {
    let as_sent = |field: &str, absent: Value| match body.get(field) {
        None | Some(Value::Null) => absent,
        Some(value) => value.clone(),
    };
    let effort = plan.conversation.reasoning_effort.as_str();
    let summary = request.reasoning.as_ref().and_then(|reasoning| reasoning.summary.clone());
    let echo = [
        ("background", json!(false)),
        ("instructions", as_sent("instructions", Value::Null)),
        ("max_output_tokens", as_sent("max_output_tokens", Value::Null)),
        ("metadata", json!(request.metadata.clone().unwrap_or_default())),
        ("parallel_tool_calls", json!(request.parallel_tool_calls.unwrap_or(true))),
        ("previous_response_id", as_sent("previous_response_id", Value::Null)),
        ("reasoning", json!({ "effort": effort, "summary": summary })),
        ("temperature", as_sent("temperature", json!(1.0))),
        ("text", as_sent("text", json!({ "format": { "type": "text" } }))),
        ("tool_choice", as_sent("tool_choice", json!("auto"))),
        ("tools", as_sent("tools", json!([]))),
        ("top_p", as_sent("top_p", json!(1.0))),
        ("truncation", json!(request.truncation.as_deref().unwrap_or("disabled"))),
        ("user", json!(request.user)),
    ];
    echo.into_iter().map(|(field, value)| (field.to_owned(), value)).collect()
}
