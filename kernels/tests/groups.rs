//! What attention groups exchange: their tokens before the experts, and the sums behind them.
//!
//! Ranks are streams of one thread here, on a GPU each or on fewer. Ranks that share a GPU exchange few tokens: kernels of so few blocks run side
//! by side there, which an engine could not rely on.

use device::{Device, DeviceBuffer, Stream};
use half::bf16;
use kernels::{
    Alarm, AttentionGroups, Combine, GatherTokens, GroupSizes, Kernels, ReduceScatter, ThenNorm, TokenMailbox,
    TokenMailboxAddress,
};

use crate::gpu::skip::skip;
use crate::gpu::{Gpu, Random};
use crate::peers::{EPS, add, norm_of};

const HIDDEN: usize = 2880;
const TOP: usize = 4;

struct Rank {
    stream: Stream,
    kernels: Kernels,
    groups: AttentionGroups,
}

impl Rank {
    fn download<T: bytemuck::Pod>(&self, buffer: &DeviceBuffer<T>) -> Vec<T> {
        self.stream.download(buffer.view()).unwrap()
    }
}

/// Tokens that ranks which share a GPU may exchange: a block each, of which the largest kernel (384 threads of 115 registers) leaves a
/// multiprocessor room for one. [`MOST_STREAMS`] ranks have 64 of them; the next kernel's, which may come early, are as many; an H200 has
/// 132 multiprocessors.
const SHARED_TOKENS: usize = 16;
/// Ranks that may share a GPU: half of the queues that a driver has for streams by default. Streams of one queue wait for each other.
const MOST_STREAMS: usize = 4;

/// Whether one of so many ranks shares its GPU.
fn shares(ranks: usize) -> bool {
    (device::probe().unwrap() as usize) < ranks
}

/// `None`, with the reason printed, without a GPU.
fn ranks(groups: usize, group_ranks: usize, tokens: usize) -> Option<Vec<Rank>> {
    Gpu::open()?;
    let sizes = GroupSizes { groups, group_ranks, hidden: HIDDEN, tokens };
    let gpus = (device::probe().unwrap() as usize).min(sizes.ranks());
    if sizes.ranks() > MOST_STREAMS * gpus {
        let needed = sizes.ranks().div_ceil(MOST_STREAMS);
        skip(needed as u32, format!("{gpus} GPUs for {} ranks, of which {MOST_STREAMS} may share one", sizes.ranks()));
        return None;
    }
    let load = |rank: usize| {
        let device = Device::open((rank % gpus) as u32).unwrap();
        (device.stream().unwrap(), Kernels::load(&device).unwrap())
    };
    let loaded: Vec<(Stream, Kernels)> = (0..sizes.ranks()).map(load).collect();
    let stopped = Alarm::new(&loaded[0].0).unwrap();
    stopped.stop();
    let mut ranks = connect(loaded, sizes, &stopped);
    ranks.iter_mut().for_each(|rank| warm_up(rank, sizes));
    let alarm = Alarm::new(&ranks[0].stream).unwrap();
    Some(connect(ranks.into_iter().map(|rank| (rank.stream, rank.kernels)).collect(), sizes, &alarm))
}

fn connect(parts: Vec<(Stream, Kernels)>, sizes: GroupSizes, alarm: &Alarm) -> Vec<Rank> {
    let own: Vec<TokenMailbox> = parts.iter().map(|(stream, _)| TokenMailbox::new(stream, sizes).unwrap()).collect();
    let addresses: Vec<TokenMailboxAddress> = own.iter().map(TokenMailbox::address).collect();
    let rank = |(rank, ((stream, kernels), own)): (usize, ((Stream, Kernels), TokenMailbox))| {
        let groups = AttentionGroups::new(&stream, rank, own, &addresses, alarm.clone()).unwrap();
        Rank { stream, kernels, groups }
    };
    parts.into_iter().zip(own).enumerate().map(rank).collect()
}

/// A kernel is loaded when it is first launched, behind whatever runs on its device: where ranks share one, behind a kernel that waits for
/// this very one. So each is launched before, among ranks that have been told not to wait.
fn warm_up(rank: &mut Rank, sizes: GroupSizes) {
    let starts: Vec<usize> = (0..=sizes.groups).map(|group| group.min(1)).collect();
    let own = starts[rank.groups.group() + 1] - starts[rank.groups.group()];
    let zeros = |len: usize| -> DeviceBuffer<bf16> { rank.stream.zeros(len).unwrap() };
    let (mut all, mut residual, mut out) = (zeros(HIDDEN), zeros(own * HIDDEN), zeros(own * HIDDEN));
    let (weight, values, y) = (zeros(HIDDEN), zeros(own * HIDDEN), zeros(TOP * HIDDEN));
    let (weights, slot) = (rank.stream.zeros(TOP).unwrap(), rank.stream.zeros(TOP).unwrap());
    let (starts, groups) = (&starts[..], &mut rank.groups);
    GatherTokens { values: values.view(), norm: None, out: all.view_mut(), starts, groups }
        .enqueue(&rank.kernels, &rank.stream)
        .unwrap();
    let norm = ThenNorm { residual: residual.view_mut(), weight: weight.view(), eps: EPS };
    let (y, weights, slot, groups) = (y.view(), weights.view(), slot.view(), &mut rank.groups);
    ReduceScatter { y, weights, slot, top: TOP, norm, out: out.view_mut(), starts, groups }
        .enqueue(&rank.kernels, &rank.stream)
        .unwrap();
    rank.stream.synchronize().unwrap();
}

/// What a rank has of a step.
struct Operands {
    values: DeviceBuffer<bf16>,
    residual: DeviceBuffer<bf16>,
    norm_weight: DeviceBuffer<bf16>,
    gathered: DeviceBuffer<bf16>,
    y: DeviceBuffer<bf16>,
    weights: DeviceBuffer<f32>,
    slot: DeviceBuffer<i32>,
    out: DeviceBuffer<bf16>,
}

/// A gather and a sum for tokens `starts`, as a layer has them; `with_norm`: the gather makes its rows first.
fn layer(ranks: &mut [Rank], random: &mut Random, starts: &[usize], with_norm: bool) {
    let (groups, tokens) = (starts.len() - 1, starts[starts.len() - 1]);
    let group_ranks = ranks.len() / groups;
    let weight = random.bf16(HIDDEN, 1.0);
    let of_groups = |random: &mut Random| -> Vec<Vec<bf16>> {
        starts.windows(2).map(|pair| random.bf16((pair[1] - pair[0]) * HIDDEN, 2.0)).collect()
    };
    let (values, residuals) = (of_groups(random), of_groups(random));
    let mut operands: Vec<Operands> = Vec::new();
    for (idx, rank) in ranks.iter().enumerate() {
        let (group, pairs) = (idx / group_ranks, tokens * TOP);
        let poisoned = |len| {
            let mut buffer = rank.stream.allocate(len).unwrap();
            rank.stream.fill_bytes(buffer.view_mut(), 0xff).unwrap();
            buffer
        };
        let weights: Vec<f32> = (0..pairs).map(|_| random.normal(0.3).abs()).collect();
        // Of every three pairs one is on another rank; of token 1 all are, as if it only filled the batch up.
        let is_here = |pair: usize| !(pair + idx).is_multiple_of(3) && pair / TOP != 1;
        let slot: Vec<i32> =
            (0..pairs).map(|pair| if is_here(pair) { (pairs - 1 - pair) as i32 } else { -1 }).collect();
        operands.push(Operands {
            values: rank.stream.upload(&values[group]).unwrap(),
            residual: rank.stream.upload(&residuals[group]).unwrap(),
            norm_weight: rank.stream.upload(&weight).unwrap(),
            gathered: poisoned(tokens * HIDDEN),
            y: rank.stream.upload(&random.bf16(pairs * HIDDEN, 1.0)).unwrap(),
            weights: rank.stream.upload(&weights).unwrap(),
            slot: rank.stream.upload(&slot).unwrap(),
            out: poisoned(values[group].len()),
        });
    }
    for (rank, own) in ranks.iter_mut().zip(&mut operands) {
        let norm = ThenNorm { residual: own.residual.view_mut(), weight: own.norm_weight.view(), eps: EPS };
        GatherTokens {
            values: own.values.view(),
            norm: with_norm.then_some(norm),
            out: own.gathered.view_mut(),
            starts,
            groups: &mut rank.groups,
        }
        .enqueue(&rank.kernels, &rank.stream)
        .unwrap();
        ReduceScatter {
            y: own.y.view(),
            weights: own.weights.view(),
            slot: own.slot.view(),
            top: TOP,
            norm: ThenNorm { residual: own.residual.view_mut(), weight: own.norm_weight.view(), eps: EPS },
            out: own.out.view_mut(),
            starts,
            groups: &mut rank.groups,
        }
        .enqueue(&rank.kernels, &rank.stream)
        .unwrap();
    }
    let case = format!("{groups} groups of {group_ranks}, tokens {starts:?}, norm {with_norm}");
    let first = (&ranks[0].stream, &ranks[0].kernels);
    let normed: Vec<[Vec<bf16>; 2]> =
        (0..groups).map(|group| norm_of(first, &residuals[group], &values[group], &operands[0].norm_weight)).collect();
    let rows: Vec<bf16> =
        if with_norm { normed.iter().flat_map(|[_, rows]| rows.clone()).collect() } else { values.concat() };
    let parts: Vec<Vec<bf16>> = ranks.iter().zip(&operands).map(|(rank, own)| part(rank, own, tokens)).collect();
    let sum = add(&parts);
    for (idx, (rank, own)) in ranks.iter().zip(&operands).enumerate() {
        let group = idx / group_ranks;
        assert!(rank.download(&own.gathered) == rows, "{case}: tokens on rank {idx}");
        let before = if with_norm { &normed[group][0] } else { &residuals[group] };
        let own_sum = &sum[starts[group] * HIDDEN..starts[group + 1] * HIDDEN];
        let [residual, out] = norm_of(first, before, own_sum, &operands[0].norm_weight);
        assert!(rank.download(&own.residual) == residual, "{case}: residual on rank {idx}");
        assert!(rank.download(&own.out) == out, "{case}: norm on rank {idx}");
    }
}

/// This rank's part of the sum as another kernel computes it.
fn part(rank: &Rank, own: &Operands, tokens: usize) -> Vec<bf16> {
    let mut out = rank.stream.zeros(tokens * HIDDEN).unwrap();
    Combine {
        y: own.y.view(),
        weights: own.weights.view(),
        slot: own.slot.view(),
        out: out.view_mut(),
        hidden: HIDDEN,
        top: TOP,
    }
    .enqueue(&rank.kernels, &rank.stream)
    .unwrap();
    rank.download(&out)
}

/// Layers of steps in which groups have other numbers of tokens each time, or none.
fn layers(groups: usize, group_ranks: usize, steps: &[&[usize]]) {
    let most = steps.iter().map(|starts| starts[groups]).max().unwrap();
    let Some(mut ranks) = ranks(groups, group_ranks, most) else { return };
    let mut random = Random::new();
    for starts in steps {
        if shares(ranks.len()) && starts[groups] > SHARED_TOKENS {
            skip(
                ranks.len() as u32,
                format!("{} tokens, ranks that share a GPU exchange {SHARED_TOKENS}", starts[groups]),
            );
            continue;
        }
        for with_norm in [true, false, true] {
            layer(&mut ranks, &mut random, starts, with_norm);
        }
    }
}

#[test]
fn two_groups_of_one_rank() {
    layers(2, 1, &[&[0, 1, 2], &[0, 0, 3], &[0, 5, 5], &[0, 3, 8], &[0, 64, 128]]);
}

#[test]
fn more_tokens_than_blocks() {
    layers(2, 1, &[&[0, 700, 901], &[0, 0, 600], &[0, 450, 900]]);
}

#[test]
fn two_groups_of_two_ranks() {
    layers(2, 2, &[&[0, 1, 2], &[0, 0, 3], &[0, 4, 4], &[0, 2, 7]]);
}

#[test]
fn four_groups_of_one_rank() {
    layers(4, 1, &[&[0, 1, 2, 3, 4], &[0, 0, 2, 2, 3], &[0, 0, 0, 0, 5], &[0, 2, 3, 3, 6]]);
}

#[test]
fn eight_ranks() {
    layers(4, 2, &[&[0, 1, 2, 3, 4], &[0, 0, 2, 2, 3], &[0, 0, 0, 0, 5], &[0, 4, 8, 12, 16]]);
    layers(2, 4, &[&[0, 1, 2], &[0, 0, 3], &[0, 7, 16]]);
    layers(8, 1, &[&[0, 1, 2, 3, 4, 5, 6, 7, 8], &[0, 0, 1, 1, 1, 3, 3, 3, 4]]);
}

/// A rank that never comes: the others' kernels end once all are told to stop.
#[test]
fn a_lost_group_does_not_hold_the_others() {
    let Some(mut ranks) = ranks(2, 1, 2) else { return };
    let rank = &mut ranks[0];
    let (values, mut out) = (rank.stream.zeros(HIDDEN).unwrap(), rank.stream.zeros(2 * HIDDEN).unwrap());
    let (values, starts, groups) = (values.view(), &[0, 1, 2][..], &mut rank.groups);
    GatherTokens { values, norm: None, out: out.view_mut(), starts, groups }
        .enqueue(&rank.kernels, &rank.stream)
        .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!ranks[0].stream.record().unwrap().is_done(), "the kernel waits");
    drop(ranks.pop());
    let start = std::time::Instant::now();
    ranks[0].stream.synchronize().unwrap();
    assert!(start.elapsed().as_millis() < 100, "it ended {:?} after the rank was dropped", start.elapsed());
}

#[test]
fn tokens_that_do_not_fit_are_refused() {
    let Some(mut ranks) = ranks(2, 1, 4) else { return };
    let rank = &mut ranks[0];
    let (values, mut out) = (rank.stream.zeros(3 * HIDDEN).unwrap(), rank.stream.zeros(5 * HIDDEN).unwrap());
    for (starts, reason) in
        [(&[0, 3, 5][..], "tokens is 5"), (&[0, 3], "starts has 2 elements, 3 are needed"), (&[1, 3, 4], "starts is 1")]
    {
        let (values, groups) = (values.view(), &mut rank.groups);
        let gather = GatherTokens { values, norm: None, out: out.view_mut(), starts, groups };
        let error = gather.enqueue(&rank.kernels, &rank.stream).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}
