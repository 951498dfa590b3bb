//! Rotary positions and the write into pages.

use half::bf16;
use kernels::{KvCache, KvFormat, PageTable, RopeKv};
use model::{E4M3, e4m3, reference};

use crate::gpu::{BF16_ROUNDING, Gpu, Random, compare, widen};

const DIM: usize = 64;
const MAX_POSITION: usize = 512;

#[test]
fn keys_land_in_their_pages() {
    check(KvFormat::Bf16, 1.0);
}

#[test]
fn keys_land_in_their_pages_in_e4m3() {
    check(KvFormat::E4M3, 1.0);
}

#[test]
fn what_e4m3_cannot_hold_becomes_the_largest_number_or_vanishes() {
    check(KvFormat::E4M3, 300.0);
    check(KvFormat::E4M3, 0.005);
}

/// The cache's numbers. What nothing was written to is a NaN.
fn numbers(format: KvFormat, pool: &[u8]) -> Vec<f32> {
    match format {
        KvFormat::Bf16 => widen(bytemuck::cast_slice::<u8, bf16>(pool)),
        KvFormat::E4M3 => pool.iter().map(|bits| E4M3(*bits).to_f32()).collect(),
    }
}

/// The error that one rounding may make: half of what lies between two numbers around `want`.
fn rounding(format: KvFormat, want: f32) -> f32 {
    match format {
        KvFormat::Bf16 => want.abs() * BF16_ROUNDING,
        KvFormat::E4M3 => (want.abs() / 16.0).max(1.0 / 1024.0),
    }
}

fn check(format: KvFormat, scale: f32) {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let (q_heads, kv_heads, page_tokens, layers, layer) = (16, 2, 64, 3, 1);
    let heads = q_heads + 2 * kv_heads;
    // Page borders, a window group's dropped front pages, and one padding row.
    let positions = [0, 63, 64, 300, -1];
    let first_page = [0, 0, 1, 3, 0];
    let pages = [4, 9, 2, 7, 1];
    let width = 2;
    let table: Vec<i32> = positions
        .iter()
        .zip(first_page)
        .zip(pages)
        .flat_map(|((position, first), page)| {
            let mut row = [-1; 2];
            row[(position.max(&0) / page_tokens as i32 - first) as usize] = page;
            row
        })
        .collect();
    let angles: Vec<[f32; 2]> = (0..MAX_POSITION * DIM / 2).map(|_| [random.normal(1.0), random.normal(1.0)]).collect();
    let qkv = random.bf16(positions.len() * heads * DIM, scale);

    let mut cache = KvCache::new(&gpu.stream, format, 10, layers, kv_heads, page_tokens).unwrap();
    gpu.stream.fill_bytes(cache.pool.view_mut(), 0xff).unwrap();
    let mut q = gpu.poisoned::<bf16>(positions.len() * q_heads * DIM);
    let (device_qkv, device_angles, device_positions) = (gpu.upload(&qkv), gpu.upload(&angles), gpu.upload(&positions));
    let (device_table, device_first) = (gpu.upload(&table), gpu.upload(&first_page));
    RopeKv {
        qkv: device_qkv.view(),
        q: q.view_mut(),
        cache: &mut cache,
        layer,
        angles: device_angles.view(),
        positions: device_positions.view(),
        sequences: None,
        table: PageTable { pages: device_table.view(), width, first_page: Some(device_first.view()) },
    }
    .enqueue(&gpu.kernels, &gpu.stream)
    .unwrap();

    let q = gpu.download(&q);
    let pool = numbers(format, &gpu.stream.download(cache.pool.view()).unwrap());
    let mut written = 0;
    for (token, position) in positions.into_iter().enumerate() {
        let at = position.max(0) as usize;
        let (cos, sin): (Vec<f32>, Vec<f32>) =
            angles[at * DIM / 2..][..DIM / 2].iter().map(|[cos, sin]| (*cos, *sin)).unzip();
        for head in 0..heads {
            let mut want = widen(&qkv[(token * heads + head) * DIM..][..DIM]);
            let is_value = head >= q_heads + kv_heads;
            let size: f32 = want.iter().map(|x| x.abs()).fold(0.0, f32::max) * 4.0;
            if !is_value {
                reference::rotate(&mut want, &cos, &sin);
            }
            let format = if head < q_heads { KvFormat::Bf16 } else { format };
            if format == KvFormat::E4M3 {
                want.iter_mut().for_each(|x| *x = x.clamp(-e4m3::MAX, e4m3::MAX));
            }
            let got = if head < q_heads {
                &q[(token * q_heads + head) * DIM..][..DIM]
            } else if position < 0 {
                continue;
            } else {
                let kv_head = (head - q_heads) % kv_heads;
                let plane = ((pages[token] as usize * layers + layer) * kv_heads + kv_head) * 2 + usize::from(is_value);
                written += DIM;
                &pool[(plane * page_tokens + at % page_tokens) * DIM..][..DIM]
            };
            compare("rope", got, &want, DIM, |want, _| rounding(format, want) + size * 1e-6);
        }
    }
    assert_eq!(pool.iter().filter(|value| !value.is_nan()).count(), written, "nothing else is written");
}
