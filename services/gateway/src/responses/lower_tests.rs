use format::chat::{Message, ReasoningEffort, ResponseFormat, ToolCall, ToolChoice};
use serde_json::{Value, json};
use types::Sampling;

use super::{History, lower};
use crate::error::ApiError;
use crate::plan::{ChatPlan, LoweringContext, PromptDefaults};

fn lowered(body: Value) -> Result<ChatPlan, ApiError> {
    let defaults = PromptDefaults { current_date: Some("2025-06-28".into()), ..PromptDefaults::default() };
    let context = LoweringContext { defaults, drawn_seed: 9, choices_max: 8 };
    lower(&serde_json::from_value(body).unwrap(), &History::default(), &context)
}

fn user(text: &str) -> Message {
    Message::User { name: None, text: text.into() }
}

fn assistant(reasoning: Option<&str>, content: Option<&str>, calls: &[(&str, &str, &str)]) -> Message {
    let call = |(id, name, arguments): &(&str, &str, &str)| ToolCall {
        id: (*id).into(),
        name: (*name).into(),
        arguments: (*arguments).into(),
    };
    Message::Assistant {
        reasoning: reasoning.map(str::to_owned),
        content: content.map(str::to_owned),
        tool_calls: calls.iter().map(call).collect(),
    }
}

#[test]
fn a_text_is_a_user_message_and_absent_fields_are_neutral() {
    let plan = lowered(json!({ "input": "Hi", "instructions": "Be brief.", "unknown": 1 })).unwrap();
    assert_eq!(plan.conversation.messages, [Message::Instructions { text: "Be brief.".into() }, user("Hi")]);
    assert_eq!(plan.conversation.current_date.as_deref(), Some("2025-06-28"));
    assert_eq!(plan.conversation.tool_choice, ToolChoice::Auto);
    assert_eq!(plan.sampling, Sampling { seed: 9, ..Sampling::default() });
    assert_eq!((plan.max_tokens, plan.num_choices), (None, 1));
}

#[test]
fn a_tool_loop_becomes_one_assistant_message_a_step() {
    let plan = lowered(json!({ "input": [
        { "role": "user", "content": [{ "type": "input_text", "text": "w" }, { "type": "input_text", "text": "?" }] },
        { "type": "reasoning", "id": "rs", "summary": [], "content": [{ "type": "reasoning_text", "text": "Need." }] },
        { "type": "message", "role": "assistant", "content": [{ "type": "output_text", "text": "Wait." }] },
        { "type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}" },
        { "type": "function_call", "call_id": "c2", "name": "g", "arguments": "{\"a\":1}" },
        { "type": "function_call_output", "call_id": "c1", "output": "1" },
        { "type": "function_call_output", "call_id": "c2", "output": [{ "type": "input_text", "text": "2" }] },
        { "type": "reasoning", "summary": [{ "type": "summary_text", "text": "Done." }] },
        { "type": "message", "role": "assistant", "content": "It is 3." },
        { "role": "user", "content": "thanks" }
    ]}))
    .unwrap();
    let result = |id: &str, text: &str| Message::ToolResult { call_id: id.into(), text: text.into() };
    let expected = [
        user("w?"),
        assistant(Some("Need."), Some("Wait."), &[("c1", "f", "{}"), ("c2", "g", "{\"a\":1}")]),
        result("c1", "1"),
        result("c2", "2"),
        assistant(Some("Done."), Some("It is 3."), &[]),
        user("thanks"),
    ];
    assert_eq!(plan.conversation.messages, expected);
}

#[test]
fn tools_of_other_kinds_are_left_out() {
    let plan = lowered(json!({ "input": "x", "tools": [
        { "type": "web_search" },
        { "type": "function", "name": "f", "description": "d", "parameters": { "type": "object" }, "strict": true }
    ], "tool_choice": { "type": "function", "name": "f" }, "reasoning": { "effort": "xhigh" },
       "text": { "format": { "type": "json_schema", "name": "n", "schema": { "type": "object" }, "strict": true } } }))
    .unwrap();
    assert_eq!(plan.conversation.tools.len(), 1);
    assert_eq!(plan.conversation.tool_choice, ToolChoice::Named("f".into()));
    assert_eq!(plan.conversation.reasoning_effort, ReasoningEffort::High);
    assert!(matches!(plan.conversation.response_format, ResponseFormat::JsonSchema(format) if format.strict));
}

#[test]
fn refusals_name_the_place() {
    let cases = [
        (json!({}), "input"),
        (json!({ "input": "x", "store": true }), "store"),
        (json!({ "input": "x", "previous_response_id": "resp_1" }), "previous_response_id"),
        (json!({ "input": "x", "background": true }), "background"),
        (json!({ "input": "x", "conversation": "conv_1" }), "conversation"),
        (json!({ "input": [{ "role": "robot", "content": "x" }] }), "input[0].role"),
        (json!({ "input": [{ "role": "user" }] }), "input[0].content"),
        (json!({ "input": [{ "role": "user", "content": [{ "type": "input_image" }] }] }), "input[0].content[0].type"),
        (json!({ "input": [{ "role": "user", "content": [{ "type": "input_text" }] }] }), "input[0].content[0].text"),
        (json!({ "input": [{ "type": "function_call", "name": "f" }] }), "input[0].call_id"),
        (json!({ "input": [{ "type": "function_call", "call_id": "c", "name": "" }] }), "input[0].name"),
        (json!({ "input": "x", "tools": [{ "type": "function", "name": "" }] }), "tools[0].name"),
        (
            json!({ "input": "x", "text": { "format": { "type": "json_schema", "name": "", "schema": {} } } }),
            "text.format.name",
        ),
        (json!({ "input": [{ "type": "function_call_output", "call_id": "c", "output": "" }] }), "input[0].call_id"),
        (json!({ "input": [{ "type": "item_reference", "id": "x" }] }), "input[0].type"),
        (json!({ "input": "x", "reasoning": { "effort": "huge" } }), "reasoning.effort"),
        (json!({ "input": "x", "text": { "format": { "type": "xml" } } }), "text.format.type"),
        (json!({ "input": "x", "tool_choice": "maybe" }), "tool_choice"),
        (json!({ "input": "x", "temperature": -1 }), "temperature"),
        (json!({ "input": "x", "max_output_tokens": 0 }), "max_output_tokens"),
    ];
    for (body, param) in cases {
        let error = lowered(body.clone()).unwrap_err();
        assert_eq!((error.status().as_u16(), error.object().param.as_deref()), (400, Some(param)), "{body}");
    }
}

/// A body holds so many that looking each of them up among all would take minutes.
#[test]
fn ten_times_the_calls_take_about_ten_times_as_long() {
    let lower = |num_calls: usize| {
        let call = |idx: usize| json!({ "type": "function_call", "call_id": format!("call_{idx:06}"), "name": "f" });
        let output =
            |idx: usize| json!({ "type": "function_call_output", "call_id": format!("call_{idx:06}"), "output": "" });
        let items: Vec<Value> = (0..num_calls).map(call).chain((0..num_calls).map(output)).collect();
        let body = json!({ "input": items });
        let begun = std::time::Instant::now();
        assert_eq!(lowered(body).unwrap().conversation.messages.len(), 1 + num_calls);
        begun.elapsed()
    };
    let few = (0..3).map(|_| lower(3_000)).max().unwrap();
    let many = (0..3).map(|_| lower(30_000)).min().unwrap();
    assert!(many < 40 * few, "{few:?} for 3,000 calls, {many:?} for 30,000");
}

#[test]
fn what_came_earlier_stands_between_instructions_and_input() {
    let earlier = vec![
        json!({ "type": "message", "role": "user", "content": "w?" }),
        json!({ "type": "function_call", "id": "fc_1", "status": "completed", "call_id": "c1", "name": "f", "arguments": "{}" }),
    ];
    let body = json!({
        "instructions": "Be brief.", "previous_response_id": "resp_1", "store": true,
        "input": [{ "type": "function_call_output", "call_id": "c1", "output": "1" }],
    });
    let history = History { is_kept: true, earlier };
    let context = LoweringContext { defaults: PromptDefaults::default(), drawn_seed: 9, choices_max: 8 };
    let plan = lower(&serde_json::from_value(body.clone()).unwrap(), &history, &context).unwrap();
    let expected = [
        Message::Instructions { text: "Be brief.".into() },
        user("w?"),
        assistant(None, None, &[("c1", "f", "{}")]),
        Message::ToolResult { call_id: "c1".into(), text: "1".into() },
    ];
    assert_eq!(plan.conversation.messages, expected);
    let error = lower(&serde_json::from_value(body).unwrap(), &History::default(), &context).unwrap_err();
    assert_eq!(error.object().param.as_deref(), Some("store"));
}
