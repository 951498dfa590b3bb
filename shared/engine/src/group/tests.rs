use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use scheduler::plan::{RowOutput, RowOutputKind, RowTokens, StepRow};
use types::{KvDtype, SlotId};

use super::*;
use crate::link::{Exchange, Link};

#[derive(Clone, Copy, PartialEq)]
enum Failure {
    Panic,
    Error,
}

/// An engine whose steps are one exchange, and whose rank 2 may fail before it takes part in step 3.
struct Fake {
    rank: u32,
    link: Link,
    failure: Option<Failure>,
    done: Vec<u64>,
}

impl Engine for Fake {
    fn launch(&mut self, plan: &Arc<StepPlan>) -> Result<(), EngineError> {
        if self.rank == 2 && plan.step == 3 {
            match self.failure {
                Some(Failure::Panic) => panic!("made to"),
                Some(Failure::Error) => return Err(EngineError::Plan { step: 3, reason: "made to".into() }),
                None => {}
            }
        }
        self.link.exchange(|out| *out = vec![1.0], |all| assert_eq!(all.len(), 4))?;
        self.done.push(plan.step);
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput, EngineError> {
        Ok(StepOutput { step: self.done.remove(0), rows: Vec::new() })
    }

    fn export_kv(&self, slice: &KvSlice, page: PageId, out: &mut [u8]) -> Result<(), EngineError> {
        if slice.layer > 0 {
            return Err(EngineError::KvSlice { slice: *slice, rank: self.rank, reason: "there is one layer".into() });
        }
        out.fill(page.0 as u8);
        Ok(())
    }

    fn import_kv(&mut self, slice: &KvSlice, page: PageId, bytes: &[u8]) -> Result<(), EngineError> {
        let mut same = vec![0; bytes.len()];
        self.export_kv(slice, page, &mut same)
    }
}

fn layout() -> KvLayout {
    KvLayout {
        full_layers: vec![0],
        window_layers: Vec::new(),
        kv_heads: 4,
        head_dim: 4,
        page_tokens: 2,
        window: 128,
        dtype: KvDtype::F32,
        tp: 4,
    }
}

fn group(failure: Option<Failure>) -> EngineGroup {
    let fault = Arc::new(Fault::new(4));
    let exchange = Arc::new(Exchange::new(4, fault.clone()));
    let construct =
        move |rank: u32| Ok(Fake { rank, link: Link::new(rank as usize, exchange.clone()), failure, done: Vec::new() });
    EngineGroup::start("test", 4, layout(), fault, construct).expect("nothing fails yet")
}

fn launch(group: &EngineGroup, step: u64) -> Result<(), EngineError> {
    group.launch(Arc::new(StepPlan { step, ..StepPlan::default() }))
}

#[test]
fn steps_come_out_in_order_two_in_flight() {
    let group = group(None);
    launch(&group, 0).expect("all ranks run");
    for step in 1..50 {
        launch(&group, step).expect("all ranks run");
        assert_eq!(group.collect().expect("all ranks run").step, step - 1);
    }
    assert_eq!(group.collect().expect("all ranks run").step, 49);
    group.shutdown().expect("no rank was lost");
}

#[test]
fn every_rank_reads_its_cache_between_steps() {
    let group = group(None);
    launch(&group, 0).expect("all ranks run");
    let read = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&read);
    let slice = KvSlice { group: types::PageGroup::Full, layer: 0, page: 0, head_start: 0, head_count: 1 };
    let reader = move |rank: u32, kv: &dyn KvReader| {
        let mut bytes = [0; 3];
        kv.export_kv(&slice, PageId(7), &mut bytes).expect("there is such a page");
        seen.lock().expect("nothing panics under it").push((rank, bytes));
    };
    group.read_kv(Arc::new(reader)).expect("all ranks run");
    launch(&group, 1).expect("all ranks run");
    for step in 0..2 {
        assert_eq!(group.collect().expect("all ranks run").step, step);
    }
    group.shutdown().expect("no rank was lost");
    let mut read = std::mem::take(&mut *read.lock().expect("nothing panics under it"));
    read.sort_unstable();
    assert_eq!(read, [0, 1, 2, 3].map(|rank| (rank, [7; 3])));
}

#[test]
fn a_lost_rank_fails_the_group_and_nothing_hangs() {
    for (failure, reason) in [(Failure::Panic, "panicked: made to"), (Failure::Error, "step 3 cannot be run: made to")]
    {
        let start = Instant::now();
        let group = group(Some(failure));
        for step in 0..3 {
            launch(&group, step).expect("all ranks run");
            group.collect().expect("all ranks run");
        }
        // The other three ranks sleep in the exchange of step 3 when rank 2 goes.
        let result = launch(&group, 3).and_then(|()| group.collect().map(drop));
        let lost = |result: Result<(), EngineError>| match result {
            Err(EngineError::RankLost { rank: 2, reason }) => reason,
            other => panic!("rank 2 is lost, not {other:?}"),
        };
        assert_eq!(lost(result), reason);
        assert_eq!(lost(launch(&group, 4)), reason);
        let slice = KvSlice { group: types::PageGroup::Full, layer: 0, page: 0, head_start: 0, head_count: 1 };
        assert_eq!(lost(group.export_kv(0, vec![(slice, PageId(0))]).map(drop)), reason);
        assert_eq!(lost(group.shutdown()), reason);
        assert!(start.elapsed() < Duration::from_secs(5), "released at once, not after {:?}", start.elapsed());
    }
}

#[test]
fn a_constructor_that_fails_or_panics_fails_the_start() {
    for panics in [false, true] {
        let construct = move |rank: u32| -> Result<Fake, EngineError> {
            if rank == 1 {
                assert!(!panics, "made to");
                return Err(EngineError::Setup("made to".into()));
            }
            let fault = Arc::new(Fault::new(1));
            Ok(Fake { rank, link: Link::new(0, Arc::new(Exchange::new(1, fault))), failure: None, done: Vec::new() })
        };
        let result = EngineGroup::start("test", 3, layout(), Arc::new(Fault::new(3)), construct);
        match (panics, result.map(drop)) {
            (false, Err(EngineError::Setup(reason))) => assert_eq!(reason, "made to"),
            (true, Err(EngineError::RankLost { rank: 1, .. })) => {}
            (_, other) => panic!("unexpected {other:?}"),
        }
    }
}

#[test]
fn a_wrong_slice_is_refused_and_the_group_lives_on() {
    let group = group(None);
    let slice = |layer| KvSlice { group: types::PageGroup::Full, layer, page: 0, head_start: 3, head_count: 1 };
    let wrong = group.export_kv(3, vec![(slice(0), PageId(9)), (slice(1), PageId(9))]);
    assert!(matches!(wrong, Err(EngineError::KvSlice { rank: 3, .. })), "{wrong:?}");
    let right = group.export_kv(3, vec![(slice(0), PageId(9))]).expect("the slice is there");
    assert_eq!(right, [vec![9; layout().head_bytes()]]);
    let write = KvWrite { slice: slice(0), page: PageId(9), bytes: right[0].clone() };
    group.import_kv(3, vec![write]).expect("the slice is there");
}

/// A rank of two attention groups of two ranks: slots 0 and 1 are the first group's.
struct Half {
    rank: u32,
    plan: Option<Arc<StepPlan>>,
}

impl Engine for Half {
    fn launch(&mut self, plan: &Arc<StepPlan>) -> Result<(), EngineError> {
        self.plan = Some(plan.clone());
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput, EngineError> {
        let plan = self.plan.take().expect("a step was launched");
        let rows = plan.rows.iter().map(|row| {
            // Every rank has something to say, but only two of them are asked.
            let logits = if row.slot.0 / 2 == self.rank / 2 { vec![self.rank as f32] } else { Vec::new() };
            RowOutput { slot: row.slot, sampled: None, failure: None, logits }
        });
        Ok(StepOutput { step: plan.step, rows: rows.collect() })
    }

    fn export_kv(&self, _: &KvSlice, _: PageId, _: &mut [u8]) -> Result<(), EngineError> {
        Ok(())
    }

    fn import_kv(&mut self, _: &KvSlice, _: PageId, _: &[u8]) -> Result<(), EngineError> {
        Ok(())
    }
}

#[test]
fn each_row_comes_from_the_first_rank_of_its_attention_group() {
    let layout = KvLayout { tp: 2, ..layout() };
    let construct = |rank| Ok(Half { rank, plan: None });
    let group = EngineGroup::start("test", 4, layout, Arc::new(Fault::new(4)), construct).expect("nothing fails");
    let row = |slot| StepRow {
        slot: SlotId(slot),
        position: 0,
        tokens: RowTokens::LastSampled,
        output: RowOutputKind::LastLogits,
        publish_kv: false,
        mask: None,
    };
    group.launch(Arc::new(StepPlan { rows: [2, 0, 3, 1].map(row).into(), ..StepPlan::default() })).expect("all run");
    let output = group.collect().expect("all run");
    let rows: Vec<_> = output.rows.into_iter().map(|row| (row.slot.0, row.logits)).collect();
    assert_eq!(rows, [(2, vec![2.0]), (0, vec![0.0]), (3, vec![2.0]), (1, vec![0.0])]);
}

/// A rank whose loss is heard by the others when its engine is dropped, as kernels are that wait for it. Rank 2 fails.
struct Alarmed {
    rank: u32,
    alarm: Arc<AtomicBool>,
    fault: Arc<Fault>,
    failure: Failure,
}

impl Engine for Alarmed {
    fn launch(&mut self, plan: &Arc<StepPlan>) -> Result<(), EngineError> {
        match self.failure {
            Failure::Panic if self.rank == 2 => panic!("made to"),
            Failure::Error if self.rank == 2 => {
                return Err(EngineError::Plan { step: plan.step, reason: "made to".into() });
            }
            Failure::Panic | Failure::Error => {}
        }
        while !self.alarm.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        Err(EngineError::Setup(format!("rank {} heard the alarm", self.rank)))
    }

    fn collect(&mut self) -> Result<StepOutput, EngineError> {
        unreachable!("no step is launched to its end")
    }

    fn export_kv(&self, _: &KvSlice, _: PageId, _: &mut [u8]) -> Result<(), EngineError> {
        Ok(())
    }

    fn import_kv(&mut self, _: &KvSlice, _: PageId, _: &[u8]) -> Result<(), EngineError> {
        Ok(())
    }
}

impl Drop for Alarmed {
    fn drop(&mut self) {
        self.alarm.store(true, Ordering::Release);
        // Time for the others to be first with what they know.
        let start = Instant::now();
        while self.rank == 2 && self.fault.check().is_ok() && start.elapsed() < Duration::from_secs(5) {
            std::thread::yield_now();
        }
    }
}

#[test]
fn ranks_that_a_lost_one_wakes_are_not_blamed() {
    for (failure, reason) in [(Failure::Panic, "panicked: made to"), (Failure::Error, "step 7 cannot be run: made to")]
    {
        let (fault, alarm) = (Arc::new(Fault::new(4)), Arc::new(AtomicBool::new(false)));
        let seen = fault.clone();
        let construct = move |rank| Ok(Alarmed { rank, alarm: alarm.clone(), fault: seen.clone(), failure });
        let group = EngineGroup::start("test", 4, layout(), fault, construct).expect("nothing fails yet");
        match launch(&group, 7).and_then(|()| group.collect().map(drop)) {
            Err(EngineError::RankLost { rank: 2, reason: found }) => assert_eq!(found, reason),
            other => panic!("rank 2 is lost, not {other:?}"),
        }
    }
}
