//! What the services of a stack are configured with.

use serde_json::{Map, Value, json};
use types::Role;

use crate::fleet::{WorkerPlan, visible_devices};
use crate::stack::{Addresses, StackOptions};

/// Tokens that a step of prefill takes on a GPU: enough that every expert's tiles are full. 32,768 tokens of gpt-oss-120b take 7 % longer in
/// four steps than in one.
const CHUNK_TOKENS: u32 = 32_768;
/// The same on a GPU that is shared, where a step holds up decode and memory is short.
const SHARED_CHUNK_TOKENS: u32 = 2_048;
/// KV of the largest chunk of gpt-oss-120b, rounded up.
const IN_FLIGHT_BYTES: u32 = 5 << 28;
const SHARED_IN_FLIGHT_BYTES: u32 = 1 << 30;
const MAX_SEQUENCES: u32 = 128;
/// On a GPU that is shared, where window pages of 128 sequences would leave gpt-oss-120b no room for a long one.
const SHARED_MAX_SEQUENCES: u32 = 32;
const MAX_QUEUED: u32 = 512;

/// The config file of one service.
pub(crate) fn of(options: &StackOptions, addresses: &Addresses, name: &str) -> Value {
    let admin = addresses.admin[name].to_string();
    match name {
        "gateway" => json!({
            "listen": addresses.http.to_string(),
            "grpc_listen": addresses.gateway.to_string(),
            "admin_listen": admin,
            "router": addresses.router.to_string(),
            "model": options.model,
        }),
        "router" => {
            let listening = |role: Role| -> Vec<String> {
                options.fleet.of(role).map(|worker| addresses.workers[&worker.name].to_string()).collect()
            };
            json!({
                "listen": addresses.router.to_string(),
                "admin_listen": admin,
                "workers": {"prefill": listening(Role::Prefill), "decode": listening(Role::Decode)},
            })
        }
        worker => {
            let mut config = json!({
                "name": worker,
                "listen": addresses.workers[worker].to_string(),
                "admin_listen": admin,
                "model": options.model,
            });
            let plan = options.fleet.workers.iter().find(|plan| plan.name == worker);
            if let (Some(plan), Some(config)) = (plan, config.as_object_mut()) {
                settings(options, plan, config);
            }
            config
        }
    }
}

/// What a worker computes with: by its place, and by its own settings last.
fn settings(options: &StackOptions, plan: &WorkerPlan, config: &mut Map<String, Value>) {
    config.insert("layout".into(), json!(plan.layout));
    config.insert("backend".into(), json!(if options.on_gpus { "cuda" } else { "cpu" }));
    if let Some(max_context_tokens) = options.max_context_tokens {
        config.insert("max_context_tokens".into(), max_context_tokens.into());
    }
    if options.on_gpus {
        config.insert("numerics".into(), json!({"compute": "bf16", "routing": "bf16", "kv": "bf16"}));
        config.insert("page_tokens".into(), 64.into());
        config.insert("gpu_memory_share".into(), json!(options.fleet.memory_share(plan)));
        let ranks_per_gpu = plan.layout.ranks() / plan.devices.len() as u32;
        config.insert("ranks_per_gpu".into(), ranks_per_gpu.into());
        let is_shared = options.fleet.shares_gpus(plan);
        match plan.role {
            Role::Prefill => {
                let (chunk, in_flight_bytes) = if is_shared {
                    (SHARED_CHUNK_TOKENS, SHARED_IN_FLIGHT_BYTES)
                } else {
                    (CHUNK_TOKENS, IN_FLIGHT_BYTES)
                };
                config.insert("chunk_tokens".into(), chunk.into());
                config.insert("max_queued".into(), MAX_QUEUED.into());
                config.insert("transfer".into(), json!({"in_flight_bytes_max": in_flight_bytes}));
            }
            Role::Decode => {
                let most = if is_shared { SHARED_MAX_SEQUENCES } else { MAX_SEQUENCES };
                config.insert("max_sequences".into(), most.into());
            }
        }
    }
    merge(config, &plan.config);
}

/// Sections of `over` are merged, other values replaced.
fn merge(config: &mut Map<String, Value>, over: &Map<String, Value>) {
    for (key, value) in over {
        match (config.get_mut(key), value) {
            (Some(Value::Object(section)), Value::Object(over)) => merge(section, over),
            _ => drop(config.insert(key.clone(), value.clone())),
        }
    }
}

/// What a service's environment has beside this process's own.
///
/// # Errors
/// When this process's own GPUs are fewer than the layout takes.
pub(crate) fn environment(options: &StackOptions, name: &str) -> anyhow::Result<Vec<(String, String)>> {
    let plan = options.fleet.workers.iter().find(|plan| plan.name == name);
    let Some(plan) = plan.filter(|_| options.on_gpus) else { return Ok(Vec::new()) };
    const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
    let own = std::env::var(VISIBLE).ok();
    Ok(vec![(VISIBLE.to_owned(), visible_devices(&plan.devices, own.as_deref())?)])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::net::SocketAddr;
    use std::time::Duration;

    use worker::ModelSource;

    use super::*;
    use crate::fleet::{Degrees, Fleet};

    fn stack(fleet: Fleet, on_gpus: bool) -> (StackOptions, Addresses) {
        let address = SocketAddr::from(([127, 0, 0, 1], 9));
        let names = ["gateway", "router"].map(str::to_owned);
        let workers: BTreeMap<String, SocketAddr> =
            fleet.workers.iter().map(|worker| (worker.name.clone(), address)).collect();
        let admin = names.into_iter().chain(workers.keys().cloned()).map(|name| (name, address)).collect();
        let options = StackOptions {
            listen: address,
            model: ModelSource::EmbeddedNano,
            fleet,
            on_gpus,
            max_context_tokens: Some(4096),
            drain_grace: Duration::ZERO,
            options: Vec::new(),
            documented_ports: false,
        };
        let (http, gateway, router, prefill, decode) = (address, address, address, address, address);
        let addresses = Addresses { http, gateway, router, prefill, decode, workers, admin, pids: BTreeMap::new() };
        (options, addresses)
    }

    /// Every file is one that its service takes.
    fn read_all(options: &StackOptions, addresses: &Addresses) -> (Vec<prefill::Config>, Vec<decode::Config>) {
        let text = |name: &str| serde_yaml::to_string(&of(options, addresses, name)).unwrap();
        let none = || std::iter::empty();
        chassis::config::parse::<gateway::Config>(&text("gateway"), "gateway", "gateway", none()).unwrap();
        chassis::config::parse::<router::Config>(&text("router"), "router", "router", none()).unwrap();
        let names = |role| options.fleet.of(role).map(|worker| worker.name.clone());
        let prefill = names(Role::Prefill)
            .map(|name| chassis::config::parse(&text(&name), &name, "prefill", none()).unwrap())
            .collect();
        let decode = names(Role::Decode)
            .map(|name| chassis::config::parse(&text(&name), &name, "decode", none()).unwrap())
            .collect();
        (prefill, decode)
    }

    #[test]
    fn workers_on_gpus_get_what_the_cuda_engine_needs() {
        let fleet = Fleet::on_gpus(8, Degrees::default()).unwrap();
        let (options, addresses) = stack(fleet, true);
        let (prefill, decode) = read_all(&options, &addresses);
        assert_eq!((prefill[0].page_tokens, prefill[0].chunk_tokens, prefill[0].layout.tp), (64, 32_768, 4));
        assert_eq!(prefill[0].transfer.in_flight_bytes_max, 5 << 28);
        assert_eq!((decode[0].page_tokens, decode[0].max_sequences, decode[0].layout.ep), (64, 128, 4));
        assert_eq!(prefill[0].numerics, decode[0].numerics);
        assert_eq!(decode[0].backend, worker::Backend::Cuda);
        assert_eq!(decode[0].gpu_memory_share, 0.9);
    }

    #[test]
    fn a_gpu_is_shared_and_a_layout_file_has_the_last_word() {
        let mut fleet = Fleet::on_gpus(1, Degrees::default()).unwrap();
        let own = json!({"max_sequences": 16, "transfer": {"tickets_max": 7}});
        fleet.workers[1].config = own.as_object().unwrap().clone();
        let (options, addresses) = stack(fleet, true);
        let (prefill, decode) = read_all(&options, &addresses);
        assert_eq!((prefill[0].chunk_tokens, prefill[0].gpu_memory_share), (2048, 0.47));
        assert_eq!((decode[0].max_sequences, decode[0].transfer.tickets_max), (16, 7));
        assert_eq!(prefill[0].transfer.in_flight_bytes_max, 1 << 30);
    }

    #[test]
    fn on_the_cpu_defaults_stay() {
        let (options, addresses) = stack(Fleet::on_cpu(Degrees::default()), false);
        let (prefill, decode) = read_all(&options, &addresses);
        assert_eq!((prefill[0].page_tokens, decode[0].layout.ep, decode[0].max_context_tokens), (16, 4, 4096));
        assert_eq!(environment(&options, "decode").unwrap(), Vec::new());
    }
}
