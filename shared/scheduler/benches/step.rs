//! What scheduling costs a decode step: `plan` and `complete` of a full batch at the shape of gpt-oss-120b (18 full and 18 window layers,
//! page of 16, window of 128), on the host. A step of the engine takes milliseconds; this must vanish beside it.
//!
//! Median on one core of a busy 2-core AMD EPYC: step of 1, 32, 128 sequences 0.3, 7.8, 32 us; landing 15 ns a slice.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kv::PageMap;
use scheduler::plan::{RowOutput, StepOutput};
use scheduler::{DecodeConfig, DecodeScheduler, ReserveRequest, SequenceSpec};
use types::{Incarnation, KvDtype, KvLayout, PeerId, SampledToken, TicketId, WorkerId};

const CONTEXT_TOKENS: u32 = 1_000;

fn main() {
    divan::main();
}

fn layout(tp: u32) -> KvLayout {
    KvLayout {
        full_layers: (0..18).map(|i| 2 * i + 1).collect(),
        window_layers: (0..18).map(|i| 2 * i).collect(),
        kv_heads: 8,
        head_dim: 64,
        page_tokens: 16,
        window: 128,
        dtype: KvDtype::Bf16,
        tp,
    }
}

fn token() -> SampledToken {
    SampledToken { token: 1, logprob: None, top: Vec::new() }
}

fn reserve(scheduler: &mut DecodeScheduler, id: u128, prefill: &PeerId) {
    let sequence = SequenceSpec {
        prompt: vec![0; CONTEXT_TOKENS as usize].into(),
        generated: Vec::new(),
        sampling: Arc::default(),
        stop_token_ids: [2].into(),
        max_tokens: u32::MAX,
        constraint: None,
        cache_salt: None,
    };
    let request = ReserveRequest { ticket: TicketId(id), prefill: prefill.clone(), sequence };
    scheduler.reserve(Instant::now(), request).expect("the pools are large enough");
    scheduler.begin_landing(TicketId(id), prefill, &layout(1)).expect("the layouts fit");
}

fn land(scheduler: &mut DecodeScheduler, id: u128, prefill: &PeerId, map: &PageMap) {
    for slice in map.slices() {
        scheduler.slice_arrived(TicketId(id), prefill, &slice).expect("the slice is expected");
    }
}

fn scheduler(batch: u32) -> (DecodeScheduler, PeerId) {
    let config = DecodeConfig {
        max_sequences: batch,
        dp: 1,
        max_context_tokens: 1 << 20,
        growth_tokens: 256,
        max_row_tokens: 1,
        full_pages: 1 << 20,
        window_pages: batch * 9,
        ticket_ttl: Duration::from_secs(10),
        lookahead: false,
        remembered_tickets: 16,
    };
    let prefill = PeerId { worker: WorkerId("prefill".into()), incarnation: Incarnation(1) };
    (DecodeScheduler::new(config, layout(4)).expect("the configuration is sound"), prefill)
}

/// One step of a running batch: plan, then take in its tokens.
#[divan::bench(args = [1, 32, 128])]
fn step(bencher: divan::Bencher<'_, '_>, batch: u32) {
    let (mut scheduler, prefill) = scheduler(batch);
    let map = PageMap::new(&layout(1), &layout(4), CONTEXT_TOKENS).expect("the layouts fit");
    let mut out = Vec::new();
    for id in 0..u128::from(batch) {
        reserve(&mut scheduler, id, &prefill);
        land(&mut scheduler, id, &prefill, &map);
        scheduler.commit(TicketId(id), &prefill, token(), &mut out).expect("everything has landed");
    }
    bencher.bench_local(|| {
        let plan = scheduler.plan(&mut out).expect("the batch runs");
        let row = |row: &scheduler::plan::StepRow| RowOutput {
            slot: row.slot,
            sampled: Some(token()),
            failure: None,
            logits: Vec::new(),
        };
        let output = StepOutput { step: plan.step, rows: plan.rows.iter().map(row).collect() };
        scheduler.complete(output, &mut out).expect("the output is the plan's");
        out.drain(..).count()
    });
}

/// The arrival of all slices of one context of 1,000 tokens, TP1 to TP4.
#[divan::bench]
fn landing(bencher: divan::Bencher<'_, '_>) {
    let map = PageMap::new(&layout(1), &layout(4), CONTEXT_TOKENS).expect("the layouts fit");
    let count = divan::counter::ItemsCount::new(map.num_slices());
    let prepared = || {
        let (mut scheduler, prefill) = scheduler(1);
        reserve(&mut scheduler, 0, &prefill);
        (scheduler, prefill)
    };
    bencher
        .counter(count)
        .with_inputs(prepared)
        .bench_local_refs(|(scheduler, prefill)| land(scheduler, 0, prefill, &map));
}
