//! Gather and scatter of KV beside a forward pass: what a number of blocks moves.

use kernels::{KvDirection, KvKernels, KvMove, KvTable};

use crate::harness::Bench;

/// One layer group of a 2,048-token chunk of gpt-oss-20b: 32 pages of 64 positions in 3 full layers, and 3 in 3 window layers.
const PIECES: usize = 32 * 3 + 3 * 3;
const HEAD_BYTES: usize = 16 << 10;

pub(crate) fn run(bench: &mut Bench) {
    bench.heading("KV between pages and staging");
    let kernels = KvKernels::load(&bench.stream.device()).unwrap();
    let pool = bench.zeros::<u8>(8 * PIECES * 8 * HEAD_BYTES).shared();
    let staging = bench.zeros::<u8>(PIECES * 8 * HEAD_BYTES).shared();
    for (heads, pieces) in [(8, PIECES), (2, PIECES), (8, 6)] {
        let piece_bytes = heads * HEAD_BYTES;
        let addresses: Vec<u64> =
            (0..pieces).map(|i| (i * 37 % pieces) * 8 * piece_bytes).map(|at| pool.address(at..at + 1)).collect();
        for blocks in [8, 16, 32, 132] {
            for (name, direction, checksums) in [
                ("kv_gather", KvDirection::Gather, false),
                ("kv_gather, checksums", KvDirection::Gather, true),
                ("kv_scatter", KvDirection::Scatter, false),
                ("kv_scatter, checksums", KvDirection::Scatter, true),
            ] {
                let mut table = KvTable::new(&bench.stream, pieces).unwrap();
                let mut times = Vec::new();
                for round in 0..12 {
                    table.fill(addresses.iter().map(|address| (*address, piece_bytes))).unwrap();
                    let start = bench.stream.record().unwrap();
                    let work = KvMove { direction, staging: &staging, offset: 0, checksums, blocks };
                    // SAFETY: both memories live until the end of this function; one stream.
                    let moving = unsafe { work.enqueue(&kernels, &bench.stream, table) }.unwrap();
                    let end = moving.event().clone();
                    table = moving.wait().unwrap();
                    if round >= 3 {
                        times.push(end.elapsed_us(&start).unwrap());
                    }
                }
                times.sort_by(f64::total_cmp);
                let shape = format!("{pieces} x {} KiB, {blocks} blocks", piece_bytes >> 10);
                bench.row(name, &shape, times[times.len() / 2], 2 * pieces * piece_bytes);
            }
        }
    }
}
