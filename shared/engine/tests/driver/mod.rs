//! `engine::driver` for tests, where an engine that fails is a test that fails. Shared by the engine's tests, its benches and the
//! fixture runner.
#![allow(dead_code, unused_imports, reason = "each of its users needs a part")]

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use engine::cpu::{CpuOptions, Numerics, build_group};
pub(crate) use engine::driver::{Row, greedy};
use engine::group::{EngineGroup, KvWrite};
use kv::KvSlice;
use model::{Checkpoint, WeightScheme};
use scheduler::plan::StepOutput;
use types::{KvDtype, PageGroup, ParallelLayout, SlotGroups, SlotId};

/// The library's, whose steps succeed.
pub(crate) struct Driver(engine::driver::Driver);

impl Deref for Driver {
    type Target = engine::driver::Driver;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Driver {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

/// f32 throughout, pages of 16 positions, room for 48 sequences and 32,000 positions in each attention group.
pub(crate) fn options(layout: ParallelLayout) -> CpuOptions {
    CpuOptions {
        layout,
        numerics: Numerics::F32,
        scheme: WeightScheme::default(),
        kv_dtype: KvDtype::F32,
        page_tokens: 16,
        full_pages: 2000,
        window_pages: 2000,
        max_slots: 48,
        max_step_tokens: 4096,
        publish_layers: None,
        masked_tokens: Vec::new(),
        probe: None,
    }
}

impl Driver {
    pub(crate) fn new(options: CpuOptions) -> Self {
        let checkpoint = Arc::new(Checkpoint::embedded_nano());
        let pages = [options.full_pages, options.window_pages];
        let slots = SlotGroups::new(options.max_slots, options.layout.dp).expect("the slots divide");
        let group = build_group(checkpoint, options, None, Arc::new(|_| {})).expect("nano runs in this layout");
        Self::over_groups(group, pages, slots)
    }

    pub(crate) fn over(group: EngineGroup, pages: [u32; 2]) -> Self {
        Self(engine::driver::Driver::over(group, pages))
    }

    pub(crate) fn over_groups(group: EngineGroup, pages: [u32; 2], slots: SlotGroups) -> Self {
        Self(engine::driver::Driver::over_groups(group, pages, slots))
    }

    /// A slot for each sequence number, such that neighbours are in different attention groups, and number 0 is not in the first.
    pub(crate) fn spread(&self, number: u32) -> u32 {
        let (dp, per_group) = (self.slots.dp(), self.slots.per_group());
        (number + 1) % dp * per_group + number / dp
    }

    /// Gives a sequence pages up to position `end`.
    pub(crate) fn grow(&mut self, slot: u32, position: u32, end: u32) {
        self.0.grow(slot, position, end).expect("the pool has room for the test");
    }

    /// Launches a step.
    pub(crate) fn launch(&mut self, rows: Vec<Row>) {
        self.0.launch(rows).expect("no rank is lost");
    }

    /// Launches a step and waits for it.
    pub(crate) fn step(&mut self, rows: Vec<Row>) -> StepOutput {
        self.0.step(rows).expect("no rank is lost")
    }
}

/// Fills the first page of a sequence with NaNs, in one head of the first layer of full attention.
pub(crate) fn damage(driver: &Driver, slot: u32) {
    let layout = driver.group.kv_layout();
    let layer = layout.layers(PageGroup::Full)[0];
    let slice = KvSlice { group: PageGroup::Full, layer, page: 0, head_start: 0, head_count: 1 };
    let rank = layout.rank_of(driver.slots.of(SlotId(slot)), 0);
    // All bits set are a NaN in f32, bf16 and E4M3.
    let write = KvWrite { slice, page: driver.sequences[&slot].full[0], bytes: vec![0xff; layout.head_bytes()] };
    driver.group.import_kv(rank, vec![write]).expect("the slice is on this rank");
}

/// Copies all pages of a slot from one group to another, head by head, as a transfer would.
pub(crate) fn copy_kv(from: &Driver, to: &Driver, slot: u32) {
    let layouts = [from.group.kv_layout(), to.group.kv_layout()];
    let (source, target) = (&from.sequences[&slot], &to.sequences[&slot]);
    let group_of = |driver: &Driver| driver.slots.of(SlotId(slot));
    for (group, source, target) in
        [(PageGroup::Full, &source.full, &target.full), (PageGroup::Window, &source.window, &target.window)]
    {
        for &layer in layouts[0].layers(group) {
            for head_start in 0..layouts[0].kv_heads {
                for page in 0..source.len().min(target.len()) {
                    let slice = KvSlice { group, layer, page: page as u32, head_start, head_count: 1 };
                    let read = from
                        .group
                        .export_kv(layouts[0].rank_of(group_of(from), head_start), vec![(slice, source[page])]);
                    let bytes = read.expect("the slice is on this rank").remove(0);
                    let write = KvWrite { slice, page: target[page], bytes };
                    to.group
                        .import_kv(layouts[1].rank_of(group_of(to), head_start), vec![write])
                        .expect("the slice is on this rank");
                }
            }
        }
    }
}
