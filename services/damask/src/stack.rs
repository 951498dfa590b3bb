//! The four services of one machine: their sockets, their config files, their life together.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use anyhow::Context;
use serde::Serialize;
use types::Role;
use worker::ModelSource;

use crate::fleet::Fleet;
use crate::stack_config;
use crate::supervisor::{Pids, Service, Services};

/// What to run, and how spread.
#[derive(Debug, Clone)]
pub(crate) struct StackOptions {
    /// Where the OpenAI API listens; gRPC `Gateway` takes the next port. Port 0 takes free ones.
    pub(crate) listen: SocketAddr,
    /// What is served.
    pub(crate) model: ModelSource,
    /// The workers.
    pub(crate) fleet: Fleet,
    /// Whether they compute on GPUs.
    pub(crate) on_gpus: bool,
    /// Longest context.
    pub(crate) max_context_tokens: Option<u32>,
    /// How long each service may drain.
    pub(crate) drain_grace: Duration,
    /// Options passed on to each service.
    pub(crate) options: Vec<String>,
    /// Whether internal ports are the documented ones where free, or any.
    pub(crate) documented_ports: bool,
}

/// Where the services listen, and their processes; what `--ready-file` holds.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Addresses {
    /// OpenAI API.
    pub(crate) http: SocketAddr,
    /// gRPC `damask.v1.Gateway`.
    pub(crate) gateway: SocketAddr,
    /// gRPC `damask.v1.Inference`.
    pub(crate) router: SocketAddr,
    /// gRPC of the first prefill worker.
    pub(crate) prefill: SocketAddr,
    /// gRPC of the first decode worker.
    pub(crate) decode: SocketAddr,
    /// gRPC of every worker, by name.
    pub(crate) workers: BTreeMap<String, SocketAddr>,
    /// Health and metrics, by service.
    pub(crate) admin: BTreeMap<String, SocketAddr>,
    /// Process ids, by service.
    pub(crate) pids: BTreeMap<String, u32>,
}

/// A service that is not gone so long after its grace is killed.
pub(crate) const KILL_AFTER_GRACE: Duration = Duration::from_secs(2);

/// Running services.
pub(crate) struct Stack {
    addresses: Addresses,
    pids: Pids,
    has_served: Arc<AtomicBool>,
    /// None drains before those that call it.
    services: Services,
    _folder: tempfile::TempDir,
}

/// A service's subcommand and name, and its sockets by the name under which it binds them.
struct Bound {
    role: &'static str,
    name: String,
    sockets: Vec<(&'static str, TcpListener)>,
}

impl Stack {
    /// Binds every socket, writes the config files and starts the services. Returns at once; see [`Self::wait_ready`].
    ///
    /// # Errors
    /// A taken port; a program or folder that cannot be used.
    pub(crate) fn start(options: &StackOptions) -> anyhow::Result<Self> {
        let (addresses, bound) = bind_all(options)?;
        let folder =
            tempfile::Builder::new().prefix("damask-").tempdir().context("cannot make a folder for config files")?;
        let pids = Pids::default();
        let has_served = Arc::new(AtomicBool::new(false));
        let grace = options.drain_grace + KILL_AFTER_GRACE;
        let mut services = Services::new(grace, Arc::clone(&pids), Arc::clone(&has_served));
        for Bound { role, name, sockets } in bound {
            let path = folder.path().join(format!("{name}.yaml"));
            let config = stack_config::of(options, &addresses, &name);
            std::fs::write(&path, serde_yaml::to_string(&config)?)
                .with_context(|| format!("cannot write {}", path.display()))?;
            let environment = stack_config::environment(options, &name)?;
            let options = options.options.clone();
            services.start(Service { role, name, config: path, sockets, options, environment });
        }
        Ok(Self { addresses, pids, has_served, services, _folder: folder })
    }

    /// Where everything listens, with the process ids of this moment.
    pub(crate) fn addresses(&self) -> Addresses {
        let pids = self.pids.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Addresses { pids, ..self.addresses.clone() }
    }

    /// Waits until the gateway can serve. `progress` is told, a few times a second, how far the weights have been read.
    ///
    /// # Errors
    /// When a service gives up.
    pub(crate) async fn wait_ready(&mut self, progress: impl Fn(Loading)) -> anyhow::Result<()> {
        let client = reqwest::Client::builder().timeout(Duration::from_secs(2)).build()?;
        loop {
            let mut loading = Loading::default();
            for worker in self.addresses.workers.keys() {
                if let Some(metrics) = get(&client, self.addresses.admin[worker], "metrics").await {
                    loading.add(&metrics);
                }
            }
            progress(loading);
            if get(&client, self.addresses.admin["gateway"], "health/ready").await.is_some() {
                self.has_served.store(true, Ordering::Relaxed);
                return Ok(());
            }
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(50)) => {}
                error = self.services.failure() => return Err(error),
            }
        }
    }

    /// Waits until a service gives up, and says why; restarts in between are not told.
    pub(crate) async fn failure(&mut self) -> anyhow::Error {
        self.services.failure().await
    }

    /// Drains the services, those in front first.
    ///
    /// # Errors
    /// The first service that did not end well; the others are drained all the same.
    pub(crate) async fn drain(mut self) -> anyhow::Result<()> {
        self.services.drain().await
    }
}

/// How far the workers have read their weights, in units of their own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Loading {
    /// Read so far.
    pub(crate) done: u64,
    /// 0 until it is known.
    pub(crate) total: u64,
}

impl Loading {
    fn add(&mut self, metrics: &str) {
        let sample = |name: &str| {
            let value = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            value.and_then(|value| value.parse().ok()).unwrap_or(0)
        };
        self.done += sample("damask_load_done");
        self.total += sample("damask_load_total");
    }
}

/// The body of a good answer; a service that is not up yet or not well has none.
async fn get(client: &reqwest::Client, admin: SocketAddr, path: &str) -> Option<String> {
    let response = client.get(format!("http://{admin}/{path}")).send().await.ok()?;
    response.error_for_status().ok()?.text().await.ok()
}

/// Writes `addresses` so that a reader never sees half a file.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn write_ready_file(path: &Path, addresses: &Addresses) -> anyhow::Result<()> {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    std::fs::write(&part, serde_json::to_vec_pretty(addresses)?)
        .and_then(|()| std::fs::rename(&part, path))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Binds the sockets of all services. They come in the order in which they drain.
fn bind_all(options: &StackOptions) -> anyhow::Result<(Addresses, Vec<Bound>)> {
    let listen = options.listen;
    let http = TcpListener::bind(listen)
        .with_context(|| format!("cannot listen on {listen}; another address can be given with --listen"))?;
    let gateway_port = if listen.port() == 0 { 0 } else { listen.port().saturating_add(1) };
    let gateway = internal(SocketAddr::new(listen.ip(), gateway_port), "gateway gRPC")?;
    let port = |documented: u16, name: &str| {
        let port = if options.documented_ports { documented } else { 0 };
        internal(SocketAddr::from(([127, 0, 0, 1], port)), name)
    };
    let (router, gateway_admin, router_admin) =
        (port(9000, "router")?, port(8002, "gateway admin")?, port(9001, "router admin")?);
    let (http_address, gateway_address, router_address) =
        (http.local_addr()?, gateway.local_addr()?, router.local_addr()?);
    let mut admin = BTreeMap::from([
        ("gateway".to_owned(), gateway_admin.local_addr()?),
        ("router".to_owned(), router_admin.local_addr()?),
    ]);
    let service = |name: &'static str, sockets| Bound { role: name, name: name.to_owned(), sockets };
    let mut bound = vec![
        service("gateway", vec![("http", http), ("grpc", gateway), ("admin", gateway_admin)]),
        service("router", vec![("grpc", router), ("admin", router_admin)]),
    ];
    let mut workers = BTreeMap::new();
    for (role, first_port) in [(Role::Prefill, 9100), (Role::Decode, 9200)] {
        for (worker, port_offset) in options.fleet.of(role).zip((0..).step_by(10)) {
            let name = worker.name.clone();
            let grpc = port(first_port + port_offset, &name)?;
            let worker_admin = port(first_port + port_offset + 1, &format!("{name} admin"))?;
            workers.insert(name.clone(), grpc.local_addr()?);
            admin.insert(name.clone(), worker_admin.local_addr()?);
            let mut sockets = vec![("grpc", grpc), ("admin", worker_admin)];
            if role == Role::Decode {
                sockets.push(("kv", port(0, "kv")?));
            }
            bound.push(Bound { role: role.name(), name, sockets });
        }
    }
    let first = |role: Role| options.fleet.of(role).next().map(|worker| workers[&worker.name]);
    let addresses = Addresses {
        http: http_address,
        gateway: gateway_address,
        router: router_address,
        prefill: first(Role::Prefill).context("a stack has a prefill worker")?,
        decode: first(Role::Decode).context("a stack has a decode worker")?,
        workers,
        admin,
        pids: BTreeMap::new(),
    };
    Ok((addresses, bound))
}

/// Internal services have documented ports, but which one it is matters only to who looks inside: a taken one is replaced.
fn internal(address: SocketAddr, name: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).or_else(|error| {
        let free = SocketAddr::new(address.ip(), 0);
        let socket =
            TcpListener::bind(free).with_context(|| format!("cannot listen on {address} for {name}: {error}"))?;
        tracing::warn!(service = name, wanted = %address, instead = %socket.local_addr()?, "port is taken");
        Ok(socket)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loading_adds_up_over_workers() {
        let mut loading = Loading::default();
        loading.add("# HELP damask_load_done Weights.\ndamask_load_done 3\ndamask_load_total 8\n# EOF\n");
        loading.add("damask_load_done 1\ndamask_load_total 4\n");
        loading.add("damask_load_done_created 99\n");
        assert_eq!(loading, Loading { done: 4, total: 12 });
    }
}
