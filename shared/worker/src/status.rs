//! What a worker says of itself: written by the loader and the step loop, read by watchers, probes and metrics.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chassis::tasks::Tasks;
use kv::PoolCounts;
use tokio::sync::watch;
use tokio::time::Instant;
use types::{DpGroup, Load, PageGroup, PagePoolLoad, WorkerState};

/// What the step loop reports after each turn.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// For routers.
    pub load: Load,
    /// A step could be computed now: if none finishes for long, the worker is stuck.
    pub step_due: bool,
    /// Nothing is reserved, queued, computed, sent or in quarantine.
    pub idle: bool,
}

/// A pool's counts as a load report shows them.
#[must_use]
pub fn pool_load(dp_group: DpGroup, group: PageGroup, counts: PoolCounts) -> PagePoolLoad {
    let PoolCounts { total, free, reserved, landing, live, cached, quarantined } = counts;
    PagePoolLoad { dp_group, group, total, free, reserved, landing, live, cached, quarantined }
}

/// How far the weights have been read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoadingProgress {
    /// Of `total`, over all ranks.
    pub done: u64,
    /// 0 until it is known.
    pub total: u64,
}

/// The board. Health here is forward progress: it is derived from turns and steps that finish, not from a task that answers.
#[derive(Debug)]
pub struct Status {
    report: Mutex<LoadReport>,
    loading: Mutex<LoadingProgress>,
    is_loaded: AtomicBool,
    is_draining: AtomicBool,
    is_stuck: AtomicBool,
    in_turn: AtomicBool,
    turns: AtomicU64,
    state: watch::Sender<WorkerState>,
}

impl Default for Status {
    fn default() -> Self {
        Self {
            report: Mutex::default(),
            loading: Mutex::default(),
            is_loaded: AtomicBool::new(false),
            is_draining: AtomicBool::new(false),
            is_stuck: AtomicBool::new(false),
            in_turn: AtomicBool::new(false),
            turns: AtomicU64::new(0),
            state: watch::Sender::new(WorkerState::Loading),
        }
    }
}

impl Status {
    /// The worker's state now.
    #[must_use]
    pub fn state(&self) -> WorkerState {
        *self.state.borrow()
    }

    /// Told of every change of state.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<WorkerState> {
        self.state.subscribe()
    }

    /// The last report of the step loop.
    #[must_use]
    pub fn report(&self) -> LoadReport {
        self.lock_report().clone()
    }

    /// Called by the step loop after each turn.
    pub fn set_report(&self, report: LoadReport) {
        *self.lock_report() = report;
    }

    /// How far loading has come.
    #[must_use]
    pub fn loading(&self) -> LoadingProgress {
        *self.loading.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Called by the loader.
    pub fn set_loading(&self, progress: LoadingProgress) {
        *self.loading.lock().unwrap_or_else(PoisonError::into_inner) = progress;
    }

    /// The engine is built.
    pub fn loaded(&self) {
        self.is_loaded.store(true, Ordering::Relaxed);
        self.refresh();
    }

    /// No new work is taken from now on. Idempotent.
    pub fn begin_drain(&self) {
        self.is_draining.store(true, Ordering::Relaxed);
        self.refresh();
    }

    /// Whether new work is refused.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Relaxed)
    }

    /// The probe of the admin port: while this fails, a restart is the remedy.
    ///
    /// # Errors
    /// The reason, for operators.
    pub fn live(&self) -> Result<(), String> {
        match self.state() {
            WorkerState::Stuck => Err("steps are due but none has finished for too long".into()),
            _ => Ok(()),
        }
    }

    /// The probe of the admin port: whether requests are served now.
    ///
    /// # Errors
    /// The reason, for operators.
    pub fn ready(&self) -> Result<(), String> {
        match self.state() {
            WorkerState::Ready => Ok(()),
            WorkerState::Loading => {
                let LoadingProgress { done, total } = self.loading();
                Err(format!("loading weights: {done} of {total}"))
            }
            WorkerState::Draining => Err("draining".into()),
            WorkerState::Stuck => Err("stuck".into()),
        }
    }

    pub(crate) fn turn_begins(&self) {
        self.in_turn.store(true, Ordering::Relaxed);
    }

    pub(crate) fn turn_ends(&self) {
        self.turns.fetch_add(1, Ordering::Relaxed);
        self.in_turn.store(false, Ordering::Relaxed);
    }

    /// Watches for progress as long as the service runs.
    pub fn monitor(self: &Arc<Self>, tasks: &Tasks, stuck_after: Duration) {
        let status = Arc::clone(self);
        tasks.spawn_background("progress-monitor", async move {
            let mut last = (status.progress(), Instant::now());
            loop {
                tokio::time::sleep(stuck_after / 8).await;
                let progress = status.progress();
                if progress != last.0 || !status.is_progress_due() {
                    last = (progress, Instant::now());
                }
                let is_stuck = last.1.elapsed() >= stuck_after;
                if status.is_stuck.swap(is_stuck, Ordering::Relaxed) != is_stuck {
                    tracing::warn!(stuck = is_stuck, steps = progress.0, turns = progress.1, "forward progress");
                    status.refresh();
                }
            }
        });
    }

    /// Steps finished, and turns finished if it is a turn that is waited for.
    fn progress(&self) -> (u64, u64) {
        let step_due = self.lock_report().step_due;
        let turns = if step_due { 0 } else { self.turns.load(Ordering::Relaxed) };
        (self.lock_report().load.steps, turns)
    }

    fn is_progress_due(&self) -> bool {
        self.in_turn.load(Ordering::Relaxed) || self.lock_report().step_due
    }

    fn lock_report(&self) -> MutexGuard<'_, LoadReport> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refresh(&self) {
        let state = if !self.is_loaded.load(Ordering::Relaxed) {
            WorkerState::Loading
        } else if self.is_stuck.load(Ordering::Relaxed) {
            WorkerState::Stuck
        } else if self.is_draining() {
            WorkerState::Draining
        } else {
            WorkerState::Ready
        };
        self.state.send_if_modified(|current| std::mem::replace(current, state) != state);
    }
}

#[cfg(test)]
mod tests {
    use chassis::Shutdown;

    use super::*;

    const STUCK_AFTER: Duration = Duration::from_secs(10);

    fn report(steps: u64, step_due: bool) -> LoadReport {
        LoadReport { load: Load { steps, ..Load::default() }, step_due, idle: false }
    }

    fn monitored() -> Arc<Status> {
        let status = Arc::new(Status::default());
        status.monitor(&Tasks::new(Shutdown::new()), STUCK_AFTER);
        status.loaded();
        status
    }

    #[test]
    fn state_follows_loading_and_drain() {
        let status = Status::default();
        status.set_loading(LoadingProgress { done: 3, total: 8 });
        assert_eq!(status.ready(), Err("loading weights: 3 of 8".into()));
        status.loaded();
        assert_eq!((status.state(), status.ready()), (WorkerState::Ready, Ok(())));
        status.begin_drain();
        assert_eq!(status.state(), WorkerState::Draining);
        assert_eq!(status.live(), Ok(()), "a restart is no remedy for a drain");
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_at_rest_is_not_stuck() {
        let status = monitored();
        status.set_report(report(5, false));
        tokio::time::sleep(10 * STUCK_AFTER).await;
        assert_eq!(status.state(), WorkerState::Ready);
    }

    #[tokio::test(start_paused = true)]
    async fn due_steps_that_do_not_finish_are_stuck_until_one_does() {
        let status = monitored();
        for steps in 0..20 {
            status.set_report(report(steps, true));
            tokio::time::sleep(STUCK_AFTER / 2).await;
            assert_eq!(status.state(), WorkerState::Ready, "slow is not stuck");
        }
        tokio::time::sleep(STUCK_AFTER).await;
        assert_eq!(status.state(), WorkerState::Stuck);
        assert!(status.live().is_err());
        status.set_report(report(20, true));
        tokio::time::sleep(STUCK_AFTER / 4).await;
        assert_eq!(status.state(), WorkerState::Ready);
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_that_never_ends_is_stuck() {
        let status = monitored();
        status.turn_begins();
        tokio::time::sleep(2 * STUCK_AFTER).await;
        assert_eq!(status.state(), WorkerState::Stuck);
    }
}
