//! The life of the service.

use std::sync::Arc;

use chassis::admin::{Admin, Probe};
use chassis::net::tls::{Tls, TlsError};
use chassis::net::{grpc as grpc_net, http as http_net};
use chassis::{Address, Metrics, Network, Shutdown, TaskFailure, Tasks};

use crate::config::{Config, ModelSource};
use crate::metrics::GatewayMetrics;
use crate::router_link::RouterLink;
use crate::served_model::{ServedModel, ServedModelError};
use crate::service::Service;
use crate::store::{KeptResponses, StoreError};
use crate::{grpc, http};

/// Why the gateway could not start or had to end.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// The model cannot be spoken for.
    #[error(transparent)]
    Model(#[from] ServedModelError),
    /// An address cannot be listened on; the text names it.
    #[error(transparent)]
    Bind(#[from] std::io::Error),
    /// The certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Responses cannot be kept.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A task that the gateway cannot do without has failed.
    #[error(transparent)]
    Task(#[from] TaskFailure),
}

/// Serves until `shutdown` says otherwise; open answers are finished first.
///
/// # Errors
/// As [`GatewayError`] says.
pub async fn run(config: Config, network: Arc<dyn Network>, shutdown: Shutdown) -> Result<(), GatewayError> {
    let tasks = Tasks::new(shutdown.clone());
    let mut listener = network.bind("http", &config.listen).await?;
    let admin_listener = network.bind("admin", &config.admin_listen).await?;
    let mut grpc_listener = match &config.grpc_listen {
        Some(address) => Some(network.bind("grpc", address).await?),
        None => None,
    };
    if let Some(tls) = &config.tls {
        let tls = Tls::start(&tasks, tls.clone()).await?;
        listener = tls.secure(listener);
        grpc_listener = grpc_listener.map(|listener| tls.secure(listener));
    }
    let model = load(config.model.clone()).await?;
    let kept_responses = match config.responses_store.clone() {
        None => None,
        Some(store) => {
            let tasks = tasks.clone();
            let opening = tokio::task::spawn_blocking(move || KeptResponses::open(&tasks, &store)).await;
            Some(opening.map_err(|panic| TaskFailure { task: "response store", reason: panic.to_string() })??)
        }
    };

    let registry = Metrics::new();
    let metrics = GatewayMetrics::new(&registry);
    let router = RouterLink::start(&tasks, &network, &config.router, model.fingerprint.clone());
    tracing::info!(
        model = %model.fingerprint, format = model.format.name(), http = %listener.local(),
        grpc = grpc_listener.as_ref().map(|listener| listener.local().to_string()), router = %config.router,
        "gateway started"
    );
    warn_if_open(&config, listener.local());
    let service = Arc::new(Service::new(model, config, router, metrics, tasks.clone(), kept_responses));
    registry.before_scrape({
        let service = Arc::clone(&service);
        move || {
            service.metrics.in_flight.set(service.requests_in_flight() as i64);
        }
    });

    let (live, ready) = probes(&service, &shutdown);
    http_net::serve_admin(
        &tasks,
        admin_listener,
        Admin { live: live.clone(), ready: ready.clone(), metrics: registry },
    );
    if let Some(grpc_listener) = grpc_listener {
        grpc_net::serve(&tasks, "grpc", grpc_listener, grpc::services(&tasks, &service));
    }
    http_net::serve(&tasks, "http", listener, http::app(service, live, ready));
    tasks.join().await?;
    tracing::info!("gateway ended");
    Ok(())
}

async fn load(source: ModelSource) -> Result<ServedModel, GatewayError> {
    if source == ModelSource::EmbeddedNano {
        // A few milliseconds: no thread is worth it, and a simulated fleet has none.
        return Ok(ServedModel::load(&source)?);
    }
    let loading = tokio::task::spawn_blocking(move || ServedModel::load(&source)).await;
    Ok(loading.map_err(|panic| TaskFailure { task: "model", reason: panic.to_string() })??)
}

/// The gateway computes nothing that could hang: it lives as long as it answers. It is ready while the router can
/// serve.
fn probes(service: &Arc<Service>, shutdown: &Shutdown) -> (Probe, Probe) {
    let (service, shutdown) = (Arc::clone(service), shutdown.clone());
    let ready = move || if shutdown.is_draining() { Err("draining".into()) } else { service.ready() };
    (Arc::new(|| Ok(())), Arc::new(ready))
}

fn warn_if_open(config: &Config, local: &Address) {
    if config.api_keys.is_empty() && !local.is_loopback() {
        tracing::warn!(http = %local, "no API keys are configured: everybody who can connect may use the model");
    }
}
