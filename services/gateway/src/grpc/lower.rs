//! A protobuf chat request to a [`ChatPlan`].

use std::time::Duration;

use format::chat::{
    Conversation, Message, ReasoningEffort, ResponseFormat, SchemaFormat, ToolCall, ToolChoice, ToolDefinition,
};
use types::{RequestId, Sampling};
use wire::pb::{self, chat_message::Kind};

use crate::error::ApiError;
use crate::params::{SamplingFields, StopStrings};
use crate::plan::{ChatPlan, LoweringContext};

/// A request of `Gateway.Chat`, read and checked as far as that needs no vocabulary.
#[derive(Debug, PartialEq)]
pub(super) struct ChatCall {
    /// `None`: the gateway draws one.
    pub(super) id: Option<RequestId>,
    /// `None`: the served one.
    pub(super) model: Option<String>,
    pub(super) plan: ChatPlan,
    /// The request's own limit, if it has one.
    pub(super) timeout: Option<Duration>,
}

pub(super) fn lower(request: pb::ChatRequest, context: &LoweringContext) -> Result<ChatCall, ApiError> {
    let id = match request.request_id.as_str() {
        "" => None,
        id => {
            let id = RequestId::new(id);
            Some(id.map_err(|reason| ApiError::invalid("request_id", format!("request_id {reason}")))?)
        }
    };
    if request.messages.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty"));
    }
    let messages = request.messages.into_iter().enumerate();
    let tools = request.tools.into_iter().enumerate();
    let defaults = context.defaults.clone();
    let conversation = Conversation {
        messages: messages.map(|(idx, message)| self::message(idx, message)).collect::<Result<_, _>>()?,
        tools: tools.map(|(idx, tool)| self::tool(idx, tool)).collect::<Result<_, _>>()?,
        tool_choice: tool_choice(known(request.tool_choice, "tool_choice")?, request.required_tool)?,
        response_format: request.response_format.map_or(Ok(ResponseFormat::Text), response_format)?,
        reasoning_effort: match known(request.reasoning_effort, "reasoning_effort")? {
            pb::ReasoningEffort::Low => ReasoningEffort::Low,
            pb::ReasoningEffort::Unspecified | pb::ReasoningEffort::Medium => ReasoningEffort::Medium,
            pb::ReasoningEffort::High => ReasoningEffort::High,
        },
        current_date: request.current_date.or(defaults.current_date),
        model_identity: request.model_identity.or(defaults.model_identity),
        knowledge_cutoff: request.knowledge_cutoff.or(defaults.knowledge_cutoff),
    };
    let stop = StopStrings::Many(request.stop).checked()?;
    let timeout = request.timeout.map(timeout).transpose()?;
    let plan = ChatPlan {
        conversation,
        sampling: sampling(request.sampling.unwrap_or_default(), context.drawn_seed)?,
        max_tokens: request.max_tokens,
        num_choices: 1,
        stop,
    };
    let model = (!request.model.is_empty()).then_some(request.model);
    Ok(ChatCall { id, model, plan, timeout })
}

fn timeout(timeout: prost_types::Duration) -> Result<Duration, ApiError> {
    Duration::try_from(timeout)
        .ok()
        .filter(|timeout| !timeout.is_zero())
        .ok_or_else(|| ApiError::invalid("timeout", "timeout is not above 0"))
}

fn message(idx: usize, message: pb::ChatMessage) -> Result<Message, ApiError> {
    Ok(match message.kind {
        Some(Kind::Instructions(pb::InstructionsMessage { text })) => Message::Instructions { text },
        Some(Kind::User(pb::UserMessage { text, name })) => Message::User { name, text },
        Some(Kind::Assistant(pb::AssistantMessage { reasoning, content, tool_calls })) => {
            let call = |(call_idx, pb::ToolCall { id, name, arguments })| {
                named(&name, || format!("messages[{idx}].assistant.tool_calls[{call_idx}].name"))?;
                Ok(ToolCall { id, name, arguments })
            };
            let tool_calls = tool_calls.into_iter().enumerate().map(call).collect::<Result<_, ApiError>>()?;
            Message::Assistant { reasoning, content, tool_calls }
        }
        Some(Kind::ToolResult(pb::ToolResultMessage { call_id, text })) => Message::ToolResult { call_id, text },
        None => {
            let field = format!("messages[{idx}].kind");
            return Err(ApiError::invalid(field.clone(), format!("{field} is missing")));
        }
    })
}

/// Refuses an empty name of something that a model calls by it.
fn named(name: &str, field: impl Fn() -> String) -> Result<(), ApiError> {
    if name.is_empty() { Err(ApiError::invalid(field(), format!("{} is empty", field()))) } else { Ok(()) }
}

fn tool(idx: usize, tool: pb::ToolDefinition) -> Result<ToolDefinition, ApiError> {
    named(&tool.name, || format!("tools[{idx}].name"))?;
    let parameters = tool.parameters_json.as_deref().map(serde_json::from_str).transpose().map_err(|error| {
        let field = format!("tools[{idx}].parameters_json");
        ApiError::invalid(field.clone(), format!("{field} is not JSON: {error}"))
    })?;
    Ok(ToolDefinition { name: tool.name, description: tool.description, parameters, strict: tool.strict })
}

fn tool_choice(choice: pb::ToolChoice, required_tool: Option<String>) -> Result<ToolChoice, ApiError> {
    match (choice, required_tool) {
        (pb::ToolChoice::Required, None) => Ok(ToolChoice::Required),
        (pb::ToolChoice::Required, Some(name)) => Ok(ToolChoice::Named(name)),
        (_, Some(_)) => Err(ApiError::invalid("required_tool", "required_tool needs TOOL_CHOICE_REQUIRED")),
        (pb::ToolChoice::Unspecified, None) => Ok(ToolChoice::Auto),
        (pb::ToolChoice::None, None) => Ok(ToolChoice::None),
    }
}

fn response_format(format: pb::ResponseFormat) -> Result<ResponseFormat, ApiError> {
    let pb::ResponseFormat { json_schema, name, description, strict } = format;
    let Some(schema) = json_schema else { return Ok(ResponseFormat::JsonObject) };
    let field = "response_format.json_schema";
    let schema = serde_json::from_str(&schema)
        .map_err(|error| ApiError::invalid(field, format!("{field} is not JSON: {error}")))?;
    Ok(ResponseFormat::JsonSchema(SchemaFormat { name, description, schema, strict }))
}

/// Goes by the fields of the JSON APIs, so that defaults and ranges are the same.
fn sampling(sampling: pb::Sampling, drawn_seed: u64) -> Result<Sampling, ApiError> {
    let refused = [
        ("sampling.choice", sampling.choice != 0, "sampling.choice is set, but there is one answer only"),
        ("sampling.logprobs", sampling.logprobs.is_some(), "sampling.logprobs is set, but answers are text"),
    ];
    if let Some((param, _, message)) = refused.into_iter().find(|(_, is_set, _)| *is_set) {
        return Err(ApiError::invalid(param, message));
    }
    let fields = SamplingFields {
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        top_k: Some(sampling.top_k),
        min_p: Some(sampling.min_p),
        presence_penalty: Some(sampling.presence_penalty),
        frequency_penalty: Some(sampling.frequency_penalty),
        repetition_penalty: sampling.repetition_penalty,
        ..SamplingFields::default()
    };
    let logit_bias = sampling.logit_bias.iter().map(|entry| (entry.token, entry.bias)).collect();
    Ok(Sampling { logit_bias, ..fields.resolve(sampling.seed.unwrap_or(drawn_seed))? })
}

fn known<E: TryFrom<i32>>(value: i32, field: &str) -> Result<E, ApiError> {
    E::try_from(value).map_err(|_| ApiError::invalid(field, format!("{field} is {value}, unknown")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::PromptDefaults;

    fn lowered(request: pb::ChatRequest) -> Result<ChatCall, ApiError> {
        let defaults = PromptDefaults { current_date: Some("2025-06-28".into()), ..PromptDefaults::default() };
        lower(request, &LoweringContext { defaults, drawn_seed: 9, choices_max: 8 })
    }

    fn asking(text: &str) -> pb::ChatRequest {
        let user = Kind::User(pb::UserMessage { text: text.into(), name: None });
        pb::ChatRequest { messages: vec![pb::ChatMessage { kind: Some(user) }], ..pb::ChatRequest::default() }
    }

    #[test]
    fn absent_fields_are_the_defaults_of_the_json_apis() {
        let call = lowered(asking("hi")).unwrap();
        assert_eq!((call.id, call.model, call.timeout), (None, None, None));
        assert_eq!(call.plan.sampling, Sampling { seed: 9, ..Sampling::default() });
        assert_eq!(call.plan.conversation.messages, [Message::User { name: None, text: "hi".into() }]);
        assert_eq!(call.plan.conversation.current_date.as_deref(), Some("2025-06-28"));
        assert_eq!(call.plan.conversation.reasoning_effort, ReasoningEffort::Medium);
    }

    #[test]
    fn constraints_are_those_of_the_json_apis() {
        let schema = pb::ResponseFormat {
            json_schema: Some(r#"{"type":"null"}"#.into()),
            name: "nothing".into(),
            description: None,
            strict: true,
        };
        let named = pb::ChatRequest {
            tool_choice: pb::ToolChoice::Required.into(),
            required_tool: Some("f".into()),
            response_format: Some(schema),
            ..asking("hi")
        };
        let conversation = lowered(named).unwrap().plan.conversation;
        assert_eq!(conversation.tool_choice, ToolChoice::Named("f".into()));
        let ResponseFormat::JsonSchema(format) = conversation.response_format else { panic!("a schema was given") };
        assert_eq!((format.schema, format.strict), (serde_json::json!({"type": "null"}), true));
        let any = pb::ChatRequest { response_format: Some(pb::ResponseFormat::default()), ..asking("hi") };
        assert_eq!(lowered(any).unwrap().plan.conversation.response_format, ResponseFormat::JsonObject);
    }

    #[test]
    fn refusals_name_the_field() {
        let zero = prost_types::Duration { seconds: 0, nanos: 0 };
        let sampling = |sampling| pb::ChatRequest { sampling: Some(sampling), ..asking("hi") };
        let tool =
            pb::ToolDefinition { name: "f".into(), parameters_json: Some("{".into()), ..pb::ToolDefinition::default() };
        let nameless =
            pb::AssistantMessage { tool_calls: vec![pb::ToolCall::default()], ..pb::AssistantMessage::default() };
        let nameless = vec![pb::ChatMessage { kind: Some(Kind::Assistant(nameless)) }];
        let broken = pb::ResponseFormat { json_schema: Some("{".into()), ..pb::ResponseFormat::default() };
        let cases = [
            (pb::ChatRequest::default(), "messages"),
            (pb::ChatRequest { messages: vec![pb::ChatMessage { kind: None }], ..asking("") }, "messages[0].kind"),
            (pb::ChatRequest { request_id: "a b".into(), ..asking("hi") }, "request_id"),
            (pb::ChatRequest { tool_choice: 7, ..asking("hi") }, "tool_choice"),
            (pb::ChatRequest { reasoning_effort: 7, ..asking("hi") }, "reasoning_effort"),
            (pb::ChatRequest { timeout: Some(zero), ..asking("hi") }, "timeout"),
            (pb::ChatRequest { stop: vec![String::new()], ..asking("hi") }, "stop"),
            (pb::ChatRequest { tools: vec![tool], ..asking("hi") }, "tools[0].parameters_json"),
            (pb::ChatRequest { tools: vec![pb::ToolDefinition::default()], ..asking("hi") }, "tools[0].name"),
            (pb::ChatRequest { messages: nameless, ..asking("hi") }, "messages[0].assistant.tool_calls[0].name"),
            (pb::ChatRequest { required_tool: Some("f".into()), ..asking("hi") }, "required_tool"),
            (pb::ChatRequest { response_format: Some(broken), ..asking("hi") }, "response_format.json_schema"),
            (sampling(pb::Sampling { choice: 1, ..pb::Sampling::default() }), "sampling.choice"),
            (sampling(pb::Sampling { logprobs: Some(1), ..pb::Sampling::default() }), "sampling.logprobs"),
            (sampling(pb::Sampling { temperature: Some(3.0), ..pb::Sampling::default() }), "temperature"),
        ];
        for (request, param) in cases {
            let error = lowered(request.clone()).unwrap_err();
            assert_eq!(error.object().param.as_deref(), Some(param), "{request:?}");
        }
    }
}
