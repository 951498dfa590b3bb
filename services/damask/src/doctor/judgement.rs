//! What `damask doctor` thinks of the facts, and which setting to change.

use serde::Serialize;

use super::facts::{Facts, PairRates, Rate};

/// The one architecture of the kernels.
const CAPABILITY: (u32, u32) = (9, 0);
/// /dev/shm below this is not enough for NCCL's buffers of a node, where they have to be there.
const MIN_SHM: u64 = 1 << 30;
const MIN_LOCKED: u64 = 1 << 30;
/// Copies of 64 MiB within an H200 read and write 3840 to 3920 GB/s.
const MIN_MEMORY_GB_PER_S: f64 = 3000.0;
/// NCCL's version with unix sockets that are not abstract.
pub(super) const NCCL_NAMED_SOCKETS: u32 = 22_900;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Level {
    /// Worth knowing.
    Note,
    /// Serving works, but slower or not in every setting.
    Warning,
    /// Serving fails, or does so as soon as KV is to move between GPUs.
    Fault,
}

/// One thing found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) level: Level,
    /// Stable name.
    pub(crate) code: &'static str,
    pub(crate) text: String,
    /// What to change under docker compose.
    pub(crate) compose: Option<&'static str>,
    /// What to change in the chart's values or on the node.
    pub(crate) helm: Option<&'static str>,
}

/// What the caller expects.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Expectations {
    /// GPUs that must be usable.
    pub(crate) gpus: usize,
    /// GB/s that each pair must reach.
    pub(crate) pair_gb_per_s: f64,
}

/// The findings, worst first.
pub(crate) fn judge(facts: &Facts, expected: Expectations) -> Vec<Finding> {
    let mut findings = Findings(Vec::new());
    findings.driver(facts, expected);
    if !facts.gpus.is_empty() {
        findings.gpus(facts);
        findings.nccl(facts);
        findings.container(facts);
        findings.limits(facts);
        findings.rates(facts, expected);
    }
    findings.0.sort_by_key(|finding| std::cmp::Reverse(finding.level));
    findings.0
}

/// What keeps this process and another one, whose facts `other` are, from being neighbours.
pub(crate) fn compare(facts: &Facts, other: &Facts) -> Vec<Finding> {
    let mut findings = Findings(Vec::new());
    let host_id = |facts: &Facts| {
        let named = facts.environment.get("NCCL_HOSTID").cloned();
        named.map_or_else(|| (facts.host.hostname.clone(), facts.host.boot_id.clone()), |id| (Some(id), None))
    };
    if host_id(facts) != host_id(other) {
        findings.add(
            Level::Fault,
            "host_id_differs",
            "NCCL takes the two for different hosts, and uses sockets".into(),
            "NODE_NAME in .env, which becomes NCCL_HOSTID of every worker",
            "NCCL_HOSTID must be the node's name in every container; do not override it in workers.extraEnv",
        );
    }
    if facts.host.shm_device != other.host.shm_device {
        findings.add(
            Level::Fault,
            "shm_differs",
            "the two have different /dev/shm, so NCCL takes them for different hosts, and uses sockets".into(),
            "ipc: service:node for every worker, ipc: shareable for node",
            "one emptyDir at /dev/shm in every container of the pod",
        );
    }
    let abstract_sockets = |facts: &Facts| is(facts, "NCCL_IPC_USE_ABSTRACT_SOCKET", "0");
    let shared = abstract_sockets(facts) && abstract_sockets(other);
    if facts.host.network_namespace != other.host.network_namespace && !shared {
        findings.add(
            Level::Fault,
            "network_differs",
            "the two are in different network namespaces, so handles of GPU memory cannot be exchanged".into(),
            "network_mode: service:node for every worker",
            "workers of one pod share a namespace; or NCCL_IPC_USE_ABSTRACT_SOCKET=0 in workers.extraEnv and a shared /tmp",
        );
    }
    let cards = |facts: &Facts| facts.driver.gpus_in_container;
    if cards(facts) != cards(other) {
        findings.add(
            Level::Fault,
            "gpus_differ",
            format!("one container has {} GPUs, the other {}", cards(facts), cards(other)),
            "deploy.resources.reservations.devices with count: all for every worker",
            "workers.allocation: devicePlugin (one container) or dra (one claim)",
        );
    }
    if facts.nccl.version != other.nccl.version {
        findings.add(
            Level::Fault,
            "nccl_differs",
            format!("NCCL is {:?} here and {:?} there", facts.nccl.version, other.nccl.version),
            "one DAMASK_TAG for all workers",
            "one cudaImage for all workers",
        );
    }
    findings.0
}

fn is(facts: &Facts, variable: &str, value: &str) -> bool {
    facts.environment.get(variable).is_some_and(|set| set == value)
}

struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, level: Level, code: &'static str, text: String, compose: &'static str, helm: &'static str) {
        let given = |setting: &'static str| (!setting.is_empty()).then_some(setting);
        self.0.push(Finding { level, code, text, compose: given(compose), helm: given(helm) });
    }

    fn driver(&mut self, facts: &Facts, expected: Expectations) {
        let driver = &facts.driver;
        let wanted = expected.gpus > 0 || driver.gpus_in_container > 0;
        if let Some((major, minor)) = driver.cuda.filter(|version| *version < device::MIN_CUDA) {
            let (min_major, min_minor) = device::MIN_CUDA;
            let text = format!("the driver supports CUDA {major}.{minor}, the kernels need {min_major}.{min_minor}");
            let update = "the node's driver: 580 or newer";
            self.add(Level::Fault, "driver_too_old", text, update, update);
        } else if let Some(fault) = &driver.fault {
            let level = if wanted { Level::Fault } else { Level::Note };
            let text = match (wanted, driver.gpus_in_machine) {
                (false, 0) => format!("no GPU here ({fault}): the CPU engine is what can serve"),
                (false, gpus) => format!("the machine has {gpus} GPUs, none of which this process can use: {fault}"),
                (true, _) => fault.clone(),
            };
            self.add(
                level,
                "no_gpu",
                text,
                "COMPOSE_PROFILES=gpu; deploy.resources.reservations.devices: driver nvidia, capabilities [gpu]",
                "workers.accelerator: nvidia, workers.gpusPerPod, and workers.runtimeClassName where nvidia is not the default",
            );
        }
        if facts.gpus.len() < expected.gpus && driver.fault.is_none() {
            let text = format!("{} GPUs are visible, {} are expected", facts.gpus.len(), expected.gpus);
            self.add(
                Level::Fault,
                "too_few_gpus",
                text,
                "deploy.resources.reservations.devices: count all; PREFILL_GPUS, DECODE_GPUS",
                "workers.gpusPerPod, workers.processes[].gpus",
            );
        }
    }

    fn gpus(&mut self, facts: &Facts) {
        for (idx, gpu) in facts.gpus.iter().enumerate().filter(|(_, gpu)| gpu.capability != CAPABILITY) {
            let (major, minor) = gpu.capability;
            let text = format!(
                "GPU {idx} ({}) has capability {major}.{minor}, the kernels are for 9.0 (H100, H200)",
                gpu.name
            );
            self.add(Level::Fault, "wrong_gpu", text, "PREFILL_GPUS, DECODE_GPUS", "workers.nodeSelector");
        }
        let (here, machine) = (facts.driver.gpus_in_container, facts.driver.gpus_in_machine);
        let chosen = facts.environment.get("NVIDIA_VISIBLE_DEVICES");
        let partly = chosen.is_some_and(|devices| !["all", "void", "none", ""].contains(&devices.as_str()));
        // Where even the bus is hidden, what the container was given has to tell.
        let hidden = if machine == 0 { partly } else { 0 < here && here < machine };
        if hidden {
            let of = if machine == 0 { String::new() } else { format!(" of the machine's {machine}") };
            let text = format!(
                "the container has {here} GPUs{of}: memory of a hidden GPU cannot be imported (CUDA error 101)"
            );
            self.add(
                Level::Warning,
                "hidden_gpus",
                text,
                "deploy.resources.reservations.devices: count all; choose by CUDA_VISIBLE_DEVICES",
                "workers.gpusPerPod: all of the node's; choose by workers.processes[].gpus",
            );
        }
        if let Some(chosen) = facts.environment.get("CUDA_VISIBLE_DEVICES").filter(|_| facts.gpus.len() < here) {
            let text = format!(
                "CUDA_VISIBLE_DEVICES={chosen} shows {} of {here} GPUs: the pairs with the others are not looked at",
                facts.gpus.len()
            );
            let all = "run the doctor with CUDA_VISIBLE_DEVICES naming all GPUs: 0,1,2,..";
            self.add(Level::Note, "partial_view", text, all, all);
        }
        for pair in facts.pairs.iter().filter(|pair| pair.from < pair.to) {
            let names = format!("GPU {} and GPU {}", pair.from, pair.to);
            if !pair.peer_access {
                let text = format!("{names} cannot reach each other's memory");
                let fix = "the machine: NVLink or the fabric manager is down (nvidia-smi topo -m, nvidia-smi -q), or a virtual machine hides the links";
                self.add(Level::Fault, "no_peer_access", text, fix, fix);
            } else if !pair.nvlink {
                let text = format!("{names} are joined by PCIe only: KV and collectives take many times as long");
                let fix = "the machine: a node whose GPUs have NVLink";
                self.add(Level::Warning, "no_nvlink", text, fix, fix);
            }
        }
    }

    fn nccl(&mut self, facts: &Facts) {
        let several = facts.gpus.len() > 1;
        if let Some(fault) = &facts.nccl.fault {
            let level = if several { Level::Fault } else { Level::Note };
            self.add(
                level,
                "no_nccl",
                fault.clone(),
                "DAMASK_CUDA_IMAGE, made by docker/build.sh --cuda, which adds NCCL; outside of it, LD_LIBRARY_PATH",
                "cudaImage",
            );
        }
        for variable in ["NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"] {
            if is(facts, variable, "1") {
                let text = format!(
                    "{variable}=1 keeps NCCL from using {}",
                    if variable.contains("P2P") { "NVLink" } else { "/dev/shm" }
                );
                self.add(
                    Level::Fault,
                    "nccl_restricted",
                    text,
                    "remove it from the worker's environment",
                    "workers.extraEnv",
                );
            }
        }
        if let Some(level) =
            facts.environment.get("NCCL_P2P_LEVEL").filter(|level| ["LOC", "0"].contains(&level.as_str()))
        {
            let text = format!("NCCL_P2P_LEVEL={level} keeps NCCL from using NVLink");
            self.add(
                Level::Fault,
                "nccl_restricted",
                text,
                "NCCL_P2P_LEVEL: NVL",
                "workers.extraEnv must not set NCCL_P2P_LEVEL",
            );
        }
        let old = facts.nccl.version.is_some_and(|version| version < NCCL_NAMED_SOCKETS);
        if old && is(facts, "NCCL_IPC_USE_ABSTRACT_SOCKET", "0") {
            self.add(
                Level::Warning,
                "nccl_too_old",
                "NCCL_IPC_USE_ABSTRACT_SOCKET=0 has no effect before NCCL 2.29".into(),
                "network_mode: service:node",
                "one pod for all workers of a node",
            );
        }
    }

    fn container(&mut self, facts: &Facts) {
        let Some(kind) = &facts.host.container else { return };
        if !facts.environment.contains_key("NCCL_HOSTID") {
            let text = format!(
                "in a container ({kind}) without NCCL_HOSTID: NCCL takes a worker in another one for another host, and uses sockets"
            );
            self.add(
                Level::Warning,
                "no_host_id",
                text,
                "NODE_NAME in .env, which becomes NCCL_HOSTID of every worker",
                "NCCL_HOSTID is set by the chart; do not override it in workers.extraEnv",
            );
        }
        if !facts.environment.contains_key("NCCL_SOCKET_IFNAME") {
            let text =
                "NCCL_SOCKET_IFNAME is not set: NCCL may pick an address that other workers cannot reach".to_owned();
            self.add(
                Level::Note,
                "no_interface",
                text,
                "NCCL_SOCKET_IFNAME: lo",
                "NCCL_SOCKET_IFNAME is set by the chart",
            );
        }
    }

    fn limits(&mut self, facts: &Facts) {
        let limits = &facts.limits;
        let cannot_place = limits.filtered && !limits.sys_nice && !is(facts, "NCCL_CUMEM_HOST_ENABLE", "0");
        if cannot_place {
            self.add(
                Level::Warning,
                "no_sys_nice",
                "system calls are filtered and SYS_NICE is not granted, so NCCL cannot place host buffers near a GPU"
                    .into(),
                "cap_add: [SYS_NICE]; or NCCL_CUMEM_HOST_ENABLE=0",
                "workers.nccl.sysNice: true; or false, which sets NCCL_CUMEM_HOST_ENABLE=0",
            );
        }
        if let Some(bytes) = limits.shm_bytes.filter(|bytes| *bytes < MIN_SHM) {
            // Where host buffers cannot come from cuMem, they all lie in /dev/shm.
            let needed = facts.gpus.len() > 1 && (cannot_place || is(facts, "NCCL_CUMEM_HOST_ENABLE", "0"));
            let level = if needed { Level::Fault } else { Level::Warning };
            let text = format!("/dev/shm has {} MiB, NCCL may need 1 GiB", bytes >> 20);
            self.add(level, "small_shm", text, "shm_size of node", "workers.shmSize");
        } else if facts.host.shm_device.is_none() {
            self.add(Level::Fault, "no_shm", "there is no /dev/shm".into(), "shm_size of node", "workers.shmSize");
        }
        if let (Some(shm), Some(memory)) = (limits.shm_bytes, limits.memory_bytes)
            && shm > memory
        {
            let text = format!(
                "/dev/shm may hold {} MiB, but counts as memory, of which {} MiB are allowed",
                shm >> 20,
                memory >> 20
            );
            self.add(Level::Warning, "shm_above_memory", text, "mem_limit", "workers.resources.limits.memory");
        }
        if let Some(bytes) = limits.locked_bytes.filter(|bytes| *bytes < MIN_LOCKED) {
            let text = format!("{} kB of memory may be locked: pinned host memory may fail", bytes >> 10);
            self.add(
                Level::Warning,
                "small_memlock",
                text,
                "ulimits: memlock: -1",
                "the node: LimitMEMLOCK=infinity in the unit of the container runtime",
            );
        }
    }

    fn rates(&mut self, facts: &Facts, expected: Expectations) {
        let Some(measured) = &facts.measured else { return };
        for (gpu, rate) in measured.memory.iter().enumerate() {
            let restart = "the machine: another process uses the GPU, or it is throttled (nvidia-smi -q)";
            match rate {
                Rate::Fault(fault) => {
                    self.add(Level::Fault, "gpu_fails", format!("GPU {gpu} cannot be used: {fault}"), restart, restart);
                }
                Rate::GbPerS(rate) if *rate < MIN_MEMORY_GB_PER_S && facts.gpus[gpu].name.contains("H200") => {
                    let text =
                        format!("GPU {gpu} copies {rate:.0} GB/s within its memory, an H200 does more than 3800");
                    self.add(Level::Warning, "slow_memory", text, restart, restart);
                }
                Rate::GbPerS(_) => {}
            }
        }
        measured.pairs.iter().for_each(|pair| self.pair(facts, pair, expected.pair_gb_per_s));
    }

    fn pair(&mut self, facts: &Facts, pair: &PairRates, least: f64) {
        let nvlink = facts.pairs.iter().any(|link| (link.from, link.to) == (pair.from, pair.to) && link.nvlink);
        let paths = [
            (
                "copy engine",
                &pair.copy,
                "deploy.resources.reservations.devices: count all; ipc: service:node",
                "workers.allocation",
            ),
            (
                "NCCL",
                &pair.nccl,
                "NCCL_HOSTID, ipc: service:node, network_mode: service:node, devices count: all; NCCL_DEBUG=INFO in .env says what it chose",
                "workers.allocation; workers.nccl.debug: INFO says what it chose",
            ),
        ];
        for (path, rate, compose, helm) in paths {
            let names = format!("GPU {} to GPU {} by {path}", pair.from, pair.to);
            match rate {
                Rate::Fault(fault) => self.add(Level::Fault, "pair_fails", format!("{names}: {fault}"), compose, helm),
                Rate::GbPerS(rate) if *rate < least => {
                    let level = if nvlink { Level::Fault } else { Level::Warning };
                    let text = format!("{names}: {rate:.1} GB/s, at least {least:.0} are expected over NVLink");
                    self.add(level, "slow_pair", text, compose, helm);
                }
                Rate::GbPerS(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests;
