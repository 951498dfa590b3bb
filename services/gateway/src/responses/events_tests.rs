//! The order of events, as Codex and OpenAI's SDK need it.

use format::chat::{CallDelta, ChatFinish, Delta, TextDelta};
use serde_json::{Map, Value, json};

use super::{ResponseEvent, ResponseWriter};
use crate::error::ApiError;
use crate::ids::ResponseKey;
use crate::turn::TurnEnd;
use crate::usage::Cost;

fn reasoning(message_idx: u32, text: &str) -> Delta {
    Delta::Reasoning(TextDelta { message_idx, text: text.into(), joins: false })
}

fn content(message_idx: u32, text: &str, joins: bool) -> Delta {
    Delta::Content(TextDelta { message_idx, text: text.into(), joins })
}

fn call(message_idx: u32, name: Option<&str>, arguments: &str) -> Delta {
    let name = name.map(str::to_owned);
    Delta::ToolCall(CallDelta { message_idx, index: 0, name, arguments: arguments.into() })
}

fn written(deltas: &[Delta], reason: ChatFinish) -> (Vec<ResponseEvent>, Value) {
    let mut writer = ResponseWriter::new(ResponseKey::new(7), Map::from_iter([("model".to_owned(), json!("m"))]));
    let mut events = Vec::new();
    writer.start(&mut events);
    for delta in deltas {
        writer.piece(delta, &mut events);
    }
    let end = TurnEnd { reason, output_tokens: 5, reasoning_tokens: 2 };
    let cost = Cost { prompt_tokens: 10, cached_tokens: 4, output_tokens: 5, reasoning_tokens: 2 };
    let response = writer.finish(&end, cost, &mut events);
    (events, response)
}

fn names(events: &[ResponseEvent]) -> Vec<&str> {
    events.iter().map(|event| event.name.strip_prefix("response.").unwrap()).collect()
}

/// What must hold for every sequence, whatever it says.
fn check_invariants(events: &[ResponseEvent]) {
    let mut open: Option<(Value, Value)> = None;
    let mut num_items = 0;
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event.data["sequence_number"], number);
        assert_eq!(event.data["type"], event.name);
        match event.name {
            "response.output_item.added" => {
                assert!(open.is_none(), "an item opens inside another one");
                assert_eq!(event.data["output_index"], num_items);
                open = Some((event.data["item"]["id"].clone(), event.data["output_index"].clone()));
            }
            "response.output_item.done" => {
                let (id, index) = open.take().expect("an item that closes was open");
                assert_eq!((&event.data["item"]["id"], &event.data["output_index"]), (&id, &index));
                num_items += 1;
            }
            name if event.data.get("item_id").is_some() => {
                let (id, index) = open.as_ref().expect("parts lie inside an item");
                assert_eq!((&event.data["item_id"], &event.data["output_index"]), (id, index), "{name}");
            }
            _ => {}
        }
    }
    assert!(open.is_none(), "every added has its done");
    assert_eq!(events.last().unwrap().data["response"]["output"].as_array().unwrap().len(), num_items);
}

#[test]
fn reasoning_then_answer() {
    let deltas = [reasoning(0, "Think"), reasoning(0, "ing."), content(1, "Hi", false), content(1, "!", false)];
    let (events, response) = written(&deltas, ChatFinish::Stop);
    check_invariants(&events);
    let expected = [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ];
    assert_eq!(names(&events), expected);
    assert_eq!(response["status"], "completed");
    assert_eq!(response["model"], "m");
    assert_eq!(response["output"][0]["content"], json!([{ "type": "reasoning_text", "text": "Thinking." }]));
    assert_eq!(response["output"][1]["content"][0]["text"], "Hi!");
    assert_eq!(response["usage"]["input_tokens_details"]["cached_tokens"], 4);
    assert_eq!(response["usage"]["output_tokens_details"]["reasoning_tokens"], 2);
    assert_eq!(response, events.last().unwrap().data["response"]);
}

#[test]
fn preamble_and_call_are_two_items_and_the_call_keeps_its_ids() {
    let deltas = [content(0, "Let me look.", false), call(1, Some("f"), "{\"a\""), call(1, None, ":1}")];
    let (events, response) = written(&deltas, ChatFinish::ToolCalls);
    check_invariants(&events);
    let calls: Vec<_> = names(&events).into_iter().filter(|name| name.starts_with("function_call")).collect();
    assert_eq!(
        calls,
        ["function_call_arguments.delta", "function_call_arguments.delta", "function_call_arguments.done"]
    );
    let added = events.iter().rfind(|event| event.name == "response.output_item.added").unwrap();
    assert_eq!(added.data["item"]["arguments"], "");
    assert_eq!(added.data["item"]["call_id"], response["output"][1]["call_id"]);
    assert_eq!(response["output"][1]["arguments"], "{\"a\":1}");
    assert_eq!(response["output"][1]["name"], "f");
    assert_eq!(response["status"], "completed");
}

#[test]
fn messages_of_one_field_are_items_of_their_own() {
    let (events, response) = written(&[content(0, "a", false), content(2, "b", true)], ChatFinish::Stop);
    check_invariants(&events);
    let texts: Vec<_> =
        response["output"].as_array().unwrap().iter().map(|item| item["content"][0]["text"].clone()).collect();
    assert_eq!(texts, ["a", "b"]);
}

#[test]
fn a_spent_budget_closes_what_is_open_as_incomplete() {
    let (events, response) = written(&[reasoning(0, "Hm")], ChatFinish::Length);
    check_invariants(&events);
    assert_eq!(*names(&events).last().unwrap(), "incomplete");
    assert_eq!(response["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(response["output"][0]["status"], "incomplete");
}

#[test]
fn an_empty_answer_is_an_empty_message_and_an_empty_thought_is_nothing() {
    let (events, response) = written(&[reasoning(0, ""), content(1, "", false)], ChatFinish::Stop);
    check_invariants(&events);
    assert_eq!(response["output"].as_array().unwrap().len(), 1);
    assert_eq!(response["output"][0]["content"][0]["text"], "");
}

#[test]
fn a_failure_closes_what_is_open_and_says_why() {
    let mut writer = ResponseWriter::new(ResponseKey::new(7), Map::new());
    let mut events = Vec::new();
    writer.start(&mut events);
    writer.piece(&content(0, "Hal", false), &mut events);
    writer.fail(&ApiError::DeadlineExceeded, &mut events);
    check_invariants(&events);
    let last = &events.last().unwrap().data;
    assert_eq!(last["type"], "response.failed");
    assert_eq!(last["response"]["error"]["code"], "server_error");
    assert_eq!(last["response"]["output"][0]["content"][0]["text"], "Hal");
}
