//! `damask.v1.Worker`: the heartbeat that routers watch, and drain.

use std::sync::Arc;
use std::time::Duration;

use chassis::tasks::Tasks;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status as GrpcStatus};
use types::{WorkerDescription, WorkerReport};
use wire::pb;

use crate::status::Status;

/// Serves [`wire::pb::worker_server::Worker`] for a worker of either role.
pub struct WorkerService {
    description: Arc<WorkerDescription>,
    status: Arc<Status>,
    tasks: Tasks,
    on_drain: Box<dyn Fn() + Send + Sync>,
}

impl WorkerService {
    /// `on_drain` tells the step loop that a router ordered a drain.
    pub fn new(
        description: Arc<WorkerDescription>,
        status: Arc<Status>,
        tasks: Tasks,
        on_drain: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        Self { description, status, tasks, on_drain: Box::new(on_drain) }
    }
}

fn report(description: &WorkerDescription, status: &Status) -> pb::WorkerReport {
    let report = WorkerReport { description: description.clone(), state: status.state(), load: status.report().load };
    report.into()
}

#[tonic::async_trait]
impl pb::worker_server::Worker for WorkerService {
    type WatchStream = ReceiverStream<Result<pb::WorkerReport, GrpcStatus>>;

    /// Reports until the watcher leaves, or the service is told to end and has no work left: the end of the stream means that the
    /// worker is gone.
    async fn watch(&self, request: Request<pb::WatchRequest>) -> Result<Response<Self::WatchStream>, GrpcStatus> {
        let interval = Duration::from_millis(u64::from(request.into_inner().interval_ms.clamp(50, 10_000)));
        // One report waits at most; a watcher that does not read gets fresh ones when it does.
        let (reports, stream) = mpsc::channel(1);
        let (description, status) = (Arc::clone(&self.description), Arc::clone(&self.status));
        let drain = self.tasks.shutdown().drain().clone();
        self.tasks.spawn("watch", async move {
            let mut changes = status.changes();
            loop {
                changes.mark_unchanged();
                let Ok(slot) = reports.reserve().await else { break };
                slot.send(Ok(report(&description, &status)));
                if drain.is_cancelled() && status.report().idle {
                    break;
                }
                // While it drains, the end is looked for more often than the watcher asked.
                let interval = if drain.is_cancelled() { interval.min(Duration::from_millis(100)) } else { interval };
                tokio::select! {
                    () = tokio::time::sleep(interval) => {}
                    changed = changes.changed() => if changed.is_err() { break },
                    () = reports.closed() => break,
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn drain(&self, _: Request<pb::DrainRequest>) -> Result<Response<pb::DrainResponse>, GrpcStatus> {
        self.status.begin_drain();
        (self.on_drain)();
        let load = self.status.report().load;
        Ok(Response::new(pb::DrainResponse { remaining: load.waiting + load.running }))
    }
}
