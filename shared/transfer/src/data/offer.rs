//! Which way bytes go: each side says what it can do, and both come to the same answer.

use crate::config::TransportChoice;

/// What tells a GPU from every other one.
pub type GpuId = [u8; 16];

/// What one side can do; travels in HELLO and WELCOME.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataOffer {
    /// What the config asks for.
    pub choice: TransportChoice,
    /// Tells hosts apart: memory is opened across processes on one host only.
    pub host: u128,
    /// The GPU of each rank, attention group after attention group; none without a data path for devices.
    pub gpus: Vec<GpuId>,
    /// Version of NCCL; 0 without one.
    pub nccl: u32,
    /// Bytes of the largest batch: that it makes, or that it takes.
    pub batch_bytes_max: u32,
}

impl DataOffer {
    /// Of a side whose caches are in host memory.
    #[must_use]
    pub const fn host_only(choice: TransportChoice) -> Self {
        Self { choice, host: 0, gpus: Vec::new(), nccl: 0, batch_bytes_max: 0 }
    }
}

/// The way between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// The receiver copies out of the sender's memory.
    Ipc,
    /// The sender sends.
    Nccl,
}

impl Path {
    /// The name used in logs and metric labels.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ipc => "ipc",
            Self::Nccl => "nccl",
        }
    }
}

/// The way of each pair of ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    /// `[sender rank][receiver rank]`; empty: parts travel in the lane's own frames.
    pairs: Vec<Path>,
    receivers: usize,
}

impl Paths {
    /// Whether parts travel in frames.
    #[must_use]
    pub fn is_host(&self) -> bool {
        self.pairs.is_empty()
    }

    /// Ranks of the receiver, those of all its attention groups.
    #[must_use]
    pub const fn receivers(&self) -> u32 {
        self.receivers as u32
    }

    /// The way between two ranks.
    ///
    /// # Panics
    /// On the host path, or if there are no such ranks.
    #[must_use]
    pub fn pair(&self, sender_rank: u32, receiver_rank: u32) -> Path {
        self.pairs[sender_rank as usize * self.receivers + receiver_rank as usize]
    }

    /// The name used in logs.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self.pairs.first() {
            None => "host",
            Some(first) if self.pairs.iter().all(|path| path == first) => first.name(),
            Some(_) => "nccl and ipc",
        }
    }
}

/// Two configs that exclude each other, or ask for what is not there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransportMismatch {
    /// There is no way that both would take.
    #[error("transfer.transport is {sender} at the sender and {receiver} at the receiver: {reason}")]
    Choice {
        /// The sender's.
        sender: TransportChoice,
        /// The receiver's.
        receiver: TransportChoice,
        /// What does not fit.
        reason: &'static str,
    },
    /// The sender may make batches for which the receiver has no room.
    #[error(
        "transfer.batch_bytes_max is {sender} at the sender and {receiver} at the receiver, which must not be less"
    )]
    BatchBytes {
        /// The sender's.
        sender: u32,
        /// The receiver's.
        receiver: u32,
    },
}

/// The way of each pair, from what both sides can do. `auto` takes CUDA IPC on one host, NCCL between hosts, and frames where neither
/// works; what is asked for by name is taken or refused.
///
/// IPC comes first because the receiver's copy engine then does the work: beside copies without a pause at 378 GB/s a decode step on an H200 took
/// 4.5 % longer, beside NCCL's kernels 40 % and more, whatever their number of blocks (2 to 16, 58 to 193 GB/s).
///
/// # Errors
/// [`TransportMismatch`].
pub fn negotiate(sender: &DataOffer, receiver: &DataOffer) -> Result<Paths, TransportMismatch> {
    use TransportChoice as T;
    let refuse = |reason| Err(TransportMismatch::Choice { sender: sender.choice, receiver: receiver.choice, reason });
    let wanted = match (sender.choice, receiver.choice) {
        (ours, theirs) if ours == theirs || theirs == T::Auto => ours,
        (T::Auto, theirs) => theirs,
        _ => return refuse("they must agree, or one be auto"),
    };
    let host = Ok(Paths { pairs: Vec::new(), receivers: receiver.gpus.len() });
    if wanted == T::Host {
        return host;
    }
    if sender.gpus.is_empty() || receiver.gpus.is_empty() {
        return if wanted == T::Auto { host } else { refuse("a cache is in host memory") };
    }
    let one_host = sender.host == receiver.host;
    let has_nccl = sender.nccl != 0 && receiver.nccl != 0;
    let mut pairs = Vec::new();
    for sender_gpu in &sender.gpus {
        for receiver_gpu in &receiver.gpus {
            let one_gpu = sender_gpu == receiver_gpu;
            pairs.push(match wanted {
                T::Nccl if !one_gpu && !has_nccl => return refuse("NCCL is missing"),
                T::Nccl if !one_gpu => Path::Nccl,
                _ if one_host => Path::Ipc,
                T::Auto if has_nccl => Path::Nccl,
                T::Auto => return host,
                _ => return refuse("ipc needs both processes on one host"),
            });
        }
    }
    if sender.batch_bytes_max > receiver.batch_bytes_max {
        let (sender, receiver) = (sender.batch_bytes_max, receiver.batch_bytes_max);
        return Err(TransportMismatch::BatchBytes { sender, receiver });
    }
    Ok(Paths { pairs, receivers: receiver.gpus.len() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use TransportChoice as T;

    fn offer(choice: T, gpus: &[u8], nccl: u32) -> DataOffer {
        let gpus = gpus.iter().map(|gpu| [*gpu; 16]).collect();
        DataOffer { choice, host: 1, gpus, nccl, batch_bytes_max: 4_096 }
    }

    #[test]
    fn both_sides_come_to_one_way() {
        let on_cpu = DataOffer::host_only(T::Auto);
        let elsewhere = DataOffer { host: 2, ..offer(T::Auto, &[3], 0) };
        let elsewhere_with_nccl = DataOffer { nccl: 2, ..elsewhere.clone() };
        for (sender, receiver, wanted) in [
            (on_cpu.clone(), on_cpu.clone(), Some("host")),
            (on_cpu.clone(), offer(T::Auto, &[1], 2), Some("host")),
            (on_cpu, offer(T::Ipc, &[1], 2), None),
            (offer(T::Auto, &[1], 2), offer(T::Auto, &[1], 2), Some("ipc")),
            (offer(T::Auto, &[1], 2), offer(T::Auto, &[2], 2), Some("ipc")),
            (offer(T::Auto, &[1], 2), elsewhere_with_nccl, Some("nccl")),
            (offer(T::Auto, &[1], 0), offer(T::Auto, &[2], 2), Some("ipc")),
            (offer(T::Auto, &[1], 0), elsewhere.clone(), Some("host")),
            (offer(T::Ipc, &[1], 0), elsewhere, None),
            (offer(T::Ipc, &[1], 2), offer(T::Auto, &[2], 2), Some("ipc")),
            (offer(T::Ipc, &[1], 2), offer(T::Nccl, &[2], 2), None),
            (offer(T::Host, &[1], 2), offer(T::Nccl, &[2], 2), None),
            (offer(T::Host, &[1], 2), offer(T::Auto, &[2], 2), Some("host")),
            (offer(T::Nccl, &[1], 2), offer(T::Auto, &[1], 2), Some("ipc")),
            (offer(T::Nccl, &[1], 2), offer(T::Auto, &[2], 0), None),
            (offer(T::Nccl, &[1, 2], 2), offer(T::Auto, &[1, 2], 2), Some("nccl and ipc")),
        ] {
            let found = negotiate(&sender, &receiver);
            assert_eq!(found.as_ref().ok().map(Paths::name), wanted, "{sender:?} {receiver:?}: {found:?}");
        }
    }

    #[test]
    fn a_receiver_takes_all_batches_that_a_sender_makes() {
        let of = |batch_bytes_max| DataOffer { batch_bytes_max, ..offer(T::Auto, &[1], 2) };
        assert!(negotiate(&of(4_096), &of(8_192)).is_ok());
        let error = negotiate(&of(8_192), &of(4_096)).unwrap_err();
        assert_eq!(error, TransportMismatch::BatchBytes { sender: 8_192, receiver: 4_096 });
        let words = error.to_string();
        assert!(["transfer.batch_bytes_max", "8192", "4096"].iter().all(|word| words.contains(word)), "{words}");
        let on_cpu = DataOffer::host_only(T::Auto);
        assert!(negotiate(&of(8_192), &on_cpu).is_ok(), "parts in frames are no batches");
    }

    #[test]
    fn one_gpu_is_never_sent_to_itself_by_nccl() {
        let paths =
            negotiate(&offer(T::Nccl, &[1, 2], 2), &offer(T::Nccl, &[2, 1], 2)).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(
            [paths.pair(0, 0), paths.pair(0, 1), paths.pair(1, 0), paths.pair(1, 1)],
            [Path::Nccl, Path::Ipc, Path::Ipc, Path::Nccl]
        );
    }
}
