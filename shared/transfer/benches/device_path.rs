//! Times the KV of prompts of gpt-oss-20b between two GPUs, or on one, beside idle devices, and prints tables in Markdown.
//!
//! `cargo bench -p transfer --bench device_path -- [ipc|nccl] [SENDER GPU] [RECEIVER GPU] [SETTING=NUMBER ..]`, with settings `context` (tokens of the
//! longest prompt; 8192), `copy_blocks`, `batch_mib`, `nccl_max_ctas`. Both ends are in this process, joined by TCP on the loopback; where a path is
//! opened across processes only its set-up differs.
//!
//! - *Behind layers*: 8,192 tokens in four chunks, each handed over in groups of layers as the engine does, one after the other. *Tail*: from
//!   the moment at which the last group of the last chunk is complete to the receiver's word that all has landed.
//! - *All at once*: everything is computed, and handed over as fast as the lane has room. *Rate*: bytes over the time from the first hand-over, which
//!   begins with the first gather, to the receiver's word that all has landed.
#![allow(clippy::unwrap_used)] // an error here ends the measurement, and its text is all that anyone wants

use std::sync::Arc;
use std::time::Instant;

use device::{Device, DeviceBuffer};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use kernels::{KvPool, KvPort};
use kv::{PageMap, PageTable, PageTables};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use transfer::data::{DataCounters, Stage};
use transfer::device::{DeviceReceive, DeviceSend};
use transfer::framed::{Connector, FramedReceiver, FramedSender, Stream};
use transfer::{
    Arrival, ArrivalEvent, ArrivalSink, ArrivalSlot, FirstToken, ReceiveTransport, SendLane, SendTransport, SinkClosed,
    TransferConfig, TransportChoice,
};
use types::{DpGroup, Incarnation, KvDtype, KvLayout, PageGroup, PageId, PeerId, TicketId, WorkerId};

const CONTEXT: u32 = 8_192;
const CHUNK: u32 = 2_048;
/// Ends of the groups of layers that are handed over together, as in the engine: a quarter of the model, and the last layer alone.
const GROUPS: [u32; 6] = [0, 6, 12, 18, 23, 24];
/// Bytes handed over at a time where everything is computed, and is more than a lane has room for.
const HAND_OVER: usize = 64 << 20;
const WARM_UPS: usize = 5;

fn layout() -> KvLayout {
    KvLayout {
        full_layers: (0..12).map(|layer| 2 * layer + 1).collect(),
        window_layers: (0..12).map(|layer| 2 * layer).collect(),
        kv_heads: 8,
        head_dim: 64,
        page_tokens: 64,
        window: 128,
        dtype: KvDtype::Bf16,
        tp: 1,
    }
}

fn peer(name: &str) -> PeerId {
    PeerId { worker: WorkerId(name.into()), incarnation: Incarnation(1) }
}

/// Pages of contexts of up to `pages` pages, out of order.
fn tables(pages: u32, first: u32) -> PageTables {
    let table =
        || PageTable { first_page: 0, pages: (0..pages).map(|page| PageId((page * 37 + first) % pages)).collect() };
    PageTables { full: table(), window: table() }
}

fn port(device: &Device, pages: u32) -> (KvPort, [DeviceBuffer<u8>; 2]) {
    let (stream, layout) = (device.stream().unwrap(), layout());
    let pool = |group| {
        let (layers, head_bytes) = (layout.layers(group).len(), layout.head_bytes());
        let buffer = stream.zeros::<u8>(pages as usize * layers * 8 * head_bytes).unwrap();
        (KvPool { memory: buffer.shared(), layers, kv_heads: 8, head_bytes }, buffer)
    };
    let ((full, a), (window, b)) = (pool(PageGroup::Full), pool(PageGroup::Window));
    stream.synchronize().unwrap();
    (KvPort { device: device.clone(), full, window }, [a, b])
}

struct Sink(mpsc::Sender<Arrival>);

impl ArrivalSink for Sink {
    fn slot(&self) -> BoxFuture<'_, Result<ArrivalSlot, SinkClosed>> {
        async {
            let permit = self.0.clone().reserve_owned().await.map_err(|_| SinkClosed)?;
            Ok(Box::new(move |arrival| drop(permit.send(arrival))) as ArrivalSlot)
        }
        .boxed()
    }
}

struct Tcp;

impl Connector for Tcp {
    fn connect<'a>(&'a self, address: &'a str) -> BoxFuture<'a, std::io::Result<Box<dyn Stream>>> {
        async move {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            Ok(Box::new(stream) as Box<dyn Stream>)
        }
        .boxed()
    }
}

/// One prompt, group of layers by group; the microseconds of its tail.
async fn behind_layers(lane: &dyn SendLane, id: TicketId, map: &PageMap, pages: &PageTables) -> f64 {
    let ticket = lane.begin(id, DpGroup(0)).await.unwrap();
    let mut last = Instant::now();
    for chunk in 0..CONTEXT / CHUNK {
        for group in GROUPS.windows(2) {
            let positions = chunk * CHUNK..(chunk + 1) * CHUNK;
            let slices = map.ready_slices(0, group[0]..group[1], positions);
            let places: Vec<_> = slices.map(|slice| (slice, pages.physical(&slice).unwrap())).collect();
            ticket.reserve(places.iter().map(|(slice, _)| map.slice_bytes(slice)).sum()).await.unwrap();
            last = Instant::now();
            tokio::task::block_in_place(|| ticket.pages(0, &places)).unwrap();
        }
    }
    let receipt = ticket.commit(FirstToken { index: 0, token: 1, logprob: None }).await.unwrap();
    (receipt.batches.unwrap().landed_at - last).as_secs_f64() * 1e6
}

/// One prompt, as fast as it goes; its microseconds.
async fn all_at_once(lane: &dyn SendLane, id: TicketId, map: &PageMap, pages: &PageTables, room: usize) -> f64 {
    let ticket = lane.begin(id, DpGroup(0)).await.unwrap();
    let places: Vec<_> = map.slices().map(|slice| (slice, pages.physical(&slice).unwrap())).collect();
    let slice_bytes = map.slice_bytes(&places[0].0);
    let bytes = places.len() * slice_bytes;
    let started = Instant::now();
    for some in places.chunks(if bytes <= room { bytes } else { HAND_OVER } / slice_bytes) {
        ticket.reserve(some.len() * slice_bytes).await.unwrap();
        tokio::task::block_in_place(|| ticket.pages(0, some)).unwrap();
    }
    let receipt = ticket.commit(FirstToken { index: 0, token: 1, logprob: None }).await.unwrap();
    (receipt.batches.unwrap().landed_at - started).as_secs_f64() * 1e6
}

/// Lands and accepts everything.
async fn land(receiver: Arc<FramedReceiver>, mut arrivals: mpsc::Receiver<Arrival>, pages: u32) {
    while let Some(Arrival { ticket, event }) = arrivals.recv().await {
        match event {
            ArrivalEvent::Begin { .. } => receiver.land(ticket, DpGroup(0), &tables(pages, 90)),
            ArrivalEvent::Commit { reply, .. } => reply.accept(),
            ArrivalEvent::Landed { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

/// What the command line asks for: the config, the two GPUs, and the longest prompt.
fn arguments() -> (TransferConfig, [u32; 2], u32) {
    let mut config = TransferConfig { transport: TransportChoice::Ipc, allow_slow: true, ..TransferConfig::default() };
    let (mut gpus, mut seen, mut context) = ([0, 0], 0, CONTEXT);
    for argument in std::env::args().skip(1).filter(|argument| !argument.starts_with('-')) {
        match argument.split_once('=') {
            Some((name, number)) => {
                let number: u32 = number.parse().unwrap();
                match name {
                    "context" => context = number.max(CONTEXT),
                    "copy_blocks" => config.copy_blocks = number,
                    "batch_mib" => config.batch_bytes_max = number << 20,
                    "nccl_max_ctas" => config.nccl_max_ctas = Some(number),
                    _ => panic!("no setting {name}"),
                }
            }
            None if argument == "nccl" => config.transport = TransportChoice::Nccl,
            None if argument == "ipc" => {}
            None => {
                gpus[seen] = argument.parse().unwrap();
                seen += 1;
            }
        }
    }
    (config, gpus, context)
}

/// Median and largest of what is behind the warm-ups.
fn median_and_worst(mut times_us: Vec<f64>) -> (f64, f64) {
    let mut times_us = times_us.split_off(WARM_UPS);
    times_us.sort_by(f64::total_cmp);
    (times_us[times_us.len() / 2], times_us[times_us.len() - 1])
}

#[tokio::main]
async fn main() {
    if !kernels::AVAILABLE || device::probe().is_err() {
        return eprintln!("skipped: no GPU, or built without nvcc");
    }
    let (config, gpus, context) = arguments();
    let (counters, pages) = (Arc::new(DataCounters::default()), context.div_ceil(layout().page_tokens) | 1);
    let [(ours, _keep), (theirs, _too)] = gpus.map(|gpu| port(&Device::open(gpu).unwrap(), pages));
    let (arrived, arrivals) = mpsc::channel(4_096);
    let receiver = Arc::new(FramedReceiver::new(peer("decode"), layout(), config.clone(), Arc::new(Sink(arrived))));
    receiver.set_data(Arc::new(DeviceReceive::new(vec![theirs], &layout(), &config, &counters).unwrap()));
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let sender =
        FramedSender::new(Arc::new(Tcp), peer("prefill"), layout(), config.clone(), tasks.clone(), stop.clone());
    sender.set_data(Arc::new(DeviceSend::new(vec![ours], &layout(), &config, &counters).unwrap()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let accepting = Arc::clone(&receiver);
    tasks.spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        stream.set_nodelay(true).unwrap();
        accepting.serve(Box::new(stream), CancellationToken::new()).await;
    });
    let opening = Instant::now();
    let lane = sender.connect(&address, &peer("decode")).await.unwrap();
    let opened_ms = opening.elapsed().as_secs_f64() * 1e3;
    tasks.spawn(land(Arc::clone(&receiver), arrivals, pages));

    let ctas = config.nccl_max_ctas.map_or("default".into(), |ctas| ctas.to_string());
    let probe = counters.rates().first().map_or(0, |(_, rate)| rate.mb_per_s / 1_000);
    println!(
        "{} from GPU {} to {}: copy_blocks {}, batches of {} MiB, nccl_max_ctas {ctas}; opened in {opened_ms:.1} ms, probe {probe} GB/s\n",
        config.transport,
        gpus[0],
        gpus[1],
        config.copy_blocks,
        config.batch_bytes_max >> 20
    );
    println!("| tokens | MB | handed over | us, median | worst | GB/s | gather GB/s | move GB/s | scatter GB/s |");
    println!("|---|---|---|---|---|---|---|---|---|");
    let (sender_pages, mut ids) = (tables(pages, 7), 1_u128..);
    let cases = [(CONTEXT, true, 25), (CONTEXT, false, 25), (32_768, false, 10), (131_072, false, 5)];
    for (tokens, by_layers, rounds) in cases.into_iter().filter(|(tokens, ..)| *tokens <= context) {
        let map = PageMap::new(&layout(), &layout(), tokens).unwrap();
        let before = Stage::ALL.map(|stage| (counters.bytes(stage), counters.seconds(stage)));
        let mut times_us = Vec::new();
        for id in ids.by_ref().take(WARM_UPS + rounds).map(TicketId) {
            receiver.post(id, &peer("prefill")).unwrap();
            times_us.push(if by_layers {
                behind_layers(&*lane, id, &map, &sender_pages).await
            } else {
                all_at_once(&*lane, id, &map, &sender_pages, config.in_flight_bytes_max as usize).await
            });
        }
        let (median, worst) = median_and_worst(times_us);
        let mb = map.total_bytes() as f64 / 1e6;
        let (what, rate) = if by_layers {
            ("behind layers; tail", "-".into())
        } else {
            ("all at once", format!("{:.0}", mb * 1e3 / median))
        };
        let stages = Stage::ALL.iter().zip(before).map(|(stage, (bytes, seconds))| {
            (counters.bytes(*stage) - bytes) as f64 / (counters.seconds(*stage) - seconds) / 1e9
        });
        let stages: Vec<String> = stages.map(|rate| format!("{rate:.0}")).collect();
        println!("| {tokens} | {mb:.0} | {what} | {median:.0} | {worst:.0} | {rate} | {} |", stages.join(" | "));
    }
    drop(lane);
    stop.cancel();
}
