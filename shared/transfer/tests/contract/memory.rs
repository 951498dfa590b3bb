//! A data path over plain memory of this process: what the protocol of announcements does can be tested without a GPU.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use kv::KvSlice;
use transfer::TransportChoice;
use transfer::data::{
    Batch, BatchOrder, BatchOutcome, DataError, DataOffer, Gathering, LaneSides, PairRate, Path, ReceiveData,
    ReceiveDataLane, SendData, SendDataLane,
};
use transfer::fault::FaultPlan;
use types::{KvLayout, PageId};

use crate::data::{Caches, PAGES, rank_of};
use crate::support::{Options, World, piped_with_data};

/// Staging by number, as memory across processes is by handle.
static STAGING: Mutex<Option<HashMap<u64, Staging>>> = Mutex::new(None);
static NEXT: AtomicU64 = AtomicU64::new(0);

type Staging = Arc<Vec<Mutex<Vec<u8>>>>;

struct MemoryCache {
    layout: KvLayout,
    /// Of all attention groups.
    ranks: Vec<Mutex<Vec<u8>>>,
}

impl MemoryCache {
    fn new(layout: &KvLayout, groups: u32) -> Self {
        let layers = layout.full_layers.len() + layout.window_layers.len();
        let bytes = PAGES as usize * layers * (layout.kv_heads / layout.tp) as usize * layout.head_bytes();
        Self { layout: layout.clone(), ranks: (0..groups * layout.tp).map(|_| Mutex::new(vec![0xee; bytes])).collect() }
    }

    /// On the last attention group.
    fn place(&self, slice: &KvSlice, page: PageId) -> Option<(u32, Range<usize>)> {
        let (rank, heads) = (rank_of(&self.layout, slice), self.layout.kv_heads / self.layout.tp);
        let layers = self.layout.full_layers.len() + self.layout.window_layers.len();
        let known = self.layout.layers(slice.group).contains(&slice.layer) && rank < self.layout.tp;
        let first =
            (page.0 as usize * layers + slice.layer as usize) * heads as usize + (slice.head_start % heads) as usize;
        let end = first + slice.head_count as usize;
        let rank = self.ranks.len() as u32 - self.layout.tp + rank;
        known.then(|| (rank, first * self.layout.head_bytes()..end * self.layout.head_bytes()))
    }
}

struct MemoryCaches {
    sender: Arc<MemoryCache>,
    receiver: Arc<MemoryCache>,
    damaged: Mutex<HashSet<KvSlice>>,
}

impl Caches for MemoryCaches {
    fn sender_layout(&self) -> &KvLayout {
        &self.sender.layout
    }

    fn write_sender(&self, slice: &KvSlice, page: PageId, bytes: &[u8]) {
        let (rank, place) = self.sender.place(slice, page).unwrap();
        self.sender.ranks[rank as usize].lock().unwrap()[place].copy_from_slice(bytes);
    }

    fn read_receiver(&self, slice: &KvSlice, page: PageId) -> Vec<u8> {
        let (rank, place) = self.receiver.place(slice, page).unwrap();
        self.receiver.ranks[rank as usize].lock().unwrap()[place].to_vec()
    }

    fn receiver_bytes(&self) -> Vec<u8> {
        self.receiver.ranks.iter().flat_map(|rank| rank.lock().unwrap().clone()).collect()
    }

    fn damaged(&self) -> &Mutex<HashSet<KvSlice>> {
        &self.damaged
    }
}

fn offer(first: u8, cache: &MemoryCache, batch_bytes_max: u32) -> DataOffer {
    let gpus = (0..cache.ranks.len()).map(|rank| [first + rank as u8; 16]).collect();
    DataOffer { choice: TransportChoice::Auto, host: 1, gpus, nccl: 0, batch_bytes_max }
}

/// What goes otherwise than it should in one test, and what it sees of that.
#[derive(Default)]
pub(crate) struct Script {
    /// What the sender says in HELLO of its largest batch, if not the truth.
    pub(crate) sender_claims: Option<u32>,
    /// The batch that the receiver cannot take, so that the two sides are out of step.
    pub(crate) broken_batch: Option<u64>,
    /// Pairs that both sides would join. The receiver refuses the second.
    pub(crate) joins: u8,
    /// Sides that wait for the other one when the lane is opened, for ever.
    pub(crate) sender_waits: bool,
    pub(crate) receiver_waits: bool,
    /// Names that have been made, and those of which the sender was told.
    pub(crate) made: Mutex<Vec<u8>>,
    pub(crate) told: Mutex<Vec<u8>>,
    pub(crate) sender: Closing,
    pub(crate) receiver: Closing,
    /// Whether the receiver has let go of its half.
    pub(crate) is_receiver_dropped: AtomicBool,
}

/// Whether one half of a lane is waiting for the other one, or closed.
#[derive(Default)]
pub(crate) struct Closing {
    state: Mutex<(bool, bool)>,
    changed: Condvar,
}

impl Closing {
    /// Waits for the other side, which never comes.
    fn wait(&self) -> DataError {
        let mut state = self.state.lock().unwrap();
        state.0 = true;
        self.changed.notify_all();
        drop(self.changed.wait_while(state, |(_, is_closed)| !*is_closed).unwrap());
        DataError("closed".into())
    }

    fn close(&self) {
        self.state.lock().unwrap().1 = true;
        self.changed.notify_all();
    }

    /// Whether the half comes to wait, within a bound.
    pub(crate) async fn is_waiting(&self) -> bool {
        self.comes_to(|(is_waiting, _)| is_waiting).await
    }

    /// Whether the half comes to be closed, within a bound.
    pub(crate) async fn is_closed(&self) -> bool {
        self.comes_to(|(_, is_closed)| is_closed).await
    }

    async fn comes_to(&self, wanted: impl Fn((bool, bool)) -> bool) -> bool {
        for _ in 0..200 {
            if wanted(*self.state.lock().unwrap()) {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        false
    }
}

fn checksum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(7, |sum, byte| sum.wrapping_mul(31).wrapping_add((*byte).into()))
}

struct MemorySend {
    cache: Arc<MemoryCache>,
    staging_bytes: usize,
    batch_bytes_max: u32,
    script: Arc<Script>,
}

impl SendData for MemorySend {
    fn offer(&self) -> DataOffer {
        offer(1, &self.cache, self.script.sender_claims.unwrap_or(self.batch_bytes_max))
    }

    fn open(&self, sides: &LaneSides<'_>) -> Result<(Arc<dyn SendDataLane>, Vec<u8>), DataError> {
        assert_eq!(sides.paths.pair(0, 0), Path::Ipc);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let rank = || Mutex::new(vec![0; self.staging_bytes]);
        let staging: Staging = Arc::new((0..sides.sender.tp).map(|_| rank()).collect());
        STAGING.lock().unwrap().get_or_insert_default().insert(number, Arc::clone(&staging));
        let lane = MemorySendLane { cache: Arc::clone(&self.cache), staging, script: Arc::clone(&self.script) };
        Ok((Arc::new(lane), number.to_le_bytes().to_vec()))
    }
}

struct MemorySendLane {
    cache: Arc<MemoryCache>,
    staging: Staging,
    script: Arc<Script>,
}

struct Gathered(Vec<u32>);

impl Gathering for Gathered {
    fn is_done(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>) -> Result<Vec<u32>, DataError> {
        Ok(self.0)
    }
}

impl SendDataLane for MemorySendLane {
    fn connect(&self, joins: mpsc::Receiver<Bytes>) -> Result<(), DataError> {
        if self.script.sender_waits {
            return Err(self.script.sender.wait());
        }
        for _ in 0..self.script.joins {
            let name = joins.recv().map_err(|_| DataError("nothing to join".into()))?;
            self.script.told.lock().unwrap().extend(name);
        }
        Ok(())
    }

    fn gather(
        &self,
        rank: u32,
        mut offset: usize,
        slices: &[(KvSlice, PageId)],
        checksums: bool,
    ) -> Result<Box<dyn Gathering>, DataError> {
        assert!(checksums, "the suite compares all");
        let mut staging = self.staging[rank as usize].lock().unwrap();
        let mut sums = Vec::new();
        for (slice, page) in slices {
            let place = self.cache.place(slice, *page).filter(|(owner, _)| *owner == rank);
            let (_, place) = place.ok_or_else(|| DataError(format!("{slice:?} is not on rank {rank}")))?;
            let pool = self.cache.ranks[rank as usize].lock().unwrap();
            let bytes = pool.get(place).ok_or_else(|| DataError(format!("{slice:?} is beyond the pool")))?;
            staging[offset..offset + bytes.len()].copy_from_slice(bytes);
            offset += bytes.len();
            sums.push(checksum(bytes));
        }
        Ok(Box::new(Gathered(sums)))
    }

    fn announced(&self, _: &Batch, _: usize) -> Result<(), DataError> {
        Ok(())
    }

    fn close(&self) {
        self.script.sender.close();
    }
}

struct MemoryReceive {
    cache: Arc<MemoryCache>,
    batch_bytes_max: u32,
    script: Arc<Script>,
}

impl ReceiveData for MemoryReceive {
    fn offer(&self) -> DataOffer {
        offer(101, &self.cache, self.batch_bytes_max)
    }

    fn open(&self, _: &LaneSides<'_>, setup: &[u8]) -> Result<Arc<dyn ReceiveDataLane>, DataError> {
        let number = u64::from_le_bytes(setup.try_into().map_err(|_| DataError("not a number".into()))?);
        let staging = STAGING.lock().unwrap().as_ref().and_then(|staging| staging.get(&number).cloned());
        let staging = staging.ok_or_else(|| DataError(format!("no staging {number}")))?;
        let (queue, inbox) = mpsc::channel::<BatchOrder>();
        let (cache, broken) = (Arc::clone(&self.cache), self.script.broken_batch);
        std::thread::spawn(move || {
            while let Ok(order) = inbox.recv() {
                std::thread::sleep(Duration::from_micros(200));
                if broken == Some(order.batch.id) {
                    (order.done)(BatchOutcome::Broken(DataError("out of step".into())));
                } else {
                    take(&cache, &staging, order);
                }
            }
        });
        Ok(Arc::new(MemoryReceiveLane { queue: Mutex::new(queue), script: Arc::clone(&self.script) }))
    }
}

fn take(cache: &MemoryCache, staging: &Staging, order: BatchOrder) {
    let BatchOrder { batch, bytes, pages, done } = order;
    let Some(pages) = pages else { return done(BatchOutcome::Whole) };
    let staging = staging[batch.sender_rank as usize].lock().unwrap();
    let first = batch.offset as usize;
    let staged = staging[first..first + bytes].chunks(bytes / batch.slices.len());
    let mut corrupt = None;
    for ((slice, page), bytes) in batch.slices.iter().zip(pages).zip(staged) {
        let (rank, place) = cache.place(&slice.slice, page).unwrap();
        assert_eq!(rank, batch.receiver_rank);
        cache.ranks[rank as usize].lock().unwrap()[place].copy_from_slice(bytes);
        if checksum(bytes) != slice.checksum {
            corrupt.get_or_insert(slice.slice);
        }
    }
    done(corrupt.map_or(BatchOutcome::Whole, BatchOutcome::Corrupt));
}

struct MemoryReceiveLane {
    queue: Mutex<mpsc::Sender<BatchOrder>>,
    script: Arc<Script>,
}

impl Drop for MemoryReceiveLane {
    fn drop(&mut self) {
        self.script.is_receiver_dropped.store(true, Ordering::Release);
    }
}

impl ReceiveDataLane for MemoryReceiveLane {
    fn connect(&self, join: &dyn Fn(Bytes)) -> Result<Vec<PairRate>, DataError> {
        if self.script.receiver_waits {
            return Err(self.script.receiver.wait());
        }
        for name in 0..self.script.joins {
            self.script.made.lock().unwrap().push(name);
            join(Bytes::from(vec![name]));
            let started = Instant::now();
            while !self.script.told.lock().unwrap().contains(&name) {
                assert!(started.elapsed() < Duration::from_secs(2), "the sender does not join pair {name}");
                std::thread::sleep(Duration::from_millis(1));
            }
            if name == 1 {
                return Err(DataError("pair 1 is slow".into()));
            }
        }
        Ok(vec![PairRate { sender_rank: 0, receiver_rank: 0, path: Path::Ipc, mb_per_s: 1 }])
    }

    fn take(&self, order: BatchOrder) {
        self.queue.lock().unwrap().send(order).unwrap();
    }

    fn close(&self) {
        self.script.receiver.close();
    }
}

fn world(options: &Options, plan: Option<FaultPlan>, script: Arc<Script>) -> World {
    let sender = Arc::new(MemoryCache::new(&options.sender_layout, 1));
    let receiver = Arc::new(MemoryCache::new(&options.receiver_layout, options.groups));
    let config = &options.config;
    let send = Arc::new(MemorySend {
        cache: Arc::clone(&sender),
        staging_bytes: config.in_flight_bytes_max as usize + 2 * config.batch_bytes_max as usize,
        batch_bytes_max: config.batch_bytes_max,
        script: Arc::clone(&script),
    });
    let batch_bytes_max = options.receiver_config().batch_bytes_max;
    let receive = Arc::new(MemoryReceive { cache: Arc::clone(&receiver), batch_bytes_max, script });
    let caches = Arc::new(MemoryCaches { sender, receiver, damaged: Mutex::default() });
    piped_with_data(options, send, receive, caches, plan)
}

pub(crate) fn over_memory(options: Options) -> BoxFuture<'static, Option<World>> {
    async move { Some(world(&options, None, Arc::default())) }.boxed()
}

pub(crate) fn scripted(options: &Options, script: Script) -> (World, Arc<Script>) {
    let script = Arc::new(script);
    (world(options, None, Arc::clone(&script)), script)
}

/// The receiver has three attention groups, each with pages of its own.
pub(crate) fn over_memory_to_a_group(options: Options) -> BoxFuture<'static, Option<World>> {
    over_memory(Options { groups: 3, ..options })
}

pub(crate) async fn faulty(options: Options, plan: FaultPlan) -> World {
    world(&options, Some(plan), Arc::default())
}
