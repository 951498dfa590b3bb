//! A gateway and a scripted router in one process, over real loopback connections.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a helper of tests that panics fails the test")]

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use chassis::net::TcpNetwork;
use chassis::{Address, Listener, Network, Shutdown, Socket, Tasks};
use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;
use futures_util::{FutureExt, StreamExt};
use gateway::auth::KeyDigest;
use gateway::config::{ApiKeyConfig, Config, KeyLimits, LimitsConfig, ModelSource, PromptConfig};
use gateway::served_model::ServedModel;
use tokio::sync::Notify;
use tonic::{Request, Response, Status};
use types::{FinishReason, Finished, GenerateEvent, ModelFingerprint, RequestId, SampledToken, TokenRun, Usage};
use vocabulary::Vocabulary;
use wire::pb;

pub(crate) const CONTEXT_TOKENS: u32 = 2048;

/// What the router does with a request.
#[derive(Clone)]
pub(crate) enum Step {
    /// Send these tokens in one message.
    Tokens(Vec<u32>),
    /// End the answer.
    Finish(FinishReason),
    /// Fail.
    Fail(Status),
    /// Send nothing for this long.
    Wait(Duration),
    /// Send nothing more, ever.
    Hang,
}

/// Turns a request into what the router does with it.
pub(crate) type Script = Arc<dyn Fn(&pb::GenerateRequest) -> Result<Vec<Step>, Status> + Send + Sync>;

pub(crate) struct FakeRouter {
    fingerprint: ModelFingerprint,
    script: Script,
    pub(crate) received: Arc<Mutex<Vec<pb::GenerateRequest>>>,
    /// Notified when a stream is dropped before its end.
    pub(crate) cancelled: Arc<Notify>,
}

struct NotifyUnlessDone {
    cancelled: Arc<Notify>,
    done: bool,
}

impl Drop for NotifyUnlessDone {
    fn drop(&mut self) {
        if !self.done {
            self.cancelled.notify_one();
        }
    }
}

#[tonic::async_trait]
impl pb::inference_server::Inference for FakeRouter {
    type GenerateStream = BoxStream<'static, Result<pb::GenerateResponse, Status>>;

    async fn generate(&self, request: Request<pb::GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        self.received.lock().unwrap().push(request.clone());
        let mut steps = VecDeque::from((self.script)(&request)?);
        let mut guard = NotifyUnlessDone { cancelled: Arc::clone(&self.cancelled), done: false };
        let stream = async_stream::stream! {
            let (mut first_index, prompt_tokens) = (0, request.prompt_tokens.len() as u32);
            let request_id = RequestId::new(&request.request_id).unwrap();
            yield Ok(GenerateEvent::Started { request_id, seed: request.sampling.unwrap().seed.unwrap() }.into());
            while let Some(step) = steps.pop_front() {
                match step {
                    Step::Tokens(ids) => {
                        let sampled = |token: u32| SampledToken { token, logprob: None, top: Vec::new() };
                        let tokens: Vec<_> = ids.into_iter().map(sampled).collect();
                        let num_tokens = tokens.len() as u32;
                        yield Ok(GenerateEvent::Tokens(TokenRun { first_index, tokens }).into());
                        first_index += num_tokens;
                    }
                    Step::Finish(reason) => {
                        guard.done = true;
                        let output_tokens = first_index;
                        let usage = Usage { prompt_tokens, cached_tokens: 3, output_tokens, resumptions: 0 };
                        yield Ok(GenerateEvent::Finished(Finished { reason, usage }).into());
                    }
                    Step::Fail(status) => {
                        guard.done = true;
                        yield Err(status);
                    }
                    Step::Wait(time) => tokio::time::sleep(time).await,
                    Step::Hang => std::future::pending::<()>().await,
                }
            }
            drop(guard);
        };
        Ok(Response::new(stream.boxed()))
    }

    async fn get_model_info(&self, _: Request<pb::GetModelInfoRequest>) -> Result<Response<pb::ModelInfo>, Status> {
        Ok(Response::new(pb::ModelInfo {
            fingerprint: Some(self.fingerprint.clone().into()),
            max_context_tokens: CONTEXT_TOKENS,
            eos_token_ids: vec![2020],
            ready_pairs: 1,
        }))
    }
}

/// The real network, but every bound address is remembered by the name of its socket.
#[derive(Default)]
struct RememberingNetwork {
    tcp: TcpNetwork,
    bound: Mutex<HashMap<String, Address>>,
}

impl Network for RememberingNetwork {
    fn bind<'a>(&'a self, name: &'a str, address: &'a Address) -> BoxFuture<'a, io::Result<Listener>> {
        async move {
            let listener = self.tcp.bind(name, address).await?;
            self.bound.lock().unwrap().insert(name.to_owned(), listener.local().clone());
            Ok(listener)
        }
        .boxed()
    }

    fn connect<'a>(&'a self, address: &'a Address) -> BoxFuture<'a, io::Result<Socket>> {
        self.tcp.connect(address)
    }

    fn resolve<'a>(&'a self, address: &'a Address) -> BoxFuture<'a, io::Result<Vec<Address>>> {
        self.tcp.resolve(address)
    }
}

pub(crate) struct Fleet {
    pub(crate) http: String,
    pub(crate) grpc: Address,
    pub(crate) admin: String,
    pub(crate) model: ServedModel,
    pub(crate) received: Arc<Mutex<Vec<pb::GenerateRequest>>>,
    pub(crate) cancelled: Arc<Notify>,
    pub(crate) client: reqwest::Client,
    pub(crate) shutdown: Shutdown,
    pub(crate) network: Arc<dyn Network>,
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.shutdown.begin_stop();
    }
}

pub(crate) fn config() -> Config {
    let any_port = Address::new("127.0.0.1", 0);
    Config {
        listen: any_port.clone(),
        grpc_listen: Some(any_port.clone()),
        admin_listen: any_port.clone(),
        router: any_port,
        model: ModelSource::EmbeddedNano,
        model_aliases: vec!["openai/nano".into()],
        prompt: PromptConfig::default(),
        limits: LimitsConfig::default(),
        api_keys: Vec::new(),
        cors_origins: Vec::new(),
        responses_store: None,
        tls: None,
    }
}

/// A key that is its own name, without limits.
pub(crate) fn key(key: &str) -> ApiKeyConfig {
    ApiKeyConfig { name: key.into(), sha256: KeyDigest::of(key), suspended: false, limits: KeyLimits::default() }
}

impl Fleet {
    /// A gateway before a router that does what `script` says; the gateway is ready.
    pub(crate) async fn start(
        script: impl Fn(&pb::GenerateRequest) -> Result<Vec<Step>, Status> + Send + Sync + 'static,
    ) -> Self {
        let fleet = Self::start_with(config(), |fingerprint| fingerprint, script).await;
        fleet.until_ready().await;
        fleet
    }

    /// Like [`Self::start`], with another config, a router that says to serve another model, and without waiting.
    pub(crate) async fn start_with(
        mut config: Config,
        routers_model: impl Fn(ModelFingerprint) -> ModelFingerprint,
        script: impl Fn(&pb::GenerateRequest) -> Result<Vec<Step>, Status> + Send + Sync + 'static,
    ) -> Self {
        let shutdown = Shutdown::new();
        let remembering = Arc::new(RememberingNetwork::default());
        let network: Arc<dyn Network> = remembering.clone();
        let model = ServedModel::load(&ModelSource::EmbeddedNano).unwrap();
        let router = FakeRouter {
            fingerprint: routers_model(model.fingerprint.clone()),
            script: Arc::new(script),
            received: Arc::default(),
            cancelled: Arc::default(),
        };
        let (received, cancelled) = (Arc::clone(&router.received), Arc::clone(&router.cancelled));
        let listener = TcpNetwork::default().bind("router", &Address::new("127.0.0.1", 0)).await.unwrap();
        config.router = listener.local().clone();
        let tasks = Tasks::new(shutdown.clone());
        let service = chassis::net::grpc::server().add_service(wire::server::inference(router));
        chassis::net::grpc::serve(&tasks, "router", listener, service);
        tasks.spawn("gateway", gateway::run(config, Arc::clone(&network), shutdown.clone()));
        let bound = |name: &'static str| {
            let remembering = Arc::clone(&remembering);
            async move {
                loop {
                    if let Some(address) = remembering.bound.lock().unwrap().get(name) {
                        return address.clone();
                    }
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            }
        };
        Self {
            http: format!("http://{}", bound("http").await),
            grpc: bound("grpc").await,
            admin: format!("http://{}", bound("admin").await),
            model,
            received,
            cancelled,
            client: reqwest::Client::new(),
            shutdown,
            network,
        }
    }

    /// A gateway before a router that gives every request the same answer, token by token, and then does `last`.
    pub(crate) async fn answering(config: Config, text: &'static str, last: Step) -> Self {
        let vocabulary = Arc::clone(ServedModel::load(&ModelSource::EmbeddedNano).unwrap().vocabulary());
        let script = move |_: &pb::GenerateRequest| {
            let tokens = tokens(&vocabulary, text).into_iter().map(|token| Step::Tokens(vec![token]));
            Ok(tokens.chain([last.clone()]).collect())
        };
        let fleet = Self::start_with(config, |ours| ours, script).await;
        fleet.until_ready().await;
        fleet
    }

    pub(crate) async fn until_ready(&self) {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
        while !self.get("/health/ready").await.status().is_success() {
            assert!(tokio::time::Instant::now() < deadline, "the gateway never became ready");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub(crate) async fn get(&self, path: &str) -> reqwest::Response {
        // The listener is bound before the server runs.
        self.client.get(format!("{}{path}", self.http)).send().await.unwrap()
    }

    pub(crate) async fn post(&self, path: &str, body: serde_json::Value) -> reqwest::Response {
        self.client.post(format!("{}{path}", self.http)).json(&body).send().await.unwrap()
    }

    /// A chat request for one user message, with more fields.
    pub(crate) async fn chat(&self, more: serde_json::Value) -> reqwest::Response {
        let mut body = serde_json::json!({ "messages": [{ "role": "user", "content": "What is 191 - 42?" }] });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        self.post("/v1/chat/completions", body).await
    }

    pub(crate) fn tokens(&self, text: &str) -> Vec<u32> {
        tokens(self.model.vocabulary(), text)
    }

    pub(crate) async fn until_cancelled(&self) -> Duration {
        let waiting_since = tokio::time::Instant::now();
        tokio::time::timeout(Duration::from_secs(5), self.cancelled.notified()).await.expect("the router was told");
        waiting_since.elapsed()
    }
}

/// Tokens of a text in which the names of control tokens stand for these.
pub(crate) fn tokens(vocabulary: &Vocabulary, text: &str) -> Vec<u32> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(start) = rest.find("<|") {
        let end = start + rest[start..].find("|>").unwrap() + 2;
        tokens.extend(vocabulary.encode(&rest[..start]));
        tokens.push(vocabulary.special(&rest[start..end]).unwrap());
        rest = &rest[end..];
    }
    tokens.extend(vocabulary.encode(rest));
    tokens
}

/// The data of a body of server-sent events, each with its event's name.
pub(crate) fn sse(body: &str) -> Vec<(Option<String>, String)> {
    body.split("\n\n")
        .filter_map(|block| {
            let field =
                |name: &str| block.lines().find_map(|line| line.strip_prefix(name)).map(|v| v.trim().to_owned());
            Some((field("event:"), field("data:")?))
        })
        .collect()
}
