//! Gather and scatter against a plain copy: pieces anywhere in a pool, of one word up to eight heads, more of them than blocks; with checksums
//! and without.

use device::SharedMemory;
use kernels::{KvDirection, KvKernels, KvMove, KvTable, kv_checksum};

use crate::gpu::{Gpu, Random};

struct Case {
    name: &'static str,
    pieces: usize,
    piece_bytes: usize,
    offset: usize,
}

const CASES: [Case; 6] = [
    Case { name: "one_word", pieces: 1, piece_bytes: 16, offset: 0 },
    Case { name: "thread_tail", pieces: 5, piece_bytes: 16 * 513, offset: 48 },
    Case { name: "many_pieces", pieces: 300, piece_bytes: 16 * 131, offset: 16 },
    Case { name: "one_head", pieces: 70, piece_bytes: 16 << 10, offset: 4096 },
    Case { name: "eight_heads", pieces: 33, piece_bytes: 128 << 10, offset: 0 },
    Case { name: "no_piece", pieces: 0, piece_bytes: 16, offset: 0 },
];

#[test]
fn pieces_are_moved_as_they_are_and_nothing_beside_them() {
    let Some(gpu) = Gpu::open() else { return };
    let kernels = KvKernels::load(&gpu.stream.device()).unwrap();
    let mut random = Random::new();
    for (case, checked) in CASES.iter().flat_map(|case| [(case, true), (case, false)]) {
        let places = 2 * case.pieces + 3;
        let pool: Vec<u8> = (0..places * case.piece_bytes).map(|_| random.next() as u8).collect();
        let mut order: Vec<usize> = (0..places).collect();
        (1..places).rev().for_each(|i| order.swap(i, random.below(i + 1)));
        order.truncate(case.pieces);
        let staged_bytes = case.pieces * case.piece_bytes;
        let source = gpu.upload(&pool);
        let staging = gpu.poisoned::<u8>(case.offset + staged_bytes + 64);
        let target = gpu.poisoned::<u8>(pool.len());
        let mut checksums = Vec::new();
        for (direction, memory) in [(KvDirection::Gather, source.shared()), (KvDirection::Scatter, target.shared())] {
            let mut table = KvTable::new(&gpu.stream, case.pieces).unwrap();
            let piece = |place: &usize, memory: &SharedMemory| {
                (memory.address(place * case.piece_bytes..(place + 1) * case.piece_bytes), case.piece_bytes)
            };
            table.fill(order.iter().map(|place| piece(place, &memory))).unwrap();
            let staging = &staging.shared();
            let work = KvMove { direction, staging, offset: case.offset, checksums: checked, blocks: 16 };
            // SAFETY: three buffers of this test, alive until the end of the loop; the moves are on one stream.
            let moving = unsafe { work.enqueue(&kernels, &gpu.stream, table) }.unwrap();
            let table = moving.wait().unwrap();
            checksums.extend(checked.then(|| table.checksums().to_vec()));
        }
        let staged = gpu.stream.download(staging.view()).unwrap();
        let (before, rest) = staged.split_at(case.offset);
        let (staged, after) = rest.split_at(staged_bytes);
        assert!(before.iter().chain(after).all(|byte| *byte == 0xff), "{}: bytes around staging", case.name);
        let mut wanted = vec![0xff; pool.len()];
        for (i, place) in order.iter().enumerate() {
            let bytes = place * case.piece_bytes..(place + 1) * case.piece_bytes;
            assert_eq!(staged[i * case.piece_bytes..][..case.piece_bytes], pool[bytes.clone()], "{}: {i}", case.name);
            for sums in &checksums {
                assert_eq!(sums[i], kv_checksum(&pool[bytes.clone()]), "{}: checksum {i}", case.name);
            }
            wanted[bytes.clone()].copy_from_slice(&pool[bytes]);
        }
        assert!(gpu.stream.download(target.view()).unwrap() == wanted, "{}: pages", case.name);
    }
}

#[test]
fn pieces_that_do_not_fit_are_refused() {
    let Some(gpu) = Gpu::open() else { return };
    let mut table = KvTable::new(&gpu.stream, 2).unwrap();
    assert!(table.fill([(64, 32), (96, 16)]).is_err(), "unequal");
    assert!(table.fill([(64, 24)]).is_err(), "no whole word");
    assert!(table.fill([(72, 16)]).is_err(), "not aligned");
    assert!(table.fill([(64, 16); 3]).is_err(), "too many");
    table.fill([(64, 16); 2]).unwrap();
    assert_eq!(table.bytes(), 32);
}
