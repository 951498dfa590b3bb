//! What the ranks of a group do together: sums behind attention and experts, and the logits of all.
//!
//! Ranks with a GPU each exchange within kernels, over peer memory. Where ranks share a GPU, a kernel that waits could keep
//! the one that it waits for from running: there the host puts events between them, and steps are no graphs.

use std::sync::{Arc, Mutex, PoisonError};

use device::{DeviceBuffer, Event, PeerBuffer, Stream, View, ViewMut};
use half::bf16;
use kernels::{
    Alarm, AllGather, AllReduce, Combine, CombineNorm, Exchange as Transfer, Mailbox, MailboxAddress, PeerGroup,
    PeerSizes, RmsNorm, SumRanks, Summand, ThenNorm,
};
use model::ShardPlan;

use super::rank::Gpu;
use crate::EngineError;
use crate::fault::Fault;
use crate::link::{Exchange, Link};

/// Tokens up to which an exchange is made of packets (docs/results/all-reduce-h200-x2.md).
const PACKET_TOKENS: usize = 32;
/// Bytes of a rank's memory for exchanges in bulk; larger ones are cut.
const BULK_BYTES: usize = 256 << 20;

/// A sum over ranks and what lies around it:
/// `residual += sum over ranks of part; out = norm(residual) * norm_weight`.
pub(crate) struct Reduction<'a> {
    pub(crate) part: Part<'a>,
    /// `[tokens, hidden]`; overwritten.
    pub(crate) delta: ViewMut<'a, bf16>,
    /// `[tokens, hidden]`
    pub(crate) residual: ViewMut<'a, bf16>,
    /// `[hidden]`
    pub(crate) norm_weight: View<'a, bf16>,
    pub(crate) eps: f32,
    /// `[tokens, hidden]`
    pub(crate) out: ViewMut<'a, bf16>,
}

/// This rank's part of a sum.
#[derive(Clone, Copy)]
pub(crate) enum Part<'a> {
    /// What lies in `delta`.
    Delta,
    /// The weighted sum of the outputs of its experts, as `kernels::Combine`.
    Experts { y: View<'a, bf16>, weights: View<'a, f32>, slot: View<'a, i32>, top: usize },
}

/// What the forward pass needs of the other ranks. All ranks make the same calls in the same order; each is enqueued on
/// the rank's stream.
pub(crate) trait Collective: Send {
    /// Whether what it enqueues may be recorded in a graph: not if the host takes part.
    fn is_recordable(&self) -> bool;

    /// Enqueues a reduction.
    ///
    /// # Errors
    /// [`EngineError::Gpu`], [`EngineError::RankLost`].
    fn reduce(&mut self, gpu: &Gpu, reduction: Reduction<'_>) -> Result<(), EngineError>;

    /// Puts the logits of all ranks side by side, on every rank: `part` has `rows` rows, of the rank's own part of the
    /// vocabulary. Not called by a rank that has all of it.
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

/// Where the ranks of a group meet while they are built.
pub(crate) enum Meeting {
    Alone,
    /// Each rank has a GPU of its own.
    Peers {
        exchange: Arc<Exchange<Option<MailboxAddress>>>,
        alarm: Arc<Mutex<Option<Alarm>>>,
        fault: Arc<Fault>,
    },
    /// At least two share one.
    Shared {
        addresses: Arc<Exchange<Option<SharedAddress>>>,
        events: Arc<Exchange<Option<Event>>>,
    },
}

/// What a rank that shares its GPU lets the others read and write.
#[derive(Clone)]
pub(crate) struct SharedAddress {
    parts: [PeerBuffer<bf16>; 2],
    logits: PeerBuffer<f32>,
}

/// What a group's exchanges are made for.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) hidden: usize,
    /// Tokens of a step.
    pub(crate) max_tokens: usize,
    pub(crate) vocab: usize,
}

impl Meeting {
    /// For ranks on these devices.
    pub(crate) fn new(devices: &[u32], fault: &Arc<Fault>) -> Self {
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
        Self::Shared {
            addresses: Arc::new(Exchange::new(ranks, fault.clone())),
            events: Arc::new(Exchange::new(ranks, fault.clone())),
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
        let Sizes { hidden, max_tokens, vocab } = sizes;
        let (rank, first_row) = (plan.tp_rank, plan.vocab_rows.start);
        Ok(match self {
            Self::Alone => Box::new(OneRank),
            Self::Peers { exchange, alarm, fault } => {
                let ranks = plan.layout.tp as usize;
                let of_bulk = (BULK_BYTES / (4 * ranks * hidden)).min(max_tokens).max(1);
                let sizes = PeerSizes {
                    ranks,
                    hidden,
                    packet_tokens: PACKET_TOKENS.min(max_tokens),
                    bulk_tokens: if max_tokens > PACKET_TOKENS { of_bulk } else { 1 },
                };
                let alarm = {
                    let mut alarm = alarm.lock().unwrap_or_else(PoisonError::into_inner);
                    match &*alarm {
                        Some(alarm) => alarm.clone(),
                        None => alarm.insert(Alarm::new(&gpu.stream)?).clone(),
                    }
                };
                let own = Mailbox::new(&gpu.stream, sizes)?;
                let addresses = meet(&mut Link::new(rank, exchange.clone()), own.address(logits))?;
                let group = PeerGroup::new(&gpu.stream, rank, own, &addresses, alarm)?;
                // Nobody starts before all have opened each other's memory.
                meet(&mut Link::new(rank, exchange.clone()), addresses[rank].clone())?;
                Box::new(PeerRanks { group, vocab, first_row, rank: plan.rank as u32, fault: fault.clone() })
            }
            Self::Shared { addresses, events } => {
                let own = [gpu.stream.zeros(max_tokens * hidden)?, gpu.stream.zeros(max_tokens * hidden)?];
                let address =
                    SharedAddress { parts: [&own[0], &own[1]].map(DeviceBuffer::share), logits: logits.share() };
                gpu.stream.synchronize()?;
                let all = meet(&mut Link::new(rank, addresses.clone()), address)?;
                for address in &all {
                    address.parts.iter().try_for_each(|part| part.open(&gpu.stream))?;
                    address.logits.open(&gpu.stream)?;
                }
                Box::new(SharedGpus {
                    rank,
                    own,
                    parts: [0, 1].map(|turn| all.iter().map(|address| address.parts[turn].clone()).collect()),
                    logits: all.into_iter().map(|address| address.logits).collect(),
                    events: Link::new(rank, events.clone()),
                    turn: 0,
                    hidden,
                    vocab,
                    first_row,
                })
            }
        })
    }
}

/// Gives a value to all ranks and gets theirs, in order.
fn meet<T: Clone>(link: &mut Link<Option<T>>, value: T) -> Result<Vec<T>, EngineError> {
    link.share(
        |own| *own = Some(value),
        |all| all.iter().map(|value| (*value).clone().expect("every rank has published its own")).collect(),
    )
}

/// A group of one.
pub(crate) struct OneRank;

impl Collective for OneRank {
    fn is_recordable(&self) -> bool {
        true
    }

    fn reduce(&mut self, gpu: &Gpu, reduction: Reduction<'_>) -> Result<(), EngineError> {
        let Reduction { part, delta, residual, norm_weight, eps, out } = reduction;
        match part {
            Part::Delta => {
                RmsNorm { residual, delta: Some(delta.as_view()), weight: norm_weight, out, eps }
                    .enqueue(&gpu.kernels, &gpu.stream)?;
            }
            Part::Experts { y, weights, slot, top } => {
                let hidden = norm_weight.len();
                let combine = Combine { y, weights, slot, out, hidden, top };
                CombineNorm { combine, residual, norm_weight, eps }.enqueue(&gpu.kernels, &gpu.stream)?;
            }
        }
        Ok(())
    }

    fn gather(&mut self, _: &Gpu, _: View<'_, f32>, _: usize) -> Result<(), EngineError> {
        unreachable!("a group of one has the whole vocabulary")
    }

    fn check(&self) -> Result<(), EngineError> {
        Ok(())
    }
}

/// Ranks with a GPU each.
struct PeerRanks {
    group: PeerGroup,
    vocab: usize,
    /// Where the rank's part of the vocabulary begins.
    first_row: usize,
    rank: u32,
    fault: Arc<Fault>,
}

impl Collective for PeerRanks {
    fn is_recordable(&self) -> bool {
        true
    }

    fn reduce(&mut self, gpu: &Gpu, reduction: Reduction<'_>) -> Result<(), EngineError> {
        let Reduction { part, delta, mut residual, norm_weight, eps, mut out } = reduction;
        let PeerSizes { hidden, packet_tokens, bulk_tokens, .. } = self.group.sizes();
        let tokens = out.len() / hidden;
        let (exchange, most) =
            if tokens <= packet_tokens { (Transfer::Packets, packet_tokens) } else { (Transfer::Bulk, bulk_tokens) };
        for start in (0..tokens).step_by(most) {
            let end = tokens.min(start + most);
            let values = start * hidden..end * hidden;
            let part = match part {
                Part::Delta => Summand::Values(delta.as_view().slice(values.clone())),
                Part::Experts { y, weights, slot, top } => {
                    let pairs = start * top..end * top;
                    Summand::Experts { y, weights: weights.slice(pairs.clone()), slot: slot.slice(pairs), top }
                }
            };
            let residual = residual.reborrow().slice(values.clone());
            let norm = Some(ThenNorm { residual, weight: norm_weight, eps });
            let out = out.reborrow().slice(values);
            AllReduce { part, norm, out, group: &mut self.group, exchange }.enqueue(&gpu.kernels, &gpu.stream)?;
        }
        Ok(())
    }

    fn gather(&mut self, gpu: &Gpu, part: View<'_, f32>, rows: usize) -> Result<(), EngineError> {
        let gather = AllGather { part, rows, first_col: self.first_row, pitch: self.vocab };
        Ok(gather.enqueue(&mut self.group, &gpu.kernels, &gpu.stream)?)
    }

    fn check(&self) -> Result<(), EngineError> {
        if !self.group.alarm().gave_up() {
            return Ok(());
        }
        self.fault.check()?;
        let reason = "a kernel waited for another rank in vain".into();
        Err(EngineError::RankLost { rank: self.rank, reason })
    }
}

/// Ranks of which some share a GPU: each leaves its part for all to read, and events, which the host hands round, say when.
struct SharedGpus {
    rank: usize,
    /// Used in turn: when a rank fills one for exchange `n + 2` it has waited for the events of `n + 1`, which the others
    /// recorded after they had read `n`.
    own: [DeviceBuffer<bf16>; 2],
    parts: [Vec<PeerBuffer<bf16>>; 2],
    logits: Vec<PeerBuffer<f32>>,
    events: Link<Option<Event>>,
    turn: usize,
    hidden: usize,
    vocab: usize,
    first_row: usize,
}

impl SharedGpus {
    /// Later work on `stream` comes after what every rank has enqueued so far.
    fn meet(&mut self, stream: &Stream) -> Result<(), EngineError> {
        let events = meet(&mut self.events, stream.record()?)?;
        for (rank, event) in events.iter().enumerate() {
            if rank != self.rank {
                stream.wait(event)?;
            }
        }
        Ok(())
    }
}

impl Collective for SharedGpus {
    fn is_recordable(&self) -> bool {
        false
    }

    fn reduce(&mut self, gpu: &Gpu, reduction: Reduction<'_>) -> Result<(), EngineError> {
        let Reduction { part, mut delta, residual, norm_weight, eps, out } = reduction;
        let (turn, hidden) = (self.turn, self.hidden);
        self.turn = 1 - turn;
        let own = self.own[turn].slice_mut(..delta.len());
        match part {
            Part::Delta => gpu.stream.copy(own, delta.as_view())?,
            Part::Experts { y, weights, slot, top } => {
                Combine { y, weights, slot, out: own, hidden, top }.enqueue(&gpu.kernels, &gpu.stream)?;
            }
        }
        self.meet(&gpu.stream)?;
        SumRanks { parts: &self.parts[turn], first: 0, out: delta.reborrow() }.enqueue(&gpu.kernels, &gpu.stream)?;
        let delta = Some(delta.as_view());
        Ok(RmsNorm { residual, delta, weight: norm_weight, out, eps }.enqueue(&gpu.kernels, &gpu.stream)?)
    }

    fn gather(&mut self, gpu: &Gpu, part: View<'_, f32>, rows: usize) -> Result<(), EngineError> {
        self.meet(&gpu.stream)?; // all have read what is overwritten
        AllGather { part, rows, first_col: self.first_row, pitch: self.vocab }.enqueue_ordered(
            self.rank,
            &self.logits,
            &gpu.kernels,
            &gpu.stream,
        )?;
        self.meet(&gpu.stream) // all parts are there
    }

    fn check(&self) -> Result<(), EngineError> {
        Ok(())
    }
}
