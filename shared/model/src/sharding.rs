//! Which part of every tensor each rank holds, and how partial sums are put together: the contract between ranks, the
//! same for the CPU engine and for GPUs.
//!
//! # Ranks
//! `rank = dp_rank * tp + tp_rank = ep_rank * expert_tp + expert_tp_rank`, with `expert_tp = tp * dp / ep`. So the
//! ranks that share an expert are neighbours, and with EP4 DP1 TP4 each of the four ranks has a quarter of the heads
//! and a quarter of the experts.
//!
//! # What a rank holds
//! | tensor | part |
//! |---|---|
//! | embedding, norms, router | all of it |
//! | q, k, v (rows), sinks | its query heads and the KV heads that serve them, contiguous; `tp_rank` of `tp` |
//! | o_proj (columns) | the channels of its query heads |
//! | head (rows) | `vocab_rows`: blocks of 128 rows cut by [`split`], single rows where the vocabulary is no multiple of 128 |
//! | experts | `experts`: contiguous, `ep_rank` of `ep` |
//! | gate_up (rows), down (columns) | `units` of those experts, whole MX blocks: `expert_tp_rank` of `expert_tp` |
//! | biases of q, k, v, gate_up | the rank's rows |
//! | biases of o_proj and down | all of it: see below |
//!
//! `units` are intermediate units, cut by [`split`]; gate and up row of a unit stay together.
//!
//! # Reductions
//! o_proj and down_proj sum over something that is spread over ranks (query heads; intermediate units). To make that
//! sum the same number, bit for bit, under every layout, it is *defined* as [`REDUCTION_SLICES`] partial sums that are
//! added in a fixed tree: `((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))`. Slice `i` of o_proj sums over the query
//! heads [`ShardPlan::attention_slice_heads`], slice `i` of down_proj over the units [`ShardPlan::expert_slice_units`].
//! Slices are cut by [`split`], whose cuts nest, so a rank always owns whole slices, and they are neighbours in the
//! tree. A slice may be empty (fewer than 8 heads or MX blocks): it contributes zero.
//!
//! The bias of o_proj and of down_proj is added once, after the tree, not by every rank: each rank has it because any
//! of them may be the one to finish the sum. The down bias lies inside the weighted sum over experts: `sum_k w_k * (y_k
//! + b_k)`.

use std::ops::Range;

use types::{Classify, ErrorClass, ParallelLayout};

use crate::config::ModelConfig;
use crate::mxfp4::BLOCK_VALUES;

/// Partial sums into which every reduction across ranks is cut, whatever the number of ranks; also the most ways in
/// which heads, or one expert, can be split.
pub const REDUCTION_SLICES: usize = 8;

/// Rows of the head that stay together where possible: the edge of an FP8 scale block.
const VOCAB_BLOCK: usize = 128;

/// Cuts `0..units` into `parts` ranges by halving again and again, the first half taking the odd unit. So the cuts for
/// fewer parts are among those for more: 10 over 4 is 3, 2, 3, 2 and over 8 is 2, 1, 1, 1, 2, 1, 1, 1. Ranges are empty
/// where `units < parts`.
///
/// # Panics
/// If `parts` is no power of two.
#[must_use]
pub fn split(units: usize, parts: usize) -> Vec<Range<usize>> {
    assert!(parts.is_power_of_two(), "halving needs a power of two, got {parts} parts");
    let mut ranges = Vec::with_capacity(parts);
    halve(0..units, parts, &mut ranges);
    ranges
}

fn halve(range: Range<usize>, parts: usize, ranges: &mut Vec<Range<usize>>) {
    if parts == 1 {
        ranges.push(range);
        return;
    }
    let middle = range.start + range.len().div_ceil(2);
    halve(range.start..middle, parts / 2, ranges);
    halve(middle..range.end, parts / 2, ranges);
}

/// What one rank holds of one model under one layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardPlan {
    /// The layout of the whole instance.
    pub layout: ParallelLayout,
    /// This rank, `0..layout.ranks()`.
    pub rank: usize,
    /// Which attention group the rank is in.
    pub dp_rank: usize,
    /// Its place within the attention group.
    pub tp_rank: usize,
    /// Which range of experts it has.
    pub ep_rank: usize,
    /// Its place among the ranks that share those experts.
    pub expert_tp_rank: usize,
    /// Query heads.
    pub heads: Range<usize>,
    /// KV heads that serve `heads`.
    pub kv_heads: Range<usize>,
    /// Rows of the head; logit `i` of the rank is that of token `vocab_rows.start + i`.
    pub vocab_rows: Range<usize>,
    /// Experts.
    pub experts: Range<usize>,
    /// Intermediate units of each of its experts; start and end are multiples of 32.
    pub units: Range<usize>,
    /// Slices of o_proj's sum that are the rank's.
    pub attention_slices: Range<usize>,
    /// Slices of down_proj's sum that are the rank's.
    pub expert_slices: Range<usize>,
    head_slices: Vec<Range<usize>>,
    unit_slices: Vec<Range<usize>>,
}

impl ShardPlan {
    /// Works out the part of `rank`.
    ///
    /// # Errors
    /// The limit that the layout breaks.
    pub fn new(config: &ModelConfig, layout: ParallelLayout, rank: usize) -> Result<Self, ShardError> {
        check(config, layout)?;
        let ranks = layout.ranks() as usize;
        if rank >= ranks {
            return Err(ShardError::NoSuchRank { rank, ranks });
        }
        let (tp, ep, expert_tp) = (layout.tp as usize, layout.ep as usize, layout.expert_tp() as usize);
        let (tp_rank, expert_tp_rank, ep_rank) = (rank % tp, rank % expert_tp, rank / expert_tp);
        let part = |count: usize, parts: usize, idx: usize| count / parts * idx..count / parts * (idx + 1);

        let in_units = |blocks: Range<usize>| blocks.start * BLOCK_VALUES..blocks.end * BLOCK_VALUES;
        let mx_blocks = config.intermediate_size / BLOCK_VALUES;
        Ok(Self {
            layout,
            rank,
            dp_rank: rank / tp,
            tp_rank,
            ep_rank,
            expert_tp_rank,
            heads: part(config.num_heads, tp, tp_rank),
            kv_heads: part(config.num_kv_heads, tp, tp_rank),
            vocab_rows: split_vocab(config.vocab_size, tp).swap_remove(tp_rank),
            experts: part(config.num_experts, ep, ep_rank),
            units: in_units(split(mx_blocks, expert_tp).swap_remove(expert_tp_rank)),
            attention_slices: part(REDUCTION_SLICES, tp, tp_rank),
            expert_slices: part(REDUCTION_SLICES, expert_tp, expert_tp_rank),
            head_slices: split(config.num_heads, REDUCTION_SLICES),
            unit_slices: split(mx_blocks, REDUCTION_SLICES).into_iter().map(in_units).collect(),
        })
    }

    /// The plans of all ranks, in order.
    ///
    /// # Errors
    /// As [`ShardPlan::new`].
    pub fn all(config: &ModelConfig, layout: ParallelLayout) -> Result<Vec<Self>, ShardError> {
        check(config, layout)?;
        (0..layout.ranks() as usize).map(|rank| Self::new(config, layout, rank)).collect()
    }

    /// Query heads, counted over the whole model, over which slice `slice` of o_proj sums.
    ///
    /// # Panics
    /// If `slice` is not below [`REDUCTION_SLICES`].
    #[must_use]
    pub fn attention_slice_heads(&self, slice: usize) -> Range<usize> {
        self.head_slices[slice].clone()
    }

    /// Intermediate units, counted over the whole expert, over which slice `slice` of down_proj sums; ends are
    /// multiples of 32.
    ///
    /// # Panics
    /// If `slice` is not below [`REDUCTION_SLICES`].
    #[must_use]
    pub fn expert_slice_units(&self, slice: usize) -> Range<usize> {
        self.unit_slices[slice].clone()
    }
}

fn split_vocab(vocab_size: usize, tp: usize) -> Vec<Range<usize>> {
    let block = if vocab_size.is_multiple_of(VOCAB_BLOCK) && vocab_size / VOCAB_BLOCK >= tp { VOCAB_BLOCK } else { 1 };
    split(vocab_size / block, tp).into_iter().map(|range| range.start * block..range.end * block).collect()
}

fn check(config: &ModelConfig, layout: ParallelLayout) -> Result<(), ShardError> {
    let (tp, ep) = (layout.tp as usize, layout.ep as usize);
    if layout.tp == 0 || layout.ep == 0 || layout.dp == 0 {
        return Err(ShardError::Zero { layout });
    }
    let ranks = u64::from(layout.tp) * u64::from(layout.dp);
    if ranks > u64::from(u32::MAX) || !ranks.is_multiple_of(u64::from(layout.ep)) {
        return Err(ShardError::EpDividesRanks { layout, ranks });
    }
    check_ways("tp", tp)?;
    check_ways("expert tp (tp x dp / ep)", layout.expert_tp() as usize)?;
    let divides = |what, count: usize, degree, value: usize| {
        if count.is_multiple_of(value) { Ok(()) } else { Err(ShardError::Indivisible { what, count, degree, value }) }
    };
    divides("kv heads", config.num_kv_heads, "tp", tp)?;
    divides("experts", config.num_experts, "ep", ep)?;
    let (mx_blocks, expert_tp) = (config.intermediate_size / BLOCK_VALUES, layout.expert_tp() as usize);
    if mx_blocks < expert_tp {
        return Err(ShardError::TooFew {
            what: "mx blocks of the intermediate size",
            count: mx_blocks,
            parts: expert_tp,
        });
    }
    if config.vocab_size < tp {
        return Err(ShardError::TooFew { what: "rows of the head", count: config.vocab_size, parts: tp });
    }
    Ok(())
}

/// A degree that cuts a reduction must own whole slices.
fn check_ways(degree: &'static str, value: usize) -> Result<(), ShardError> {
    if value.is_power_of_two() && value <= REDUCTION_SLICES {
        Ok(())
    } else {
        Err(ShardError::Ways { degree, value, max: REDUCTION_SLICES })
    }
}

/// Why a model cannot be spread as asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShardError {
    /// A degree is zero.
    #[error("layout {layout}: each degree is at least 1")]
    Zero {
        /// The layout.
        layout: ParallelLayout,
    },
    /// EP does not divide TP x DP.
    #[error("layout {layout}: ep must divide the {ranks} ranks (tp x dp)")]
    EpDividesRanks {
        /// The layout.
        layout: ParallelLayout,
        /// Its ranks.
        ranks: u64,
    },
    /// A degree that cuts a reduction is no power of two, or too large.
    #[error("{degree} is {value}, supported are powers of two up to {max}")]
    Ways {
        /// Which degree.
        degree: &'static str,
        /// Its value.
        value: usize,
        /// The largest one.
        max: usize,
    },
    /// A degree does not divide what it splits.
    #[error("{degree} {value} does not divide the model's {count} {what}")]
    Indivisible {
        /// What is split.
        what: &'static str,
        /// How many there are.
        count: usize,
        /// By which degree.
        degree: &'static str,
        /// Its value.
        value: usize,
    },
    /// There are fewer pieces than ranks.
    #[error("the model has {count} {what}, too few for {parts} ranks")]
    TooFew {
        /// What is split.
        what: &'static str,
        /// How many there are.
        count: usize,
        /// Over how many ranks.
        parts: usize,
    },
    /// The rank does not exist.
    #[error("rank {rank} does not exist, the layout has {ranks} ranks")]
    NoSuchRank {
        /// The rank asked for.
        rank: usize,
        /// Ranks of the layout.
        ranks: usize,
    },
}

impl Classify for ShardError {
    fn class(&self) -> ErrorClass {
        ErrorClass::Caller
    }
}

#[cfg(test)]
mod tests;
