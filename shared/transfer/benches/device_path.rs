//! Times the KV of one 8,192-token prompt of gpt-oss-20b between two GPUs, or on one, beside idle devices, and prints tables in Markdown.
//!
//! `cargo bench -p transfer --bench device_path -- [ipc|nccl] [SENDER GPU] [RECEIVER GPU] [nccl_max_ctas] [batch_bytes_max]`. Both ends are in this
//! process, joined by TCP on the loopback; where a path is opened across processes only its set-up differs. *Tail*: from the moment at which the last group of
//! layers of the last chunk is complete to the arrival of COMMIT at the receiver, whose pages are then whole. *Rate*: prompts one behind another,
//! over the wall clock.
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
use transfer::host::{Connector, HostReceiver, HostSender, Stream};
use transfer::{
    Arrival, ArrivalEvent, ArrivalSink, ArrivalSlot, FirstToken, ReceiveTransport, SendLane, SendTransport, SinkClosed,
    TransferConfig, TransportChoice,
};
use types::{DpGroup, Incarnation, KvDtype, KvLayout, PageGroup, PageId, PeerId, TicketId, WorkerId};

const CONTEXT: u32 = 8_192;
const CHUNK: u32 = 2_048;
/// Layers between two hand-overs: a quarter of the model, as in the engine.
const GROUP_LAYERS: u32 = 6;
const PAGES: u32 = 256;
const ROUNDS: u32 = 30;

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

fn tables(first: u32) -> PageTables {
    let table = || PageTable { first_page: 0, pages: (0..PAGES).map(|page| PageId((page + first) % PAGES)).collect() };
    PageTables { full: table(), window: table() }
}

fn port(device: &Device) -> (KvPort, [DeviceBuffer<u8>; 2]) {
    let (stream, layout) = (device.stream().unwrap(), layout());
    let pool = |group| {
        let (layers, head_bytes) = (layout.layers(group).len(), layout.head_bytes());
        let buffer = stream.zeros::<u8>(PAGES as usize * layers * 8 * head_bytes).unwrap();
        (KvPool { memory: buffer.shared(), layers, kv_heads: 8, head_bytes }, buffer)
    };
    let ((full, a), (window, b)) = (pool(PageGroup::Full), pool(PageGroup::Window));
    stream.synchronize().unwrap();
    (KvPort { device: device.clone(), full, window }, [a, b])
}

struct Sink(mpsc::Sender<(Instant, Arrival)>);

impl ArrivalSink for Sink {
    fn slot(&self) -> BoxFuture<'_, Result<ArrivalSlot, SinkClosed>> {
        async {
            let permit = self.0.clone().reserve_owned().await.map_err(|_| SinkClosed)?;
            Ok(Box::new(move |arrival| drop(permit.send((Instant::now(), arrival)))) as ArrivalSlot)
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

/// One prompt: the moment at which its last layers are complete.
async fn send(lane: &dyn SendLane, id: u128, map: &PageMap) -> Instant {
    let ticket = lane.begin(TicketId(id), DpGroup(0)).await.unwrap();
    let pages = tables(7);
    let mut last = Instant::now();
    for chunk in 0..CONTEXT / CHUNK {
        for group in 0..24 / GROUP_LAYERS {
            let positions = chunk * CHUNK..(chunk + 1) * CHUNK;
            let slices = map.ready_slices(0, group * GROUP_LAYERS..(group + 1) * GROUP_LAYERS, positions);
            let places: Vec<_> = slices.map(|slice| (slice, pages.physical(&slice).unwrap())).collect();
            ticket.reserve(places.iter().map(|(slice, _)| map.slice_bytes(slice)).sum()).await.unwrap();
            last = Instant::now();
            tokio::task::block_in_place(|| ticket.pages(0, &places)).unwrap();
        }
    }
    ticket.commit(FirstToken { index: 0, token: 1, logprob: None }).await.unwrap();
    last
}

/// Lands and accepts everything; yields the moment at which each ticket's pages are whole.
async fn land(
    receiver: Arc<HostReceiver>,
    mut arrivals: mpsc::Receiver<(Instant, Arrival)>,
    whole: mpsc::Sender<Instant>,
) {
    while let Some((at, Arrival { ticket, event })) = arrivals.recv().await {
        match event {
            ArrivalEvent::Begin { .. } => receiver.land(ticket, DpGroup(0), &tables(90)),
            ArrivalEvent::Commit { reply, .. } => {
                reply.accept();
                whole.send(at).await.unwrap();
            }
            ArrivalEvent::Landed { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

fn config(arguments: &[String]) -> TransferConfig {
    let number = |i: usize| arguments.get(i).and_then(|text| text.parse().ok());
    let defaults = TransferConfig::default();
    TransferConfig {
        transport: if arguments.first().is_some_and(|path| path == "nccl") {
            TransportChoice::Nccl
        } else {
            TransportChoice::Ipc
        },
        nccl_max_ctas: number(3).unwrap_or(defaults.nccl_max_ctas),
        batch_bytes_max: number(4).unwrap_or(defaults.batch_bytes_max),
        allow_slow: true,
        ..defaults
    }
}

#[tokio::main]
async fn main() {
    if !kernels::AVAILABLE || device::probe().is_err() {
        return eprintln!("skipped: no GPU, or built without nvcc");
    }
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let gpu = |i: usize| arguments.get(i).and_then(|text| text.parse().ok()).unwrap_or(0);
    let (config, counters) = (config(&arguments), Arc::new(DataCounters::default()));
    let ((ours, _keep), (theirs, _too)) = (port(&Device::open(gpu(1)).unwrap()), port(&Device::open(gpu(2)).unwrap()));
    let (arrived, arrivals) = mpsc::channel(4_096);
    let receiver = Arc::new(HostReceiver::new(peer("decode"), layout(), config.clone(), Arc::new(Sink(arrived))));
    receiver.set_data(Arc::new(DeviceReceive::new(vec![theirs], &layout(), &config, &counters).unwrap()));
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let sender = HostSender::new(Arc::new(Tcp), peer("prefill"), layout(), config.clone(), tasks.clone(), stop.clone());
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
    let opened = opening.elapsed();
    let (whole, mut wholes) = mpsc::channel(4_096);
    tasks.spawn(land(Arc::clone(&receiver), arrivals, whole));

    let map = PageMap::new(&layout(), &layout(), CONTEXT).unwrap();
    let mut tails_us = Vec::new();
    let mut started = Instant::now();
    for round in 0..ROUNDS {
        if round == 5 {
            started = Instant::now(); // the first ones warm up
        }
        receiver.post(TicketId(round.into()), &peer("prefill")).unwrap();
        let last = send(&*lane, round.into(), &map).await;
        tails_us.push((wholes.recv().await.unwrap() - last).as_secs_f64() * 1e6);
    }
    let elapsed = started.elapsed().as_secs_f64();
    let mut tails_us = tails_us.split_off(5);
    tails_us.sort_by(f64::total_cmp);
    let rate = f64::from(ROUNDS - 5) * map.total_bytes() as f64 / elapsed / 1e9;
    let stage = |stage| counters.bytes(stage) as f64 / counters.seconds(stage) / 1e9;
    let (median, worst) = (tails_us[tails_us.len() / 2], tails_us[tails_us.len() - 1]);
    let pair = counters.rates().first().map_or(0, |(_, rate)| rate.mb_per_s / 1_000);
    let (path, mb) = (config.transport, map.total_bytes() as f64 / 1e6);
    println!(
        "| path | GPUs | opened ms | probe GB/s | MB | tail median us | worst us | rate GB/s | gather | move | scatter |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    println!(
        "| {path} (ctas {}, batch {} MiB) | {} to {} | {:.1} | {pair} | {mb:.0} | {median:.0} | {worst:.0} | {rate:.0} | {:.0} | {:.0} | {:.0} |",
        config.nccl_max_ctas,
        config.batch_bytes_max >> 20,
        gpu(1),
        gpu(2),
        opened.as_secs_f64() * 1e3,
        stage(Stage::Gather),
        stage(Stage::Move),
        stage(Stage::Scatter),
    );
    drop(lane);
    stop.cancel();
}
