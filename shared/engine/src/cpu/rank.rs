//! One rank: slots, samplers and cache around the forward pass.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use kv::KvSlice;
use model::rope::RopeAngles;
use model::{ModelConfig, ShardPlan};
use scheduler::plan::{RowFailure, RowOutput, RowOutputKind, StepOutput, StepPlan, StepRow};
use types::{DpGroup, KvLayout, PageId, SlotGroups, SlotId, TokenId};

use super::batch::{Batch, Limits};
use super::forward::{Forward, RankModel, Workspace};
use super::kv_pool::KvCache;
use super::weights::PackedWeights;
use super::{CpuOptions, Probe, kv_layout};
use crate::kv_slice::locate;
use crate::link::Link;
use crate::sampling::{Sampler, SlotSampler, are_numbers};
use crate::simd::Simd;
use crate::vector::{Exact, Precision, ToBf16};
use crate::{Engine, EngineError, KvListener, KvReader};

/// The ways from a rank to others.
pub(crate) struct Links {
    /// To its attention group, over which heads are split.
    pub(crate) group: Link,
    /// To all ranks, over which experts are split.
    pub(crate) world: Link,
}

/// A rank of the CPU engine.
pub(crate) struct CpuRank {
    model: RankModel,
    layout: KvLayout,
    limits: Limits,
    compute: Precision,
    cache: KvCache,
    links: Links,
    work: Workspace,
    batch: Batch,
    /// The last token that each slot sampled; kept by every rank of the slot's attention group.
    last_sampled: Vec<TokenId>,
    /// Sampling state of each slot; kept by the first rank of its attention group.
    samplers: Vec<Option<SlotSampler>>,
    sampler: Sampler,
    masked_tokens: Vec<Range<TokenId>>,
    listener: Option<Arc<dyn KvListener>>,
    publish_layers: usize,
    probe: Option<Arc<dyn Probe>>,
    /// A step with masked rows that has yet to sample, and its logits.
    unsampled: Option<(Arc<StepPlan>, Vec<f32>)>,
    /// Steps computed and not yet collected.
    outputs: VecDeque<StepOutput>,
}

impl CpuRank {
    pub(crate) fn new(
        config: &ModelConfig,
        plan: ShardPlan,
        weights: PackedWeights,
        (options, slots): (&CpuOptions, SlotGroups),
        links: Links,
        listener: Option<Arc<dyn KvListener>>,
    ) -> Self {
        let layout = kv_layout(config, options);
        let num_slots = options.max_slots as usize;
        Self {
            cache: KvCache::new(&layout, options.full_pages, options.window_pages, options.max_slots),
            layout,
            limits: Limits {
                max_step_tokens: options.max_step_tokens as usize,
                vocab_size: config.vocab_size,
                window: config.window,
                slots,
                group: DpGroup(plan.dp_rank as u32),
            },
            compute: options.numerics.compute,
            links,
            work: Workspace::default(),
            batch: Batch::default(),
            last_sampled: vec![0; num_slots],
            samplers: vec![None; num_slots],
            sampler: Sampler::default(),
            masked_tokens: options.masked_tokens.clone(),
            listener,
            publish_layers: options
                .publish_layers
                .map_or(config.num_layers.div_ceil(4), |layers| layers as usize)
                .max(1),
            probe: options.probe.clone().filter(|_| plan.rank == 0),
            unsampled: None,
            outputs: VecDeque::new(),
            model: RankModel {
                config: config.clone(),
                plan,
                weights,
                rope: RopeAngles::new(&config.rope, config.head_dim),
                routing: options.numerics.routing,
                simd: Simd::detect(),
            },
        }
    }

    /// Whether the rank samples for its attention group.
    const fn leads(&self) -> bool {
        self.model.plan.tp_rank == 0
    }

    fn is_own(&self, row: &StepRow) -> bool {
        self.limits.is_own(row.slot)
    }

    /// Slots and pages, before the rows. Those of other attention groups are no concern of this rank: the same page number means another page
    /// there.
    fn apply(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        let fail = |reason: String| EngineError::Plan { step: plan.step, reason };
        let slots = self.samplers.len();
        let check = |slot: SlotId| {
            let idx = slot.0 as usize;
            if idx < slots { Ok(idx) } else { Err(fail(format!("slot {idx} is beyond the engine's {slots}"))) }
        };
        let (limits, leads) = (&self.limits, self.leads());
        for slot in &plan.unbind {
            let idx = check(*slot)?;
            if limits.is_own(*slot) {
                self.cache.forget(idx);
                self.samplers[idx] = None;
            }
        }
        for binding in &plan.bind {
            let idx = check(binding.slot)?;
            if limits.is_own(binding.slot) {
                self.cache.forget(idx);
                self.samplers[idx] = leads.then(|| SlotSampler::new(binding));
            }
        }
        for delta in &plan.pages {
            check(delta.slot)?;
            if limits.is_own(delta.slot) {
                self.cache.apply(delta).map_err(fail)?;
            }
        }
        Ok(())
    }

    fn forward(&mut self, plan: &StepPlan) -> Result<Vec<f32>, EngineError> {
        let (listener, publish_layers, layers) =
            (self.listener.as_deref(), self.publish_layers, self.model.config.num_layers);
        let (model, layout) = (&self.model, &self.layout);
        let publishes = self.batch.publishes;
        let stored = |layer: usize, cache: &KvCache| {
            let end = layer + 1;
            let Some(listener) =
                listener.filter(|_| publishes && (end.is_multiple_of(publish_layers) || end == layers))
            else {
                return;
            };
            let start = layer / publish_layers * publish_layers;
            listener.layers_ready(
                model.plan.rank as u32,
                plan,
                start as u32..end as u32,
                &RankKv { cache, model, layout },
            );
        };
        macro_rules! run {
            ($rounding:ty) => {
                Forward {
                    model,
                    cache: &mut self.cache,
                    links: &mut self.links,
                    work: &mut self.work,
                    batch: &self.batch,
                    stored: &stored,
                    probe: self.probe.as_deref(),
                    rounding: PhantomData::<$rounding>,
                }
                .run()
            };
        }
        match self.compute {
            Precision::F32 => run!(Exact),
            Precision::Bf16 => run!(ToBf16),
        }
    }

    /// The leader: draws tokens and hands out logits, for the rows of its attention group. `logits`: `[wanted, vocabulary]`.
    fn outputs(&mut self, plan: &StepPlan, mut logits: Vec<f32>) -> Result<Vec<RowOutput>, EngineError> {
        let vocab = self.limits.vocab_size;
        let mut outputs = Vec::with_capacity(plan.rows.len());
        let mut spans = self.batch.rows.iter();
        for row in &plan.rows {
            let mut output = RowOutput { slot: row.slot, sampled: None, failure: None, logits: Vec::new() };
            let Some(span) = self.limits.is_own(row.slot).then(|| spans.next()).flatten() else {
                outputs.push(output);
                continue;
            };
            let logits = &mut logits[span.logits.start * vocab..span.logits.end * vocab];
            match row.output {
                RowOutputKind::None => {}
                RowOutputKind::LastLogits | RowOutputKind::AllLogits => output.logits = logits.to_vec(),
                RowOutputKind::Sample => {
                    let slot = self.samplers[span.slot].as_mut().ok_or_else(|| EngineError::Plan {
                        step: plan.step,
                        reason: format!("slot {} samples but is not bound", span.slot),
                    })?;
                    // Before the masks, which might hide it.
                    let sound = are_numbers(logits);
                    for masked in &self.masked_tokens {
                        logits[masked.start as usize..masked.end as usize].fill(f32::NEG_INFINITY);
                    }
                    // Without its mask the row yields nothing: never a token that the grammar might forbid.
                    let mut sample = |mask| self.sampler.sample(slot, logits, mask);
                    let sampled = match row.mask.as_ref().map(|mask| mask.wait()) {
                        Some(Err(_)) => Err(RowFailure::NothingAllowed),
                        _ if !sound => Err(RowFailure::NotANumber),
                        None => Ok(sample(None)),
                        Some(Ok(mask)) => Ok(sample(Some(mask))),
                    };
                    match sampled {
                        Ok(token) => output.sampled = Some(token),
                        Err(failure) => output.failure = Some(failure),
                    }
                }
            }
            outputs.push(output);
        }
        Ok(outputs)
    }

    fn sample_late(&mut self) -> Result<(), EngineError> {
        self.unsampled.take().map_or(Ok(()), |(plan, logits)| self.finish(&plan, logits))
    }

    /// What follows the forward pass: sampling, and sharing what was sampled.
    fn finish(&mut self, plan: &StepPlan, logits: Vec<f32>) -> Result<(), EngineError> {
        let rows = if self.leads() {
            self.outputs(plan, logits)?
        } else {
            let empty = |row: &StepRow| RowOutput { slot: row.slot, sampled: None, failure: None, logits: Vec::new() };
            plan.rows.iter().map(empty).collect()
        };
        if plan.rows.iter().any(|row| self.is_own(row) && row.output == RowOutputKind::Sample) {
            self.share_sampled(plan, &rows)?;
        }
        self.outputs.push_back(StepOutput { step: plan.step, rows });
        Ok(())
    }

    /// Tells the ranks of the attention group what their leader sampled, so that a later step may begin with it.
    fn share_sampled(&mut self, plan: &StepPlan, outputs: &[RowOutput]) -> Result<(), EngineError> {
        let Self { links, limits, last_sampled, .. } = self;
        let samples = |row: &StepRow| limits.is_own(row.slot) && row.output == RowOutputKind::Sample;
        let sampling = plan.rows.iter().filter(|row| samples(row)).map(|row| row.slot.0 as usize);
        let publish = |out: &mut Vec<f32>| {
            out.clear();
            // A row that failed ends its sequence; if a step behind it is planned already, that must find some token.
            let rows = plan.rows.iter().zip(outputs).filter(|(row, _)| samples(row));
            let tokens = rows.map(|(_, output)| output.sampled.as_ref().map_or(0, |sampled| sampled.token));
            out.extend(tokens.map(f32::from_bits));
        };
        links.group.exchange(publish, |parts| {
            for (slot, token) in sampling.zip(parts[0]) {
                last_sampled[slot] = token.to_bits();
            }
        })
    }
}

impl Engine for CpuRank {
    /// Computes the step. With masked rows it samples no sooner than the step is collected or another one launched: the masks may depend on
    /// tokens of the step before, which can be collected meanwhile. That holds on all ranks of an attention group alike, so that they meet in
    /// the same exchange.
    fn launch(&mut self, plan: &Arc<StepPlan>) -> Result<(), EngineError> {
        self.sample_late()?;
        self.apply(plan)?;
        let mut batch = std::mem::take(&mut self.batch);
        batch.fill(plan, &self.last_sampled, &self.cache, &self.limits)?;
        self.batch = batch;
        let logits = self.forward(plan)?;
        if plan.rows.iter().any(|row| self.is_own(row) && row.mask.is_some()) {
            self.unsampled = Some((plan.clone(), logits));
            return Ok(());
        }
        self.finish(plan, logits)
    }

    fn collect(&mut self) -> Result<StepOutput, EngineError> {
        if self.outputs.is_empty() {
            self.sample_late()?;
        }
        let reason = || EngineError::Setup("collect without a launched step".into());
        self.outputs.pop_front().ok_or_else(reason)
    }

    fn export_kv(&self, slice: &KvSlice, page: PageId, out: &mut [u8]) -> Result<(), EngineError> {
        RankKv { cache: &self.cache, model: &self.model, layout: &self.layout }.export_kv(slice, page, out)
    }

    fn import_kv(&mut self, slice: &KvSlice, page: PageId, bytes: &[u8]) -> Result<(), EngineError> {
        let Self { model, layout, cache, .. } = self;
        let mut write = || -> Result<(), String> {
            let (layer, heads) = locate(&model.config, &model.plan, layout, slice, bytes.len())?;
            cache.bytes_mut(slice, layer, heads, page)?.copy_from_slice(bytes);
            Ok(())
        };
        let rank = model.plan.rank as u32;
        write().map_err(|reason| EngineError::KvSlice { slice: *slice, rank, reason })
    }
}

/// Read access to the cache of a rank.
struct RankKv<'a> {
    cache: &'a KvCache,
    model: &'a RankModel,
    layout: &'a KvLayout,
}

impl KvReader for RankKv<'_> {
    fn export_kv(&self, slice: &KvSlice, page: PageId, out: &mut [u8]) -> Result<(), EngineError> {
        let mut read = || -> Result<(), String> {
            let (layer, heads) = locate(&self.model.config, &self.model.plan, self.layout, slice, out.len())?;
            out.copy_from_slice(self.cache.bytes(slice, layer, heads, page)?);
            Ok(())
        };
        let rank = self.model.plan.rank as u32;
        read().map_err(|reason| EngineError::KvSlice { slice: *slice, rank, reason })
    }
}
