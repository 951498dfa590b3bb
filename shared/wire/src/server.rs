//! Servers with the message limits of this protocol, and what every gRPC server here offers besides its own service.

use tonic::server::NamedService;
use tonic::service::Routes;
pub use tonic_health::server::HealthReporter;
use tonic_reflection::pb::{v1::server_reflection_server as v1, v1alpha::server_reflection_server as v1alpha};

use crate::MAX_MESSAGE_BYTES;
use crate::pb::decode_server::{Decode, DecodeServer};
use crate::pb::inference_server::{Inference, InferenceServer};
use crate::pb::prefill_server::{Prefill, PrefillServer};
use crate::pb::worker_server::{Worker, WorkerServer};

/// The descriptors of all messages and services of `damask.v1`.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// The router's service.
pub fn inference<T: Inference>(service: T) -> InferenceServer<T> {
    InferenceServer::new(service)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

/// What every worker serves.
pub fn worker<T: Worker>(service: T) -> WorkerServer<T> {
    WorkerServer::new(service)
}

/// The prefill worker's service.
pub fn prefill<T: Prefill>(service: T) -> PrefillServer<T> {
    PrefillServer::new(service)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

/// The decode worker's service.
pub fn decode<T: Decode>(service: T) -> DecodeServer<T> {
    DecodeServer::new(service).max_decoding_message_size(MAX_MESSAGE_BYTES).max_encoding_message_size(MAX_MESSAGE_BYTES)
}

/// The gRPC health service (`grpc.health.v1`) and server reflection (v1 and v1alpha), to be added to a server beside its service `S`:
/// reflection lists what this server answers, not all that the protocol has. The reporter sets what health says.
///
/// # Panics
/// Never: the descriptors were made by this crate's build.
#[must_use]
pub fn health_and_reflection<S: NamedService>() -> (HealthReporter, Routes) {
    let (reporter, health) = tonic_health::server::health_reporter();
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name(S::NAME)
            .with_service_name(tonic_health::pb::health_server::SERVICE_NAME)
    };
    let current = reflection()
        .with_service_name(v1::SERVICE_NAME)
        .build_v1()
        .expect("the descriptors were made by this crate's build");
    let older = reflection()
        .with_service_name(v1alpha::SERVICE_NAME)
        .build_v1alpha()
        .expect("the descriptors were made by this crate's build");
    (reporter, Routes::new(health).add_service(current).add_service(older))
}

/// Says under any name whether it is served.
pub async fn set_named_serving(reporter: &HealthReporter, name: &str, serving: bool) {
    let status = if serving { tonic_health::ServingStatus::Serving } else { tonic_health::ServingStatus::NotServing };
    reporter.set_service_status(name, status).await;
}

/// Says under the service's own name and under `""` (the whole server) whether requests are served.
pub async fn set_serving<S: NamedService>(reporter: &HealthReporter, serving: bool) {
    set_named_serving(reporter, S::NAME, serving).await;
    set_named_serving(reporter, "", serving).await;
}
