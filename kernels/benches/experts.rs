//! What products of experts are timed on: picks that spread evenly, and weights of the released shapes.

use device::DeviceBuffer;
use kernels::{Dispatch, PackMxfp4, PackedWeights, Routing, pack_bf16};

use crate::harness::Bench;

/// Of a token, in both models.
pub(crate) const HIDDEN: usize = 2880;
/// Experts of a token.
pub(crate) const TOP: usize = 4;

/// One bf16 matrix.
pub(crate) fn pack(bench: &Bench, rows: usize, k: usize) -> PackedWeights {
    let values = bench.values(rows * k);
    pack_bf16(&bench.kernels, &bench.stream, values.view(), [1, rows, k], false).unwrap()
}

/// An MXFP4 matrix for each expert, `[rows, HIDDEN]`.
pub(crate) fn pack_experts(bench: &Bench, num_experts: usize, rows: usize, interleaved: bool) -> PackedWeights {
    let mut values = bench.stream.allocate::<u8>(num_experts * rows * HIDDEN / 2).unwrap();
    bench.fill(&mut values);
    let mut scales = bench.stream.allocate::<u8>(num_experts * rows * HIDDEN / 32).unwrap();
    bench.stream.fill_bytes(scales.view_mut(), 119).unwrap();
    PackMxfp4 { values: values.view(), scales: scales.view(), shape: [num_experts, rows, HIDDEN], interleaved }
        .pack(&bench.kernels, &bench.stream)
        .unwrap()
}

/// [`TOP`] distinct experts a token; other ones for each `shift`.
pub(crate) fn picks(bench: &Bench, tokens: usize, num_experts: usize, shift: usize) -> DeviceBuffer<i32> {
    let mut state = 0x9e37_79b9_u32.wrapping_mul(shift as u32 + 1);
    let mut pairs = Vec::with_capacity(tokens * TOP);
    for _ in 0..tokens {
        let row = pairs.len();
        while pairs.len() < row + TOP {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let expert = (state >> 8) as i32 % num_experts as i32;
            if !pairs[row..].contains(&expert) {
                pairs.push(expert);
            }
        }
    }
    bench.upload(&pairs)
}

/// Tokens sent to their experts.
pub(crate) struct Routed {
    pub(crate) routing: Routing,
    /// Experts that have a token.
    pub(crate) touched: usize,
}

/// Tokens of which each has [`TOP`] experts, as [`picks`] has them.
pub(crate) fn routed(bench: &Bench, tokens: usize, num_experts: usize, tile_slots: usize, shift: usize) -> Routed {
    routed_to(bench, &picks(bench, tokens, num_experts, shift), TOP, num_experts, tile_slots)
}

/// Tokens with the experts given, `[tokens, top]`.
pub(crate) fn routed_to(
    bench: &Bench,
    experts: &DeviceBuffer<i32>,
    top: usize,
    num_experts: usize,
    tile_slots: usize,
) -> Routed {
    let mut routing = Routing::new(&bench.stream, experts.len() / top, top, num_experts, tile_slots).unwrap();
    Dispatch { experts: experts.view(), first_expert: 0, routing: &mut routing }
        .enqueue(&bench.kernels, &bench.stream)
        .unwrap();
    let offsets = bench.stream.download(routing.offsets.view()).unwrap();
    Routed { routing, touched: offsets.windows(2).filter(|pair| pair[1] > pair[0]).count() }
}
