//! JSON schemas as TypeScript types, to the byte as the published renderer writes them, because that is what the model was shown.
//!
//! Its oddities are kept: only the first line of a property's description is marked as a comment, an object property's
//! description comes twice, literals are not escaped, and what it does not know is `any`. [`super::schema`] rewrites what it
//! does not know into what it does.

use serde_json::{Map, Value};

/// One level deeper, for the properties of a property.
const PROPERTY_INDENT: &str = "    ";
/// One level deeper, for what follows the bar of a variant.
const VARIANT_INDENT: &str = "   ";

/// The type that `schema` describes; its further lines begin with `indent`.
pub(super) fn type_of(schema: &Value, indent: &str) -> String {
    if let Some(variants) = variants(schema) {
        let line = |variant| {
            let comments =
                text(variant, "description").map(str::to_owned).into_iter().chain(default(variant, Literals::Quoted));
            format!("\n{}", one_of_variant(variant, indent, comments.collect()))
        };
        return variants.iter().map(line).collect();
    }
    match &schema["type"] {
        Value::Array(names) => type_union(names),
        Value::String(name) => match name.as_str() {
            "object" => object(schema, indent),
            "string" => string(schema),
            "integer" | "number" => "number".to_owned(),
            "boolean" => "boolean".to_owned(),
            "array" => match schema.get("items") {
                Some(items) => format!("{}[]", type_of(items, indent)),
                None => "Array<any>".to_owned(),
            },
            _ => "any".to_owned(),
        },
        _ => "any".to_owned(),
    }
}

fn variants(schema: &Value) -> Option<&Vec<Value>> {
    schema["oneOf"].as_array()
}

/// The text of a field, if it is one.
fn text<'s>(schema: &'s Value, field: &str) -> Option<&'s str> {
    schema[field].as_str()
}

fn type_union(names: &[Value]) -> String {
    let name = |value: &Value| Some(if value == "integer" { "number".to_owned() } else { value.as_str()?.to_owned() });
    let names: Vec<String> = names.iter().filter_map(name).collect();
    if names.is_empty() { "any".to_owned() } else { names.join(" | ") }
}

fn string(schema: &Value) -> String {
    let literals = schema["enum"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let literals: Vec<String> = literals.map(|literal| format!("\"{literal}\"")).collect();
    if literals.is_empty() { "string".to_owned() } else { literals.join(" | ") }
}

fn object(schema: &Value, indent: &str) -> String {
    let mut out = text(schema, "description").map(|text| format!("{indent}// {text}\n")).unwrap_or_default();
    out.push_str("{\n");
    let no_properties = Map::new();
    for (name, property) in schema["properties"].as_object().unwrap_or(&no_properties) {
        let is_required =
            schema["required"].as_array().is_some_and(|required| required.iter().any(|other| other == name));
        let key = if is_required { name.clone() } else { format!("{name}?") };
        match variants(property) {
            Some(variants) => one_of_property(&key, property, variants, indent, &mut out),
            None => plain_property(&key, property, indent, &mut out),
        }
    }
    out.push_str(indent);
    out.push('}');
    out
}

fn plain_property(key: &str, property: &Value, indent: &str, out: &mut String) {
    title(property, indent, out);
    if let Some(text) = text(property, "description") {
        out.push_str(&format!("{indent}// {text}\n"));
    }
    examples(property, indent, out);
    let written = nullable(property, type_of(property, &format!("{indent}{PROPERTY_INDENT}")));
    let default = default(property, Literals::AsEnum).map(|default| format!(" // {default}")).unwrap_or_default();
    out.push_str(&format!("{indent}{key}: {written},{default}\n"));
}

fn one_of_property(key: &str, property: &Value, variants: &[Value], indent: &str, out: &mut String) {
    title(property, indent, out);
    examples(property, indent, out);
    // One description is enough: the first variant's is left out for the property's, and the property's if they are the same.
    let description = text(property, "description");
    let is_of_first =
        variants.first().is_some_and(|first| description.is_some() && text(first, "description") == description);
    let own = description.filter(|_| !is_of_first).map(str::to_owned);
    for comment in own.into_iter().chain(default(property, Literals::AsEnum)) {
        out.push_str(&format!("{indent}// {comment}\n"));
    }
    out.push_str(&format!("{indent}{key}:\n"));
    for (i, variant) in variants.iter().enumerate() {
        let is_new = |text: &&str| description.is_none_or(|description| i > 0 && *text != description);
        let trailing = text(variant, "description").filter(is_new).map(str::to_owned);
        let comments = trailing.into_iter().chain(default(variant, Literals::AsEnum)).collect();
        out.push_str(&one_of_variant(variant, indent, comments));
        out.push('\n');
    }
    out.push_str(&format!("{indent},\n"));
}

/// One variant on lines of its own, its comments behind it.
fn one_of_variant(variant: &Value, indent: &str, comments: Vec<String>) -> String {
    let written = nullable(variant, type_of(variant, &format!("{indent}{VARIANT_INDENT}")));
    let trailer = if comments.is_empty() { String::new() } else { format!(" // {}", comments.join(" ")) };
    format!("{indent} | {written}{trailer}")
}

fn title(property: &Value, indent: &str, out: &mut String) {
    if let Some(text) = text(property, "title") {
        out.push_str(&format!("{indent}// {text}\n{indent}//\n"));
    }
}

fn examples(property: &Value, indent: &str, out: &mut String) {
    let Some(examples) = property["examples"].as_array().filter(|examples| !examples.is_empty()) else { return };
    out.push_str(&format!("{indent}// Examples:\n"));
    for example in examples.iter().filter_map(Value::as_str) {
        out.push_str(&format!("{indent}// - \"{example}\"\n"));
    }
}

fn nullable(schema: &Value, written: String) -> String {
    if schema["nullable"] == true && !written.contains("null") { format!("{written} | null") } else { written }
}

/// How a default that is a text is written.
#[derive(Clone, Copy, PartialEq)]
enum Literals {
    /// In quotes.
    Quoted,
    /// Without them if the schema enumerates values: properties and their variants.
    AsEnum,
}

fn default(schema: &Value, literals: Literals) -> Option<String> {
    let is_enum = literals == Literals::AsEnum && schema["enum"].as_array().is_some_and(|values| !values.is_empty());
    let default = match schema.get("default")? {
        Value::String(text) if is_enum => text.clone(),
        Value::String(text) => format!("\"{text}\""),
        // The published renderer writes no plus sign into exponents.
        number @ Value::Number(_) => number.to_string().replace("e+", "e"),
        other => other.to_string(),
    };
    Some(format!("default: {default}"))
}
