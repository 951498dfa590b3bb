//! Made-up machines.

use super::*;
use crate::doctor::facts::{Driver, Gpu, Host, Library, Limits, Measured, Pair};

const EXPECTED: Expectations = Expectations { gpus: 0, pair_gb_per_s: 100.0 };

/// Two H200 in a container as the compose file makes it.
fn well() -> Facts {
    let gpu = |address: &str| Gpu {
        name: "NVIDIA H200".into(),
        pci_address: address.into(),
        capability: (9, 0),
        memory_bytes: 150_000_000_000,
        free_bytes: 149_000_000_000,
    };
    let pair = |from, to| Pair { from, to, peer_access: true, nvlink: true };
    let rates = |from, to| PairRates { from, to, copy: Rate::GbPerS(390.0), nccl: Rate::GbPerS(350.0) };
    let environment = [("NCCL_HOSTID", "damask-node"), ("NCCL_SOCKET_IFNAME", "lo"), ("NCCL_P2P_LEVEL", "NVL")];
    Facts {
        host: Host {
            hostname: Some("a1b2".into()),
            boot_id: Some("boot".into()),
            container: Some("docker".into()),
            network_namespace: Some(1),
            ipc_namespace: Some(2),
            shm_device: Some(70),
        },
        limits: Limits {
            shm_bytes: Some(8 << 30),
            memory_bytes: None,
            locked_bytes: None,
            filtered: true,
            sys_nice: true,
        },
        environment: environment.map(|(name, value)| (name.into(), value.into())).into(),
        driver: Driver {
            module: Some("580.95.05".into()),
            cuda: Some((13, 0)),
            fault: None,
            gpus_in_machine: 2,
            gpus_in_container: 2,
        },
        gpus: vec![gpu("0000:19:00.0"), gpu("0000:3b:00.0")],
        pairs: vec![pair(0, 1), pair(1, 0)],
        nccl: Library { path: Some("/usr/local/lib/libnccl.so.2".into()), version: Some(22_809), fault: None },
        measured: Some(Measured {
            memory: vec![Rate::GbPerS(4100.0), Rate::GbPerS(4090.0)],
            pairs: vec![rates(0, 1), rates(1, 0)],
        }),
    }
}

/// What is found when `spoil` has changed one thing about a machine that is well.
fn found(spoil: impl FnOnce(&mut Facts)) -> Vec<(Level, &'static str)> {
    let mut facts = well();
    spoil(&mut facts);
    let findings = judge(&facts, EXPECTED);
    let named = |finding: &Finding| !finding.text.is_empty() && finding.compose.is_some() && finding.helm.is_some();
    assert!(findings.iter().all(named), "each names the setting to change: {findings:?}");
    findings.iter().map(|finding| (finding.level, finding.code)).collect()
}

#[test]
fn a_machine_that_is_well_has_no_findings() {
    assert_eq!(found(|_| ()), []);
    assert_eq!(compare(&well(), &well()), []);
}

#[test]
fn without_a_gpu_there_is_one_note() {
    let none = |facts: &mut Facts| {
        facts.gpus.clear();
        facts.pairs.clear();
        facts.measured = None;
        facts.nccl = Library { fault: Some("no NCCL library".into()), ..Library::default() };
        facts.driver = Driver { fault: Some("libcuda.so.1 is not installed".into()), ..Driver::default() };
    };
    assert_eq!(found(none), [(Level::Note, "no_gpu")]);
    let mut facts = well();
    none(&mut facts);
    let expected = Expectations { gpus: 2, ..EXPECTED };
    assert_eq!(judge(&facts, expected)[0].level, Level::Fault, "unless one is expected");
    facts.driver.gpus_in_container = 2;
    assert_eq!(judge(&facts, EXPECTED)[0].level, Level::Fault, "or there is one that does not work");
}

#[test]
fn driver_and_gpus() {
    let old = |facts: &mut Facts| {
        facts.driver.cuda = Some((12, 8));
        facts.driver.fault = Some("the driver supports CUDA 12.8".into());
        facts.gpus.clear();
    };
    assert_eq!(found(old), [(Level::Fault, "driver_too_old")]);
    assert_eq!(found(|facts| facts.gpus[1].capability = (8, 0)), [(Level::Fault, "wrong_gpu")]);
    assert_eq!(found(|facts| facts.driver.gpus_in_machine = 8), [(Level::Warning, "hidden_gpus")]);
    let given = |facts: &mut Facts| drop(facts.environment.insert("NVIDIA_VISIBLE_DEVICES".into(), "0,1".into()));
    assert_eq!(found(given), [], "which are all that there are");
    let bus_hidden = |facts: &mut Facts| {
        given(facts);
        facts.driver.gpus_in_machine = 0;
    };
    assert_eq!(found(bus_hidden), [(Level::Warning, "hidden_gpus")]);
    let chosen = |facts: &mut Facts| {
        facts.environment.insert("CUDA_VISIBLE_DEVICES".into(), "0,1".into());
        (facts.driver.gpus_in_machine, facts.driver.gpus_in_container) = (8, 8);
    };
    assert_eq!(found(chosen), [(Level::Note, "partial_view")]);
    let few = judge(&well(), Expectations { gpus: 8, ..EXPECTED });
    assert_eq!((few.len(), few[0].code), (1, "too_few_gpus"));
}

#[test]
fn links_and_what_is_measured_over_them() {
    let cut = |facts: &mut Facts| facts.pairs.iter_mut().for_each(|pair| pair.peer_access = false);
    assert_eq!(found(cut), [(Level::Fault, "no_peer_access")], "once for a pair");
    let pcie = |facts: &mut Facts| {
        facts.pairs.iter_mut().for_each(|pair| pair.nvlink = false);
        facts.measured.as_mut().expect("measured").pairs[0].nccl = Rate::GbPerS(40.0);
    };
    assert_eq!(found(pcie), [(Level::Warning, "no_nvlink"), (Level::Warning, "slow_pair")]);
    let change = |rate: Rate| move |facts: &mut Facts| facts.measured.as_mut().expect("measured").pairs[1].nccl = rate;
    assert_eq!(found(change(Rate::GbPerS(9.0))), [(Level::Fault, "slow_pair")], "NVLink that is not used");
    assert_eq!(found(change(Rate::Fault("timed out".into()))), [(Level::Fault, "pair_fails")]);
    let slow = |facts: &mut Facts| facts.measured.as_mut().expect("measured").memory[0] = Rate::GbPerS(1000.0);
    assert_eq!(found(slow), [(Level::Warning, "slow_memory")]);
}

#[test]
fn nccl_and_its_variables() {
    let missing = |facts: &mut Facts| facts.nccl = Library { fault: Some("none".into()), ..Library::default() };
    assert_eq!(found(missing), [(Level::Fault, "no_nccl")]);
    let alone = |facts: &mut Facts| {
        missing(facts);
        facts.gpus.truncate(1);
        facts.pairs.clear();
        facts.measured = None;
    };
    assert_eq!(found(alone), [(Level::Note, "no_nccl")], "one GPU has nobody to talk to");
    let set = |name: &'static str, value: &'static str| {
        move |facts: &mut Facts| drop(facts.environment.insert(name.into(), value.into()))
    };
    assert_eq!(found(set("NCCL_P2P_DISABLE", "1")), [(Level::Fault, "nccl_restricted")]);
    assert_eq!(found(set("NCCL_SHM_DISABLE", "1")), [(Level::Fault, "nccl_restricted")]);
    assert_eq!(found(set("NCCL_P2P_LEVEL", "LOC")), [(Level::Fault, "nccl_restricted")]);
    assert_eq!(found(set("NCCL_IPC_USE_ABSTRACT_SOCKET", "0")), [(Level::Warning, "nccl_too_old")]);
}

#[test]
fn the_container() {
    let unset = |name: &'static str| move |facts: &mut Facts| drop(facts.environment.remove(name));
    assert_eq!(found(unset("NCCL_HOSTID")), [(Level::Warning, "no_host_id")]);
    assert_eq!(found(unset("NCCL_SOCKET_IFNAME")), [(Level::Note, "no_interface")]);
    let bare = |facts: &mut Facts| {
        facts.host.container = None;
        facts.environment.clear();
    };
    assert_eq!(found(bare), [], "outside of containers processes are neighbours anyway");
    assert_eq!(found(|facts| facts.limits.sys_nice = false), [(Level::Warning, "no_sys_nice")]);
    assert_eq!(found(|facts| facts.limits.shm_bytes = Some(64 << 20)), [(Level::Warning, "small_shm")]);
    let both = |facts: &mut Facts| {
        facts.limits.shm_bytes = Some(64 << 20);
        facts.limits.sys_nice = false;
    };
    assert_eq!(
        found(both),
        [(Level::Fault, "small_shm"), (Level::Warning, "no_sys_nice")],
        "buffers have to lie there"
    );
    assert_eq!(found(|facts| facts.limits.memory_bytes = Some(4 << 30)), [(Level::Warning, "shm_above_memory")]);
    assert_eq!(found(|facts| facts.limits.locked_bytes = Some(64 << 10)), [(Level::Warning, "small_memlock")]);
    let gone = |facts: &mut Facts| (facts.host.shm_device, facts.limits.shm_bytes) = (None, None);
    assert_eq!(found(gone), [(Level::Fault, "no_shm")]);
}

#[test]
fn two_containers_must_be_neighbours() {
    let codes = |spoil: fn(&mut Facts)| {
        let mut other = well();
        spoil(&mut other);
        compare(&well(), &other).iter().map(|finding| finding.code).collect::<Vec<_>>()
    };
    assert_eq!(codes(|other| other.host.hostname = Some("another".into())), [""; 0], "NCCL_HOSTID replaces it");
    assert_eq!(codes(|other| drop(other.environment.remove("NCCL_HOSTID"))), ["host_id_differs"]);
    assert_eq!(codes(|other| other.host.shm_device = Some(71)), ["shm_differs"]);
    assert_eq!(codes(|other| other.host.network_namespace = Some(9)), ["network_differs"]);
    assert_eq!(codes(|other| other.driver.gpus_in_container = 1), ["gpus_differ"]);
    assert_eq!(codes(|other| other.nccl.version = Some(23_007)), ["nccl_differs"]);
}
