//! One rank: slots, sampling state, cache and graphs around the forward pass.

use std::collections::VecDeque;
use std::sync::Arc;

use device::{Device, DeviceBuffer, Event, Stream};
use kernels::{ExpertWeights, Kernels, SampleRow, Workspace};
use kv::KvSlice;
use model::rope::RopeAngles;
use model::{ModelConfig, ShardPlan};
use scheduler::plan::{RowFailure, RowOutput, RowOutputKind, StepOutput, StepPlan};
use types::{DpGroup, PageId, SlotId, TokenId};

use super::activations::Activations;
use super::batch::{Batch, Limits, Slots};
use super::collective::{Collective, Meeting, Sizes};
use super::forward::{Forward, RankModel};
use super::graphs::{DecodeGraphs, GraphKey};
use super::kv_cache::{CacheReader, RankCache};
use super::products::Fp8Activations;
use super::sampler::{DeviceSampler, Drawing};
use super::step_inputs::StepInputs;
use super::{CudaOptions, HEAD_DIM, Loaded, Precision};
use crate::{Engine, EngineError, KvListener, KvPort};

/// Rows of logits that are computed at once, if slots do not ask for more.
const LOGIT_ROWS: usize = 32;

/// A device, the stream of its steps, and the kernels.
pub(crate) struct Gpu {
    pub(crate) stream: Stream,
    pub(crate) kernels: Kernels,
    pub(crate) workspace: Workspace,
    pub(crate) fp8: Fp8Activations,
    /// Whether kernels that wait for blocks of their own, or for another GPU, may run beside this rank's: those of other ranks or of other
    /// processes (MPS), or NCCL's that send KV, whose receivers may be waited for in turn.
    pub(crate) is_shared: bool,
}

impl Gpu {
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(crate) fn open(ordinal: u32) -> Result<Self, EngineError> {
        let device = Device::open(ordinal)?;
        let stream = device.stream()?;
        let (kernels, workspace) = (Kernels::load(&device)?, Workspace::new(&stream)?);
        let is_shared = device.runs_beside_others()?;
        Ok(Self { kernels, workspace, fp8: Fp8Activations::default(), is_shared, stream })
    }
}

/// Where the last token of a slot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LastToken {
    Nowhere,
    /// The host has read it.
    Known(TokenId),
    /// Row `row` of the draw of launch `launch`, not yet read.
    Drawn {
        launch: u64,
        row: usize,
    },
}

/// A step that was launched and not collected.
struct Pending {
    step: u64,
    launch: u64,
    rows: Vec<PendingRow>,
    drawing: Option<Drawing>,
    /// Its last work, if it draws nothing whose arrival would tell that it is complete.
    end: Option<Event>,
}

struct PendingRow {
    slot: SlotId,
    /// Its row of the draw.
    draw: Option<usize>,
    /// Why it has none, if it was to sample.
    failure: Option<RowFailure>,
    /// Alternatives that it reports beside the token, if log-probabilities are wanted.
    logprobs: Option<u32>,
    logits: Vec<f32>,
}

/// A rank of the CUDA engine.
pub(crate) struct CudaRank {
    /// Dropped first: kernels of other ranks that wait for this one end.
    collective: Box<dyn Collective>,
    gpu: Gpu,
    model: RankModel,
    limits: Limits,
    cache: RankCache,
    acts: Activations,
    inputs: StepInputs,
    sampler: DeviceSampler,
    /// Of the slots of the rank's attention group, as is everything here that slots have.
    last_tokens: Vec<LastToken>,
    /// Rows of `acts.logits`.
    logit_rows: usize,
    graphs: DecodeGraphs,
    listener: Option<Arc<dyn KvListener>>,
    publish_layers: usize,
    /// Copies of published KV, beside the steps.
    copies: Stream,
    launches: u64,
    pending: VecDeque<Pending>,
    /// The last step, if its draw waits for grammar masks.
    undrawn: Option<Batch>,
}

impl CudaRank {
    /// Makes everything a step needs, and the graphs.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(crate) fn new(
        config: &ModelConfig,
        plan: ShardPlan,
        mut gpu: Gpu,
        loaded: Loaded,
        options: &CudaOptions,
        meeting: &Meeting,
        listener: Option<Arc<dyn KvListener>>,
    ) -> Result<Self, EngineError> {
        let groups = super::slot_groups(options)?;
        // Those of the rank's attention group; tokens are everybody's, for one group may have all of them.
        let (slots, tokens) = (groups.per_group() as usize, options.max_step_tokens.max(options.max_slots) as usize);
        let stream = gpu.stream.clone();
        let logit_rows = slots.max(LOGIT_ROWS);
        let multiprocessors = stream.device().multiprocessors()? as usize;
        let max_context = options.max_context_tokens as usize;
        let acts = Activations::new(&stream, config, &plan, tokens, logit_rows)?;
        let sizes = Sizes { hidden: config.hidden_size, max_tokens: tokens, vocab: config.vocab_size };
        gpu.fp8 = Fp8Activations::new(&stream, config, &plan, options.scheme, tokens)?;
        let collective = meeting.join(&gpu, &plan, sizes, &acts.logits)?;
        gpu.is_shared |= listener.is_some() || collective.shares_gpu();
        let mut rank = Self {
            collective,
            limits: Limits {
                slots: groups,
                group: DpGroup(plan.dp_rank as u32),
                max_step_tokens: tokens,
                vocab_size: config.vocab_size,
                window: config.window,
                max_context,
            },
            cache: RankCache::new(&stream, config, &plan, options, loaded.filler)?,
            acts,
            inputs: StepInputs::new(&stream, tokens, slots)?,
            sampler: DeviceSampler::new(&stream, slots, config.vocab_size, &options.masked_tokens)?,
            last_tokens: vec![LastToken::Nowhere; slots],
            logit_rows,
            graphs: DecodeGraphs::new(slots, max_context, multiprocessors, plan.kv_heads.len()),
            listener,
            publish_layers: options
                .publish_layers
                .map_or(config.num_layers.div_ceil(4), |layers| layers as usize)
                .max(1),
            copies: stream.device().stream()?,
            launches: 0,
            pending: VecDeque::new(),
            undrawn: None,
            model: RankModel {
                angles: angle_table(&stream, config, max_context)?,
                config: config.clone(),
                plan,
                weights: loaded.weights,
                routing: match options.routing {
                    Precision::F32 => ExpertWeights::F32,
                    Precision::Bf16 => ExpertWeights::Bf16,
                },
                probe: options.probe.clone(),
            },
            gpu,
        };
        if rank.collective.is_recordable() && options.probe.is_none() {
            for key in rank.graphs.keys() {
                rank.capture(key)?;
            }
        }
        rank.gpu.stream.synchronize()?;
        Ok(rank)
    }

    /// Records the decode step of `key.rows` rows. What the rows are is read from memory when it runs.
    fn capture(&mut self, key: GraphKey) -> Result<(), EngineError> {
        let batch = Batch::of_graph(key.rows, self.limits.slots.dp() as usize, self.limits.group);
        let stream = self.gpu.stream.clone();
        let graph = stream.capture(|_| {
            let mut forward = self.forward(&batch, key.max_context);
            forward.layers(|_, _| Ok(()))?;
            forward.logits(&batch.sample_tokens)
        })?;
        self.graphs.insert(key, graph);
        Ok(())
    }

    fn forward<'a>(&'a mut self, batch: &'a Batch, max_context: usize) -> Forward<'a> {
        Forward {
            gpu: &mut self.gpu,
            model: &self.model,
            acts: &mut self.acts,
            cache: &mut self.cache,
            inputs: &self.inputs,
            sampled: self.sampler.tokens(),
            collective: &mut *self.collective,
            batch,
            max_context,
        }
    }

    /// Slots and pages, before the rows. Those of other attention groups are no concern of this rank: the same page number
    /// means another page there.
    fn apply(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        let (limits, step) = (self.limits, plan.step);
        let own = |slot: SlotId| {
            let (idx, slots) = (slot.0 as usize, limits.max_slots());
            let reason = || format!("slot {idx} is beyond the engine's {slots}");
            if idx < slots { Ok(limits.own(slot)) } else { Err(EngineError::Plan { step, reason: reason() }) }
        };
        for slot in &plan.unbind {
            let Some(slot) = own(*slot)? else { continue };
            self.cache.forget(slot);
            self.sampler.unbind(slot);
            self.last_tokens[slot] = LastToken::Nowhere;
        }
        for binding in &plan.bind {
            let Some(slot) = own(binding.slot)? else { continue };
            self.cache.forget(slot);
            self.sampler.bind(&self.gpu.stream, slot, binding)?;
            self.last_tokens[slot] = LastToken::Nowhere;
        }
        for delta in &plan.pages {
            let Some(slot) = own(delta.slot)? else { continue };
            self.cache.apply(&self.gpu.stream, step, slot, delta)?;
        }
        Ok(())
    }

    /// Whether a batch is run by a graph, logits included. A probe cannot look into one.
    fn is_recorded(&self, batch: &Batch) -> bool {
        batch.is_plain_decode() && self.collective.is_recordable() && self.model.probe.is_none()
    }

    /// Runs the layers as a graph, or kernel by kernel. Yields, for a step that publishes, groups of layers: the end of each, and its event.
    fn run(&mut self, batch: &mut Batch) -> Result<Vec<(usize, Event)>, EngineError> {
        let stream = self.gpu.stream.clone();
        let mut published = Vec::new();
        if self.is_recorded(batch) {
            let key = self.graphs.key(batch.groups.most(), batch.max_context);
            batch.pad(key.rows, self.limits.slots.per_group() as usize);
            self.inputs.upload(&stream, batch)?;
            let graph = self.graphs.get(key).expect("`new` captured every key that `key` yields");
            graph.launch(&stream)?;
            return Ok(published);
        }
        self.inputs.upload(&stream, batch)?;
        let (publish_layers, num_layers) = (self.publish_layers, self.model.config.num_layers);
        let publishes = batch.publishes && self.listener.is_some();
        let mut forward = self.forward(batch, batch.max_context);
        forward.layers(|gpu, layer| {
            let end = layer + 1;
            // The last layer goes alone: what is sent behind the forward pass is as little as can be.
            if publishes && (end.is_multiple_of(publish_layers) || end + 1 >= num_layers) {
                published.push((end, gpu.stream.record()?));
            }
            Ok(())
        })?;
        Ok(published)
    }

    /// Draws from the logits of a batch, once its masks are there. Draws whose mask failed yield nothing.
    fn draw(&mut self, mut batch: Batch) -> Result<(), EngineError> {
        let pending = self.pending.back_mut().expect("a step is drawn from after it was launched");
        let stream = &self.gpu.stream;
        for (draw, mask) in &batch.masks {
            match mask.wait() {
                Ok(mask) => {
                    self.sampler.set_mask(stream, *draw, mask)?;
                    batch.sample_rows[*draw].mask_row = *draw as i32;
                }
                // The sequence ends; a step that is planned already finds some token.
                Err(_) => {
                    for row in pending.rows.iter_mut().filter(|row| row.draw == Some(*draw)) {
                        row.draw = None;
                        row.failure = Some(RowFailure::NothingAllowed);
                        let slot = self.limits.own(row.slot).expect("a row that draws is the group's own");
                        self.last_tokens[slot] = LastToken::Known(0);
                    }
                }
            }
        }
        let rows = batch.sample_rows.len();
        self.inputs.upload_rows(stream, &batch.sample_rows)?;
        let logits = self.acts.logits.slice(..rows * self.limits.vocab_size);
        self.sampler.draw(&self.gpu, logits, self.inputs.sample_rows(rows))?;
        let reports = pending.rows.iter().any(|row| row.logprobs.is_some());
        pending.drawing = Some(self.sampler.fetch(stream, reports)?);
        Ok(())
    }

    /// Draws for a step that waited for its masks.
    fn draw_late(&mut self) -> Result<(), EngineError> {
        self.undrawn.take().map_or(Ok(()), |batch| self.draw(batch))
    }

    /// Hands layers to the listener as they complete. Waits for the step's last layer: pages that later steps free and
    /// fill again are read before.
    fn publish(&self, plan: &StepPlan, groups: Vec<(usize, Event)>) -> Result<(), EngineError> {
        let Some(listener) = &self.listener else { return Ok(()) };
        let reader = CacheReader { cache: &self.cache, stream: &self.copies };
        let mut start = 0;
        for (end, event) in groups {
            event.wait()?;
            listener.layers_ready(self.model.plan.rank as u32, plan, start as u32..end as u32, &reader);
            start = end;
        }
        Ok(())
    }

    /// Computes the logits that a row asks for and, on the first rank of its attention group, fetches them, waiting for them: they are for verification
    /// and tests, not for serving.
    fn fetch_logits(&mut self, batch: &Batch, row: usize) -> Result<Vec<f32>, EngineError> {
        let (rows, vocab) = (self.logit_rows, self.limits.vocab_size);
        let tokens: Vec<usize> = batch.logits[row].clone().collect();
        let mut all = Vec::with_capacity(tokens.len() * vocab);
        for piece in tokens.chunks(rows) {
            self.forward(batch, batch.max_context).logits(piece)?;
            if self.model.plan.tp_rank > 0 {
                continue;
            }
            all.extend(self.gpu.stream.download(self.acts.logits.slice(..piece.len() * vocab))?);
        }
        Ok(all)
    }
}

impl Engine for CudaRank {
    /// Enqueues the step. With masked rows it draws no sooner than the step is collected or another one launched: the
    /// masks may depend on tokens of the step before, which can be collected meanwhile.
    fn launch(&mut self, plan: &Arc<StepPlan>) -> Result<(), EngineError> {
        self.draw_late()?;
        self.apply(plan)?;
        let launch = self.launches;
        self.launches += 1;
        let mut slots = HostSlots { last_tokens: &self.last_tokens, sampler: &mut self.sampler, launch };
        let mut batch = Batch::new(plan, &mut slots, &self.cache, &self.limits)?;
        let is_recorded = self.is_recorded(&batch);
        let published = if batch.groups.all() == 0 { Vec::new() } else { self.run(&mut batch)? };
        let mut rows = Vec::with_capacity(plan.rows.len());
        for (idx, row) in plan.rows.iter().enumerate() {
            let draw = batch.draws[idx];
            if let Some((row_of_draw, slot)) = draw.zip(self.limits.own(row.slot)) {
                self.last_tokens[slot] = LastToken::Drawn { launch, row: row_of_draw };
            }
            let logprobs = draw.and_then(|draw| u32::try_from(batch.sample_rows[draw].logprobs).ok());
            let logits = if batch.logits[idx].is_empty() { Vec::new() } else { self.fetch_logits(&batch, idx)? };
            rows.push(PendingRow { slot: row.slot, draw, failure: None, logprobs, logits });
        }
        let draws = plan.rows.iter().any(|row| row.output == RowOutputKind::Sample);
        let end = if draws { None } else { Some(self.gpu.stream.record()?) };
        self.pending.push_back(Pending { step: plan.step, launch, rows, drawing: None, end });
        if !batch.sample_tokens.is_empty() {
            if !is_recorded {
                self.forward(&batch, batch.max_context).logits(&batch.sample_tokens)?;
            }
            if batch.masks.is_empty() { self.draw(batch)? } else { self.undrawn = Some(batch) }
        }
        self.publish(plan, published)
    }

    fn collect(&mut self) -> Result<StepOutput, EngineError> {
        if self.pending.len() == 1 {
            self.draw_late()?;
        }
        let reason = || EngineError::Setup("collect without a launched step".into());
        let Pending { step, launch, rows, drawing, end } = self.pending.pop_front().ok_or_else(reason)?;
        let draws = drawing.map(Drawing::wait).transpose()?;
        // Whoever collects a step takes its pages for written.
        end.map(|end| end.wait()).transpose()?;
        self.collective.check()?;
        let mut outputs = Vec::with_capacity(rows.len());
        for PendingRow { slot, draw, failure, logprobs, logits } in rows {
            let Some((row, draws)) = draw.zip(draws.as_ref()) else {
                outputs.push(RowOutput { slot, sampled: None, failure, logits });
                continue;
            };
            let (sampled, failure) = match draws.row(row, logprobs) {
                Ok(token) => (Some(token), None),
                Err(failure) => (None, Some(failure)),
            };
            let own = self.limits.own(slot).expect("a row that draws is the group's own");
            let last = &mut self.last_tokens[own];
            // Otherwise the slot has been bound or has sampled again.
            if *last == (LastToken::Drawn { launch, row }) {
                *last = LastToken::Known(sampled.as_ref().map_or(0, |sampled| sampled.token));
            }
            if let Some(failure) = failure {
                tracing::warn!(step, slot = slot.0, ?failure, "a row has no token");
            }
            outputs.push(RowOutput { slot, sampled, failure, logits });
        }
        if let Some(draws) = draws {
            self.sampler.give_back(draws);
        }
        Ok(StepOutput { step, rows: outputs })
    }

    fn export_kv(&self, slice: &KvSlice, page: PageId, out: &mut [u8]) -> Result<(), EngineError> {
        self.cache.export(&self.gpu.stream, slice, page, out)
    }

    fn import_kv(&mut self, slice: &KvSlice, page: PageId, bytes: &[u8]) -> Result<(), EngineError> {
        self.cache.import(&self.gpu.stream, slice, page, bytes)
    }

    fn kv_port(&self) -> Option<KvPort> {
        Some(self.cache.port(self.gpu.stream.device()))
    }
}

/// What a batch asks about slots while it is made for launch `launch`.
struct HostSlots<'a> {
    last_tokens: &'a [LastToken],
    sampler: &'a mut DeviceSampler,
    launch: u64,
}

impl Slots for HostSlots<'_> {
    fn last_token(&self, slot: usize) -> Option<i32> {
        match self.last_tokens[slot] {
            LastToken::Known(token) => Some(token as i32),
            // The device holds the last draw only. An older one has been collected: two steps are in flight at most.
            LastToken::Drawn { launch, row } if launch + 1 == self.launch => Some(-1 - row as i32),
            LastToken::Drawn { .. } | LastToken::Nowhere => None,
        }
    }

    fn next_draw(&mut self, slot: usize) -> Option<SampleRow> {
        self.sampler.next_row(slot)
    }
}

/// Cosine and sine of every position.
fn angle_table(stream: &Stream, config: &ModelConfig, positions: usize) -> Result<DeviceBuffer<[f32; 2]>, EngineError> {
    let angles = RopeAngles::new(&config.rope, HEAD_DIM);
    let (mut cos, mut sin) = ([0.0; HEAD_DIM / 2], [0.0; HEAD_DIM / 2]);
    let mut table = Vec::with_capacity(positions * HEAD_DIM / 2);
    for position in 0..positions {
        angles.fill(position, &mut cos, &mut sin);
        table.extend(cos.iter().zip(&sin).map(|(cos, sin)| [*cos, *sin]));
    }
    Ok(stream.upload(&table)?)
}
