//! Pages widened from E4M3: every bit pattern, layers and pages out of order.

use half::bf16;
use kernels::{KvCache, KvFormat, UnpackKv};
use model::E4M3;

use crate::gpu::{Gpu, Random, widen};

const DIM: usize = 64;

fn check(case: &str, layers: usize, kv_heads: usize, page_tokens: usize, pages: &[i32]) {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let num_pages = 1 + *pages.iter().max().unwrap() as usize;
    let mut cache = KvCache::new(&gpu.stream, KvFormat::E4M3, num_pages, layers, kv_heads, page_tokens).unwrap();
    let mut wide = KvCache::new(&gpu.stream, KvFormat::Bf16, pages.len() + 1, 1, kv_heads, page_tokens).unwrap();
    let pool: Vec<u8> = (0..cache.pool.len()).map(|i| if i < 256 { i as u8 } else { random.next() as u8 }).collect();
    gpu.stream.copy_from_host(cache.pool.view_mut(), &pool).unwrap();
    let table = gpu.upload(pages);
    let len = kv_heads * 2 * page_tokens * DIM;
    for layer in 0..layers {
        gpu.stream.fill_bytes(wide.pool.view_mut(), 0xff).unwrap();
        UnpackKv { cache: &cache, layer, pages: table.view(), out: &mut wide }
            .enqueue(&gpu.kernels, &gpu.stream)
            .unwrap();
        let got = widen(bytemuck::cast_slice::<u8, bf16>(&gpu.stream.download(wide.pool.view()).unwrap()));
        for (i, page) in pages.iter().enumerate() {
            let bits = &pool[(*page as usize * layers + layer) * len..][..len];
            for (at, (got, bits)) in got[i * len..][..len].iter().zip(bits).enumerate() {
                let want = E4M3(*bits).to_f32();
                let is_equal = *got == want || (got.is_nan() && want.is_nan());
                assert!(is_equal, "{case}: layer {layer}, page {i}, element {at}: got {got}, want {want}");
            }
        }
        let rest = &got[pages.len() * len..];
        assert!(rest.iter().all(|value| value.is_nan()), "{case}: nothing is written behind the pages");
    }
}

#[test]
fn one_page() {
    check("one page", 1, 1, 32, &[0]);
}

#[test]
fn pages_out_of_order() {
    check("pages", 3, 8, 64, &[4, 0, 9, 2]);
    check("nano", 2, 4, 96, &[1, 0]);
}
