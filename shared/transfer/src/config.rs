//! Bounds of a KV transfer: every wait and every queue has one.

use std::time::Duration;

/// Section `transfer` of a worker's config file.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct TransferConfig {
    /// To reach the peer and exchange HELLO.
    pub connect_timeout_ms: u64,
    /// Both sides send something at least this often.
    pub ping_interval_ms: u64,
    /// A peer that sent nothing for so long is lost. A dead process is noticed at once, by the end of its connection; this is for
    /// stopped processes and cut networks.
    pub peer_silence_timeout_ms: u64,
    /// For the peer to answer BEGIN, COMMIT or ABORT.
    pub ack_timeout_ms: u64,
    /// For a peer that is alive to take bytes that wait for it.
    pub stall_timeout_ms: u64,
    /// KV bytes handed to a lane and not yet written to its connection. A prefill chunk starts only when its KV fits.
    pub in_flight_bytes_max: u32,
    /// Tickets that a receiver keeps open at once.
    pub tickets_max: usize,
    /// How KV travels: `auto`, `host`, `ipc` or `nccl`. Both sides must agree, or one be `auto`.
    pub transport: TransportChoice,
    /// To open a data path between devices, and to measure it.
    pub setup_timeout_ms: u64,
    /// KV bytes that a device moves at a time; a multiple of what a page holds in one layer. A sender's must not be more than its receivers'.
    pub batch_bytes_max: u32,
    /// Thread blocks that copy between pages and staging: each takes a multiprocessor from the step that runs beside it.
    pub copy_blocks: u32,
    /// Thread blocks that NCCL may have for one pair of GPUs; by default as many as NCCL chooses. A decode step waits as much for few as for many,
    /// so the time in which it waits should be short; fewer blocks save memory (600 MB a pair by default on NVLink, 80 MB with 4).
    pub nccl_max_ctas: Option<u32>,
    /// One in so many batches between devices has its checksums compared: 1 all, 0 none. (Parts in frames always have.)
    pub checksum_every: u32,
    /// Two GPUs between which less comes through are not used: something is not as it should be (see `docs/gpu.md`).
    pub min_gb_per_s: u32,
    /// Use them all the same, with a warning.
    pub allow_slow: bool,
    /// For tests that kill a worker: where a sender stops ...
    pub hold_at: HoldAt,
    /// ... and for how long; 0 never.
    pub hold_ms: u64,
}

/// A point of a transfer at which a test may want a process to stand still.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum HoldAt {
    /// Nowhere.
    #[default]
    None,
    /// The bytes of a ticket's first batch are in staging; it has not been announced.
    Announce,
    /// The first batch was announced, and the second has not been.
    Second,
    /// The receiver has joined, and this side has not taken note.
    Commit,
}

/// The hold that a config asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hold {
    at: HoldAt,
    pause: Duration,
}

impl Hold {
    /// How long to stand still at a point; it is logged, so that a test sees it.
    pub(crate) fn at(self, point: HoldAt) -> Option<Duration> {
        let holds = point != HoldAt::None && self.at == point && !self.pause.is_zero();
        if holds {
            tracing::warn!("held at {point:?} for {:?} (transfer.hold_at)", self.pause);
        }
        holds.then_some(self.pause)
    }

    /// Stands still on a thread that may block.
    pub(crate) fn hold_here(self, point: HoldAt) {
        if let Some(pause) = self.at(point) {
            std::thread::sleep(pause);
        }
    }
}

/// How KV travels between two workers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportChoice {
    /// By CUDA IPC on one host, by NCCL between hosts, through host memory where neither works.
    #[default]
    Auto,
    /// Through host memory and the lane's own connection.
    Host,
    /// By CUDA IPC: the receiver copies out of the sender's memory.
    Ipc,
    /// By NCCL; on one GPU, which NCCL does not connect with itself, by CUDA IPC.
    Nccl,
}

impl TransportChoice {
    /// All of them; the position is the code on the wire.
    pub(crate) const ALL: [Self; 4] = [Self::Auto, Self::Host, Self::Ipc, Self::Nccl];
}

impl std::fmt::Display for TransportChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Host => "host",
            Self::Ipc => "ipc",
            Self::Nccl => "nccl",
        })
    }
}

impl Default for TransferConfig {
    fn default() -> Self {
        Self {
            connect_timeout_ms: 2_000,
            ping_interval_ms: 500,
            peer_silence_timeout_ms: 3_000,
            ack_timeout_ms: 5_000,
            stall_timeout_ms: 5_000,
            in_flight_bytes_max: 256 << 20,
            tickets_max: 1_024,
            transport: TransportChoice::Auto,
            setup_timeout_ms: 30_000,
            batch_bytes_max: 16 << 20,
            copy_blocks: 16,
            nccl_max_ctas: None,
            checksum_every: 16,
            min_gb_per_s: 100,
            allow_slow: false,
            hold_at: HoldAt::None,
            hold_ms: 0,
        }
    }
}

impl TransferConfig {
    /// Checks the ranges.
    ///
    /// # Errors
    /// The name of the field and what is allowed.
    pub fn validate(&self) -> Result<(), String> {
        let millis = [
            ("setup_timeout_ms", self.setup_timeout_ms),
            ("connect_timeout_ms", self.connect_timeout_ms),
            ("ping_interval_ms", self.ping_interval_ms),
            ("ack_timeout_ms", self.ack_timeout_ms),
            ("stall_timeout_ms", self.stall_timeout_ms),
        ];
        if let Some((field, value)) = millis.into_iter().find(|(_, value)| !(1..=600_000).contains(value)) {
            return Err(format!("{field} is {value}, allowed is 1 to 600000"));
        }
        if self.peer_silence_timeout_ms < 2 * self.ping_interval_ms {
            return Err(format!(
                "peer_silence_timeout_ms is {}, at least twice ping_interval_ms ({}) is needed",
                self.peer_silence_timeout_ms, self.ping_interval_ms
            ));
        }
        if self.in_flight_bytes_max == 0 || self.in_flight_bytes_max > 1 << 31 {
            return Err(format!("in_flight_bytes_max is {}, allowed is 1 to {}", self.in_flight_bytes_max, 1u32 << 31));
        }
        if self.tickets_max == 0 {
            return Err("tickets_max is 0, at least 1 is needed".into());
        }
        if !(4 << 10..=1 << 28).contains(&self.batch_bytes_max) {
            return Err(format!("batch_bytes_max is {}, allowed is 4096 to {}", self.batch_bytes_max, 1 << 28));
        }
        let blocks = [("copy_blocks", self.copy_blocks), ("nccl_max_ctas", self.nccl_max_ctas.unwrap_or(1))];
        if let Some((field, value)) = blocks.into_iter().find(|(_, value)| !(1..=64).contains(value)) {
            return Err(format!("{field} is {value}, allowed is 1 to 64"));
        }
        Ok(())
    }

    pub(crate) fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.connect_timeout_ms)
    }

    pub(crate) fn setup_timeout(&self) -> Duration {
        Duration::from_millis(self.setup_timeout_ms)
    }

    pub(crate) fn hold(&self) -> Hold {
        Hold { at: self.hold_at, pause: Duration::from_millis(self.hold_ms) }
    }

    pub(crate) fn ping_interval(&self) -> Duration {
        Duration::from_millis(self.ping_interval_ms)
    }

    pub(crate) fn peer_silence_timeout(&self) -> Duration {
        Duration::from_millis(self.peer_silence_timeout_ms)
    }

    pub(crate) fn ack_timeout(&self) -> Duration {
        Duration::from_millis(self.ack_timeout_ms)
    }

    pub(crate) fn stall_timeout(&self) -> Duration {
        Duration::from_millis(self.stall_timeout_ms)
    }
}
