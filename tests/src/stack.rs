//! The real stack as child processes of a test.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde::Deserialize;

/// How long a stack may take from start to ready. Generous: the machine may be compiling beside it.
const READY_WITHIN: Duration = Duration::from_secs(60);
/// How long a stack may take to drain and exit.
const EXIT_WITHIN: Duration = Duration::from_secs(30);

/// Where the services of a running stack listen, as `damask up --ready-file` writes it.
#[derive(Debug, Clone, Deserialize)]
pub struct Addresses {
    /// OpenAI API, `host:port`.
    pub http: String,
    /// gRPC `damask.v1.Inference` of the router, `host:port`.
    pub router: String,
    /// Admin servers by service name, `host:port`.
    pub admin: std::collections::BTreeMap<String, String>,
    /// Process ids by service name.
    pub pids: std::collections::BTreeMap<String, u32>,
}

/// One `damask up` with free ports. Dropping it kills it; [`Stack::stop`] drains it.
pub struct Stack {
    child: Child,
    ready_file: PathBuf,
    /// Where it listens.
    pub addresses: Addresses,
    _folder: tempfile::TempDir,
}

impl Stack {
    /// Starts `damask up` with `args` and waits until it can serve. `binary` is `env!("CARGO_BIN_EXE_damask-under-test")`.
    ///
    /// # Errors
    /// When it exits early or is not ready within a minute.
    pub fn start(binary: &str, args: &[&str]) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let ready_file = folder.path().join("ready.json");
        let mut child = Command::new(binary)
            .args(["--log-level", "warn", "up", "--listen", "127.0.0.1:0", "--ready-file"])
            .arg(&ready_file)
            .args(args)
            .env("DAMASK_SUPERVISED", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {binary}"))?;
        let addresses = wait_ready(&mut child, &ready_file).inspect_err(|_| {
            let _ = child.kill();
        })?;
        Ok(Self { child, ready_file, addresses, _folder: folder })
    }

    /// Base URL of the OpenAI API.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.addresses.http)
    }

    /// Reads the ready file again: after a restart of a child its process id is another.
    ///
    /// # Errors
    /// When the file is gone or not what `up` writes.
    pub fn refresh(&mut self) -> anyhow::Result<()> {
        self.addresses = serde_json::from_slice(&std::fs::read(&self.ready_file)?)?;
        Ok(())
    }

    /// Asks the stack to drain, as Ctrl-C does, and waits for its exit.
    ///
    /// # Errors
    /// When it does not exit in time, or not with success.
    pub fn stop(mut self) -> anyhow::Result<()> {
        drop(self.child.stdin.take());
        let deadline = Instant::now() + EXIT_WITHIN;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait()? {
                ensure!(status.success(), "the stack ended with {status}");
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        bail!("the stack did not drain within {} s", EXIT_WITHIN.as_secs())
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn wait_ready(child: &mut Child, ready_file: &Path) -> anyhow::Result<Addresses> {
    let deadline = Instant::now() + READY_WITHIN;
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait()? {
            bail!("the stack ended with {status} before it was ready");
        }
        if let Ok(bytes) = std::fs::read(ready_file) {
            return serde_json::from_slice(&bytes).context("the ready file is not what was expected");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    bail!("the stack was not ready within {} s", READY_WITHIN.as_secs())
}
