//! A Responses body to a [`ChatPlan`]: items become messages.

use std::collections::HashSet;

use format::chat::{
    Conversation, Message, ReasoningEffort, ResponseFormat, SchemaFormat, ToolCall, ToolChoice, ToolDefinition,
    completions,
};
use serde_json::Value;

use super::History;
use super::request::{Input, Item, ItemText, Part, ResponsesRequest, TextFormat, ToolChoiceField, ToolEntry};
use crate::error::ApiError;
use crate::params::{self, SamplingFields};
use crate::plan::{ChatPlan, LoweringContext};

/// Reads what reaches the model.
pub(super) fn lower(
    request: &ResponsesRequest,
    history: &History,
    context: &LoweringContext,
) -> Result<ChatPlan, ApiError> {
    refuse_stored(request, history)?;
    let mut messages = Messages::default();
    if let Some(instructions) = &request.instructions {
        messages.push(Message::Instructions { text: instructions.clone() });
    }
    for (idx, item) in history.earlier.iter().enumerate() {
        messages.item(&format!("previous_response_id: item {idx}"), item)?;
    }
    match &request.input {
        Some(Input::Text(text)) => messages.push(Message::User { name: None, text: text.clone() }),
        Some(Input::Items(items)) => {
            for (idx, item) in items.iter().enumerate() {
                messages.item(&format!("input[{idx}]"), item)?;
            }
        }
        None => return Err(ApiError::invalid("input", "input is missing")),
    }
    let defaults = context.defaults.clone();
    let conversation = Conversation {
        messages: messages.finish(),
        tools: tools(request.tools.as_deref().unwrap_or_default())?,
        tool_choice: tool_choice(request.tool_choice.as_ref())?,
        response_format: response_format(request.text.as_ref().and_then(|text| text.format.as_ref()))?,
        reasoning_effort: effort(request.reasoning.as_ref().and_then(|reasoning| reasoning.effort.as_deref()))?,
        current_date: defaults.current_date,
        model_identity: defaults.model_identity,
        knowledge_cutoff: defaults.knowledge_cutoff,
    };
    let sampling =
        SamplingFields { temperature: request.temperature, top_p: request.top_p, ..SamplingFields::default() };
    Ok(ChatPlan {
        conversation,
        sampling: sampling.resolve(context.drawn_seed)?,
        max_tokens: params::token_limit("max_output_tokens", request.max_output_tokens)?,
        num_choices: 1,
        stop: Vec::new(),
    })
}

/// Everything that would need a server that remembers more than this one does.
fn refuse_stored(request: &ResponsesRequest, history: &History) -> Result<(), ApiError> {
    let refused = [
        ("store", request.store == Some(true) && !history.is_kept, "this server stores no responses: send store=false"),
        (
            "previous_response_id",
            request.previous_response_id.is_some() && !history.is_kept,
            "this server stores no responses: send the whole conversation as input",
        ),
        (
            "conversation",
            request.conversation.is_some(),
            "this server stores no conversations: send the whole conversation as input",
        ),
        ("background", request.background == Some(true), "responses cannot run in the background"),
        ("prompt", request.prompt.is_some(), "this server has no prompt templates: send input and instructions"),
        (
            "top_logprobs",
            request.top_logprobs.is_some_and(|n| n > 0),
            "log-probabilities are reported by Chat Completions only",
        ),
    ];
    match refused.into_iter().find(|(_, asked_for, _)| *asked_for) {
        Some((param, _, message)) => Err(ApiError::unsupported(param, message)),
        None => Ok(()),
    }
}

/// Gathers items into messages: reasoning, text and calls of one step of the model are one assistant message.
#[derive(Default)]
struct Messages {
    done: Vec<Message>,
    /// Ids of the calls in `done`.
    call_ids: HashSet<String>,
    reasoning: Option<String>,
    content: Option<String>,
    calls: Vec<ToolCall>,
}

impl Messages {
    fn item(&mut self, at: &str, value: &Value) -> Result<(), ApiError> {
        let item: Item = serde_path_to_error::deserialize(value).map_err(|error| {
            let at = format!("{at}.{}", error.path());
            let message = format!("{at}: {}", error.inner());
            ApiError::invalid(at, message)
        })?;
        match item.kind.as_deref().unwrap_or("message") {
            "message" => self.message(at, item),
            "reasoning" => {
                let content = item.content.or(item.summary);
                let text = content.map(|text| joined(&format!("{at}.content"), text)).transpose()?.unwrap_or_default();
                self.reasoning(text);
                Ok(())
            }
            "function_call" => {
                let call = ToolCall {
                    id: required(at, "call_id", item.call_id)?,
                    name: required_name(at, item.name)?,
                    arguments: item.arguments.unwrap_or_default(),
                };
                self.calls.push(call);
                Ok(())
            }
            "function_call_output" => {
                let call_id = required(at, "call_id", item.call_id)?;
                self.flush();
                if !self.call_ids.contains(&call_id) {
                    let message = format!("{at}.call_id: no earlier function_call has the id {call_id:?}");
                    return Err(ApiError::invalid(format!("{at}.call_id"), message));
                }
                let output = required(at, "output", item.output)?;
                let text = joined(&format!("{at}.output"), output)?;
                self.done.push(Message::ToolResult { call_id, text });
                Ok(())
            }
            "item_reference" => {
                let message = format!("{at}: this server stores no items, so none can be referred to");
                Err(ApiError::unsupported(format!("{at}.type"), message))
            }
            other => {
                let message = format!("{at}: items of type {other:?} are not supported");
                Err(ApiError::unsupported(format!("{at}.type"), message))
            }
        }
    }

    fn message(&mut self, at: &str, item: Item) -> Result<(), ApiError> {
        let role = required(at, "role", item.role)?;
        let text = joined(&format!("{at}.content"), required(at, "content", item.content)?)?;
        match role.as_str() {
            "system" | "developer" => self.push(Message::Instructions { text }),
            "user" => self.push(Message::User { name: None, text }),
            "assistant" => {
                if self.content.is_some() || !self.calls.is_empty() {
                    self.flush();
                }
                self.content = Some(text);
            }
            other => {
                let message = format!("{at}.role is {other:?}, allowed are system, developer, user and assistant");
                return Err(ApiError::invalid(format!("{at}.role"), message));
            }
        }
        Ok(())
    }

    /// Reasoning opens a step of the model; several items in a row are one.
    fn reasoning(&mut self, text: String) {
        if self.content.is_some() || !self.calls.is_empty() {
            self.flush();
        }
        match &mut self.reasoning {
            Some(reasoning) if !reasoning.is_empty() && !text.is_empty() => {
                reasoning.push('\n');
                reasoning.push_str(&text);
            }
            Some(reasoning) => reasoning.push_str(&text),
            None => self.reasoning = (!text.is_empty()).then_some(text),
        }
    }

    fn push(&mut self, message: Message) {
        self.flush();
        self.done.push(message);
    }

    fn flush(&mut self) {
        let (reasoning, content) = (self.reasoning.take(), self.content.take());
        let tool_calls = std::mem::take(&mut self.calls);
        if reasoning.is_some() || content.is_some() || !tool_calls.is_empty() {
            self.call_ids.extend(tool_calls.iter().map(|call| call.id.clone()));
            self.done.push(Message::Assistant { reasoning, content, tool_calls });
        }
    }

    fn finish(mut self) -> Vec<Message> {
        self.flush();
        self.done
    }
}

fn required<T>(at: &str, field: &str, value: Option<T>) -> Result<T, ApiError> {
    value.ok_or_else(|| ApiError::invalid(format!("{at}.{field}"), format!("{at}.{field} is missing")))
}

fn required_name(at: &str, name: Option<String>) -> Result<String, ApiError> {
    match required(at, "name", name)? {
        name if name.is_empty() => Err(ApiError::invalid(format!("{at}.name"), format!("{at}.name is empty"))),
        name => Ok(name),
    }
}

fn joined(at: &str, text: ItemText) -> Result<String, ApiError> {
    let parts = match text {
        ItemText::Whole(text) => return Ok(text),
        ItemText::Parts(parts) => parts,
    };
    let mut joined = String::new();
    for (idx, Part { kind, text, refusal }) in parts.into_iter().enumerate() {
        let text = match kind.as_str() {
            "input_text" | "output_text" | "reasoning_text" | "summary_text" | "text" => text,
            "refusal" => refusal,
            other => {
                let message = format!("{at}[{idx}]: parts of type {other:?} are not supported, only text is");
                return Err(ApiError::unsupported(format!("{at}[{idx}].type"), message));
            }
        };
        joined.push_str(&required(&format!("{at}[{idx}]"), if kind == "refusal" { "refusal" } else { "text" }, text)?);
    }
    Ok(joined)
}

/// Functions only. Tools that OpenAI's servers would run are left out, not refused: clients offer them to any server.
fn tools(entries: &[ToolEntry]) -> Result<Vec<ToolDefinition>, ApiError> {
    let functions = entries.iter().enumerate().filter(|(_, entry)| entry.kind == "function");
    functions
        .map(|(idx, entry)| {
            Ok(ToolDefinition {
                name: required_name(&format!("tools[{idx}]"), entry.name.clone())?,
                description: entry.description.clone(),
                parameters: entry.parameters.clone(),
                strict: entry.strict.unwrap_or(false),
            })
        })
        .collect()
}

fn tool_choice(choice: Option<&ToolChoiceField>) -> Result<ToolChoice, ApiError> {
    let refuse = |message: String| Err(ApiError::invalid("tool_choice", message));
    match choice {
        None => Ok(ToolChoice::Auto),
        Some(ToolChoiceField::Mode(mode)) => match mode.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" => Ok(ToolChoice::Required),
            other => refuse(format!("tool_choice is {other:?}, allowed are auto, none, required and a function")),
        },
        Some(ToolChoiceField::Tool { kind, name: Some(name) }) if kind == "function" => {
            Ok(ToolChoice::Named(name.clone()))
        }
        Some(ToolChoiceField::Tool { kind, .. }) if kind == "function" => refuse("tool_choice.name is missing".into()),
        Some(ToolChoiceField::Tool { kind, .. }) => refuse(format!("tool_choice of type {kind:?} is not supported")),
    }
}

fn response_format(format: Option<&TextFormat>) -> Result<ResponseFormat, ApiError> {
    let Some(format) = format else { return Ok(ResponseFormat::Text) };
    match format.kind.as_str() {
        "text" => Ok(ResponseFormat::Text),
        "json_object" => Ok(ResponseFormat::JsonObject),
        "json_schema" => Ok(ResponseFormat::JsonSchema(SchemaFormat {
            name: required_name("text.format", format.name.clone())?,
            description: format.description.clone(),
            schema: required("text.format", "schema", format.schema.clone())?,
            strict: format.strict.unwrap_or(false),
        })),
        other => {
            let message = format!("text.format.type is {other:?}, allowed are text, json_object and json_schema");
            Err(ApiError::invalid("text.format.type", message))
        }
    }
}

/// The same words as in Chat Completions.
fn effort(word: Option<&str>) -> Result<ReasoningEffort, ApiError> {
    let Some(word) = word else { return Ok(ReasoningEffort::default()) };
    completions::reasoning_effort(word)
        .map_err(|error| ApiError::invalid("reasoning.effort", format!("reasoning.effort {}", error.reason)))
}

#[cfg(test)]
#[path = "lower_tests.rs"]
mod tests;
