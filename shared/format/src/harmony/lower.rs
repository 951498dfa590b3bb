//! A conversation to Harmony's messages.

use std::collections::HashMap;

use super::message::{Content, DeveloperBlock, Message, SystemBlock};
use super::{ANALYSIS, COMMENTARY, FINAL, FUNCTIONS};
use crate::chat::{
    ContentType, Conversation, Message as ChatMessage, RenderError, ResponseFormat, Role, ToolCall, ToolDefinition,
};

/// The system block, one developer block for the leading instructions, the functions and the format, then the rest in its order.
pub(super) fn messages(conversation: &Conversation) -> Result<Vec<Message>, RenderError> {
    let is_instructions = |message: &ChatMessage| matches!(message, ChatMessage::Instructions { .. });
    let leading = conversation.messages.iter().take_while(|message| is_instructions(message)).count();

    let mut lowered = vec![Message::new(Role::System, Content::System(system_block(conversation)))];
    let developer = developer_block(conversation, &conversation.messages[..leading]);
    if developer != DeveloperBlock::default() {
        lowered.push(Message::new(Role::Developer, Content::Developer(developer)));
    }
    let mut called = HashMap::new();
    for (message_idx, message) in conversation.messages.iter().enumerate().skip(leading) {
        match message {
            ChatMessage::Instructions { text } if text.is_empty() => {}
            ChatMessage::Instructions { text } => {
                let block = DeveloperBlock { instructions: Some(text.clone()), ..DeveloperBlock::default() };
                lowered.push(Message::new(Role::Developer, Content::Developer(block)));
            }
            ChatMessage::User { name, text } => {
                lowered.push(Message { name: name.clone(), ..Message::new(Role::User, text.clone().into()) });
            }
            ChatMessage::Assistant { reasoning, content, tool_calls } => {
                assistant(reasoning.as_deref(), content.as_deref(), tool_calls, &mut lowered);
                called.extend(tool_calls.iter().map(|call| (call.id.as_str(), call.name.as_str())));
            }
            ChatMessage::ToolResult { call_id, text } => {
                let unknown = || RenderError::UnknownToolCall { message_idx, id: call_id.clone() };
                let name = called.get(call_id.as_str()).ok_or_else(unknown)?;
                lowered.push(Message {
                    name: Some(format!("{FUNCTIONS}.{name}")),
                    recipient: Some(Role::Assistant.as_str().to_owned()),
                    ..Message::new(Role::Tool, text.clone().into()).on(COMMENTARY)
                });
            }
        }
    }
    Ok(lowered)
}

fn system_block(conversation: &Conversation) -> SystemBlock {
    let default = SystemBlock::default();
    SystemBlock {
        model_identity: conversation.model_identity.clone().or(default.model_identity),
        knowledge_cutoff: conversation.knowledge_cutoff.clone().or(default.knowledge_cutoff),
        current_date: conversation.current_date.clone(),
        reasoning_effort: Some(conversation.reasoning_effort),
        ..SystemBlock::default()
    }
}

fn developer_block(conversation: &Conversation, leading: &[ChatMessage]) -> DeveloperBlock {
    let instructions: Vec<&str> = leading
        .iter()
        .filter_map(|message| match message {
            ChatMessage::Instructions { text } => Some(text.as_str()).filter(|text| !text.is_empty()),
            _ => None,
        })
        .collect();
    let functions: Vec<_> = conversation.offered_tools().iter().map(without_empty_parameters).collect();
    DeveloperBlock {
        instructions: (!instructions.is_empty()).then(|| instructions.join("\n\n")),
        functions: (!functions.is_empty()).then_some(functions),
        response_format: match &conversation.response_format {
            ResponseFormat::JsonSchema(schema) => Some(schema.clone()),
            ResponseFormat::Text | ResponseFormat::JsonObject => None,
        },
    }
}

/// An object schema without properties means no argument, and is written like a function without a schema.
fn without_empty_parameters(tool: &ToolDefinition) -> ToolDefinition {
    const COMBINED: [&str; 4] = ["oneOf", "anyOf", "allOf", "$ref"];
    let is_empty = tool.parameters.as_ref().is_some_and(|schema| {
        let has_properties = schema["properties"].as_object().is_some_and(|properties| !properties.is_empty());
        let is_object = schema["type"].is_null() || schema["type"] == "object";
        is_object && !has_properties && COMBINED.iter().all(|key| schema.get(key).is_none())
    });
    let parameters = tool.parameters.clone().filter(|_| !is_empty);
    ToolDefinition { parameters, ..tool.clone() }
}

/// In the order of generation: reasoning, then the preamble and the calls, or the answer.
fn assistant(reasoning: Option<&str>, content: Option<&str>, calls: &[ToolCall], lowered: &mut Vec<Message>) {
    let says = |text: &str, channel| Message::new(Role::Assistant, text.to_owned().into()).on(channel);
    lowered.extend(reasoning.map(|text| says(text, ANALYSIS)));
    // Many clients send "" for a message of which only the reasoning or the calls are there; alone it is an empty answer.
    let stands_alone = reasoning.is_none() && calls.is_empty();
    let content = content.filter(|text| !text.is_empty() || stands_alone);
    lowered.extend(content.map(|text| says(text, if calls.is_empty() { FINAL } else { COMMENTARY })));
    for call in calls {
        lowered.push(Message {
            recipient: Some(format!("{FUNCTIONS}.{}", call.name)),
            content_type: Some(ContentType { constrained: true, name: "json".to_owned() }),
            ..says(&call.arguments, COMMENTARY)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::{Message, messages};
    use crate::chat::{Conversation, Message as ChatMessage, RenderError, ToolCall};
    use crate::harmony::Content;

    fn said(reasoning: Option<&str>, content: Option<&str>, calls: &[(&str, &str)]) -> ChatMessage {
        let call =
            |(id, name): &(&str, &str)| ToolCall { id: (*id).into(), name: (*name).into(), arguments: "{}".into() };
        ChatMessage::Assistant {
            reasoning: reasoning.map(str::to_owned),
            content: content.map(str::to_owned),
            tool_calls: calls.iter().map(call).collect(),
        }
    }

    fn result(call_id: &str) -> ChatMessage {
        ChatMessage::ToolResult { call_id: call_id.into(), text: "r".into() }
    }

    fn lower(conversation: Vec<ChatMessage>) -> Result<Vec<Message>, RenderError> {
        let lowered = messages(&Conversation { messages: conversation, ..Conversation::default() })?;
        Ok(lowered.into_iter().skip(1).collect())
    }

    fn channels_and_texts(conversation: Vec<ChatMessage>) -> Vec<(String, String)> {
        let text = |content| if let Content::Text(parts) = content { parts.concat() } else { String::new() };
        lower(conversation)
            .unwrap()
            .into_iter()
            .map(|message| (message.channel.unwrap(), text(message.content)))
            .collect()
    }

    #[test]
    fn an_empty_content_is_an_answer_only_where_nothing_else_is() {
        let pair = |channel: &str, text: &str| (channel.to_owned(), text.to_owned());
        assert_eq!(channels_and_texts(vec![said(None, Some(""), &[])]), [pair("final", "")]);
        assert_eq!(channels_and_texts(vec![said(Some("t"), Some(""), &[])]), [pair("analysis", "t")]);
        assert_eq!(channels_and_texts(vec![said(None, Some(""), &[("a", "f")])]), [pair("commentary", "{}")]);
        assert_eq!(channels_and_texts(vec![said(None, None, &[])]), []);
    }

    #[test]
    fn a_result_belongs_to_the_latest_call_before_it() {
        let conversation =
            vec![said(None, None, &[("a", "f")]), result("a"), said(None, None, &[("a", "g")]), result("a")];
        let names: Vec<_> = lower(conversation).unwrap().into_iter().filter_map(|message| message.name).collect();
        assert_eq!(names, ["functions.f", "functions.g"]);
    }

    #[test]
    fn a_result_without_a_call_is_an_error_that_names_it() {
        let error = lower(vec![result("b"), said(None, None, &[("b", "f")])]).unwrap_err();
        assert_eq!(error, RenderError::UnknownToolCall { message_idx: 0, id: "b".into() });
        assert_eq!(error.field(), "messages[0].tool_call_id");
    }
}
