//! What a worker's `run` does around its own business: sockets, probes, loading, the drain, the end.

use std::sync::Arc;

use chassis::admin::Admin;
use chassis::net::{Address, Listener, Network, http};
use chassis::tasks::Tasks;
use chassis::{Metrics, Shutdown};
use constraint::Compiler;
use device::DriverWork;
use engine::group::EngineGroup;
use tokio::sync::oneshot;
use tonic::server::NamedService;
use tonic::service::Routes;
use transfer::TransferConfig;
use transfer::data::{ReceiveData, SendData};
use transfer::device::{DeviceReceive, DeviceSend};
use types::{Incarnation, PeerId, WorkerId, WorkerState};

use crate::config::StepLoopConfig;
use crate::data_path;
use crate::error::WorkerError;
use crate::masks::MaskThreads;
use crate::metrics::WorkerMetrics;
use crate::status::Status;
use crate::step_loop::{Driver, Inbox, Mailbox, StepLoop, Turn};

/// The name under which gRPC's health service tells whether the worker makes progress, for liveness probes.
pub const LIVE: &str = "live";

/// The frame of one running worker.
pub struct Runtime {
    /// Its sockets.
    pub network: Arc<dyn Network>,
    /// Its tasks, and the orders to end.
    pub tasks: Tasks,
    /// What it says of itself.
    pub status: Arc<Status>,
    /// What it counts.
    pub metrics: WorkerMetrics,
    /// Name and life.
    pub peer: PeerId,
    registry: Metrics,
    driver: Driver,
}

impl Runtime {
    /// Nothing runs yet.
    #[must_use]
    pub fn new(name: &str, driver: Driver, network: Arc<dyn Network>, shutdown: Shutdown) -> Self {
        let (registry, status) = (Metrics::new(), Arc::new(Status::default()));
        let incarnation = match driver {
            Driver::Thread => uuid::Uuid::new_v4().as_u64_pair().0,
            Driver::Simulated { incarnation, .. } => incarnation,
        };
        let peer = PeerId { worker: WorkerId(name.into()), incarnation: Incarnation(incarnation) };
        let metrics = WorkerMetrics::new(&registry, &status);
        Self { network, tasks: Tasks::new(shutdown), status, metrics, peer, registry, driver }
    }

    /// The orders to end.
    #[must_use]
    pub fn shutdown(&self) -> &Shutdown {
        self.tasks.shutdown()
    }

    /// Listens.
    ///
    /// # Errors
    /// `Listen`.
    pub async fn bind(&self, purpose: &'static str, address: &Address) -> Result<Listener, WorkerError> {
        let listener = self.network.bind(purpose, address).await;
        listener.map_err(|cause| WorkerError::Listen { address: address.clone(), purpose, cause })
    }

    /// Serves probes and metrics.
    pub fn serve_admin(&self, listener: Listener) {
        let (live, ready) = (Arc::clone(&self.status), Arc::clone(&self.status));
        let admin = Admin {
            live: Arc::new(move || live.live()),
            ready: Arc::new(move || ready.ready()),
            metrics: self.registry.clone(),
        };
        http::serve_admin(&self.tasks, listener, admin);
    }

    /// gRPC's health service and reflection. Health follows the worker's state: `S` and `""` serve while requests are served, [`LIVE`] as long
    /// as a restart would be no remedy.
    pub fn health_routes<S: NamedService>(&self) -> Routes {
        let (reporter, routes) = wire::server::health_and_reflection::<S>();
        let mut changes = self.status.changes();
        self.tasks.spawn_background("health", async move {
            loop {
                let state = *changes.borrow_and_update();
                wire::server::set_serving::<S>(&reporter, state == WorkerState::Ready).await;
                wire::server::set_named_serving(&reporter, LIVE, state != WorkerState::Stuck).await;
                if changes.changed().await.is_err() {
                    break;
                }
            }
        });
        routes
    }

    /// Runs `work`, which blocks, on a thread of its own; in a simulation, where no time passes meanwhile, right here. `None` when the order
    /// to drain came first: the thread is then left to itself, inside the driver perhaps, for the process is about to end (by [`device::leave`]).
    pub async fn blocking<T: Send + 'static>(
        &self,
        name: &'static str,
        work: impl FnOnce() -> Result<T, WorkerError> + Send + 'static,
    ) -> Result<Option<T>, WorkerError> {
        if self.driver != Driver::Thread {
            return work().map(Some);
        }
        let (outcome, done) = oneshot::channel();
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || drop(outcome.send(work())));
        let thread = thread.map_err(|error| WorkerError::Config(format!("cannot start thread {name}: {error}")))?;
        let waited_for = DriverWork::begin();
        let outcome = tokio::select! {
            outcome = done => outcome,
            () = self.shutdown().drain().cancelled() => return Ok(None),
        };
        let _ = thread.join(); // at its end, which the outcome came from
        waited_for.joined();
        outcome.unwrap_or(Err(WorkerError::Panicked(name))).map(Some)
    }

    /// What moves KV out of the caches of `engine`; `None` where it goes through host memory.
    ///
    /// # Errors
    /// `Config` for a transport that these caches do not have, `DataPath` if a device refuses.
    pub fn send_data(
        &self,
        engine: &EngineGroup,
        config: &TransferConfig,
    ) -> Result<Option<Arc<dyn SendData>>, WorkerError> {
        let Some(ports) = data_path::ports(engine, config)? else { return Ok(None) };
        let counters = data_path::counters(&self.registry);
        Ok(Some(Arc::new(DeviceSend::new(ports, engine.kv_layout(), config, &counters)?)))
    }

    /// What moves KV into the caches of `engine`; `None` where it goes through host memory.
    ///
    /// # Errors
    /// As [`Self::send_data`].
    pub fn receive_data(
        &self,
        engine: &EngineGroup,
        config: &TransferConfig,
    ) -> Result<Option<Arc<dyn ReceiveData>>, WorkerError> {
        let Some(ports) = data_path::ports(engine, config)? else { return Ok(None) };
        let counters = data_path::counters(&self.registry);
        Ok(Some(Arc::new(DeviceReceive::new(ports, engine.kv_layout(), config, &counters)?)))
    }

    /// Starts the threads that compute masks.
    ///
    /// # Errors
    /// The operating system refuses a thread.
    pub fn start_masks(&self, compiler: &Arc<Compiler>, threads: u32) -> Result<MaskThreads, WorkerError> {
        let started = MaskThreads::start(compiler, threads, &self.metrics.mask_seconds);
        started.map_err(|error| WorkerError::Config(format!("cannot start a thread for masks: {error}")))
    }

    /// Runs the step loop of `role` and serves until told to end: wakes the loop for the drain, stops everything if it fails, and ends it
    /// last, when no task can have anything to say to it.
    ///
    /// # Errors
    /// What ended the worker, if it was not told to end.
    pub async fn run<T: Turn>(
        self,
        role: T,
        (mailbox, inbox): (Mailbox<T::Message>, Inbox<T::Message>),
        config: &StepLoopConfig,
    ) -> Result<(), WorkerError> {
        let status = Arc::clone(&self.status);
        let step_loop = StepLoop::start(role, (mailbox.clone(), inbox), self.driver, config, status, &self.tasks);
        self.status.monitor(&self.tasks, std::time::Duration::from_millis(config.stuck_after_ms));
        let (status, shutdown) = (Arc::clone(&self.status), self.shutdown().clone());
        self.tasks.spawn_background("drain", async move {
            shutdown.drain().cancelled().await;
            status.begin_drain();
            mailbox.wake();
        });
        let (ended, shutdown) = (step_loop.ended(), self.shutdown().clone());
        self.tasks.spawn_background("step-loop-watch", async move {
            if let Err(error) = ended.await {
                tracing::error!(%error, "step loop failed, stopping");
                shutdown.begin_stop();
            }
        });
        self.status.loaded();
        tracing::info!(worker = %self.peer, "ready");
        let joined = self.tasks.join().await;
        step_loop.stop().await?;
        Ok(joined?)
    }
}

#[cfg(test)]
mod tests {
    use chassis::net::TcpNetwork;
    use chassis::net::inherited::Inherited;

    use super::*;

    /// The only test of this process that gives work up: that it was is known for good.
    #[tokio::test]
    async fn work_that_is_left_to_itself_is_known_to_the_end_of_the_process() {
        let (network, shutdown) = (TcpNetwork::new(Inherited::default()), Shutdown::new());
        let runtime = Runtime::new("worker", Driver::Thread, Arc::new(network), shutdown.clone());
        assert!(matches!(runtime.blocking("quick", || Ok(1)).await, Ok(Some(1))));
        let panicked = runtime.blocking("broken", || -> Result<(), _> { panic!("made to") }).await;
        assert!(matches!(panicked, Err(WorkerError::Panicked("broken"))));
        assert!(!device::was_work_given_up(), "both were waited for");
        let (release, released) = std::sync::mpsc::channel::<()>();
        let load = runtime.blocking("load-model", move || {
            let _ = released.recv(); // an error when the other end is dropped, below
            Ok(())
        });
        shutdown.begin_drain();
        assert!(matches!(load.await, Ok(None)));
        assert!(device::was_work_given_up());
        drop(release);
    }
}
