//! What the router counts.

use std::sync::Arc;

use chassis::Metrics;
use chassis::metrics::seconds_buckets;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use types::{FinishReason, PrefillEvent, Role, WorkerState};

use crate::error::{AttemptFailure, RequestError};
use crate::flight::Outcome;
use crate::worker_pool::WorkerPool;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CauseLabel {
    cause: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WorkersLabel {
    role: &'static str,
    state: &'static str,
}

/// Handles to the router's metrics.
#[derive(Clone)]
pub(crate) struct RouterMetrics {
    requests: Family<OutcomeLabel, Counter>,
    resumptions: Family<CauseLabel, Counter>,
    pub(crate) prompt_tokens: Counter,
    pub(crate) output_tokens: Counter,
    pub(crate) time_to_first_token: Histogram,
    pub(crate) inter_token_latency: Histogram,
    pub(crate) request_duration: Histogram,
    prefill_queue: Histogram,
    prefill_compute: Histogram,
    kv_transfer: Histogram,
    kv_transfer_tail: Histogram,
    kv_transfer_bytes: Counter,
}

impl RouterMetrics {
    pub(crate) fn new(registry: &Metrics, pool: &Arc<WorkerPool>) -> Self {
        mirror_pool(registry, pool);
        let seconds = |name: &str, help: &str| registry.histogram(name, help, seconds_buckets());
        Self {
            requests: registry.counters("router_requests", "Requests that ended, by outcome"),
            resumptions: registry.counters("router_resumptions", "Attempts beyond the first one, by cause"),
            prompt_tokens: registry.counter("router_prompt_tokens", "Prompt tokens of requests that were accepted"),
            output_tokens: registry.counter("router_output_tokens", "Tokens sent to clients"),
            time_to_first_token: seconds(
                "router_time_to_first_token_seconds",
                "From the arrival of a request to its first token",
            ),
            inter_token_latency: seconds(
                "router_inter_token_latency_seconds",
                "Between two messages with tokens of one request",
            ),
            request_duration: seconds("router_request_duration_seconds", "From the arrival of a request to its end"),
            prefill_queue: seconds("router_prefill_queue_seconds", "Waiting at a prefill worker, as it reports"),
            prefill_compute: seconds("router_prefill_compute_seconds", "Computing a prompt, as prefill reports"),
            kv_transfer: seconds(
                "router_kv_transfer_seconds",
                "From the first byte of KV sent to decode's acknowledgement",
            ),
            kv_transfer_tail: seconds(
                "router_kv_transfer_tail_seconds",
                "From the end of prefill's last layer to decode's acknowledgement",
            ),
            kv_transfer_bytes: registry.counter("router_kv_transfer_bytes", "Bytes of KV sent from prefill to decode"),
        }
    }

    pub(crate) fn ended(&self, outcome: &Outcome) {
        let outcome = match outcome {
            Outcome::Finished(FinishReason::Stop) => "stop",
            Outcome::Finished(FinishReason::Length) => "length",
            Outcome::Cancelled => "cancelled",
            Outcome::Failed(error) => return self.refused(error),
        };
        self.requests.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    pub(crate) fn refused(&self, error: &RequestError) {
        self.requests.get_or_create(&OutcomeLabel { outcome: error.reason() }).inc();
    }

    pub(crate) fn resumed(&self, failure: &AttemptFailure) {
        self.resumptions.get_or_create(&CauseLabel { cause: failure.name() }).inc();
    }

    /// What prefill says of its own work.
    pub(crate) fn prefill(&self, event: &PrefillEvent) {
        let seconds = |us: u64| us as f64 * 1e-6;
        match event {
            PrefillEvent::FirstToken { queue_us, compute_us, .. } => {
                self.prefill_queue.observe(seconds(*queue_us));
                self.prefill_compute.observe(seconds(*compute_us));
            }
            PrefillEvent::Committed { kv_bytes, transfer_us, tail_us } => {
                self.kv_transfer.observe(seconds(*transfer_us));
                self.kv_transfer_tail.observe(seconds(*tail_us));
                self.kv_transfer_bytes.inc_by(*kv_bytes);
            }
            PrefillEvent::Finished(_) => {}
        }
    }
}

/// Gauges that show the worker pool as it is when they are read.
fn mirror_pool(registry: &Metrics, pool: &Arc<WorkerPool>) {
    let in_flight: Gauge = registry.gauge("router_requests_in_flight", "Requests with workers, or between two of them");
    let queued: Gauge = registry.gauge("router_requests_queued", "Requests that wait for workers");
    let workers: Family<WorkersLabel, Gauge> = registry.gauges("router_workers", "Known workers, by role and state");
    let pool = Arc::clone(pool);
    registry.before_scrape(move || {
        let (num_in_flight, num_queued) = pool.num_requests();
        in_flight.set(num_in_flight.into());
        queued.set(num_queued as i64);
        for role in [Role::Prefill, Role::Decode] {
            for state in WorkerState::ALL {
                let label = WorkersLabel { role: role.name(), state: state.name() };
                workers.get_or_create(&label).set(pool.num_workers(role, state) as i64);
            }
        }
    });
}
