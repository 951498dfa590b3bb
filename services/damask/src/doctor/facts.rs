//! What `damask doctor` finds out, apart from what it thinks of it. Reading is forgiving: what cannot be read is `None`.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use device::nccl::Nccl;
use device::{Device, DeviceError};
use serde::{Deserialize, Serialize};

/// Everything that is judged. As JSON it is what `--json` prints and `--against` reads.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Facts {
    pub(crate) host: Host,
    pub(crate) limits: Limits,
    /// Variables that NCCL, CUDA and the container toolkit read.
    pub(crate) environment: BTreeMap<String, String>,
    pub(crate) driver: Driver,
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) pairs: Vec<Pair>,
    pub(crate) nccl: Library,
    pub(crate) measured: Option<Measured>,
}

/// What tells NCCL that two processes are neighbours.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Host {
    pub(crate) hostname: Option<String>,
    pub(crate) boot_id: Option<String>,
    /// docker, kubernetes or another sign of a container.
    pub(crate) container: Option<String>,
    /// Inode of the network namespace.
    pub(crate) network_namespace: Option<u64>,
    /// Inode of the IPC namespace.
    pub(crate) ipc_namespace: Option<u64>,
    /// Device number of /dev/shm.
    pub(crate) shm_device: Option<u64>,
}

/// What a container or the shell allows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Limits {
    /// Size of /dev/shm in bytes; without a stated size it is half of the memory, and this is `None`.
    pub(crate) shm_bytes: Option<u64>,
    /// The limit of the cgroup; `None`: none is set.
    pub(crate) memory_bytes: Option<u64>,
    /// Bytes that may be locked; `None`: any number.
    pub(crate) locked_bytes: Option<u64>,
    /// Whether system calls are filtered (seccomp).
    pub(crate) filtered: bool,
    /// Whether SYS_NICE is in the bounding set, which opens the filter for get_mempolicy and mbind.
    pub(crate) sys_nice: bool,
}

/// The driver, or why there is none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Driver {
    /// Version of the kernel module, for example 580.95.05.
    pub(crate) module: Option<String>,
    /// Newest CUDA version that the driver's library supports.
    pub(crate) cuda: Option<(u32, u32)>,
    /// Why no GPU can be used.
    pub(crate) fault: Option<String>,
    /// GPUs on the PCI bus, which no container hides.
    pub(crate) gpus_in_machine: usize,
    /// GPUs with a device file here: what the container may use.
    pub(crate) gpus_in_container: usize,
}

/// A GPU that CUDA offers to this process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Gpu {
    pub(crate) name: String,
    pub(crate) pci_address: String,
    pub(crate) capability: (u32, u32),
    pub(crate) memory_bytes: u64,
    pub(crate) free_bytes: u64,
}

/// Two GPUs, by their places in the list of GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pair {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) peer_access: bool,
    /// Atomics work across: NVLink.
    pub(crate) nvlink: bool,
}

/// NCCL's library, or why there is none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Library {
    pub(crate) path: Option<String>,
    /// As NCCL counts: 2.28.9 is 22809.
    pub(crate) version: Option<u32>,
    pub(crate) fault: Option<String>,
}

/// Rates in GB/s.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measured {
    /// Bytes read and written a second by a copy within each GPU.
    pub(crate) memory: Vec<Rate>,
    pub(crate) pairs: Vec<PairRates>,
}

/// A rate, or why there is none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Rate {
    GbPerS(f64),
    Fault(String),
}

/// From one GPU to another, each in a process of its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct PairRates {
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// By the copy engine of the receiver, from memory that the other process exported.
    pub(crate) copy: Rate,
    /// By NCCL.
    pub(crate) nccl: Rate,
}

impl Facts {
    /// Looks at this machine. Measures nothing.
    pub(crate) fn gather() -> Self {
        let mut driver = driver();
        let (gpus, pairs) = match gpus() {
            Ok(found) => found,
            Err(error) => {
                driver.fault = Some(error.to_string());
                Default::default()
            }
        };
        let nccl = match Nccl::load() {
            Ok(nccl) => {
                Library { path: Some(nccl.path().display().to_string()), version: Some(nccl.version()), fault: None }
            }
            Err(error) => Library { fault: Some(error.to_string()), ..Library::default() },
        };
        Self { host: host(), limits: limits(), environment: environment(), driver, gpus, pairs, nccl, measured: None }
    }
}

fn text(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn host() -> Host {
    let inode = |namespace: &str| fs::metadata(format!("/proc/self/ns/{namespace}")).ok().map(|link| link.ino());
    Host {
        hostname: text("/proc/sys/kernel/hostname"),
        boot_id: text("/proc/sys/kernel/random/boot_id"),
        container: container(),
        network_namespace: inode("net"),
        ipc_namespace: inode("ipc"),
        shm_device: fs::metadata("/dev/shm").ok().map(|shm| shm.dev()),
    }
}

fn container() -> Option<String> {
    let signs = [("docker", "/.dockerenv"), ("podman", "/run/.containerenv")];
    if std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() {
        return Some("kubernetes".into());
    }
    let sign = signs.iter().find(|(_, path)| Path::new(path).exists()).map(|(name, _)| (*name).to_owned());
    sign.or_else(|| std::env::var("container").ok())
}

fn limits() -> Limits {
    let status = text("/proc/self/status").unwrap_or_default();
    let locked = rlimit::getrlimit(rlimit::Resource::MEMLOCK).map_or(rlimit::INFINITY, |(soft, _)| soft);
    Limits {
        shm_bytes: text("/proc/self/mountinfo").as_deref().and_then(shm_size),
        memory_bytes: text("/sys/fs/cgroup/memory.max").and_then(|max| max.parse().ok()),
        locked_bytes: (locked != rlimit::INFINITY).then_some(locked),
        filtered: field(&status, "Seccomp").is_some_and(|mode| mode != "0"),
        sys_nice: field(&status, "CapBnd").is_none_or(may_be_nice),
    }
}

/// The value of a field of /proc/self/status.
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// Whether CAP_SYS_NICE, number 23, is in a set of capabilities.
fn may_be_nice(capabilities: &str) -> bool {
    u64::from_str_radix(capabilities, 16).is_ok_and(|set| set >> 23 & 1 == 1)
}

/// The stated size of /dev/shm among the mounts of /proc/self/mountinfo; the last one mounted there counts.
fn shm_size(mounts: &str) -> Option<u64> {
    let mount = mounts.lines().rev().find(|line| line.split(' ').nth(4) == Some("/dev/shm"))?;
    let size = mount.rsplit([' ', ',']).find_map(|option| option.strip_prefix("size="))?;
    let digits = size.trim_end_matches(['k', 'm', 'g']);
    let unit = match size.as_bytes().last() {
        Some(b'k') => 1 << 10,
        Some(b'm') => 1 << 20,
        Some(b'g') => 1 << 30,
        _ => 1,
    };
    digits.parse::<u64>().ok().map(|size| size * unit)
}

fn environment() -> BTreeMap<String, String> {
    const NAMES: [&str; 4] = ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "CUDA_DEVICE_ORDER"];
    std::env::vars().filter(|(name, _)| name.starts_with("NCCL_") || NAMES.contains(&name.as_str())).collect()
}

fn driver() -> Driver {
    let entries = |path: &str| fs::read_dir(path).into_iter().flatten().flatten();
    let is_gpu = |name: &str| name.strip_prefix("nvidia").is_some_and(|digits| digits.parse::<u32>().is_ok());
    Driver {
        module: text("/proc/driver/nvidia/version").as_deref().and_then(module_version),
        cuda: device::driver_version().ok(),
        fault: None,
        gpus_in_machine: entries("/sys/bus/pci/devices").filter(|entry| is_nvidia_gpu(&entry.path())).count(),
        gpus_in_container: entries("/dev").filter(|entry| entry.file_name().to_str().is_some_and(is_gpu)).count(),
    }
}

/// Vendor 10de, and a class of display controllers: 0300 or 0302.
fn is_nvidia_gpu(device: &Path) -> bool {
    let read = |file: &str| fs::read_to_string(device.join(file)).unwrap_or_default();
    read("vendor").trim() == "0x10de" && read("class").starts_with("0x030")
}

/// The version in /proc/driver/nvidia/version: the first word of digits and dots.
fn module_version(text: &str) -> Option<String> {
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|char| char.is_ascii_digit() || char == '.');
    text.split_whitespace().find(is_version).map(str::to_owned)
}

fn gpus() -> Result<(Vec<Gpu>, Vec<Pair>), DeviceError> {
    let devices = (0..device::probe()?).map(Device::open).collect::<Result<Vec<_>, _>>()?;
    let mut gpus = Vec::new();
    for device in &devices {
        let (free, total) = device.memory_bytes()?;
        gpus.push(Gpu {
            name: device.name()?,
            pci_address: device.pci_address()?,
            capability: device.compute_capability()?,
            memory_bytes: total as u64,
            free_bytes: free as u64,
        });
    }
    let mut pairs = Vec::new();
    for (from, device) in devices.iter().enumerate() {
        for (to, peer) in devices.iter().enumerate().filter(|(to, _)| *to != from) {
            let link = device.link_to(peer)?;
            pairs.push(Pair { from, to, peer_access: link.peer_access, nvlink: link.native_atomics });
        }
    }
    Ok((gpus, pairs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_shared_memory_is_read_from_the_mounts() {
        let docker = "700 687 0:69 / /dev/mqueue rw - mqueue mqueue rw\n\
                      701 687 0:70 / /dev/shm rw,nosuid,nodev,noexec,relatime - tmpfs shm rw,size=65536k,inode64";
        assert_eq!(shm_size(docker), Some(64 << 20));
        let pod = "1 2 0:3 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=8589934592";
        assert_eq!(shm_size(pod), Some(8 << 30));
        assert_eq!(shm_size("1 2 0:3 / /dev/shm rw,nosuid,nodev - tmpfs tmpfs rw,inode64"), None);
        assert_eq!(shm_size("1 2 0:3 / / rw - overlay overlay rw,size=1g"), None);
    }

    #[test]
    fn capabilities_and_fields_are_read_from_the_status() {
        let status = "Name:\tdamask\nCapBnd:\t00000000a80425fb\nSeccomp:\t2\nSeccomp_filters:\t1";
        assert_eq!(field(status, "Seccomp"), Some("2"));
        assert_eq!(field(status, "CapBnd"), Some("00000000a80425fb"), "Docker's default");
        assert!(!may_be_nice("00000000a80425fb"));
        assert!(may_be_nice("00000000a88425fb"));
        assert!(may_be_nice("000001ffffffffff"));
    }

    #[test]
    fn the_module_tells_its_version() {
        let text =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12.2.0";
        assert_eq!(module_version(text).as_deref(), Some("580.95.05"));
        assert_eq!(module_version("nothing"), None);
    }

    #[test]
    fn gathering_never_fails_and_survives_json() {
        let facts = Facts::gather();
        assert_eq!(facts.gpus.is_empty(), facts.driver.fault.is_some());
        let json = serde_json::to_string(&facts).expect("plain data");
        let back: Facts = serde_json::from_str(&json).expect("what was written");
        assert_eq!((back.host, back.limits, back.nccl), (facts.host, facts.limits, facts.nccl));
    }
}
