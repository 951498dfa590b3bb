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
        if self.in_flight_bytes_max == 0 || self.in_flight_bytes_max > 1 << 30 {
            return Err(format!("in_flight_bytes_max is {}, allowed is 1 to {}", self.in_flight_bytes_max, 1 << 30));
        }
        if self.tickets_max == 0 {
            return Err("tickets_max is 0, at least 1 is needed".into());
        }
        Ok(())
    }

    pub(crate) fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.connect_timeout_ms)
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
