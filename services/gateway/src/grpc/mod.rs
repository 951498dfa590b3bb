//! `Gateway.Chat`: a chat by gRPC, with health and reflection beside it.

mod lower;
mod server;

use std::sync::Arc;
use std::time::Duration;

use chassis::Tasks;
use tonic::transport::server::Router;
use wire::pb::gateway_server::GatewayServer;

use crate::service::Service;
use server::ChatServer;

/// How often health is brought up to date.
const HEALTH_INTERVAL: Duration = Duration::from_millis(500);

/// What the gRPC port serves.
pub(crate) fn services(tasks: &Tasks, service: &Arc<Service>) -> Router {
    let (reporter, health_and_reflection) = wire::server::health_and_reflection::<GatewayServer<ChatServer>>();
    let shutdown = tasks.shutdown().clone();
    let watched = Arc::clone(service);
    tasks.spawn_background("grpc health", async move {
        loop {
            let serving = !shutdown.is_draining() && watched.ready().is_ok();
            wire::server::set_serving::<GatewayServer<ChatServer>>(&reporter, serving).await;
            tokio::time::sleep(HEALTH_INTERVAL).await;
        }
    });
    let limit = service.config.limits.body_bytes_max;
    let chat = GatewayServer::new(ChatServer::new(Arc::clone(service))).max_decoding_message_size(limit);
    chassis::net::grpc::server().add_routes(health_and_reflection).add_service(chat)
}
