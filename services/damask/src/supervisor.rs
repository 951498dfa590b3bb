//! Runs services as child processes: starts them, restarts the dead with backoff, and drains them in order.
//!
//! A child's standard input is its lifeline: when it closes, because the supervisor drains the child or is gone itself, the child drains.

use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Set in the environment of children: end when standard input does.
pub(crate) const SUPERVISED: &str = "DAMASK_SUPERVISED";

/// First wait before a restart; it doubles up to [`BACKOFF_MAX`].
const BACKOFF_MIN: Duration = Duration::from_millis(200);
const BACKOFF_MAX: Duration = Duration::from_secs(10);
/// A child that lived this long is taken for healthy: its next death starts with the shortest wait again.
const HEALTHY_AFTER: Duration = Duration::from_secs(30);

/// One service to run: `damask ROLE --config FILE` with sockets that the supervisor keeps open over restarts.
pub(crate) struct Service {
    /// Subcommand.
    pub(crate) role: &'static str,
    /// What people call it; unique.
    pub(crate) name: String,
    /// Its config file.
    pub(crate) config: PathBuf,
    /// Sockets by the name that the service binds.
    pub(crate) sockets: Vec<(&'static str, TcpListener)>,
    /// Global options, passed on.
    pub(crate) options: Vec<String>,
    /// Set in its environment.
    pub(crate) environment: Vec<(String, String)>,
}

impl Service {
    fn start(&self) -> anyhow::Result<Child> {
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let mut command = std::process::Command::new(program);
        command.args(&self.options).arg(self.role).arg("--config").arg(&self.config);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        // Its own group: Ctrl-C reaches the supervisor alone, which then drains its children in order.
        command.env(SUPERVISED, "1").stdin(Stdio::piped()).process_group(0);
        let sockets: Vec<_> = self.sockets.iter().map(|(name, socket)| (*name, socket)).collect();
        chassis::net::inherited::pass_sockets(&mut command, &sockets)?;
        Command::from(command).kill_on_drop(true).spawn().with_context(|| format!("cannot start {}", self.name))
    }
}

/// A service ended with the exit code of a refused configuration: a restart would not help.
#[derive(Debug)]
pub(crate) struct Refused(String);

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} refused its configuration", self.0)
    }
}

impl std::error::Error for Refused {}

/// Process ids of running children by service; changed at each start and end.
pub(crate) type Pids = Arc<Mutex<std::collections::BTreeMap<String, u32>>>;

/// Services that are kept running, and drain in the order in which they were started.
pub(crate) struct Services {
    grace: Duration,
    pids: Pids,
    has_served: Arc<AtomicBool>,
    /// Of those that have not ended for good.
    stops: Vec<(String, watch::Sender<bool>)>,
    running: JoinSet<(String, anyhow::Result<()>)>,
}

impl Services {
    /// None yet. Each may take `grace` to drain; `pids` follows their processes; `has_served` as in [`supervise`].
    pub(crate) fn new(grace: Duration, pids: Pids, has_served: Arc<AtomicBool>) -> Self {
        Self { grace, pids, has_served, stops: Vec::new(), running: JoinSet::new() }
    }

    /// Starts one more.
    pub(crate) fn start(&mut self, service: Service) {
        let (stop, stopped) = watch::channel(false);
        let (name, pids, has_served) = (service.name.clone(), Arc::clone(&self.pids), Arc::clone(&self.has_served));
        self.stops.push((name.clone(), stop));
        let grace = self.grace;
        self.running.spawn(async move { (name, supervise(service, stopped, grace, pids, has_served).await) });
    }

    /// Waits until one gives up, and says why; restarts are not told. Cancellation safe.
    pub(crate) async fn failure(&mut self) -> anyhow::Error {
        match self.running.join_next().await {
            Some(Ok((name, outcome))) => {
                self.stops.retain(|(other, _)| *other != name);
                outcome.err().unwrap_or_else(|| anyhow::anyhow!("{name} ended by itself"))
            }
            Some(Err(panic)) => panic.into(),
            None => std::future::pending().await,
        }
    }

    /// Drains one after the other.
    ///
    /// # Errors
    /// The first that did not end well; the others are drained all the same.
    pub(crate) async fn drain(&mut self) -> anyhow::Result<()> {
        let mut outcome = Ok(());
        let mut ended = Vec::new();
        for (name, stop) in std::mem::take(&mut self.stops) {
            stop.send_replace(true);
            // Another one may give up meanwhile.
            while !ended.contains(&name)
                && let Some(next) = self.running.join_next().await
            {
                let (next, drained) = next?;
                outcome = outcome.and(drained.with_context(|| format!("{next} failed")));
                ended.push(next);
            }
        }
        outcome
    }
}

/// Keeps one service running until `stop` says otherwise, then drains it and waits at most `grace`. `has_served` tells whether the
/// whole stack was ever ready.
///
/// # Errors
/// When a restart would not help: a child cannot be started at all, refuses its config (exit code 2), or gives up by itself before the stack
/// has ever served, as one does whose model cannot be opened.
async fn supervise(
    service: Service,
    mut stop: watch::Receiver<bool>,
    grace: Duration,
    pids: Pids,
    has_served: Arc<AtomicBool>,
) -> anyhow::Result<()> {
    let mut backoff = BACKOFF_MIN;
    loop {
        let mut child = service.start()?;
        // Taken out of the child: waiting for it would close it.
        let lifeline = child.stdin.take();
        let started = Instant::now();
        set_pid(&pids, &service.name, child.id());
        let ended = tokio::select! {
            status = child.wait() => Some(status?),
            _ = stop.wait_for(|stop| *stop) => None,
        };
        let Some(status) = ended else {
            drop(lifeline);
            let drained = drain(&mut child, &service.name, grace).await;
            set_pid(&pids, &service.name, None);
            return drained;
        };
        set_pid(&pids, &service.name, None);
        if status.code() == Some(crate::EXIT_USAGE) {
            return Err(Refused(service.name).into());
        }
        if status.code().is_some() && !has_served.load(Ordering::Relaxed) {
            anyhow::bail!("{} could not start: {}", service.name, describe(status));
        }
        if started.elapsed() >= HEALTHY_AFTER {
            backoff = BACKOFF_MIN;
        }
        tracing::warn!(
            service = service.name,
            status = describe(status),
            restart_in_ms = backoff.as_millis() as u64,
            "service ended"
        );
        tokio::select! {
            () = tokio::time::sleep(backoff) => backoff = (backoff * 2).min(BACKOFF_MAX),
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
        }
    }
}

/// Waits for a child whose lifeline was cut.
async fn drain(child: &mut Child, name: &str, grace: Duration) -> anyhow::Result<()> {
    match tokio::time::timeout(grace, child.wait()).await {
        Ok(status) => {
            let status = status?;
            anyhow::ensure!(status.success(), "{name} did not end well: {}", describe(status));
            Ok(())
        }
        Err(_) => {
            child.kill().await.with_context(|| format!("cannot kill {name}"))?;
            anyhow::bail!("{name} did not drain in time and was killed")
        }
    }
}

fn set_pid(pids: &Pids, name: &str, pid: Option<u32>) {
    let mut pids = pids.lock().unwrap_or_else(PoisonError::into_inner);
    match pid {
        Some(pid) => pids.insert(name.to_owned(), pid),
        None => pids.remove(name),
    };
}

fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "unknown".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Services without processes: each ends as `outcome` says when it is told to, or at once if it needs not be told.
    fn services(all: [(&'static str, bool, Result<(), &'static str>); 3]) -> (Services, Arc<Mutex<Vec<&'static str>>>) {
        let mut services = Services::new(Duration::ZERO, Pids::default(), Arc::default());
        let order = Arc::new(Mutex::new(Vec::new()));
        for (name, is_told, outcome) in all {
            let (stop, mut stopped) = watch::channel(false);
            services.stops.push((name.to_owned(), stop));
            let order = Arc::clone(&order);
            services.running.spawn(async move {
                if is_told {
                    stopped.wait_for(|stop| *stop).await.unwrap();
                }
                order.lock().unwrap().push(name);
                (name.to_owned(), outcome.map_err(anyhow::Error::msg))
            });
        }
        (services, order)
    }

    #[tokio::test(start_paused = true)]
    async fn services_drain_in_their_order_and_the_first_failure_is_told() {
        let (mut services, order) = services([("a", true, Ok(())), ("b", true, Err("bad")), ("c", true, Err("worse"))]);
        let error = tokio::time::timeout(Duration::from_secs(1), services.drain()).await.unwrap().unwrap_err();
        assert_eq!(format!("{error:#}"), "b failed: bad");
        assert_eq!(*order.lock().unwrap(), ["a", "b", "c"]);
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_gave_up_is_not_waited_for() {
        for is_seen in [true, false] {
            let (mut services, order) =
                services([("a", true, Ok(())), ("b", false, Err("no file")), ("c", true, Ok(()))]);
            tokio::time::sleep(Duration::from_millis(1)).await;
            if is_seen {
                assert_eq!(services.failure().await.to_string(), "no file");
            }
            let drained = tokio::time::timeout(Duration::from_secs(1), services.drain()).await.unwrap();
            assert_eq!(drained.is_ok(), is_seen, "a failure is told once");
            assert_eq!(*order.lock().unwrap(), ["b", "a", "c"]);
        }
    }

    #[tokio::test]
    async fn a_child_that_dies_while_it_drains_is_told() {
        for (script, want) in [("exit 0", None), ("exit 3", Some("exit code 3")), ("kill -SEGV $$", Some("signal 11"))]
        {
            let mut child = Command::new("sh").args(["-c", script]).spawn().unwrap();
            let drained = drain(&mut child, "decode", Duration::from_secs(20)).await;
            let said = drained.err().map(|error| error.to_string());
            assert_eq!(said, want.map(|end| format!("decode did not end well: {end}")));
        }
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let error = drain(&mut child, "decode", Duration::from_millis(50)).await.unwrap_err();
        assert_eq!(error.to_string(), "decode did not drain in time and was killed");
    }
}
