//! The CPU engine: gpt-oss in plain Rust, one thread a rank.
//!
//! It is the oracle of the GPU kernels and the engine of a laptop. Its logits are **bit-stable**: those of a position do not depend on what else
//! is in the batch, on chunking, on whether prefill or decode computed them, on page size, tensor, expert or data parallelism, or on the vector unit.
//! Every sum has one order (see `matmul`, `attention`, `experts` and the tree in `model::sharding`), and the exponential is the engine's own.
//! Only sine and cosine of the rotary embedding come from the system's maths library: machines whose libraries differ may differ in a last bit.
//!
//! Start with [`build_group`]; `rank` carries out a step, `forward` is the model.

mod attention;
mod batch;
mod experts;
mod forward;
mod gather;
#[cfg(test)]
mod kernel_tests;
mod kv_pool;
mod matmul;
mod norm;
mod rank;
mod routing;
mod weights;

use std::ops::Range;
use std::sync::Arc;

use model::{Checkpoint, ModelConfig, ShardPlan, WeightScheme, load_rank_as};
use types::{KvDtype, KvLayout, ParallelLayout, SlotGroups, TokenId};

use crate::fault::Fault;
use crate::group::EngineGroup;
use crate::link::{Exchange, Link};
pub use crate::vector::Precision;
use crate::{EngineError, KvListener};
use rank::{CpuRank, Links};
use weights::PackedWeights;

/// Rounding of intermediate values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Numerics {
    /// Of everything that the published reference keeps in bf16, router logits included.
    pub compute: Precision,
    /// Of the weights with which the chosen experts are added: a matter of its own, since it was found to decide over accuracy.
    pub routing: Precision,
}

impl Numerics {
    /// f32 throughout.
    pub const F32: Self = Self { compute: Precision::F32, routing: Precision::F32 };
    /// The published reference's.
    pub const BF16: Self = Self { compute: Precision::Bf16, routing: Precision::Bf16 };
}

/// Sees intermediate values of the tokens of rank 0's attention group, on rank 0's thread, in the order of layers. For numeric tests.
pub trait Probe: Send + Sync {
    /// The residual stream behind `layer`, `[tokens, hidden]`, tokens in the order of the plan.
    fn hidden(&self, layer: usize, hidden: &[f32]);

    /// The experts chosen for a token, ascending, with their weights.
    fn routed(&self, layer: usize, token: usize, experts: &[(u32, f32)]);
}

/// What to build.
#[derive(Clone)]
pub struct CpuOptions {
    /// Ranks are threads.
    pub layout: ParallelLayout,
    /// Where to round.
    pub numerics: Numerics,
    /// Weights that this says are FP8 are rounded to it; all are computed with as bf16 values.
    pub scheme: WeightScheme,
    /// Element type of the KV cache.
    pub kv_dtype: KvDtype,
    /// Positions a page holds.
    pub page_tokens: u32,
    /// Pages for layers of full attention, on each rank: those of one attention group.
    pub full_pages: u32,
    /// Pages for layers of sliding-window attention, on each rank: those of one attention group.
    pub window_pages: u32,
    /// Slots are numbered from 0 to below this, and dealt out to the attention groups ([`SlotGroups`]).
    pub max_slots: u32,
    /// Tokens that the rows of a step may have together.
    pub max_step_tokens: u32,
    /// Layers between two calls of the KV listener; `None` means a quarter of the model.
    pub publish_layers: Option<u32>,
    /// Ids without a token in the vocabulary: never sampled. Logits that a plan asks for are not masked.
    pub masked_tokens: Vec<Range<TokenId>>,
    /// Sees intermediate values.
    pub probe: Option<Arc<dyn Probe>>,
}

/// How far a rank has come while a group is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// The rank.
    pub rank: u32,
    /// Of `total`.
    pub done: u64,
    /// Reading and packing count alike; the same number at each call for one rank.
    pub total: u64,
}

/// The KV layout of a group built with these options.
#[must_use]
pub fn kv_layout(config: &ModelConfig, options: &CpuOptions) -> KvLayout {
    config.kv_layout(options.page_tokens, options.kv_dtype, options.layout.tp)
}

/// Loads the model and starts a thread for each rank of `options.layout`. Each rank reads its own part of the checkpoint; `progress` is called from
/// the ranks' threads.
///
/// # Errors
/// [`EngineError::Setup`] or [`EngineError::Layout`] for options or models that this engine cannot run, [`EngineError::Load`] for a damaged
/// checkpoint.
pub fn build_group(
    checkpoint: Arc<Checkpoint>,
    options: CpuOptions,
    listener: Option<Arc<dyn KvListener>>,
    progress: Arc<dyn Fn(LoadProgress) + Send + Sync>,
) -> Result<EngineGroup, EngineError> {
    let slots = check(checkpoint.config(), &options)?;
    if listener.is_some() && options.layout.dp > 1 {
        let reason = format!("layout {}: keys and values are published without data parallelism alone", options.layout);
        return Err(EngineError::Setup(reason));
    }
    let plans = ShardPlan::all(checkpoint.config(), options.layout)?;
    let layout = kv_layout(checkpoint.config(), &options);
    let ranks = options.layout.ranks();
    let fault = Arc::new(Fault::new(ranks));
    let exchange = |ranks: Range<u32>| Arc::new(Exchange::between(ranks, fault.clone()));
    let (world, tp) = (exchange(0..ranks), options.layout.tp);
    let groups: Vec<_> = slots.groups().map(|group| exchange(group.0 * tp..(group.0 + 1) * tp)).collect();
    tracing::debug!(layout = %options.layout, vector_unit = crate::simd::Simd::detect().name(), "building cpu engine");
    EngineGroup::start("engine", ranks, layout, fault, move |rank| {
        let plan = &plans[rank as usize];
        let report = |done, total| progress(LoadProgress { rank, done, total });
        let weights = load(&checkpoint, plan, options.scheme, &report)?;
        let link = |exchange: &Arc<Exchange>| Link::new(plan.rank, exchange.clone());
        let links = Links { group: link(&groups[plan.dp_rank]), world: link(&world) };
        Ok(CpuRank::new(checkpoint.config(), plan.clone(), weights, (&options, slots), links, listener.clone()))
    })
}

/// Reads and packs one rank's weights.
fn load(
    checkpoint: &Checkpoint,
    plan: &ShardPlan,
    scheme: WeightScheme,
    progress: &dyn Fn(u64, u64),
) -> Result<PackedWeights, EngineError> {
    let read_bytes = model::rank_weights::rank_bytes(checkpoint.config(), plan);
    let weights = load_rank_as(checkpoint, plan, scheme, &|done, _| progress(done, 2 * read_bytes))?;
    let layers = weights.layers.len() as u64;
    let packed = |layer: usize| progress(read_bytes + read_bytes * layer as u64 / layers, 2 * read_bytes);
    Ok(PackedWeights::pack(checkpoint, weights, &packed))
}

fn check(config: &ModelConfig, options: &CpuOptions) -> Result<SlotGroups, EngineError> {
    let lanes = crate::simd::LANES;
    let fail = |reason: String| Err(EngineError::Setup(reason));
    if let Some(obstacle) = options.scheme.obstacle(config.stored) {
        return fail(obstacle);
    }
    if config.head_dim != attention::HEAD_DIM {
        return fail(format!("head_dim is {}, the cpu engine computes {}", config.head_dim, attention::HEAD_DIM));
    }
    if !config.hidden_size.is_multiple_of(lanes) {
        return fail(format!("hidden_size {} is no multiple of {lanes}", config.hidden_size));
    }
    if options.page_tokens == 0 || options.max_slots == 0 || options.max_step_tokens == 0 {
        return fail("page_tokens, max_slots and max_step_tokens must be at least 1".into());
    }
    if let Some(range) = options.masked_tokens.iter().find(|range| range.end as usize > config.vocab_size) {
        return fail(format!("masked tokens {range:?} lie beyond the vocabulary of {}", config.vocab_size));
    }
    SlotGroups::new(options.max_slots, options.layout.dp).map_err(|error| EngineError::Setup(error.to_string()))
}
