//! The decode worker: lands KV pages, batches sequences continuously, streams numbered tokens.
//!
//! Knows: tickets, batches, token streams. Must not know: text, placement, what a prompt is about.
//!
//! Start with [`state`], the synchronous turn of the step loop; [`service`] is the gRPC side, [`flight`] the stream between the two.

pub mod config;
pub mod error;
pub mod flight;
pub mod service;
pub mod state;

use std::sync::Arc;
use std::time::Duration;

use chassis::Shutdown;
use chassis::net::{Network, grpc};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use scheduler::DecodeScheduler;
use transfer::framed::{FramedReceiver, TRANSPORT};
use transfer::{Arrival, ArrivalSink, ArrivalSlot, SinkClosed};
use types::{KvEndpoint, Role, WorkerDescription};
use wire::pb::decode_server::DecodeServer;
use worker::{Mailbox, OpenModel, Runtime, WorkerError, WorkerService, serve_kv, step_loop};

pub use config::Config;
pub use error::DecodeError;

use service::DecodeService;
use state::{DecodeState, Message};

/// Runs the worker until `shutdown` orders its end.
///
/// # Errors
/// What keeps it from starting, or ended it.
pub async fn run(config: Config, network: Arc<dyn Network>, shutdown: Shutdown) -> Result<(), WorkerError> {
    let runtime = Runtime::new(&config.name, config.driver, network, shutdown);
    let source = config.model.clone();
    let Some(model) = runtime.blocking("open-model", move || OpenModel::open(&source)).await? else { return Ok(()) };
    let sizes = config.sizes(&model)?;
    let layout = model.kv_layout(&sizes.engine)?;
    let scheduler = DecodeScheduler::new(sizes.scheduler, layout.clone())
        .map_err(|error| WorkerError::Config(error.to_string()))?;

    let admin = runtime.bind("admin", &config.admin_listen).await?;
    let listener = runtime.bind("grpc", &config.listen).await?;
    let kv_listener = runtime.bind("kv", &config.kv_listen).await?;
    let kv_address = config.kv_advertise.clone().unwrap_or_else(|| worker::advertised(kv_listener.local()));
    let description = Arc::new(WorkerDescription {
        peer: runtime.peer.clone(),
        role: Role::Decode,
        fingerprint: model.fingerprint().clone(),
        weights_fingerprint: model.weights_fingerprint(),
        numerics: sizes.engine.numerics(),
        kv_layout: layout.clone(),
        parallel: config.layout,
        max_context_tokens: config.max_context_tokens,
        eos_token_ids: model.stop_token_ids().to_vec(),
        kv_endpoint: Some(KvEndpoint { transport: TRANSPORT.into(), address: kv_address.to_string() }),
        max_sequences: config.max_sequences,
    });

    let vocab_size = description.fingerprint.vocab_size;
    let (mailbox, inbox) = step_loop::mailbox(&config.step_loop);
    let sink = Arc::new(MailboxSink(mailbox.clone()));
    let receiver = Arc::new(FramedReceiver::new(runtime.peer.clone(), layout, config.transfer.clone(), sink));
    runtime.serve_admin(admin);
    let on_drain = {
        let mailbox = mailbox.clone();
        move || mailbox.wake()
    };
    let worker =
        WorkerService::new(Arc::clone(&description), Arc::clone(&runtime.status), runtime.tasks.clone(), on_drain);
    let decode = DecodeService::new(&config, description, Arc::clone(&runtime.status), mailbox.clone());
    let health = runtime.health_routes::<DecodeServer<DecodeService>>();
    let router = grpc::server()
        .add_routes(health)
        .add_service(wire::server::worker(worker))
        .add_service(wire::server::decode(decode));
    grpc::serve(&runtime.tasks, "grpc", listener, router);

    let status = Arc::clone(&runtime.status);
    let load = move || model.load(&sizes.engine, None, &status);
    let Some(loaded) = runtime.blocking("load-model", load).await? else { return Ok(runtime.tasks.join().await?) };
    if let Some(data) = runtime.receive_data(&loaded.engine, &config.transfer)? {
        receiver.set_data(data);
    }
    serve_kv(&runtime.tasks, kv_listener, Arc::clone(&receiver));
    let masks = runtime.start_masks(&loaded.compiler, config.mask_threads)?;
    let state = DecodeState::new(
        scheduler,
        loaded.engine,
        vocab_size,
        masks,
        receiver,
        Arc::clone(&runtime.status),
        runtime.metrics.clone(),
    );
    runtime.run(state, (mailbox, inbox), &config.step_loop).await
}

/// Arrivals go into the step loop's inbox: when it is full the connection waits, and through it the sender.
struct MailboxSink(Mailbox<Message>);

impl ArrivalSink for MailboxSink {
    fn slot(&self) -> BoxFuture<'_, Result<ArrivalSlot, SinkClosed>> {
        async {
            let slot = self.0.slot().await.map_err(|_| SinkClosed)?;
            Ok(Box::new(move |arrival: Arrival| slot(Message::Arrival(arrival))) as ArrivalSlot)
        }
        .boxed()
    }
}

/// How long a handler waits for the step loop's answer: as long as the loop may take without being called stuck.
fn answer_timeout(config: &Config) -> Duration {
    Duration::from_millis(config.step_loop.stuck_after_ms)
}
