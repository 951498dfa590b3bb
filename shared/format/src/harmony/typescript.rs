//! JSON schemas as TypeScript types, to the byte as the published renderer writes them, because that is what the model was shown.
//!
//! Its oddities are kept: only the first line of a property's description is marked as a comment, an object property's
//! description comes twice, literals are not escaped, and what it does not know is `any`. [`super::schema`] rewrites what it
//! does not know into what it does.

use std::collections::HashSet;

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
                text(variant, "description").map(str::to_owned).into_iter().chain(default(variant, EnumDefault::Json));
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
    let required: HashSet<&str> =
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    for (name, property) in schema["properties"].as_object().unwrap_or(&no_properties) {
        let key = if required.contains(name.as_str()) { name.clone() } else { format!("{name}?") };
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
    let default = default(property, EnumDefault::Bare).map(|default| format!(" // {default}")).unwrap_or_default();
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
    for comment in own.into_iter().chain(default(property, EnumDefault::Bare)) {
        out.push_str(&format!("{indent}// {comment}\n"));
    }
    out.push_str(&format!("{indent}{key}:\n"));
    for (i, variant) in variants.iter().enumerate() {
        let is_new = |text: &&str| description.is_none_or(|description| i > 0 && *text != description);
        let trailing = text(variant, "description").filter(is_new).map(str::to_owned);
        let comments = trailing.into_iter().chain(default(variant, EnumDefault::Bare)).collect();
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

/// How a text is written that is the default of a schema with an enumeration; without one it stands in quotes as it is.
#[derive(Clone, Copy, PartialEq)]
enum EnumDefault {
    /// As JSON: in the variants of a type.
    Json,
    /// As it is: at properties and in their variants.
    Bare,
}

fn default(schema: &Value, enum_default: EnumDefault) -> Option<String> {
    let is_enum = schema["enum"].as_array().is_some_and(|values| !values.is_empty());
    let default = match schema.get("default")? {
        Value::String(text) if !is_enum => format!("\"{text}\""),
        Value::String(text) if enum_default == EnumDefault::Bare => text.clone(),
        // The published renderer writes no plus sign into exponents.
        number @ Value::Number(_) => number.to_string().replace("e+", "e"),
        other => other.to_string(),
    };
    Some(format!("default: {default}"))
}

/// The expected types were written by the published renderer, version 0.0.8.
#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::type_of;

    #[track_caller]
    fn assert_properties(properties: Value, expected: &str) {
        let schema = json!({"type": "object", "properties": properties});
        assert_eq!(type_of(&schema, ""), format!("{{\n{expected}\n}}"));
    }

    #[test]
    fn one_description_is_enough_for_a_one_of() {
        let described = |property: Option<&str>, first: &str, second: &str| {
            let variant = |text: &str| json!({"type": "string", "description": text});
            let mut schema = json!({"oneOf": [variant(first), variant(second)]});
            if let Some(text) = property {
                schema["description"] = json!(text);
            }
            schema
        };
        let properties = json!({
            "other": described(Some("x"), "y", "z"),
            "same": described(Some("x"), "x", "x"),
            "none": described(None, "y", ""),
        });
        let expected = "// x\nother?:\n | string\n | string // z\n,\nsame?:\n | string\n | string\n,\nnone?:\n | string // y\n | string // \n,";
        assert_properties(properties, expected);
    }

    #[test]
    fn defaults() {
        let properties = json!({
            "text": {"type": "string", "default": "q\"uo\nte"},
            "enumerated": {"type": "string", "enum": ["x"], "default": "x"},
            "empty": {"enum": [], "default": "q"},
            "list": {"type": "array", "items": {}, "default": ["ü\t", {"b": 1, "a": 2}]},
            "large": {"type": "number", "default": 1e22},
            "null": {"default": null},
        });
        let expected = "text?: string, // default: \"q\"uo\nte\"\nenumerated?: \"x\", // default: x\nempty?: any, // default: \"q\"\nlist?: any[], // default: [\"ü\\t\",{\"b\":1,\"a\":2}]\nlarge?: number, // default: 1e22\nnull?: any, // default: null";
        assert_properties(properties, expected);
    }

    #[test]
    fn defaults_in_variants_of_a_type_are_json_if_enumerated() {
        let variants = json!([
            {"type": "string", "default": "a\nb"},
            {"type": "string", "enum": ["x"], "default": "a\nb", "description": "d"},
        ]);
        let expected = "\n | string // default: \"a\nb\"\n | \"x\" // d default: \"a\\nb\"";
        assert_eq!(type_of(&json!({"oneOf": variants}), ""), expected);
        let properties = json!({"p": {"oneOf": variants}});
        assert_properties(properties, "p?:\n | string // default: \"a\nb\"\n | \"x\" // d default: a\nb\n,");
    }

    #[test]
    fn titles_and_examples() {
        let properties = json!({
            "plain": {"type": "string", "title": "T", "description": "D", "examples": ["e", 2]},
            "one_of": {"oneOf": [{"type": "string"}], "title": "T", "description": "D", "examples": ["e"], "default": 1},
        });
        let expected = "// T\n//\n// D\n// Examples:\n// - \"e\"\nplain?: string,\n// T\n//\n// Examples:\n// - \"e\"\n// D\n// default: 1\none_of?:\n | string\n,";
        assert_properties(properties, expected);
    }

    #[test]
    fn nullable_unless_null_is_there_already() {
        let properties = json!({
            "s": {"type": "string", "nullable": true},
            "l": {"type": "array", "items": {"type": ["string", "null"]}, "nullable": true},
            "o": {"oneOf": [{"type": "boolean", "nullable": true}], "nullable": true},
        });
        assert_properties(properties, "s?: string | null,\nl?: string | null[],\no?:\n | boolean | null\n,");
    }

    /// A body of some megabytes holds as many; looking each up among all takes half a minute. The bound is for a machine under load.
    #[test]
    fn any_number_of_required_properties_is_written_in_time() {
        let names: Vec<String> = (0..100_000).map(|idx| format!("p{idx}")).collect();
        let properties: serde_json::Map<String, Value> = names.iter().map(|name| (name.clone(), json!({}))).collect();
        let begun = std::time::Instant::now();
        let written = type_of(&json!({"type": "object", "properties": properties, "required": names}), "");
        assert!(written.contains("\np99999: any,\n"));
        assert!(begun.elapsed() < std::time::Duration::from_secs(5), "took {:?}", begun.elapsed());
    }

    #[test]
    fn objects_inside_objects_and_variants_are_indented() {
        let inner = json!({"type": "object", "description": "D", "properties": {"z": {"type": "integer"}}});
        let properties = json!({"o": inner, "v": {"oneOf": [{"type": "object", "properties": {"u": inner}}]}, "l": {"type": "array", "items": inner}});
        let expected = "// D\no?:     // D\n{\n    z?: number,\n    },\nv?:\n | {\n   // D\n   u?:        // D\n{\n       z?: number,\n       },\n   }\n,\nl?:     // D\n{\n    z?: number,\n    }[],";
        assert_properties(properties, expected);
    }
}
