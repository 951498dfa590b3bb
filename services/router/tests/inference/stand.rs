//! The stand that tests are run on: workers, a router before them, a client.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use chassis::net::{TcpNetwork, grpc};
use chassis::{Address, Network, Shutdown};
use router::{Config, RunError};
use tokio::task::JoinHandle;
use tonic::transport::Channel;
use tonic::{Request, Status, Streaming};
use types::*;
use wire::pb;
use wire::pb::inference_client::InferenceClient;

use crate::workers::{FakeWorker, Landings, model_token};

pub(crate) struct Stand {
    pub(crate) landings: Landings,
    pub(crate) prefills: Vec<FakeWorker>,
    pub(crate) decodes: Vec<FakeWorker>,
    pub(crate) client: InferenceClient<Channel>,
    pub(crate) channel: Channel,
    pub(crate) admin: Address,
    pub(crate) shutdown: Shutdown,
    pub(crate) running: JoinHandle<Result<(), RunError>>,
}

/// An address that nobody listens on yet.
async fn free_address() -> Address {
    TcpNetwork::default().bind("any", &Address::new("127.0.0.1", 0)).await.unwrap().local().clone()
}

impl Stand {
    /// Starts workers and router and waits until all of them know each other.
    pub(crate) async fn start(num_prefills: usize, num_decodes: usize, adjust: impl FnOnce(&mut Config)) -> Self {
        let landings = Landings::default();
        let workers = |role: Role, num| -> Vec<_> {
            (0..num).map(|i| FakeWorker::start(role, &format!("{role}-{i}"), &landings)).collect()
        };
        let (prefills, decodes) = (workers(Role::Prefill, num_prefills), workers(Role::Decode, num_decodes));
        let addresses = |workers: &[FakeWorker]| workers.iter().map(|worker| worker.address.clone()).collect();
        let mut config = config(addresses(&prefills), addresses(&decodes));
        (config.listen, config.admin_listen) = (free_address().await, free_address().await);
        adjust(&mut config);
        let network: Arc<dyn Network> = Arc::new(TcpNetwork::default());
        let channel = grpc::channel(&network, &config.listen, grpc::ChannelLimits::default());
        let (shutdown, admin) = (Shutdown::new(), config.admin_listen.clone());
        let running = tokio::runtime::Handle::current().spawn(router::run(config, network, shutdown.clone()));
        let client = wire::client::inference(channel.clone());
        let mut stand = Self { landings, prefills, decodes, client, channel, admin, shutdown, running };
        stand.await_pairs((num_prefills * num_decodes) as u32).await;
        stand
    }

    pub(crate) async fn num_pairs(&mut self) -> u32 {
        let info = self.client.get_model_info(pb::GetModelInfoRequest {}).await;
        info.map_or(0, |info| info.into_inner().ready_pairs)
    }

    pub(crate) async fn await_pairs(&mut self, want: u32) {
        for _ in 0..500 {
            if self.num_pairs().await == want {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{} pairs instead of {want}", self.num_pairs().await);
    }

    pub(crate) async fn generate(&mut self, request: pb::GenerateRequest) -> Result<Answer, Status> {
        let prompt = request.prompt_tokens.clone();
        let resumed_from = request.resume_from.clone();
        let stream = self.client.generate(Request::new(request)).await?.into_inner();
        Ok(Answer { prompt, stream, tokens: resumed_from, started: None, finished: None })
    }

    /// Every stream on every living worker has ended, and no request is left in the router.
    pub(crate) async fn assert_all_released(&self) {
        let mut open = Vec::new();
        for _ in 0..300 {
            open = self.prefills.iter().chain(&self.decodes).map(FakeWorker::open).collect();
            let metrics = self.metrics().await;
            if open.iter().all(|open| *open == 0) && metrics.contains("\ndamask_router_requests_in_flight 0\n") {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("still open: {open:?}\n{}", self.metrics().await);
    }

    pub(crate) async fn metrics(&self) -> String {
        self.fetch("/metrics").await.1
    }

    pub(crate) async fn fetch(&self, path: &str) -> (u16, String) {
        let answer = reqwest::get(format!("http://{}{path}", self.admin)).await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }

    pub(crate) fn slow_down(&self, token_interval_ms: u32) {
        for decode in &self.decodes {
            decode.script.token_interval_ms.store(token_interval_ms, Ordering::SeqCst);
        }
    }

    /// The decode worker that has a stream open.
    pub(crate) fn busy_decode(&mut self) -> &mut FakeWorker {
        self.decodes.iter_mut().find(|worker| worker.open() > 0).unwrap()
    }
}

fn config(prefill: Vec<Address>, decode: Vec<Address>) -> Config {
    let text = "{ workers: { prefill: ['127.0.0.1:1'], decode: ['127.0.0.1:1'] } }";
    let mut config: Config = chassis::config::parse(text, "test", "router", []).unwrap();
    config.workers.prefill = prefill;
    config.workers.decode = decode;
    config.workers.heartbeat_interval_ms = 50;
    config.workers.dead_after_ms = 300;
    config
}

pub(crate) fn request(prompt: &[TokenId], max_tokens: u32) -> pb::GenerateRequest {
    pb::GenerateRequest { prompt_tokens: prompt.to_vec(), max_tokens: Some(max_tokens), ..Default::default() }
}

/// A stream being read; checks that it is well formed as it goes.
pub(crate) struct Answer {
    prompt: Vec<TokenId>,
    stream: Streaming<pb::GenerateResponse>,
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) started: Option<(RequestId, u64)>,
    pub(crate) finished: Option<Finished>,
}

impl Answer {
    /// Takes the next message in; `false` at the end.
    pub(crate) async fn next(&mut self) -> Result<bool, Status> {
        let message = tokio::time::timeout(Duration::from_secs(20), self.stream.message()).await.expect("no answer");
        let Some(message) = message? else { return Ok(false) };
        assert!(self.finished.is_none(), "{message:?} after the end");
        match GenerateEvent::try_from(message).unwrap() {
            GenerateEvent::Started { request_id, seed } => {
                assert!(self.started.replace((request_id, seed)).is_none());
            }
            GenerateEvent::Tokens(run) => {
                assert!(self.started.is_some());
                assert_eq!(run.first_index as usize, self.tokens.len(), "gap or repetition");
                self.tokens.extend(run.tokens.iter().map(|token| token.token));
            }
            GenerateEvent::Finished(finished) => self.finished = Some(finished),
        }
        Ok(true)
    }

    pub(crate) async fn until_tokens(&mut self, num: usize) {
        while self.tokens.len() < num {
            assert!(self.next().await.unwrap(), "ended after {} tokens", self.tokens.len());
        }
    }

    /// Reads to the end and checks every token against the model.
    pub(crate) async fn whole(mut self) -> (Vec<TokenId>, Finished) {
        while self.next().await.unwrap() {}
        let want: Vec<_> = (0..self.tokens.len() as u32).map(|index| model_token(&self.prompt, index)).collect();
        assert_eq!(self.tokens, want);
        let finished = self.finished.expect("a stream ends with Finished");
        assert_eq!(finished.usage.output_tokens as usize, self.tokens.len());
        (self.tokens, finished)
    }

    pub(crate) async fn error(mut self) -> Status {
        loop {
            match self.next().await {
                Ok(true) => {}
                Ok(false) => panic!("the stream ended well after {} tokens", self.tokens.len()),
                Err(status) => return status,
            }
        }
    }
}
