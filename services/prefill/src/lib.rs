//! The prefill worker: computes prompts one at a time, samples the first token, sends the KV cache to the decode worker of the ticket.
//!
//! Knows: prompts, chunks, transfers. Must not know: text, placement, what happens behind the first token.
//!
//! Start with [`state`], the synchronous turn of the step loop; [`export`] sends KV from inside a step, [`handoff`] is a transfer's task,
//! [`service`] the gRPC side.

pub mod config;
pub mod error;
pub mod export;
pub mod handoff;
pub mod service;
pub mod state;

use std::sync::Arc;

use chassis::Shutdown;
use chassis::net::{Network, grpc};
use engine::KvListener;
use scheduler::PrefillScheduler;
use tokio_util::task::TaskTracker;
use transfer::framed::FramedSender;
use transfer::{Lanes, SendTransport};
use types::{KvLayout, Role, WorkerDescription};
use wire::pb::prefill_server::PrefillServer;
use worker::{EngineConfig, NetworkConnector, OpenModel, Runtime, WorkerError, WorkerService, step_loop};

pub use config::Config;
pub use error::PrefillError;

use export::Exporter;
use service::PrefillService;
use state::PrefillState;

/// Runs the worker until `shutdown` orders its end.
///
/// # Errors
/// What keeps it from starting, or ended it.
pub async fn run(config: Config, network: Arc<dyn Network>, shutdown: Shutdown) -> Result<(), WorkerError> {
    let lane_tasks = TaskTracker::new();
    let outcome = run_with_lanes(config, network, shutdown, &lane_tasks).await;
    // The lanes were closed when the last of the service was dropped.
    lane_tasks.close();
    lane_tasks.wait().await;
    outcome
}

async fn run_with_lanes(
    config: Config,
    network: Arc<dyn Network>,
    shutdown: Shutdown,
    lane_tasks: &TaskTracker,
) -> Result<(), WorkerError> {
    let runtime = Runtime::new(&config.name, config.driver, network, shutdown);
    let source = config.model.clone();
    let Some(model) = runtime.blocking("open-model", move || OpenModel::open(&source)).await? else { return Ok(()) };
    let sizes = config.sizes(&model)?;
    let layout = model.kv_layout(&sizes.engine)?;
    config.check_room(&layout)?;
    let scheduler =
        PrefillScheduler::new(sizes.scheduler, &layout).map_err(|error| WorkerError::Config(error.to_string()))?;

    let admin = runtime.bind("admin", &config.admin_listen).await?;
    let listener = runtime.bind("grpc", &config.listen).await?;
    let description = Arc::new(describe(&config, &sizes.engine, &model, &layout, &runtime));
    let (mailbox, inbox) = step_loop::mailbox(&config.step_loop);
    let transport = FramedSender::new(
        Arc::new(NetworkConnector(Arc::clone(&runtime.network))),
        runtime.peer.clone(),
        layout,
        config.transfer.clone(),
        lane_tasks.clone(),
        runtime.shutdown().stop().clone(),
    );
    let transport = Arc::new(transport);
    let lanes = Arc::new(Lanes::new(Arc::clone(&transport) as Arc<dyn SendTransport>, &config.transfer));
    runtime.serve_admin(admin);
    let on_drain = {
        let mailbox = mailbox.clone();
        move || mailbox.wake()
    };
    let worker =
        WorkerService::new(Arc::clone(&description), Arc::clone(&runtime.status), runtime.tasks.clone(), on_drain);
    let prefill = PrefillService::new(
        &config,
        description,
        Arc::clone(&runtime.status),
        mailbox.clone(),
        lanes,
        runtime.tasks.clone(),
    );
    let health = runtime.health_routes::<PrefillServer<PrefillService>>();
    let router = grpc::server()
        .add_routes(health)
        .add_service(wire::server::worker(worker))
        .add_service(wire::server::prefill(prefill));
    grpc::serve(&runtime.tasks, "grpc", listener, router);

    let exporter = Arc::new(Exporter::default());
    let (status, listener) = (Arc::clone(&runtime.status), Arc::clone(&exporter) as Arc<dyn KvListener>);
    let load = move || model.load(&sizes.engine, Some(listener), &status);
    let Some(loaded) = runtime.blocking("load-model", load).await? else { return Ok(runtime.tasks.join().await?) };
    if let Some(data) = runtime.send_data(&loaded.engine, &config.transfer)? {
        transport.set_data(data);
    }
    let masks = runtime.start_masks(&loaded.compiler, config.mask_threads)?;
    let state = PrefillState::new(
        scheduler,
        loaded.engine,
        masks,
        exporter,
        config.chunk_tokens,
        Arc::clone(&runtime.status),
        runtime.metrics.clone(),
    );
    runtime.run(state, (mailbox, inbox), &config.step_loop).await
}

fn describe(
    config: &Config,
    engine: &EngineConfig,
    model: &OpenModel,
    layout: &KvLayout,
    runtime: &Runtime,
) -> WorkerDescription {
    WorkerDescription {
        peer: runtime.peer.clone(),
        role: Role::Prefill,
        fingerprint: model.fingerprint().clone(),
        weights_fingerprint: model.weights_fingerprint(),
        numerics: engine.numerics(),
        kv_layout: layout.clone(),
        parallel: config.layout,
        max_context_tokens: config.max_context_tokens,
        eos_token_ids: model.stop_token_ids().to_vec(),
        kv_endpoint: None,
        max_sequences: 1,
    }
}
