//! The router: tokens in, a stream of tokens out. It owns the life of a request, from admission to the last token.
//!
//! Knows: which workers there are and how busy, who waits, how far each request has come. Must not know: text, weights, KV pages. Nothing here
//! has to survive a restart.
//!
//! Start with [`flight`], the state machine of one request; [`fleet`], [`placement`] and [`admission`] decide where it runs and when.
//! Sockets and tasks are in `service` (the client's side), `drive` (the rim around a flight) and `watch` (heartbeats).

pub mod admission;
pub mod affinity;
mod config;
mod drive;
mod error;
pub mod fleet;
pub mod flight;
mod link;
mod metrics;
pub mod placement;
mod service;
mod watch;
mod worker_pool;

use std::sync::Arc;
use std::time::Duration;

use chassis::admin::Admin;
use chassis::net::{grpc, http};
use chassis::{Metrics, Network, Shutdown, TaskFailure, Tasks};
use wire::pb::inference_server::InferenceServer;

pub use config::{Config, Deadlines, Limits, Workers};
pub use error::{AttemptFailure, RequestError, Stage};

use metrics::RouterMetrics;
use service::InferenceService;
use worker_pool::WorkerPool;

/// Why the router ended early.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A port cannot be listened on.
    #[error(transparent)]
    Bind(#[from] std::io::Error),
    /// A part that the router cannot do without has failed.
    #[error(transparent)]
    Task(#[from] TaskFailure),
}

/// Runs a router until `shutdown` drains it and its last request has ended.
///
/// # Errors
/// A port that cannot be listened on, or the failure of a server.
pub async fn run(config: Config, network: Arc<dyn Network>, shutdown: Shutdown) -> Result<(), RunError> {
    let listener = network.bind("grpc", &config.listen).await?;
    let admin_listener = network.bind("admin", &config.admin_listen).await?;
    tracing::info!(grpc = %listener.local(), admin = %admin_listener.local(), "router is listening");

    let tasks = Tasks::new(shutdown);
    let pool = WorkerPool::new(&config.limits, config.workers.prefix_affinity);
    let registry = Metrics::new();
    let metrics = RouterMetrics::new(&registry, &pool);
    http::serve_admin(&tasks, admin_listener, admin(&pool, &tasks, registry));
    watch::start(&tasks, network, config.workers.clone(), Arc::clone(&pool));

    let service = wire::server::inference(InferenceService {
        pool: Arc::clone(&pool),
        metrics,
        tasks: tasks.clone(),
        limits: config.flight_limits(),
        request_timeout: Duration::from_millis(config.limits.request_timeout_ms),
    });
    let (reporter, routes) = wire::server::health_and_reflection::<InferenceServer<InferenceService>>();
    tasks.spawn_background("health", report_health(reporter, Arc::clone(&pool), tasks.shutdown().clone()));
    grpc::serve(&tasks, "grpc", listener, grpc::server().add_routes(routes).add_service(service));
    tasks.join().await?;
    tracing::info!("router has ended");
    Ok(())
}

fn admin(pool: &Arc<WorkerPool>, tasks: &Tasks, registry: Metrics) -> Admin {
    let (pool, shutdown) = (Arc::clone(pool), tasks.shutdown().clone());
    Admin {
        // The router has no loop that could stall without its runtime, which is what answers this.
        live: Arc::new(|| Ok(())),
        ready: Arc::new(move || {
            if shutdown.is_draining() {
                return Err(RequestError::Draining.to_string());
            }
            pool.serves().map_err(|why| format!("{}: {why}", RequestError::NoPair))
        }),
        metrics: registry,
    }
}

/// Keeps gRPC's health service in step with readiness.
async fn report_health(reporter: wire::server::HealthReporter, pool: Arc<WorkerPool>, shutdown: Shutdown) {
    let mut ready = pool.ready();
    loop {
        let is_serving = *ready.borrow_and_update() && !shutdown.is_draining();
        wire::server::set_serving::<InferenceServer<InferenceService>>(&reporter, is_serving).await;
        tokio::select! {
            changed = ready.changed() => if changed.is_err() { break },
            () = shutdown.drain().cancelled(), if !shutdown.is_draining() => {}
        }
    }
}
