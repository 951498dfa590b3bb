//! The router's config file.

use std::time::Duration;

use chassis::{Address, Problems, Validate};
use serde::{Deserialize, Serialize};

use crate::flight::FlightLimits;

/// The whole file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Where `damask.v1.Inference` is served.
    #[serde(default = "default_listen")]
    pub listen: Address,
    /// Where health and metrics are served.
    #[serde(default = "default_admin_listen")]
    pub admin_listen: Address,
    /// Whom requests are given to.
    pub workers: Workers,
    /// How much is taken on.
    #[serde(default)]
    pub limits: Limits,
    /// How long each stage of an attempt may take.
    #[serde(default)]
    pub deadlines: Deadlines,
}

/// Workers and how they are watched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workers {
    /// Prefill workers; a host name stands for every address that it resolves to.
    pub prefill: Vec<Address>,
    /// Decode workers; a host name stands for every address that it resolves to.
    pub decode: Vec<Address>,
    /// How often host names are resolved again.
    #[serde(default = "default_resolve_interval_ms")]
    pub resolve_interval_ms: u64,
    /// How often a worker reports.
    #[serde(default = "default_heartbeat_interval_ms")]
    pub heartbeat_interval_ms: u32,
    /// A worker that says nothing for this long is taken for dead.
    #[serde(default = "default_dead_after_ms")]
    pub dead_after_ms: u64,
    /// Whether a prompt goes rather to the prefill worker that has computed its beginning before, if that has `prefix_reuse`.
    #[serde(default = "default_prefix_affinity")]
    pub prefix_affinity: bool,
}

/// Bounds of what the router holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Requests with workers.
    pub in_flight_max: u32,
    /// Requests waiting for workers; beyond it they are refused.
    pub queue_max: u32,
    /// Longest wait for workers.
    pub queue_timeout_ms: u64,
    /// Requests at one prefill worker, its queue included. More would hold decode's pages while they wait.
    pub prefills_per_worker_max: u32,
    /// Longest life of a request; a client may ask for less.
    pub request_timeout_ms: u64,
    /// Failed attempts that a request survives; being preempted is no failure.
    pub resumptions_max: u32,
}

/// Longest duration of each stage; a stage that takes longer fails the attempt, and the request is resumed elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Deadlines {
    /// From asking decode to its ticket.
    pub reserve_ms: u64,
    /// From asking prefill to its token, its queue included.
    pub prefill_ms: u64,
    /// From that token to the sequence joining decode's batch.
    pub transfer_ms: u64,
    /// From joining to decode's first token.
    pub first_token_ms: u64,
    /// Between two messages with tokens.
    pub inter_token_ms: u64,
}

fn default_listen() -> Address {
    Address::new("127.0.0.1", 9000)
}

fn default_admin_listen() -> Address {
    Address::new("127.0.0.1", 9001)
}

fn default_resolve_interval_ms() -> u64 {
    5_000
}

fn default_heartbeat_interval_ms() -> u32 {
    500
}

fn default_dead_after_ms() -> u64 {
    2_000
}

fn default_prefix_affinity() -> bool {
    true
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            in_flight_max: 1_024,
            queue_max: 1_024,
            queue_timeout_ms: 60_000,
            prefills_per_worker_max: 4,
            request_timeout_ms: 600_000,
            resumptions_max: 8,
        }
    }
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            reserve_ms: 5_000,
            prefill_ms: 120_000,
            transfer_ms: 30_000,
            first_token_ms: 30_000,
            inter_token_ms: 30_000,
        }
    }
}

/// No stage takes longer than an hour.
const LONGEST_MS: u64 = 3_600_000;

impl Validate for Config {
    fn validate(&self, problems: &mut Problems) {
        problems.nested("workers", &self.workers);
        problems.nested("limits", &self.limits);
        problems.nested("deadlines", &self.deadlines);
    }
}

impl Validate for Workers {
    fn validate(&self, problems: &mut Problems) {
        problems.check(!self.prefill.is_empty(), "prefill", "is empty, at least one worker is needed");
        problems.check(!self.decode.is_empty(), "decode", "is empty, at least one worker is needed");
        problems.range("resolve_interval_ms", self.resolve_interval_ms, 100..=LONGEST_MS);
        problems.range("heartbeat_interval_ms", self.heartbeat_interval_ms, 50..=10_000);
        let least = 2 * u64::from(self.heartbeat_interval_ms);
        problems.check(
            (least..=LONGEST_MS).contains(&self.dead_after_ms),
            "dead_after_ms",
            format!("is {}, at least two heartbeat intervals ({least}) are needed", self.dead_after_ms),
        );
    }
}

impl Validate for Limits {
    fn validate(&self, problems: &mut Problems) {
        problems.range("in_flight_max", self.in_flight_max, 1..=1_000_000);
        problems.range("queue_max", self.queue_max, 0..=1_000_000);
        problems.range("queue_timeout_ms", self.queue_timeout_ms, 1..=LONGEST_MS);
        problems.range("prefills_per_worker_max", self.prefills_per_worker_max, 1..=1_024);
        problems.range("request_timeout_ms", self.request_timeout_ms, 1..=24 * LONGEST_MS);
        problems.range("resumptions_max", self.resumptions_max, 0..=1_000);
    }
}

impl Validate for Deadlines {
    fn validate(&self, problems: &mut Problems) {
        for (field, value) in [
            ("reserve_ms", self.reserve_ms),
            ("prefill_ms", self.prefill_ms),
            ("transfer_ms", self.transfer_ms),
            ("first_token_ms", self.first_token_ms),
            ("inter_token_ms", self.inter_token_ms),
        ] {
            problems.range(field, value, 1..=LONGEST_MS);
        }
    }
}

impl Config {
    /// What a flight needs to know of it.
    #[must_use]
    pub fn flight_limits(&self) -> FlightLimits {
        FlightLimits {
            queue: Duration::from_millis(self.limits.queue_timeout_ms),
            reserve: Duration::from_millis(self.deadlines.reserve_ms),
            prefill: Duration::from_millis(self.deadlines.prefill_ms),
            transfer: Duration::from_millis(self.deadlines.transfer_ms),
            first_token: Duration::from_millis(self.deadlines.first_token_ms),
            inter_token: Duration::from_millis(self.deadlines.inter_token_ms),
            resumptions_max: self.limits.resumptions_max,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        chassis::config::parse(text, "router.yaml", "router", []).map_err(|error| error.to_string())
    }

    #[test]
    fn workers_are_all_that_must_be_said() {
        let config = parse("workers: { prefill: ['127.0.0.1:9100'], decode: ['127.0.0.1:9200'] }").unwrap();
        assert_eq!(config.listen.to_string(), "127.0.0.1:9000");
        assert_eq!(parse(&chassis::config::print(&config)).unwrap(), config);
    }

    #[test]
    fn errors_name_the_field() {
        for (text, want) in [
            ("workers: { prefill: [], decode: ['d:1'] }", "workers.prefill is empty"),
            ("workers: { prefill: ['p:1'], decode: ['d'] }", "workers.decode[0]: `d` is no address"),
            ("workers: { prefill: ['p:1'], decode: ['d:1'], dead_after_ms: 600 }", "workers.dead_after_ms is 600"),
            ("workers: { prefill: ['p:1'], decode: ['d:1'] }\nlimits: { queue: 1 }", "limits.queue: unknown field"),
            (
                "workers: { prefill: ['p:1'], decode: ['d:1'] }\ndeadlines: { reserve_ms: 0 }",
                "deadlines.reserve_ms is 0",
            ),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(want), "{error}");
        }
    }
}
