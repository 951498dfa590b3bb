//! What a model's turn must look like, for requests that ask for more than free text. Grammars are text here, in the notation of
//! [`types::Constraint`]; compiling them is for those who have a compiler.

use std::sync::Arc;

use serde_json::{Map, Value, json};
use types::Constraint;

/// Between two tokens of JSON: nothing, a blank, or a line break with indentation. Bounded, since a model that may write nothing else
/// could go on with blanks for ever.
const WHITE_SPACE: &str = r" |\n {0,40}";

/// Keys under which a schema keeps what its parts refer to.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// The grammar of a whole turn, and the schemas that went into it.
#[derive(Debug, Clone, PartialEq)]
pub struct TurnConstraint {
    /// The turn, from the first token that the model writes to the stop token.
    pub grammar: Constraint,
    /// For telling the client which schema is at fault when the grammar is.
    pub schemas: Vec<(SchemaPlace, JsonShape)>,
}

/// Where in the request a schema stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchemaPlace {
    /// The format of the answer.
    ResponseFormat,
    /// The parameters of the tool with this index.
    Tool(usize),
}

/// JSON that follows a schema.
#[derive(Debug, Clone, PartialEq)]
pub struct JsonShape {
    /// The schema.
    schema: Map<String, Value>,
    /// Of a part: the definitions of the whole, under their keys. Shared: there may be thousands of parts, and definitions of any size.
    definitions: Arc<Map<String, Value>>,
    /// Whether a keyword that no grammar can express is an error; if not, it is passed over.
    strict: bool,
}

impl JsonShape {
    /// What follows `schema`: exactly, or as far as a grammar can express it.
    #[must_use]
    pub fn new(schema: &Value, strict: bool) -> Self {
        // `true` allows anything, and so does `{}`; of `false` and of what is no schema at all nothing sensible can be made.
        Self { schema: schema.as_object().cloned().unwrap_or_default(), definitions: Arc::default(), strict }
    }

    /// Any JSON object.
    #[must_use]
    pub fn object() -> Self {
        Self::new(&json!({"type": "object"}), true)
    }

    /// The right side of a grammar rule.
    #[must_use]
    pub fn rule(&self) -> String {
        let mut schema = self.schema.clone();
        for (key, definitions) in self.definitions.iter() {
            schema.entry(key).or_insert_with(|| definitions.clone());
        }
        // Replaces options that a client may have smuggled in.
        schema.insert("x-guidance".to_owned(), json!({"whitespace_pattern": WHITE_SPACE, "lenient": !self.strict}));
        format!("%json {}", Value::Object(schema))
    }

    /// A grammar of this alone.
    #[must_use]
    pub fn grammar(&self) -> Constraint {
        Constraint { lark: format!("start: {}", self.rule()).into() }
    }

    /// The schemas directly inside, with their paths from here: `properties.city`, `anyOf[1]`. Each keeps the definitions of the whole.
    #[must_use]
    pub fn parts(&self) -> Vec<(String, Self)> {
        let definitions = self.all_definitions();
        let mut parts = Vec::new();
        for (key, value) in &self.schema {
            match (key.as_str(), value) {
                ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(members)) => {
                    parts.extend(members.iter().map(|(name, part)| (format!("{key}.{name}"), part)));
                }
                ("anyOf" | "allOf" | "oneOf" | "prefixItems" | "items", Value::Array(members)) => {
                    parts.extend(members.iter().enumerate().map(|(idx, part)| (format!("{key}[{idx}]"), part)));
                }
                ("items" | "additionalProperties" | "not" | "if" | "then" | "else" | "contains", part) => {
                    parts.push((key.clone(), part));
                }
                _ => {}
            }
        }
        let shape = |part| Self { definitions: Arc::clone(&definitions), ..Self::new(part, self.strict) };
        parts.into_iter().filter(|(_, part)| part.is_object()).map(|(path, part)| (path, shape(part))).collect()
    }

    /// What parts can refer to.
    fn all_definitions(&self) -> Arc<Map<String, Value>> {
        if DEFINITIONS.iter().all(|key| !self.schema.contains_key(*key)) {
            return Arc::clone(&self.definitions);
        }
        let own_or_inherited = DEFINITIONS.iter().filter_map(|key| {
            let definitions = self.schema.get(*key).or_else(|| self.definitions.get(*key))?;
            Some(((*key).to_owned(), definitions.clone()))
        });
        Arc::new(own_or_inherited.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_paths_and_keep_definitions() {
        let schema = json!({
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"$ref": "#/$defs/B"}},
            "anyOf": [{"required": ["a"]}, true],
            "items": {"type": "null"},
            "$defs": {"B": {"type": "array"}},
        });
        let parts = JsonShape::new(&schema, true).parts();
        let paths: Vec<&str> = parts.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(paths, ["properties.a", "properties.b", "anyOf[0]", "items", "$defs.B"]);
        assert!(parts.iter().all(|(_, part)| part.rule().contains("$defs")));
    }

    /// Parts that each had a copy of the definitions would take gigabytes.
    #[test]
    fn parts_share_their_definitions() {
        let properties: Map<String, Value> = (0..1_000).map(|idx| (format!("p{idx}"), json!({}))).collect();
        let schema = json!({"properties": properties, "$defs": {"A": {"type": "null"}}});
        let parts = JsonShape::new(&schema, true).parts();
        assert_eq!(parts.len(), 1_001);
        assert!(parts.iter().all(|(_, part)| Arc::ptr_eq(&part.definitions, &parts[0].1.definitions)));
        let inner = JsonShape::new(&json!({"items": {"items": {}}, "$defs": {"A": {}}}), true);
        let items = &inner.parts()[0].1;
        assert!(Arc::ptr_eq(&items.parts()[0].1.definitions, &items.definitions), "and hand them on");
    }

    #[test]
    fn options_of_the_grammar_library_are_ours() {
        let smuggled = json!({"type": "string", "x-guidance": {"whitespace_pattern": " +", "lenient": true}});
        let rule = JsonShape::new(&smuggled, true).rule();
        assert!(rule.contains(r#""lenient":false"#) && !rule.contains(r#"" +""#), "{rule}");
    }
}
