//! What ranks do together: all-reduce and all-gather over peer memory, and the sum of parts for ranks that share a GPU.
//!
//! Ranks are streams of one thread here. Those that wait for each other in kernels need a GPU each, which an engine gives them: else
//! nothing promises that all of them run. Here two have one each, and more share GPUs where their blocks, which are few, all fit a GPU at
//! once, and so do their streams. Where they do not, a test says that it was skipped.

use device::{Device, DeviceBuffer, Graph, Stream};
use half::bf16;
use kernels::{
    Alarm, AllGather, AllReduce, Combine, Exchange, KernelError, Kernels, Mailbox, MailboxAddress, PeerGroup,
    PeerSizes, RmsNorm, SumRanks, Summand, ThenNorm,
};

use crate::gpu::skip::skip;
use crate::gpu::{Gpu, Random, widen};

const HIDDEN: usize = 2880;
const TOP: usize = 4;
pub(crate) const EPS: f32 = 1e-5;
const COLS: usize = 1000;

struct Rank {
    stream: Stream,
    kernels: Kernels,
    group: PeerGroup,
    gathered: DeviceBuffer<f32>,
}

/// Two ranks; `None`, with the reason printed, without two GPUs.
fn two_ranks(packet_tokens: usize, bulk_tokens: usize) -> Option<Vec<Rank>> {
    ranks(2, 1, packet_tokens, bulk_tokens)
}

/// Tokens that ranks which share a GPU may sum: a block each, of which the largest kernel (384 threads of 108 registers) leaves a
/// multiprocessor room for one. [`MOST_STREAMS`] ranks have 64 of them; the next kernel's, which may come early, are as many; an H200 has
/// 132 multiprocessors.
const SHARED_TOKENS: usize = 16;
/// Ranks that may share a GPU: half of the queues that a driver has for streams by default. Streams of one queue wait for each other.
const MOST_STREAMS: usize = 4;
/// The same where they gather columns: 128 blocks each of 512 threads and 40 registers, 3 of which a multiprocessor has room for, 396 an H200.
const MOST_GATHERING: usize = 3;

/// So many ranks, of which at most `sharing` share a GPU; `None`, with the reason printed, without so many GPUs.
fn ranks(count: usize, sharing: usize, packet_tokens: usize, bulk_tokens: usize) -> Option<Vec<Rank>> {
    Gpu::open()?;
    let gpus = (device::probe().unwrap() as usize).min(count);
    if count > sharing * gpus {
        let needed = count.div_ceil(sharing);
        skip(needed as u32, format!("{gpus} GPUs for {count} ranks, of which {sharing} may share one"));
        return None;
    }
    let sizes = PeerSizes { ranks: count, hidden: HIDDEN, packet_tokens, bulk_tokens };
    let load = |rank: usize| {
        let device = Device::open((rank % gpus) as u32).unwrap();
        (device.stream().unwrap(), Kernels::load(&device).unwrap())
    };
    let mut parts: Vec<(Stream, Kernels)> = (0..count).map(load).collect();
    if count > gpus {
        let stopped = Alarm::new(&parts[0].0).unwrap();
        stopped.stop();
        let mut ranks = connect(parts, sizes, &stopped);
        ranks.iter_mut().for_each(warm_up);
        parts = ranks.into_iter().map(|rank| (rank.stream, rank.kernels)).collect();
    }
    let alarm = Alarm::new(&parts[0].0).unwrap();
    Some(connect(parts, sizes, &alarm))
}

fn connect(parts: Vec<(Stream, Kernels)>, sizes: PeerSizes, alarm: &Alarm) -> Vec<Rank> {
    let own: Vec<(Mailbox, DeviceBuffer<f32>)> = parts
        .iter()
        .map(|(stream, _)| (Mailbox::new(stream, sizes).unwrap(), stream.zeros(64 * sizes.ranks * COLS).unwrap()))
        .collect();
    let addresses: Vec<MailboxAddress> = own.iter().map(|(own, gathered)| own.address(gathered)).collect();
    let rank = |(rank, ((stream, kernels), (own, gathered)))| {
        let group = PeerGroup::new(&stream, rank, own, &addresses, alarm.clone()).unwrap();
        Rank { stream, kernels, group, gathered }
    };
    parts.into_iter().zip(own).enumerate().map(rank).collect()
}

/// A kernel is loaded when it is first launched, behind whatever runs on its device: where ranks share one, behind a kernel that waits for
/// this very one. So each is launched before, among ranks that have been told not to wait.
fn warm_up(rank: &mut Rank) {
    let (row, weight) = (vec![bf16::ZERO; HIDDEN], vec![bf16::ONE; HIDDEN]);
    let mut own = Operands::new(&rank.stream, &mut Random::new(), 1, &row, &weight);
    for exchange in [Exchange::Packets, Exchange::Bulk] {
        enqueue(rank, &mut own, 1, false, exchange, true);
    }
    let part = rank.stream.zeros(COLS).unwrap();
    AllGather { part: part.view(), rows: 1, first_col: 0, pitch: COLS }
        .enqueue(&mut rank.group, &rank.kernels, &rank.stream)
        .unwrap();
    rank.stream.synchronize().unwrap();
}

/// Operands of one rank.
struct Operands {
    values: DeviceBuffer<bf16>,
    y: DeviceBuffer<bf16>,
    weights: DeviceBuffer<f32>,
    slot: DeviceBuffer<i32>,
    residual: DeviceBuffer<bf16>,
    norm_weight: DeviceBuffer<bf16>,
    out: DeviceBuffer<bf16>,
}

impl Operands {
    fn new(stream: &Stream, random: &mut Random, tokens: usize, residual: &[bf16], norm_weight: &[bf16]) -> Self {
        let pairs = tokens * TOP;
        let weights: Vec<f32> = (0..pairs).map(|_| random.normal(0.3).abs()).collect();
        // Every third pair is on another rank.
        let slot: Vec<i32> =
            (0..pairs as i32).map(|pair| if pair % 3 == 0 { -1 } else { pairs as i32 - 1 - pair }).collect();
        let mut out = stream.allocate(tokens * HIDDEN).unwrap();
        stream.fill_bytes(out.view_mut(), 0xff).unwrap();
        Self {
            values: stream.upload(&random.bf16(tokens * HIDDEN, 1.0)).unwrap(),
            y: stream.upload(&random.bf16(pairs * HIDDEN, 1.0)).unwrap(),
            weights: stream.upload(&weights).unwrap(),
            slot: stream.upload(&slot).unwrap(),
            residual: stream.upload(residual).unwrap(),
            norm_weight: stream.upload(norm_weight).unwrap(),
            out,
        }
    }
}

/// This rank's part as other kernels compute it.
fn part(rank: &Rank, operands: &Operands, experts: bool) -> Vec<bf16> {
    if !experts {
        return rank.stream.download(operands.values.view()).unwrap();
    }
    let mut sum = rank.stream.allocate(operands.values.len()).unwrap();
    let combine = Combine {
        y: operands.y.view(),
        weights: operands.weights.view(),
        slot: operands.slot.view(),
        out: sum.view_mut(),
        hidden: HIDDEN,
        top: TOP,
    };
    combine.enqueue(&rank.kernels, &rank.stream).unwrap();
    rank.stream.download(sum.view()).unwrap()
}

/// The sum over ranks, rounded once.
pub(crate) fn add(parts: &[Vec<bf16>]) -> Vec<bf16> {
    let sum = |i: usize| parts.iter().fold(0.0, |sum, part| sum + part[i].to_f32());
    (0..parts[0].len()).map(|i| bf16::from_f32(sum(i))).collect()
}

/// What the sum, the residual add and the norm come to on one rank, by kernels that know no ranks.
pub(crate) fn norm_of(
    (stream, kernels): (&Stream, &Kernels),
    residual: &[bf16],
    sum: &[bf16],
    weight: &DeviceBuffer<bf16>,
) -> [Vec<bf16>; 2] {
    let mut residual = stream.upload(residual).unwrap();
    let (delta, mut out) = (stream.upload(sum).unwrap(), stream.zeros(sum.len()).unwrap());
    RmsNorm {
        residual: residual.view_mut(),
        delta: Some(delta.view()),
        weight: weight.view(),
        out: out.view_mut(),
        eps: EPS,
    }
    .enqueue(kernels, stream)
    .unwrap();
    [residual, out].map(|buffer| stream.download(buffer.view()).unwrap())
}

fn enqueue(rank: &mut Rank, operands: &mut Operands, tokens: usize, experts: bool, exchange: Exchange, norm: bool) {
    let Operands { values, y, weights, slot, residual, norm_weight, out } = operands;
    let part = if experts {
        Summand::Experts { y: y.view(), weights: weights.view(), slot: slot.view(), top: TOP }
    } else {
        Summand::Values(values.view())
    };
    let then = ThenNorm { residual: residual.view_mut(), weight: norm_weight.view(), eps: EPS };
    AllReduce {
        part,
        norm: norm.then_some(then),
        out: out.slice_mut(..tokens * HIDDEN),
        group: &mut rank.group,
        exchange,
    }
    .enqueue(&rank.kernels, &rank.stream)
    .unwrap();
}

fn all_reduce(exchange: Exchange, tokens: usize) {
    let Some(mut ranks) = two_ranks(128, 2048) else { return };
    all_reduce_over(&mut ranks, exchange, tokens);
}

/// Sum, sum with norm; values and experts' outputs; several times over, so that turns and epochs are met.
fn all_reduce_over(ranks: &mut [Rank], exchange: Exchange, tokens: usize) {
    let mut random = Random::new();
    for (experts, norm) in [(false, false), (false, true), (true, true), (true, false), (false, true)] {
        let (residual, weight) = (random.bf16(tokens * HIDDEN, 3.0), random.bf16(HIDDEN, 1.0));
        let mut operands: Vec<Operands> =
            ranks.iter().map(|rank| Operands::new(&rank.stream, &mut random, tokens, &residual, &weight)).collect();
        let parts: Vec<_> = ranks.iter().zip(&operands).map(|(rank, own)| part(rank, own, experts)).collect();
        for (rank, own) in ranks.iter_mut().zip(&mut operands) {
            enqueue(rank, own, tokens, experts, exchange, norm);
        }
        let sum = add(&parts);
        for (rank, own) in ranks.iter().zip(&operands) {
            let out = rank.stream.download(own.out.view()).unwrap();
            if !norm {
                assert!(out == sum, "{exchange:?} of {tokens} tokens, experts {experts}: the sum differs");
                continue;
            }
            let [want_residual, want] = norm_of((&rank.stream, &rank.kernels), &residual, &sum, &own.norm_weight);
            assert!(
                rank.stream.download(own.residual.view()).unwrap() == want_residual,
                "{exchange:?}: the residual differs"
            );
            assert!(out == want, "{exchange:?} of {tokens} tokens, experts {experts}: the norm differs");
        }
        assert!(!ranks[0].group.alarm().gave_up());
    }
}

#[test]
fn packets_of_one_token() {
    all_reduce(Exchange::Packets, 1);
}

#[test]
fn packets_of_many_tokens() {
    all_reduce(Exchange::Packets, 128);
}

/// Decode's default is four ranks.
#[test]
fn four_and_eight_ranks() {
    for count in [4, 8] {
        let Some(mut ranks) = ranks(count, MOST_STREAMS, SHARED_TOKENS, SHARED_TOKENS) else { return };
        for exchange in [Exchange::Packets, Exchange::Bulk] {
            for tokens in [1, 5, SHARED_TOKENS] {
                all_reduce_over(&mut ranks, exchange, tokens);
            }
        }
    }
}

#[test]
fn bulk_of_few_tokens() {
    all_reduce(Exchange::Bulk, 3);
}

#[test]
fn bulk_of_more_tokens_than_blocks() {
    all_reduce(Exchange::Bulk, 1543);
}

/// Graphs of exchanges that feed each other, replayed without the ranks waiting for one another in between.
#[test]
fn replayed_graphs_go_on_where_they_stopped() {
    const REPLAYS: usize = 200;
    let Some(mut ranks) = two_ranks(16, 16) else { return };
    let mut random = Random::new();
    let (residual, weight) = (random.bf16(5 * HIDDEN, 1.0), random.bf16(HIDDEN, 1.0));
    let mut operands: Vec<Operands> =
        ranks.iter().map(|rank| Operands::new(&rank.stream, &mut random, 5, &residual, &weight)).collect();
    let mut graphs: Vec<Graph> = ranks
        .iter_mut()
        .zip(&mut operands)
        .map(|(rank, own)| {
            let stream = rank.stream.clone();
            let capture = |_: &Stream| -> Result<(), KernelError> {
                for (tokens, exchange) in [(5, Exchange::Packets), (1, Exchange::Packets), (3, Exchange::Bulk)] {
                    for norm in [true, false] {
                        let Operands { values, residual, norm_weight, out, .. } = &mut *own;
                        let then = ThenNorm {
                            residual: residual.slice_mut(..tokens * HIDDEN),
                            weight: norm_weight.view(),
                            eps: EPS,
                        };
                        AllReduce {
                            part: Summand::Values(values.slice(..tokens * HIDDEN)),
                            norm: norm.then_some(then),
                            out: out.slice_mut(..tokens * HIDDEN),
                            group: &mut rank.group,
                            exchange,
                        }
                        .enqueue(&rank.kernels, &stream)?;
                        // The next exchange sends what this one received.
                        stream.copy(values.slice_mut(..tokens * HIDDEN), out.slice(..tokens * HIDDEN))?;
                    }
                }
                Ok(())
            };
            stream.capture(capture).unwrap()
        })
        .collect();
    for _ in 0..REPLAYS {
        for (graph, rank) in graphs.iter_mut().zip(&ranks) {
            graph.launch(&rank.stream).unwrap();
        }
    }
    let results: Vec<_> = ranks
        .iter()
        .zip(&operands)
        .map(|(rank, own)| [&own.residual, &own.out].map(|buffer| rank.stream.download(buffer.view()).unwrap()))
        .collect();
    assert!(results[0][0] == results[1][0], "after {REPLAYS} replays the ranks' residuals differ");
    assert!(results[0][1][..HIDDEN] == results[1][1][..HIDDEN], "after {REPLAYS} replays the ranks' outputs differ");
    assert!(!ranks[0].group.alarm().gave_up());
}

/// A rank that never comes: the others' kernels end once the group is told to stop.
#[test]
fn a_lost_rank_does_not_hold_the_others() {
    let Some(mut ranks) = two_ranks(16, 16) else { return };
    let mut random = Random::new();
    let (residual, weight) = (random.bf16(HIDDEN, 1.0), random.bf16(HIDDEN, 1.0));
    let mut own = Operands::new(&ranks[0].stream, &mut random, 1, &residual, &weight);
    for exchange in [Exchange::Packets, Exchange::Bulk] {
        enqueue(&mut ranks[0], &mut own, 1, false, exchange, true);
    }
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!ranks[0].stream.record().unwrap().is_done(), "the kernel waits");
    let alarm = ranks[0].group.alarm().clone();
    drop(ranks.pop());
    let start = std::time::Instant::now();
    ranks[0].stream.synchronize().unwrap();
    println!("the kernels ended {:?} after the rank was dropped", start.elapsed());
    assert!(start.elapsed().as_millis() < 100 && alarm.gave_up());
}

#[test]
fn columns_of_all_ranks_come_together_on_each() {
    for count in [2, 4, 8] {
        let sharing = if count == 2 { 1 } else { MOST_GATHERING };
        let Some(mut ranks) = ranks(count, sharing, 1, 1) else { return };
        gather_columns(&mut ranks);
    }
}

fn gather_columns(ranks: &mut [Rank]) {
    let (mut random, count) = (Random::new(), ranks.len());
    for rows in [1, 7, 64] {
        let column = |random: &mut Random| -> Vec<f32> { (0..rows * COLS).map(|_| random.normal(1.0)).collect() };
        let parts: Vec<Vec<f32>> = (0..count).map(|_| column(&mut random)).collect();
        let uploaded: Vec<_> = ranks.iter().zip(&parts).map(|(rank, part)| rank.stream.upload(part).unwrap()).collect();
        for (idx, (rank, part)) in ranks.iter_mut().zip(&uploaded).enumerate() {
            AllGather { part: part.view(), rows, first_col: idx * COLS, pitch: count * COLS }
                .enqueue(&mut rank.group, &rank.kernels, &rank.stream)
                .unwrap();
        }
        for rank in &*ranks {
            let got = rank.stream.download(rank.gathered.slice(..rows * count * COLS)).unwrap();
            for row in 0..rows {
                for (idx, part) in parts.iter().enumerate() {
                    let first = (row * count + idx) * COLS;
                    assert!(got[first..first + COLS] == part[row * COLS..(row + 1) * COLS], "row {row} of rank {idx}");
                }
            }
        }
    }
}

#[test]
fn parts_on_one_gpu_are_summed_in_order() {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let parts: Vec<Vec<bf16>> = (0..4).map(|_| random.bf16(3 * HIDDEN + 80, 1.0)).collect();
    let buffers: Vec<_> = parts.iter().map(|part| gpu.upload(part)).collect();
    let shared: Vec<_> = buffers.iter().map(DeviceBuffer::share).collect();
    let mut out = gpu.poisoned::<bf16>(3 * HIDDEN);
    SumRanks { parts: &shared, first: 80, out: out.view_mut() }.enqueue(&gpu.kernels, &gpu.stream).unwrap();
    let want = add(&parts.iter().map(|part| part[80..].to_vec()).collect::<Vec<_>>());
    assert_eq!(gpu.download(&out), widen(&want));
}
