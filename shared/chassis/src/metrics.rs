//! Metrics of one service. The registry is a value that is handed around, so several services in one process do not mix.

use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};

/// What [`Metrics::encode`] yields, for the HTTP header.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Refresh = Box<dyn Fn() + Send>;

/// The registry of one service. Cloning it gives another handle to the same registry.
#[derive(Clone)]
pub struct Metrics {
    inner: Arc<Mutex<Inner>>,
}

struct Inner {
    registry: Registry,
    refresh: Vec<Refresh>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// An empty registry; every name gets the prefix `damask_`.
    #[must_use]
    pub fn new() -> Self {
        let inner = Inner { registry: Registry::with_prefix("damask"), refresh: Vec::new() };
        Self { inner: Arc::new(Mutex::new(inner)) }
    }

    /// Registers `metric` and gives it back. `name` has neither the prefix nor, for a counter, `_total`: both are added.
    pub fn register<M: Metric + Clone>(&self, name: &str, help: &str, metric: M) -> M {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.registry.register(name, help, metric.clone());
        metric
    }

    /// A counter without labels.
    pub fn counter(&self, name: &str, help: &str) -> Counter {
        self.register(name, help, Counter::default())
    }

    /// Counters by label.
    pub fn counters<L>(&self, name: &str, help: &str) -> Family<L, Counter>
    where
        L: Clone + std::hash::Hash + Eq + EncodeLabelSet + std::fmt::Debug + Send + Sync + 'static,
    {
        self.register(name, help, Family::default())
    }

    /// A gauge without labels.
    pub fn gauge(&self, name: &str, help: &str) -> Gauge {
        self.register(name, help, Gauge::default())
    }

    /// Gauges by label.
    pub fn gauges<L>(&self, name: &str, help: &str) -> Family<L, Gauge>
    where
        L: Clone + std::hash::Hash + Eq + EncodeLabelSet + std::fmt::Debug + Send + Sync + 'static,
    {
        self.register(name, help, Family::default())
    }

    /// A histogram; for durations in seconds take [`seconds_buckets`].
    pub fn histogram(&self, name: &str, help: &str, buckets: impl IntoIterator<Item = f64>) -> Histogram {
        self.register(name, help, Histogram::new(buckets))
    }

    /// Calls `refresh` before each scrape: for gauges that mirror the state of something else.
    pub fn before_scrape(&self, refresh: impl Fn() + Send + 'static) {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).refresh.push(Box::new(refresh));
    }

    /// All metrics as OpenMetrics text.
    #[must_use]
    pub fn encode(&self) -> String {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        for refresh in &inner.refresh {
            refresh();
        }
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &inner.registry).expect("writing to a String cannot fail");
        text
    }
}

/// Bucket bounds for durations from half a millisecond to two minutes, in seconds: about 1, 2, 5 in each decade.
pub fn seconds_buckets() -> impl Iterator<Item = f64> {
    [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 120.0]
        .into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_the_prefix_and_registries_do_not_mix() {
        let (router, decode) = (Metrics::new(), Metrics::new());
        router.counter("router_requests", "Requests").inc();
        let pages = decode.gauge("kv_pages", "Pages");
        let mirrored = pages.clone();
        decode.before_scrape(move || {
            mirrored.set(7);
        });
        assert!(router.encode().contains("\ndamask_router_requests_total 1\n"), "{}", router.encode());
        assert!(!router.encode().contains("kv_pages"));
        assert!(decode.encode().contains("\ndamask_kv_pages 7\n"), "{}", decode.encode());
        assert!(decode.encode().ends_with("# EOF\n"));
    }
}
