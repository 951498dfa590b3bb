//! Sends KV from inside a step: as soon as a group of layers is computed, on each rank's own thread, while later layers compute.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::BytesMut;
use engine::{KvListener, KvReader};
use kv::{KvSlice, PageTables};
use scheduler::plan::StepPlan;
use transfer::{Carries, Part};

use crate::error::PrefillError;
use crate::handoff::Handoff;

/// What a step in flight sends.
pub(crate) struct Export {
    /// The plan's number.
    pub(crate) step: u64,
    pub(crate) handoff: Arc<Handoff>,
    pub(crate) tables: PageTables,
    pub(crate) positions: Range<u32>,
}

/// The engine's listener. Parts are handed over without waiting: the step was launched only when its KV had room in the lane.
#[derive(Default)]
pub struct Exporter {
    /// At most as many as there are steps in flight.
    exports: Mutex<VecDeque<Arc<Export>>>,
}

impl Exporter {
    /// Announces what the step will send, before it is launched.
    pub(crate) fn begin(&self, export: Export) {
        self.exports().push_back(Arc::new(export));
    }

    /// The step is complete on every rank.
    pub(crate) fn end(&self, step: u64) {
        self.exports().retain(|export| export.step != step);
    }

    fn exports(&self) -> MutexGuard<'_, VecDeque<Arc<Export>>> {
        self.exports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KvListener for Exporter {
    fn layers_ready(&self, rank: u32, plan: &StepPlan, layers: Range<u32>, kv: &dyn KvReader) {
        let export = self.exports().iter().find(|export| export.step == plan.step).cloned();
        let Some(export) = export else { return };
        if let Err(error) = export.send(rank, layers, kv) {
            export.handoff.fail(error);
        }
    }
}

impl Export {
    fn send(&self, rank: u32, layers: Range<u32>, kv: &dyn KvReader) -> Result<(), PrefillError> {
        let (map, sender) = (&self.handoff.map, self.handoff.sender()?);
        let page = |slice: &KvSlice| {
            self.tables.physical(slice).ok_or_else(|| PrefillError::Export(format!("{slice:?} has no page")))
        };
        let slices = map.ready_slices(rank, layers, self.positions.clone());
        if sender.carries() == Carries::Pages {
            let places = slices.map(|slice| Ok((slice, page(&slice)?))).collect::<Result<Vec<_>, PrefillError>>()?;
            if !places.is_empty() {
                self.handoff.part_leaves();
                sender.pages(rank, &places)?;
            }
            return Ok(());
        }
        for slice in slices {
            let page = page(&slice)?;
            let mut bytes = BytesMut::zeroed(map.slice_bytes(&slice));
            kv.export_kv(&slice, page, &mut bytes)?;
            self.handoff.part_leaves();
            sender.part(Part::new(slice, bytes.freeze()))?;
        }
        Ok(())
    }
}
