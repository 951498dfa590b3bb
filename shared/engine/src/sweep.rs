//! Measures whole steps of an engine: prefill by the length of the prompt, decode by batch and context.
//!
//! Wall-clock time as a worker takes it: launch, kernels, and the tokens back on the host; the next decode step is launched
//! before the last one is read. Prefill: the median of [`PROMPT_REPEATS`] prompts after [`WARM_PROMPTS`] to warm up, from an
//! empty cache to the first token, in chunks. Decode: the mean of [`STEPS`] steps after [`WARM_STEPS`], from whatever the cache
//! holds: random numbers where the weights are random, zeros otherwise. The sequences of a step are dealt out to the attention groups in
//! turn. Bytes are counted, not measured; the bound is [`roofline`]'s for the copy rate and, of several GPUs, the shortest sum and the
//! rate between them, measured in the same run.

mod report;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use model::{ModelConfig, WeightScheme};
use scheduler::plan::RowOutputKind;
use types::{KvDtype, ParallelLayout, SlotGroups};

use crate::EngineError;
use crate::cuda::LinkRate;
use crate::cuda::{self, CudaOptions, Precision, Weights};
use crate::driver::{Driver, Row, greedy};
use crate::roofline::{self, Bound, Group, Machine};

/// Prompts before those that count.
pub const WARM_PROMPTS: usize = 2;
/// Prompts of which the median is taken.
pub const PROMPT_REPEATS: usize = 5;
/// Decode steps before those that count.
pub const WARM_STEPS: usize = 5;
/// Decode steps of which the mean is taken.
pub const STEPS: usize = 40;
const PAGE_TOKENS: u32 = 64;

/// What to measure.
#[derive(Debug, Clone, PartialEq)]
pub struct SweepOptions {
    /// The model's name in reports.
    pub model: String,
    /// Degrees of parallelism, one GPU a rank.
    pub layout: ParallelLayout,
    /// Element type of the KV cache.
    pub kv_dtype: KvDtype,
    /// How matrices are held.
    pub scheme: WeightScheme,
    /// Tokens of a prompt that one step takes.
    pub chunk: usize,
    /// Lengths of prompts, in tokens; none with several attention groups, which prefill has not.
    pub prompts: Vec<usize>,
    /// Sequences of a decode step.
    pub batches: Vec<usize>,
    /// Keys that each of them has in the cache.
    pub contexts: Vec<usize>,
    /// Keys that all sequences of a batch may have together; cells beyond it are left out. 1.1 million are 40 GB of cache for 120b.
    pub max_keys: usize,
}

impl SweepOptions {
    /// The cells that tables in docs/results have.
    #[must_use]
    pub fn standard(model: String) -> Self {
        Self {
            model,
            layout: ParallelLayout::tp(1),
            kv_dtype: KvDtype::Bf16,
            scheme: WeightScheme::default(),
            chunk: 32_768,
            prompts: vec![1024, 2048, 4096, 8192, 16_384, 32_768],
            batches: vec![1, 2, 4, 8, 16, 32, 64, 128],
            contexts: vec![1024, 8192, 32_768],
            max_keys: 1_100_000,
        }
    }

    fn max_batch(&self) -> usize {
        self.batches.iter().copied().max().unwrap_or(1)
    }

    /// Keys that a batch may take in a cell.
    const fn keys(batch: usize, context: usize) -> usize {
        batch * (context + WARM_STEPS + STEPS + 64)
    }

    /// Keys of one attention group in the cell that has most of those which are measured.
    fn most_keys(&self) -> usize {
        let cells = self.contexts.iter().flat_map(|context| self.batches.iter().map(move |batch| (*batch, *context)));
        let measured = cells.filter(|(batch, context)| Self::keys(*batch, *context) <= self.max_keys);
        let of_group = |(batch, context): (usize, usize)| Self::keys(batch.div_ceil(self.layout.dp as usize), context);
        measured.map(of_group).max().unwrap_or(0)
    }

    /// As many in each attention group.
    fn slots(&self) -> Result<SlotGroups, EngineError> {
        let slots = (self.max_batch() as u32).next_multiple_of(self.layout.dp);
        SlotGroups::new(slots, self.layout.dp).map_err(|error| EngineError::Setup(error.to_string()))
    }

    fn check(&self, config: &ModelConfig) -> Result<(), EngineError> {
        let layout = self.layout;
        if layout.tp == 0 || layout.ep == 0 || layout.dp == 0 {
            return Err(EngineError::Setup(format!("layout {layout}: each degree is at least 1")));
        }
        if layout.dp > 1 && !self.prompts.is_empty() {
            let reason = format!("layout {layout}: prompts are prefill's, which has one attention group; measure none");
            return Err(EngineError::Setup(reason));
        }
        let longest = config.max_context_tokens;
        let mut lengths = self.prompts.iter().chain(&self.contexts);
        if let Some(length) = lengths.find(|length| **length == 0 || **length + WARM_STEPS + STEPS + 1 > longest) {
            return Err(EngineError::Setup(format!("a length of {length} leaves no room in a context of {longest}")));
        }
        if self.chunk == 0 || self.batches.contains(&0) {
            return Err(EngineError::Setup("a chunk and a batch have one token at least".into()));
        }
        Ok(())
    }
}

/// What a cell measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// A prompt.
    Prefill,
    /// A step of a batch.
    Decode,
}

impl Phase {
    /// As reports have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// One cell of a sweep.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cell {
    /// What was measured.
    pub phase: Phase,
    /// Sequences of the step.
    pub batch: usize,
    /// Tokens of the prompt, or keys in the cache.
    pub context: usize,
    /// Of the prompt, or of a step.
    pub seconds: f64,
    /// What it would take at least.
    pub bound: Bound,
    /// Different tokens that the rows of the last step drew: rows of one token visit the same experts, and a step of
    /// them would read less than is counted.
    pub distinct_tokens: usize,
}

impl Cell {
    /// Of all sequences together.
    #[must_use]
    pub fn tokens_per_s(&self) -> f64 {
        let tokens = if self.phase == Phase::Prefill { self.context } else { self.batch };
        tokens as f64 / self.seconds
    }

    /// How much of the bound is reached, up to 1.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.bound.seconds / self.seconds
    }
}

/// A finished sweep; see [`Self::markdown`], [`Self::csv`] and [`Self::json`].
#[derive(Debug, Clone, PartialEq)]
pub struct Sweep {
    /// What was to be measured.
    pub options: SweepOptions,
    /// The first GPU's copy rate in this run, bytes read and written in a second.
    pub copy_bytes_per_s: f64,
    /// What lies between the GPUs, if there are several.
    pub link: Option<LinkRate>,
    /// To make or read the weights and record the graphs.
    pub build_seconds: f64,
    /// In the order in which they were measured.
    pub cells: Vec<Cell>,
}

/// Builds the engine and measures every cell; `on_cell` is told of each as it comes.
///
/// # Errors
/// As [`cuda::build_group`]; [`EngineError::Setup`] for lengths that the model does not have; [`EngineError::RankLost`].
pub fn sweep(weights: Weights, options: SweepOptions, on_cell: &mut dyn FnMut(&Cell)) -> Result<Sweep, EngineError> {
    // The bound is that of the weights as they are held.
    let config = ModelConfig { stored: options.scheme, ..weights.config().clone() };
    options.check(&config)?;
    let copy_bytes_per_s = cuda::copy_bytes_per_s(0)?;
    let (machine, devices) = (Machine::h200(copy_bytes_per_s), devices(&options));
    let link = (devices.len() > 1).then(|| cuda::link_rate(&devices, config.hidden_size)).transpose()?;
    let group = link.map_or(Group::ALONE, |link| Group {
        ranks: devices.len(),
        ep: options.layout.ep as usize,
        dp: options.layout.dp as usize,
        all_reduce_s: link.all_reduce_s,
        link_bytes_per_s: link.bytes_per_s,
    });
    let start = Instant::now();
    let mut driver = build(weights, &options)?;
    let build_seconds = start.elapsed().as_secs_f64();
    let mut cells = Vec::new();
    for &tokens in &options.prompts {
        let seconds = prefill(&mut driver, tokens, options.chunk)?;
        let bound = roofline::prefill(&config, &machine, &group, tokens);
        let cell = Cell { phase: Phase::Prefill, batch: 1, context: tokens, seconds, bound, distinct_tokens: 1 };
        on_cell(&cell);
        cells.push(cell);
    }
    for &context in &options.contexts {
        let keys = |batch: usize| SweepOptions::keys(batch, context);
        for &batch in options.batches.iter().filter(|batch| keys(**batch) <= options.max_keys) {
            let (seconds, distinct_tokens) = decode(&mut driver, batch, context)?;
            let keys = context + WARM_STEPS + STEPS / 2;
            let saved = 1.0 - options.kv_dtype.bytes() as f64 / KvDtype::Bf16.bytes() as f64;
            let cached = roofline::cached_bytes(&config, group.sequences(batch), keys) / group.tp() as f64;
            let saved_bytes = saved * cached;
            let bound = roofline::decode(&config, &machine, &group, batch, keys).without(&machine, saved_bytes);
            let cell = Cell { phase: Phase::Decode, batch, context, seconds, bound, distinct_tokens };
            on_cell(&cell);
            cells.push(cell);
        }
    }
    Ok(Sweep { options, copy_bytes_per_s, link, build_seconds, cells })
}

/// The first GPUs, one a rank.
fn devices(options: &SweepOptions) -> Vec<u32> {
    (0..options.layout.ranks()).collect()
}

fn build(weights: Weights, options: &SweepOptions) -> Result<Driver, EngineError> {
    let longest = options.prompts.iter().copied().max().unwrap_or(0);
    let full_pages = options.most_keys().max(longest + 1).div_ceil(PAGE_TOKENS as usize) as u32;
    let slots = options.slots()?;
    let max_slots = slots.dp() * slots.per_group();
    // Without prompts no step is longer than a batch.
    let chunk = if options.prompts.is_empty() { max_slots } else { options.chunk as u32 };
    let window_pages = slots.per_group() * 8 + chunk.div_ceil(PAGE_TOKENS) * 2;
    let cuda_options = CudaOptions {
        layout: options.layout,
        scheme: options.scheme,
        routing: Precision::Bf16,
        kv_dtype: options.kv_dtype,
        page_tokens: PAGE_TOKENS,
        full_pages,
        window_pages,
        max_slots,
        max_step_tokens: chunk,
        max_context_tokens: weights.config().max_context_tokens as u32,
        publish_layers: None,
        masked_tokens: Vec::new(),
        devices: devices(options),
        probe: None,
    };
    let group = cuda::build_group(weights, cuda_options, None, Arc::new(|_| {}))?;
    Ok(Driver::over_groups(group, [full_pages, window_pages], slots))
}

/// Token numbers spread over the vocabulary.
fn tokens(len: usize, stream: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * 7919 + stream * 104_729) % 200_000) as u32).collect()
}

/// Seconds from an empty cache to the first token: the median.
fn prefill(driver: &mut Driver, len: usize, chunk: usize) -> Result<f64, EngineError> {
    let mut seconds = Vec::new();
    for repeat in 0..WARM_PROMPTS + PROMPT_REPEATS {
        let prompt = tokens(len, repeat);
        driver.bind(0, &prompt, greedy());
        let chunks: Vec<&[u32]> = prompt.chunks(chunk).collect();
        let start = Instant::now();
        for (i, chunk) in chunks.iter().enumerate() {
            let output = if i + 1 == chunks.len() { RowOutputKind::Sample } else { RowOutputKind::None };
            driver.launch(vec![Row::new(0, chunk, output)])?;
            if i > 0 {
                driver.group.collect()?;
            }
        }
        driver.group.collect()?;
        if repeat >= WARM_PROMPTS {
            seconds.push(start.elapsed().as_secs_f64());
        }
        driver.end(0);
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[seconds.len() / 2])
}

/// Seconds of a decode step: the mean. And the number of different tokens in the last one.
fn decode(driver: &mut Driver, batch: usize, context: usize) -> Result<(f64, usize), EngineError> {
    // In turn from each attention group.
    let (dp, per_group) = (driver.slots.dp(), driver.slots.per_group());
    let slots: Vec<u32> = (0..batch as u32).map(|number| number % dp * per_group + number / dp).collect();
    let first = |(number, slot): (usize, &u32)| Row::new(*slot, &tokens(1, number), RowOutputKind::Sample);
    for slot in &slots {
        driver.bind(*slot, &[], greedy());
        // The cache may be read at any position: a sequence may begin anywhere.
        driver.sequences.get_mut(slot).expect("just bound").len = context as u32;
    }
    driver.launch(slots.iter().enumerate().map(first).collect())?;
    let mut start = Instant::now();
    for step in 0..WARM_STEPS + STEPS {
        driver.launch(slots.iter().map(|slot| Row::decode(*slot)).collect())?;
        driver.group.collect()?;
        if step + 1 == WARM_STEPS {
            start = Instant::now();
        }
    }
    let seconds = start.elapsed().as_secs_f64() / STEPS as f64;
    let last = driver.group.collect()?;
    slots.iter().for_each(|slot| driver.end(*slot));
    let drawn = last.rows.iter().filter_map(|row| row.sampled.as_ref()).map(|sampled| sampled.token);
    Ok((seconds, drawn.collect::<BTreeSet<u32>>().len()))
}
