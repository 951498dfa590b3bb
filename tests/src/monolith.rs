//! A run of the model in this process, with no service and no transfer: what disaggregated answers are compared with.

use std::sync::Arc;

use anyhow::{Context, ensure};
use engine::cpu::{CpuOptions, Numerics, build_group};
use engine::group::EngineGroup;
use scheduler::plan::{PageDelta, RowOutputKind, RowTokens, SlotBinding, StepPlan, StepRow};
use types::{KvDtype, PageGroup, PageId, ParallelLayout, Sampling, SlotId};

const PAGE_TOKENS: u32 = 16;
const SLOT: SlotId = SlotId(0);

/// gpt-oss-nano on one rank, one sequence at a time, the whole prompt in one step, pages never given back while it runs.
pub struct Monolith {
    group: EngineGroup,
    step: u64,
    max_tokens: u32,
}

impl Monolith {
    /// Loads the embedded model for sequences of at most `max_tokens` tokens.
    ///
    /// # Errors
    /// When the engine cannot be built.
    pub fn nano(max_tokens: u32) -> anyhow::Result<Self> {
        let model = worker::OpenModel::open(&worker::ModelSource::EmbeddedNano)?;
        let pages = max_tokens.div_ceil(PAGE_TOKENS);
        let options = CpuOptions {
            layout: ParallelLayout::tp(1),
            numerics: Numerics::F32,
            scheme: model::WeightScheme::default(),
            kv_dtype: KvDtype::F32,
            page_tokens: PAGE_TOKENS,
            full_pages: pages,
            window_pages: pages,
            max_slots: 1,
            max_step_tokens: max_tokens,
            publish_layers: None,
            masked_tokens: model.masked_tokens().to_vec(),
            probe: None,
        };
        Ok(Self {
            group: build_group(Arc::new(model::Checkpoint::embedded_nano()), options, None, Arc::new(|_| {}))?,
            step: 0,
            max_tokens,
        })
    }

    /// Generates until `count` tokens are there or one of `stops` was drawn.
    ///
    /// # Errors
    /// When the engine fails, or the sequence is longer than the model was loaded for.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        sampling: &Sampling,
        count: u32,
        stops: &[u32],
    ) -> anyhow::Result<Vec<u32>> {
        let total = prompt.len() as u32 + count;
        ensure!(total <= self.max_tokens + 1, "{total} tokens, loaded for {}", self.max_tokens);
        let pages: Vec<PageId> = (0..self.max_tokens.div_ceil(PAGE_TOKENS)).map(PageId).collect();
        let delta = |group| PageDelta { slot: SLOT, group, first_page: 0, append: pages.clone() };
        let binding = SlotBinding {
            slot: SLOT,
            sampling: Arc::new(sampling.clone()),
            prompt: prompt.into(),
            generated: Vec::new(),
        };
        let mut plan = StepPlan { bind: vec![binding], pages: PageGroup::ALL.map(delta).into(), ..StepPlan::default() };
        let mut position = 0;
        let mut next = prompt.to_vec();
        let mut tokens = Vec::new();
        loop {
            let row_tokens = next.len() as u32;
            plan.rows = vec![StepRow {
                slot: SLOT,
                position,
                tokens: RowTokens::Known(next),
                output: RowOutputKind::Sample,
                publish_kv: false,
                mask: None,
            }];
            plan.step = self.step;
            self.step += 1;
            position += row_tokens;
            self.group.launch(Arc::new(plan))?;
            let token = self.group.collect()?.rows.pop().and_then(|row| row.sampled).context("no token sampled")?.token;
            tokens.push(token);
            if tokens.len() as u32 == count || stops.contains(&token) {
                break;
            }
            plan = StepPlan::default();
            next = vec![token];
        }
        self.group.launch(Arc::new(StepPlan { step: self.step, unbind: vec![SLOT], ..StepPlan::default() }))?;
        self.step += 1;
        self.group.collect()?;
        Ok(tokens)
    }
}
