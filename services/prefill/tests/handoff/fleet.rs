//! One prefill and one decode worker in this process, over real loopback, and a router reduced to its two calls.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use chassis::Shutdown;
use chassis::net::grpc::{ChannelLimits, channel};
use chassis::net::{Address, Listener, Network, Socket, TcpNetwork};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::task::JoinHandle;
use tonic::transport::Channel;
use tonic::{Status, Streaming};
use types::{
    DecodeEvent, Finished, GenerateRequest, ParallelLayout, PeerId, PrefillEvent, RequestId, SampledToken, Sampling,
    Ticket, TicketId, TokenId, WorkerReport, WorkerState,
};
use wire::pb;

/// Remembers where a service listens, and damages KV on order.
pub(crate) struct TestNetwork {
    inner: TcpNetwork,
    bound: Mutex<HashMap<String, Address>>,
    /// Parts still to be damaged on connections that this service opens.
    damage: Arc<AtomicU32>,
}

impl Network for TestNetwork {
    fn bind<'a>(&'a self, name: &'a str, address: &'a Address) -> BoxFuture<'a, io::Result<Listener>> {
        async move {
            let listener = self.inner.bind(name, address).await?;
            self.bound.lock().unwrap().insert(name.to_owned(), listener.local().clone());
            Ok(listener)
        }
        .boxed()
    }

    fn connect<'a>(&'a self, address: &'a Address) -> BoxFuture<'a, io::Result<Socket>> {
        async move {
            let socket = self.inner.connect(address).await?;
            Ok(Socket::new(Damaging { inner: socket, damage: Arc::clone(&self.damage) }, address))
        }
        .boxed()
    }

    fn resolve<'a>(&'a self, address: &'a Address) -> BoxFuture<'a, io::Result<Vec<Address>>> {
        self.inner.resolve(address)
    }
}

/// Flips a bit in the next large write: frame heads are small and written by themselves, so it hits a part's bytes.
struct Damaging {
    inner: Socket,
    damage: Arc<AtomicU32>,
}

impl AsyncRead for Damaging {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl AsyncWrite for Damaging {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let is_armed = |left: u32| left.checked_sub(1);
        if buf.len() < 1_024 || self.damage.fetch_update(Ordering::SeqCst, Ordering::SeqCst, is_armed).is_err() {
            return Pin::new(&mut self.inner).poll_write(cx, buf);
        }
        let mut bytes = buf.to_vec();
        bytes[500] ^= 1;
        let written = Pin::new(&mut self.inner).poll_write(cx, &bytes);
        if !matches!(written, Poll::Ready(Ok(n)) if n > 500) {
            self.damage.fetch_add(1, Ordering::SeqCst);
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

/// One running service.
pub(crate) struct Service {
    pub(crate) shutdown: Shutdown,
    pub(crate) channel: Channel,
    pub(crate) peer: PeerId,
    pub(crate) damage: Arc<AtomicU32>,
    admin: Address,
    running: JoinHandle<Result<(), worker::WorkerError>>,
}

impl Service {
    async fn start<F>(run: impl FnOnce(Arc<dyn Network>, Shutdown) -> F) -> Self
    where
        F: Future<Output = Result<(), worker::WorkerError>> + Send + 'static,
    {
        let damage = Arc::new(AtomicU32::new(0));
        let network = Arc::new(TestNetwork {
            inner: TcpNetwork::default(),
            bound: Mutex::default(),
            damage: Arc::clone(&damage),
        });
        let shutdown = Shutdown::new();
        #[expect(clippy::disallowed_methods, reason = "a test joins its services by hand")]
        let running = tokio::spawn(run(Arc::clone(&network) as Arc<dyn Network>, shutdown.clone()));
        let address = loop {
            if let Some(address) = network.bound.lock().unwrap().get("grpc").cloned() {
                break address;
            }
            assert!(!running.is_finished(), "the service ended: {:?}", running.await);
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        let admin = network.bound.lock().unwrap()["admin"].clone();
        let network: Arc<dyn Network> = network;
        let channel = channel(&network, &address, ChannelLimits::default());
        let peer = loop {
            match report(&channel).await {
                Ok(report) if report.state == WorkerState::Ready => break report.description.peer,
                _ => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        };
        Self { shutdown, channel, peer, damage, admin, running }
    }

    pub(crate) async fn report(&self) -> WorkerReport {
        report(&self.channel).await.unwrap()
    }

    /// The causes by which transfers were counted as failed.
    pub(crate) async fn failed_transfers(&self) -> Vec<String> {
        let mut socket = TcpNetwork::default().connect(&self.admin).await.unwrap();
        socket.write_all(b"GET /metrics HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).await.unwrap();
        assert!(answer.contains("damask_steps_total"), "{answer}");
        let lines = answer.lines().filter_map(|line| line.strip_prefix("damask_transfer_failures_total{cause=\""));
        lines.map(|line| line.split('"').next().unwrap().to_owned()).collect()
    }

    pub(crate) async fn watch(&self) -> Streaming<pb::WorkerReport> {
        watch(&self.channel).await.unwrap()
    }

    /// Waits until no sequence is left and every page is free, or kept for prompts that begin alike.
    pub(crate) async fn wait_idle(&self) {
        let mut last = None;
        for _ in 0..400 {
            let load = self.report().await.load;
            if load.waiting + load.running == 0 && load.pools.iter().all(|pool| pool.free + pool.cached == pool.total) {
                return;
            }
            last = Some(load);
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        panic!("{} is not idle after 10 s: {last:?}", self.peer);
    }

    pub(crate) async fn drain(self) {
        self.shutdown.begin_drain();
        drop(self.channel);
        let ended = tokio::time::timeout(Duration::from_secs(10), self.running).await;
        ended.expect("a drained worker ends").unwrap().unwrap();
    }
}

async fn watch(channel: &Channel) -> Result<Streaming<pb::WorkerReport>, Status> {
    Ok(wire::client::worker(channel.clone()).watch(pb::WatchRequest { interval_ms: 50 }).await?.into_inner())
}

async fn report(channel: &Channel) -> Result<WorkerReport, Status> {
    let report = watch(channel).await?.message().await?.ok_or_else(|| Status::unavailable("watch ended"))?;
    Ok(WorkerReport::try_from(report)?)
}

pub(crate) struct Fleet {
    pub(crate) prefill: Service,
    pub(crate) decode: Service,
}

impl Fleet {
    pub(crate) async fn start(prefill: prefill::Config, decode: decode::Config) -> Self {
        let any = || Address::new("127.0.0.1", 0);
        let prefill = prefill::Config { listen: any(), admin_listen: any(), ..prefill };
        let decode = decode::Config { listen: any(), admin_listen: any(), kv_listen: any(), ..decode };
        let (prefill, decode) = tokio::join!(
            Service::start(|network, shutdown| prefill::run(prefill, network, shutdown)),
            Service::start(|network, shutdown| decode::run(decode, network, shutdown)),
        );
        Self { prefill, decode }
    }

    pub(crate) async fn with_layouts(prefill_tp: u32, decode_tp: u32) -> Self {
        let prefill = prefill::Config { layout: ParallelLayout::tp(prefill_tp), ..prefill_config() };
        let layout = ParallelLayout { tp: decode_tp, ep: decode_tp, dp: 1 };
        Self::start(prefill, decode::Config { layout, ..decode_config() }).await
    }

    pub(crate) async fn wait_idle(&self) {
        self.decode.wait_idle().await;
        self.prefill.wait_idle().await;
    }

    /// Neither side counts an end that was ordered as a failure.
    pub(crate) async fn assert_no_transfer_failed(&self) {
        let failed = [self.prefill.failed_transfers().await, self.decode.failed_transfers().await];
        assert_eq!(failed, [[""; 0]; 2], "of prefill and of decode");
    }

    pub(crate) async fn reserve(
        &self,
        request: &GenerateRequest,
    ) -> Result<(Ticket, Streaming<pb::DecodeEvent>), Status> {
        let message = pb::DecodeRequest {
            sequence: Some(request.clone().into()),
            ticket_id: new_ticket().0.to_be_bytes().to_vec(),
            prefill: Some(self.prefill.peer.clone().into()),
        };
        let mut stream = wire::client::decode(self.decode.channel.clone()).run(message).await?.into_inner();
        match decode_event(&mut stream).await?.expect("Reserved comes first") {
            DecodeEvent::Reserved(ticket) => Ok((ticket, stream)),
            other => panic!("wanted Reserved, got {other:?}"),
        }
    }

    pub(crate) async fn submit(
        &self,
        request: &GenerateRequest,
        ticket: Ticket,
    ) -> Result<Streaming<pb::PrefillEvent>, Status> {
        let message = pb::PrefillRequest { sequence: Some(request.clone().into()), ticket: Some(ticket.into()) };
        Ok(wire::client::prefill(self.prefill.channel.clone()).run(message).await?.into_inner())
    }

    /// Carries a request out as a router would, and checks the order of events.
    pub(crate) async fn generate(&self, request: &GenerateRequest) -> Result<(Vec<TokenId>, Finished), Status> {
        let (tokens, finished, _) = self.generate_and_report(request).await?;
        Ok((tokens, finished))
    }

    /// The same, with the number of prompt tokens that prefill had cached.
    pub(crate) async fn generate_and_report(
        &self,
        request: &GenerateRequest,
    ) -> Result<(Vec<TokenId>, Finished, u32), Status> {
        let (ticket, mut decode) = self.reserve(request).await?;
        let mut prefill = self.submit(request, ticket).await?;
        let (first, cached_tokens) = match prefill_event(&mut prefill).await?.expect("FirstToken comes first") {
            PrefillEvent::FirstToken { index, token, cached_tokens, .. } => {
                assert_eq!(index, request.next_index());
                (token, cached_tokens)
            }
            other => panic!("wanted FirstToken, got {other:?}"),
        };
        let mut tokens = vec![first];
        match prefill_event(&mut prefill).await?.expect("two events") {
            PrefillEvent::Finished(finished) => {
                assert_eq!(finished.usage.cached_tokens, cached_tokens);
                return Ok((ids(&tokens), finished, cached_tokens));
            }
            PrefillEvent::Committed { kv_bytes, .. } => assert!(kv_bytes > 0),
            PrefillEvent::FirstToken { .. } => panic!("a second first token"),
        }
        assert!(matches!(decode_event(&mut decode).await?, Some(DecodeEvent::Joined { .. })));
        loop {
            match decode_event(&mut decode).await?.expect("an end comes before the stream's") {
                DecodeEvent::Tokens(run) => {
                    assert_eq!(run.first_index as usize, request.generated.len() + tokens.len());
                    tokens.extend(run.tokens);
                }
                DecodeEvent::Finished(finished) => {
                    assert!(decode_event(&mut decode).await?.is_none());
                    return Ok((ids(&tokens), finished, cached_tokens));
                }
                other => panic!("wanted tokens or an end, got {other:?}"),
            }
        }
    }
}

/// The workers' sizes in these tests: small enough that pages and chunks end within short prompts.
pub(crate) fn prefill_config() -> prefill::Config {
    prefill::Config { chunk_tokens: 64, max_context_tokens: 1_024, ..prefill::Config::default() }
}

pub(crate) fn decode_config() -> decode::Config {
    decode::Config { max_context_tokens: 1_024, ..decode::Config::default() }
}

pub(crate) async fn decode_event(stream: &mut Streaming<pb::DecodeEvent>) -> Result<Option<DecodeEvent>, Status> {
    let event = tokio::time::timeout(Duration::from_secs(60), stream.message()).await.expect("an event in time")?;
    Ok(event.map(DecodeEvent::try_from).transpose()?)
}

pub(crate) async fn prefill_event(stream: &mut Streaming<pb::PrefillEvent>) -> Result<Option<PrefillEvent>, Status> {
    let event = tokio::time::timeout(Duration::from_secs(60), stream.message()).await.expect("an event in time")?;
    Ok(event.map(PrefillEvent::try_from).transpose()?)
}

fn ids(tokens: &[SampledToken]) -> Vec<TokenId> {
    tokens.iter().map(|token| token.token).collect()
}

pub(crate) fn new_ticket() -> TicketId {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    TicketId(u128::from(NEXT.fetch_add(1, Ordering::Relaxed)) << 64)
}

/// A prompt of `len` tokens; what it says does not matter, only that no two are alike.
pub(crate) fn prompt(len: usize, salt: u32) -> Vec<TokenId> {
    (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(salt * 977) >> 7) % 2_000).collect()
}

pub(crate) fn request(prompt: Vec<TokenId>, max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        id: RequestId::new("test").unwrap(),
        prompt,
        generated: Vec::new(),
        sampling: Sampling { temperature: 0.0, ..Sampling::default() },
        stop_token_ids: Vec::new(),
        max_tokens,
        constraint: None,
        cache_salt: None,
        timeout: None,
    }
}
