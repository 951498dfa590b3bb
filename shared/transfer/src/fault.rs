//! A decorator that injects faults into any [`SendTransport`]: for tests and simulations.
//!
//! Faults are drawn from a seeded generator, so that a run can be repeated. Corruption flips a bit *after* the checksum was taken, as a
//! broken link would.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::BytesMut;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use kv::KvSlice;
use types::{DpGroup, PageId, PeerId, SplitMix64, TicketId};

use crate::contract::{Carries, FirstToken, Part, Receipt, SendLane, SendTicket, SendTransport};
use crate::error::{AbortReason, LossCause, TransferError};

/// How often each fault strikes, per mille of the occasions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// Seed of the generator.
    pub seed: u64,
    /// Flips a bit of a part.
    pub corrupt: u16,
    /// Sends a part twice. The lane then needs room for twice the bytes.
    pub duplicate: u16,
    /// Holds a part back until the next one, or COMMIT.
    pub reorder: u16,
    /// Closes the connection in place of sending a part.
    pub disconnect: u16,
    /// Waits before BEGIN, room or COMMIT, ...
    pub delay: u16,
    /// ... up to so long.
    pub delay_max: Duration,
}

/// Faults that struck.
#[derive(Debug, Default)]
pub struct FaultCounts {
    /// Bits flipped.
    pub corrupt: AtomicU64,
    /// Parts sent twice.
    pub duplicate: AtomicU64,
    /// Parts held back.
    pub reorder: AtomicU64,
    /// Connections closed.
    pub disconnect: AtomicU64,
    /// Waits.
    pub delay: AtomicU64,
}

/// The decorated transport.
pub struct Faulty<T> {
    inner: T,
    dice: Arc<Dice>,
}

struct Dice {
    plan: FaultPlan,
    random: Mutex<SplitMix64>,
    counts: Arc<FaultCounts>,
}

impl Dice {
    fn below(&self, bound: u64) -> u64 {
        self.random.lock().unwrap_or_else(PoisonError::into_inner).below(bound)
    }

    fn strikes(&self, per_mille: u16, count: &AtomicU64) -> bool {
        let strikes = per_mille > 0 && self.below(1000) < u64::from(per_mille);
        if strikes {
            count.fetch_add(1, Ordering::Relaxed);
        }
        strikes
    }

    async fn maybe_wait(&self) {
        if self.strikes(self.plan.delay, &self.counts.delay) {
            let longest_us = self.plan.delay_max.as_micros() as u64;
            tokio::time::sleep(Duration::from_micros(self.below(longest_us + 1))).await;
        }
    }
}

impl<T> Faulty<T> {
    /// Decorates `inner`.
    #[must_use]
    pub fn new(inner: T, plan: FaultPlan) -> Self {
        let counts = Arc::new(FaultCounts::default());
        Self { inner, dice: Arc::new(Dice { plan, random: Mutex::new(SplitMix64(plan.seed)), counts }) }
    }

    /// What has struck so far.
    #[must_use]
    pub fn counts(&self) -> Arc<FaultCounts> {
        Arc::clone(&self.dice.counts)
    }
}

impl<T: SendTransport> SendTransport for Faulty<T> {
    fn connect<'a>(
        &'a self,
        address: &'a str,
        peer: &'a PeerId,
    ) -> BoxFuture<'a, Result<Box<dyn SendLane>, TransferError>> {
        async move {
            let inner: Arc<dyn SendLane> = Arc::from(self.inner.connect(address, peer).await?);
            Ok(Box::new(FaultyLane { inner, dice: Arc::clone(&self.dice) }) as Box<dyn SendLane>)
        }
        .boxed()
    }
}

struct FaultyLane {
    inner: Arc<dyn SendLane>,
    dice: Arc<Dice>,
}

impl SendLane for FaultyLane {
    fn peer(&self) -> &PeerId {
        self.inner.peer()
    }

    fn begin(&self, ticket: TicketId, group: DpGroup) -> BoxFuture<'_, Result<Box<dyn SendTicket>, TransferError>> {
        async move {
            self.dice.maybe_wait().await;
            let ticket = FaultyTicket {
                inner: self.inner.begin(ticket, group).await?,
                lane: Arc::clone(&self.inner),
                dice: Arc::clone(&self.dice),
                held_back: Mutex::new(None),
                spare: AtomicUsize::new(0),
            };
            Ok(Box::new(ticket) as Box<dyn SendTicket>)
        }
        .boxed()
    }

    fn lost(&self) -> Option<LossCause> {
        self.inner.lost()
    }

    fn close(&self) {
        self.inner.close();
    }
}

impl Drop for FaultyLane {
    fn drop(&mut self) {
        self.inner.close();
    }
}

struct FaultyTicket {
    inner: Box<dyn SendTicket>,
    lane: Arc<dyn SendLane>,
    dice: Arc<Dice>,
    held_back: Mutex<Option<Part>>,
    /// Bytes of room set aside for duplicates.
    spare: AtomicUsize,
}

impl FaultyTicket {
    /// Takes room for a duplicate, if there is some.
    fn take_spare(&self, bytes: usize) -> bool {
        let take = |spare: usize| spare.checked_sub(bytes);
        self.spare.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }

    fn take_held_back(&self) -> Option<Part> {
        self.held_back.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl SendTicket for FaultyTicket {
    fn id(&self) -> TicketId {
        self.inner.id()
    }

    fn reserve(&self, bytes: usize) -> BoxFuture<'_, Result<(), TransferError>> {
        async move {
            self.dice.maybe_wait().await;
            let spare = if self.dice.plan.duplicate > 0 { bytes } else { 0 };
            self.inner.reserve(bytes + spare).await?;
            self.spare.fetch_add(spare, Ordering::Relaxed);
            Ok(())
        }
        .boxed()
    }

    fn try_reserve(&self, bytes: usize) -> Result<bool, TransferError> {
        let spare = if self.dice.plan.duplicate > 0 { bytes } else { 0 };
        let has_room = self.inner.try_reserve(bytes + spare)?;
        self.spare.fetch_add(if has_room { spare } else { 0 }, Ordering::Relaxed);
        Ok(has_room)
    }

    fn part(&self, mut part: Part) -> Result<(), TransferError> {
        let Dice { plan, counts, .. } = &*self.dice;
        if self.dice.strikes(plan.disconnect, &counts.disconnect) {
            self.lane.close();
        }
        if !part.bytes.is_empty() && self.dice.strikes(plan.corrupt, &counts.corrupt) {
            let mut bytes = BytesMut::from(&part.bytes[..]);
            let bit = self.dice.below(8 * bytes.len() as u64) as usize;
            bytes[bit / 8] ^= 1 << (bit % 8);
            part.bytes = bytes.freeze();
        }
        if self.take_spare(part.bytes.len()) && self.dice.strikes(plan.duplicate, &counts.duplicate) {
            self.inner.part(part.clone())?;
        }
        if let Some(earlier) = self.take_held_back() {
            self.inner.part(part)?;
            return self.inner.part(earlier);
        }
        if self.dice.strikes(plan.reorder, &counts.reorder) {
            *self.held_back.lock().unwrap_or_else(PoisonError::into_inner) = Some(part);
            return self.inner.ended().map_or(Ok(()), Err);
        }
        self.inner.part(part)
    }

    fn carries(&self) -> Carries {
        self.inner.carries()
    }

    /// Whole: what a data path moves is damaged by decorating that.
    fn pages(&self, rank: u32, slices: &[(KvSlice, PageId)]) -> Result<(), TransferError> {
        let Dice { plan, counts, .. } = &*self.dice;
        if self.dice.strikes(plan.disconnect, &counts.disconnect) {
            self.lane.close();
        }
        self.inner.pages(rank, slices)
    }

    fn ended(&self) -> Option<TransferError> {
        self.inner.ended()
    }

    fn commit(&self, first: FirstToken) -> BoxFuture<'_, Result<Receipt, TransferError>> {
        async move {
            self.dice.maybe_wait().await;
            if let Some(part) = self.take_held_back() {
                self.inner.part(part)?;
            }
            self.inner.commit(first).await
        }
        .boxed()
    }

    fn abort(&self, reason: AbortReason) -> BoxFuture<'_, Result<(), TransferError>> {
        self.inner.abort(reason)
    }
}
