//! The four services of one machine: their sockets, their config files, their life together.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use anyhow::{Context, bail};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::supervisor::{Pids, Service, supervise};

/// What to run, and how spread.
#[derive(Debug, Clone)]
pub(crate) struct StackOptions {
    /// Where the OpenAI API listens; gRPC `Gateway` takes the next port. Port 0 takes free ones.
    pub(crate) listen: SocketAddr,
    /// Model directory; the embedded gpt-oss-nano if absent.
    pub(crate) model: Option<PathBuf>,
    /// Prefill's tensor parallelism.
    pub(crate) prefill_tp: u32,
    /// Decode's tensor parallelism.
    pub(crate) decode_tp: u32,
    /// Ways in which decode splits the experts.
    pub(crate) decode_ep: u32,
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
    /// gRPC of the prefill worker.
    pub(crate) prefill: SocketAddr,
    /// gRPC of the decode worker.
    pub(crate) decode: SocketAddr,
    /// Health and metrics, by service.
    pub(crate) admin: BTreeMap<&'static str, SocketAddr>,
    /// Process ids, by service.
    pub(crate) pids: BTreeMap<&'static str, u32>,
}

/// A service that is not gone so long after its grace is killed.
const KILL_AFTER_GRACE: Duration = Duration::from_secs(2);

/// The order in which services drain: none before those that call it.
const DRAIN_ORDER: [&str; 4] = ["gateway", "router", "prefill", "decode"];

/// Running services.
pub(crate) struct Stack {
    addresses: Addresses,
    pids: Pids,
    has_served: Arc<AtomicBool>,
    stops: Vec<(&'static str, watch::Sender<bool>)>,
    running: JoinSet<(&'static str, anyhow::Result<()>)>,
    _folder: tempfile::TempDir,
}

/// Sockets of one service by the name under which it binds them.
type Sockets = Vec<(&'static str, TcpListener)>;

impl Stack {
    /// Binds every socket, writes the config files and starts the services. Returns at once; see [`Self::wait_ready`].
    ///
    /// # Errors
    /// A taken port; a program or folder that cannot be used.
    pub(crate) fn start(options: &StackOptions) -> anyhow::Result<Self> {
        let (addresses, sockets) = bind_all(options)?;
        let folder =
            tempfile::Builder::new().prefix("damask-").tempdir().context("cannot make a folder for config files")?;
        let configs = configs(options, &addresses);
        let pids = Pids::default();
        let has_served = Arc::new(AtomicBool::new(false));
        let mut running = JoinSet::new();
        let grace = options.drain_grace + KILL_AFTER_GRACE;
        let mut stops = Vec::new();
        for ((name, sockets), config) in sockets.into_iter().zip(configs) {
            let path = folder.path().join(format!("{name}.yaml"));
            std::fs::write(&path, serde_yaml::to_string(&config)?)
                .with_context(|| format!("cannot write {}", path.display()))?;
            let service = Service { name, config: path, sockets, options: options.options.clone() };
            let (stop, stopped) = watch::channel(false);
            let (pids, has_served) = (pids.clone(), Arc::clone(&has_served));
            running.spawn(async move { (name, supervise(service, stopped, grace, pids, has_served).await) });
            stops.push((name, stop));
        }
        Ok(Self { addresses, pids, has_served, stops, running, _folder: folder })
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
            for worker in ["prefill", "decode"] {
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
                Some(ended) = self.running.join_next() => return failure(ended?),
            }
        }
    }

    /// Waits until a service gives up; restarts in between are not told.
    ///
    /// # Errors
    /// Why it gave up.
    pub(crate) async fn wait_failure(&mut self) -> anyhow::Result<()> {
        match self.running.join_next().await {
            Some(ended) => failure(ended?),
            None => std::future::pending().await,
        }
    }

    /// Drains the services, those in front first.
    ///
    /// # Errors
    /// The first service that did not end well; the others are drained all the same.
    pub(crate) async fn drain(mut self) -> anyhow::Result<()> {
        let mut first_failure = Ok(());
        for name in DRAIN_ORDER {
            let Some((_, stop)) = self.stops.iter().find(|(own, _)| *own == name) else { continue };
            stop.send_replace(true);
            while let Some(ended) = self.running.join_next().await {
                let (ended, outcome) = ended?;
                if first_failure.is_ok() {
                    first_failure = outcome.with_context(|| format!("{ended} failed"));
                }
                if ended == name {
                    break;
                }
            }
        }
        first_failure
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

fn failure((name, outcome): (&'static str, anyhow::Result<()>)) -> anyhow::Result<()> {
    outcome?;
    bail!("{name} ended by itself")
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

/// Binds the sockets of all services, in the order of [`configs`].
fn bind_all(options: &StackOptions) -> anyhow::Result<(Addresses, Vec<(&'static str, Sockets)>)> {
    let listen = options.listen;
    let named = |socket: SocketAddr, option: &str| {
        TcpListener::bind(socket)
            .with_context(|| format!("cannot listen on {socket}; another address can be given with {option}"))
    };
    let http = named(listen, "--listen")?;
    let gateway_port = if listen.port() == 0 { 0 } else { listen.port().saturating_add(1) };
    let ip = listen.ip();
    let gateway = internal(SocketAddr::new(ip, gateway_port), "gateway gRPC")?;
    let port = |documented: u16, name: &str| {
        let port = if options.documented_ports { documented } else { 0 };
        internal(SocketAddr::from(([127, 0, 0, 1], port)), name)
    };
    let (router, prefill, decode) = (port(9000, "router")?, port(9100, "prefill")?, port(9200, "decode")?);
    let kv = port(0, "kv")?;
    let admins = [
        port(8002, "gateway admin")?,
        port(9001, "router admin")?,
        port(9101, "prefill admin")?,
        port(9201, "decode admin")?,
    ];
    let names = ["gateway", "router", "prefill", "decode"];
    let mut admin = BTreeMap::new();
    for (name, socket) in names.iter().zip(&admins) {
        admin.insert(*name, socket.local_addr()?);
    }
    let addresses = Addresses {
        http: http.local_addr()?,
        gateway: gateway.local_addr()?,
        router: router.local_addr()?,
        prefill: prefill.local_addr()?,
        decode: decode.local_addr()?,
        admin,
        pids: BTreeMap::new(),
    };
    let [gateway_admin, router_admin, prefill_admin, decode_admin] = admins;
    let sockets = vec![
        ("gateway", vec![("http", http), ("grpc", gateway), ("admin", gateway_admin)]),
        ("router", vec![("grpc", router), ("admin", router_admin)]),
        ("prefill", vec![("grpc", prefill), ("admin", prefill_admin)]),
        ("decode", vec![("grpc", decode), ("admin", decode_admin), ("kv", kv)]),
    ];
    Ok((addresses, sockets))
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

/// The services' config files, in the order of [`bind_all`].
fn configs(options: &StackOptions, addresses: &Addresses) -> [Value; 4] {
    let model = match &options.model {
        Some(dir) => json!(dir),
        None => json!("embedded-nano"),
    };
    let admin = |name: &str| addresses.admin[name].to_string();
    let gateway = json!({
        "listen": addresses.http.to_string(),
        "grpc_listen": addresses.gateway.to_string(),
        "admin_listen": admin("gateway"),
        "router": addresses.router.to_string(),
        "model": model,
    });
    let router = json!({
        "listen": addresses.router.to_string(),
        "admin_listen": admin("router"),
        "workers": {"prefill": [addresses.prefill.to_string()], "decode": [addresses.decode.to_string()]},
    });
    let worker = |name: &str, listen: SocketAddr, tp: u32, ep: u32| {
        let mut config = json!({
            "name": name,
            "listen": listen.to_string(),
            "admin_listen": admin(name),
            "model": model,
            "layout": {"tp": tp, "ep": ep},
        });
        if let Some(max_context_tokens) = options.max_context_tokens {
            config["max_context_tokens"] = max_context_tokens.into();
        }
        config
    };
    let prefill = worker("prefill", addresses.prefill, options.prefill_tp, 1);
    let decode = worker("decode", addresses.decode, options.decode_tp, options.decode_ep);
    [gateway, router, prefill, decode]
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
