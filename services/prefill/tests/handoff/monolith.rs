//! What a request yields without any service, transfer or scheduler: one engine, one sequence, one step for the prompt.

use std::sync::{Arc, Mutex};

use engine::cpu::{CpuOptions, Numerics, build_group};
use engine::group::EngineGroup;
use model::Checkpoint;
use scheduler::plan::{PageDelta, RowOutputKind, RowTokens, SlotBinding, StepPlan, StepRow};
use types::{GenerateRequest, KvDtype, PageGroup, PageId, ParallelLayout, SlotId, TokenId};
use worker::{ModelSource, OpenModel};

const PAGE_TOKENS: u32 = 16;
const PAGES: u32 = 72;

pub(crate) struct Monolith {
    engine: EngineGroup,
    next_step: Mutex<u64>,
}

impl Monolith {
    pub(crate) fn new() -> Self {
        // The vocabulary's unused numbers are masked in the services; here they are read the same way.
        let masked_tokens = OpenModel::open(&ModelSource::EmbeddedNano).unwrap().masked_tokens().to_vec();
        let options = CpuOptions {
            layout: ParallelLayout::tp(1),
            numerics: Numerics::F32,
            scheme: model::WeightScheme::default(),
            kv_dtype: KvDtype::F32,
            page_tokens: PAGE_TOKENS,
            full_pages: PAGES,
            window_pages: PAGES,
            max_slots: 1,
            max_step_tokens: PAGE_TOKENS * PAGES,
            publish_layers: None,
            masked_tokens,
            probe: None,
        };
        let checkpoint = Arc::new(Checkpoint::embedded_nano());
        let engine = build_group(checkpoint, options, None, Arc::new(|_| {})).unwrap();
        Self { engine, next_step: Mutex::new(0) }
    }

    pub(crate) fn generate(&self, request: &GenerateRequest) -> Vec<TokenId> {
        let mut step = self.next_step.lock().unwrap();
        let slot = SlotId(0);
        let mut plan =
            StepPlan { step: *step, unbind: if *step > 0 { vec![slot] } else { vec![] }, ..StepPlan::default() };
        plan.bind.push(SlotBinding {
            slot,
            sampling: Arc::new(request.sampling.clone()),
            prompt: request.prompt.as_slice().into(),
            generated: request.generated.clone(),
        });
        for group in PageGroup::ALL {
            plan.pages.push(PageDelta { slot, group, first_page: 0, append: (0..PAGES).map(PageId).collect() });
        }
        let mut known: Vec<TokenId> = request.prompt.iter().chain(&request.generated).copied().collect();
        let mut position = 0;
        loop {
            let tokens = RowTokens::Known(known[position as usize..].to_vec());
            plan.rows.push(StepRow {
                slot,
                position,
                tokens,
                output: RowOutputKind::Sample,
                publish_kv: false,
                mask: None,
            });
            position = known.len() as u32;
            self.engine.launch(Arc::new(plan)).unwrap();
            let token = self.engine.collect().unwrap().rows[0].sampled.clone().expect("the row samples").token;
            *step += 1;
            known.push(token);
            let output = known.len() - request.prompt.len();
            if request.stop_token_ids.contains(&token) || output >= request.max_tokens as usize {
                return known.split_off(request.prompt.len() + request.generated.len());
            }
            plan = StepPlan { step: *step, ..StepPlan::default() };
        }
    }
}
