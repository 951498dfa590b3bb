//! The memory through which the ranks of a group, each on its own GPU, exchange values.

use std::sync::Arc;
use std::time::Duration;

use device::{DeviceBuffer, DevicePtrMut, HostWords, PeerBuffer, Stream};
use half::bf16;

use crate::error::{Checker, Result};

/// Most ranks of a group.
pub const MAX_RANKS: usize = 8;
/// How long a kernel waits for another rank, unless the host tells it to stop. A rank may be held up by a slow reader of
/// its cache; a group that waits this long is lost.
const PATIENCE: Duration = Duration::from_secs(20);
/// Blocks that gather columns, on every rank as many.
pub(crate) const GATHER_BLOCKS: usize = 128;
/// Words of [`HostWords`]; `ptx::Patience` knows them too.
const STOP: usize = 0;
const GAVE_UP: usize = 1;

/// Sizes of a group's memory, the same on all its ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerSizes {
    /// 2, 4 or 8.
    pub ranks: usize,
    /// Values of a token.
    pub hidden: usize,
    /// Tokens of the largest exchange in packets.
    pub packet_tokens: usize,
    /// Tokens of the largest exchange in bulk.
    pub bulk_tokens: usize,
}

/// One rank's memory, into which the others write.
#[derive(Debug)]
pub struct Mailbox {
    sizes: PeerSizes,
    packets: DeviceBuffer<u64>,
    bulk: DeviceBuffer<bf16>,
    flags: DeviceBuffer<u32>,
    gather_flags: DeviceBuffer<u32>,
}

/// What the other ranks need of a [`Mailbox`].
#[derive(Debug, Clone)]
pub struct MailboxAddress {
    sizes: PeerSizes,
    packets: PeerBuffer<u64>,
    bulk: PeerBuffer<bf16>,
    flags: PeerBuffer<u32>,
    gather_flags: PeerBuffer<u32>,
    /// Where the rank wants gathered columns.
    gathered: PeerBuffer<f32>,
}

impl Mailbox {
    /// Returns once the memory may be written by others.
    ///
    /// # Errors
    /// `Dimension` for groups or hidden sizes that the kernels do not take, `Device`.
    pub fn new(stream: &Stream, sizes: PeerSizes) -> Result<Self> {
        let check = Checker("peers");
        let PeerSizes { ranks, hidden, packet_tokens, bulk_tokens } = sizes;
        check.dimension("ranks", ranks, "2, 4 or 8", [2, 4, MAX_RANKS].contains(&ranks))?;
        let fits = hidden.is_multiple_of(8) && (8..=4096).contains(&hidden);
        check.dimension("hidden", hidden, "a multiple of 8 up to 4096", fits)?;
        let mailbox = Self {
            sizes,
            packets: stream.zeros(2 * ranks * packet_tokens * hidden / 2)?,
            bulk: stream.zeros(2 * ranks * bulk_tokens * hidden)?,
            flags: stream.zeros(2 * ranks * bulk_tokens)?,
            gather_flags: stream.zeros(2 * ranks * GATHER_BLOCKS)?,
        };
        stream.synchronize()?;
        Ok(mailbox)
    }

    /// `gathered` is where [`AllGather`](crate::AllGather) shall put the columns of all ranks.
    #[must_use]
    pub fn address(&self, gathered: &DeviceBuffer<f32>) -> MailboxAddress {
        MailboxAddress {
            sizes: self.sizes,
            packets: self.packets.share(),
            bulk: self.bulk.share(),
            flags: self.flags.share(),
            gather_flags: self.gather_flags.share(),
            gathered: gathered.share(),
        }
    }
}

/// Tells waiting kernels to stop, and the host that one did. One for an instance.
#[derive(Debug, Clone)]
pub struct Alarm(Arc<HostWords>);

impl Alarm {
    /// # Errors
    /// `Device` if the host has no page-locked memory left.
    pub fn new(stream: &Stream) -> Result<Self> {
        Ok(Self(Arc::new(HostWords::zeros(stream, 2)?)))
    }

    /// From now on no kernel waits for another rank.
    pub fn stop(&self) {
        self.0.store(STOP, 1);
    }

    /// Whether a kernel stopped waiting: then what it and later ones computed is void.
    #[must_use]
    pub fn gave_up(&self) -> bool {
        self.0.load(GAVE_UP) != 0
    }

    pub(crate) fn address(&self) -> DevicePtrMut<u32> {
        self.0.address()
    }
}

/// One rank's end of a group: its own memory, and the way to that of the others.
///
/// Dropping it stops kernels that wait and lets them end. Every rank makes the same sequence of exchanges, of the same sizes.
#[derive(Debug)]
pub struct PeerGroup {
    pub(crate) rank: usize,
    pub(crate) sizes: PeerSizes,
    pub(crate) packets: Vec<PeerBuffer<u64>>,
    pub(crate) bulk: Vec<PeerBuffer<bf16>>,
    pub(crate) flags: Vec<PeerBuffer<u32>>,
    pub(crate) gather_flags: Vec<PeerBuffer<u32>>,
    pub(crate) gathered: Vec<PeerBuffer<f32>>,
    pub(crate) packet_epochs: DeviceBuffer<u32>,
    pub(crate) bulk_epochs: DeviceBuffer<u32>,
    pub(crate) gather_epochs: DeviceBuffer<u32>,
    /// Whether a kernel of this rank stopped waiting.
    pub(crate) failed: DeviceBuffer<u32>,
    stream: Stream,
    alarm: Alarm,
    _own: Mailbox,
}

impl PeerGroup {
    /// `addresses` are those of all ranks, in order; `own` is that of `rank`. Exchanges run on `stream`.
    ///
    /// # Errors
    /// `Size` if the ranks disagree, `Device` if their devices cannot reach each other.
    pub fn new(stream: &Stream, rank: usize, own: Mailbox, addresses: &[MailboxAddress], alarm: Alarm) -> Result<Self> {
        let check = Checker("peers");
        let sizes = own.sizes;
        check.size("addresses", sizes.ranks, addresses.len())?;
        for address in addresses {
            let MailboxAddress { sizes: theirs, packets, bulk, flags, gather_flags, gathered } = address;
            check.dimension(
                "mailbox",
                usize::from(*theirs == sizes),
                "of equal sizes on all ranks",
                *theirs == sizes,
            )?;
            packets.open(stream)?;
            bulk.open(stream)?;
            flags.open(stream)?;
            gather_flags.open(stream)?;
            gathered.open(stream)?;
        }
        Ok(Self {
            rank,
            sizes,
            packets: addresses.iter().map(|address| address.packets.clone()).collect(),
            bulk: addresses.iter().map(|address| address.bulk.clone()).collect(),
            flags: addresses.iter().map(|address| address.flags.clone()).collect(),
            gather_flags: addresses.iter().map(|address| address.gather_flags.clone()).collect(),
            gathered: addresses.iter().map(|address| address.gathered.clone()).collect(),
            packet_epochs: stream.zeros(sizes.packet_tokens)?,
            bulk_epochs: stream.zeros(sizes.bulk_tokens)?,
            gather_epochs: stream.zeros(GATHER_BLOCKS)?,
            failed: stream.zeros(1)?,
            stream: stream.clone(),
            alarm,
            _own: own,
        })
    }

    /// What the group was made with.
    #[must_use]
    pub const fn sizes(&self) -> PeerSizes {
        self.sizes
    }

    /// The group's alarm.
    #[must_use]
    pub const fn alarm(&self) -> &Alarm {
        &self.alarm
    }

    pub(crate) fn host_words(&self) -> DevicePtrMut<u32> {
        self.alarm.address()
    }

    pub(crate) const fn limit_ms() -> u32 {
        PATIENCE.as_millis() as u32
    }
}

impl Drop for PeerGroup {
    fn drop(&mut self) {
        self.alarm.stop();
        // The host words are in use until the last kernel has ended. An error means that the device runs nothing any more.
        let _ = self.stream.synchronize();
    }
}
