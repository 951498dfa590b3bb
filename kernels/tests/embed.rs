//! Rows of the table, named by the host and by the draw before.

use half::bf16;
use kernels::Embed;

use crate::gpu::{Gpu, Random};

#[test]
fn ids_and_draws_name_rows() {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    for hidden in [8, 320, 2880, 10_240] {
        let vocab = 300;
        let table = random.bf16(vocab * hidden, 1.0);
        let sampled = [7, 299, 0];
        let tokens = [0, 299, -1, -2, 5, -3];
        let (device_table, device_tokens, device_sampled) =
            (gpu.upload(&table), gpu.upload(&tokens), gpu.upload(&sampled));
        let mut out = gpu.poisoned::<bf16>(tokens.len() * hidden);
        Embed {
            table: device_table.view(),
            tokens: device_tokens.view(),
            sampled: device_sampled.view(),
            out: out.view_mut(),
            hidden,
        }
        .enqueue(&gpu.kernels, &gpu.stream)
        .unwrap();
        let want: Vec<bf16> =
            [0, 299, 7, 299, 5, 0].iter().flat_map(|id| &table[id * hidden..][..hidden]).copied().collect();
        assert!(gpu.stream.download(out.view()).unwrap() == want, "hidden {hidden}");
    }
}
