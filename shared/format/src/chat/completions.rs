//! Reads the part of a Chat Completions request body that reaches the prompt.
//!
//! Written by hand rather than derived, so that each error names the field as the client wrote it. Unknown fields are ignored.

use serde_json::{Map, Value};

use crate::chat::conversation::{
    Conversation, Message, ReasoningEffort, ResponseFormat, SchemaFormat, ToolCall, ToolChoice, ToolDefinition,
};

/// A field of a request that cannot be honoured.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct InvalidField {
    /// The path of the field: `messages[2].content[0].type`.
    pub field: String,
    /// What is wrong with it.
    pub reason: String,
}

type Result<T> = std::result::Result<T, InvalidField>;

/// The conversation of a Chat Completions request: `messages`, `tools`, `tool_choice`, `response_format` and `reasoning_effort`.
///
/// The date, the identity and the cutoff stay unset: they are not the client's to say. That results answer calls which are there
/// is checked when the conversation is rendered.
///
/// # Errors
/// The first field that is missing, of the wrong type, or asks for what a text model cannot do.
pub fn conversation(body: &Value) -> Result<Conversation> {
    let body =
        Fields { path: String::new(), map: body.as_object().ok_or_else(|| invalid("", "the body is not an object"))? };
    let messages = body.list("messages")?.ok_or_else(|| body.missing("messages"))?;
    if messages.is_empty() {
        return Err(invalid("messages", "is empty"));
    }
    let tools: Vec<_> = body.list("tools")?.unwrap_or_default().iter().map(tool).collect::<Result<_>>()?;
    Ok(Conversation {
        messages: messages.iter().map(message).collect::<Result<_>>()?,
        tool_choice: tool_choice(&body, &tools)?,
        tools,
        response_format: response_format(&body)?,
        reasoning_effort: match body.text("reasoning_effort")? {
            Some(word) => reasoning_effort(word)?,
            None => ReasoningEffort::default(),
        },
        ..Conversation::default()
    })
}

/// The effort that a client's word for it means: models here know three, and clients know more.
///
/// # Errors
/// Names `reasoning_effort` if the word is none of OpenAI's.
pub fn reasoning_effort(word: &str) -> Result<ReasoningEffort> {
    match word {
        "none" | "minimal" | "low" => Ok(ReasoningEffort::Low),
        "medium" => Ok(ReasoningEffort::Medium),
        "high" | "xhigh" => Ok(ReasoningEffort::High),
        other => {
            Err(invalid("reasoning_effort", format!("is {other:?}, known are none, minimal, low, medium, high, xhigh")))
        }
    }
}

fn message(message: &Item<'_>) -> Result<Message> {
    let message = message.fields()?;
    match message.required_text("role")? {
        "system" | "developer" => Ok(Message::Instructions { text: message.required_content()? }),
        "user" => {
            let name = message.text("name")?.filter(|name| !name.is_empty());
            Ok(Message::User { name: name.map(str::to_owned), text: message.required_content()? })
        }
        "assistant" => assistant(&message),
        "tool" => {
            let call_id = message.required_text("tool_call_id")?.to_owned();
            Ok(Message::ToolResult { call_id, text: message.required_content()? })
        }
        other => {
            Err(message.invalid("role", format!("is {other:?}, known are system, developer, user, assistant, tool")))
        }
    }
}

fn assistant(message: &Fields<'_>) -> Result<Message> {
    if message.get("function_call").is_some() {
        return Err(message.invalid("function_call", "is not supported, use tool_calls"));
    }
    let reasoning = match message.text("reasoning_content")? {
        Some(text) => Some(text),
        None => message.text("reasoning")?,
    };
    let calls = message.list("tool_calls")?.unwrap_or_default();
    Ok(Message::Assistant {
        reasoning: reasoning.filter(|text| !text.is_empty()).map(str::to_owned),
        content: message.content()?,
        tool_calls: calls.iter().map(tool_call).collect::<Result<_>>()?,
    })
}

fn tool_call(call: &Item<'_>) -> Result<ToolCall> {
    let call = call.fields()?;
    call.only_functions()?;
    let function = call.required_object("function")?;
    Ok(ToolCall {
        id: call.required_text("id")?.to_owned(),
        name: function.required_name()?,
        arguments: function.text("arguments")?.unwrap_or_default().to_owned(),
    })
}

fn tool(tool: &Item<'_>) -> Result<ToolDefinition> {
    let tool = tool.fields()?;
    tool.only_functions()?;
    let function = tool.required_object("function")?;
    Ok(ToolDefinition {
        name: function.required_name()?,
        description: function.text("description")?.map(str::to_owned),
        parameters: function.object("parameters")?.map(|parameters| Value::Object(parameters.map.clone())),
        strict: function.flag("strict")?,
    })
}

fn tool_choice(body: &Fields<'_>, tools: &[ToolDefinition]) -> Result<ToolChoice> {
    const KNOWN: &str = "known are none, auto, required, and an object with type function";
    let choice = match body.get("tool_choice") {
        None => return Ok(ToolChoice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => return Ok(ToolChoice::Auto),
            "none" => return Ok(ToolChoice::None),
            "required" if tools.is_empty() => {
                return Err(invalid("tool_choice", "is required, but there are no tools"));
            }
            "required" => return Ok(ToolChoice::Required),
            other => return Err(invalid("tool_choice", format!("is {other:?}, {KNOWN}"))),
        },
        Some(_) => body.required_object("tool_choice")?,
    };
    match choice.required_text("type")? {
        "function" => {}
        other => return Err(choice.invalid("type", format!("is {other:?}, {KNOWN}"))),
    }
    let name = choice.required_object("function")?.required_name()?;
    if tools.iter().all(|tool| tool.name != name) {
        return Err(invalid("tool_choice.function.name", format!("is {name:?}, which is not among the tools")));
    }
    Ok(ToolChoice::Named(name))
}

fn response_format(body: &Fields<'_>) -> Result<ResponseFormat> {
    let Some(format) = body.object("response_format")? else { return Ok(ResponseFormat::Text) };
    match format.required_text("type")? {
        "text" => Ok(ResponseFormat::Text),
        "json_object" => Ok(ResponseFormat::JsonObject),
        "json_schema" => {
            let schema = format.required_object("json_schema")?;
            Ok(ResponseFormat::JsonSchema(SchemaFormat {
                name: schema.required_name()?,
                description: schema.text("description")?.map(str::to_owned),
                schema: Value::Object(schema.object("schema")?.map(|schema| schema.map.clone()).unwrap_or_default()),
                strict: schema.flag("strict")?,
            }))
        }
        other => Err(format.invalid("type", format!("is {other:?}, known are text, json_object, json_schema"))),
    }
}

fn invalid(field: impl Into<String>, reason: impl Into<String>) -> InvalidField {
    InvalidField { field: field.into(), reason: reason.into() }
}

/// An object of the request and where it stands.
struct Fields<'v> {
    path: String,
    map: &'v Map<String, Value>,
}

/// A value in a list of the request and where it stands.
struct Item<'v> {
    path: String,
    value: &'v Value,
}

impl<'v> Item<'v> {
    fn fields(&self) -> Result<Fields<'v>> {
        let map = self.value.as_object().ok_or_else(|| invalid(&self.path, "is not an object"))?;
        Ok(Fields { path: self.path.clone(), map })
    }
}

impl<'v> Fields<'v> {
    fn path_of(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    fn invalid(&self, name: &str, reason: impl Into<String>) -> InvalidField {
        invalid(self.path_of(name), reason)
    }

    fn missing(&self, name: &str) -> InvalidField {
        self.invalid(name, "is missing")
    }

    /// The value of a field; a null is as good as none.
    fn get(&self, name: &str) -> Option<&'v Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    fn text(&self, name: &str) -> Result<Option<&'v str>> {
        let text = |value: &'v Value| value.as_str().ok_or_else(|| self.invalid(name, "is not a string"));
        self.get(name).map(text).transpose()
    }

    fn required_text(&self, name: &str) -> Result<&'v str> {
        self.text(name)?.ok_or_else(|| self.missing(name))
    }

    fn required_name(&self) -> Result<String> {
        match self.required_text("name")? {
            "" => Err(self.invalid("name", "is empty")),
            name => Ok(name.to_owned()),
        }
    }

    fn flag(&self, name: &str) -> Result<bool> {
        let flag = |value: &Value| value.as_bool().ok_or_else(|| self.invalid(name, "is not a boolean"));
        Ok(self.get(name).map(flag).transpose()?.unwrap_or_default())
    }

    fn object(&self, name: &str) -> Result<Option<Fields<'v>>> {
        let item = |value| Item { path: self.path_of(name), value };
        self.get(name).map(|value| item(value).fields()).transpose()
    }

    fn required_object(&self, name: &str) -> Result<Fields<'v>> {
        self.object(name)?.ok_or_else(|| self.missing(name))
    }

    fn list(&self, name: &str) -> Result<Option<Vec<Item<'v>>>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let list = value.as_array().ok_or_else(|| self.invalid(name, "is not a list"))?;
        let item = |(i, value)| Item { path: format!("{}[{i}]", self.path_of(name)), value };
        Ok(Some(list.iter().enumerate().map(item).collect()))
    }

    /// Text, or a list of text parts, which are joined without a separator.
    fn content(&self) -> Result<Option<String>> {
        match self.get("content") {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(Value::Array(_)) => {
                let parts = self.list("content")?.unwrap_or_default();
                parts.iter().map(content_part).collect::<Result<_>>().map(Some)
            }
            Some(_) => Err(self.invalid("content", "is neither a string nor a list of parts")),
        }
    }

    fn required_content(&self) -> Result<String> {
        self.content()?.ok_or_else(|| self.missing("content"))
    }

    fn only_functions(&self) -> Result<()> {
        match self.text("type")? {
            None | Some("function") => Ok(()),
            Some(other) => Err(self.invalid("type", format!("is {other:?}, only function is supported"))),
        }
    }
}

fn content_part<'v>(part: &Item<'v>) -> Result<&'v str> {
    let part = part.fields()?;
    match part.required_text("type")? {
        "text" | "input_text" | "output_text" => part.required_text("text"),
        "refusal" => part.required_text("refusal"),
        other => Err(part.invalid("type", format!("is {other:?}, this model reads text only"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::conversation;
    use crate::chat::{Message, ReasoningEffort, ToolChoice};

    fn field_of_error(body: Value) -> String {
        conversation(&body).unwrap_err().field
    }

    #[test]
    fn errors_name_the_field_as_the_client_wrote_it() {
        let user = json!({"role": "user", "content": "hi"});
        let ask = |more: Value| {
            let mut body = json!({"messages": [user]});
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            field_of_error(body)
        };
        let say = |message: Value| field_of_error(json!({"messages": [user, message]}));
        assert_eq!(field_of_error(json!({})), "messages");
        assert_eq!(field_of_error(json!({"messages": []})), "messages");
        assert_eq!(field_of_error(json!({"messages": ["hi"]})), "messages[0]");
        assert_eq!(say(json!({"role": "narrator", "content": ""})), "messages[1].role");
        assert_eq!(say(json!({"role": "user"})), "messages[1].content");
        assert_eq!(say(json!({"role": "user", "content": 7})), "messages[1].content");
        assert_eq!(say(json!({"role": "user", "content": [{"type": "image_url"}]})), "messages[1].content[0].type");
        assert_eq!(say(json!({"role": "tool", "content": ""})), "messages[1].tool_call_id");
        assert_eq!(
            say(json!({"role": "assistant", "tool_calls": [{"id": "a"}]})),
            "messages[1].tool_calls[0].function"
        );
        assert_eq!(ask(json!({"reasoning_effort": "extreme"})), "reasoning_effort");
        assert_eq!(ask(json!({"tools": [{"type": "web_search"}]})), "tools[0].type");
        assert_eq!(ask(json!({"tools": [{"function": {"name": ""}}]})), "tools[0].function.name");
        assert_eq!(
            ask(json!({"tools": [{"function": {"name": "f", "parameters": 1}}]})),
            "tools[0].function.parameters"
        );
        assert_eq!(ask(json!({"tool_choice": "always"})), "tool_choice");
        assert_eq!(ask(json!({"tool_choice": "required"})), "tool_choice");
        assert_eq!(
            ask(json!({"tool_choice": {"type": "function", "function": {"name": "f"}}})),
            "tool_choice.function.name"
        );
        assert_eq!(ask(json!({"response_format": {"type": "xml"}})), "response_format.type");
        assert_eq!(ask(json!({"response_format": {"type": "json_schema"}})), "response_format.json_schema");
    }

    #[test]
    fn words_for_effort() {
        for (word, effort) in [
            ("none", ReasoningEffort::Low),
            ("minimal", ReasoningEffort::Low),
            ("low", ReasoningEffort::Low),
            ("medium", ReasoningEffort::Medium),
            ("high", ReasoningEffort::High),
            ("xhigh", ReasoningEffort::High),
        ] {
            assert_eq!(super::reasoning_effort(word), Ok(effort));
        }
    }

    #[test]
    fn nulls_and_unknown_fields_do_not_matter() {
        let body = json!({
            "messages": [{"role": "assistant", "content": null, "tool_calls": null, "refusal": null, "reasoning": "so"}],
            "tools": null, "tool_choice": null, "response_format": null, "reasoning_effort": null, "temperature": "hot",
        });
        let conversation = conversation(&body).unwrap();
        let thought = Message::Assistant { reasoning: Some("so".into()), content: None, tool_calls: Vec::new() };
        assert_eq!(conversation.messages, [thought]);
        assert_eq!(conversation.tool_choice, ToolChoice::Auto);
    }
}
