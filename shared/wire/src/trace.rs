//! W3C trace context across hops: <https://www.w3.org/TR/trace-context/>.

use std::str::FromStr;

use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator};
use opentelemetry::trace::TraceContextExt;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tonic::metadata::{AsciiMetadataKey, MetadataMap, MetadataValue};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

const HEADERS: [&str; 2] = ["traceparent", "tracestate"];

/// Makes `span` a child of the caller's span, as far as the caller has one. A context that is malformed is none.
pub fn adopt(span: &Span, caller: &MetadataMap) {
    let context = TraceContextPropagator::new().extract(&Incoming(caller));
    if context.span().span_context().is_valid() {
        // Refused only by a span that nothing records.
        let _ = span.set_parent(context);
    }
}

/// Hands the trace context on to the next hop: `span` becomes the parent of what happens there. Where spans are not sent anywhere, the caller's
/// own context goes along as it came.
pub fn hand_on(span: &Span, caller: &MetadataMap, to: &mut MetadataMap) {
    let context = span.context();
    if context.span().span_context().is_valid() {
        TraceContextPropagator::new().inject_context(&context, &mut Outgoing(to));
        return;
    }
    for header in HEADERS {
        if let Some(value) = caller.get(header) {
            to.insert(header, value.clone());
        }
    }
}

struct Incoming<'a>(&'a MetadataMap);

impl Extractor for Incoming<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        HEADERS.to_vec()
    }
}

struct Outgoing<'a>(&'a mut MetadataMap);

impl Injector for Outgoing<'_> {
    fn set(&mut self, key: &str, value: String) {
        // What the propagator writes is ASCII; an empty `tracestate` says nothing.
        if let (Ok(key), Ok(value)) = (AsciiMetadataKey::from_str(key), MetadataValue::try_from(value))
            && !value.is_empty()
        {
            self.0.insert(key, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn without_a_collector_the_context_goes_along_as_it_came() {
        let mut caller = MetadataMap::new();
        caller.insert("traceparent", PARENT.parse().unwrap());
        caller.insert("tracestate", "vendor=1".parse().unwrap());
        caller.insert("authorization", "secret".parse().unwrap());
        let mut to = MetadataMap::new();
        adopt(&Span::current(), &caller);
        hand_on(&Span::current(), &caller, &mut to);
        assert_eq!(to.get("traceparent").unwrap(), PARENT);
        assert_eq!(to.get("tracestate").unwrap(), "vendor=1");
        assert_eq!(to.len(), 2);
    }
}
