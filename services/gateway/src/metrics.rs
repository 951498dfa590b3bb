//! What the gateway counts.

use chassis::Metrics;
use chassis::metrics::seconds_buckets;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

/// Labels of a finished request.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct RequestLabels {
    /// The route, as written in the code: a client cannot make up new ones.
    pub(crate) route: String,
    /// HTTP status.
    pub(crate) status: u16,
}

/// Handles to the gateway's metrics.
#[derive(Clone)]
pub(crate) struct GatewayMetrics {
    pub(crate) requests: Family<RequestLabels, Counter>,
    pub(crate) in_flight: Gauge,
    pub(crate) first_piece_seconds: Histogram,
    pub(crate) prompt_tokens: Counter,
    pub(crate) output_tokens: Counter,
    pub(crate) broken_streams: Counter,
}

impl GatewayMetrics {
    pub(crate) fn new(metrics: &Metrics) -> Self {
        Self {
            requests: metrics.counters(
                "gateway_requests",
                "Requests by route and status of the response's head, that of gRPC calls as HTTP would say it",
            ),
            in_flight: metrics.gauge("gateway_requests_in_flight", "Requests being answered"),
            first_piece_seconds: metrics.histogram(
                "gateway_time_to_first_piece_seconds",
                "From the arrival of a request to the first piece of its answer",
                seconds_buckets(),
            ),
            prompt_tokens: metrics.counter("gateway_prompt_tokens", "Tokens of prompts sent to the router"),
            output_tokens: metrics
                .counter("gateway_output_tokens", "Tokens generated in answers that ended by themselves"),
            broken_streams: metrics.counter("gateway_broken_streams", "Answers that failed after their first byte"),
        }
    }
}
