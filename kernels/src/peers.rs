//! The memory through which the ranks of a group, each on its own GPU, exchange values.

use device::{DeviceBuffer, PeerBuffer, Stream};
use half::bf16;

use crate::error::{Checker, Result};
use crate::inbox::{Alarm, Inbox, Waiting, check_sizes};

/// Blocks that gather columns, on every rank as many.
pub(crate) const GATHER_BLOCKS: usize = 128;

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
        let PeerSizes { ranks, hidden, packet_tokens, bulk_tokens } = sizes;
        check_sizes(Checker("peers"), ranks, hidden)?;
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

/// One rank's end of a group: its own memory, and the way to that of the others.
///
/// Dropping it stops kernels that wait and lets them end. Every rank makes the same sequence of exchanges, of the same sizes.
#[derive(Debug)]
pub struct PeerGroup {
    /// First: kernels have ended before the rest is freed.
    pub(crate) waiting: Waiting,
    pub(crate) rank: usize,
    pub(crate) sizes: PeerSizes,
    pub(crate) packets: Inbox<u64>,
    pub(crate) bulk: Inbox<bf16>,
    pub(crate) flags: Inbox<u32>,
    pub(crate) gather_flags: Inbox<u32>,
    pub(crate) gathered: Inbox<f32>,
    pub(crate) packet_epochs: DeviceBuffer<u32>,
    pub(crate) bulk_epochs: DeviceBuffer<u32>,
    pub(crate) gather_epochs: DeviceBuffer<u32>,
    _own: Mailbox,
}

impl PeerGroup {
    /// `addresses` are those of all ranks, in order; `own` is that of `rank`. Exchanges run on `stream`.
    ///
    /// # Errors
    /// `Size` or `Dimension` if the ranks disagree, `Device` if their devices cannot reach each other.
    pub fn new(stream: &Stream, rank: usize, own: Mailbox, addresses: &[MailboxAddress], alarm: Alarm) -> Result<Self> {
        let check = Checker("peers");
        let sizes = own.sizes;
        check.size("addresses", sizes.ranks, addresses.len())?;
        let agree = addresses.iter().all(|address| address.sizes == sizes);
        check.dimension("mailbox", usize::from(agree), "of equal sizes on all ranks", agree)?;
        Ok(Self {
            waiting: Waiting::new(stream, alarm)?,
            rank,
            sizes,
            packets: Inbox::open(stream, addresses.iter().map(|address| &address.packets))?,
            bulk: Inbox::open(stream, addresses.iter().map(|address| &address.bulk))?,
            flags: Inbox::open(stream, addresses.iter().map(|address| &address.flags))?,
            gather_flags: Inbox::open(stream, addresses.iter().map(|address| &address.gather_flags))?,
            gathered: Inbox::open(stream, addresses.iter().map(|address| &address.gathered))?,
            packet_epochs: stream.zeros(sizes.packet_tokens)?,
            bulk_epochs: stream.zeros(sizes.bulk_tokens)?,
            gather_epochs: stream.zeros(GATHER_BLOCKS)?,
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
        self.waiting.alarm()
    }
}
