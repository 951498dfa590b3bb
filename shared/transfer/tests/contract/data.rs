//! What the suite needs of any data path: the caches at its two ends, and a decorator that damages what it announces.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use kv::{KvSlice, PageTable, PageTables};
use transfer::data::{Batch, DataError, DataOffer, Gathering, LaneSides, SendData, SendDataLane};
use transfer::fault::{FaultCounts, FaultPlan};
use transfer::{Carries, Part, SendTicket, TransferError};
use types::{KvLayout, PageId};

use crate::support::{World, layout};

/// Pages of each pool.
pub(crate) const PAGES: u32 = 256;

/// Heads, and so ranks, of the layouts that the suite uses.
pub(crate) fn rank_of(layout: &KvLayout, slice: &KvSlice) -> u32 {
    slice.head_start / (layout.kv_heads / layout.tp)
}

/// The caches of both sides.
pub(crate) trait Caches: Send + Sync {
    fn sender_layout(&self) -> &KvLayout;
    fn write_sender(&self, slice: &KvSlice, page: PageId, bytes: &[u8]);
    fn read_receiver(&self, slice: &KvSlice, page: PageId) -> Vec<u8>;
    /// All of them.
    fn receiver_bytes(&self) -> Vec<u8>;
    /// Slices whose next checksum is wrong.
    fn damaged(&self) -> &Mutex<HashSet<KvSlice>>;
}

fn sender_page(slice: &KvSlice) -> PageId {
    PageId((slice.page + 5) % PAGES)
}

/// Where everything lands: the last page first.
pub(crate) fn receiver_tables() -> PageTables {
    let table = || PageTable { first_page: 0, pages: (0..PAGES).rev().map(PageId).collect() };
    PageTables { full: table(), window: table() }
}

/// Hands parts over as the lane wants them. A part that does not match its checksum stands for one that is damaged on its way.
pub(crate) fn hand_over(
    caches: Option<&dyn Caches>,
    ticket: &dyn SendTicket,
    parts: &[Part],
) -> Result<(), TransferError> {
    let Some(caches) = caches else {
        assert_eq!(ticket.carries(), Carries::Bytes);
        return parts.iter().try_for_each(|part| ticket.part(part.clone()));
    };
    assert_eq!(ticket.carries(), Carries::Pages);
    for part in parts.iter().filter(|part| !part.is_intact()) {
        caches.damaged().lock().unwrap().insert(part.slice);
    }
    let ours = caches.sender_layout();
    if parts.iter().any(|part| part.bytes.len() % ours.head_bytes() != 0) {
        let cause = DataError("a cache holds whole heads".into());
        return Err(TransferError::DataPath { peer: World::decode_peer(), cause });
    }
    for part in parts.iter().filter(|part| fits(&part.slice)) {
        caches.write_sender(&part.slice, sender_page(&part.slice), &part.bytes);
    }
    for rank in 0..ours.tp {
        let of_rank = parts.iter().filter(|part| rank_of(ours, &part.slice).min(ours.tp - 1) == rank);
        let slices: Vec<_> = of_rank.map(|part| (part.slice, sender_page(&part.slice))).collect();
        if !slices.is_empty() || rank == 0 {
            ticket.pages(rank, &slices)?;
        }
    }
    Ok(())
}

fn fits(slice: &KvSlice) -> bool {
    slice.head_count == 1
        && slice.head_start < layout(1).kv_heads
        && layout(1).layers(slice.group).contains(&slice.layer)
}

/// Damages announcements: the checksums of slices that are listed, and of others now and then.
pub(crate) struct Damaging {
    inner: Arc<dyn SendData>,
    caches: Arc<dyn Caches>,
    per_mille: u64,
    state: Arc<AtomicU64>,
    counts: Option<Arc<FaultCounts>>,
}

impl Damaging {
    pub(crate) fn new(
        inner: Arc<dyn SendData>,
        caches: Arc<dyn Caches>,
        plan: Option<FaultPlan>,
        counts: Option<Arc<FaultCounts>>,
    ) -> Self {
        let state = Arc::new(AtomicU64::new(plan.map_or(0, |plan| plan.seed)));
        Self { inner, caches, per_mille: plan.map_or(0, |plan| plan.corrupt.into()), state, counts }
    }
}

impl SendData for Damaging {
    fn offer(&self) -> DataOffer {
        self.inner.offer()
    }

    fn open(&self, sides: &LaneSides<'_>) -> Result<(Arc<dyn SendDataLane>, Vec<u8>), DataError> {
        let (inner, setup) = self.inner.open(sides)?;
        let Self { caches, per_mille, state, counts, .. } = self;
        let (caches, state, counts) = (Arc::clone(caches), Arc::clone(state), counts.clone());
        Ok((Arc::new(DamagingLane { inner, caches, per_mille: *per_mille, state, counts }), setup))
    }
}

struct DamagingLane {
    inner: Arc<dyn SendDataLane>,
    caches: Arc<dyn Caches>,
    per_mille: u64,
    state: Arc<AtomicU64>,
    counts: Option<Arc<FaultCounts>>,
}

impl SendDataLane for DamagingLane {
    fn connect(&self, joins: Receiver<Bytes>) -> Result<(), DataError> {
        self.inner.connect(joins)
    }

    fn gather(
        &self,
        rank: u32,
        offset: usize,
        slices: &[(KvSlice, PageId)],
        checksums: bool,
    ) -> Result<Box<dyn Gathering>, DataError> {
        let inner = self.inner.gather(rank, offset, slices, checksums)?;
        let mut damaged = self.caches.damaged().lock().unwrap();
        let bits = slices.iter().map(|(slice, _)| {
            let draw =
                self.state.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed).wrapping_mul(0xbf58_476d_1ce4_e5b9)
                    >> 32;
            let strikes = draw % 1000 < self.per_mille;
            if let Some(counts) = self.counts.as_ref().filter(|_| strikes) {
                counts.corrupt.fetch_add(1, Ordering::Relaxed);
            }
            u32::from(damaged.remove(slice) || strikes) << 7
        });
        Ok(Box::new(DamagedGathering { bits: bits.collect(), inner }))
    }

    fn announced(&self, batch: &Batch, bytes: usize) -> Result<(), DataError> {
        self.inner.announced(batch, bytes)
    }

    fn close(&self) {
        self.inner.close();
    }
}

struct DamagedGathering {
    bits: Vec<u32>,
    inner: Box<dyn Gathering>,
}

impl Gathering for DamagedGathering {
    fn is_done(&self) -> bool {
        self.inner.is_done()
    }

    fn wait(self: Box<Self>) -> Result<Vec<u32>, DataError> {
        let checksums = self.inner.wait()?;
        Ok(checksums.iter().zip(&self.bits).map(|(checksum, bits)| checksum ^ bits).collect())
    }
}
