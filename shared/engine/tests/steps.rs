//! Steps through a whole group: sampling, steps in flight, what listeners see, and plans or layouts that cannot be.
#![allow(clippy::unwrap_used, reason = "tests, with parts outside of test functions")]

mod driver;

use std::iter::once;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use driver::{Driver, Row, damage, greedy, options};
use engine::cpu::{CpuOptions, LoadProgress, build_group, kv_layout};
use engine::{EngineError, KvListener, KvReader};
use kv::KvSlice;
use model::Checkpoint;
use scheduler::mask::{MaskFailure, MaskPromise};
use scheduler::plan::{RowFailure, RowOutputKind, RowTokens, StepOutput, StepPlan, StepRow};
use types::{PageId, ParallelLayout, Sampling, SlotId, TokenId, TokenMask};

const TP4_EP4: ParallelLayout = ParallelLayout { tp: 4, ep: 4, dp: 1 };
const EP4_DP2_TP2: ParallelLayout = ParallelLayout { tp: 2, ep: 4, dp: 2 };

fn prompt(len: u32) -> Vec<TokenId> {
    (0..len).map(|i| (i * 97 + 11) % 2016).collect()
}

/// Samples `n` tokens in one slot, the next step always launched before the last one is read.
fn sample_ahead(driver: &mut Driver, slot: u32, sampling: &Sampling, n: usize) -> Vec<TokenId> {
    let prompt = prompt(40);
    driver.bind(slot, &prompt, sampling.clone());
    driver.launch(vec![Row::new(slot, &prompt, RowOutputKind::Sample)]);
    let mut tokens = Vec::new();
    for left in (0..n).rev() {
        if left > 0 {
            driver.launch(vec![Row::decode(slot)]);
        }
        let output = driver.group.collect().expect("no rank is lost");
        tokens.push(output.rows[0].sampled.as_ref().expect("the row samples").token);
    }
    driver.end(slot);
    tokens
}

#[test]
fn tokens_are_the_same_run_ahead_or_fed_back_in_every_layout() {
    let sampling = Sampling { seed: 77, temperature: 1.5, presence_penalty: 0.5, ..Sampling::default() };
    let mut fed_back = Driver::new(options(ParallelLayout::tp(1)));
    fed_back.bind(0, &prompt(40), sampling.clone());
    let mut next = prompt(40);
    let mut want = Vec::new();
    for _ in 0..30 {
        let output = fed_back.step(vec![Row::new(0, &next, RowOutputKind::Sample)]);
        want.push(output.rows[0].sampled.as_ref().expect("the row samples").token);
        next = vec![want[want.len() - 1]];
    }
    for layout in [ParallelLayout::tp(1), ParallelLayout::tp(2), TP4_EP4, EP4_DP2_TP2] {
        let mut driver = Driver::new(options(layout));
        for slot in [5, 47] {
            assert_eq!(sample_ahead(&mut driver, slot, &sampling, 30), want, "{layout}, slot {slot}");
        }
    }
}

#[test]
fn masked_tokens_are_never_sampled_but_their_logits_are_returned() {
    let masked_tokens = vec![0..1000, 1001..2048];
    let mut driver = Driver::new(CpuOptions { masked_tokens, ..options(TP4_EP4) });
    let sampling = Sampling { temperature: 100.0, ..Sampling::default() };
    assert_eq!(sample_ahead(&mut driver, 0, &sampling, 5), [1000; 5]);
    driver.bind(0, &prompt(3), sampling);
    let output = driver.step(vec![Row::new(0, &prompt(3), RowOutputKind::LastLogits)]);
    assert_eq!(output.rows[0].logits.len(), 2048);
    assert!(output.rows[0].logits.iter().all(|logit| logit.is_finite()));
}

/// A slice as rank `rank` had it when it was published.
struct Published {
    rank: u32,
    slice: KvSlice,
    page: PageId,
    bytes: Vec<u8>,
}

/// Notes each call, and the bytes of one head of each layer at that time.
#[derive(Default)]
struct Recorder {
    calls: Mutex<Vec<(u32, u64, Range<u32>)>>,
    heads: Mutex<Vec<Published>>,
}

impl KvListener for Recorder {
    fn layers_ready(&self, rank: u32, plan: &StepPlan, layers: Range<u32>, kv: &dyn KvReader) {
        self.calls.lock().unwrap().push((rank, plan.step, layers.clone()));
        let model = Checkpoint::embedded_nano();
        let layout = kv_layout(model.config(), &options(ParallelLayout::tp(2)));
        for layer in layers {
            let group = model.config().page_group(layer as usize);
            let slice = KvSlice { group, layer, page: 0, head_start: layout.rank_heads(rank).start, head_count: 2 };
            let page = plan.pages.iter().find(|delta| delta.group == group).expect("the plan has pages").append[0];
            let mut bytes = vec![0; 2 * layout.head_bytes()];
            kv.export_kv(&slice, page, &mut bytes).expect("the slice is on this rank");
            self.heads.lock().unwrap().push(Published { rank, slice, page, bytes });
        }
    }
}

#[test]
fn a_listener_sees_each_layer_once_with_its_keys_and_values() {
    for (publish_layers, ranges) in
        [(None, vec![0..1, 1..2, 2..3, 3..4]), (Some(3), vec![0..3, 3..4]), (Some(9), once(0..4).collect())]
    {
        let recorder = Arc::new(Recorder::default());
        let options = CpuOptions { publish_layers, ..options(ParallelLayout::tp(2)) };
        let pages = [options.full_pages, options.window_pages];
        let checkpoint = Arc::new(Checkpoint::embedded_nano());
        let group = build_group(checkpoint, options, Some(recorder.clone()), Arc::new(|_| {})).expect("nano runs");
        let mut driver = Driver::over(group, pages);
        driver.bind(0, &prompt(20), Sampling::default());
        let mut row = Row::new(0, &prompt(20), RowOutputKind::None);
        row.publish_kv = true;
        driver.step(vec![row]);
        driver.step(vec![Row::new(0, &[1], RowOutputKind::None)]); // not published
        for rank in 0..2 {
            let calls = recorder.calls.lock().unwrap();
            let seen: Vec<_> =
                calls.iter().filter(|call| call.0 == rank).map(|call| (call.1, call.2.clone())).collect();
            let want: Vec<_> = ranges.iter().map(|range| (0, range.clone())).collect();
            assert_eq!(seen, want, "rank {rank}");
        }
        for Published { rank, slice, page, bytes } in recorder.heads.lock().unwrap().iter() {
            assert!(bytes.iter().any(|byte| *byte != 0), "{slice:?} was empty");
            let now =
                driver.group.export_kv(*rank, vec![(*slice, *page)]).expect("the slice is on this rank").remove(0);
            assert!(now == *bytes, "rank {rank} {slice:?} changed after it was published");
        }
    }
}

/// Two steps in flight, as on a device: the mask of the second comes when the first has been collected, and that of the third when it is launched
/// already. Also where the other row is of another attention group, which waits for no mask.
#[test]
fn masks_of_a_step_ahead_may_depend_on_the_step_before() {
    for (layout, other) in [(ParallelLayout::tp(2), 1), (EP4_DP2_TP2, 1), (EP4_DP2_TP2, 47)] {
        masks_ahead(&mut Driver::new(options(layout)), other);
    }
}

fn masks_ahead(driver: &mut Driver, other: u32) {
    driver.bind(0, &[1, 2, 3], greedy());
    driver.bind(other, &[4, 5], greedy());
    let [first, second, third] = [(); 3].map(|()| MaskPromise::new());
    let only = |token: TokenId| {
        let word = |idx| if idx == token / 32 { 1 << (token % 32) } else { 0 };
        Ok(TokenMask::from_words((0..64).map(word).collect()))
    };
    let token = |output: &StepOutput, row: usize| output.rows[row].sampled.as_ref().map(|sampled| sampled.token);
    let rows = vec![
        Row::new(0, &[1, 2, 3], RowOutputKind::Sample).masked(&first),
        Row::new(other, &[4, 5], RowOutputKind::Sample),
    ];
    driver.launch(rows);
    driver.launch(vec![Row::decode(0).masked(&second), Row::decode(other)]);
    first.settle(only(77));
    let output = driver.group.collect().expect("no rank is lost");
    assert_eq!(token(&output, 0), Some(77));
    assert!(token(&output, 1).is_some());
    driver.launch(vec![Row::decode(0).masked(&third), Row::decode(other)]);
    second.settle(only(78));
    let output = driver.group.collect().expect("no rank is lost");
    assert_eq!(token(&output, 0), Some(78));
    third.settle(Err(MaskFailure::Grammar("no way on".into())));
    let output = driver.group.collect().expect("no rank is lost");
    assert_eq!(token(&output, 0), None, "never a token that the grammar might forbid");
    assert!(token(&output, 1).is_some(), "other rows go on");
    let output = driver.step(vec![Row::decode(0), Row::decode(other)]);
    assert!(token(&output, 1).is_some());
}

/// A damaged page is one sequence's: its rows say so, also those of a step that ran ahead, and all others are as they would have been.
/// Also where the other row is of another attention group.
#[test]
fn a_damaged_page_breaks_its_own_sequence_and_no_other() {
    for (layout, other) in [(ParallelLayout::tp(1), 1), (ParallelLayout::tp(2), 1), (EP4_DP2_TP2, 1), (EP4_DP2_TP2, 47)]
    {
        let mut driver = Driver::new(options(layout));
        let sound = two_sequences(&mut driver, other, false);
        assert!(sound.iter().flatten().all(Result::is_ok), "{layout}: {sound:?}");
        let broken = two_sequences(&mut driver, other, true);
        let failed = [Err(RowFailure::NotANumber); 3];
        assert_eq!((broken[0][0], &broken[0][1..]), (sound[0][0], &failed[..]), "{layout}");
        assert_eq!(broken[1], sound[1], "{layout}: the other sequence, in slot {other}");
        // The page goes to another sequence, which reads no more than it has written.
        assert_eq!(two_sequences(&mut driver, other, false), sound, "{layout}");
    }
}

/// Four tokens each of sequences in slots 0 and `other`, decode running ahead; a page of the first is damaged after its first token.
fn two_sequences(driver: &mut Driver, other: u32, damages: bool) -> [Vec<Result<TokenId, RowFailure>>; 2] {
    let slots = [0, other];
    let prompts = [prompt(40), prompt(23)];
    let mut tokens = [Vec::new(), Vec::new()];
    let mut take = |output: StepOutput| {
        for (tokens, row) in tokens.iter_mut().zip(output.rows) {
            let token = row.sampled.map(|sampled| sampled.token);
            assert!(token.is_some() != row.failure.is_some(), "a row has a token or says why not");
            tokens.push(token.ok_or_else(|| row.failure.expect("asserted above")));
        }
    };
    slots.iter().zip(&prompts).for_each(|(slot, prompt)| driver.bind(*slot, prompt, greedy()));
    let rows = slots.iter().zip(&prompts).map(|(slot, prompt)| Row::new(*slot, prompt, RowOutputKind::Sample));
    take(driver.step(rows.collect()));
    if damages {
        damage(driver, slots[0]);
    }
    let decode = || slots.map(Row::decode).into();
    driver.launch(decode());
    driver.launch(decode());
    take(driver.group.collect().expect("no rank is lost"));
    driver.launch(decode());
    for _ in 0..2 {
        take(driver.group.collect().expect("no rank is lost"));
    }
    slots.into_iter().for_each(|slot| driver.end(slot));
    tokens
}

#[test]
fn a_plan_that_cannot_be_run_names_step_and_reason() {
    let row = |slot, tokens: Vec<TokenId>| StepRow {
        slot: SlotId(slot),
        position: 0,
        tokens: RowTokens::Known(tokens),
        output: RowOutputKind::None,
        publish_kv: false,
        mask: None,
    };
    let cases = [
        (vec![row(0, vec![1])], "lacks pages"),
        (vec![row(99, vec![1])], "slot 99 does not exist"),
        (vec![row(0, vec![2048])], "token 2048"),
        (vec![row(0, vec![])], "no tokens"),
    ];
    for (rows, reason) in cases {
        let driver = Driver::new(options(ParallelLayout::tp(2)));
        // Already the launch may tell, if the first rank to fail is quick.
        let plan = Arc::new(StepPlan { step: 8, rows, ..StepPlan::default() });
        match driver.group.launch(plan).and_then(|()| driver.group.collect()) {
            Err(EngineError::RankLost { reason: text, .. }) => {
                assert!(text.starts_with("step 8 cannot be run") && text.contains(reason), "{text}");
            }
            other => panic!("{reason}: {other:?}"),
        }
    }
}

#[test]
fn a_layout_that_cannot_be_is_refused() {
    let build = |options| {
        let checkpoint = Arc::new(Checkpoint::embedded_nano());
        build_group(checkpoint, options, None, Arc::new(|_| {})).map(drop).expect_err("it cannot be")
    };
    assert!(matches!(build(options(ParallelLayout::tp(8))), EngineError::Layout(_)), "nano has 4 kv heads");
    let uneven = CpuOptions { max_slots: 47, ..options(EP4_DP2_TP2) };
    assert!(matches!(build(uneven), EngineError::Setup(_)), "47 slots over 2 groups");
}

#[test]
fn keys_and_values_are_not_published_with_data_parallelism() {
    let checkpoint = Arc::new(Checkpoint::embedded_nano());
    let listener = Arc::new(Recorder::default());
    let error = build_group(checkpoint, options(EP4_DP2_TP2), Some(listener), Arc::new(|_| {})).map(drop);
    let error = error.expect_err("prefill has one attention group").to_string();
    assert!(error.contains("EP4 DP2 TP2"), "{error}");
}

#[test]
fn progress_rises_to_its_total_on_every_rank() {
    let seen: Arc<Mutex<Vec<LoadProgress>>> = Arc::default();
    let progress = {
        let seen = seen.clone();
        move |progress| seen.lock().unwrap().push(progress)
    };
    let checkpoint = Arc::new(Checkpoint::embedded_nano());
    drop(build_group(checkpoint, options(TP4_EP4), None, Arc::new(progress)).expect("nano runs"));
    for rank in 0..4 {
        let seen = seen.lock().unwrap();
        let of_rank: Vec<_> = seen.iter().filter(|progress| progress.rank == rank).collect();
        assert!(of_rank.is_sorted_by_key(|progress| progress.done) && of_rank.len() > 4);
        let last = of_rank[of_rank.len() - 1];
        assert_eq!(last.done, last.total);
    }
}

/// gpt-oss-nano with one element of one bf16 tensor turned into NaN.
fn nano_with_nan(tensor: &str) -> tempfile::TempDir {
    let nano = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/gpt-oss-nano");
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "generation_config.json", "tokenizer.json"] {
        std::fs::copy(nano.join(file), folder.path().join(file)).unwrap();
    }
    let mut bytes = std::fs::read(nano.join("model.safetensors")).unwrap();
    let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let start = 8 + header + metadata.info(tensor).unwrap().data_offsets.0;
    bytes[start..start + 2].copy_from_slice(&half::bf16::NAN.to_le_bytes());
    std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    folder
}

#[test]
fn logits_that_are_no_numbers_are_never_sampled() {
    let folder = nano_with_nan("model.norm.weight");
    let checkpoint = Arc::new(Checkpoint::open(folder.path()).unwrap());
    let options = options(ParallelLayout::tp(1));
    let pages = [options.full_pages, options.window_pages];
    let mut driver = Driver::over(build_group(checkpoint, options, None, Arc::new(|_| {})).unwrap(), pages);
    driver.bind(3, &prompt(5), greedy());
    driver.launch(vec![Row::new(3, &prompt(5), RowOutputKind::Sample)]);
    let rows = driver.group.collect().unwrap().rows;
    let [row] = &rows[..] else { panic!("one row was launched: {rows:?}") };
    assert_eq!((row.slot, &row.sampled, row.failure), (SlotId(3), &None, Some(RowFailure::NotANumber)));
}
