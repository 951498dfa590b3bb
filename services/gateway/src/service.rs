//! What the APIs have in common behind their lowerings: admission, the checks that need the vocabulary or the router,
//! and starting generations.

use std::sync::Arc;
use std::time::{Duration, Instant};

use chassis::Tasks;
use format::chat::{ChatStream, Conversation, Prompt, TurnContext};
use futures_util::future::try_join_all;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::metadata::MetadataMap;
use tracing::Span;
use types::{CacheSalt, Constraint, GenerateRequest, RequestId, Sampling, TokenId};

use crate::answers::{Answers, Slot};
use crate::auth::Keys;
use crate::calendar::{unix_secs, utc_date};
use crate::caller::Caller;
use crate::chat::ResponseHead;
use crate::completions::PlainParser;
use crate::config::Config;
use crate::constraint::{SchemaParams, Unchecked, check_tool_choice};
use crate::error::ApiError;
use crate::ids::ResponseKey;
use crate::metrics::GatewayMetrics;
use crate::plan::{ChatPlan, LoweringContext, PromptDefaults};
use crate::router_link::RouterLink;
use crate::served_model::ServedModel;
use crate::store::KeptResponses;
use crate::turn::Turn;

/// When a refused client should come again: the gateway's own slots free up at about this pace.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Bodies above this size are parsed, rendered and tokenized off the async threads: at 20 MB/s, more would stall them
/// for milliseconds.
const INLINE_BYTES_MAX: usize = 32 << 10;

/// Grammars compiled at once. The stack of a hostile one may take 200 MB.
const COMPILATIONS_MAX: usize = 4;

/// Generations to start for one request: every prompt is continued `choices_per_prompt` times.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) prompts: Vec<Vec<TokenId>>,
    pub(crate) choices_per_prompt: u32,
    pub(crate) sampling: Sampling,
    /// `None`: as many as the context holds.
    pub(crate) max_tokens: Option<u32>,
    pub(crate) stop: Vec<String>,
    /// What the answers must look like.
    pub(crate) constraint: Option<Unchecked>,
    pub(crate) reader: Reader,
    /// The request's own time limit, if it has one.
    pub(crate) timeout: Option<Duration>,
    /// The field of the request that the prompt comes from, for errors.
    pub(crate) prompt_param: &'static str,
}

/// What is known about a request beside its body.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    /// Its name in logs, here and behind.
    pub(crate) id: RequestId,
    /// The client's trace context.
    pub(crate) trace: MetadataMap,
    /// From the request's arrival to the end of its answer.
    pub(crate) span: Span,
}

/// A conversation as the model gets it, and what its turn must look like.
#[derive(Debug)]
pub(crate) struct Rendered {
    pub(crate) prompt: Prompt,
    pub(crate) constraint: Option<Unchecked>,
}

/// How generated tokens are read.
#[derive(Debug)]
pub(crate) enum Reader {
    /// As the model's turn in a chat.
    Chat(TurnContext),
    /// As text.
    Plain,
}

/// The state that all requests share.
pub(crate) struct Service {
    pub(crate) model: ServedModel,
    pub(crate) config: Config,
    pub(crate) router: RouterLink,
    pub(crate) metrics: GatewayMetrics,
    /// What answers run on.
    pub(crate) tasks: Tasks,
    /// Who may come in.
    pub(crate) keys: Arc<Keys>,
    /// `None`: none are kept.
    pub(crate) kept_responses: Option<KeptResponses>,
    slots: Arc<Semaphore>,
    /// Large requests being prepared, and grammars being compiled: more at once than there are processors would take memory and no less time.
    preparations: Arc<Semaphore>,
    compilations: Arc<Semaphore>,
}

/// Leave to prepare one request; given back when the last clone is dropped. Small requests need none.
#[derive(Debug, Clone)]
pub(crate) struct Room(Option<Arc<OwnedSemaphorePermit>>);

impl Room {
    /// Whether it is room for a request of any size.
    pub(crate) fn is_held(&self) -> bool {
        self.0.is_some()
    }
}

impl Service {
    pub(crate) fn new(
        model: ServedModel,
        config: Config,
        router: RouterLink,
        metrics: GatewayMetrics,
        tasks: Tasks,
        kept_responses: Option<KeptResponses>,
    ) -> Self {
        let slots = Arc::new(Semaphore::new(config.limits.concurrent_requests_max));
        let keys = Arc::new(Keys::new(&config.api_keys, config.limits.per_key, Instant::now()));
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let preparations = Arc::new(Semaphore::new(processors));
        let compilations = Arc::new(Semaphore::new(processors.min(COMPILATIONS_MAX)));
        Self { model, config, router, metrics, tasks, keys, kept_responses, slots, preparations, compilations }
    }

    /// Room to prepare a request of so many bytes; waits while others have it. A parsed body may take forty times its bytes.
    pub(crate) async fn room(&self, bytes: usize) -> Room {
        if bytes <= INLINE_BYTES_MAX { Room(None) } else { self.large_room().await }
    }

    /// Room to prepare a request of any size. Whoever has room already must not ask for more.
    pub(crate) async fn large_room(&self) -> Room {
        Room(Some(Arc::new(permit(&self.preparations).await)))
    }

    /// A place among the concurrent requests, counted as one of `caller`'s.
    pub(crate) fn admit(&self, caller: &Arc<Caller>) -> Result<Slot, ApiError> {
        let permit = Arc::clone(&self.slots).try_acquire_owned().map_err(|_| ApiError::Overloaded {
            message: format!("{} requests are being answered already", self.config.limits.concurrent_requests_max),
            retry_after: RETRY_AFTER,
        })?;
        let now = Instant::now();
        let callers_permit = caller.begin_request(now)?;
        Ok(Slot::new(permit, callers_permit, Arc::clone(caller), now))
    }

    /// Requests being answered now.
    pub(crate) fn requests_in_flight(&self) -> usize {
        self.config.limits.concurrent_requests_max - self.slots.available_permits()
    }

    /// Whether a request can be answered now; the error says why not.
    pub(crate) fn ready(&self) -> Result<(), String> {
        match self.router.info() {
            Ok(info) if info.ready_pairs == 0 => {
                Err("the router has no ready pair of prefill and decode workers".into())
            }
            Ok(_) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Refuses a model that is not served here.
    pub(crate) fn check_model(&self, asked_for: Option<&str>) -> Result<(), ApiError> {
        let served = self.model.name();
        match asked_for {
            Some(model) if model != served && !self.config.model_aliases.iter().any(|alias| alias == model) => {
                Err(ApiError::UnknownModel { model: model.into(), served: served.into() })
            }
            _ => Ok(()),
        }
    }

    /// What lowerings need to know, with a fresh seed and today's date.
    pub(crate) fn lowering_context(&self) -> LoweringContext {
        LoweringContext {
            defaults: PromptDefaults {
                model_identity: self.config.prompt.model_identity.clone(),
                knowledge_cutoff: self.config.prompt.knowledge_cutoff.clone(),
                current_date: Some(utc_date(unix_secs())),
            },
            drawn_seed: draw_seed(),
            choices_max: self.config.limits.choices_max,
        }
    }

    /// Names and dates a response.
    pub(crate) fn response_head(&self) -> ResponseHead {
        ResponseHead { key: ResponseKey::draw(), created: unix_secs(), model: self.model.name().to_owned() }
    }

    /// Writes the prompt of a chat and the grammar of its answer. `params` are the names of the request's fields, for errors.
    pub(crate) fn render(&self, conversation: &Conversation, params: SchemaParams) -> Result<Rendered, ApiError> {
        check_tool_choice(conversation, params)?;
        let format = &self.model.format;
        let prompt =
            format.render(conversation).map_err(|error| ApiError::invalid(error.field(), error.to_string()))?;
        let constraint = format.constraint(conversation).map(|turn| Unchecked::new(turn, params));
        Ok(Rendered { prompt, constraint })
    }

    /// Compiles the grammar of an answer, on a thread for blocking work.
    async fn check(&self, constraint: Option<Unchecked>) -> Result<Option<Constraint>, ApiError> {
        let Some(constraint) = constraint else { return Ok(None) };
        let compiler = Arc::clone(&self.model.compiler);
        let permit = permit(&self.compilations).await;
        off_runtime(move || {
            let checked = constraint.check(&compiler).map(Some);
            drop(permit); // not before: a client that leaves does not end the work
            checked
        })
        .await
    }

    /// Starts the generations of `job`; returns once all have been admitted.
    pub(crate) async fn answer(&self, call: &Call, mut job: Job, slot: Slot) -> Result<Answers, ApiError> {
        let info = self.router.info()?;
        let constraint = self.check(job.constraint.take()).await?;
        let salt = slot.caller().cache_salt();
        let requests = self.requests(&call.id, &job, (constraint.as_ref(), salt), info.max_context_tokens)?;
        let prompt_tokens = job.prompts.iter().map(Vec::len).sum::<usize>() as u32;
        slot.caller().spend_prompt(Instant::now(), prompt_tokens, job.prompt_param)?;
        let generations = try_join_all(requests.into_iter().map(|request| self.router.generate(request, call))).await?;
        let turns = generations.into_iter().map(|generation| (generation, self.turn(&job)));
        self.metrics.prompt_tokens.inc_by(u64::from(prompt_tokens));
        let prompts = (prompt_tokens, job.choices_per_prompt);
        Ok(Answers::new(call.id.clone(), turns.collect(), prompts, slot, self.metrics.clone()))
    }

    /// An answer failed after its first byte.
    pub(crate) fn broke_off(&self, id: &RequestId, error: &ApiError) {
        self.metrics.broken_streams.inc();
        tracing::warn!(request_id = %id, %error, "answer broke off");
    }

    fn turn(&self, job: &Job) -> Turn {
        match &job.reader {
            Reader::Chat(turn) => Turn::new(ChatStream::new(self.model.format.parser(turn)), &job.stop),
            Reader::Plain => {
                let parser = PlainParser::new(Arc::clone(self.model.vocabulary()));
                Turn::plain(ChatStream::new(Box::new(parser)), &job.stop)
            }
        }
    }

    /// One request to the router an answer, all of them valid.
    fn requests(
        &self,
        id: &RequestId,
        job: &Job,
        (constraint, cache_salt): (Option<&Constraint>, Option<&CacheSalt>),
        max_context_tokens: u32,
    ) -> Result<Vec<GenerateRequest>, ApiError> {
        let stop_token_ids = match job.reader {
            Reader::Chat(_) => self.model.format.stop_token_ids().to_vec(),
            Reader::Plain => Vec::new(),
        };
        let num_answers = job.prompts.len() as u32 * job.choices_per_prompt;
        let longest = Duration::from_millis(self.config.limits.request_timeout_ms);
        let timeout = Some(job.timeout.map_or(longest, |timeout| timeout.min(longest)));
        let mut requests = Vec::new();
        for prompt in &job.prompts {
            self.check_prompt_length(prompt.len(), max_context_tokens, job.prompt_param)?;
            let room = max_context_tokens - prompt.len() as u32;
            for choice in 0..job.choices_per_prompt {
                let id = if num_answers == 1 { id.clone() } else { numbered(id, requests.len()) };
                let request = GenerateRequest {
                    id,
                    prompt: prompt.clone(),
                    generated: Vec::new(),
                    sampling: Sampling { choice, ..job.sampling.clone() },
                    stop_token_ids: stop_token_ids.clone(),
                    max_tokens: job.max_tokens.map_or(room, |max_tokens| max_tokens.min(room)),
                    constraint: constraint.cloned(),
                    cache_salt: cache_salt.cloned(),
                    timeout,
                };
                request.validate(self.model.fingerprint.vocab_size, max_context_tokens).map_err(|error| {
                    let field = if error.field == "prompt_tokens" { job.prompt_param } else { error.field };
                    ApiError::invalid(field, format!("{field} {}", error.reason))
                })?;
                requests.push(request);
            }
        }
        Ok(requests)
    }

    fn check_prompt_length(&self, prompt_tokens: usize, max_context_tokens: u32, param: &str) -> Result<(), ApiError> {
        let own_limit = self.config.limits.prompt_tokens_max.unwrap_or(u32::MAX);
        // One place is for the answer.
        let limit = own_limit.min(max_context_tokens.saturating_sub(1));
        if prompt_tokens <= limit as usize {
            return Ok(());
        }
        Err(ApiError::InvalidRequest {
            message: format!(
                "the prompt has {prompt_tokens} tokens, at most {limit} are allowed (the context holds \
                 {max_context_tokens}, prompt and answer together)"
            ),
            param: Some(param.into()),
            code: Some("context_length_exceeded"),
        })
    }
}

impl Call {
    /// A name for a request that has none.
    pub(crate) fn draw_id() -> RequestId {
        RequestId::new(&format!("req_{}", uuid::Uuid::now_v7().simple())).expect("letters and digits")
    }
}

impl Job {
    /// A chat's answers.
    pub(crate) fn chat(plan: ChatPlan, rendered: Rendered, prompt_param: &'static str) -> Self {
        let Rendered { prompt, constraint } = rendered;
        Self {
            constraint,
            prompts: vec![prompt.tokens],
            choices_per_prompt: plan.num_choices,
            sampling: plan.sampling,
            max_tokens: plan.max_tokens,
            stop: plan.stop,
            reader: Reader::Chat(prompt.turn),
            timeout: None,
            prompt_param,
        }
    }
}

/// Runs `work` on a request that has `room`: here if it is small, on a thread for blocking work if it is large.
pub(crate) async fn offload<T: Send + 'static>(
    room: &Room,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if room.0.is_none() {
        return work();
    }
    let room = room.clone();
    off_runtime(move || {
        let outcome = work();
        drop(room); // not before: a client that leaves does not end the work
        outcome
    })
    .await
}

async fn permit(semaphore: &Arc<Semaphore>) -> OwnedSemaphorePermit {
    Arc::clone(semaphore).acquire_owned().await.expect("nobody closes it")
}

async fn off_runtime<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|panic| {
        tracing::error!(%panic, "preparing a request failed");
        Err(ApiError::Internal { message: "the request could not be prepared".into() })
    })
}

/// The `idx`-th of several generations for one request.
fn numbered(id: &RequestId, idx: usize) -> RequestId {
    let suffix = format!(".{idx}");
    let kept = id.as_str().len().min(RequestId::MAX_LEN - suffix.len());
    RequestId::new(&format!("{}{suffix}", &id.as_str()[..kept])).expect("visible ASCII, cut to the allowed length")
}

fn draw_seed() -> u64 {
    uuid::Uuid::new_v4().as_u64_pair().1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_client_that_leaves_makes_no_room_before_the_work_ends() {
        let semaphore = Arc::new(Semaphore::new(1));
        let room = Room(Some(Arc::new(permit(&semaphore).await)));
        let (begin, begun) = tokio::sync::oneshot::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let mut offloaded = Box::pin(offload(&room, move || {
            begin.send(()).unwrap();
            ended.recv().unwrap();
            Ok(())
        }));
        tokio::select! {
            _ = &mut offloaded => panic!("it has not been told to end"),
            begun = begun => begun.unwrap(),
        }
        drop(offloaded);
        drop(room);
        assert_eq!(semaphore.available_permits(), 0);
        end.send(()).unwrap();
        drop(permit(&semaphore).await);
    }

    #[test]
    fn numbered_ids_keep_to_the_allowed_length() {
        let id = RequestId::new(&"x".repeat(RequestId::MAX_LEN)).unwrap();
        let numbered = numbered(&id, 12);
        assert_eq!(numbered.as_str().len(), RequestId::MAX_LEN);
        assert!(numbered.as_str().ends_with("x.12"));
    }
}
