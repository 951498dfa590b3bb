//! The sender's half of a lane's data path: slices become batches, which are gathered, announced, and over when the receiver says so.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kv::KvSlice;
use tokio::sync::OwnedSemaphorePermit;
use types::{DpGroup, KvLayout, PageId, TicketId};

use crate::config::{Hold, HoldAt, TransferConfig};
use crate::contract::BatchTimes;
use crate::data::{BATCH_SLICES_MAX, Batch, DataError, Gathering, SendDataLane, StagedSlice, StagingRing};
use crate::frame::Frame;

/// Batches that a hand-over is cut into, at least, unless they would be smaller than this: a batch has costs of its own, about 20 us on each side.
const HAND_OVER_BATCHES: usize = 4;
const BATCH_BYTES_MIN: usize = 2 << 20;

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

/// How far the batches of one ticket have come.
#[derive(Default)]
pub(super) struct Progress(Mutex<(Option<Instant>, Option<Instant>)>);

impl Progress {
    /// Once all that was announced has landed: when the last batch was announced, and when the receiver's word on the last one came.
    pub(super) fn times(&self) -> Option<BatchTimes> {
        let (announced_at, landed_at) = *lock(&self.0);
        Some(BatchTimes { announced_at: announced_at?, landed_at: landed_at? })
    }

    fn announced(&self) {
        lock(&self.0).0 = Some(now());
    }

    fn landed(&self) {
        lock(&self.0).1 = Some(now());
    }
}

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// What bytes of staging stand for.
struct Held {
    progress: Arc<Progress>,
    /// Their room in the lane.
    _room: OwnedSemaphorePermit,
}

struct Rank {
    /// Bytes in use.
    ring: Mutex<StagingRing<Held>>,
    /// Gathers under way, oldest first. Held while batches are announced, so that they are sent in the same order.
    gathers: Mutex<VecDeque<Gather>>,
}

struct Gather {
    batch: Batch,
    bytes: usize,
    progress: Arc<Progress>,
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
    /// and where a batch is full or a quarter of the hand-over: while one batch is moved the next is gathered and the one before scattered.
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
            let batch_bytes =
                (run.len() * slice_bytes / HAND_OVER_BATCHES).max(BATCH_BYTES_MIN).min(self.batch_bytes_max);
            let most = (batch_bytes / slice_bytes).clamp(1, BATCH_SLICES_MAX);
            cuts.extend(run.chunks(most).map(|slices| Cut { rank, receiver_rank, slices, slice_bytes }));
        }
        Ok(cuts)
    }

    /// Starts to copy a batch into staging.
    pub(super) fn gather(
        &self,
        ticket: TicketId,
        cut: &Cut<'_>,
        room: OwnedSemaphorePermit,
        progress: &Arc<Progress>,
    ) -> Result<(), DataError> {
        let id = self.next_batch.fetch_add(1, Ordering::Relaxed);
        let rank = &self.ranks[cut.rank as usize];
        let held = Held { progress: Arc::clone(progress), _room: room };
        let offset = lock(&rank.ring).take(id, cut.bytes(), held);
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
        let progress = Arc::clone(progress);
        lock(&rank.gathers).push_back(Gather { batch, bytes: cut.bytes(), progress, gathering });
        Ok(())
    }

    /// Announces the batches of a rank, each once its bytes are in staging: those that are there by now, or with `waits` all. `fail` ends the
    /// lane.
    pub(super) fn announce(
        &self,
        rank: u32,
        waits: bool,
        send: &dyn Fn(Frame),
        fail: &dyn Fn(&DataError),
    ) -> Result<(), DataError> {
        let rank = &self.ranks[rank as usize];
        let mut gathers = lock(&rank.gathers);
        while gathers.front().is_some_and(|oldest| waits || oldest.gathering.is_done()) {
            let Some(Gather { mut batch, bytes, progress, gathering }) = gathers.pop_front() else { break };
            let checksums = gathering.wait().inspect_err(|_| {
                lock(&rank.ring).give_back(batch.id);
            })?;
            batch.slices.iter_mut().zip(checksums).for_each(|(staged, checksum)| staged.checksum = checksum);
            self.hold.hold_here(self.point(batch.ticket));
            progress.announced();
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
        self.ranks.iter().any(|rank| lock(&rank.ring).give_back_with(batch, |held| held.progress.landed()))
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
