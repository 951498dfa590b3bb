//! Which workers a stack has, and which GPUs each of them.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use serde::Deserialize;
use serde_json::{Map, Value};
use types::{ParallelLayout, Role};

/// Share of a GPU's memory for a worker that has it to itself, and for all workers together on one that is shared.
const SHARE_ALONE: f64 = 0.9;
const SHARE_TOGETHER: f64 = 0.94;

/// One worker of a stack.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct WorkerPlan {
    /// What it does.
    pub(crate) role: Role,
    /// Unique: `prefill`, `prefill-1`, `decode`, ...
    pub(crate) name: String,
    /// Degrees of parallelism.
    pub(crate) layout: ParallelLayout,
    /// GPUs, as this process counts them; empty on the CPU. Fewer than ranks are shared by ranks, evenly.
    pub(crate) devices: Vec<u32>,
    /// Settings of its own, over those of the stack.
    pub(crate) config: Map<String, Value>,
}

/// All workers of a stack, prefill before decode.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Fleet {
    /// The workers.
    pub(crate) workers: Vec<WorkerPlan>,
}

/// Degrees that were asked for on the command line.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Degrees {
    /// `--prefill-tp`.
    pub(crate) prefill_tp: Option<u32>,
    /// `--decode-tp`.
    pub(crate) decode_tp: Option<u32>,
    /// `--decode-dp`.
    pub(crate) decode_dp: Option<u32>,
    /// `--decode-ep`.
    pub(crate) decode_ep: Option<u32>,
}

impl Degrees {
    fn is_empty(self) -> bool {
        self == Self::default()
    }

    /// The layouts of prefill and decode, from these and from defaults.
    fn layouts(self, prefill_tp: u32, decode_tp: u32) -> (ParallelLayout, ParallelLayout) {
        let tp = self.decode_tp.unwrap_or(decode_tp);
        let dp = self.decode_dp.unwrap_or(1);
        let decode = ParallelLayout { tp, ep: self.decode_ep.unwrap_or(tp.saturating_mul(dp)), dp };
        (ParallelLayout::tp(self.prefill_tp.unwrap_or(prefill_tp)), decode)
    }
}

impl Fleet {
    /// One worker of each role on the CPU, ranks as threads.
    pub(crate) fn on_cpu(degrees: Degrees) -> Self {
        let (prefill, decode) = degrees.layouts(2, 4);
        Self::pair(prefill, Vec::new(), decode, Vec::new())
    }

    /// The layout for so many GPUs: one shared by both workers; of two, one for each; of four, prefill TP2 and decode EP2 TP2; of eight, prefill
    /// TP4 and decode EP4 TP4. Degrees that are given win; then workers that do not fit side by side share the first GPUs.
    ///
    /// # Errors
    /// A degree that takes more GPUs than there are.
    pub(crate) fn on_gpus(gpus: u32, degrees: Degrees) -> anyhow::Result<Self> {
        ensure!(gpus > 0, "there is no gpu");
        let degree = match gpus {
            1..4 => 1,
            4..8 => 2,
            _ => 4,
        };
        let (prefill, decode) = degrees.layouts(degree, degree);
        for (name, layout) in [("prefill", prefill), ("decode", decode)] {
            let ranks = layout.ranks();
            ensure!(ranks <= gpus, "{name} with {layout} takes {ranks} gpus, there are {gpus}");
        }
        let first = if prefill.ranks() + decode.ranks() <= gpus { prefill.ranks() } else { 0 };
        let devices = |first: u32, layout: ParallelLayout| (first..first + layout.ranks()).collect();
        Ok(Self::pair(prefill, devices(0, prefill), decode, devices(first, decode)))
    }

    fn pair(prefill: ParallelLayout, on: Vec<u32>, decode: ParallelLayout, decode_on: Vec<u32>) -> Self {
        let worker = |role: Role, layout, devices| WorkerPlan {
            role,
            name: role.to_string(),
            layout,
            devices,
            config: Map::new(),
        };
        Self { workers: vec![worker(Role::Prefill, prefill, on), worker(Role::Decode, decode, decode_on)] }
    }

    /// Reads a layout file. Workers without `devices` take the next GPUs that no worker before them has; `gpus` is 0 on the CPU.
    ///
    /// # Errors
    /// What is wrong with the file, or does not fit the GPUs that there are.
    pub(crate) fn read(file: &Path, gpus: u32, degrees: Degrees) -> anyhow::Result<Self> {
        ensure!(
            degrees.is_empty(),
            "--layout says it all: --prefill-tp, --decode-tp, --decode-dp and --decode-ep do not go with it"
        );
        let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        Self::parse(&text, gpus).with_context(|| format!("{}", file.display()))
    }

    fn parse(text: &str, gpus: u32) -> anyhow::Result<Self> {
        let file: LayoutFile = serde_yaml::from_str(text)?;
        ensure!(!file.prefill.is_empty(), "prefill: at least one worker is needed");
        ensure!(!file.decode.is_empty(), "decode: at least one worker is needed");
        let mut next = 0;
        let mut workers = Vec::new();
        for (role, entries) in [(Role::Prefill, file.prefill), (Role::Decode, file.decode)] {
            for (i, entry) in entries.into_iter().enumerate() {
                let name = if i == 0 { role.to_string() } else { format!("{role}-{i}") };
                let worker = entry.plan(role, name.clone(), gpus, &mut next);
                workers.push(worker.with_context(|| name)?);
            }
        }
        Ok(Self { workers })
    }

    /// Workers of one role.
    pub(crate) fn of(&self, role: Role) -> impl Iterator<Item = &WorkerPlan> {
        self.workers.iter().filter(move |worker| worker.role == role)
    }

    /// Whether another rank, of the same worker or not, has one of this worker's GPUs.
    pub(crate) fn shares_gpus(&self, worker: &WorkerPlan) -> bool {
        worker.devices.iter().any(|device| self.ranks_on(*device) > 1)
    }

    /// The share of each of its GPUs' memory that a rank of this worker may take.
    pub(crate) fn memory_share(&self, worker: &WorkerPlan) -> f64 {
        let most = worker.devices.iter().map(|device| self.ranks_on(*device)).max().unwrap_or(1);
        if most <= 1 { SHARE_ALONE } else { SHARE_TOGETHER / f64::from(most) }
    }

    fn ranks_on(&self, device: u32) -> u32 {
        let ranks = |worker: &WorkerPlan| worker.layout.ranks() / worker.devices.len() as u32;
        self.workers.iter().filter(|worker| worker.devices.contains(&device)).map(ranks).sum()
    }
}

impl std::fmt::Display for Fleet {
    /// `prefill TP4 on gpus 0 1 2 3, decode EP4 DP1 TP4 on gpus 4 5 6 7`
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, WorkerPlan { role, name, layout, devices, .. }) in self.workers.iter().enumerate() {
            let separator = if i == 0 { "" } else { ", " };
            match role {
                Role::Prefill => write!(f, "{separator}{name} TP{}", layout.tp)?,
                Role::Decode => write!(f, "{separator}{name} {layout}")?,
            }
            if !devices.is_empty() {
                let list: Vec<String> = devices.iter().map(u32::to_string).collect();
                write!(f, " on gpu{} {}", if devices.len() == 1 { "" } else { "s" }, list.join(" "))?;
            }
        }
        Ok(())
    }
}

/// The file of `--layout`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LayoutFile {
    prefill: Vec<Entry>,
    decode: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    tp: u32,
    #[serde(default)]
    ep: Option<u32>,
    #[serde(default)]
    dp: Option<u32>,
    #[serde(default)]
    devices: Option<Vec<u32>>,
    #[serde(default)]
    config: Map<String, Value>,
}

impl Entry {
    fn plan(self, role: Role, name: String, gpus: u32, next: &mut u32) -> anyhow::Result<WorkerPlan> {
        let dp = self.dp.unwrap_or(1);
        let every_rank = if role == Role::Prefill { 1 } else { self.tp * dp };
        let layout = ParallelLayout { tp: self.tp, ep: self.ep.unwrap_or(every_rank), dp };
        let ranks = layout.ranks();
        ensure!(ranks > 0, "tp and dp are 1 at least");
        ensure!(
            layout.ep > 0 && ranks.is_multiple_of(layout.ep),
            "ep is {}, it must divide tp x dp ({ranks})",
            layout.ep
        );
        ensure!(
            role == Role::Decode || (layout.ep == 1 && dp == 1),
            "prefill is tensor-parallel only: ep and dp are 1"
        );
        let devices = match (gpus, self.devices) {
            (0, _) => Vec::new(),
            (_, Some(devices)) => devices,
            (_, None) => {
                *next += ranks;
                (*next - ranks..*next).collect()
            }
        };
        if gpus > 0 {
            ensure!(!devices.is_empty(), "devices: at least one is needed");
            if let Some(beyond) = devices.iter().find(|device| **device >= gpus) {
                bail!("devices: there is no gpu {beyond}, the last is {}", gpus - 1);
            }
            let num_devices = devices.len() as u32;
            let fits = ranks >= num_devices && ranks.is_multiple_of(num_devices);
            ensure!(fits, "devices: {ranks} ranks do not spread evenly over {num_devices} gpus");
            *next = (*next).max(devices.iter().max().map_or(0, |device| device + 1));
        }
        Ok(WorkerPlan { role, name, layout, devices, config: self.config })
    }
}

/// `CUDA_VISIBLE_DEVICES` of a worker on `devices`, counted within `visible`, which is this process's own.
///
/// # Errors
/// When this process's own names fewer GPUs than were counted.
pub(crate) fn visible_devices(devices: &[u32], visible: Option<&str>) -> anyhow::Result<String> {
    let own: Option<Vec<&str>> = visible.map(|list| list.split(',').map(str::trim).collect());
    let name = |device: &u32| match &own {
        None => Ok(device.to_string()),
        Some(own) => own
            .get(*device as usize)
            .map(|name| (*name).to_owned())
            .with_context(|| format!("gpu {device} is not among CUDA_VISIBLE_DEVICES={}", visible.unwrap_or_default())),
    };
    let names: anyhow::Result<Vec<String>> = devices.iter().map(name).collect();
    Ok(names?.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(fleet: &Fleet) -> Vec<Vec<u32>> {
        fleet.workers.iter().map(|worker| worker.devices.clone()).collect()
    }

    #[test]
    fn a_layout_for_every_number_of_gpus() {
        let none = Degrees::default();
        for (gpus, text) in [
            (1, "prefill TP1 on gpu 0, decode EP1 DP1 TP1 on gpu 0"),
            (2, "prefill TP1 on gpu 0, decode EP1 DP1 TP1 on gpu 1"),
            (3, "prefill TP1 on gpu 0, decode EP1 DP1 TP1 on gpu 1"),
            (4, "prefill TP2 on gpus 0 1, decode EP2 DP1 TP2 on gpus 2 3"),
            (8, "prefill TP4 on gpus 0 1 2 3, decode EP4 DP1 TP4 on gpus 4 5 6 7"),
        ] {
            assert_eq!(Fleet::on_gpus(gpus, none).unwrap().to_string(), text);
        }
        assert_eq!(Fleet::on_cpu(none).to_string(), "prefill TP2, decode EP4 DP1 TP4");
        let degrees = Degrees { decode_tp: Some(1), decode_dp: Some(2), ..none };
        assert_eq!(Fleet::on_cpu(degrees).to_string(), "prefill TP2, decode EP2 DP2 TP1");
        let on_gpus = Fleet::on_gpus(4, degrees).unwrap().to_string();
        assert_eq!(on_gpus, "prefill TP2 on gpus 0 1, decode EP2 DP2 TP1 on gpus 2 3");
    }

    #[test]
    fn degrees_that_are_given_win_and_share_gpus_only_if_they_must() {
        let degrees = Degrees { prefill_tp: Some(2), decode_tp: Some(2), ..Degrees::default() };
        assert_eq!(devices(&Fleet::on_gpus(2, degrees).unwrap()), [[0, 1], [0, 1]]);
        assert_eq!(devices(&Fleet::on_gpus(4, degrees).unwrap()), [[0, 1], [2, 3]]);
        let error = Fleet::on_gpus(1, degrees).unwrap_err().to_string();
        assert_eq!(error, "prefill with EP1 DP1 TP2 takes 2 gpus, there are 1");
        assert!(Fleet::on_gpus(0, degrees).is_err());
    }

    #[test]
    fn memory_is_shared_by_all_ranks_of_a_gpu() {
        let shares =
            |fleet: &Fleet| -> Vec<f64> { fleet.workers.iter().map(|worker| fleet.memory_share(worker)).collect() };
        assert_eq!(shares(&Fleet::on_gpus(1, Degrees::default()).unwrap()), [0.47, 0.47]);
        assert_eq!(shares(&Fleet::on_gpus(2, Degrees::default()).unwrap()), [0.9, 0.9]);
        let crowded =
            Fleet::parse("prefill: [{tp: 2, devices: [0, 1]}]\ndecode: [{tp: 4, devices: [0, 1]}]", 2).unwrap();
        assert_eq!(shares(&crowded), [SHARE_TOGETHER / 3.0; 2]);
        assert!(crowded.shares_gpus(&crowded.workers[0]));
    }

    #[test]
    fn a_file_names_any_layout() {
        let text = "
            prefill: [{tp: 2}, {tp: 2, config: {chunk_tokens: 4096}}]
            decode: [{tp: 2, dp: 2, devices: [7, 6, 5, 4]}]";
        let fleet = Fleet::parse(text, 8).unwrap();
        let text = "prefill TP2 on gpus 0 1, prefill-1 TP2 on gpus 2 3, decode EP4 DP2 TP2 on gpus 7 6 5 4";
        assert_eq!(fleet.to_string(), text);
        assert_eq!(fleet.workers[1].config["chunk_tokens"], 4096);
        let on_cpu = Fleet::parse("prefill: [{tp: 1}]\ndecode: [{tp: 4, ep: 2, devices: [0, 1, 2, 3]}]", 0).unwrap();
        assert_eq!(on_cpu.to_string(), "prefill TP1, decode EP2 DP1 TP4");
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_worker_and_the_reason() {
        for (text, reason) in [
            ("prefill: []\ndecode: [{tp: 1}]", "prefill: at least one worker"),
            ("prefill: [{tp: 1}]", "missing field `decode`"),
            ("prefill: [{tp: 1, pp: 2}]\ndecode: [{tp: 1}]", "unknown field `pp`"),
            ("prefill: [{tp: 2, ep: 2}]\ndecode: [{tp: 1}]", "prefill: prefill is tensor-parallel only"),
            ("prefill: [{tp: 1}]\ndecode: [{tp: 4, ep: 3}]", "decode: ep is 3, it must divide tp x dp (4)"),
            (
                "prefill: [{tp: 1, devices: [2]}]\ndecode: [{tp: 1}]",
                "prefill: devices: there is no gpu 2, the last is 1",
            ),
            ("prefill: [{tp: 1}]\ndecode: [{tp: 2}]", "decode: devices: there is no gpu 2"),
            ("prefill: [{tp: 1, devices: [0, 1]}]\ndecode: [{tp: 1}]", "1 ranks do not spread evenly over 2 gpus"),
        ] {
            let error = format!("{:#}", Fleet::parse(text, 2).unwrap_err());
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn gpus_are_counted_within_those_of_this_process() {
        assert_eq!(visible_devices(&[0, 2], None).unwrap(), "0,2");
        assert_eq!(visible_devices(&[0, 2], Some("4, 5,GPU-abc")).unwrap(), "4,GPU-abc");
        assert!(visible_devices(&[3], Some("4,5")).is_err());
    }
}
