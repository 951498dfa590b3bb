//! To whom the model meant to write.

use super::FUNCTIONS;
use crate::chat::{Recipient, Role};

/// The namespace in the singular, which models write now and then.
const FUNCTION: &str = "function";

/// What models put behind a name without a space.
const GLUED_TYPE: &str = "json";

/// The recipient that `written` means in a message of `role`; `tools` are the names of the declared functions.
///
/// Stray punctuation around it goes. What begins with a declared name, with or without a namespace, is that function; without
/// declared functions only the namespace tells. Participants of the chat are no recipients of the model's words.
pub(super) fn recipient(written: &str, role: Role, tools: &[String]) -> Option<Recipient> {
    let is_of_name = |c: char| is_of_name(c) || c.is_alphanumeric();
    let trimmed = written.trim_start_matches(|c| !is_of_name(c) || c == '-').trim_end_matches(|c| !is_of_name(c));
    if trimmed.is_empty() {
        return None;
    }
    let namespaced = strip_namespace(trimmed, FUNCTIONS)
        .or_else(|| strip_namespace(trimmed, FUNCTION).filter(|_| !tools.is_empty()));
    if let Some(name) = declared(namespaced.unwrap_or(trimmed), tools).or(namespaced) {
        return Some(Recipient::Function(name.to_owned()));
    }
    let is_participant = matches!(trimmed, "assistant" | "all" | "user");
    (role != Role::Assistant || !is_participant).then(|| Recipient::Other(trimmed.to_owned()))
}

/// Whether a header word without `to=` can only be a recipient.
pub(super) fn is_recipient(word: &str, tools: &[String]) -> bool {
    word == "python"
        || [FUNCTIONS, "browser"].iter().any(|namespace| strip_namespace(word, namespace).is_some())
        || strip_namespace(word, FUNCTION).is_some_and(|name| declared(name, tools).is_some())
        || tools.iter().any(|tool| tool == word)
}

fn strip_namespace<'w>(word: &'w str, namespace: &str) -> Option<&'w str> {
    word.strip_prefix(namespace)?.strip_prefix('.').filter(|name| !name.is_empty())
}

/// The declared name that `word` begins with, if what follows cannot belong to a name. The longest counts.
fn declared<'t>(word: &str, tools: &'t [String]) -> Option<&'t str> {
    let ends = |rest: &str| rest.is_empty() || rest == GLUED_TYPE || !rest.starts_with(is_of_name);
    let matches = |tool: &&String| word.strip_prefix(tool.as_str()).is_some_and(ends);
    tools.iter().filter(matches).max_by_key(|tool| tool.len()).map(String::as_str)
}

/// Whether a function's name may have this character.
fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-')
}

#[cfg(test)]
mod tests {
    use super::{is_recipient, recipient};
    use crate::chat::{Recipient, Role};

    fn read(written: &str) -> Option<String> {
        let tools = ["get_weather", "get_weather_json", "now"].map(str::to_owned);
        recipient(written, Role::Assistant, &tools).map(|recipient| match recipient {
            Recipient::Function(name) => format!("functions.{name}"),
            Recipient::Other(name) => name,
        })
    }

    #[test]
    fn repairs() {
        for (written, meant) in [
            ("functions.get_weather", Some("functions.get_weather")),
            ("get_weather", Some("functions.get_weather")),
            ("function.get_weather", Some("functions.get_weather")),
            ("functions.get_weatherjson", Some("functions.get_weather")),
            ("get_weatherjson", Some("functions.get_weather")),
            ("functions.get_weather_json", Some("functions.get_weather_json")),
            ("functions.get_weather??", Some("functions.get_weather")),
            ("–functions.get_weather(city)", Some("functions.get_weather")),
            ("functions.get_weatherly", Some("functions.get_weatherly")),
            ("functions.open_file", Some("functions.open_file")),
            ("function.open_file", Some("functions.open_file")),
            ("python", Some("python")),
            ("browser.search", Some("browser.search")),
            ("assistant", None),
            ("all", None),
            ("user", None),
            ("??", None),
            ("", None),
        ] {
            assert_eq!(read(written).as_deref(), meant, "{written:?}");
        }
    }

    #[test]
    fn without_declared_functions_only_the_namespace_tells() {
        let read = |written| recipient(written, Role::Assistant, &[]);
        assert_eq!(read("functions.f"), Some(Recipient::Function("f".into())));
        assert_eq!(read("function.f"), Some(Recipient::Other("function.f".into())));
        assert_eq!(read("f"), Some(Recipient::Other("f".into())));
        assert_eq!(recipient("assistant", Role::Tool, &[]), Some(Recipient::Other("assistant".into())));
    }

    #[test]
    fn bare_words() {
        let tools = ["now".to_owned()];
        for word in ["functions.x", "browser.open", "python", "now", "function.now"] {
            assert!(is_recipient(word, &tools), "{word}");
        }
        for word in ["json", "code", "functions.", "function.x", "nowhere"] {
            assert!(!is_recipient(word, &tools), "{word}");
        }
    }
}
