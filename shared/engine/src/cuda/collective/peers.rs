//! Ranks with a GPU each: exchanges within kernels, over peer memory.

use std::sync::{Arc, Mutex, PoisonError};

use device::{DeviceBuffer, View};
use half::bf16;
use kernels::{
    Alarm, AllGather, AllReduce, AttentionGroups, Exchange as Transfer, GatherTokens, Mailbox, MailboxAddress,
    PeerGroup, PeerSizes, ReduceScatter, Summand, ThenNorm, TokenMailbox, TokenMailboxAddress,
};
use model::ShardPlan;

use super::{AddNorm, AttentionSum, Collective, ExpertOutputs, ExpertSum, Sizes, meet};
use crate::EngineError;
use crate::cuda::rank::Gpu;
use crate::fault::Fault;
use crate::link::{Exchange, Link};

/// Tokens up to which a sum within an attention group is made of packets (docs/results/all-reduce-h200-x2.md).
const PACKET_TOKENS: usize = 32;
/// Bytes of a rank's memory for exchanges in bulk; larger ones are cut.
const BULK_BYTES: usize = 256 << 20;

/// What the other ranks need of one.
#[derive(Clone)]
pub(crate) struct Address {
    /// Where its attention group has several ranks.
    group: Option<MailboxAddress>,
    /// Where there are several attention groups.
    all: Option<TokenMailboxAddress>,
}

/// One of several ranks with a GPU each.
pub(crate) struct PeerRanks {
    /// The ranks of the attention group, if there are several.
    group: Option<PeerGroup>,
    /// All ranks, if there are several attention groups.
    all: Option<AttentionGroups>,
    alarm: Alarm,
    vocab: usize,
    /// Where the rank's part of the vocabulary begins.
    first_row: usize,
    rank: u32,
    fault: Arc<Fault>,
}

impl PeerRanks {
    /// Connects a rank with all others. See [`super::Meeting::join`].
    ///
    /// # Errors
    /// [`EngineError::Gpu`], [`EngineError::RankLost`].
    pub(crate) fn join(
        gpu: &Gpu,
        plan: &ShardPlan,
        sizes: Sizes,
        logits: &DeviceBuffer<f32>,
        exchange: &Arc<Exchange<Option<Address>>>,
        alarm: &Mutex<Option<Alarm>>,
        fault: &Arc<Fault>,
    ) -> Result<Self, EngineError> {
        let (layout, stream) = (plan.layout, &gpu.stream);
        let tp = layout.tp as usize;
        let alarm = {
            let mut alarm = alarm.lock().unwrap_or_else(PoisonError::into_inner);
            match &*alarm {
                Some(alarm) => alarm.clone(),
                None => alarm.insert(Alarm::new(stream)?).clone(),
            }
        };
        let own_group = (tp > 1).then(|| Mailbox::new(stream, sizes_within(tp, sizes))).transpose()?;
        let between = sizes.between_groups(layout);
        let own_all = (layout.dp > 1).then(|| TokenMailbox::new(stream, between)).transpose()?;
        let address = Address {
            group: own_group.as_ref().map(|own| own.address(logits)),
            all: own_all.as_ref().map(TokenMailbox::address),
        };
        let mut link = Link::new(plan.rank, exchange.clone());
        let addresses = meet(&mut link, address.clone())?;
        let of_group: Vec<MailboxAddress> =
            addresses.iter().skip(plan.dp_rank * tp).take(tp).filter_map(|address| address.group.clone()).collect();
        let of_all: Vec<TokenMailboxAddress> = addresses.iter().filter_map(|address| address.all.clone()).collect();
        let group =
            own_group.map(|own| PeerGroup::new(stream, plan.tp_rank, own, &of_group, alarm.clone())).transpose()?;
        let all =
            own_all.map(|own| AttentionGroups::new(stream, plan.rank, own, &of_all, alarm.clone())).transpose()?;
        // Nobody starts before all have opened each other's memory.
        meet(&mut link, address)?;
        let (vocab, first_row, rank) = (sizes.vocab, plan.vocab_rows.start, plan.rank as u32);
        Ok(Self { group, all, alarm, vocab, first_row, rank, fault: fault.clone() })
    }
}

/// Of exchanges within an attention group of `ranks` ranks.
fn sizes_within(ranks: usize, sizes: Sizes) -> PeerSizes {
    let Sizes { hidden, max_tokens, .. } = sizes;
    let of_bulk = (BULK_BYTES / (4 * ranks * hidden)).min(max_tokens).max(1);
    PeerSizes {
        ranks,
        hidden,
        packet_tokens: PACKET_TOKENS.min(max_tokens),
        bulk_tokens: if max_tokens > PACKET_TOKENS { of_bulk } else { 1 },
    }
}

/// This rank's part of a sum within an attention group.
#[derive(Clone, Copy)]
enum Part<'a> {
    Values(View<'a, bf16>),
    Experts(ExpertOutputs<'a>),
}

/// A sum within an attention group, cut into exchanges.
fn all_reduce(gpu: &Gpu, group: &mut PeerGroup, part: Part<'_>, norm: AddNorm<'_>) -> Result<(), EngineError> {
    let AddNorm { mut residual, weight, eps, mut out } = norm;
    let PeerSizes { hidden, packet_tokens, bulk_tokens, .. } = group.sizes();
    let tokens = out.len() / hidden;
    let (exchange, most) =
        if tokens <= packet_tokens { (Transfer::Packets, packet_tokens) } else { (Transfer::Bulk, bulk_tokens) };
    for start in (0..tokens).step_by(most) {
        let end = tokens.min(start + most);
        let values = start * hidden..end * hidden;
        let part = match part {
            Part::Values(delta) => Summand::Values(delta.slice(values.clone())),
            Part::Experts(ExpertOutputs { y, weights, slot, top }) => {
                let pairs = start * top..end * top;
                Summand::Experts { y, weights: weights.slice(pairs.clone()), slot: slot.slice(pairs), top }
            }
        };
        let residual = residual.reborrow().slice(values.clone());
        let norm = Some(ThenNorm { residual, weight, eps });
        let out = out.reborrow().slice(values);
        AllReduce { part, norm, out, group, exchange }.enqueue(&gpu.kernels, &gpu.stream)?;
    }
    Ok(())
}

impl Collective for PeerRanks {
    fn is_recordable(&self) -> bool {
        true
    }

    fn add_attention(&mut self, gpu: &Gpu, sum: AttentionSum<'_>) -> Result<(), EngineError> {
        let AttentionSum { delta, norm, normed_of_all, tokens } = sum;
        let (delta, starts) = (delta.as_view(), tokens.starts());
        let Some((groups, out)) = self.all.as_mut().zip(normed_of_all) else {
            let group = self.group.as_mut().expect("there are several ranks, all of one attention group");
            return all_reduce(gpu, group, Part::Values(delta), norm);
        };
        let AddNorm { residual, weight, eps, out: mut normed } = norm;
        let gather = match &mut self.group {
            None => {
                let norm = Some(ThenNorm { residual, weight, eps });
                GatherTokens { values: delta, norm, out, starts, groups }
            }
            Some(group) => {
                let norm = AddNorm { residual, weight, eps, out: normed.reborrow() };
                all_reduce(gpu, group, Part::Values(delta), norm)?;
                GatherTokens { values: normed.as_view(), norm: None, out, starts, groups }
            }
        };
        Ok(gather.enqueue(&gpu.kernels, &gpu.stream)?)
    }

    fn add_experts(&mut self, gpu: &Gpu, sum: ExpertSum<'_>) -> Result<(), EngineError> {
        let ExpertSum { outputs, norm, tokens, .. } = sum;
        let Some(groups) = &mut self.all else {
            let group = self.group.as_mut().expect("there are several ranks, all of one attention group");
            return all_reduce(gpu, group, Part::Experts(outputs), norm);
        };
        let ExpertOutputs { y, weights, slot, top } = outputs;
        let AddNorm { residual, weight, eps, out } = norm;
        let (norm, starts) = (ThenNorm { residual, weight, eps }, tokens.starts());
        let scatter = ReduceScatter { y, weights, slot, top, norm, out, starts, groups };
        Ok(scatter.enqueue(&gpu.kernels, &gpu.stream)?)
    }

    fn gather(&mut self, gpu: &Gpu, part: View<'_, f32>, rows: usize) -> Result<(), EngineError> {
        let group = self.group.as_mut().expect("a rank that has a part of the vocabulary is one of several");
        let gather = AllGather { part, rows, first_col: self.first_row, pitch: self.vocab };
        Ok(gather.enqueue(group, &gpu.kernels, &gpu.stream)?)
    }

    fn check(&self) -> Result<(), EngineError> {
        if !self.alarm.gave_up() {
            return Ok(());
        }
        self.fault.check()?;
        let reason = "a kernel waited for another rank in vain".into();
        Err(EngineError::RankLost { rank: self.rank, reason })
    }
}
