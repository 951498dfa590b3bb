//! How a service is told to end: first to take in nothing new, later to drop what is left.

use std::future::Future;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// Two orders in sequence: *drain* (admit nothing new, finish what runs) and *stop* (cancel the rest). Clones share their state.
#[derive(Debug, Clone, Default)]
pub struct Shutdown {
    drain: CancellationToken,
    stop: CancellationToken,
}

impl Shutdown {
    /// Neither order given.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Orders to drain. Idempotent.
    pub fn begin_drain(&self) {
        self.drain.cancel();
    }

    /// Orders to stop, and so to drain. Idempotent.
    pub fn begin_stop(&self) {
        self.drain.cancel();
        self.stop.cancel();
    }

    /// Cancelled when draining begins.
    #[must_use]
    pub fn drain(&self) -> &CancellationToken {
        &self.drain
    }

    /// Cancelled when what is left must be dropped.
    #[must_use]
    pub fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    /// Whether new work is to be refused.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.drain.is_cancelled()
    }
}

/// Runs `service` until it ends, turning the process's signals into orders: the first SIGTERM or Ctrl-C drains, and `grace` later, or at
/// the second signal, the rest is stopped.
///
/// # Errors
/// When signal handlers cannot be installed.
pub async fn run_with_signals<T>(
    shutdown: Shutdown,
    grace: Duration,
    service: impl Future<Output = T>,
) -> std::io::Result<T> {
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let mut interrupt = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?;
    let mut next_signal =
        async || tokio::select! { _ = terminate.recv() => "SIGTERM", _ = interrupt.recv() => "SIGINT" };
    let orders = async {
        let signal = next_signal().await;
        tracing::info!(signal, grace_s = grace.as_secs_f64(), "draining");
        shutdown.begin_drain();
        match tokio::time::timeout(grace, next_signal()).await {
            Ok(signal) => tracing::warn!(signal, "stopping at the second signal"),
            Err(_) => tracing::warn!("stopping: the grace period is over"),
        }
        shutdown.begin_stop();
        std::future::pending::<()>().await;
    };
    tokio::select! {
        output = service => Ok(output),
        () = orders => unreachable!("orders never end"),
    }
}
