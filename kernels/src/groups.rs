//! The memory through which the ranks of an instance with several attention groups, each rank on its own GPU, exchange tokens.

use device::{DeviceBuffer, PeerBuffer, Stream};

use crate::error::{Checker, Result};
use crate::inbox::{Alarm, Inbox, MAX_RANKS, Waiting, check_sizes};

/// Sizes of an instance's memory, the same on all its ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupSizes {
    /// Attention groups, at least 2.
    pub groups: usize,
    /// Ranks of each; with all groups together 2, 4 or 8.
    pub group_ranks: usize,
    /// Values of a token.
    pub hidden: usize,
    /// Tokens of the largest exchange, those of all groups together.
    pub tokens: usize,
}

impl GroupSizes {
    /// Ranks of the instance.
    #[must_use]
    pub const fn ranks(&self) -> usize {
        self.groups * self.group_ranks
    }

    /// Bytes of a rank's memory.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        2 * (1 + self.ranks()) * self.words() * size_of::<u64>()
    }

    /// Packets of all tokens.
    const fn words(&self) -> usize {
        self.tokens * self.hidden / 2
    }

    /// Whether `starts` are the first tokens of each group and the number of all, within these sizes.
    ///
    /// # Errors
    /// `Size`, `Dimension`.
    pub(crate) fn check_starts(&self, check: Checker, starts: &[usize]) -> Result<()> {
        check.size("starts", self.groups + 1, starts.len())?;
        let ascend = starts[0] == 0 && starts.is_sorted();
        check.dimension("starts", starts[0], "0 first, and ascending", ascend)?;
        let tokens = starts[self.groups];
        check.dimension("tokens", tokens, "at most those that the groups have room for", tokens <= self.tokens)
    }
}

/// One rank's memory, into which the others write.
#[derive(Debug)]
pub struct TokenMailbox {
    sizes: GroupSizes,
    rows: DeviceBuffer<u64>,
    parts: DeviceBuffer<u64>,
}

/// What the other ranks need of a [`TokenMailbox`].
#[derive(Debug, Clone)]
pub struct TokenMailboxAddress {
    sizes: GroupSizes,
    rows: PeerBuffer<u64>,
    parts: PeerBuffer<u64>,
}

impl TokenMailbox {
    /// Returns once the memory may be written by others.
    ///
    /// # Errors
    /// `Dimension` for numbers of ranks or hidden sizes that the kernels do not take, `Device`.
    pub fn new(stream: &Stream, sizes: GroupSizes) -> Result<Self> {
        let check = Checker("groups");
        check_sizes(check, sizes.ranks(), sizes.hidden)?;
        check.dimension("groups", sizes.groups, "at least 2", sizes.groups >= 2)?;
        let (rows, parts) = (stream.zeros(2 * sizes.words())?, stream.zeros(2 * sizes.ranks() * sizes.words())?);
        let mailbox = Self { sizes, rows, parts };
        stream.synchronize()?;
        Ok(mailbox)
    }

    /// For the other ranks.
    #[must_use]
    pub fn address(&self) -> TokenMailboxAddress {
        TokenMailboxAddress { sizes: self.sizes, rows: self.rows.share(), parts: self.parts.share() }
    }
}

/// One rank's end of an instance: its own memory, and the way to that of all others.
///
/// Dropping it stops kernels that wait and lets them end. Every rank makes the same sequence of exchanges, of the same tokens:
/// [`GatherTokens`](crate::GatherTokens) and [`ReduceScatter`](crate::ReduceScatter) in turn, which is what keeps one exchange from
/// overwriting another.
#[derive(Debug)]
pub struct AttentionGroups {
    /// First: kernels have ended before the rest is freed.
    pub(crate) waiting: Waiting,
    pub(crate) rank: usize,
    pub(crate) sizes: GroupSizes,
    pub(crate) rows: Inbox<u64>,
    pub(crate) parts: Inbox<u64>,
    pub(crate) row_epochs: DeviceBuffer<u32>,
    pub(crate) part_epochs: DeviceBuffer<u32>,
    _own: TokenMailbox,
}

impl AttentionGroups {
    /// `addresses` are those of all ranks, in order, group after group; `own` is that of `rank`. Exchanges run on `stream`.
    ///
    /// # Errors
    /// `Size` or `Dimension` if the ranks disagree, `Device` if their devices cannot reach each other.
    pub fn new(
        stream: &Stream,
        rank: usize,
        own: TokenMailbox,
        addresses: &[TokenMailboxAddress],
        alarm: Alarm,
    ) -> Result<Self> {
        let check = Checker("groups");
        let sizes = own.sizes;
        check.size("addresses", sizes.ranks(), addresses.len())?;
        let agree = addresses.iter().all(|address| address.sizes == sizes);
        check.dimension("mailbox", usize::from(agree), "of equal sizes on all ranks", agree)?;
        Ok(Self {
            waiting: Waiting::new(stream, alarm)?,
            rank,
            sizes,
            rows: Inbox::open(stream, addresses.iter().map(|address| &address.rows))?,
            parts: Inbox::open(stream, addresses.iter().map(|address| &address.parts))?,
            row_epochs: stream.zeros(sizes.tokens)?,
            part_epochs: stream.zeros(sizes.tokens)?,
            _own: own,
        })
    }

    /// The attention group of this rank.
    #[must_use]
    pub const fn group(&self) -> usize {
        self.rank / self.sizes.group_ranks
    }

    /// What the instance was made with.
    #[must_use]
    pub const fn sizes(&self) -> GroupSizes {
        self.sizes
    }
}

/// `starts` as kernels take them.
pub(crate) fn start_words(starts: &[usize]) -> [i32; MAX_RANKS + 1] {
    let mut words = [0; MAX_RANKS + 1];
    for (word, start) in words.iter_mut().zip(starts) {
        *word = crate::error::int(*start);
    }
    words
}
