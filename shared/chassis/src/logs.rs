//! Logs on stderr: readable for people, JSON for collectors.

use std::io::IsTerminal;

use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt};

use crate::traces::Traces;

/// How a line of the log looks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One line for people, coloured on a terminal.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

impl std::str::FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err(format!("`{text}` is no log format, allowed are text and json")),
        }
    }
}

/// Why logging could not start.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The filter is not understood.
    #[error("log level {level:?} is not understood: {reason}")]
    Level {
        /// As given.
        level: String,
        /// What the parser says.
        reason: String,
    },
    /// Something else in this process has set a subscriber already.
    #[error("logging was started twice")]
    Twice,
}

/// Used where neither `--log-level` nor `RUST_LOG` says anything.
const DEFAULT_LEVEL: &str = "info";

/// Starts logging for the whole process, and sends spans by `traces` as well. `level` is a level or a filter such as `info,router=debug`; it
/// wins over `RUST_LOG`.
///
/// # Errors
/// A filter that cannot be parsed; a second call.
pub fn init(format: LogFormat, level: Option<&str>, traces: Option<&Traces>) -> Result<(), LogError> {
    let level = level.map(str::to_owned).or_else(|| std::env::var("RUST_LOG").ok().filter(|level| !level.is_empty()));
    let level = level.unwrap_or_else(|| DEFAULT_LEVEL.to_owned());
    let filter = EnvFilter::try_new(&level).map_err(|error| LogError::Level { level, reason: error.to_string() })?;
    let lines = fmt::layer().with_writer(std::io::stderr);
    let lines: Box<dyn Layer<Registry> + Send + Sync> = match format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).with_target(true).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).with_current_span(true).with_span_list(false).boxed(),
    };
    let registry = tracing_subscriber::registry().with(lines.with_filter(filter));
    registry.with(traces.map(Traces::layer)).try_init().map_err(|_| LogError::Twice)
}
