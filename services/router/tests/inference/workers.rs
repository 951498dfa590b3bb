//! Workers that follow the protocol by a script. Their model: the token at output index `i` is a function of the prompt and `i`.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use chassis::net::{TcpNetwork, grpc};
use chassis::{Address, Network, Shutdown, Tasks};
use futures_util::Stream;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use types::*;
use wire::pb;

pub(crate) const VOCAB: u32 = 1_000;
pub(crate) const MAX_CONTEXT: u32 = 2_048;
pub(crate) const EOS: TokenId = 2;

/// The scripted model. Never a stop token by itself.
pub(crate) fn model_token(prompt: &[TokenId], index: u32) -> TokenId {
    100 + (prompt.iter().sum::<u32>() * 31 + index * 7) % (VOCAB - 100)
}

/// What a worker does out of the ordinary. Changed by tests while it runs.
#[derive(Default)]
pub(crate) struct Script {
    /// Between two tokens of decode.
    pub(crate) token_interval_ms: AtomicU32,
    /// Computing a prompt takes this long.
    pub(crate) prefill_ms: AtomicU32,
    /// This many more requests are refused for lack of room.
    pub(crate) refusals: AtomicU32,
    /// Refuse everything as the caller's fault.
    pub(crate) rejects: AtomicBool,
    /// Give way after this many tokens, once.
    pub(crate) preempt_after: AtomicU32,
    /// There is no way for KV out of it.
    pub(crate) unlinked: AtomicBool,
    /// There is none to decode-0.
    pub(crate) cut: AtomicBool,
    /// No more heartbeats and no more tokens, but open connections.
    pub(crate) frozen: AtomicBool,
    /// Streams that are open: what a worker would hold pages for.
    pub(crate) open: AtomicI64,
    /// Streams ever opened.
    pub(crate) served: AtomicU32,
    /// Requests that were ever asked for room, those that were refused too.
    pub(crate) asked: AtomicU32,
}

/// Tickets whose KV has not arrived. Stands for the transport between workers.
pub(crate) type Landings = Arc<Mutex<HashMap<TicketId, oneshot::Sender<()>>>>;

/// A worker in a runtime of its own, so that it can be killed like a process.
pub(crate) struct FakeWorker {
    pub(crate) address: Address,
    pub(crate) script: Arc<Script>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl FakeWorker {
    pub(crate) fn start(role: Role, name: &str, landings: &Landings) -> Self {
        Self::start_at(role, name, landings, &Address::new("127.0.0.1", 0))
    }

    pub(crate) fn start_at(role: Role, name: &str, landings: &Landings, address: &Address) -> Self {
        static INCARNATIONS: AtomicU32 = AtomicU32::new(1);
        let incarnation = Incarnation(INCARNATIONS.fetch_add(1, Ordering::SeqCst).into());
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let script = Arc::new(Script::default());
        let peer = PeerId { worker: WorkerId(name.into()), incarnation };
        let service = Service { role, peer, script: Arc::clone(&script), landings: Arc::clone(landings) };
        let address = address.clone();
        let (started, has_started) = std::sync::mpsc::channel();
        // Its handle is not needed: the worker ends with its runtime.
        drop(runtime.spawn(async move {
            let listener = TcpNetwork::default().bind("grpc", &address).await.unwrap();
            started.send(listener.local().clone()).unwrap();
            let tasks = Tasks::new(Shutdown::new());
            let routes = grpc::server()
                .add_service(wire::server::worker(service.clone()))
                .add_service(wire::server::prefill(service.clone()))
                .add_service(wire::server::decode(service));
            grpc::serve(&tasks, "grpc", listener, routes);
            tasks.join().await.unwrap();
        }));
        let address = has_started.recv().unwrap();
        Self { address, script, runtime: Some(runtime) }
    }

    /// Ends it as `kill -9` would: its sockets close, nobody is told.
    pub(crate) fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    pub(crate) fn open(&self) -> i64 {
        self.script.open.load(Ordering::SeqCst)
    }
}

impl Drop for FakeWorker {
    fn drop(&mut self) {
        self.kill();
    }
}

#[derive(Clone)]
struct Service {
    role: Role,
    peer: PeerId,
    script: Arc<Script>,
    landings: Landings,
}

/// Counts a stream as open.
struct Open(Arc<Script>);

impl Open {
    fn new(script: &Arc<Script>) -> Self {
        script.open.fetch_add(1, Ordering::SeqCst);
        script.served.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(script))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

type EventStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Runs `work` until it ends or the client is gone, and streams what it sends.
fn streamed<T, F, W>(script: &Arc<Script>, work: W) -> Response<EventStream<T>>
where
    T: Send + 'static,
    F: Future<Output = Option<()>> + Send,
    W: FnOnce(mpsc::Sender<Result<T, Status>>) -> F + Send + 'static,
{
    let (events, stream) = mpsc::channel(4);
    let open = Open::new(script);
    let handle = tokio::runtime::Handle::current();
    drop(handle.spawn(async move {
        let client = events.clone();
        tokio::select! {
            () = client.closed() => {}
            _ = work(events) => {}
        }
        drop(open);
    }));
    Response::new(Box::pin(ReceiverStream::new(stream)))
}

async fn pause(ms: &AtomicU32) {
    tokio::time::sleep(Duration::from_millis(ms.load(Ordering::SeqCst).into())).await;
}

fn sampled(request: &GenerateRequest, index: u32) -> SampledToken {
    let token = model_token(&request.prompt, index);
    let top = (0..request.sampling.logprobs.unwrap_or(0)).map(|n| TokenLogprob { token: n, logprob: -1.0 }).collect();
    SampledToken { token, logprob: request.sampling.logprobs.map(|_| -1.0), top }
}

fn finished(request: &GenerateRequest, num_tokens: u32, stops: bool) -> Finished {
    let reason = if stops { FinishReason::Stop } else { FinishReason::Length };
    let prompt_tokens = request.prompt.len() as u32;
    Finished { reason, usage: Usage { prompt_tokens, output_tokens: num_tokens, ..Usage::default() } }
}

impl Service {
    fn report(&self) -> WorkerReport {
        let kv_endpoint = KvEndpoint { transport: "host".into(), address: "127.0.0.1:1".into() };
        WorkerReport {
            description: WorkerDescription {
                peer: self.peer.clone(),
                role: self.role,
                fingerprint: ModelFingerprint { model: "fake".into(), vocab_size: VOCAB, tokenizer_sha256: "t".into() },
                weights_fingerprint: "w".into(),
                numerics: "f32".into(),
                kv_layout: self.kv_layout(),
                parallel: ParallelLayout::tp(1),
                max_context_tokens: MAX_CONTEXT,
                eos_token_ids: vec![EOS],
                kv_endpoint: Some(kv_endpoint),
                max_sequences: if self.role == Role::Decode { 4 } else { 1 },
            },
            state: WorkerState::Ready,
            load: Load::default(),
        }
    }

    fn kv_layout(&self) -> KvLayout {
        KvLayout {
            full_layers: vec![1],
            window_layers: vec![0],
            kv_heads: 4,
            head_dim: 8,
            page_tokens: 16,
            window: 128,
            dtype: KvDtype::F32,
            tp: 1,
        }
    }

    fn refusal(&self) -> Result<(), Status> {
        self.script.asked.fetch_add(1, Ordering::SeqCst);
        if self.script.rejects.load(Ordering::SeqCst) {
            return Err(wire::status::with_code(tonic::Code::InvalidArgument, "TOO_LONG", "prompt is too long", None));
        }
        let left = self.script.refusals.load(Ordering::SeqCst);
        if left > 0 {
            self.script.refusals.store(left - 1, Ordering::SeqCst);
            return Err(wire::status::with_code(tonic::Code::ResourceExhausted, "NO_PAGES", "no pages", None));
        }
        Ok(())
    }

    /// As a prefill worker does that cannot hand KV over.
    fn reach(&self, decode: &str) -> Result<(), Status> {
        let is_cut = self.script.cut.load(Ordering::SeqCst) && decode == "decode-0";
        if is_cut || self.script.unlinked.load(Ordering::SeqCst) {
            let message = format!("no way to {decode}");
            return Err(wire::status::with_code(tonic::Code::Unavailable, "PEER_LOST", &message, None));
        }
        Ok(())
    }

    /// Never returns once the worker is frozen.
    async fn thaw(&self) {
        while self.script.frozen.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

#[tonic::async_trait]
impl pb::worker_server::Worker for Service {
    type WatchStream = EventStream<pb::WorkerReport>;

    async fn watch(&self, request: Request<pb::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let interval = Duration::from_millis(request.into_inner().interval_ms.into());
        let service = self.clone();
        // A heartbeat is nothing that a worker holds pages for: it is counted apart from requests.
        let uncounted = Arc::new(Script::default());
        Ok(streamed(&uncounted, async move |events: mpsc::Sender<Result<pb::WorkerReport, Status>>| {
            loop {
                service.thaw().await;
                events.send(Ok(service.report().into())).await.ok()?;
                tokio::time::sleep(interval).await;
            }
        }))
    }

    async fn drain(&self, _: Request<pb::DrainRequest>) -> Result<Response<pb::DrainResponse>, Status> {
        Ok(Response::new(pb::DrainResponse { remaining: 0 }))
    }
}

#[tonic::async_trait]
impl pb::prefill_server::Prefill for Service {
    type RunStream = EventStream<pb::PrefillEvent>;

    async fn run(&self, request: Request<pb::PrefillRequest>) -> Result<Response<Self::RunStream>, Status> {
        self.refusal()?;
        let message = request.into_inner();
        let request = wire::convert::sequence(message.sequence.unwrap())?;
        let ticket = Ticket::try_from(message.ticket.unwrap())?;
        assert_eq!(ticket.prefill, self.peer);
        self.reach(&ticket.decode.worker.0)?;
        let service = self.clone();
        Ok(streamed(&self.script, async move |events: mpsc::Sender<Result<pb::PrefillEvent, Status>>| {
            pause(&service.script.prefill_ms).await;
            service.thaw().await;
            let index = request.next_index();
            let token = model_token(&request.prompt, index);
            let first = PrefillEvent::FirstToken {
                index,
                token: sampled(&request, index),
                cached_tokens: 1,
                queue_us: 5,
                compute_us: 50,
            };
            events.send(Ok(first.into())).await.ok()?;
            let stops = request.stop_token_ids.contains(&token);
            let last = if stops || index + 1 == request.max_tokens {
                PrefillEvent::Finished(finished(&request, index + 1, stops))
            } else {
                // A decode worker that was killed takes its reservations with it.
                let landing = service.landings.lock().unwrap().remove(&ticket.id)?;
                landing.send(()).ok()?;
                PrefillEvent::Committed { kv_bytes: 1_000, transfer_us: 10, tail_us: 1 }
            };
            events.send(Ok(last.into())).await.ok()
        }))
    }

    async fn link(&self, request: Request<pb::LinkRequest>) -> Result<Response<pb::LinkResponse>, Status> {
        self.reach(&request.into_inner().decode.unwrap().worker)?;
        Ok(Response::new(pb::LinkResponse {}))
    }
}

#[tonic::async_trait]
impl pb::decode_server::Decode for Service {
    type RunStream = EventStream<pb::DecodeEvent>;

    async fn run(&self, request: Request<pb::DecodeRequest>) -> Result<Response<Self::RunStream>, Status> {
        self.refusal()?;
        let message = request.into_inner();
        let request = wire::convert::sequence(message.sequence.unwrap())?;
        let ticket = Ticket {
            id: wire::convert::ticket_id(&message.ticket_id)?,
            prefill: message.prefill.unwrap().try_into()?,
            decode: self.peer.clone(),
            kv_endpoint: self.report().description.kv_endpoint.unwrap(),
            kv_layout: self.kv_layout(),
            dp_group: DpGroup(0),
            ttl: Duration::from_secs(10),
        };
        let service = self.clone();
        Ok(streamed(&self.script, async move |events: mpsc::Sender<Result<pb::DecodeEvent, Status>>| {
            let (landing, landed) = oneshot::channel();
            service.landings.lock().unwrap().insert(ticket.id, landing);
            let send = async |event: DecodeEvent| events.send(Ok(event.into())).await.ok();
            send(DecodeEvent::Reserved(ticket)).await?;
            landed.await.ok()?;
            send(DecodeEvent::Joined { kv_bytes: 1_000, landing_us: 10 }).await?;
            let mut num_tokens = 0;
            for index in request.next_index() + 1..request.max_tokens {
                pause(&service.script.token_interval_ms).await;
                service.thaw().await;
                let token = model_token(&request.prompt, index);
                send(DecodeEvent::Tokens(TokenRun { first_index: index, tokens: vec![sampled(&request, index)] }))
                    .await?;
                if request.stop_token_ids.contains(&token) {
                    return send(DecodeEvent::Finished(finished(&request, index + 1, true))).await;
                }
                num_tokens += 1;
                if service.script.preempt_after.load(Ordering::SeqCst) == num_tokens {
                    service.script.preempt_after.store(0, Ordering::SeqCst);
                    return send(DecodeEvent::Preempted).await;
                }
            }
            send(DecodeEvent::Finished(finished(&request, request.max_tokens, false))).await
        }))
    }
}
