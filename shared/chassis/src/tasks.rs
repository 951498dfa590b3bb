//! The only place that starts tokio tasks: each has a name, is joined at the end, and its panic is never lost.

use std::fmt::Display;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, OnceLock};

use futures_util::FutureExt;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::shutdown::Shutdown;

/// Why a service had to end: a task that it cannot do without has failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("task {task} failed: {reason}")]
pub struct TaskFailure {
    /// The task's name.
    pub task: &'static str,
    /// Its error, or the panic's message.
    pub reason: String,
}

/// All tasks of one service. Clones share their state.
///
/// *Work* is what a drain waits for; *background* serves the work and ends after it. When the order to stop comes, both are dropped at
/// their next await.
#[derive(Clone)]
pub struct Tasks {
    inner: Arc<Inner>,
}

struct Inner {
    shutdown: Shutdown,
    work: TaskTracker,
    background: TaskTracker,
    /// Cancelled once no work is left.
    work_done: CancellationToken,
    failure: OnceLock<TaskFailure>,
}

impl Tasks {
    /// No tasks yet; they hear the orders of `shutdown`.
    #[must_use]
    pub fn new(shutdown: Shutdown) -> Self {
        let inner = Inner {
            shutdown,
            work: TaskTracker::new(),
            background: TaskTracker::new(),
            work_done: CancellationToken::new(),
            failure: OnceLock::new(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// The orders that these tasks hear.
    #[must_use]
    pub fn shutdown(&self) -> &Shutdown {
        &self.inner.shutdown
    }

    /// Starts a piece of work. Its panic is logged and ends this task alone. The handle yields `None` if it panicked or was stopped.
    pub fn spawn<F>(&self, name: &'static str, future: F) -> JoinHandle<Option<F::Output>>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        let stop = self.inner.shutdown.stop().clone();
        self.inner.work.spawn(async move { guarded(name, &stop, future).await.ok().flatten() })
    }

    /// Starts work that the service cannot do without, such as a server: its error or panic drains the service and is what
    /// [`Self::join`] reports.
    pub fn spawn_critical<F, E>(&self, name: &'static str, future: F)
    where
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Display + Send,
    {
        let tasks = self.clone();
        self.inner.work.spawn(async move {
            match guarded(name, tasks.inner.shutdown.stop(), future).await {
                Ok(Some(Ok(())) | None) => {}
                Ok(Some(Err(error))) => tasks.fail(TaskFailure { task: name, reason: error.to_string() }),
                Err(failure) => tasks.fail(failure),
            }
        });
    }

    /// Starts an endless task that is dropped once all work is done. Its panic drains the service, like that of critical work.
    pub fn spawn_background<F>(&self, name: &'static str, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let tasks = self.clone();
        self.inner.background.spawn(async move {
            if let Err(failure) = guarded(name, &tasks.inner.work_done, future).await {
                tasks.fail(failure);
            }
        });
    }

    fn fail(&self, failure: TaskFailure) {
        tracing::error!(task = failure.task, reason = failure.reason, "task failed, draining");
        self.inner.failure.set(failure).ok();
        self.inner.shutdown.begin_drain();
    }

    /// Waits for the order to drain, then until all work has ended or is stopped, then ends the background.
    ///
    /// # Errors
    /// The first failure of critical work or background.
    pub async fn join(self) -> Result<(), TaskFailure> {
        let inner = &self.inner;
        inner.shutdown.drain().cancelled().await;
        inner.work.close();
        inner.work.wait().await;
        inner.work_done.cancel();
        inner.background.close();
        inner.background.wait().await;
        inner.failure.get().cloned().map_or(Ok(()), Err)
    }
}

/// Runs `future` until it ends or `stop` is cancelled (`None`); a panic becomes a failure and is logged.
async fn guarded<F: Future>(
    name: &'static str,
    stop: &CancellationToken,
    future: F,
) -> Result<Option<F::Output>, TaskFailure> {
    let caught = AssertUnwindSafe(stop.run_until_cancelled(future)).catch_unwind().await;
    caught.map_err(|panic| {
        let reason = panic
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "panic without a message".into());
        tracing::error!(task = name, reason, "task panicked");
        TaskFailure { task: name, reason: format!("panicked: {reason}") }
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::{Instant, sleep};

    use super::*;

    fn tasks() -> (Shutdown, Tasks) {
        let shutdown = Shutdown::new();
        (shutdown.clone(), Tasks::new(shutdown))
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_waits_for_work_and_then_ends_the_background() {
        let (shutdown, tasks) = tasks();
        let start = Instant::now();
        let work = tasks.spawn("work", async {
            sleep(Duration::from_secs(5)).await;
            7
        });
        tasks.spawn_background("background", std::future::pending());
        shutdown.begin_drain();
        tasks.join().await.unwrap();
        assert_eq!(start.elapsed(), Duration::from_secs(5));
        assert_eq!(work.await.unwrap(), Some(7));
    }

    #[tokio::test(start_paused = true)]
    async fn a_stop_drops_work() {
        let (shutdown, tasks) = tasks();
        let work = tasks.spawn("work", std::future::pending::<()>());
        shutdown.begin_stop();
        tasks.join().await.unwrap();
        assert_eq!(work.await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_panic_ends_its_task_alone() {
        let (shutdown, tasks) = tasks();
        let work = tasks.spawn("work", async { panic!("at the disco") });
        assert_eq!(work.await.unwrap(), None);
        assert!(!shutdown.is_draining());
        shutdown.begin_drain();
        tasks.join().await.unwrap();
    }

    #[tokio::test]
    async fn a_critical_failure_drains_and_is_reported() {
        let (_, tasks) = tasks();
        tasks.spawn_critical("server", async { Err("port taken") });
        let failure = tasks.join().await.unwrap_err();
        assert_eq!(failure.to_string(), "task server failed: port taken");
    }

    #[tokio::test]
    async fn a_background_panic_drains_and_is_reported() {
        let (_, tasks) = tasks();
        tasks.spawn_background("watch", async { panic!("lost {}", 3) });
        let failure = tasks.join().await.unwrap_err();
        assert_eq!(failure, TaskFailure { task: "watch", reason: "panicked: lost 3".into() });
    }
}
