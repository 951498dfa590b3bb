//! Products of experts with few columns: each right on the inputs that it was given, and both in one launch, of tiles of 8, the bits of two.

use std::sync::{Mutex, MutexGuard, PoisonError};

use device::DeviceBuffer;
use half::bf16;
use kernels::{
    Dispatch, Format, Fp8Source, Grouped, KernelError, Output, PackFp8, PackedWeights, Routing, SkinnyExperts,
    SkinnyGemm,
};
use model::reference;

use crate::gpu::{BF16_ROUNDING, Gpu, Random, compare, magnitudes, sum_error};
use crate::mxfp4::Mxfp4;

const TOP: usize = 4;
/// One launch must give the same bits however its blocks meet.
const REPEATS: usize = 20;

/// Two of these launches at once could keep each other's blocks from the device: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a rank has of a mixture of experts.
#[derive(Clone, Copy)]
struct Shape {
    /// This rank's experts are those from 0 on, but for `first_expert`.
    num_experts: usize,
    first_expert: usize,
    tile_slots: usize,
    hidden: usize,
    units: usize,
}

/// Operands on the device.
struct Experts {
    gate_up: PackedWeights,
    down: PackedWeights,
    gate_up_bias: DeviceBuffer<bf16>,
    down_bias: DeviceBuffer<bf16>,
    x: DeviceBuffer<bf16>,
    routing: Routing,
}

/// Bits of the activated and of the outputs.
type Bits = [Vec<u16>; 2];

fn bits(gpu: &Gpu, buffers: [&DeviceBuffer<bf16>; 2]) -> Bits {
    let of = |buffer: &DeviceBuffer<bf16>| gpu.stream.download(buffer.view()).unwrap();
    buffers.map(|buffer| of(buffer).into_iter().map(bf16::to_bits).collect())
}

impl Experts {
    fn poisoned(&self, gpu: &Gpu) -> [DeviceBuffer<bf16>; 2] {
        let slots = self.routing.slot.len();
        [self.down.shape()[1], self.down.shape()[0]].map(|width| gpu.poisoned(slots * width))
    }

    fn two_launches(&self, gpu: &mut Gpu, [activated, out]: &mut [DeviceBuffer<bf16>; 2]) -> Result<(), KernelError> {
        SkinnyGemm {
            weights: &self.gate_up,
            x: self.x.view(),
            bias: Some(self.gate_up_bias.view()),
            out: Output::SwiGlu(activated.view_mut()),
            routing: Some(Grouped { routing: &self.routing, gather: true, settled: false }),
            workspace: &mut gpu.workspace,
        }
        .enqueue(&gpu.kernels, &gpu.stream)?;
        SkinnyGemm {
            weights: &self.down,
            x: activated.view(),
            bias: Some(self.down_bias.view()),
            out: Output::Bf16(out.view_mut()),
            routing: Some(Grouped { routing: &self.routing, gather: false, settled: true }),
            workspace: &mut gpu.workspace,
        }
        .enqueue(&gpu.kernels, &gpu.stream)
    }

    fn one_launch(&self, gpu: &mut Gpu, [activated, out]: &mut [DeviceBuffer<bf16>; 2]) -> Result<(), KernelError> {
        SkinnyExperts {
            gate_up: &self.gate_up,
            down: &self.down,
            x: self.x.view(),
            gate_up_bias: Some(self.gate_up_bias.view()),
            down_bias: Some(self.down_bias.view()),
            activated: activated.view_mut(),
            out: out.view_mut(),
            routing: &self.routing,
            workspace: &mut gpu.workspace,
        }
        .enqueue(&gpu.kernels, &gpu.stream)
    }
}

fn pack(gpu: &Gpu, weights: &Mxfp4, format: Format, interleaved: bool) -> PackedWeights {
    if format != Format::Fp8 {
        return weights.pack_as(format, gpu, interleaved).unwrap();
    }
    let (values, scales) = (gpu.upload(&weights.values), gpu.upload(&weights.scales));
    let source = Fp8Source::Mxfp4 { values: values.view(), scales: scales.view() };
    PackFp8 { source, shape: weights.shape, interleaved }.pack(&gpu.kernels, &gpu.stream).unwrap().0
}

fn check(case: &str, format: Format, picks: &[i32], shape: Shape) {
    let Some(mut gpu) = Gpu::open() else { return };
    let _alone = alone();
    let Shape { num_experts, first_expert, tile_slots, hidden, units } = shape;
    let mut random = Random::new();
    let tokens = picks.len() / TOP;
    let gate_up = Mxfp4::random(&mut random, [num_experts, 2 * units, hidden]);
    let down = Mxfp4::random(&mut random, [num_experts, hidden, units]);
    let (gate_up_bias, down_bias) = (random.bf16(num_experts * 2 * units, 1.0), random.bf16(num_experts * hidden, 1.0));
    let x = random.bf16(tokens * hidden, 0.3);
    let mut experts = Experts {
        gate_up: pack(&gpu, &gate_up, format, true),
        down: pack(&gpu, &down, format, false),
        gate_up_bias: gpu.upload(&gate_up_bias),
        down_bias: gpu.upload(&down_bias),
        x: gpu.upload(&x),
        routing: Routing::new(&gpu.stream, tokens, TOP, num_experts, tile_slots).unwrap(),
    };
    let device_picks = gpu.upload(picks);
    Dispatch { experts: device_picks.view(), first_expert, routing: &mut experts.routing }
        .enqueue(&gpu.kernels, &gpu.stream)
        .unwrap();

    let two_launches = |gpu: &mut Gpu| {
        let mut buffers = experts.poisoned(gpu);
        experts.two_launches(gpu, &mut buffers).unwrap();
        bits(gpu, [&buffers[0], &buffers[1]])
    };
    let want = two_launches(&mut gpu);
    let launch = if tile_slots == 8 { Experts::one_launch } else { Experts::two_launches };
    let mut buffers = experts.poisoned(&gpu);
    for repeat in 0..REPEATS {
        for buffer in &mut buffers {
            gpu.stream.fill_bytes(buffer.view_mut(), 0xff).unwrap();
        }
        // Several in a row, so that one finds counters and joins as the one before has left them.
        for _ in 0..=repeat % 3 {
            launch(&experts, &mut gpu, &mut buffers).unwrap();
        }
        assert!(bits(&gpu, [&buffers[0], &buffers[1]]) == want, "{case}: run {repeat} differs from two launches");
    }
    assert!(two_launches(&mut gpu) == want, "{case}: the workspace is as it was");
    if format == Format::Mxfp4 {
        check_numbers(case, &gpu, shape, picks, &experts, &buffers, [&gate_up, &down]);
    }
}

/// Each product on the inputs that it was given.
fn check_numbers(
    case: &str,
    gpu: &Gpu,
    Shape { num_experts, first_expert, hidden, units, .. }: Shape,
    picks: &[i32],
    experts: &Experts,
    [activated, out]: &[DeviceBuffer<bf16>; 2],
    [gate_up, down]: [&Mxfp4; 2],
) {
    let slot = gpu.stream.download(experts.routing.slot.view()).unwrap();
    let (activated, out, x) = (gpu.download(activated), gpu.download(out), gpu.download(&experts.x));
    let (gate_up_bias, down_bias) = (gpu.download(&experts.gate_up_bias), gpu.download(&experts.down_bias));
    let (gate_up, down) = (gate_up.decode(), down.decode());
    for (pair, (expert, slot)) in picks.iter().zip(&slot).enumerate() {
        let expert = (*expert as usize).wrapping_sub(first_expert);
        assert_eq!(expert < num_experts, *slot >= 0, "{case}: pair {pair}");
        let Ok(slot) = usize::try_from(*slot) else { continue };
        let input = &x[pair / TOP * hidden..][..hidden];
        let matrix = &gate_up[expert * 2 * units * hidden..][..2 * units * hidden];
        let sums = reference::linear(input, matrix, Some(&gate_up_bias[expert * 2 * units..][..2 * units]));
        let magnitude = magnitudes(input, matrix);
        let want = reference::swiglu(&sums, 7.0);
        let got = &activated[slot * units..][..units];
        // SwiGLU's slope is at most 8 x 1.1 in the gate and 7 in the up half; then one rounding, and the fast exponential.
        compare(case, got, &want, units, |want, i| {
            let error = sum_error(hidden) * magnitude[2 * i].max(magnitude[2 * i + 1]);
            16.0 * error + want.abs() * (BF16_ROUNDING + 1e-5) + 1e-6
        });
        let matrix = &down[expert * hidden * units..][..hidden * units];
        let want = reference::linear(got, matrix, Some(&down_bias[expert * hidden..][..hidden]));
        let magnitude = magnitudes(got, matrix);
        compare(case, &out[slot * hidden..][..hidden], &want, hidden, |want, i| {
            want.abs() * BF16_ROUNDING + sum_error(units) * magnitude[i]
        });
    }
}

fn check_mxfp4(case: &str, picks: &[i32], num_experts: usize, tile_slots: usize, hidden: usize, units: usize) {
    check(case, Format::Mxfp4, picks, Shape { num_experts, first_expert: 0, tile_slots, hidden, units });
}

/// Twelve tokens of eight experts, of which one has none.
fn batch() -> Vec<i32> {
    (0..12).flat_map(|token| [0, 1 + token % 3, 5, 6 + token % 2]).collect()
}

/// Small enough for compute-sanitizer.
#[test]
fn a_few_strips() {
    check_mxfp4("few strips", &batch()[..4], 8, 8, 192, 96);
    check_mxfp4("few strips", &batch(), 8, 8, 192, 96);
    check_mxfp4("few strips", &batch(), 8, 16, 192, 96);
    check_mxfp4("few strips", &[3, 1, 2, 0].repeat(30), 4, 24, 192, 96);
}

#[test]
fn one_token() {
    check_mxfp4("one token", &[7, 3, 0, 5], 8, 8, 2880, 2880);
}

#[test]
fn a_batch_with_empty_experts() {
    check_mxfp4("batch", &batch(), 8, 8, 2880, 2880);
    check_mxfp4("batch", &batch(), 8, 16, 2880, 2880);
    check_mxfp4("batch", &batch(), 8, 24, 2880, 2880);
}

#[test]
fn every_format() {
    for format in [Format::Bf16, Format::Fp8] {
        for tile_slots in [8, 16] {
            let shape = Shape { num_experts: 8, first_expert: 0, tile_slots, hidden: 2880, units: 736 };
            check("format", format, &batch(), shape);
            check("format", format, &batch()[..4], Shape { hidden: 320, units: 320, ..shape });
        }
    }
}

#[test]
fn every_number_of_slots_in_a_tile() {
    // Tokens of experts 0 to 6; expert 7 has none. Dealt out in turn, so that no token names an expert twice.
    let counts = [1, 8, 9, 16, 17, 24, 25];
    let tokens = counts.iter().sum::<usize>() / TOP;
    let mut picks = vec![0; tokens * TOP];
    let named = counts.iter().enumerate().flat_map(|(expert, count)| vec![expert as i32; *count]);
    named.enumerate().for_each(|(i, expert)| picks[i % tokens * TOP + i / tokens] = expert);
    for tile_slots in [16, 24] {
        check_mxfp4("slots of a tile", &picks, 8, tile_slots, 320, 320);
        check_mxfp4("slots of a tile", &picks, 8, tile_slots, 2880, 736);
    }
}

#[test]
fn all_tokens_to_the_same_experts() {
    check_mxfp4("same", &[3, 1, 2, 0].repeat(37), 4, 16, 320, 320);
    check_mxfp4("same", &[3, 1, 2, 0].repeat(37), 4, 24, 320, 320);
}

#[test]
fn more_tiles_than_blocks() {
    check_mxfp4("tiles of one k-tile", &[3, 1, 2, 0].repeat(300), 4, 8, 64, 32);
    check_mxfp4("tiles of one k-tile", &[3, 1, 2, 0].repeat(600), 4, 16, 64, 32);
    check_mxfp4("tiles of a few", &[3, 1, 2, 0].repeat(900), 4, 24, 192, 96);
}

#[test]
fn a_shard_whose_k_ends_within_a_tile() {
    check_mxfp4("shard", &[3, 1, 2, 0].repeat(5), 4, 8, 320, 96);
    check_mxfp4("shard", &[3, 1, 2, 0].repeat(2), 4, 8, 2880, 736);
    check_mxfp4("shard", &[3, 1, 2, 0].repeat(12), 4, 16, 320, 96);
    check_mxfp4("shard", &[3, 1, 2, 0].repeat(20), 4, 24, 320, 96);
}

#[test]
fn experts_of_which_other_ranks_have_some_or_all() {
    for (first_expert, tile_slots) in [(4, 8), (4, 16), (4, 24), (100, 8), (100, 16), (100, 24)] {
        let shape = Shape { num_experts: 4, first_expert, tile_slots, hidden: 2880, units: 2880 };
        check("other ranks", Format::Mxfp4, &batch(), shape);
    }
}

#[test]
fn operands_that_disagree_are_refused() {
    let Some(mut gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let weights = |random: &mut Random, rows, k, gpu: &Gpu, format| {
        pack(gpu, &Mxfp4::random(random, [4, rows, k]), format, rows == 192)
    };
    let mut experts = Experts {
        gate_up: weights(&mut random, 192, 64, &gpu, Format::Mxfp4),
        down: weights(&mut random, 64, 96, &gpu, Format::Bf16),
        gate_up_bias: gpu.poisoned(4 * 192),
        down_bias: gpu.poisoned(4 * 64),
        x: gpu.poisoned(2 * 64),
        routing: Routing::new(&gpu.stream, 2, TOP, 4, 8).unwrap(),
    };
    let mut buffers = experts.poisoned(&gpu);
    assert!(matches!(
        experts.one_launch(&mut gpu, &mut buffers),
        Err(KernelError::Dimension { dimension: "formats", .. })
    ));
    experts.down = weights(&mut random, 64, 32, &gpu, Format::Mxfp4);
    assert!(matches!(experts.one_launch(&mut gpu, &mut buffers), Err(KernelError::Size { operand: "units", .. })));
}
