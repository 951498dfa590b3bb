//! Exchanges between two GPUs, ours beside NCCL's: each row is a graph of many on both, the ranks waiting for each other.

use std::time::Duration;

use device::nccl::{Communicator, CommunicatorConfig, Nccl, UniqueId};
use device::{Device, DeviceBuffer, Graph, Stream};
use half::bf16;
use kernels::{
    Alarm, AllGather, AllReduce, Combine, Exchange, KernelError, Kernels, Mailbox, PeerGroup, PeerSizes, RmsNorm,
    Summand, ThenNorm,
};

use crate::harness::Bench;

const HIDDEN: usize = 2880;
const TOP: usize = 4;
const EPS: f32 = 1e-5;
const VOCAB: usize = 201_088;
const TOKENS: [usize; 12] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 2048, 8192];
const PACKET_TOKENS: usize = 512;
const MOST_TOKENS: usize = 8192;
const REPLAYS: usize = 7;

struct Rank {
    is_first: bool,
    stream: Stream,
    kernels: Kernels,
    group: PeerGroup,
    values: DeviceBuffer<bf16>,
    y: DeviceBuffer<bf16>,
    weights: DeviceBuffer<f32>,
    slot: DeviceBuffer<i32>,
    residual: DeviceBuffer<bf16>,
    norm_weight: DeviceBuffer<bf16>,
    out: DeviceBuffer<bf16>,
    part: DeviceBuffer<f32>,
    _logits: DeviceBuffer<f32>,
    nccl: Option<Communicator>,
}

/// What is timed.
#[derive(Clone, Copy, PartialEq)]
enum Case {
    Sum(Exchange),
    Norm(Exchange),
    Experts(Exchange),
    NcclSum,
    NcclNorm,
    NcclExperts,
}

pub(crate) fn run(_: &mut Bench) {
    if device::probe().unwrap() < 2 {
        println!("all_reduce: skipped, one GPU, two are needed\n");
        return;
    }
    let mut ranks = ranks();
    let rate = bench_copy(&ranks);
    println!("## All-reduce of `[tokens, {HIDDEN}]` bf16 over two GPUs\n");
    println!(
        "us each, in a graph of many. NVLink copy rate in this run: {:.0} GB/s one way; *wire*: what must cross, at",
        rate / 1e9
    );
    println!(
        "that rate. *norm*: with residual add and RMSNorm; *experts*: and with the weighted sum of 4 experts before.\n"
    );
    println!(
        "| tokens | wire | packets | bulk | packets, norm | bulk, norm | packets, experts, norm | bulk, experts, norm |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    let (packets, bulk) = (Exchange::Packets, Exchange::Bulk);
    table(
        &mut ranks,
        rate,
        &[
            Case::Sum(packets),
            Case::Sum(bulk),
            Case::Norm(packets),
            Case::Norm(bulk),
            Case::Experts(packets),
            Case::Experts(bulk),
        ],
    );
    println!();
    println!("## Gather of logits, half the vocabulary of {VOCAB} from each of two GPUs, f32\n");
    println!("| rows | wire us | us |\n|---|---|---|");
    for rows in [1, 8, 32, 128] {
        let wire = (rows * VOCAB / 2 * 4) as f64 / rate * 1e6;
        println!("| {rows} | {wire:.2} | {:.2} |", time_gather(&mut ranks, rows));
    }
    println!();
    println!("## The same by NCCL {}\n", Nccl::load().map_or_else(|error| error.to_string(), Nccl::version_text));
    println!("Three launches where ours is one: combine, all-reduce, norm.\n");
    println!("| tokens | wire | sum | sum, norm | experts, sum, norm |");
    println!("|---|---|---|---|---|");
    let devices: Vec<Device> = ranks.iter().map(|rank| rank.stream.device()).collect();
    for (rank, nccl) in ranks.iter_mut().zip(communicators(&devices)) {
        rank.nccl = nccl;
    }
    table(&mut ranks, rate, &[Case::NcclSum, Case::NcclNorm, Case::NcclExperts]);
    println!();
}

fn table(ranks: &mut [Rank], rate: f64, cases: &[Case]) {
    for tokens in TOKENS {
        let mut row = format!("| {tokens} | {:.2} |", (tokens * HIDDEN * 2) as f64 / rate * 1e6);
        for case in cases {
            row += &time(ranks, *case, tokens).map_or_else(|| " |".into(), |us| format!(" {us:.2} |"));
        }
        println!("{row}");
    }
}

fn ranks() -> Vec<Rank> {
    let sizes = PeerSizes { ranks: 2, hidden: HIDDEN, packet_tokens: PACKET_TOKENS, bulk_tokens: MOST_TOKENS };
    let made: Vec<_> = (0..2)
        .map(|ordinal| {
            let device = Device::open(ordinal).unwrap();
            let stream = device.stream().unwrap();
            let logits: DeviceBuffer<f32> = stream.zeros(128 * VOCAB).unwrap();
            (Kernels::load(&device).unwrap(), Mailbox::new(&stream, sizes).unwrap(), logits, stream)
        })
        .collect();
    let addresses: Vec<_> = made.iter().map(|(_, own, logits, _)| own.address(logits)).collect();
    let alarm = Alarm::new(&made[0].3).unwrap();
    let mut ranks = Vec::new();
    for (idx, (kernels, own, logits, stream)) in made.into_iter().enumerate() {
        let group = PeerGroup::new(&stream, idx, own, &addresses, alarm.clone()).unwrap();
        let pairs = MOST_TOKENS * TOP;
        let (y, slot) = (stream.zeros(pairs * HIDDEN).unwrap(), (0..pairs as i32).collect::<Vec<_>>());
        let part = stream.zeros(128 * VOCAB / 2).unwrap();
        ranks.push(Rank {
            is_first: idx == 0,
            values: stream.zeros(MOST_TOKENS * HIDDEN).unwrap(),
            weights: stream.upload(&vec![0.25; pairs]).unwrap(),
            slot: stream.upload(&slot).unwrap(),
            residual: stream.zeros(MOST_TOKENS * HIDDEN).unwrap(),
            norm_weight: stream.zeros(HIDDEN).unwrap(),
            out: stream.zeros(MOST_TOKENS * HIDDEN).unwrap(),
            stream,
            kernels,
            group,
            y,
            part,
            _logits: logits,
            nccl: None,
        });
    }
    ranks
}

/// NCCL's own ranks, if there is an NCCL.
fn communicators(devices: &[Device]) -> Vec<Option<Communicator>> {
    let id = match UniqueId::new() {
        Ok(id) => id,
        Err(error) => {
            println!("NCCL is left out: {error}");
            return devices.iter().map(|_| None).collect();
        }
    };
    std::thread::scope(|scope| {
        let join = |(rank, device)| {
            let id = &id;
            scope.spawn(move || {
                let config =
                    CommunicatorConfig { init_timeout: Duration::from_secs(20), ..CommunicatorConfig::default() };
                Communicator::init(device, id, 2, rank, &config)
                    .map_err(|error| println!("NCCL is left out: {error}"))
                    .ok()
            })
        };
        let threads: Vec<_> = (0..).zip(devices).map(join).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Bytes a second that one GPU writes to the other: the best of several copies.
fn bench_copy(ranks: &[Rank]) -> f64 {
    let [a, b] = ranks else { unreachable!("two ranks") };
    let bytes = b.y.len() * size_of::<bf16>();
    let copy = || {
        let start = a.stream.record().unwrap();
        a.stream.copy_to_peer(&b.y.share(), a.y.view()).unwrap();
        let end = a.stream.record().unwrap();
        end.wait().unwrap();
        end.elapsed_us(&start).unwrap()
    };
    b.y.share().open(&a.stream).unwrap();
    let best = (0..6).map(|_| copy()).fold(f64::INFINITY, f64::min);
    bytes as f64 / best * 1e6
}

/// Microseconds of one of many, the median of several replays.
fn replay(ranks: &mut [Rank], launches: usize, enqueue: &dyn Fn(&mut Rank) -> Result<(), KernelError>) -> f64 {
    let mut graphs: Vec<Graph> = ranks
        .iter_mut()
        .map(|rank| {
            let stream = rank.stream.clone();
            stream.capture::<KernelError>(|_| (0..launches).try_for_each(|_| enqueue(rank))).unwrap()
        })
        .collect();
    let mut times = Vec::new();
    for replay in 0..REPLAYS + 2 {
        let start = ranks[0].stream.record().unwrap();
        for (graph, rank) in graphs.iter_mut().zip(&*ranks) {
            graph.launch(&rank.stream).unwrap();
        }
        let end = ranks[0].stream.record().unwrap();
        end.wait().unwrap();
        ranks[1].stream.synchronize().unwrap();
        if replay >= 2 {
            times.push(end.elapsed_us(&start).unwrap() / launches as f64);
        }
    }
    assert!(!ranks[0].group.alarm().gave_up());
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn time(ranks: &mut [Rank], case: Case, tokens: usize) -> Option<f64> {
    let packets = [Case::Sum(Exchange::Packets), Case::Norm(Exchange::Packets), Case::Experts(Exchange::Packets)];
    if packets.contains(&case) && tokens > PACKET_TOKENS {
        return None;
    }
    let nccl = [Case::NcclSum, Case::NcclNorm, Case::NcclExperts];
    if nccl.contains(&case) && ranks.iter().any(|rank| rank.nccl.is_none()) {
        return None;
    }
    let launches = if tokens > 512 { 20 } else { 200 };
    if nccl.contains(&case) {
        // NCCL connects at the first call, which cannot be recorded.
        std::thread::scope(|scope| {
            for rank in &mut *ranks {
                scope.spawn(|| {
                    enqueue(rank, case, tokens).unwrap();
                    rank.stream.synchronize().unwrap();
                });
            }
        });
    }
    Some(replay(ranks, launches, &|rank| enqueue(rank, case, tokens)))
}

fn enqueue(rank: &mut Rank, case: Case, tokens: usize) -> Result<(), KernelError> {
    let Rank { stream, kernels, group, values, y, weights, slot, residual, norm_weight, out, nccl, .. } = rank;
    let (len, pairs) = (tokens * HIDDEN, tokens * TOP);
    let experts = || (y.slice(..pairs * HIDDEN), weights.slice(..pairs), slot.slice(..pairs));
    let residual = residual.slice_mut(..len);
    match case {
        Case::Sum(exchange) => AllReduce {
            part: Summand::Values(values.slice(..len)),
            norm: None,
            out: out.slice_mut(..len),
            group,
            exchange,
        }
        .enqueue(kernels, stream),
        Case::Norm(exchange) | Case::Experts(exchange) => {
            let (y, weights, slot) = experts();
            let is_plain = case == Case::Norm(exchange);
            let part = if is_plain {
                Summand::Values(values.slice(..len))
            } else {
                Summand::Experts { y, weights, slot, top: TOP }
            };
            let norm = Some(ThenNorm { residual, weight: norm_weight.view(), eps: EPS });
            AllReduce { part, norm, out: out.slice_mut(..len), group, exchange }.enqueue(kernels, stream)
        }
        Case::NcclSum | Case::NcclNorm | Case::NcclExperts => {
            if case == Case::NcclExperts {
                let (y, weights, slot) = experts();
                let out = values.slice_mut(..len);
                Combine { y, weights, slot, out, hidden: HIDDEN, top: TOP }.enqueue(kernels, stream)?;
            }
            let nccl = nccl.as_ref().unwrap();
            nccl.all_reduce(stream, values.slice_mut(..len)).unwrap();
            if case == Case::NcclSum {
                return Ok(());
            }
            let (delta, weight) = (Some(values.slice(..len)), norm_weight.view());
            RmsNorm { residual, delta, weight, out: out.slice_mut(..len), eps: EPS }.enqueue(kernels, stream)
        }
    }
}

fn time_gather(ranks: &mut [Rank], rows: usize) -> f64 {
    let cols = VOCAB / 2;
    replay(ranks, 20, &|rank| {
        let first_col = if rank.is_first { 0 } else { cols };
        AllGather { part: rank.part.slice(..rows * cols), rows, first_col, pitch: VOCAB }.enqueue(
            &mut rank.group,
            &rank.kernels,
            &rank.stream,
        )
    })
}
