//! `damask node`: several workers in one container, for Kubernetes' device plugin, which gives a GPU to one container only, while workers
//! that exchange KV over NVLink must each see all GPUs of the node.
//!
//! Each worker is a process of its own, restarted with growing waits when it dies while the others go on.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use serde::Deserialize;
use types::Role;

use crate::fleet::visible_devices;
use crate::stack::KILL_AFTER_GRACE;
use crate::supervisor::{Pids, Service, Services};
use crate::up::told_to_end;

/// Run the workers of one node as child processes.
#[derive(Debug, Args)]
pub(crate) struct NodeArgs {
    /// YAML file: workers: [{role: prefill, name: prefill, devices: [0, 1], config: /etc/damask/prefill.yaml}, ...], in the order in which they
    /// drain: prefill first, since it sends to decode.
    #[arg(long)]
    config: PathBuf,
}

/// The file of `--config`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeFile {
    /// What the workers' names in the fleet begin with [default: `$POD_NAME`, or else the host's name].
    #[serde(default)]
    name: Option<String>,
    workers: Vec<Worker>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Worker {
    role: Role,
    /// Unique on the node; with the node's name before it, in the fleet.
    name: String,
    /// GPUs, as the container counts them; empty on the CPU.
    #[serde(default)]
    devices: Vec<u32>,
    /// The worker's own file.
    config: PathBuf,
}

impl NodeFile {
    fn read(file: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        Self::parse(&text).with_context(|| format!("{}", file.display()))
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let node: Self = serde_yaml::from_str(text)?;
        ensure!(!node.workers.is_empty(), "workers: at least one is needed");
        for (i, worker) in node.workers.iter().enumerate() {
            let is_new = node.workers[..i].iter().all(|earlier| earlier.name != worker.name);
            ensure!(is_new, "workers[{i}].name: {} is taken", worker.name);
        }
        Ok(node)
    }

    /// One process for each worker. `own_name` stands in for a name that the file lacks; `visible` is this process's `CUDA_VISIBLE_DEVICES`.
    fn services(self, own_name: &str, visible: Option<&str>, options: &[String]) -> anyhow::Result<Vec<Service>> {
        let node = self.name.as_deref().unwrap_or(own_name).to_owned();
        let service = |Worker { role, name, devices, config }: Worker| {
            let in_fleet = format!("{node}-{name}");
            let mut environment = vec![(format!("DAMASK_{}__NAME", role.name().to_uppercase()), in_fleet)];
            if !devices.is_empty() {
                environment.push(("CUDA_VISIBLE_DEVICES".into(), visible_devices(&devices, visible)?));
            }
            let (role, sockets, options) = (role.name(), Vec::new(), options.to_vec());
            Ok(Service { role, name, config, sockets, options, environment })
        };
        self.workers.into_iter().map(service).collect()
    }
}

/// Runs the workers until told to end, then drains them one after the other.
///
/// # Errors
/// A file that cannot be used, or a worker whose configuration was refused; then the others are drained too.
pub(crate) async fn node(args: NodeArgs, options: Vec<String>, drain_grace: Duration) -> anyhow::Result<()> {
    let end = told_to_end()?;
    let own_name = std::env::var("POD_NAME").ok().filter(|name| !name.is_empty());
    let own_name = own_name.map_or_else(host_name, Ok)?;
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let services = NodeFile::read(&args.config)?.services(&own_name, visible.as_deref(), &options)?;
    // As if they had served before: a worker that ends at its start, for want of a file system that is not there yet, is started again.
    let mut running = Services::new(drain_grace + KILL_AFTER_GRACE, Pids::default(), Arc::new(AtomicBool::new(true)));
    for service in services {
        running.start(service);
    }
    let outcome = tokio::select! {
        () = end => Ok(()),
        error = running.failure() => {
            tracing::error!("a worker cannot run: ending the others");
            Err(error)
        }
    };
    let drained = running.drain().await;
    outcome.and(drained)
}

fn host_name() -> anyhow::Result<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").context("no $POD_NAME, and no host name")?;
    Ok(name.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "workers:
        - { role: prefill, name: prefill, devices: [0, 1], config: /etc/damask/prefill.yaml }
        - { role: decode, name: decode, devices: [2, 3], config: /etc/damask/decode.yaml }";

    #[test]
    fn workers_get_their_name_and_their_gpus() {
        let services = NodeFile::parse(FILE).unwrap().services("pod-0", Some("4,5,6,7"), &[]).unwrap();
        let environment = |name: &str, gpus: &str| {
            vec![
                (name.to_owned(), format!("pod-0-{}", if gpus == "4,5" { "prefill" } else { "decode" })),
                ("CUDA_VISIBLE_DEVICES".to_owned(), gpus.to_owned()),
            ]
        };
        assert_eq!(services[0].environment, environment("DAMASK_PREFILL__NAME", "4,5"));
        assert_eq!(services[1].environment, environment("DAMASK_DECODE__NAME", "6,7"));
        assert_eq!((services[1].role, services[1].config.to_str()), ("decode", Some("/etc/damask/decode.yaml")));
        let named = NodeFile::parse(&format!("name: n7\n{FILE}")).unwrap().services("pod-0", None, &[]).unwrap();
        assert_eq!(named[0].environment[0].1, "n7-prefill");
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (text, reason) in [
            ("workers: []", "at least one"),
            ("workers: [{role: router, name: r, config: r.yaml}]", "unknown variant `router`"),
            (
                "workers: [{role: decode, name: d, config: a}, {role: decode, name: d, config: b}]",
                "workers[1].name: d is taken",
            ),
            ("workers: [{role: decode, name: d, config: a, gpus: [1]}]", "unknown field `gpus`"),
        ] {
            let error = format!("{:#}", NodeFile::parse(text).unwrap_err());
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
