//! The gateway's YAML file.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use chassis::net::tls::TlsConfig;
use chassis::{Address, Problems, Validate};
use model::{EMBEDDED_NANO, RandomModel, UnknownModel};
use serde::{Deserialize, Serialize};

use crate::auth::KeyDigest;

/// Everything that an operator can set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// HTTP: OpenAI's API.
    pub listen: Address,
    /// gRPC `Gateway.Chat`; absent turns it off.
    #[serde(default)]
    pub grpc_listen: Option<Address>,
    /// HTTP: health and metrics.
    pub admin_listen: Address,
    /// The router's gRPC address.
    pub router: Address,
    /// TLS on both public ports, HTTP and gRPC; absent means that they are plain.
    #[serde(default)]
    pub tls: Option<TlsConfig>,
    /// Which model is served.
    pub model: ModelSource,
    /// Other names under which clients may ask for it.
    #[serde(default)]
    pub model_aliases: Vec<String>,
    /// What prompts say where a request does not.
    #[serde(default)]
    pub prompt: PromptConfig,
    /// Bounds on requests.
    #[serde(default)]
    pub limits: LimitsConfig,
    /// Who may come in; without keys everybody may.
    #[serde(default)]
    pub api_keys: Vec<ApiKeyConfig>,
    /// Web origins whose pages may call; `*` for all.
    #[serde(default)]
    pub cors_origins: Vec<String>,
    /// Keeps responses of the Responses API, so that clients can get them again and go on from them; absent means that none are kept. A store
    /// belongs to one gateway: with several replicas, a client's requests must reach the one that has its responses.
    #[serde(default)]
    pub responses_store: Option<ResponsesStoreConfig>,
}

/// Where responses are kept, and how long.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResponsesStoreConfig {
    /// The file, made if it is not there; absent means memory, gone when the gateway ends. One gateway can have a file open at a time.
    #[serde(default)]
    pub file: Option<PathBuf>,
    /// How long each response is kept.
    #[serde(default = "ResponsesStoreConfig::default_keep_hours")]
    pub keep_hours: u32,
    /// Room for responses and their conversations, as JSON; the oldest make way for new ones.
    #[serde(default = "ResponsesStoreConfig::default_bytes_max")]
    pub bytes_max: u64,
}

impl ResponsesStoreConfig {
    /// 30 days, as OpenAI does.
    const fn default_keep_hours() -> u32 {
        30 * 24
    }

    const fn default_bytes_max() -> u64 {
        1 << 30
    }
}

/// Where the model's name and vocabulary come from. Written as one word: `embedded-nano`, `gpt-oss-20b` or
/// `gpt-oss-120b` (the released models by name, with the built-in vocabulary, for hosts without a checkpoint),
/// `random:SHAPE:SEED` as the workers have it (see [`RandomModel`]), or else the path of a checkpoint directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// gpt-oss-nano, inside the binary.
    EmbeddedNano,
    /// A released model, known by its name alone.
    Released(&'static str),
    /// Random weights, with the built-in vocabulary.
    Random(RandomModel),
    /// A checkpoint directory; without a tokenizer.json there, the built-in vocabulary is taken.
    Directory(PathBuf),
}

const RELEASED: [&str; 2] = ["gpt-oss-20b", "gpt-oss-120b"];

impl FromStr for ModelSource {
    type Err = UnknownModel;

    fn from_str(text: &str) -> Result<Self, UnknownModel> {
        if let Some(random) = RandomModel::parse(text) {
            return random.map(Self::Random);
        }
        Ok(match RELEASED.into_iter().find(|name| *name == text) {
            Some(name) => Self::Released(name),
            None if text == EMBEDDED_NANO => Self::EmbeddedNano,
            None => Self::Directory(text.into()),
        })
    }
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EmbeddedNano => f.write_str(EMBEDDED_NANO),
            Self::Released(name) => f.write_str(name),
            Self::Random(model) => model.fmt(f),
            Self::Directory(path) => path.display().fmt(f),
        }
    }
}

impl Serialize for ModelSource {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ModelSource {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// What prompts say where a request does not; absent fields leave it to the format. The date is always the current one,
/// in UTC.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PromptConfig {
    /// The sentence on who the model is.
    pub model_identity: Option<String>,
    /// Year and month, `YYYY-MM`.
    pub knowledge_cutoff: Option<String>,
}

/// Bounds on requests. What exceeds one is refused with 400, 408, 413 or 429.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsConfig {
    /// Bytes of a request body.
    pub body_bytes_max: usize,
    /// Time for a body to arrive.
    pub body_timeout_ms: u64,
    /// Requests being answered at once; one more gets 429.
    pub concurrent_requests_max: usize,
    /// Tokens of a prompt, if fewer than the model's context shall be allowed.
    pub prompt_tokens_max: Option<u32>,
    /// Answers to one prompt (`n`).
    pub choices_max: u32,
    /// How long a client may leave its stream unread although there is something to read.
    pub slow_reader_timeout_ms: u64,
    /// Time for a whole request, from its arrival to the last token.
    pub request_timeout_ms: u64,
    /// What each key may use that has no limits of its own; if there are no keys, what all clients together may use.
    pub per_key: KeyLimits,
}

/// What one key may use; an absent limit is none. What exceeds one is refused with 429.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KeyLimits {
    /// Requests a minute, a minute's worth at once at most.
    pub requests_per_minute: Option<u32>,
    /// Tokens a minute, prompts and answers together. Answers are counted as they are written: one that exceeds the limit is not cut, but
    /// delays the next request.
    pub tokens_per_minute: Option<u32>,
    /// Requests being answered at once.
    pub concurrent_requests_max: Option<u32>,
}

impl KeyLimits {
    /// These limits, and where one is absent that of `others`.
    #[must_use]
    pub fn or(self, others: Self) -> Self {
        Self {
            requests_per_minute: self.requests_per_minute.or(others.requests_per_minute),
            tokens_per_minute: self.tokens_per_minute.or(others.tokens_per_minute),
            concurrent_requests_max: self.concurrent_requests_max.or(others.concurrent_requests_max),
        }
    }
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self {
            body_bytes_max: 8 << 20,
            body_timeout_ms: 30_000,
            concurrent_requests_max: 1024,
            prompt_tokens_max: None,
            choices_max: 8,
            slow_reader_timeout_ms: 30_000,
            request_timeout_ms: 3_600_000,
            per_key: KeyLimits::default(),
        }
    }
}

/// A key that clients present as `Authorization: Bearer KEY`. Only its digest is in the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApiKeyConfig {
    /// Names the key's owner in logs. Several keys of one name share its limits, those of the first of them, and see each other's responses.
    pub name: String,
    /// SHA-256 of the key, hexadecimal: `printf %s "$KEY" | sha256sum`.
    pub sha256: KeyDigest,
    /// Whether the key is known but may not be used for now.
    #[serde(default)]
    pub suspended: bool,
    /// What the key may use; what is absent here is as in `limits.per_key`.
    #[serde(default)]
    pub limits: KeyLimits,
}

impl Validate for Config {
    fn validate(&self, problems: &mut Problems) {
        problems.nested("limits", &self.limits);
        for (idx, key) in self.api_keys.iter().enumerate() {
            problems.nested(format!("api_keys[{idx}].limits"), &key.limits);
        }
        if let Some(store) = &self.responses_store {
            problems.nested("responses_store", store);
        }
        for (idx, origin) in self.cors_origins.iter().enumerate() {
            let is_origin = origin == "*" || origin.starts_with("http://") || origin.starts_with("https://");
            let is_header = http::HeaderValue::from_str(origin).is_ok();
            let field = format!("cors_origins[{idx}]");
            problems.check(
                is_origin && is_header,
                &field,
                "is neither * nor an origin such as https://chat.example.com",
            );
        }
    }
}

impl Validate for LimitsConfig {
    fn validate(&self, problems: &mut Problems) {
        problems.range("body_bytes_max", self.body_bytes_max, 1 << 10..=1 << 30);
        problems.range("body_timeout_ms", self.body_timeout_ms, 100..=3_600_000);
        problems.range("concurrent_requests_max", self.concurrent_requests_max, 1..=1 << 20);
        problems.range("choices_max", self.choices_max, 1..=128);
        problems.range("slow_reader_timeout_ms", self.slow_reader_timeout_ms, 100..=3_600_000);
        problems.range("request_timeout_ms", self.request_timeout_ms, 100..=86_400_000);
        problems.check(self.prompt_tokens_max != Some(0), "prompt_tokens_max", "is 0, at least 1 is needed");
        problems.nested("per_key", &self.per_key);
    }
}

impl Validate for KeyLimits {
    fn validate(&self, problems: &mut Problems) {
        for (field, limit) in [
            ("requests_per_minute", self.requests_per_minute),
            ("tokens_per_minute", self.tokens_per_minute),
            ("concurrent_requests_max", self.concurrent_requests_max),
        ] {
            problems.check(
                limit != Some(0),
                field,
                "is 0, which lets nothing through: set `suspended` on the key instead",
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use model::ReleasedShape;

    use super::*;

    const MINIMAL: &str =
        "listen: 127.0.0.1:8000\nadmin_listen: 127.0.0.1:8002\nrouter: 127.0.0.1:9000\nmodel: embedded-nano\n";

    fn parse(text: &str) -> Result<Config, String> {
        chassis::config::parse(text, "gateway.yaml", "gateway", []).map_err(|error| error.to_string())
    }

    #[test]
    fn a_minimal_file_is_enough_and_is_read_back_as_printed() {
        let config = parse(MINIMAL).unwrap();
        assert_eq!(config.model, ModelSource::EmbeddedNano);
        assert_eq!(config.limits, LimitsConfig::default());
        assert_eq!(parse(&chassis::config::print(&config)).unwrap(), config);
    }

    #[test]
    fn models_are_named_or_found_by_path() {
        for (word, source) in [
            ("gpt-oss-20b", ModelSource::Released("gpt-oss-20b")),
            ("random:20b:7", ModelSource::Random(RandomModel { shape: ReleasedShape::B20, seed: 7 })),
            ("./gpt-oss-20b", ModelSource::Directory("./gpt-oss-20b".into())),
            ("/models/mine", ModelSource::Directory("/models/mine".into())),
        ] {
            assert_eq!(word.parse(), Ok(source.clone()));
            assert_eq!(source.to_string(), word);
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        let error =
            parse(&format!("{MINIMAL}limits: {{ choices_max: 0 }}\ncors_origins: [example.com]\n")).unwrap_err();
        assert!(error.contains("limits.choices_max is 0, allowed is 1 to 128"), "{error}");
        assert!(error.contains("cors_origins[0] is neither"), "{error}");
        let error = parse(&format!("{MINIMAL}api_keys: [{{ name: a, sha256: abc }}]\n")).unwrap_err();
        assert!(error.contains("api_keys[0].sha256"), "{error}");
        let error = parse(&format!("{MINIMAL}limits: {{ per_key: {{ tokens_per_minute: 0 }} }}\n")).unwrap_err();
        assert!(error.contains("limits.per_key.tokens_per_minute is 0"), "{error}");
        let error = parse(&format!("{MINIMAL}responses_store: {{ bytes_max: 5 }}\n")).unwrap_err();
        assert!(error.contains("responses_store.bytes_max is 5"), "{error}");
        let error = parse(&format!("{MINIMAL}limit: 1\n")).unwrap_err();
        assert!(error.contains("unknown field `limit`"), "{error}");
    }
}
