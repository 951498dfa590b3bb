//! `damask node` with real workers: a killed one comes back alone, SIGTERM drains in order, a refused configuration ends all.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

const BINARY: &str = env!("CARGO_BIN_EXE_damask-under-test");
/// Generous: the machine may be compiling beside it.
const WITHIN: Duration = Duration::from_secs(60);

struct Node {
    child: Child,
    admins: [u16; 2],
    _folder: tempfile::TempDir,
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_port() -> anyhow::Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// A prefill and a decode worker; `more` is added to decode's file.
fn start(more: &str) -> anyhow::Result<Node> {
    let folder = tempfile::tempdir()?;
    let admins = [free_port()?, free_port()?];
    let write = |name: &str, text: String| -> anyhow::Result<PathBuf> {
        let path = folder.path().join(name);
        std::fs::write(&path, text)?;
        Ok(path)
    };
    let file =
        |admin: u16| format!("listen: 127.0.0.1:0\nadmin_listen: 127.0.0.1:{admin}\nlayout: {{ tp: 1, ep: 1 }}\n");
    let prefill = write("prefill.yaml", file(admins[0]))?;
    let decode = write("decode.yaml", format!("{}{more}", file(admins[1])))?;
    let node = write(
        "node.yaml",
        format!(
            "name: n7\nworkers:\n  - {{ role: prefill, name: prefill, config: {} }}\n  - {{ role: decode, name: decode, config: {} }}\n",
            prefill.display(),
            decode.display()
        ),
    )?;
    let child = Command::new(BINARY)
        .args(["--log-level", "warn", "node", "--config"])
        .arg(node)
        .stdin(Stdio::null())
        .spawn()
        .context("cannot start the node")?;
    Ok(Node { child, admins, _folder: folder })
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> anyhow::Result<T> {
    let deadline = Instant::now() + WITHIN;
    while Instant::now() < deadline {
        if let Some(found) = look() {
            return Ok(found);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    bail!("{what}: not within {} s", WITHIN.as_secs())
}

impl Node {
    /// Process ids of prefill and decode; a worker between two lives has none.
    fn workers(&self) -> [Option<u32>; 2] {
        let pid = self.child.id();
        let children =
            std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten().flat_map(|task| {
                let list = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
                list.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()).collect::<Vec<_>>()
            });
        let children: Vec<u32> = children.collect();
        ["prefill", "decode"].map(|role| children.iter().copied().find(|pid| is_role(*pid, role)))
    }

    fn is_ready(&self) -> bool {
        let admins: Vec<String> = self.admins.iter().map(|port| format!("--admin=127.0.0.1:{port}")).collect();
        let health =
            Command::new(BINARY).arg("health").args(admins).stdout(Stdio::null()).stderr(Stdio::null()).status();
        health.is_ok_and(|status| status.success())
    }

    fn wait(&mut self) -> anyhow::Result<ExitStatus> {
        until("the node's end", || self.child.try_wait().transpose())?.context("cannot wait for the node")
    }
}

fn is_role(pid: u32, role: &str) -> bool {
    // A process that has ended and was not waited for yet has no command line.
    let words = std::fs::read(Path::new("/proc").join(pid.to_string()).join("cmdline")).unwrap_or_default();
    words.split(|byte| *byte == 0).any(|word| word == role.as_bytes())
}

fn signal(name: &str, pid: u32) -> anyhow::Result<()> {
    let status = Command::new("kill").args([name, &pid.to_string()]).status()?;
    ensure!(status.success(), "kill {name} {pid}: {status}");
    Ok(())
}

#[test]
fn a_killed_worker_comes_back_and_the_others_stay() -> anyhow::Result<()> {
    let mut node = start("")?;
    until("both are ready", || node.is_ready().then_some(()))?;
    let [Some(prefill), Some(decode)] = node.workers() else { bail!("two workers run") };
    signal("-KILL", decode)?;
    let another = until("another decode", || node.workers()[1].filter(|pid| *pid != decode))?;
    until("both are ready again", || node.is_ready().then_some(()))?;
    assert_eq!(node.workers(), [Some(prefill), Some(another)]);

    signal("-TERM", node.child.id())?;
    until("decode ends", || {
        let [prefill, decode] = node.workers();
        assert!(decode.is_some() || prefill.is_none(), "decode ended before prefill, which sends to it");
        decode.is_none().then_some(())
    })?;
    let status = node.wait()?;
    assert!(status.success(), "{status}");
    Ok(())
}

#[test]
fn a_refused_configuration_ends_the_node() -> anyhow::Result<()> {
    let mut node = start("no_such_field: 1\n")?;
    let status = node.wait()?;
    assert_eq!(status.code(), Some(2), "{status}");
    Ok(())
}
