//! The receiver's half of a lane's data path: batches that were announced, in their order, until they are over.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv::{KvSlice, PageTables};
use tokio::sync::mpsc;
use types::{PageId, TicketId};

use crate::data::{Batch, BatchOrder, BatchOutcome, DataError, ReceiveDataLane};

/// A batch that has left the data path.
pub(super) struct BatchEnd {
    pub(super) ticket: TicketId,
    pub(super) slices: Vec<KvSlice>,
    pub(super) bytes: usize,
    /// Whether it was to be written.
    pub(super) was_wanted: bool,
    pub(super) outcome: BatchOutcome,
}

pub(super) type Completions = mpsc::UnboundedReceiver<BatchEnd>;

/// Where a batch's slices go.
pub(super) enum Destination {
    /// Not known yet.
    Unknown,
    Pages(Arc<PageTables>),
    /// It was sent to the wrong rank.
    Refused(DataError),
    /// Nowhere: the ticket is over.
    Nowhere,
}

pub(super) struct DataConnection {
    lane: Arc<dyn ReceiveDataLane>,
    /// Unbounded in type only: the sender's staging bounds the batches.
    completions: mpsc::UnboundedSender<BatchEnd>,
    waiting: Mutex<Waiting>,
    /// Batches in the data path, and completions not counted yet.
    outstanding: AtomicUsize,
}

#[derive(Default)]
struct Waiting {
    batches: VecDeque<(Batch, usize)>,
    is_closed: bool,
}

impl DataConnection {
    /// Of a lane that may still be opening: dropping this closes it.
    pub(super) fn new(lane: Arc<dyn ReceiveDataLane>, completions: mpsc::UnboundedSender<BatchEnd>) -> Self {
        Self { lane, completions, waiting: Mutex::default(), outstanding: AtomicUsize::new(0) }
    }

    /// Queues a batch of `bytes` bytes behind those announced before.
    pub(super) fn push(&self, batch: Batch, bytes: usize) {
        self.waiting().batches.push_back((batch, bytes));
    }

    /// Hands batches to the data path up to the first whose destination is unknown. All of a lane's batches stay in order, since two-sided paths
    /// take them so; a ticket's pages are known one step after it began, long before its first bytes are computed. `landed` is called with
    /// the number of each batch that is over. Never blocks.
    pub(super) fn pump(
        &self,
        landed: &(impl Fn(u64) + Clone + Send + 'static),
        mut destination: impl FnMut(&Batch) -> Destination,
    ) {
        let mut waiting = self.waiting();
        while let Some((batch, _)) = waiting.batches.front() {
            if waiting.is_closed {
                return;
            }
            let (pages, failure) = match destination(batch) {
                Destination::Unknown => return,
                Destination::Nowhere => (None, None),
                Destination::Refused(error) => (None, Some(error)),
                Destination::Pages(tables) => match physical(batch, &tables) {
                    Ok(pages) => (Some(pages), None),
                    Err(error) => (None, Some(error)),
                },
            };
            let Some((batch, bytes)) = waiting.batches.pop_front() else { return };
            self.take(batch, bytes, pages, failure, landed.clone());
        }
    }

    fn take(
        &self,
        batch: Batch,
        bytes: usize,
        pages: Option<Vec<PageId>>,
        failure: Option<DataError>,
        landed: impl Fn(u64) + Send + 'static,
    ) {
        let end = BatchEnd {
            ticket: batch.ticket,
            slices: batch.slices.iter().map(|staged| staged.slice).collect(),
            bytes,
            was_wanted: pages.is_some() || failure.is_some(),
            outcome: BatchOutcome::Whole,
        };
        let id = batch.id;
        self.outstanding.fetch_add(1, Ordering::Relaxed);
        let mut notice = Notice { completions: self.completions.clone(), end: Some(end) };
        let done = Box::new(move |outcome| {
            landed(id);
            notice.give(failure.map_or(outcome, BatchOutcome::Failed));
        });
        self.lane.take(BatchOrder { batch, bytes, pages, done });
    }

    /// A completion was received.
    pub(super) fn counted(&self) {
        self.outstanding.fetch_sub(1, Ordering::Relaxed);
    }

    /// The connection is over: waits until nothing that came over it is written any more.
    pub(super) async fn finish(&self, completed: &mut Completions) {
        {
            let mut waiting = self.waiting();
            waiting.is_closed = true;
            waiting.batches.clear();
        }
        self.lane.close();
        while self.outstanding.load(Ordering::Relaxed) > 0 && completed.recv().await.is_some() {
            self.counted();
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for DataConnection {
    fn drop(&mut self) {
        self.lane.close();
    }
}

/// Tells of a batch's end, also where a data path drops it unfinished: who waits for the last batch of a ticket must not wait for ever.
struct Notice {
    completions: mpsc::UnboundedSender<BatchEnd>,
    end: Option<BatchEnd>,
}

impl Notice {
    fn give(&mut self, outcome: BatchOutcome) {
        if let Some(end) = self.end.take() {
            let _ = self.completions.send(BatchEnd { outcome, ..end }); // a connection that is gone counts no more
        }
    }
}

impl Drop for Notice {
    fn drop(&mut self) {
        self.give(BatchOutcome::Failed(DataError("the data path dropped it".into())));
    }
}

fn physical(batch: &Batch, tables: &PageTables) -> Result<Vec<PageId>, DataError> {
    let page = |slice: &KvSlice| tables.physical(slice).ok_or_else(|| DataError(format!("{slice:?} has no page")));
    batch.slices.iter().map(|staged| page(&staged.slice)).collect()
}
