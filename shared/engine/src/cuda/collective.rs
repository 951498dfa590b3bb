//! What the ranks of an instance do together: sums behind attention and experts, tokens of all attention groups for the experts, and the
//! logits of all.
//!
//! Heads and head are split over the ranks of an attention group, experts over all ranks. Ranks with a GPU each exchange within
//! kernels, over peer memory (`peers`). Where ranks share a GPU, a kernel that waits could keep the one that it waits for from
//! running: there the host puts events between them, and steps are no graphs (`shared`).

mod peers;
mod shared;

use std::sync::{Arc, Mutex};

use device::{DeviceBuffer, View, ViewMut};
use half::bf16;
use kernels::{Alarm, Combine, CombineNorm, GroupSizes, RmsNorm};
use model::ShardPlan;
use types::ParallelLayout;

use super::group_tokens::GroupTokens;
use super::rank::Gpu;
use crate::EngineError;
use crate::fault::Fault;
use crate::link::{Exchange, Link};

/// Residual add and norm of the tokens of a rank's attention group: `residual += sum; out = norm(residual) * weight`.
pub(crate) struct AddNorm<'a> {
    /// `[own tokens, hidden]`
    pub(crate) residual: ViewMut<'a, bf16>,
    /// `[hidden]`
    pub(crate) weight: View<'a, bf16>,
    pub(crate) eps: f32,
    /// `[own tokens, hidden]`
    pub(crate) out: ViewMut<'a, bf16>,
}

/// The sum behind attention, over the ranks of an attention group, and what follows.
pub(crate) struct AttentionSum<'a> {
    /// This rank's part, `[own tokens, hidden]`; overwritten.
    pub(crate) delta: ViewMut<'a, bf16>,
    /// With several groups, `out` may be left as it is.
    pub(crate) norm: AddNorm<'a>,
    /// With several groups: the normed stream of all of them, `[all tokens, hidden]`.
    pub(crate) normed_of_all: Option<ViewMut<'a, bf16>>,
    pub(crate) tokens: &'a GroupTokens,
}

/// What the rank's experts made of the tokens of all groups.
#[derive(Clone, Copy)]
pub(crate) struct ExpertOutputs<'a> {
    /// `[slots, hidden]`
    pub(crate) y: View<'a, bf16>,
    /// `[all tokens, top]`
    pub(crate) weights: View<'a, f32>,
    /// Row of `y` of each pair, `[all tokens, top]`; negative where another rank has it.
    pub(crate) slot: View<'a, i32>,
    pub(crate) top: usize,
}

/// The sum behind experts, over all ranks, and what follows.
pub(crate) struct ExpertSum<'a> {
    pub(crate) outputs: ExpertOutputs<'a>,
    /// `[own tokens, hidden]`; overwritten.
    pub(crate) delta: ViewMut<'a, bf16>,
    pub(crate) norm: AddNorm<'a>,
    pub(crate) tokens: &'a GroupTokens,
}

/// What the forward pass needs of the other ranks. All ranks make the same calls in the same order, but for `gather`: that is
/// between the ranks of an attention group. Each call is enqueued on the rank's stream.
pub(crate) trait Collective: Send {
    /// Whether what it enqueues may be recorded in a graph: not if the host takes part.
    fn is_recordable(&self) -> bool;

    /// Whether kernels of other ranks may run beside this one's. Those whose blocks all wait for each other could then keep each other out.
    fn shares_gpu(&self) -> bool {
        false
    }

    /// Enqueues the sum behind attention.
    ///
    /// # Errors
    /// [`EngineError::Gpu`], [`EngineError::RankLost`].
    fn add_attention(&mut self, gpu: &Gpu, sum: AttentionSum<'_>) -> Result<(), EngineError>;

    /// Enqueues the sum behind experts.
    ///
    /// # Errors
    /// [`EngineError::Gpu`], [`EngineError::RankLost`].
    fn add_experts(&mut self, gpu: &Gpu, sum: ExpertSum<'_>) -> Result<(), EngineError>;

    /// Puts the logits of the attention group's ranks side by side, on each of them: `part` has `rows` rows, of the rank's own
    /// part of the vocabulary. Not called by a rank that has all of it.
    ///
    /// # Errors
    /// [`EngineError::Gpu`], [`EngineError::RankLost`].
    fn gather(&mut self, gpu: &Gpu, part: View<'_, f32>, rows: usize) -> Result<(), EngineError>;

    /// Whether what has been computed so far can be relied on.
    ///
    /// # Errors
    /// [`EngineError::RankLost`] once a rank waited in vain for another.
    fn check(&self) -> Result<(), EngineError>;
}

/// Where the ranks of an instance meet while they are built.
pub(crate) enum Meeting {
    Alone,
    /// Each rank has a GPU of its own.
    Peers {
        exchange: Arc<Exchange<Option<peers::Address>>>,
        alarm: Arc<Mutex<Option<Alarm>>>,
        fault: Arc<Fault>,
    },
    /// At least two share one.
    Shared {
        addresses: Arc<Exchange<Option<shared::Address>>>,
        /// Of all ranks.
        events: Arc<shared::Events>,
        /// Of the ranks of each attention group.
        group_events: Vec<Arc<shared::Events>>,
    },
}

/// What exchanges are made for.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) hidden: usize,
    /// Tokens of a step, those of all groups together.
    pub(crate) max_tokens: usize,
    pub(crate) vocab: usize,
}

impl Sizes {
    /// Of exchanges between attention groups.
    pub(crate) const fn between_groups(&self, layout: ParallelLayout) -> GroupSizes {
        GroupSizes {
            groups: layout.dp as usize,
            group_ranks: layout.tp as usize,
            hidden: self.hidden,
            tokens: self.max_tokens,
        }
    }
}

impl Meeting {
    /// For ranks on these devices.
    pub(crate) fn new(layout: ParallelLayout, devices: &[u32], fault: &Arc<Fault>) -> Self {
        let ranks = devices.len() as u32;
        if ranks == 1 {
            return Self::Alone;
        }
        let mut distinct = devices.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        if distinct.len() == devices.len() {
            let exchange = Arc::new(Exchange::new(ranks, fault.clone()));
            return Self::Peers { exchange, alarm: Arc::default(), fault: fault.clone() };
        }
        let of_group = |group| group * layout.tp..(group + 1) * layout.tp;
        Self::Shared {
            addresses: Arc::new(Exchange::new(ranks, fault.clone())),
            events: Arc::new(Exchange::new(ranks, fault.clone())),
            group_events: (0..layout.dp)
                .map(|group| Arc::new(Exchange::between(of_group(group), fault.clone())))
                .collect(),
        }
    }

    /// Waits for all ranks and connects this one with them. `logits` is where it wants those of the whole vocabulary.
    ///
    /// # Errors
    /// [`EngineError::Gpu`] if devices cannot reach each other or lack memory, [`EngineError::RankLost`].
    pub(crate) fn join(
        &self,
        gpu: &Gpu,
        plan: &ShardPlan,
        sizes: Sizes,
        logits: &DeviceBuffer<f32>,
    ) -> Result<Box<dyn Collective>, EngineError> {
        Ok(match self {
            Self::Alone => Box::new(OneRank),
            Self::Peers { exchange, alarm, fault } => {
                Box::new(peers::PeerRanks::join(gpu, plan, sizes, logits, exchange, alarm, fault)?)
            }
            Self::Shared { addresses, events, group_events } => {
                let events = [events, &group_events[plan.dp_rank]];
                Box::new(shared::SharedGpus::join(gpu, plan, sizes, logits, addresses, events)?)
            }
        })
    }
}

/// Gives a value to all ranks of an exchange and gets theirs, in order.
fn meet<T: Clone>(link: &mut Link<Option<T>>, value: T) -> Result<Vec<T>, EngineError> {
    link.share(
        |own| *own = Some(value),
        |all| all.iter().map(|value| (*value).clone().expect("every rank has published its own")).collect(),
    )
}

/// `residual += delta`, and its norm.
fn add_norm(gpu: &Gpu, delta: View<'_, bf16>, norm: AddNorm<'_>) -> Result<(), EngineError> {
    let AddNorm { residual, weight, eps, out } = norm;
    Ok(RmsNorm { residual, delta: Some(delta), weight, out, eps }.enqueue(&gpu.kernels, &gpu.stream)?)
}

/// An instance of one.
pub(crate) struct OneRank;

impl Collective for OneRank {
    fn is_recordable(&self) -> bool {
        true
    }

    fn add_attention(&mut self, gpu: &Gpu, sum: AttentionSum<'_>) -> Result<(), EngineError> {
        add_norm(gpu, sum.delta.as_view(), sum.norm)
    }

    fn add_experts(&mut self, gpu: &Gpu, sum: ExpertSum<'_>) -> Result<(), EngineError> {
        let ExpertOutputs { y, weights, slot, top } = sum.outputs;
        let AddNorm { residual, weight: norm_weight, eps, out } = sum.norm;
        let combine = Combine { y, weights, slot, out, hidden: norm_weight.len(), top };
        Ok(CombineNorm { combine, residual, norm_weight, eps }.enqueue(&gpu.kernels, &gpu.stream)?)
    }

    fn gather(&mut self, _: &Gpu, _: View<'_, f32>, _: usize) -> Result<(), EngineError> {
        unreachable!("an instance of one has the whole vocabulary")
    }

    fn check(&self) -> Result<(), EngineError> {
        Ok(())
    }
}
