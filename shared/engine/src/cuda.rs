//! The CUDA engine: gpt-oss on NVIDIA GPUs of compute capability 9.0, one thread a rank, and one GPU unless ranks are told to
//! share.
//!
//! Weights stay as stored (MXFP4 experts, bf16 rest as released), or are made FP8 or bf16 on the device while they are
//! loaded, and are rearranged once for the tensor cores; keys and values are bf16, or E4M3 without scales.
//! A step is enqueued and not waited for: slots, page tables and sampling state live on the device, and the next step
//! reads the last tokens there. Steps that only decode are CUDA graphs, one for each batch bucket; everything else is
//! enqueued kernel by kernel. Nothing is allocated in a step. All ranks get the logits of the whole vocabulary and draw from
//! them: equal numbers and integer sums yield equal tokens, so none has to be told what another one drew.
//!
//! Numerics: tensors are rounded to bf16 where the published reference rounds them, sums are f32. Kernels are chosen by
//! the number of tokens in the step (see `products`), so logits of a position may differ in the last bits between batch
//! sizes; the CPU engine is the one that is bit-stable.
//!
//! With attention data parallelism a rank knows the slots, pages and tokens of its own attention group alone, and computes its experts for
//! all groups' tokens. All ranks of a step run as many rows, those of the group that has most, so that their graphs exchange the same
//! shapes; rows that only fill up visit no expert.
//!
//! Start with [`build_group`]; `rank` carries out a step, `forward` is the model.

mod activations;
mod batch;
mod collective;
mod copy_rate;
mod forward;
mod graphs;
mod group_tokens;
mod kv_cache;
mod link_rate;
mod memory;
mod pinned_ring;
mod probe;
mod products;
mod random_weights;
mod rank;
mod sampler;
mod step_inputs;
mod upload;
mod weights;

use std::ops::Range;
use std::sync::Arc;

use device::Device;
use kernels::KernelError;
use model::{Checkpoint, ModelConfig, ShardPlan, WeightScheme, load_rank, rank_bytes};
use types::{KvDtype, KvLayout, ParallelLayout, SlotGroups, TokenId};

pub use crate::cpu::LoadProgress;
use crate::fault::Fault;
use crate::group::EngineGroup;
pub use crate::vector::Precision;
use crate::{EngineError, KvListener};
use collective::Meeting;
pub use copy_rate::copy_bytes_per_s;
pub use link_rate::{LinkRate, link_rate};
pub use memory::{MemoryNeeds, gpu_memory_bytes};
pub use probe::{Place, Probe};
use random_weights::RandomTensors;
use rank::{CudaRank, Gpu};
use upload::LoadedTensors;
use weights::{DeviceWeights, TensorSource};

/// The head dimension that the attention kernels are built for.
const HEAD_DIM: usize = 64;
/// What the embedded kernels are compiled for.
const COMPUTE_CAPABILITY: (u32, u32) = (9, 0);

/// What to build.
#[derive(Debug, Clone)]
pub struct CudaOptions {
    /// How the model is spread.
    pub layout: ParallelLayout,
    /// How matrices are held.
    pub scheme: WeightScheme,
    /// Rounding of the weights with which the chosen experts are added, and of the router's logits.
    pub routing: Precision,
    /// Element type of the KV cache: bf16 or fp8.
    pub kv_dtype: KvDtype,
    /// Positions a page holds; a multiple of 32.
    pub page_tokens: u32,
    /// Pages for layers of full attention, on each rank: each attention group has as many.
    pub full_pages: u32,
    /// Pages for layers of sliding-window attention, on each rank.
    pub window_pages: u32,
    /// Slots are numbered from 0 to below this, and dealt out to attention groups as [`SlotGroups`] says.
    pub max_slots: u32,
    /// Tokens that the rows of a step may have together.
    pub max_step_tokens: u32,
    /// Positions that a sequence may have.
    pub max_context_tokens: u32,
    /// Layers between two calls of the KV listener; `None` means a quarter of the model.
    pub publish_layers: Option<u32>,
    /// Ids without a token in the vocabulary: never sampled. Logits that a plan asks for are not masked.
    pub masked_tokens: Vec<Range<TokenId>>,
    /// GPU of each rank, as the driver counts them. Where two ranks have the same one, no rank waits for another on its GPU
    /// and steps are enqueued kernel by kernel: for tests, not for speed.
    pub devices: Vec<u32>,
    /// Looks into layers, for numeric tests; of one attention group only.
    pub probe: Option<Arc<dyn Probe>>,
}

/// Where the weights come from.
#[derive(Debug, Clone)]
pub enum Weights {
    /// A checkpoint, of which each rank reads its own part.
    Checkpoint(Arc<Checkpoint>),
    /// Made on the device, for benchmarks: random numbers of such sizes that activations stay near 1 and routing
    /// spreads evenly. The cache is filled too, so that a step may begin at any context.
    Random {
        /// The shapes.
        config: ModelConfig,
        /// Equal seeds give equal weights.
        seed: u64,
    },
}

impl Weights {
    /// The model's sizes.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.config(),
            Self::Random { config, .. } => config,
        }
    }
}

impl From<device::DeviceError> for EngineError {
    fn from(error: device::DeviceError) -> Self {
        KernelError::from(error).into()
    }
}

/// How many GPUs this build could use here.
///
/// # Errors
/// [`EngineError::Gpu`] or [`EngineError::Setup`] with what is missing: kernels in this build, the driver, a device, or
/// one of compute capability 9.0.
pub fn available() -> Result<u32, EngineError> {
    if !kernels::AVAILABLE {
        return Err(KernelError::NotBuilt.into());
    }
    let devices = device::probe()?;
    check_capability(&Device::open(0)?)?;
    Ok(devices)
}

fn check_capability(device: &Device) -> Result<(), EngineError> {
    let found @ (major, minor) = device.compute_capability()?;
    if found == COMPUTE_CAPABILITY {
        return Ok(());
    }
    let name = device.name()?;
    Err(EngineError::Setup(format!("{name} has compute capability {major}.{minor}, the kernels are for 9.0")))
}

/// The KV layout of a group built with these options.
#[must_use]
pub fn kv_layout(config: &ModelConfig, options: &CudaOptions) -> KvLayout {
    config.kv_layout(options.page_tokens, options.kv_dtype, options.layout.tp)
}

/// Loads or makes the weights and starts a thread for each rank. `progress` is called from the ranks' threads.
///
/// # Errors
/// [`EngineError::Setup`] or [`EngineError::Layout`] for options or models that this engine cannot run,
/// [`EngineError::Load`] for a damaged checkpoint, [`EngineError::Gpu`] without a GPU or enough memory on it.
pub fn build_group(
    weights: Weights,
    options: CudaOptions,
    listener: Option<Arc<dyn KvListener>>,
    progress: Arc<dyn Fn(LoadProgress) + Send + Sync>,
) -> Result<EngineGroup, EngineError> {
    let config = weights.config().clone();
    check(&config, &options)?;
    if listener.is_some() && options.layout.dp > 1 {
        let reason = format!("layout {}: only one attention group (dp) can publish its kv", options.layout);
        return Err(EngineError::Setup(reason));
    }
    available()?;
    let plans = ShardPlan::all(&config, options.layout)?;
    check_parts(&plans)?;
    let layout = kv_layout(&config, &options);
    let ranks = options.layout.ranks();
    let fault = Arc::new(Fault::new(ranks));
    let meeting = Meeting::new(options.layout, &options.devices, &fault);
    EngineGroup::start("engine", ranks, layout, fault, move |rank| {
        let plan = &plans[rank as usize];
        let mut gpu = Gpu::open(options.devices[rank as usize])?;
        check_capability(&gpu.stream.device())?;
        let report = |done, total| progress(LoadProgress { rank, done, total });
        let weights = load(&weights, &config, plan, options.scheme, &mut gpu, &report)?;
        CudaRank::new(&config, plan.clone(), gpu, weights, &options, &meeting, listener.clone())
    })
}

/// Weights on the device, with what else their source brings.
struct Loaded {
    weights: DeviceWeights,
    /// Fills the cache, for weights that are random.
    filler: Option<RandomTensors>,
}

fn load(
    source: &Weights,
    config: &ModelConfig,
    plan: &ShardPlan,
    scheme: WeightScheme,
    gpu: &mut Gpu,
    report: &dyn Fn(u64, u64),
) -> Result<Loaded, EngineError> {
    let bytes = rank_bytes(config, plan);
    let build = |tensors: &mut dyn TensorSource, gpu: &Gpu, before: u64| {
        let layers = config.num_layers as u64;
        let packed = |layer: usize| report(before + bytes * layer as u64 / layers, before + bytes);
        DeviceWeights::build(config, plan, scheme, gpu, tensors, &packed)
    };
    match source {
        Weights::Checkpoint(checkpoint) => {
            let loaded = load_rank(checkpoint, plan, &|done, _| report(done, 2 * bytes))?;
            let weights = build(&mut LoadedTensors::new(loaded, &gpu.stream), gpu, bytes)?;
            Ok(Loaded { weights, filler: None })
        }
        Weights::Random { seed, .. } => {
            let mut random = RandomTensors::new(config, *seed, plan.rank, &gpu.stream)?;
            let weights = build(&mut random, gpu, 0)?;
            Ok(Loaded { weights, filler: Some(random) })
        }
    }
}

fn check(config: &ModelConfig, options: &CudaOptions) -> Result<(), EngineError> {
    let fail = |reason: String| Err(EngineError::Setup(reason));
    let layout = options.layout;
    if options.devices.len() != layout.ranks() as usize {
        let devices = options.devices.len();
        return fail(format!("layout {layout} has {} ranks, devices are named for {devices}", layout.ranks()));
    }
    if let Some(obstacle) = options.scheme.obstacle(config.stored) {
        return fail(obstacle);
    }
    if config.head_dim != HEAD_DIM {
        return fail(format!("head_dim is {}, the kernels are built for {HEAD_DIM}", config.head_dim));
    }
    if !config.hidden_size.is_multiple_of(64) || !config.q_width().is_multiple_of(64) {
        return fail(format!("hidden_size {} is no multiple of 64", config.hidden_size));
    }
    if !config.vocab_size.is_multiple_of(16) {
        return fail(format!("vocab_size {} is no multiple of 16", config.vocab_size));
    }
    if options.page_tokens == 0 || !options.page_tokens.is_multiple_of(32) {
        return fail(format!("page_tokens is {}, the kernels take multiples of 32", options.page_tokens));
    }
    if options.kv_dtype == KvDtype::F32 {
        return fail("the cache is f32, the kernels take bf16 and fp8".into());
    }
    if options.max_slots == 0 || options.max_step_tokens == 0 {
        return fail("max_slots and max_step_tokens must be at least 1".into());
    }
    let longest = config.max_context_tokens;
    if options.max_context_tokens == 0 || options.max_context_tokens as usize > longest {
        return fail(format!("max_context_tokens is {}, the model takes 1 to {longest}", options.max_context_tokens));
    }
    slot_groups(options)?;
    if layout.dp > 1 && options.probe.is_some() {
        return fail(format!("layout {layout}: a probe looks into one attention group only"));
    }
    if let Some(range) = options.masked_tokens.iter().find(|range| range.end as usize > config.vocab_size) {
        return fail(format!("masked tokens {range:?} lie beyond the vocabulary of {}", config.vocab_size));
    }
    Ok(())
}

/// Why this engine cannot compute in a layout, whatever the model; `None` if it can.
#[must_use]
pub fn layout_obstacle(layout: ParallelLayout) -> Option<String> {
    let ranks = layout.ranks();
    let takes = [1, 2, 4, 8].contains(&ranks);
    (!takes).then(|| format!("layout is {layout}, which has {ranks} ranks; it takes 1, 2, 4 or 8"))
}

/// Whose each slot is.
fn slot_groups(options: &CudaOptions) -> Result<SlotGroups, EngineError> {
    SlotGroups::new(options.max_slots, options.layout.dp).map_err(|error| EngineError::Setup(error.to_string()))
}

/// What the kernels ask of the ranks and of each one's part.
fn check_parts(plans: &[ShardPlan]) -> Result<(), EngineError> {
    if let Some(obstacle) = plans.first().and_then(|plan| layout_obstacle(plan.layout)) {
        return Err(EngineError::Setup(obstacle));
    }
    for plan in plans {
        let rows = plan.vocab_rows.len();
        if !rows.is_multiple_of(16) || !plan.vocab_rows.start.is_multiple_of(4) {
            return Err(EngineError::Setup(format!(
                "rank {} has {rows} rows of the head, no multiple of 16",
                plan.rank
            )));
        }
    }
    Ok(())
}
