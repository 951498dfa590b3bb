//! The texts of system and developer blocks: sections joined by a blank line, absent ones leave nothing.

use super::message::{BuiltinTool, DeveloperBlock, SystemBlock};
use super::schema::SchemaTypes;
use super::{COMMENTARY, FUNCTIONS, typescript};
use crate::chat::{SchemaFormat, ToolDefinition};

/// The namespaces that the model was trained with, word for word.
const BROWSER: &str = include_str!("builtin/browser.txt");
const PYTHON: &str = include_str!("builtin/python.txt");

/// `routes_functions`: some developer block of the conversation offers functions.
pub(super) fn system(block: &SystemBlock, routes_functions: bool) -> String {
    let about: Vec<String> = [
        block.model_identity.clone(),
        block.knowledge_cutoff.as_ref().map(|cutoff| format!("Knowledge cutoff: {cutoff}")),
        block.current_date.as_ref().map(|date| format!("Current date: {date}")),
    ]
    .into_iter()
    .flatten()
    .collect();
    let sections = [
        (!about.is_empty()).then(|| about.join("\n")),
        block.reasoning_effort.map(|effort| format!("Reasoning: {}", effort.as_str())),
        builtin_tools(&block.builtin_tools),
        channels(block, routes_functions),
    ];
    join(sections)
}

pub(super) fn developer(block: &DeveloperBlock, schema_types: SchemaTypes) -> String {
    let sections = [
        block.instructions.as_ref().map(|text| format!("# Instructions\n\n{text}")),
        block.functions.as_ref().map(|functions| function_tools(functions, schema_types)),
        block.response_format.as_ref().map(response_format),
    ];
    join(sections)
}

fn join(sections: impl IntoIterator<Item = Option<String>>) -> String {
    sections.into_iter().flatten().collect::<Vec<_>>().join("\n\n")
}

fn builtin_tools(tools: &[BuiltinTool]) -> Option<String> {
    let mut tools = tools.to_vec();
    tools.sort_unstable();
    tools.dedup();
    let text = |tool| match tool {
        BuiltinTool::Browser => BROWSER.trim_end(),
        BuiltinTool::Python => PYTHON.trim_end(),
    };
    let namespaces: Vec<&str> = tools.into_iter().map(text).collect();
    (!namespaces.is_empty()).then(|| format!("# Tools\n\n{}", namespaces.join("\n\n")))
}

fn channels(block: &SystemBlock, routes_functions: bool) -> Option<String> {
    let names = block.valid_channels.as_ref().filter(|names| !names.is_empty())?.join(", ");
    let mut text = format!("# Valid channels: {names}.");
    if block.channel_required {
        text.push_str(" Channel must be included for every message.");
    }
    if routes_functions {
        text.push_str(&format!("\nCalls to these tools must go to the {COMMENTARY} channel: '{FUNCTIONS}'."));
    }
    Some(text)
}

fn function_tools(functions: &[ToolDefinition], schema_types: SchemaTypes) -> String {
    let mut text = format!("# Tools\n\n## {FUNCTIONS}\n");
    if functions.is_empty() {
        return text;
    }
    text.push_str(&format!("\nnamespace {FUNCTIONS} {{\n\n"));
    for function in functions {
        comment(function.description.as_deref(), &mut text);
        text.push_str(&format!("type {} = (", function.name));
        if let Some(schema) = &function.parameters {
            text.push_str("_: ");
            text.push_str(&typescript::type_of(&schema_types.apply(schema), ""));
        }
        text.push_str(") => any;\n\n");
    }
    text.push_str(&format!("}} // namespace {FUNCTIONS}"));
    text
}

fn response_format(format: &SchemaFormat) -> String {
    let mut text = format!("# Response Formats\n\n## {}\n\n", format.name);
    comment(format.description.as_deref(), &mut text);
    text.push_str(&format.schema.to_string());
    text
}

fn comment(description: Option<&str>, text: &mut String) {
    for line in description.unwrap_or_default().lines() {
        text.push_str(&format!("// {line}\n"));
    }
}
