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

/// Keeps one service running until `stop` says otherwise, then drains it and waits at most `grace`. `has_served` tells whether the
/// whole stack was ever ready.
///
/// # Errors
/// When a restart would not help: a child cannot be started at all, refuses its config (exit code 2), or gives up by itself before the stack
/// has ever served, as one does whose model cannot be opened.
pub(crate) async fn supervise(
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
            tracing::warn!(service = name, "killed: it did not drain in time");
            child.kill().await.with_context(|| format!("cannot kill {name}"))
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
