//! Facts and findings as text.

use std::fmt::Write;

use serde::Deserialize;

use super::facts::{Facts, Rate};
use super::judgement::{Finding, Level, NCCL_NAMED_SOCKETS};

/// What another `damask doctor --json` printed, as far as it is read again.
#[derive(Debug, Deserialize)]
pub(crate) struct Report {
    pub(crate) facts: Facts,
}

/// The report for people.
pub(crate) fn text(facts: &Facts, findings: &[Finding]) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut out, facts, findings);
    out
}

fn write(out: &mut String, facts: &Facts, findings: &[Finding]) -> std::fmt::Result {
    let said = |text: &Option<String>| text.clone().unwrap_or_else(|| "none".into());
    let driver = &facts.driver;
    let cuda = driver.cuda.map_or_else(|| "none".into(), |(major, minor)| format!("{major}.{minor}"));
    writeln!(out, "driver   module {}, CUDA {cuda}", said(&driver.module))?;
    let (here, machine) = (driver.gpus_in_container, driver.gpus_in_machine);
    writeln!(out, "GPUs     {} visible, {here} of {machine} in this container", facts.gpus.len())?;
    for (idx, gpu) in facts.gpus.iter().enumerate() {
        let ((major, minor), gb) = (gpu.capability, |bytes: u64| bytes as f64 / 1e9);
        let (free, total) = (gb(gpu.free_bytes), gb(gpu.memory_bytes));
        writeln!(
            out,
            "  {idx}  {} {}  capability {major}.{minor}  {free:.0} of {total:.0} GB free",
            gpu.pci_address, gpu.name
        )?;
    }
    nccl(out, facts)?;
    host(out, facts)?;
    matrix(out, facts)?;
    writeln!(out)?;
    if findings.is_empty() {
        writeln!(out, "Nothing is wrong.")?;
    }
    for finding in findings {
        let level = match finding.level {
            Level::Fault => "FAULT",
            Level::Warning => "warning",
            Level::Note => "note",
        };
        writeln!(out, "{level}: {} [{}]", finding.text, finding.code)?;
        let settings = [("compose", finding.compose), ("helm", finding.helm)];
        for (name, setting) in settings.into_iter().filter_map(|(name, setting)| Some((name, setting?))) {
            writeln!(out, "  {name}: {setting}")?;
        }
    }
    Ok(())
}

fn nccl(out: &mut String, facts: &Facts) -> std::fmt::Result {
    match (facts.nccl.version, &facts.nccl.path) {
        (Some(version), Some(path)) => {
            let gated = if version >= NCCL_NAMED_SOCKETS {
                "named sockets, put and signal"
            } else {
                "neither named sockets nor put and signal (2.29)"
            };
            let (major, minor, patch) = (version / 10_000, version / 100 % 100, version % 100);
            writeln!(out, "NCCL     {major}.{minor}.{patch} at {path}; has {gated}")
        }
        _ => writeln!(out, "NCCL     none"),
    }
}

fn host(out: &mut String, facts: &Facts) -> std::fmt::Result {
    let (host, limits) = (&facts.host, &facts.limits);
    let number = |value: Option<u64>| value.map_or_else(|| "none".into(), |value| value.to_string());
    let mib = |bytes: Option<u64>, without: &str| {
        bytes.map_or_else(|| without.into(), |bytes| format!("{} MiB", bytes >> 20))
    };
    let id = facts.environment.get("NCCL_HOSTID").cloned();
    let id = id.unwrap_or_else(|| {
        let part = |part: &Option<String>| part.clone().unwrap_or_default();
        format!("{} + {}", part(&host.hostname), part(&host.boot_id))
    });
    writeln!(out, "host     {id}; container: {}", host.container.as_deref().unwrap_or("no"))?;
    let (network, ipc) = (number(host.network_namespace), number(host.ipc_namespace));
    writeln!(
        out,
        "shared   /dev/shm device {} of {}, network namespace {network}, IPC namespace {ipc}",
        number(host.shm_device),
        mib(limits.shm_bytes, "half of the memory")
    )?;
    let nice = if limits.sys_nice { "granted" } else { "not granted" };
    let filter = if limits.filtered { "filtered" } else { "not filtered" };
    writeln!(
        out,
        "limits   memory {}, locked {}, system calls {filter}, SYS_NICE {nice}",
        mib(limits.memory_bytes, "any"),
        mib(limits.locked_bytes, "any")
    )?;
    for (name, value) in &facts.environment {
        writeln!(out, "         {name}={value}")?;
    }
    Ok(())
}

/// One row for each GPU: its memory's rate, and to each other one what was measured, or what the driver says of the link.
fn matrix(out: &mut String, facts: &Facts) -> std::fmt::Result {
    let rate = |rate: &Rate| match rate {
        Rate::GbPerS(rate) => format!("{rate:.0}"),
        Rate::Fault(_) => "fails".into(),
    };
    if facts.gpus.is_empty() {
        return Ok(());
    }
    let measured = facts.measured.as_ref();
    writeln!(
        out,
        "links    from row to column: {}",
        if measured.is_some() {
            "GB/s by copy engine / by NCCL; within one: read and written by a copy"
        } else {
            "not measured"
        }
    )?;
    for from in 0..facts.gpus.len() {
        write!(out, "  {from} ")?;
        for to in 0..facts.gpus.len() {
            let pair =
                measured.and_then(|measured| measured.pairs.iter().find(|pair| (pair.from, pair.to) == (from, to)));
            let link = facts.pairs.iter().find(|pair| (pair.from, pair.to) == (from, to));
            let cell = match (pair, link, measured) {
                (Some(pair), ..) => format!("{}/{}", rate(&pair.copy), rate(&pair.nccl)),
                (None, Some(link), _) if link.nvlink => "NVLink".into(),
                (None, Some(link), _) if link.peer_access => "PCIe".into(),
                (None, Some(_), _) => "none".into(),
                (None, None, Some(measured)) => measured.memory.get(from).map_or_else(String::new, rate),
                (None, None, None) => "-".into(),
            };
            write!(out, " {cell:>9}")?;
        }
        writeln!(out)?;
    }
    Ok(())
}
