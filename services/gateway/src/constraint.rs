//! Constraints on answers. The format writes the grammar; here it is compiled once before anything is generated, so that a client learns at
//! once which of its schemas cannot be followed, and at which place.

use constraint::{Compiler, InvalidGrammar, STACK_BYTES};
use format::chat::{Conversation, JsonShape, SchemaPlace, ToolChoice, TurnConstraint};
use types::Constraint;

use crate::error::ApiError;

/// Schemas compiled in search of the place that is at fault.
const ATTEMPTS_MAX: usize = 200;

/// What an API calls the fields that hold schemas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchemaParams {
    /// The schema of the answer.
    response_format: &'static str,
    /// The schema of a tool's parameters, within the tool.
    parameters: &'static str,
    /// The function that must be called.
    named_tool: &'static str,
}

impl SchemaParams {
    /// Chat Completions.
    pub const CHAT: Self = Self {
        response_format: "response_format.json_schema.schema",
        parameters: "function.parameters",
        named_tool: "tool_choice.function.name",
    };
    /// Responses.
    pub const RESPONSES: Self =
        Self { response_format: "text.format.schema", parameters: "parameters", named_tool: "tool_choice.name" };
    /// `Gateway.Chat`.
    pub const GRPC: Self = Self {
        response_format: "response_format.json_schema",
        parameters: "parameters_json",
        named_tool: "required_tool",
    };

    fn field(&self, place: SchemaPlace) -> String {
        match place {
            SchemaPlace::ResponseFormat => self.response_format.to_owned(),
            SchemaPlace::Tool(idx) => format!("tools[{idx}].{}", self.parameters),
        }
    }
}

/// A turn's grammar that nobody has compiled yet.
#[derive(Debug, Clone, PartialEq)]
pub struct Unchecked {
    turn: TurnConstraint,
    params: SchemaParams,
}

impl Unchecked {
    /// The grammar that a format wrote, for a request whose fields have these names.
    #[must_use]
    pub fn new(turn: TurnConstraint, params: SchemaParams) -> Self {
        Self { turn, params }
    }

    /// Compiles the grammar: a millisecond or two, and up to some seconds to find what is wrong with a hostile one. Off the
    /// runtime; on a thread of its own, since references that refer to references may nest deeper than any usual stack.
    ///
    /// # Errors
    /// 400, naming the field and the place in its schema; 500 where the system refuses a thread.
    pub fn check(self, compiler: &Compiler) -> Result<Constraint, ApiError> {
        let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES);
        let checked = std::thread::scope(|scope| {
            let checking = thread.spawn_scoped(scope, || self.check_here(compiler));
            checking.map(|checking| checking.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        checked.unwrap_or_else(|error| {
            tracing::error!(%error, "no thread for a grammar");
            Err(ApiError::Internal { message: "the grammar could not be checked".into() })
        })
    }

    fn check_here(self, compiler: &Compiler) -> Result<Constraint, ApiError> {
        let Self { turn: TurnConstraint { grammar, schemas }, params } = self;
        let bytes = grammar.lark.len();
        if bytes > Constraint::BYTES_MAX {
            let place = schemas.first().map_or(SchemaPlace::ResponseFormat, |(place, _)| *place);
            let most = Constraint::BYTES_MAX;
            return Err(refusal(&params.field(place), "", &format!("schemas have {bytes} bytes, at most {most} fit")));
        }
        let Err(error) = compiler.compile(&grammar, &[]) else { return Ok(grammar) };
        let fault = schemas.iter().find_map(|(place, shape)| Some((*place, fault(compiler, shape)?)));
        Err(match fault {
            Some((place, (path, reason))) => refusal(&params.field(place), &path, &reason),
            // Each could be followed by itself: together they are too much.
            None => refusal(
                &params.field(schemas.last().map_or(SchemaPlace::ResponseFormat, |last| last.0)),
                "",
                &error.reason,
            ),
        })
    }
}

/// The innermost part of a schema that cannot be compiled, and why.
fn fault(compiler: &Compiler, whole: &JsonShape) -> Option<(String, String)> {
    let error = |shape: &JsonShape| compiler.compile(&shape.grammar(), &[]).err();
    let InvalidGrammar { mut reason } = error(whole)?;
    let (mut path, mut parts, mut attempts) = (Vec::new(), whole.parts(), 0);
    while attempts < ATTEMPTS_MAX {
        let tried = parts.into_iter().take(ATTEMPTS_MAX - attempts);
        let found = tried.inspect(|_| attempts += 1).find_map(|(step, part)| Some((step, error(&part)?, part)));
        let Some((step, cause, part)) = found else { break };
        path.push(step);
        reason = cause.reason;
        parts = part.parts();
    }
    Some((path.join("."), reason))
}

fn refusal(field: &str, path: &str, reason: &str) -> ApiError {
    // Where the schema stands in the grammar is nothing to the client.
    let reason = reason.split_once("failed to compile JSON schema: ").map_or(reason, |(_, reason)| reason);
    let at = if path.is_empty() { field.to_owned() } else { format!("{field}.{path}") };
    ApiError::InvalidRequest {
        message: format!("{at} cannot be followed: {reason}"),
        param: Some(at),
        code: Some("invalid_json_schema"),
    }
}

/// Refuses to require a call that cannot be made.
///
/// # Errors
/// 400, naming the field.
pub fn check_tool_choice(conversation: &Conversation, params: SchemaParams) -> Result<(), ApiError> {
    match &conversation.tool_choice {
        ToolChoice::Required if conversation.tools.is_empty() => {
            Err(ApiError::invalid("tool_choice", "tool_choice requires a call, but there are no functions to call"))
        }
        ToolChoice::Named(name) if conversation.tools.iter().all(|tool| tool.name != *name) => {
            let message = format!("{} is {name:?}, which is not among the functions", params.named_tool);
            Err(ApiError::invalid(params.named_tool, message))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, OnceLock};

    use format::chat::{ChatFormat, completions};
    use format::harmony::Harmony;
    use serde_json::{Value, json};
    use vocabulary::Vocabulary;

    use super::*;

    fn check(request: Value) -> Result<(), (String, String)> {
        static NANO: OnceLock<(Harmony, Compiler)> = OnceLock::new();
        let (harmony, compiler) = NANO.get_or_init(|| {
            let json = include_bytes!("../../../shared/model/gpt-oss-nano/tokenizer.json");
            let vocabulary = Arc::new(Vocabulary::from_tokenizer_json(json).unwrap());
            (Harmony::new(Arc::clone(&vocabulary)).unwrap(), Compiler::new(vocabulary))
        });
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(request.as_object().unwrap().clone());
        let turn = harmony.constraint(&completions::conversation(&body).unwrap()).unwrap();
        let outcome = Unchecked::new(turn, SchemaParams::CHAT).check(compiler);
        outcome.map(|_| ()).map_err(|error| (error.object().param.unwrap(), error.to_string()))
    }

    fn answer(schema: Value, strict: bool) -> Value {
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": strict}}})
    }

    #[test]
    fn the_place_of_what_cannot_be_followed_is_named() {
        let unique = json!({"type": "array", "uniqueItems": true});
        let deep = json!({"type": "object", "properties": {"ok": {"type": "string"},
            "list": {"type": "array", "items": {"anyOf": [{"type": "null"}, unique]}}}});
        let (param, message) = check(answer(deep, true)).unwrap_err();
        assert_eq!(param, "response_format.json_schema.schema.properties.list.items.anyOf[1]");
        assert!(message.contains("uniqueItems"), "{message}");

        let definitions = json!({"$ref": "#/$defs/a", "$defs": {"a": unique, "b": {"type": "null"}}});
        let (param, _) = check(answer(definitions, true)).unwrap_err();
        assert_eq!(param, "response_format.json_schema.schema.$defs.a");

        let tool = |strict| {
            json!({"type": "function", "function": {"name": "f", "strict": strict, "parameters":
            {"type": "object", "properties": {"x": unique}}}})
        };
        let fine = json!({"type": "function", "function": {"name": "g"}});
        let (param, _) = check(json!({"tools": [fine, tool(true)]})).unwrap_err();
        assert_eq!(param, "tools[1].function.parameters.properties.x");
        assert_eq!(
            check(json!({"tools": [fine, tool(false)], "tool_choice": "required"})),
            Ok(()),
            "as far as possible"
        );
    }

    #[test]
    fn what_is_not_strict_is_followed_as_far_as_possible() {
        let unique = json!({"type": "array", "uniqueItems": true, "items": {"type": "integer"}});
        assert_eq!(check(answer(unique, false)), Ok(()));
    }

    /// On a usual stack this is the end of the process, and so of everybody's answers.
    #[test]
    fn references_that_refer_to_references_end_in_words() {
        let link = |next: usize| json!({"allOf": [{"$ref": format!("#/$defs/d{next}")}]});
        let mut definitions: serde_json::Map<String, Value> =
            (0..10_000).map(|idx| (format!("d{idx}"), link(idx + 1))).collect();
        definitions.insert("d10000".into(), json!({"uniqueItems": true}));
        let (param, message) = check(answer(json!({"$ref": "#/$defs/d0", "$defs": definitions}), true)).unwrap_err();
        assert!(
            param.starts_with("response_format.json_schema.schema") && message.contains("cannot be followed"),
            "{message}"
        );
    }

    #[test]
    fn a_grammar_that_is_too_long_is_refused() {
        let words: Vec<String> = (0..60_000).map(|idx| format!("word {idx}")).collect();
        let (param, message) = check(answer(json!({"enum": words}), true)).unwrap_err();
        assert_eq!(param, "response_format.json_schema.schema");
        assert!(message.contains("bytes"), "{message}");
    }
}
