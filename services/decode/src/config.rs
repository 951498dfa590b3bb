//! The decode worker's config file.

use std::time::Duration;

use chassis::config::{Problems, Validate};
use chassis::net::Address;
use scheduler::DecodeConfig;
use serde::{Deserialize, Serialize};
use transfer::TransferConfig;
use types::{ParallelLayout, Role};
use worker::config::{GPU_MEMORY_SHARE, validate_name, validate_pages, validate_placement};
use worker::{
    Backend, Driver, EngineConfig, ModelSource, NumericsConfig, OpenModel, PagesWanted, StepLoopConfig, WeightsConfig,
    WorkerError,
};

/// One decode worker. Defaults are those of the CPU engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The worker's name, stable over restarts and unique in the fleet.
    pub name: String,
    /// Where routers connect (gRPC).
    pub listen: Address,
    /// Health and metrics (HTTP).
    pub admin_listen: Address,
    /// Where prefill workers deliver KV.
    pub kv_listen: Address,
    /// The address that tickets name, if prefill workers reach `kv_listen` by another. Where `kv_listen` is all interfaces, this is by default
    /// `$POD_IP`, or else this host's name, with its port.
    pub kv_advertise: Option<Address>,
    /// Where the weights are.
    pub model: ModelSource,
    /// Which engine computes: `auto`, `cpu` or `cuda`.
    pub backend: Backend,
    /// Degrees of parallelism.
    pub layout: ParallelLayout,
    /// Rounding.
    pub numerics: NumericsConfig,
    /// How weights are held: experts `auto`, `mxfp4`, `fp8` or `bf16`; dense `auto`, `bf16` or `fp8`.
    pub weights: WeightsConfig,
    /// Positions a KV page holds; the same on prefill.
    pub page_tokens: u32,
    /// Most positions of one sequence, prompt and answer together.
    pub max_context_tokens: u32,
    /// Most sequences at once; a multiple of `layout.dp`.
    pub max_sequences: u32,
    /// Output tokens for which pages are set aside when a sequence is admitted; further ones are taken page by page.
    pub growth_tokens: u32,
    /// Pages for layers of full attention on each rank, whose attention group has `max_sequences / dp` of the sequences; by default a
    /// quarter of what these would take at the longest context, since few are that long, and one such sequence at least; on a GPU as many
    /// as there is room for.
    pub full_pages: Option<u32>,
    /// Pages for layers of sliding-window attention on each rank; by default as many as `max_sequences / dp` can use.
    pub window_pages: Option<u32>,
    /// A reservation whose transfer has not been committed by then is given up.
    pub ticket_ttl_ms: u32,
    /// Tokens that wait for a client that reads slowly. One more ends its sequence (`SLOW_CONSUMER`, to be resumed from what was
    /// delivered), so that no client can hold up the batch.
    pub stream_tokens_max: usize,
    /// Share of each GPU's memory that a rank may take: where `full_pages` is not given, what weights and steps leave of it becomes pages.
    /// Workers on one GPU must share it. Without meaning on the CPU.
    pub gpu_memory_share: f64,
    /// Ranks on each GPU: 1, but for trying a layout out on fewer GPUs than it is made for.
    pub ranks_per_gpu: u32,
    /// Threads that compute the masks of constrained sequences while the engine computes.
    pub mask_threads: u32,
    /// The step loop.
    pub step_loop: StepLoopConfig,
    /// KV transfer.
    pub transfer: TransferConfig,
    /// How the step loop is driven; simulations set it.
    #[serde(skip)]
    pub driver: Driver,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            name: "decode".into(),
            listen: Address::new("127.0.0.1", 9200),
            admin_listen: Address::new("127.0.0.1", 9201),
            kv_listen: Address::new("127.0.0.1", 0),
            kv_advertise: None,
            model: ModelSource::EmbeddedNano,
            backend: Backend::Auto,
            layout: ParallelLayout { tp: 4, ep: 4, dp: 1 },
            numerics: NumericsConfig::default(),
            weights: WeightsConfig::default(),
            page_tokens: 16,
            max_context_tokens: 8_192,
            max_sequences: 32,
            growth_tokens: 256,
            full_pages: None,
            window_pages: None,
            gpu_memory_share: GPU_MEMORY_SHARE,
            ranks_per_gpu: 1,
            ticket_ttl_ms: 120_000,
            stream_tokens_max: 1_024,
            mask_threads: 2,
            step_loop: StepLoopConfig::default(),
            transfer: TransferConfig::default(),
            driver: Driver::default(),
        }
    }
}

impl Validate for Config {
    fn validate(&self, problems: &mut Problems) {
        validate_name(&self.name, problems);
        validate_placement(self.layout, self.ranks_per_gpu, self.gpu_memory_share, problems);
        validate_pages(self.page_tokens, self.max_context_tokens, self.full_pages, self.window_pages, problems);
        problems.range("max_sequences", self.max_sequences, 1..=4_096);
        let (sequences, dp) = (self.max_sequences, self.layout.dp);
        let divides = dp > 0 && sequences.is_multiple_of(dp);
        problems.check(
            divides,
            "max_sequences",
            format_args!("is {sequences}, it must be a multiple of layout.dp ({dp})"),
        );
        problems.range("ticket_ttl_ms", self.ticket_ttl_ms, 100..=3_600_000);
        problems.range("stream_tokens_max", self.stream_tokens_max, 1..=1 << 20);
        problems.range("mask_threads", self.mask_threads, 1..=64);
        problems.nested("step_loop", &self.step_loop);
        if let Err(reason) = self.transfer.validate() {
            problems.report("transfer", reason);
        }
    }
}

/// What follows from a config and a model.
pub(crate) struct Sizes {
    pub(crate) engine: EngineConfig,
    pub(crate) scheduler: DecodeConfig,
}

impl Config {
    pub(crate) fn sizes(&self, model: &OpenModel) -> Result<Sizes, WorkerError> {
        let shape = model.page_shape(self.page_tokens, self.max_context_tokens)?;
        let longest = shape.pages_for(self.max_context_tokens);
        let group_sequences = self.max_sequences / self.layout.dp;
        let mut scheduler = DecodeConfig {
            max_sequences: self.max_sequences,
            dp: self.layout.dp,
            max_context_tokens: self.max_context_tokens,
            growth_tokens: self.growth_tokens,
            max_row_tokens: 1,
            full_pages: 0,
            window_pages: 0,
            ticket_ttl: Duration::from_millis(self.ticket_ttl_ms.into()),
            lookahead: false,
            remembered_tickets: 4 * self.max_sequences + 1_024,
        };
        let window_pages = scheduler.window_pages_per_sequence(shape).saturating_mul(group_sequences);
        scheduler.window_pages = self.window_pages.unwrap_or(window_pages);
        let mut engine = EngineConfig {
            role: Role::Decode,
            backend: self.backend,
            layout: self.layout,
            ranks_per_gpu: self.ranks_per_gpu,
            numerics: self.numerics,
            weights: self.weights.resolve(model.config().stored)?,
            page_tokens: self.page_tokens,
            full_pages: 0,
            window_pages: scheduler.window_pages,
            max_slots: self.max_sequences,
            max_step_tokens: self.max_sequences * scheduler.max_row_tokens,
            max_context_tokens: self.max_context_tokens,
        };
        let most = group_sequences.saturating_mul(longest);
        let gpu_memory_share = self.gpu_memory_share;
        let wanted =
            PagesWanted { longest, most, on_cpu: longest.max(most / 4), full_per_kept_window: None, gpu_memory_share };
        model.settle(&mut engine, self.full_pages, wanted)?;
        scheduler.full_pages = engine.full_pages;
        // The CPU engine computes in `launch`: nothing is gained by planning ahead of it.
        scheduler.lookahead = engine.backend == Backend::Cuda;
        Ok(Sizes { engine, scheduler })
    }
}
