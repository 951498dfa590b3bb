//! The sender's half of a lane's data path: slices become batches, which are gathered, announced, and over when the receiver says so.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv::KvSlice;
use tokio::sync::OwnedSemaphorePermit;
use types::{DpGroup, KvLayout, PageId, TicketId};

use crate::config::{Hold, HoldAt, TransferConfig};
use crate::data::{BATCH_SLICES_MAX, Batch, DataError, Gathering, SendDataLane, StagedSlice, StagingRing};
use crate::frame::Frame;

pub(super) struct Staging {
    lane: Arc<dyn SendDataLane>,
    ranks: Vec<Rank>,
    next_batch: AtomicU64,
    head_bytes: usize,
    /// Ranks of each attention group of the receiver, and heads on one of them.
    receiver_tp: u32,
    receiver_heads: u32,
    batch_bytes_max: usize,
    checksum_every: u64,
    hold: Hold,
    /// The ticket of the last batch announced, and how many it has.
    last: Mutex<(TicketId, u32)>,
}

struct Rank {
    /// Bytes in use, each with its room in the lane.
    ring: Mutex<StagingRing<OwnedSemaphorePermit>>,
    /// Gathers under way, oldest first. Held while batches are announced, so that they are sent in the same order.
    gathers: Mutex<VecDeque<Gather>>,
}

struct Gather {
    batch: Batch,
    bytes: usize,
    gathering: Box<dyn Gathering>,
}

/// Slices that become one batch.
pub(super) struct Cut<'a> {
    rank: u32,
    receiver_rank: u32,
    slices: &'a [(KvSlice, PageId)],
    slice_bytes: usize,
}

impl Cut<'_> {
    pub(super) const fn len(&self) -> usize {
        self.slices.len()
    }

    pub(super) const fn bytes(&self) -> usize {
        self.slices.len() * self.slice_bytes
    }
}

/// Bytes of staging that each rank of a sender has on one lane: the room of its share of `in_flight_bytes_max`, and of two batches, since a batch
/// lies in one piece.
pub(crate) fn staging_bytes(config: &TransferConfig, ranks: usize) -> usize {
    (config.in_flight_bytes_max as usize).div_ceil(ranks) + 2 * config.batch_bytes_max as usize
}

impl Staging {
    pub(super) fn new(
        lane: Arc<dyn SendDataLane>,
        sender: &KvLayout,
        receiver: &KvLayout,
        config: &TransferConfig,
    ) -> Self {
        let ranks = sender.tp as usize;
        let capacity = staging_bytes(config, ranks);
        let rank = || Rank { ring: Mutex::new(StagingRing::new(capacity)), gathers: Mutex::default() };
        Self {
            lane,
            ranks: (0..ranks).map(|_| rank()).collect(),
            next_batch: AtomicU64::new(0),
            head_bytes: sender.head_bytes(),
            receiver_tp: receiver.tp,
            receiver_heads: receiver.kv_heads / receiver.tp,
            batch_bytes_max: config.batch_bytes_max as usize,
            checksum_every: config.checksum_every.into(),
            hold: config.hold(),
            last: Mutex::new((TicketId(0), 0)),
        }
    }

    pub(super) fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Cuts slices for attention group `group` of the receiver, which are sorted by heads, where the receiver's rank or their size changes,
    /// and where a batch is full.
    pub(super) fn cut<'a>(
        &self,
        rank: u32,
        group: DpGroup,
        slices: &'a [(KvSlice, PageId)],
    ) -> Result<Vec<Cut<'a>>, DataError> {
        if rank as usize >= self.ranks.len() {
            return Err(DataError(format!("rank {rank} of {}", self.ranks.len())));
        }
        let first_rank = group.0.saturating_mul(self.receiver_tp);
        let place =
            |slice: &KvSlice| (first_rank.saturating_add(slice.head_start / self.receiver_heads), slice.head_count);
        let mut cuts = Vec::new();
        for run in slices.chunk_by(|(a, _), (b, _)| place(a) == place(b)) {
            let (receiver_rank, head_count) = place(&run[0].0);
            let slice_bytes = head_count as usize * self.head_bytes;
            if slice_bytes == 0 || slice_bytes > self.batch_bytes_max {
                let most = self.batch_bytes_max;
                return Err(DataError(format!("a slice of {slice_bytes} bytes, batch_bytes_max is {most}")));
            }
            let most = (self.batch_bytes_max / slice_bytes).min(BATCH_SLICES_MAX);
            cuts.extend(run.chunks(most).map(|slices| Cut { rank, receiver_rank, slices, slice_bytes }));
        }
        Ok(cuts)
    }

    /// Starts to copy a batch into staging.
    pub(super) fn gather(&self, ticket: TicketId, cut: &Cut<'_>, room: OwnedSemaphorePermit) -> Result<(), DataError> {
        let id = self.next_batch.fetch_add(1, Ordering::Relaxed);
        let rank = &self.ranks[cut.rank as usize];
        let offset = lock(&rank.ring).take(id, cut.bytes(), room);
        let offset = offset.ok_or_else(|| DataError(format!("no {} bytes of staging in a row", cut.bytes())))?;
        let is_checked = self.checksum_every > 0 && id.is_multiple_of(self.checksum_every);
        let gathering = self.lane.gather(cut.rank, offset, cut.slices, is_checked).inspect_err(|_| {
            lock(&rank.ring).give_back(id);
        })?;
        let batch = Batch {
            id,
            ticket,
            sender_rank: cut.rank,
            receiver_rank: cut.receiver_rank,
            offset: offset as u64,
            slices: cut.slices.iter().map(|(slice, _)| StagedSlice { slice: *slice, checksum: 0 }).collect(),
            is_checked,
        };
        lock(&rank.gathers).push_back(Gather { batch, bytes: cut.bytes(), gathering });
        Ok(())
    }

    /// Waits for the gathers of a rank and announces each batch as its bytes are in staging. `fail` ends the lane.
    pub(super) fn announce(&self, rank: u32, send: &dyn Fn(Frame), fail: &dyn Fn(&DataError)) -> Result<(), DataError> {
        let rank = &self.ranks[rank as usize];
        let mut gathers = lock(&rank.gathers);
        while let Some(Gather { mut batch, bytes, gathering }) = gathers.pop_front() {
            let checksums = gathering.wait().inspect_err(|_| {
                lock(&rank.ring).give_back(batch.id);
            })?;
            batch.slices.iter_mut().zip(checksums).for_each(|(staged, checksum)| staged.checksum = checksum);
            self.hold.hold_here(self.point(batch.ticket));
            send(Frame::Batch(batch.clone()));
            self.lane.announced(&batch, bytes).inspect_err(fail)?;
        }
        Ok(())
    }

    /// Where in its transfer a ticket is that is about to announce a batch.
    fn point(&self, ticket: TicketId) -> HoldAt {
        let mut last = lock(&self.last);
        *last = if last.0 == ticket { (ticket, last.1 + 1) } else { (ticket, 1) };
        match last.1 {
            1 => HoldAt::Announce,
            2 => HoldAt::Second,
            _ => HoldAt::None,
        }
    }

    /// A batch's bytes are free again; whether there was one.
    pub(super) fn landed(&self, batch: u64) -> bool {
        self.ranks.iter().any(|rank| lock(&rank.ring).give_back(batch))
    }

    pub(super) fn close(&self) {
        self.lane.close();
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        self.lane.close();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
