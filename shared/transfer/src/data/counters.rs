//! What data paths count.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use types::PeerId;

use super::PairRate;

/// A part of a batch's way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Pages to staging, at the sender.
    Gather,
    /// Staging to staging, between processes.
    Move,
    /// Staging to pages, at the receiver.
    Scatter,
}

impl Stage {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Gather, Self::Move, Self::Scatter];

    /// The name used in metric labels.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gather => "gather",
            Self::Move => "move",
            Self::Scatter => "scatter",
        }
    }
}

/// Counts since the process began, over all lanes.
#[derive(Debug, Default)]
pub struct DataCounters {
    bytes: [AtomicU64; 3],
    nanos: [AtomicU64; 3],
    compared: AtomicU64,
    corrupt: AtomicU64,
    rates: Mutex<BTreeMap<(String, u32, u32), PairRate>>,
}

impl DataCounters {
    /// A batch of `bytes` bytes took so long for a stage, on the device.
    pub fn passed(&self, stage: Stage, bytes: usize, micros: f64) {
        self.bytes[stage as usize].fetch_add(bytes as u64, Ordering::Relaxed);
        self.nanos[stage as usize].fetch_add((micros * 1e3) as u64, Ordering::Relaxed);
    }

    /// So many checksums were compared, of which one did not match.
    pub fn compared(&self, checksums: usize, corrupt: bool) {
        self.compared.fetch_add(checksums as u64, Ordering::Relaxed);
        self.corrupt.fetch_add(corrupt.into(), Ordering::Relaxed);
    }

    /// A pair was measured.
    pub fn measured(&self, peer: &PeerId, rate: PairRate) {
        let mut rates = self.rates.lock().unwrap_or_else(PoisonError::into_inner);
        rates.insert((peer.worker.0.to_string(), rate.sender_rank, rate.receiver_rank), rate);
    }

    /// Bytes that have passed a stage.
    #[must_use]
    pub fn bytes(&self, stage: Stage) -> u64 {
        self.bytes[stage as usize].load(Ordering::Relaxed)
    }

    /// Seconds that they took, on the device.
    #[must_use]
    pub fn seconds(&self, stage: Stage) -> f64 {
        self.nanos[stage as usize].load(Ordering::Relaxed) as f64 / 1e9
    }

    /// Checksums compared, and those that did not match.
    #[must_use]
    pub fn checksums(&self) -> (u64, u64) {
        (self.compared.load(Ordering::Relaxed), self.corrupt.load(Ordering::Relaxed))
    }

    /// The last rate of each pair, with the name of the other worker.
    #[must_use]
    pub fn rates(&self) -> Vec<(String, PairRate)> {
        let rates = self.rates.lock().unwrap_or_else(PoisonError::into_inner);
        rates.iter().map(|((worker, ..), rate)| (worker.clone(), *rate)).collect()
    }
}
