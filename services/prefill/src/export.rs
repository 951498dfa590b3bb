//! Sends KV on each rank's own thread: from inside a step, as soon as a group of layers is computed, while later layers compute; and between
//! steps what was cached.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::BytesMut;
use engine::{KvListener, KvReader};
use kv::{KvSlice, PageTables};
use scheduler::plan::StepPlan;
use transfer::{Carries, Part};

use crate::error::PrefillError;
use crate::handoff::Handoff;

/// Some positions of a prompt that are to be sent. The lane has room for them.
pub(crate) struct Span {
    pub(crate) handoff: Arc<Handoff>,
    pub(crate) tables: Arc<PageTables>,
    pub(crate) positions: Range<u32>,
    /// Of the model.
    pub(crate) num_layers: u32,
}

/// What a step in flight sends.
pub(crate) struct Export {
    /// The plan's number.
    pub(crate) step: u64,
    pub(crate) span: Span,
    /// Ranks that have not handed over their last layer.
    pub(crate) ranks_left: AtomicU32,
}

/// The engine's listener. Parts are handed over without waiting: the step was launched only when its KV had room in the lane.
#[derive(Default)]
pub struct Exporter {
    /// Of steps in flight, and of those that some rank is still handing over: a step is collected when one rank has ended it.
    exports: Mutex<VecDeque<Arc<Export>>>,
}

impl Exporter {
    /// Announces what the step will send, before it is launched.
    pub(crate) fn begin(&self, export: Export) {
        self.exports().push_back(Arc::new(export));
    }

    fn exports(&self) -> MutexGuard<'_, VecDeque<Arc<Export>>> {
        self.exports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KvListener for Exporter {
    fn layers_ready(&self, rank: u32, plan: &StepPlan, layers: Range<u32>, kv: &dyn KvReader) {
        let export = self.exports().iter().find(|export| export.step == plan.step).cloned();
        let Some(export) = export else { return };
        let span = &export.span;
        let is_last = layers.end == span.num_layers;
        span.send(rank, layers, kv);
        if is_last && export.ranks_left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.exports().retain(|other| other.step != export.step);
            if span.ends_context() {
                span.handoff.handed_over();
            }
        }
    }
}

impl Span {
    /// Whether the context is complete with these positions.
    fn ends_context(&self) -> bool {
        self.positions.end == self.handoff.map.context_tokens()
    }

    /// Sends everything a rank has of these positions, which were computed before.
    pub(crate) fn send_all(&self, rank: u32, kv: &dyn KvReader) {
        self.send(rank, 0..self.num_layers, kv);
    }

    fn send(&self, rank: u32, layers: Range<u32>, kv: &dyn KvReader) {
        if let Err(error) = self.try_send(rank, layers, kv) {
            self.handoff.fail(error);
        }
    }

    fn try_send(&self, rank: u32, layers: Range<u32>, kv: &dyn KvReader) -> Result<(), PrefillError> {
        let map = &self.handoff.map;
        if layers.end == self.num_layers && self.ends_context() {
            self.handoff.last_layer_computed();
        }
        let mut slices = map.ready_slices(rank, layers, self.positions.clone()).peekable();
        if slices.peek().is_none() {
            return Ok(());
        }
        let sender = self.handoff.sender()?;
        let page = |slice: &KvSlice| {
            self.tables.physical(slice).ok_or_else(|| PrefillError::Export(format!("{slice:?} has no page")))
        };
        if sender.carries() == Carries::Pages {
            let places = slices.map(|slice| Ok((slice, page(&slice)?))).collect::<Result<Vec<_>, PrefillError>>()?;
            self.handoff.part_leaves();
            return Ok(sender.pages(rank, &places)?);
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kv::{PageMap, PageTable};
    use tokio::sync::mpsc::error::TryRecvError;
    use transfer::FirstToken;
    use types::{DpGroup, Incarnation, KvDtype, KvEndpoint, KvLayout, PageId, PeerId, Ticket, TicketId, WorkerId};

    use super::*;
    use crate::handoff::Command;

    struct NoCache;

    impl KvReader for NoCache {
        fn export_kv(&self, _: &KvSlice, _: PageId, _: &mut [u8]) -> Result<(), engine::EngineError> {
            unreachable!("the rank has nothing to send")
        }
    }

    fn layout(tp: u32) -> KvLayout {
        KvLayout {
            full_layers: vec![1],
            window_layers: vec![0],
            kv_heads: 2,
            head_dim: 8,
            page_tokens: 4,
            window: 8,
            dtype: KvDtype::F32,
            tp,
        }
    }

    fn ticket() -> Ticket {
        let peer = |name: &str| PeerId { worker: WorkerId(name.into()), incarnation: Incarnation(1) };
        Ticket {
            id: TicketId(1),
            prefill: peer("prefill"),
            decode: peer("decode"),
            kv_endpoint: KvEndpoint { transport: "host".into(), address: "decode:1".into() },
            kv_layout: layout(1),
            dp_group: DpGroup(0),
            ttl: Duration::from_secs(1),
        }
    }

    /// A step is collected, and its token drawn, when the first rank has ended it: the second may still be handing over.
    #[test]
    fn a_commit_waits_for_the_last_rank() {
        const FIRST: FirstToken = FirstToken { index: 0, token: 7, logprob: None };
        let is_commit = |command| matches!(command, Ok(Command::Commit(first)) if first == FIRST);
        for token_comes_first in [true, false] {
            let map = PageMap::new(&layout(1), &layout(1), 8).unwrap_or_else(|error| panic!("{error}"));
            let (handoff, mut commands) = Handoff::new(ticket(), map);
            let (exporter, table) = (Exporter::default(), || PageTable { first_page: 0, pages: Vec::new() });
            for (step, positions) in [(1, 0..4), (2, 4..8)] {
                let tables = Arc::new(PageTables { full: table(), window: table() });
                let span = Span { handoff: Arc::clone(&handoff), tables, positions, num_layers: 2 };
                exporter.begin(Export { step, span, ranks_left: 2.into() });
            }
            // Ranks beyond the sender's layout, which have no slices: nothing reaches for a cache.
            let tell = |rank, step| {
                let plan = StepPlan { step, ..StepPlan::default() };
                exporter.layers_ready(rank, &plan, 0..1, &NoCache);
                exporter.layers_ready(rank, &plan, 1..2, &NoCache);
            };
            tell(8, 1);
            tell(9, 1);
            tell(8, 2);
            if token_comes_first {
                handoff.commit(FIRST);
            }
            assert_eq!(commands.try_recv().err(), Some(TryRecvError::Empty), "one rank has not handed over");
            assert_eq!(exporter.exports().len(), 1);
            tell(9, 2);
            if !token_comes_first {
                handoff.commit(FIRST);
            }
            assert!(exporter.exports().is_empty());
            assert!(is_commit(commands.try_recv()));
        }
    }
}
