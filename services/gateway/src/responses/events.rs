//! Pieces of an answer as the event sequence of the Responses API. The whole body of a request that does not stream is
//! the response that the last event carries, so both are the same by construction.
//!
//! Order for one turn: `response.created`, `response.in_progress`; for each item `output_item.added`, its parts and
//! deltas, each with its `.done`, `output_item.done`; then `response.completed`, `.incomplete` or `.failed`. Items are:
//! reasoning, message (a preamble or the answer), function call. Messages of the model are items of their own: nothing
//! is joined.

use format::chat::{ChatFinish, Delta};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::ids::ResponseKey;
use crate::turn::TurnEnd;
use crate::usage::{Cost, ResponsesUsage};

/// An event of the stream.
#[derive(Debug, Clone, PartialEq)]
pub struct ResponseEvent {
    /// Its type, which is also its name as a server-sent event.
    pub name: &'static str,
    /// The whole event.
    pub data: Value,
}

/// Writes the events of one response.
#[derive(Debug)]
pub struct ResponseWriter {
    key: ResponseKey,
    /// The response object without status, output, error and usage: the request's settings.
    settings: Map<String, Value>,
    next_sequence_number: u64,
    output: Vec<Value>,
    open: Option<OpenItem>,
}

#[derive(Debug)]
struct OpenItem {
    kind: ItemKind,
    id: String,
    /// The model's message that the item is.
    message_idx: u32,
    /// Text or arguments so far.
    text: String,
}

#[derive(Debug, Clone, PartialEq)]
enum ItemKind {
    Reasoning,
    Message,
    Call { call_id: String, name: String },
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Status {
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

impl ResponseWriter {
    /// Writes the response that `settings` describes: every field of the response object that is known beforehand.
    #[must_use]
    pub fn new(key: ResponseKey, settings: Map<String, Value>) -> Self {
        Self { key, settings, next_sequence_number: 0, output: Vec::new(), open: None }
    }

    /// The response begins.
    pub fn start(&mut self, events: &mut Vec<ResponseEvent>) {
        for name in ["response.created", "response.in_progress"] {
            let response = self.response(Status::InProgress, None, None);
            self.emit(name, json!({ "response": response }), events);
        }
    }

    /// The next piece of the answer.
    pub fn piece(&mut self, delta: &Delta, events: &mut Vec<ResponseEvent>) {
        let (message_idx, text) = match delta {
            Delta::Reasoning(text) | Delta::Content(text) => (text.message_idx, text.text.as_str()),
            Delta::ToolCall(call) => (call.message_idx, call.arguments.as_str()),
        };
        if self.open.as_ref().is_none_or(|open| open.message_idx != message_idx) {
            self.close(Status::Completed, events);
            let kind = match delta {
                // A thought without a word is nothing to show.
                Delta::Reasoning(_) if text.is_empty() => return,
                Delta::Reasoning(_) => ItemKind::Reasoning,
                Delta::Content(_) => ItemKind::Message,
                Delta::ToolCall(call) => ItemKind::Call {
                    call_id: self.key.call_id(0, call.index),
                    name: call.name.clone().unwrap_or_default(),
                },
            };
            self.open(kind, message_idx, events);
        }
        if !text.is_empty() {
            self.append(text, events);
        }
    }

    /// The answer is complete, or its budget is spent. Returns the finished response.
    pub fn finish(&mut self, end: &TurnEnd, cost: Cost, events: &mut Vec<ResponseEvent>) -> Value {
        let cut = end.reason == ChatFinish::Length;
        let (status, name) =
            if cut { (Status::Incomplete, "response.incomplete") } else { (Status::Completed, "response.completed") };
        self.close(status, events);
        let response = self.response(status, None, Some(cost.into()));
        self.emit(name, json!({ "response": response }), events);
        response
    }

    /// The answer will never be complete.
    pub fn fail(&mut self, error: &ApiError, events: &mut Vec<ResponseEvent>) {
        self.close(Status::Incomplete, events);
        let response = self.response(Status::Failed, Some(error), None);
        self.emit("response.failed", json!({ "response": response }), events);
    }

    fn open(&mut self, kind: ItemKind, message_idx: u32, events: &mut Vec<ResponseEvent>) {
        let prefix = match kind {
            ItemKind::Reasoning => "rs",
            ItemKind::Message => "msg",
            ItemKind::Call { .. } => "fc",
        };
        let id = self.key.item_id(prefix, self.output_index());
        let open = OpenItem { kind, id, message_idx, text: String::new() };
        self.emit("response.output_item.added", self.placed(json!({ "item": open.item(Status::InProgress) })), events);
        if let Some(part) = open.part() {
            let place = self.in_part(&open.id, json!({ "part": part }));
            self.emit("response.content_part.added", place, events);
        }
        self.open = Some(open);
    }

    fn append(&mut self, text: &str, events: &mut Vec<ResponseEvent>) {
        let Some(open) = &mut self.open else { return };
        open.text.push_str(text);
        let (kind, id) = (open.kind.clone(), open.id.clone());
        match kind {
            ItemKind::Reasoning => {
                let data = self.in_part(&id, json!({ "delta": text }));
                self.emit("response.reasoning_text.delta", data, events);
            }
            ItemKind::Message => {
                let data = self.in_part(&id, json!({ "delta": text, "logprobs": [] }));
                self.emit("response.output_text.delta", data, events);
            }
            ItemKind::Call { .. } => {
                let data = self.placed(json!({ "item_id": id, "delta": text }));
                self.emit("response.function_call_arguments.delta", data, events);
            }
        }
    }

    fn close(&mut self, status: Status, events: &mut Vec<ResponseEvent>) {
        let Some(open) = self.open.take() else { return };
        match &open.kind {
            ItemKind::Reasoning => {
                let data = self.in_part(&open.id, json!({ "text": open.text }));
                self.emit("response.reasoning_text.done", data, events);
            }
            ItemKind::Message => {
                let data = self.in_part(&open.id, json!({ "text": open.text, "logprobs": [] }));
                self.emit("response.output_text.done", data, events);
            }
            ItemKind::Call { name, .. } => {
                let data = self.placed(json!({ "item_id": open.id, "name": name, "arguments": open.text }));
                self.emit("response.function_call_arguments.done", data, events);
            }
        }
        if let Some(part) = open.part() {
            let data = self.in_part(&open.id, json!({ "part": part }));
            self.emit("response.content_part.done", data, events);
        }
        let item = open.item(status);
        self.emit("response.output_item.done", self.placed(json!({ "item": item })), events);
        self.output.push(item);
    }

    fn output_index(&self) -> u32 {
        self.output.len() as u32
    }

    /// Adds where the open item stands.
    fn placed(&self, mut data: Value) -> Value {
        data["output_index"] = self.output_index().into();
        data
    }

    /// Adds where the only part of the open item stands.
    fn in_part(&self, item_id: &str, data: Value) -> Value {
        let mut data = self.placed(data);
        data["item_id"] = item_id.into();
        data["content_index"] = 0.into();
        data
    }

    fn emit(&mut self, name: &'static str, data: Value, events: &mut Vec<ResponseEvent>) {
        let mut event = json!({ "type": name, "sequence_number": self.next_sequence_number });
        if let (Some(event), Value::Object(data)) = (event.as_object_mut(), data) {
            event.extend(data);
        }
        self.next_sequence_number += 1;
        events.push(ResponseEvent { name, data: event });
    }

    fn response(&self, status: Status, error: Option<&ApiError>, usage: Option<ResponsesUsage>) -> Value {
        let mut response = json!({
            "id": self.key.response_id(),
            "object": "response",
            "status": status,
            "error": error.map(|error| json!({ "code": "server_error", "message": error.to_string() })),
            "incomplete_details": (status == Status::Incomplete).then(|| json!({ "reason": "max_output_tokens" })),
            "output": self.output,
            "usage": usage,
        });
        if let Some(response) = response.as_object_mut() {
            response.extend(self.settings.clone());
        }
        response
    }
}

impl OpenItem {
    /// The item as it stands: without content when it has just begun.
    fn item(&self, status: Status) -> Value {
        let content = if status == Status::InProgress { json!([]) } else { json!([self.part()]) };
        match &self.kind {
            ItemKind::Reasoning => {
                json!({ "id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content })
            }
            ItemKind::Message => {
                json!({ "id": self.id, "type": "message", "status": status, "role": "assistant", "content": content })
            }
            ItemKind::Call { call_id, name } => json!({
                "id": self.id, "type": "function_call", "status": status, "call_id": call_id, "name": name,
                "arguments": self.text,
            }),
        }
    }

    /// The only part of an item that has parts.
    fn part(&self) -> Option<Value> {
        match self.kind {
            ItemKind::Reasoning => Some(json!({ "type": "reasoning_text", "text": self.text })),
            ItemKind::Message => {
                Some(json!({ "type": "output_text", "text": self.text, "annotations": [], "logprobs": [] }))
            }
            ItemKind::Call { .. } => None,
        }
    }
}

#[cfg(test)]
#[path = "events_tests.rs"]
mod tests;
