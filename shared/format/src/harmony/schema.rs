//! Rewrites JSON schemas so that their types reach the prompt.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

/// How much of a function's JSON schema the prompt shows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SchemaTypes {
    /// As the published renderer: `$ref`, `anyOf`, `allOf` and `const` are `any`. What the model was trained with, to the byte.
    #[default]
    Published,
    /// References are resolved, `anyOf` is written like `oneOf` (or as nullable, if it adds null to one type), objects in `allOf` are
    /// merged, a text in `const` is a literal. Schemas that use none of these give the same prompt as [`Published`](Self::Published).
    Resolved,
}

impl SchemaTypes {
    pub(super) fn apply(self, schema: &Value) -> Cow<'_, Value> {
        match self {
            Self::Published => Cow::Borrowed(schema),
            Self::Resolved => Cow::Owned(Resolver { root: schema, budget: MAX_COPIED }.resolve(schema, 0)),
        }
    }
}

/// References can repeat a schema exponentially often and without end: past these bounds the type is `any`.
const MAX_COPIED: usize = 1_000_000;
const MAX_DEPTH: u32 = 32;

struct Resolver<'s> {
    root: &'s Value,
    /// Values and bytes that references may still copy.
    budget: usize,
}

impl Resolver<'_> {
    fn resolve(&mut self, schema: &Value, depth: u32) -> Value {
        let Some(fields) = schema.as_object().filter(|_| depth < MAX_DEPTH) else { return json!({}) };
        let mut fields = self.follow(fields);
        self.merge_all_of(&mut fields, depth);
        union_of_any_of(&mut fields);
        literal_of_const(&mut fields);
        if let Some(variants) = fields.get_mut("oneOf").and_then(Value::as_array_mut) {
            variants.iter_mut().for_each(|variant| *variant = self.resolve(variant, depth + 1));
        }
        if let Some(items) = fields.get_mut("items") {
            *items = self.resolve(items, depth + 1);
        }
        if let Some(properties) = fields.get_mut("properties").and_then(Value::as_object_mut) {
            properties.values_mut().for_each(|property| *property = self.resolve(property, depth + 1));
        }
        Value::Object(fields)
    }

    /// The schema that `fields` refers to, with what stands beside the reference on top.
    fn follow(&mut self, fields: &Map<String, Value>) -> Map<String, Value> {
        let mut fields = fields.clone();
        for _ in 0..MAX_DEPTH {
            let Some(reference) = fields.remove("$ref") else { break };
            let target = reference.as_str().and_then(|path| self.root.pointer(path.strip_prefix('#')?));
            let mut target =
                target.filter(|target| self.afford(target)).and_then(Value::as_object).cloned().unwrap_or_default();
            target.extend(fields);
            fields = target;
        }
        fields
    }

    /// Takes a copy of `value` from the budget, unless it is too dear.
    fn afford(&mut self, value: &Value) -> bool {
        let left = self.budget.checked_sub(size(value));
        self.budget = left.unwrap_or(0);
        left.is_some()
    }

    /// Merges the parts of `allOf` into `fields`: properties and required names add up, of other fields the first counts.
    fn merge_all_of(&mut self, fields: &mut Map<String, Value>, depth: u32) {
        let Some(Value::Array(parts)) = fields.remove("allOf") else { return };
        if depth == MAX_DEPTH {
            return;
        }
        for part in parts.iter().filter_map(Value::as_object) {
            let mut part = self.follow(part);
            self.merge_all_of(&mut part, depth + 1);
            for (key, value) in part {
                match (fields.get_mut(&key), value) {
                    (Some(Value::Object(mine)), Value::Object(more)) if key == "properties" => mine.extend(more),
                    (Some(Value::Array(mine)), Value::Array(more)) if key == "required" => mine.extend(more),
                    (Some(_), _) => {}
                    (None, value) => drop(fields.insert(key, value)),
                }
            }
        }
    }
}

/// Values and bytes of text in `value`.
fn size(value: &Value) -> usize {
    match value {
        Value::String(text) => 1 + text.len(),
        Value::Array(values) => 1 + values.iter().map(size).sum::<usize>(),
        Value::Object(fields) => 1 + fields.iter().map(|(key, value)| key.len() + size(value)).sum::<usize>(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 1,
    }
}

/// `anyOf` of one type and null is that type, nullable; any other is a `oneOf`.
fn union_of_any_of(fields: &mut Map<String, Value>) {
    if fields.contains_key("oneOf") {
        return;
    }
    let Some(Value::Array(variants)) = fields.remove("anyOf") else { return };
    let (nulls, mut others): (Vec<Value>, Vec<Value>) =
        variants.into_iter().partition(|variant| variant["type"] == "null");
    match others.as_mut_slice() {
        [Value::Object(only)] => {
            for (key, value) in std::mem::take(only) {
                fields.entry(key).or_insert(value);
            }
            if !nulls.is_empty() {
                fields.insert("nullable".to_owned(), Value::Bool(true));
            }
        }
        _ => {
            // `["null"]` is written as null, where "null" would be any.
            others.extend(nulls.iter().map(|_| json!({"type": ["null"]})));
            fields.insert("oneOf".to_owned(), Value::Array(others));
        }
    }
}

/// A text in `const` is an enumeration of one; another constant shows its type.
fn literal_of_const(fields: &mut Map<String, Value>) {
    let Some(constant) = fields.remove("const") else { return };
    let r#type = match &constant {
        Value::String(_) => "string",
        Value::Number(_) => "number",
        Value::Bool(_) => "boolean",
        Value::Null | Value::Array(_) | Value::Object(_) => return,
    };
    fields.insert("type".to_owned(), json!(r#type));
    if constant.is_string() {
        fields.insert("enum".to_owned(), json!([constant]));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::SchemaTypes;
    use crate::harmony::typescript;

    fn written(schema: Value) -> String {
        typescript::type_of(&SchemaTypes::Resolved.apply(&schema), "")
    }

    #[test]
    fn references_const_and_all_of_have_types() {
        let schema = json!({
            "type": "object",
            "properties": {
                "r": {"$ref": "#/$defs/T", "description": "A reference."},
                "c": {"const": "k"},
                "n": {"const": 7},
                "al": {"allOf": [{"$ref": "#/$defs/P"}, {"type": "object", "properties": {"y": {"type": "number"}}, "required": ["y"]}]},
            },
            "required": ["c"],
            "$defs": {
                "T": {"type": "string", "description": "Not this one."},
                "P": {"type": "object", "properties": {"x": {"$ref": "#/$defs/T"}}, "required": ["x"]},
            },
        });
        let expected = "{\n// A reference.\nr?: string,\nc: \"k\",\nn?: number,\nal?: {\n    // Not this one.\n    x: string,\n    y: number,\n    },\n}";
        assert_eq!(written(schema), expected);
    }

    #[test]
    fn any_of_is_a_union() {
        let schema = json!({"type": "object", "properties": {
            "optional": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": null},
            "either": {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "null"}]},
        }});
        let expected = "{\noptional?: number | null, // default: null\neither?:\n | string\n | number\n | null\n,\n}";
        assert_eq!(written(schema), expected);
    }

    #[test]
    fn schemas_without_these_are_written_as_published() {
        let schema = json!({"type": "object", "properties": {
            "a": {"type": "array", "items": {"type": "string", "enum": ["x"]}},
            "b": {"oneOf": [{"type": "string"}, {"type": "object", "properties": {"c": {"type": "boolean"}}}]},
        }});
        assert_eq!(written(schema.clone()), typescript::type_of(&schema, ""));
    }

    #[test]
    fn endless_and_exploding_references_end() {
        let endless = json!({"$ref": "#/$defs/L", "$defs": {"L": {"type": "object", "properties": {"next": {"$ref": "#/$defs/L"}}}}});
        assert!(written(endless).contains("any"));
        let circle = json!({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}});
        assert_eq!(written(circle), "any");
        let mut defs = serde_json::Map::new();
        for level in 0..30 {
            let deeper = json!({"$ref": format!("#/$defs/L{}", level + 1)});
            defs.insert(format!("L{level}"), json!({"type": "object", "properties": {"l": deeper, "r": deeper}}));
        }
        assert!(written(json!({"$ref": "#/$defs/L0", "$defs": defs})).len() < 10_000_000);
        let all = json!({"allOf": [{"$ref": "#"}, {"$ref": "#"}]});
        written(all);
    }
}
