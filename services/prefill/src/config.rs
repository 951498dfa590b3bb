//! The prefill worker's config file.

use chassis::config::{Problems, Validate};
use chassis::net::Address;
use scheduler::PrefillConfig;
use serde::{Deserialize, Serialize};
use transfer::TransferConfig;
use types::{KvLayout, ParallelLayout, Role};
use worker::config::{GPU_MEMORY_SHARE, validate_name, validate_pages, validate_placement};
use worker::{
    Backend, Driver, EngineConfig, ModelSource, NumericsConfig, OpenModel, PagesWanted, StepLoopConfig, WeightsConfig,
    WorkerError,
};

/// One prefill worker. Defaults are those of the CPU engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The worker's name, stable over restarts and unique in the fleet.
    pub name: String,
    /// Where routers connect (gRPC).
    pub listen: Address,
    /// Health and metrics (HTTP).
    pub admin_listen: Address,
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
    /// Positions a KV page holds; the same on decode.
    pub page_tokens: u32,
    /// Most positions of one sequence, prompt and answer together.
    pub max_context_tokens: u32,
    /// Tokens that one step computes. A cancelled prompt stops at the next chunk.
    pub chunk_tokens: u32,
    /// Keep the pages of prompts, as long as nobody else needs them, for prompts that begin alike: those compute only what is new. Switch it off to
    /// measure how fast prompts are computed, where they have more in common than they will in service.
    pub prefix_reuse: bool,
    /// Prompts that wait; one more is refused.
    pub max_queued: u32,
    /// Prompts that hold pages: one computes, the transfers of the others are ending.
    pub max_prompts: u32,
    /// Pages for layers of full attention; by default as many as two prompts of the longest kind hold, and on a GPU as many as there is
    /// room for; without `prefix_reuse` up to those of `max_prompts`.
    pub full_pages: Option<u32>,
    /// Pages for layers of sliding-window attention; by default as many as `max_prompts` hold, and with `prefix_reuse` one for each ten of
    /// `full_pages` that the longest prompt leaves.
    pub window_pages: Option<u32>,
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
            name: "prefill".into(),
            listen: Address::new("127.0.0.1", 9100),
            admin_listen: Address::new("127.0.0.1", 9101),
            model: ModelSource::EmbeddedNano,
            backend: Backend::Auto,
            layout: ParallelLayout::tp(2),
            numerics: NumericsConfig::default(),
            weights: WeightsConfig::default(),
            page_tokens: 16,
            max_context_tokens: 8_192,
            chunk_tokens: 256,
            prefix_reuse: true,
            max_queued: 64,
            max_prompts: 4,
            full_pages: None,
            window_pages: None,
            gpu_memory_share: GPU_MEMORY_SHARE,
            ranks_per_gpu: 1,
            mask_threads: 1,
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
        problems.check(self.layout.ep == 1, "layout.ep", "must be 1: prefill splits every expert over all ranks");
        problems.check(
            self.layout.dp == 1,
            "layout.dp",
            "must be 1: prefill computes one prompt at a time, on all ranks",
        );
        validate_pages(self.page_tokens, self.max_context_tokens, self.full_pages, self.window_pages, problems);
        problems.range("chunk_tokens", self.chunk_tokens, 1..=1 << 16);
        problems.range("max_queued", self.max_queued, 1..=1 << 16);
        problems.range("max_prompts", self.max_prompts, 1..=1_024);
        problems.range("mask_threads", self.mask_threads, 1..=64);
        problems.nested("step_loop", &self.step_loop);
        if let Err(reason) = self.transfer.validate() {
            problems.report("transfer", reason);
        }
    }
}

/// Full pages for each window page of prompts that are kept. A place to resume at takes a window's pages, 2 of 64 positions: with this, a place
/// for every 20 pages of a prompt, which is a turn of 1,280 tokens.
const FULL_PER_KEPT_WINDOW: u32 = 10;

/// What follows from a config and a model.
pub(crate) struct Sizes {
    pub(crate) engine: EngineConfig,
    pub(crate) scheduler: PrefillConfig,
}

impl Config {
    pub(crate) fn sizes(&self, model: &OpenModel) -> Result<Sizes, WorkerError> {
        let shape = model.page_shape(self.page_tokens, self.max_context_tokens)?;
        let longest = shape.pages_for(self.max_context_tokens);
        let mut scheduler = PrefillConfig {
            max_queued: self.max_queued,
            max_prompts: self.max_prompts,
            max_context_tokens: self.max_context_tokens,
            chunk_tokens: self.chunk_tokens,
            full_pages: 0,
            window_pages: 0,
            prefix_reuse: self.prefix_reuse,
            remembered_tickets: 4 * self.max_queued + 1_024,
        };
        let window_pages = scheduler.window_pages_per_prompt(shape, self.max_context_tokens) * self.max_prompts;
        let mut engine = EngineConfig {
            role: Role::Prefill,
            backend: self.backend,
            layout: self.layout,
            ranks_per_gpu: self.ranks_per_gpu,
            numerics: self.numerics,
            weights: self.weights.resolve(model.config().stored)?,
            page_tokens: self.page_tokens,
            full_pages: 0,
            window_pages: self.window_pages.unwrap_or(window_pages),
            max_slots: self.max_prompts,
            max_step_tokens: self.chunk_tokens,
            max_context_tokens: self.max_context_tokens,
        };
        let held = self.max_prompts.max(2).saturating_mul(longest);
        let wanted = PagesWanted {
            longest,
            most: if self.prefix_reuse { u32::MAX } else { held },
            on_cpu: 2 * longest,
            full_per_kept_window: (self.prefix_reuse && self.window_pages.is_none()).then_some(FULL_PER_KEPT_WINDOW),
            gpu_memory_share: self.gpu_memory_share,
        };
        model.settle(&mut engine, self.full_pages, wanted)?;
        (scheduler.full_pages, scheduler.window_pages) = (engine.full_pages, engine.window_pages);
        Ok(Sizes { engine, scheduler })
    }

    /// A chunk is computed only when its KV has room in the lane, so the largest must fit.
    pub(crate) fn check_room(&self, layout: &KvLayout) -> Result<(), WorkerError> {
        // A chunk ends the page that the one before it left unfinished; the first chunk of the window sends the window before it.
        let pages = |tokens: u32| (tokens / layout.page_tokens + 2) as usize;
        // Of sliding-window layers no more is sent than the window after the last token sees.
        let layer_pages = layout.full_layers.len() * pages(self.chunk_tokens.max(layout.window))
            + layout.window_layers.len() * pages(layout.window);
        let (needed, room) =
            (layer_pages * layout.kv_heads as usize * layout.head_bytes(), self.transfer.in_flight_bytes_max);
        if needed > room as usize {
            return Err(WorkerError::Config(format!(
                "transfer.in_flight_bytes_max is {room}, a chunk of {} tokens needs up to {needed}",
                self.chunk_tokens
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use model::ModelConfig;
    use types::KvDtype;

    use super::*;

    #[test]
    fn prefixes_are_reused_unless_the_file_says_otherwise() {
        let parse = |text: &str| chassis::config::parse::<Config>(text, "prefill.yaml", "prefill", []);
        for (text, reuse) in [("name: one", true), ("prefix_reuse: true", true), ("prefix_reuse: false", false)] {
            assert_eq!(parse(text).unwrap().prefix_reuse, reuse, "{text}");
        }
        let refused = parse("prefix_reuse: 2").unwrap_err().to_string();
        assert!(refused.contains("prefix_reuse") && refused.contains("boolean"), "{refused}");
    }

    #[test]
    fn a_chunk_of_the_largest_model_fits_the_lane() {
        let layout = ModelConfig::gpt_oss_120b().kv_layout(64, KvDtype::Bf16, 1);
        let config = |in_flight_bytes_max| Config {
            chunk_tokens: 32_768,
            transfer: TransferConfig { in_flight_bytes_max, ..TransferConfig::default() },
            ..Config::default()
        };
        // 514 pages of 18 full layers and 4 of 18 window layers, of 8 heads and 16 KiB each.
        let needed = (514 + 4) * 18 * 8 * (16 << 10);
        config(needed).check_room(&layout).unwrap();
        let refused = config(needed - 1).check_room(&layout).unwrap_err().to_string();
        assert!(refused.contains("transfer.in_flight_bytes_max"), "{refused}");
    }
}
