//! Traces: the spans of requests, sent to an OpenTelemetry collector over OTLP.
//!
//! Spans are `tracing` spans like those of the log. Without a collector none of this runs, and a caller's trace context
//! is handed on as it came. Sampling follows the caller, or `OTEL_TRACES_SAMPLER` where there is none.

use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::Subscriber;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::registry::LookupSpan;

/// For a batch of spans to reach the collector; after that it is lost, and requests go on.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// For the last spans of a process that ends.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);

/// Where spans go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collector {
    /// OTLP over gRPC, as `http://host:4317`.
    pub endpoint: String,
    /// `service.name` of this process.
    pub service: String,
}

/// Why spans cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The address is not understood.
    #[error("OTLP endpoint {endpoint:?} cannot be used: {reason}")]
    Endpoint {
        /// As given.
        endpoint: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// The way of spans to a collector. A clone is the same way.
#[derive(Debug, Clone)]
pub struct Traces {
    provider: SdkTracerProvider,
}

impl Traces {
    /// Opens the way. The connection is made when the first spans are sent, and again whenever it is lost. Must be
    /// called inside the async runtime.
    ///
    /// # Errors
    /// [`TraceError::Endpoint`].
    pub fn start(collector: &Collector) -> Result<Self, TraceError> {
        let fail = |reason: String| TraceError::Endpoint { endpoint: collector.endpoint.clone(), reason };
        if !collector.endpoint.starts_with("http://") {
            return Err(fail("it must begin with http:// and name an OTLP receiver for gRPC".into()));
        }
        let exporter = SpanExporter::builder()
            .with_tonic()
            .with_endpoint(&collector.endpoint)
            .with_timeout(EXPORT_TIMEOUT)
            .build()
            .map_err(|error| fail(error.to_string()))?;
        let resource = Resource::builder()
            .with_attribute(KeyValue::new("service.name", collector.service.clone()))
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .build();
        let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build();
        Ok(Self { provider })
    }

    /// Turns spans of level `info` into OpenTelemetry's. Those of libraries are left out: they would be sent for the
    /// sending of spans, too.
    pub fn layer<S: Subscriber + for<'a> LookupSpan<'a>>(&self) -> impl Layer<S> + use<S> {
        let libraries = ["h2", "hyper", "hyper_util", "tonic", "tower", "tower_http", "opentelemetry"];
        let filter = Targets::new()
            .with_default(LevelFilter::INFO)
            .with_targets(libraries.map(|library| (library, LevelFilter::OFF)));
        tracing_opentelemetry::layer().with_tracer(self.provider.tracer("damask")).with_filter(filter)
    }

    /// Sends what is left, and no more after that. Blocks for a bounded time: not for async code.
    pub fn finish(&self) {
        if let Err(error) = self.provider.shutdown_with_timeout(FLUSH_TIMEOUT) {
            tracing::debug!(%error, "the last spans were not sent");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_endpoint_that_is_no_url_is_refused_by_name() {
        for endpoint in ["collector:4317", "https://collector:4317", ""] {
            let collector = Collector { endpoint: endpoint.into(), service: "damask-router".into() };
            let error = Traces::start(&collector).unwrap_err().to_string();
            assert!(error.contains(&format!("{endpoint:?}")) && error.contains("http://"), "{error}");
        }
    }
}
