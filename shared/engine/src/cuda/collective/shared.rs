//! Ranks of which some share a GPU: each leaves its part for all to read, and events, which the host hands round, say when.

use std::sync::Arc;

use device::{DeviceBuffer, Event, PeerBuffer, Stream, View, ViewMut};
use half::bf16;
use kernels::{AllGather, Combine, SumRanks};
use model::ShardPlan;

use super::{AddNorm, AttentionSum, Collective, ExpertOutputs, ExpertSum, Sizes, add_norm, meet};
use crate::EngineError;
use crate::cuda::rank::Gpu;
use crate::link::{Exchange, Link};

/// Where ranks hand events round.
pub(crate) type Events = Exchange<Option<Event>>;

/// What a rank lets the others read and write.
#[derive(Clone)]
pub(crate) struct Address {
    /// For exchanges within its attention group.
    group: [PeerBuffer<bf16>; 2],
    /// For exchanges between all ranks.
    all: [PeerBuffer<bf16>; 2],
    logits: PeerBuffer<f32>,
}

/// Ranks that exchange parts: those of an attention group, or all.
struct Parts {
    /// This rank's place among them.
    place: usize,
    /// Used in turn: when a rank fills one for exchange `n + 2` it has waited for the events of `n + 1`, which the others
    /// recorded after they had read `n`.
    own: [DeviceBuffer<bf16>; 2],
    all: [Vec<PeerBuffer<bf16>>; 2],
    events: Link<Option<Event>>,
    turn: usize,
}

impl Parts {
    /// Room for this rank's part of the next exchange.
    fn own(&mut self, len: usize) -> ViewMut<'_, bf16> {
        self.own[self.turn].slice_mut(..len)
    }

    /// Later work on `stream` comes after what every rank has enqueued so far.
    fn meet(&mut self, stream: &Stream) -> Result<(), EngineError> {
        let events = meet(&mut self.events, stream.record()?)?;
        for (place, event) in events.iter().enumerate() {
            if place != self.place {
                stream.wait(event)?;
            }
        }
        Ok(())
    }

    /// Waits for the parts of all, which the caller may read until it calls this for the exchange after the next.
    fn exchange(&mut self, stream: &Stream) -> Result<&[PeerBuffer<bf16>], EngineError> {
        self.meet(stream)?;
        let turn = self.turn;
        self.turn = 1 - turn;
        Ok(&self.all[turn])
    }
}

/// One of several ranks of which some share a GPU.
pub(crate) struct SharedGpus {
    /// The ranks of the attention group.
    group: Parts,
    /// All ranks.
    all: Parts,
    /// Ranks of an attention group.
    tp: usize,
    /// Of the ranks of the attention group.
    logits: Vec<PeerBuffer<f32>>,
    hidden: usize,
    vocab: usize,
    first_row: usize,
}

impl SharedGpus {
    /// Connects a rank with all others. See [`super::Meeting::join`]; `events` are those of all ranks, and of the attention
    /// group's.
    ///
    /// # Errors
    /// [`EngineError::Gpu`], [`EngineError::RankLost`].
    pub(crate) fn join(
        gpu: &Gpu,
        plan: &ShardPlan,
        sizes: Sizes,
        logits: &DeviceBuffer<f32>,
        addresses: &Arc<Exchange<Option<Address>>>,
        events: [&Arc<Events>; 2],
    ) -> Result<Self, EngineError> {
        let Sizes { hidden, max_tokens, vocab } = sizes;
        let (tp, stream) = (plan.layout.tp as usize, &gpu.stream);
        let pair = |is_used: bool| -> Result<_, EngineError> {
            let len = if is_used { max_tokens * hidden } else { 0 };
            Ok([stream.zeros(len)?, stream.zeros(len)?])
        };
        let (own_group, own_all) = (pair(tp > 1)?, pair(plan.layout.dp > 1)?);
        let share = |own: &[DeviceBuffer<bf16>; 2]| [&own[0], &own[1]].map(DeviceBuffer::share);
        let address = Address { group: share(&own_group), all: share(&own_all), logits: logits.share() };
        stream.synchronize()?;
        let all = meet(&mut Link::new(plan.rank, addresses.clone()), address)?;
        for address in &all {
            address.group.iter().chain(&address.all).try_for_each(|part| part.open(stream))?;
            address.logits.open(stream)?;
        }
        let [of_all, of_group] = events.map(|events| Link::new(plan.rank, events.clone()));
        let mates = &all[plan.dp_rank * tp..(plan.dp_rank + 1) * tp];
        let of = |addresses: &[Address], parts: fn(&Address) -> &[PeerBuffer<bf16>; 2]| {
            [0, 1].map(|turn| addresses.iter().map(|address| parts(address)[turn].clone()).collect())
        };
        Ok(Self {
            group: Parts {
                place: plan.tp_rank,
                own: own_group,
                all: of(mates, |address| &address.group),
                events: of_group,
                turn: 0,
            },
            all: Parts {
                place: plan.rank,
                own: own_all,
                all: of(&all, |address| &address.all),
                events: of_all,
                turn: 0,
            },
            tp,
            logits: mates.iter().map(|address| address.logits.clone()).collect(),
            hidden,
            vocab,
            first_row: plan.vocab_rows.start,
        })
    }
}

impl Collective for SharedGpus {
    fn is_recordable(&self) -> bool {
        false
    }

    fn shares_gpu(&self) -> bool {
        true
    }

    fn add_attention(&mut self, gpu: &Gpu, sum: AttentionSum<'_>) -> Result<(), EngineError> {
        let AttentionSum { mut delta, norm, normed_of_all, tokens } = sum;
        let AddNorm { residual, weight, eps, out: mut normed } = norm;
        let (kernels, stream) = (&gpu.kernels, &gpu.stream);
        if self.tp > 1 {
            stream.copy(self.group.own(delta.len()), delta.as_view())?;
            let parts = self.group.exchange(stream)?;
            SumRanks { parts, first: 0, out: delta.reborrow() }.enqueue(kernels, stream)?;
        }
        add_norm(gpu, delta.as_view(), AddNorm { residual, weight, eps, out: normed.reborrow() })?;
        let Some(mut out) = normed_of_all else { return Ok(()) };
        stream.copy(self.all.own(normed.len()), normed.as_view())?;
        let rows = self.all.exchange(stream)?;
        // A copy is a sum of one part; of each group, that of its first rank.
        for (rows, range) in rows.chunks(self.tp).zip(tokens.starts().windows(2)) {
            let out = out.reborrow().slice(range[0] * self.hidden..range[1] * self.hidden);
            SumRanks { parts: &rows[..1], first: 0, out }.enqueue(kernels, stream)?;
        }
        Ok(())
    }

    fn add_experts(&mut self, gpu: &Gpu, sum: ExpertSum<'_>) -> Result<(), EngineError> {
        let ExpertSum { outputs, mut delta, norm, tokens } = sum;
        let ExpertOutputs { y, weights, slot, top } = outputs;
        let (kernels, stream, hidden) = (&gpu.kernels, &gpu.stream, self.hidden);
        let parts = if tokens.groups() > 1 { &mut self.all } else { &mut self.group };
        Combine { y, weights, slot, out: parts.own(tokens.all() * hidden), hidden, top }.enqueue(kernels, stream)?;
        let (parts, first) = (parts.exchange(stream)?, tokens.own().start * hidden);
        SumRanks { parts, first, out: delta.reborrow() }.enqueue(kernels, stream)?;
        add_norm(gpu, delta.as_view(), norm)
    }

    fn gather(&mut self, gpu: &Gpu, part: View<'_, f32>, rows: usize) -> Result<(), EngineError> {
        self.group.meet(&gpu.stream)?; // all have read what is overwritten
        let gather = AllGather { part, rows, first_col: self.first_row, pitch: self.vocab };
        gather.enqueue_ordered(self.group.place, &self.logits, &gpu.kernels, &gpu.stream)?;
        self.group.meet(&gpu.stream) // all parts are there
    }

    fn check(&self) -> Result<(), EngineError> {
        Ok(())
    }
}
