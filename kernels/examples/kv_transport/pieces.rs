//! Pages that lie anywhere, moved in a few large pieces or in many small ones.
//!
//! The cache has the shape of gpt-oss-20b: 12 layers of full attention, 8 KV heads of 64, keys and values in bf16, pages of 64
//! positions, in a page one layer after the other. So a prompt of 8192 tokens is 128 pages, each of 12 pieces of 128 KiB.

use std::time::Instant;

use device::{DeviceBuffer, SharedMemory, Stream};
use kernels::{KvDirection, KvKernels, KvMove, KvMoving, KvTable};

use crate::ipc::{Mapped, export};
use crate::side::{Peer, Side, unhex};
use crate::{BOUND, median};

const LAYERS: usize = 12;
const PIECE: usize = 64 * 8 * 64 * 2 * 2;
const POOL_PAGES: usize = 2048;
const PROMPTS: [usize; 2] = [128, 2048];
const REPEATS: usize = 6;
/// Blocks of the gathering and scattering kernels.
const BLOCKS: u32 = 32;

/// The cache of one side, and room for one layer of the longest prompt.
pub(crate) struct Cache {
    pool: DeviceBuffer<u8>,
    staging: DeviceBuffer<u8>,
    shared_staging: SharedMemory,
    /// For receives of single pieces: one buffer each.
    landing: Vec<DeviceBuffer<u8>>,
    kernels: KvKernels,
    tables: Vec<KvTable>,
    moving: Vec<KvMoving>,
}

impl Cache {
    pub(crate) fn new(side: &Side) -> Self {
        let stream = &side.stream;
        let pool = stream.zeros(POOL_PAGES * LAYERS * PIECE).unwrap();
        let staging = stream.zeros(POOL_PAGES * PIECE).unwrap();
        let tables = (0..LAYERS).map(|_| KvTable::new(stream, POOL_PAGES).unwrap()).collect();
        let kernels = KvKernels::load(&side.device).unwrap();
        let landing = (0..PROMPTS[0]).map(|_| stream.zeros(PIECE).unwrap()).collect();
        stream.synchronize().unwrap();
        let shared_staging = staging.shared();
        Self { pool, staging, shared_staging, landing, kernels, tables, moving: Vec::new() }
    }

    /// Handles of the pool and of staging, for the other process.
    pub(crate) fn handles(&self, stream: &Stream) -> String {
        format!("{} {}", export(stream, &self.pool), export(stream, &self.staging))
    }

    /// Enqueues one layer's move between the pages and staging, which may be another process's.
    fn stage(
        &mut self,
        stream: &Stream,
        direction: KvDirection,
        staging: Option<&SharedMemory>,
        job: (usize, usize, u32),
    ) {
        let (pages, layer, blocks) = job;
        let base = stream.input(&self.pool.view()).address();
        let mut table = self.tables.pop().expect("one for each layer");
        table.fill(places(pages, layer).map(|at| (base + at as u64, PIECE))).unwrap();
        let staging = staging.unwrap_or(&self.shared_staging);
        let movement = KvMove { direction, staging, offset: 0, checksums: false, blocks };
        // SAFETY: pools and staging live as long as both processes measure, and the stream orders this side's use of them.
        self.moving.push(unsafe { movement.enqueue(&self.kernels, stream, table) }.unwrap());
    }

    /// Waits for all that was enqueued on `stream`.
    fn finish(&mut self, stream: &Stream) {
        assert!(stream.record().unwrap().passes_within(BOUND));
        self.tables.extend(self.moving.drain(..).map(|moving| moving.wait().unwrap()));
    }

    /// The receiver's part: `REPEATS` prompts through staging, or piece by piece.
    pub(crate) fn receive(&mut self, side: &Side, pages: usize, gathered: bool) {
        let communicator = side.communicator.as_ref().unwrap();
        for _ in 0..REPEATS {
            for layer in 0..LAYERS {
                if gathered {
                    communicator.recv(&side.stream, self.staging.slice_mut(..pages * PIECE), 0).unwrap();
                    self.stage(&side.stream, KvDirection::Scatter, None, (pages, layer, BLOCKS));
                } else {
                    let mut landing = self.landing.iter_mut();
                    communicator
                        .group(|group| landing.try_for_each(|piece| group.recv(&side.stream, piece.view_mut(), 0)))
                        .unwrap();
                }
            }
            self.finish(&side.stream);
        }
    }
}

/// Where a layer's pieces of a prompt lie in a pool: in pages from all over it.
fn places(pages: usize, layer: usize) -> impl Iterator<Item = usize> {
    (0..pages).map(move |page| ((page * 779) % POOL_PAGES * LAYERS + layer) * PIECE)
}

/// Runs one prompt `REPEATS` times: microseconds in all, and microseconds of the enqueuing thread. The first does not count.
fn time(mut enqueue: impl FnMut(), mut finish: impl FnMut()) -> (f64, f64) {
    let mut all = Vec::new();
    let mut host = Vec::new();
    for _ in 0..REPEATS {
        let started = Instant::now();
        enqueue();
        host.push(started.elapsed().as_secs_f64() * 1e6);
        finish();
        all.push(started.elapsed().as_secs_f64() * 1e6);
    }
    (median(all.split_off(1)), median(host.split_off(1)))
}

pub(crate) fn run() {
    println!("## Pages in large pieces or in small ones\n");
    println!(
        "KV of the full layers of a 20b prompt, from pages all over one GPU's pool to the other GPU. Times are the sender's, from the"
    );
    println!(
        "first call to the end of its last operation, layer by layer on one stream; medians of {}.\n",
        REPEATS - 1
    );
    let mut side = Side::open(0);
    let mut peer = Peer::spawn();
    peer.join(&mut side, 4);
    peer.warm_up(&mut side);
    let mut cache = Cache::new(&side);
    staging(&side, &mut cache);
    println!("| way | 8k: us | GB/s | host us | 128k: us | GB/s | host us |");
    println!("|---|---|---|---|---|---|---|");
    let handles = peer.ask("cache");
    let (pool, remote_staging) = handles.split_once(' ').unwrap();
    let pool = Mapped::open(&side.stream, pool, POOL_PAGES * LAYERS * PIECE);
    let handle = unhex(remote_staging).try_into().unwrap();
    let remote_staging = SharedMemory::import(&side.device, &handle, POOL_PAGES * PIECE).unwrap();
    row("gather, one send a layer (4 blocks), scatter", |pages| sends(&side, &mut peer, &mut cache, pages, true));
    row("a group of sends a layer, one a piece (4 blocks)", |pages| {
        if pages > PROMPTS[0] { None } else { sends(&side, &mut peer, &mut cache, pages, false) }
    });
    row("gather, one copy a layer by the copy engine", |pages| {
        gathered_copies(&side, &mut cache, &remote_staging, pages)
    });
    row("gather straight into the other GPU's staging", |pages| {
        remote_gather(&side, &mut cache, &remote_staging, pages)
    });
    row("a copy a piece by the copy engine", |pages| Some(copies(&side, &cache, &pool, pages, false)));
    row("all pieces in one batch of copies", |pages| Some(copies(&side, &cache, &pool, pages, true)));
    println!();
    pool.close();
    peer.tell("close");
    side.communicator.take().unwrap().close(BOUND).unwrap();
    peer.answer();
}

fn row(name: &str, mut measure: impl FnMut(usize) -> Option<(f64, f64)>) {
    let cells = PROMPTS.map(|pages| {
        measure(pages).map_or_else(
            || "- | - | -".into(),
            |(us, host)| format!("{us:.0} | {:.0} | {host:.0}", (pages * LAYERS * PIECE) as f64 / us / 1e3),
        )
    });
    println!("| {name} | {} |", cells.join(" | "));
}

/// What gathering and scattering take by themselves.
fn staging(side: &Side, cache: &mut Cache) {
    println!("| blocks | gather of an 8k prompt, us | GB/s | scatter, us | GB/s |");
    println!("|---|---|---|---|---|");
    let pages = PROMPTS[0];
    for blocks in [8, 16, 32, 64, 128] {
        let [gather, scatter] = [KvDirection::Gather, KvDirection::Scatter].map(|direction| {
            let mut times: Vec<f64> = (0..REPEATS)
                .map(|_| {
                    let start = side.stream.record().unwrap();
                    (0..LAYERS).for_each(|layer| cache.stage(&side.stream, direction, None, (pages, layer, blocks)));
                    let end = side.stream.record().unwrap();
                    cache.finish(&side.stream);
                    end.elapsed_us(&start).unwrap()
                })
                .collect();
            median(times.split_off(1))
        });
        let rate = |us: f64| (pages * LAYERS * PIECE) as f64 / us / 1e3;
        println!("| {blocks} | {gather:.0} | {:.0} | {scatter:.0} | {:.0} |", rate(gather), rate(scatter));
    }
    println!();
}

fn sends(side: &Side, peer: &mut Peer, cache: &mut Cache, pages: usize, gathered: bool) -> Option<(f64, f64)> {
    peer.tell(&format!("pages {pages} {}", u8::from(gathered)));
    let communicator = side.communicator.as_ref().unwrap();
    let cache = std::cell::RefCell::new(cache);
    let enqueue = || {
        let cache = &mut **cache.borrow_mut();
        for layer in 0..LAYERS {
            if gathered {
                cache.stage(&side.stream, KvDirection::Gather, None, (pages, layer, BLOCKS));
                communicator.send(&side.stream, cache.staging.slice(..pages * PIECE), 1).unwrap();
            } else {
                let pool = &cache.pool;
                communicator
                    .group(|group| {
                        places(pages, layer).try_for_each(|at| group.send(&side.stream, pool.slice(at..at + PIECE), 1))
                    })
                    .unwrap();
            }
        }
    };
    let times = time(enqueue, || cache.borrow_mut().finish(&side.stream));
    peer.answer();
    Some(times)
}

fn gathered_copies(side: &Side, cache: &mut Cache, remote: &SharedMemory, pages: usize) -> Option<(f64, f64)> {
    let cache = std::cell::RefCell::new(cache);
    let enqueue = || {
        let cache = &mut **cache.borrow_mut();
        for layer in 0..LAYERS {
            cache.stage(&side.stream, KvDirection::Gather, None, (pages, layer, BLOCKS));
            let own = &cache.shared_staging;
            // SAFETY: as in `stage`; nobody reads the other side's staging.
            unsafe { side.stream.copy_shared((remote, 0), (own, 0), pages * PIECE) }.unwrap();
        }
    };
    Some(time(enqueue, || cache.borrow_mut().finish(&side.stream)))
}

fn remote_gather(side: &Side, cache: &mut Cache, remote: &SharedMemory, pages: usize) -> Option<(f64, f64)> {
    let cache = std::cell::RefCell::new(cache);
    let enqueue = || {
        let cache = &mut **cache.borrow_mut();
        (0..LAYERS)
            .for_each(|layer| cache.stage(&side.stream, KvDirection::Gather, Some(remote), (pages, layer, BLOCKS)));
    };
    Some(time(enqueue, || cache.borrow_mut().finish(&side.stream)))
}

fn copies(side: &Side, cache: &Cache, pool: &Mapped, pages: usize, batched: bool) -> (f64, f64) {
    let own = side.stream.input(&cache.pool.view()).address();
    let places: Vec<usize> = (0..LAYERS).flat_map(|layer| places(pages, layer)).collect();
    // Makes the context current on this thread.
    side.stream.synchronize().unwrap();
    time(
        || pool.push_pieces(own, &places, PIECE, batched),
        || {
            pool.finish(BOUND).expect("copies end");
        },
    )
}
