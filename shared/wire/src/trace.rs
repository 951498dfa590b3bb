//! W3C trace context across hops.

use tonic::metadata::MetadataMap;

/// The headers of <https://www.w3.org/TR/trace-context/>.
const HEADERS: [&str; 2] = ["traceparent", "tracestate"];

/// Hands the caller's trace context on to the next hop.
pub fn pass_on(from: &MetadataMap, to: &mut MetadataMap) {
    for header in HEADERS {
        if let Some(value) = from.get(header) {
            to.insert(header, value.clone());
        }
    }
}
