//! A sender and a receiver joined by one of the implementations under test.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use kv::KvSlice;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use transfer::data::{ReceiveData, SendData};
use transfer::fault::{FaultCounts, FaultPlan, Faulty};
use transfer::framed::{Connector, FramedReceiver, FramedSender, Stream};
use transfer::{
    Arrival, ArrivalEvent, ArrivalSink, ArrivalSlot, Part, ReceiveTransport, SendTicket, SendTransport, SinkClosed,
    TransferConfig, TransferError,
};
use types::{DpGroup, Incarnation, KvDtype, KvLayout, PageGroup, PeerId, WorkerId};

use crate::data::{Caches, Damaging, hand_over, receiver_tables};

pub(crate) fn peer(name: &str, incarnation: u64) -> PeerId {
    PeerId { worker: WorkerId(name.into()), incarnation: Incarnation(incarnation) }
}

pub(crate) fn layout(tp: u32) -> KvLayout {
    KvLayout {
        full_layers: vec![1, 3],
        window_layers: vec![0, 2],
        kv_heads: 4,
        head_dim: 8,
        page_tokens: 4,
        window: 8,
        dtype: KvDtype::F32,
        tp,
    }
}

/// A part whose bytes depend on its place.
pub(crate) fn part(layer: u32, page: u32, head: u32) -> Part {
    let group = if layer % 2 == 1 { PageGroup::Full } else { PageGroup::Window };
    let slice = KvSlice { group, layer, page, head_start: head, head_count: 1 };
    let seed = (layer * 100 + page * 10 + head) as u8;
    let bytes: Vec<u8> = (0..layout(1).head_bytes()).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect();
    Part::new(slice, Bytes::from(bytes))
}

pub(crate) fn quick() -> TransferConfig {
    TransferConfig {
        connect_timeout_ms: 2_000,
        ping_interval_ms: 50,
        peer_silence_timeout_ms: 2_000,
        ack_timeout_ms: 2_000,
        stall_timeout_ms: 300,
        in_flight_bytes_max: 1 << 20,
        tickets_max: 64,
        batch_bytes_max: 4_096,
        checksum_every: 1,
        min_gb_per_s: 0, // staging here is smaller than what could be measured
        ..TransferConfig::default()
    }
}

#[derive(Clone)]
pub(crate) struct Options {
    pub(crate) sender_layout: KvLayout,
    pub(crate) receiver_layout: KvLayout,
    pub(crate) config: TransferConfig,
    /// The receiver's, if it is another.
    pub(crate) receiver_config: Option<TransferConfig>,
    pub(crate) sink_capacity: usize,
    /// Attention groups of the receiver: everything lands in the last one.
    pub(crate) groups: u32,
}

impl Default for Options {
    fn default() -> Self {
        let (sender_layout, receiver_layout) = (layout(2), layout(4));
        let (config, receiver_config) = (quick(), None);
        Self { sender_layout, receiver_layout, config, receiver_config, sink_capacity: 4096, groups: 1 }
    }
}

impl Options {
    pub(crate) fn receiver_config(&self) -> &TransferConfig {
        self.receiver_config.as_ref().unwrap_or(&self.config)
    }

    pub(crate) fn group(&self) -> DpGroup {
        DpGroup(self.groups - 1)
    }
}

pub(crate) struct World {
    pub(crate) sender: Box<dyn SendTransport>,
    pub(crate) receiver: Arc<FramedReceiver>,
    pub(crate) arrivals: mpsc::Receiver<Arrival>,
    pub(crate) address: String,
    /// The receiver's attention group that everything lands in.
    pub(crate) group: DpGroup,
    /// Ends all connections at the receiver, as the death of its process would.
    pub(crate) receiver_stop: CancellationToken,
    pub(crate) faults: Option<Arc<FaultCounts>>,
    /// Of both sides, where a data path lies between them.
    pub(crate) caches: Option<Arc<dyn Caches>>,
    /// Held by a world that shares the machine with no other of its kind.
    pub(crate) _turn: Option<tokio::sync::OwnedMutexGuard<()>>,
}

impl World {
    pub(crate) fn decode_peer() -> PeerId {
        peer("decode-0", 7)
    }

    pub(crate) fn prefill_peer() -> PeerId {
        peer("prefill-0", 3)
    }

    pub(crate) fn hand_over(&self, ticket: &dyn SendTicket, parts: &[Part]) -> Result<(), TransferError> {
        hand_over(self.caches.as_deref(), ticket, parts)
    }

    pub(crate) async fn arrival(&mut self) -> Arrival {
        tokio::time::timeout(Duration::from_secs(5), self.arrivals.recv()).await.expect("an arrival in time").unwrap()
    }

    /// Arrivals of one ticket up to and with the terminal one.
    pub(crate) async fn until_terminal(&mut self) -> (Vec<KvSlice>, ArrivalEvent) {
        let mut slices = Vec::new();
        let mut ticket = None;
        loop {
            let arrival = self.arrival().await;
            assert_eq!(*ticket.get_or_insert(arrival.ticket), arrival.ticket, "an arrival behind its ticket's end");
            match arrival.event {
                ArrivalEvent::Begin { sender, .. } => {
                    assert_eq!(sender, Self::prefill_peer());
                    self.receiver.land(arrival.ticket, self.group, &receiver_tables());
                }
                ArrivalEvent::Landed { slices: landed, bytes } => {
                    let caches = self.caches.as_ref().expect("only data paths land");
                    assert_eq!(bytes, landed.len() * layout(1).head_bytes());
                    for slice in &landed {
                        let found = caches.read_receiver(slice, receiver_tables().physical(slice).unwrap());
                        assert_eq!(found, part(slice.layer, slice.page, slice.head_start).bytes, "bytes of {slice:?}");
                    }
                    slices.extend(landed);
                }
                ArrivalEvent::Part { slice, bytes } => {
                    assert_eq!(bytes, part(slice.layer, slice.page, slice.head_start).bytes, "bytes of {slice:?}");
                    slices.push(slice);
                }
                terminal => return (slices, terminal),
            }
        }
    }

    pub(crate) async fn nothing_more(&mut self) {
        let before = self.caches.as_ref().map(|caches| caches.receiver_bytes());
        let more = tokio::time::timeout(Duration::from_millis(100), self.arrivals.recv()).await;
        let after = self.caches.as_ref().map(|caches| caches.receiver_bytes());
        assert!(before == after, "pages were written behind the end of their ticket");
        assert!(more.is_err(), "nothing follows a terminal arrival, but {more:?} did");
    }
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

/// Joins by in-memory pipes.
struct PipeConnector {
    receiver: Arc<FramedReceiver>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Connector for PipeConnector {
    fn connect<'a>(&'a self, _address: &'a str) -> BoxFuture<'a, io::Result<Box<dyn Stream>>> {
        async {
            let (ours, theirs) = tokio::io::duplex(4096);
            let (receiver, stop) = (Arc::clone(&self.receiver), self.stop.clone());
            self.tasks.spawn(async move { receiver.serve(Box::new(theirs), stop).await });
            Ok(Box::new(ours) as Box<dyn Stream>)
        }
        .boxed()
    }
}

pub(crate) struct TcpConnector;

impl Connector for TcpConnector {
    fn connect<'a>(&'a self, address: &'a str) -> BoxFuture<'a, io::Result<Box<dyn Stream>>> {
        async move { Ok(Box::new(TcpStream::connect(address).await?) as Box<dyn Stream>) }.boxed()
    }
}

struct Ends {
    receiver: Arc<FramedReceiver>,
    arrivals: mpsc::Receiver<Arrival>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

fn ends(options: &Options) -> Ends {
    let (sender, arrivals) = mpsc::channel(options.sink_capacity);
    let (layout, config) = (options.receiver_layout.clone(), options.receiver_config().clone());
    let receiver = Arc::new(FramedReceiver::new(World::decode_peer(), layout, config, Arc::new(Sink(sender))));
    Ends { receiver, arrivals, stop: CancellationToken::new(), tasks: TaskTracker::new() }
}

fn framed_sender(options: &Options, connector: Arc<dyn Connector>, tasks: TaskTracker) -> FramedSender {
    let (layout, config) = (options.sender_layout.clone(), options.config.clone());
    FramedSender::new(connector, World::prefill_peer(), layout, config, tasks, CancellationToken::new())
}

pub(crate) fn over_pipe(options: Options) -> BoxFuture<'static, Option<World>> {
    piped(options).map(Some).boxed()
}

pub(crate) fn piped(options: Options) -> BoxFuture<'static, World> {
    async move {
        let Ends { receiver, arrivals, stop, tasks } = ends(&options);
        let connector =
            Arc::new(PipeConnector { receiver: Arc::clone(&receiver), tasks: tasks.clone(), stop: stop.clone() });
        let sender = Box::new(framed_sender(&options, connector, tasks));
        World {
            sender,
            receiver,
            arrivals,
            address: "pipe".into(),
            group: options.group(),
            receiver_stop: stop,
            faults: None,
            caches: None,
            _turn: None,
        }
    }
    .boxed()
}

pub(crate) fn over_tcp(options: Options) -> BoxFuture<'static, Option<World>> {
    async move {
        let Ends { receiver, arrivals, stop, tasks } = ends(&options);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (acceptor, accept_stop, connections) = (Arc::clone(&receiver), stop.clone(), tasks.clone());
        tasks.spawn(async move {
            while let Some(Ok((stream, _))) = accept_stop.run_until_cancelled(listener.accept()).await {
                let (receiver, stop) = (Arc::clone(&acceptor), accept_stop.clone());
                connections.spawn(async move { receiver.serve(Box::new(stream), stop).await });
            }
        });
        let sender = Box::new(framed_sender(&options, Arc::new(TcpConnector), tasks));
        Some(World {
            sender,
            receiver,
            arrivals,
            address,
            group: options.group(),
            receiver_stop: stop,
            faults: None,
            caches: None,
            _turn: None,
        })
    }
    .boxed()
}

/// Joins by in-memory pipes, with a data path beside them.
pub(crate) fn piped_with_data(
    options: &Options,
    send: Arc<dyn SendData>,
    receive: Arc<dyn ReceiveData>,
    caches: Arc<dyn Caches>,
    plan: Option<FaultPlan>,
) -> World {
    let Ends { receiver, arrivals, stop, tasks } = ends(options);
    receiver.set_data(receive);
    let connector =
        Arc::new(PipeConnector { receiver: Arc::clone(&receiver), tasks: tasks.clone(), stop: stop.clone() });
    let sender = framed_sender(options, connector, tasks);
    let (faults, caches) = (plan.map(|_| Arc::new(FaultCounts::default())), Some(caches));
    sender.set_data(Arc::new(Damaging::new(send, Arc::clone(caches.as_ref().unwrap()), plan, faults.clone())));
    let plan = plan.map(|plan| FaultPlan { corrupt: 0, duplicate: 0, reorder: 0, disconnect: 10, ..plan });
    let (sender, faults): (Box<dyn SendTransport>, _) = match plan {
        Some(plan) => (Box::new(Faulty::new(sender, plan)), faults),
        None => (Box::new(sender), None),
    };
    let (address, group) = ("pipe".into(), options.group());
    World { sender, receiver, arrivals, address, group, receiver_stop: stop, faults, caches, _turn: None }
}

pub(crate) async fn faulty(options: Options, plan: FaultPlan) -> World {
    let Ends { receiver, arrivals, stop, tasks } = ends(&options);
    let connector =
        Arc::new(PipeConnector { receiver: Arc::clone(&receiver), tasks: tasks.clone(), stop: stop.clone() });
    let sender = Faulty::new(framed_sender(&options, connector, tasks), plan);
    let faults = Some(sender.counts());
    World {
        sender: Box::new(sender),
        receiver,
        arrivals,
        address: "pipe".into(),
        group: options.group(),
        receiver_stop: stop,
        faults,
        caches: None,
        _turn: None,
    }
}

/// The decorator with faults that a correct transport hides. (Duplicates take room of their own: the storm of faults has them.)
pub(crate) fn over_harmless_faults(options: Options) -> BoxFuture<'static, Option<World>> {
    let delay_max = Duration::from_millis(5);
    let plan = FaultPlan { seed: 1, reorder: 500, delay: 500, delay_max, ..FaultPlan::default() };
    faulty(options, plan).map(Some).boxed()
}
