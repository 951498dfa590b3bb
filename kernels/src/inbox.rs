//! What every exchange through peer memory takes: inboxes, into which other ranks write, and kernels that wait for them.

use std::sync::Arc;
use std::time::Duration;

use bytemuck::Pod;
use device::{DeviceBuffer, DevicePtrMut, HostWords, PeerBuffer, Stream};

use crate::error::{Checker, Result};

/// Most ranks of a group.
pub const MAX_RANKS: usize = 8;
/// How long a kernel waits for another rank, unless the host tells it to stop. A rank may be held up by a slow reader of
/// its cache; a group that waits this long is lost.
const PATIENCE: Duration = Duration::from_secs(20);
/// Words of [`HostWords`]; `ptx::Patience` knows them too.
const STOP: usize = 0;
const GAVE_UP: usize = 1;

/// Whether the kernels take so many ranks, and tokens of so many values.
///
/// # Errors
/// `Dimension`.
pub(crate) fn check_sizes(check: Checker, ranks: usize, hidden: usize) -> Result<()> {
    check.dimension("ranks", ranks, "2, 4 or 8", [2, 4, MAX_RANKS].contains(&ranks))?;
    let fits = hidden.is_multiple_of(8) && (8..=4096).contains(&hidden);
    check.dimension("hidden", hidden, "a multiple of 8 up to 4096", fits)
}

/// The same buffer of each rank, in the order of ranks; this one's among them.
#[derive(Debug)]
pub(crate) struct Inbox<T> {
    of_ranks: Vec<PeerBuffer<T>>,
}

impl<T: Pod> Inbox<T> {
    /// For work on `stream`.
    ///
    /// # Errors
    /// `Device` if the stream's device cannot reach one.
    pub(crate) fn open<'a>(stream: &Stream, of_ranks: impl Iterator<Item = &'a PeerBuffer<T>>) -> Result<Self>
    where
        T: 'a,
    {
        let open = |buffer: &PeerBuffer<T>| {
            buffer.open(stream)?;
            Ok(buffer.clone())
        };
        Ok(Self { of_ranks: of_ranks.map(open).collect::<Result<_>>()? })
    }

    pub(crate) fn of_ranks(&self) -> &[PeerBuffer<T>] {
        &self.of_ranks
    }

    /// As argument structs have them; zero beyond the last rank.
    pub(crate) fn addresses(&self, stream: &Stream) -> [u64; MAX_RANKS] {
        let mut addresses = [0; MAX_RANKS];
        for (address, buffer) in addresses.iter_mut().zip(&self.of_ranks) {
            *address = stream.peer(buffer).address();
        }
        addresses
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
}

/// What a rank's kernels look at while they wait for others. Dropping it stops those that wait and lets them end, so it is the **first** field
/// of whatever they use besides: fields are dropped in order.
#[derive(Debug)]
pub(crate) struct Waiting {
    alarm: Alarm,
    stream: Stream,
    /// Whether a kernel of this rank stopped waiting.
    failed: DeviceBuffer<u32>,
}

impl Waiting {
    /// How long a kernel waits.
    pub(crate) const LIMIT_MS: u32 = PATIENCE.as_millis() as u32;

    /// For kernels on `stream`.
    ///
    /// # Errors
    /// `Device`.
    pub(crate) fn new(stream: &Stream, alarm: Alarm) -> Result<Self> {
        Ok(Self { alarm, stream: stream.clone(), failed: stream.zeros(1)? })
    }

    pub(crate) const fn alarm(&self) -> &Alarm {
        &self.alarm
    }

    /// The alarm's words.
    pub(crate) fn host(&self) -> DevicePtrMut<u32> {
        self.alarm.0.address()
    }

    pub(crate) fn failed(&mut self, stream: &Stream) -> DevicePtrMut<u32> {
        stream.output(&mut self.failed.view_mut())
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.alarm.stop();
        // The host words are in use until the last kernel has ended. An error means that the device runs nothing any more.
        let _ = self.stream.synchronize();
    }
}
