//! The grammar of a turn in Harmony.
//!
//! Bodies of messages are free text or follow a schema; between them the control tokens and headers are those that a model
//! may write by the format. Reasoning is free, as long as the model likes. Both orders of a call's header are legal (channel
//! first, as the model prefers, or recipient first), and so are the ways to name the type of a body.

use std::fmt::Write as _;

use types::Constraint;

use super::control::ControlTokens;
use super::{ANALYSIS, COMMENTARY, FINAL, FUNCTIONS};
use crate::chat::{Conversation, JsonShape, ResponseFormat, SchemaPlace, ToolChoice, ToolDefinition, TurnConstraint};

/// What the turn may end with, beside a call.
enum Answer {
    Nothing,
    Text,
    Json(JsonShape),
}

/// The grammar that the conversation asks for, if it asks for one.
pub(super) fn of_turn(conversation: &Conversation, control: &ControlTokens) -> Option<TurnConstraint> {
    let choice = &conversation.tool_choice;
    let may_be_called = |tool: &ToolDefinition| match choice {
        ToolChoice::Named(name) => tool.name == *name,
        ToolChoice::Auto | ToolChoice::Required | ToolChoice::None => true,
    };
    let tools: Vec<(usize, &ToolDefinition)> =
        conversation.offered_tools().iter().enumerate().filter(|(_, tool)| may_be_called(tool)).collect();
    let answer = match (choice, &conversation.response_format) {
        (ToolChoice::Required | ToolChoice::Named(_), _) => Answer::Nothing,
        (_, ResponseFormat::Text) => Answer::Text,
        (_, ResponseFormat::JsonObject) => Answer::Json(JsonShape::object()),
        (_, ResponseFormat::JsonSchema(format)) => Answer::Json(JsonShape::new(&format.schema, format.strict)),
    };
    if matches!(answer, Answer::Text) && !tools.iter().any(|(_, tool)| tool.strict) {
        return None;
    }
    let mut turn = Turn { control, lark: String::new(), schemas: Vec::new() };
    turn.write(answer, &tools);
    Some(TurnConstraint { grammar: Constraint { lark: turn.lark.into() }, schemas: turn.schemas })
}

struct Turn<'a> {
    control: &'a ControlTokens,
    lark: String,
    schemas: Vec<(SchemaPlace, JsonShape)>,
}

impl Turn<'_> {
    fn write(&mut self, answer: Answer, tools: &[(usize, &ToolDefinition)]) {
        let calls = tools.iter().map(|(idx, _)| format!("call_{idx}"));
        let answers = (!matches!(answer, Answer::Nothing)).then(|| "answer".to_owned());
        let last = answers.into_iter().chain(calls).collect::<Vec<_>>().join(" | ");
        let preamble = if tools.is_empty() { "" } else { "preamble? " };
        // A model kept from the ending it would like could think in circles instead: then it has one message of each kind, however long.
        match answer {
            Answer::Text => self.rule("start", format_args!("(analysis | preamble)* ({last})")),
            Answer::Json(_) | Answer::Nothing => self.rule("start", format_args!("analysis? {preamble}({last})")),
        }
        let ControlTokens { start, end, message, channel, constrain, call, r#return, .. } = *self.control;
        for (name, channel_name) in [("analysis", ANALYSIS), ("preamble", COMMENTARY)] {
            let header = format!(r#"<[{channel}]> "{channel_name}" <[{message}]>"#);
            self.rule(name, format_args!(r#"{header} TEXT? <[{end}]> <[{start}]> "assistant""#));
        }
        self.rule("json_type", format_args!(r#"" "? <[{constrain}]> "json" | " json""#));
        self.rule("TEXT", format_args!("/(?s:.+)/"));
        let header = format!(r#"<[{channel}]> "{FINAL}""#);
        match answer {
            Answer::Nothing => {}
            Answer::Text => self.rule("answer", format_args!("{header} <[{message}]> TEXT? <[{return}]>")),
            Answer::Json(shape) => {
                self.rule("answer", format_args!("{header} json_type? <[{message}]> answer_json <[{return}]>"));
                self.rule("answer_json", format_args!("{}", shape.rule()));
                self.schemas.push((SchemaPlace::ResponseFormat, shape));
            }
        }
        for (idx, tool) in tools {
            let shape =
                tool.parameters.as_ref().map_or_else(JsonShape::object, |schema| JsonShape::new(schema, tool.strict));
            let text = |text: String| serde_json::Value::String(text);
            let recipient_first = text(format!(" to={FUNCTIONS}.{}", tool.name));
            let channel_first = text(format!("{COMMENTARY} to={FUNCTIONS}.{}", tool.name));
            let header = format!(r#"({recipient_first} <[{channel}]> "{COMMENTARY}" | <[{channel}]> {channel_first})"#);
            let name = format!("call_{idx}");
            self.rule(&name, format_args!("{header} json_type? <[{message}]> {name}_json <[{call}]>"));
            self.rule(&format!("{name}_json"), format_args!("{}", shape.rule()));
            self.schemas.push((SchemaPlace::Tool(*idx), shape));
        }
    }

    fn rule(&mut self, name: &str, right: std::fmt::Arguments<'_>) {
        let _ = writeln!(self.lark, "{name}: {right}"); // a String takes everything
    }
}
