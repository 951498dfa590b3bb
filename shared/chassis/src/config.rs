//! One YAML file a service: unknown keys refused, values overridden by the environment, ranges checked once.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_yaml::Value;

/// A config struct that checks its own ranges. Types say what shape a value has; this says which values make sense.
pub trait Validate {
    /// Adds what is wrong to `problems`, by field.
    fn validate(&self, problems: &mut Problems);
}

/// Collects every value out of range, each with the path of its field.
#[derive(Debug, Default)]
pub struct Problems {
    path: Vec<String>,
    found: Vec<String>,
}

impl Problems {
    /// Reports `field` with `reason`, the rest of a sentence that begins with the field.
    pub fn report(&mut self, field: &str, reason: impl Display) {
        let path = self.path.iter().map(String::as_str).chain([field]).collect::<Vec<_>>().join(".");
        self.found.push(format!("{path} {reason}"));
    }

    /// Reports `field` with `reason` unless `ok`.
    pub fn check(&mut self, ok: bool, field: &str, reason: impl Display) {
        if !ok {
            self.report(field, reason);
        }
    }

    /// Reports `field` if `value` lies outside of `allowed`.
    pub fn range<N: PartialOrd + Display>(&mut self, field: &str, value: N, allowed: RangeInclusive<N>) {
        if !allowed.contains(&value) {
            self.report(field, format!("is {value}, allowed is {} to {}", allowed.start(), allowed.end()));
        }
    }

    /// Checks a nested struct under the path of `field`.
    pub fn nested(&mut self, field: impl Display, config: &impl Validate) {
        self.path.push(field.to_string());
        config.validate(self);
        self.path.pop();
    }
}

/// Why a config was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{file}: cannot be read")]
    Read {
        /// The file as named by the user.
        file: String,
        /// What the system said.
        #[source]
        cause: std::io::Error,
    },
    /// The text is no YAML, or does not fit the config's struct.
    #[error("{file}: {field}: {reason}")]
    Parse {
        /// The file as named by the user.
        file: String,
        /// Path of the field, `.` for the top level.
        field: String,
        /// What is wrong, with line and column.
        reason: String,
    },
    /// An environment variable does not fit the config's struct.
    #[error("environment variable {variable}: {field}: {reason}")]
    Override {
        /// Name of the variable.
        variable: String,
        /// Path of the field.
        field: String,
        /// What is wrong.
        reason: String,
    },
    /// Values out of range, after overrides.
    #[error("{file}: {}", .problems.join("; "))]
    Invalid {
        /// The file as named by the user.
        file: String,
        /// Each with the path of its field.
        problems: Vec<String>,
    },
}

/// Reads the config of `service` from a file, then from this process's environment; see [`parse`].
///
/// # Errors
/// As [`ConfigError`] says.
pub fn load<T>(file: &Path, service: &str) -> Result<T, ConfigError>
where
    T: DeserializeOwned + Serialize + Validate,
{
    let name = file.display().to_string();
    let text = std::fs::read_to_string(file).map_err(|cause| ConfigError::Read { file: name.clone(), cause })?;
    parse(&text, &name, service, std::env::vars())
}

/// Parses `text`, applies the variables of `environment` that begin with `DAMASK_<SERVICE>__` and checks the ranges.
///
/// `DAMASK_ROUTER__LIMITS__QUEUE=64` sets `limits.queue` of the service `router`; the value is read as YAML, and a number in the
/// name picks a list's element. `file` is the text's name in errors.
///
/// # Errors
/// As [`ConfigError`] says, but for `Read`.
pub fn parse<T>(
    text: &str,
    file: &str,
    service: &str,
    environment: impl IntoIterator<Item = (String, String)>,
) -> Result<T, ConfigError>
where
    T: DeserializeOwned + Serialize + Validate,
{
    // An empty document is a config of defaults only, but YAML reads it as null.
    let text =
        if text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#')) { "{}" } else { text };
    // Text into the struct first: once it is a `Value`, errors no longer know their line.
    let mut config: T =
        serde_path_to_error::deserialize(serde_yaml::Deserializer::from_str(text)).map_err(|error| {
            let field = error.path().to_string();
            let reason = strip_path(&error.into_inner().to_string(), &field);
            ConfigError::Parse { file: file.into(), field, reason }
        })?;
    let prefix = format!("DAMASK_{}__", service.to_ascii_uppercase());
    let mut overrides: Vec<_> = environment.into_iter().filter(|(name, _)| name.starts_with(&prefix)).collect();
    overrides.sort();
    for (variable, text) in overrides {
        config = apply_override(&config, &variable, &variable[prefix.len()..], &text)?;
    }
    let mut problems = Problems::default();
    config.validate(&mut problems);
    if problems.found.is_empty() {
        Ok(config)
    } else {
        Err(ConfigError::Invalid { file: file.into(), problems: problems.found })
    }
}

/// The whole config as YAML, defaults filled in.
#[must_use]
pub fn print<T: Serialize>(config: &T) -> String {
    serde_yaml::to_string(config).expect("a config was read from YAML, so YAML can express it")
}

/// The YAML reader puts the path, or its beginning, before its own messages, which name it once more.
fn strip_path(message: &str, field: &str) -> String {
    match message.split_once(": ") {
        Some((path, reason)) if field.starts_with(path) => reason.to_owned(),
        _ => message.to_owned(),
    }
}

fn apply_override<T>(config: &T, variable: &str, path: &str, text: &str) -> Result<T, ConfigError>
where
    T: DeserializeOwned + Serialize,
{
    let segments: Vec<String> = path.split("__").map(str::to_ascii_lowercase).collect();
    let fail = |field: String, reason: String| ConfigError::Override { variable: variable.into(), field, reason };
    let value: Value =
        serde_yaml::from_str(text).map_err(|error| fail(segments.join("."), format!("is no YAML: {error}")))?;
    let mut tree = serde_yaml::to_value(config).expect("a config was read from YAML, so YAML can express it");
    set(&mut tree, &segments, value).map_err(|reason| fail(segments.join("."), reason))?;
    serde_path_to_error::deserialize(tree).map_err(|error| {
        let field = error.path().to_string();
        let reason = strip_path(&error.into_inner().to_string(), &field);
        fail(field, reason)
    })
}

fn set(tree: &mut Value, path: &[String], value: Value) -> Result<(), String> {
    let Some((segment, rest)) = path.split_first() else {
        *tree = value;
        return Ok(());
    };
    // A section that is absent (an `Option`, or a list that is empty) comes into being by being set.
    if tree.is_null() {
        *tree = Value::Mapping(serde_yaml::Mapping::new());
    }
    match tree {
        Value::Mapping(map) => {
            let entry = map.entry(Value::String(segment.clone())).or_insert(Value::Null);
            set(entry, rest, value)
        }
        Value::Sequence(items) => {
            let idx: usize = segment.parse().map_err(|_| format!("`{segment}` is no index into a list"))?;
            let num_items = items.len();
            let item =
                items.get_mut(idx).ok_or_else(|| format!("the list has {num_items} elements, not {}", idx + 1))?;
            set(item, rest, value)
        }
        _ => Err(format!("has no field `{segment}`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Router {
        listen: String,
        #[serde(default)]
        limits: Limits,
        #[serde(default)]
        workers: Vec<String>,
        #[serde(default)]
        tls: Option<Tls>,
    }

    #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct Limits {
        queue: u32,
        in_flight: u32,
    }

    #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Tls {
        cert: String,
    }

    impl Default for Limits {
        fn default() -> Self {
            Self { queue: 16, in_flight: 4 }
        }
    }

    impl Validate for Router {
        fn validate(&self, problems: &mut Problems) {
            problems.nested("limits", &self.limits);
        }
    }

    impl Validate for Limits {
        fn validate(&self, problems: &mut Problems) {
            problems.range("queue", self.queue, 1..=1024);
            problems.check(self.in_flight > 0, "in_flight", "is 0, at least 1 is needed");
        }
    }

    const TEXT: &str = "listen: a:1\nlimits:\n  queue: 8\nworkers: [x, y]\n";

    fn with(text: &str, environment: &[(&str, &str)]) -> Result<Router, String> {
        let environment = environment.iter().map(|(name, value)| ((*name).into(), (*value).into()));
        parse(text, "router.yaml", "router", environment).map_err(|error| error.to_string())
    }

    #[test]
    fn errors_name_file_field_and_line() {
        for (text, want) in [
            ("listen: a:1\nlimits:\n  queu: 8\n", ["router.yaml: limits.queu", "unknown field `queu`", "line 3"]),
            ("listen: a:1\nlimits:\n  queue: many\n", ["router.yaml: limits.queue", "invalid type", "line 3"]),
            ("limits:\n  queue: 8\n", ["router.yaml: .", "missing field `listen`", ""]),
            ("listen: [\n", ["router.yaml: listen", "invalid type: sequence", "line 1"]),
            ("", ["router.yaml: .", "missing field `listen`", ""]),
        ] {
            let error = with(text, &[]).unwrap_err();
            for part in want {
                assert!(error.contains(part), "{error:?} lacks {part:?}");
            }
        }
    }

    #[test]
    fn the_environment_overrides_by_path() {
        let config = with(
            TEXT,
            &[
                ("DAMASK_ROUTER__LIMITS__QUEUE", "64"),
                ("DAMASK_ROUTER__WORKERS__1", "z"),
                ("DAMASK_ROUTER__TLS__CERT", "c.pem"),
                ("DAMASK_GATEWAY__LISTEN", "other service"),
                ("DAMASK_ROUTER_LISTEN", "not a path"),
            ],
        )
        .unwrap();
        assert_eq!(config.limits, Limits { queue: 64, in_flight: 4 });
        assert_eq!(config.workers, ["x", "z"]);
        assert_eq!(config.tls, Some(Tls { cert: "c.pem".into() }));
        assert_eq!(config.listen, "a:1");
    }

    #[test]
    fn override_errors_name_the_variable() {
        for (variable, value, want) in [
            ("DAMASK_ROUTER__LIMITS__QUEU", "1", "limits.queu: unknown field `queu`"),
            ("DAMASK_ROUTER__LIMITS__QUEUE", "many", "limits.queue: invalid type"),
            ("DAMASK_ROUTER__WORKERS__2", "z", "workers.2: the list has 2 elements, not 3"),
            ("DAMASK_ROUTER__LISTEN__HOST", "z", "listen.host: has no field `host`"),
        ] {
            let error = with(TEXT, &[(variable, value)]).unwrap_err();
            assert!(error.starts_with(&format!("environment variable {variable}: {want}")), "{error}");
        }
    }

    #[test]
    fn every_value_out_of_range_is_named_after_overrides() {
        let error = with("listen: a:1\nlimits: { queue: 0, in_flight: 0 }\n", &[]).unwrap_err();
        assert_eq!(
            error,
            "router.yaml: limits.queue is 0, allowed is 1 to 1024; limits.in_flight is 0, at least 1 is needed"
        );
        let error = with(TEXT, &[("DAMASK_ROUTER__LIMITS__QUEUE", "4096")]).unwrap_err();
        assert_eq!(error, "router.yaml: limits.queue is 4096, allowed is 1 to 1024");
    }

    #[test]
    fn what_is_printed_is_read_back() {
        let config = with(TEXT, &[]).unwrap();
        let printed = print(&config);
        assert!(printed.contains("in_flight: 4"), "{printed}");
        assert_eq!(with(&printed, &[]).unwrap(), config);
    }
}
