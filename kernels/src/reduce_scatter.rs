//! Sum of experts over all ranks, on the ranks whose tokens they are.

use device::{DevicePtr, DevicePtrMut, Kernel, LaunchConfig, Module, Stream, View, ViewMut};
use half::bf16;

use crate::Kernels;
use crate::all_reduce::ThenNorm;
use crate::error::{Checker, Result, int};
use crate::groups::{AttentionGroups, start_words};
use crate::inbox::{MAX_RANKS, Waiting};

/// `sum[t, h] = part_0[t, h] + part_1[t, h] + ..` over all ranks in f32, rounded once, each part the weighted sum of the outputs of a
/// rank's experts as [`Combine`](crate::Combine) makes it; then `residual += sum` and its norm, on the ranks of the attention group whose
/// token `t` is: the same bits on all of them.
///
/// Every rank enqueues the same exchange. It waits for the other ranks while it runs: ranks must be on different GPUs.
#[derive(Debug)]
pub struct ReduceScatter<'a> {
    /// Outputs of experts, `[slots, hidden]`.
    pub y: View<'a, bf16>,
    /// `[tokens of all groups, top]`
    pub weights: View<'a, f32>,
    /// Row of `y` of each pair, `[tokens of all groups, top]`; negative where another rank has it, or nobody.
    pub slot: View<'a, i32>,
    /// Experts of a token.
    pub top: usize,
    /// What follows, of the group's own tokens.
    pub norm: ThenNorm<'a>,
    /// `[own tokens, hidden]`
    pub out: ViewMut<'a, bf16>,
    /// First token of each group, and the number of all.
    pub starts: &'a [usize],
    /// The ranks.
    pub groups: &'a mut AttentionGroups,
}

kernel_args! {
    struct Args = ReduceScatterArgs in "reduce_scatter/reduce_scatter.cu" {
        inboxes: [u64; MAX_RANKS],
        epochs: DevicePtrMut<u32>,
        host: DevicePtrMut<u32>,
        failed: DevicePtrMut<u32>,
        y: DevicePtr<bf16>,
        weight: DevicePtr<f32>,
        slot: DevicePtr<i32>,
        residual: DevicePtrMut<bf16>,
        norm_weight: DevicePtr<bf16>,
        out: DevicePtrMut<bf16>,
        starts: [i32; MAX_RANKS + 1],
        groups: i32,
        group_ranks: i32,
        rank: i32,
        room: i32,
        hidden: i32,
        top: i32,
        eps: f32,
        limit_ms: u32,
        padding: i32,
    }
}

const _: () = assert!(size_of::<Args>() == 208);

/// Kernels for 2, 4 and 8 ranks.
#[derive(Debug)]
pub(crate) struct Variants([Kernel; 3]);

impl Variants {
    pub(crate) fn load(module: &Module) -> Result<Self> {
        let kernel = |name| module.kernel(name, 0);
        Ok(Self([kernel("reduce_scatter_2")?, kernel("reduce_scatter_4")?, kernel("reduce_scatter_8")?]))
    }
}

impl ReduceScatter<'_> {
    /// Returns once enqueued.
    ///
    /// # Errors
    /// `Size` if the operands disagree, `Dimension` for more tokens than the groups have room for or more than 8 experts a token,
    /// `Device` if the launch fails.
    pub fn enqueue(mut self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        let check = Checker("reduce_scatter");
        let (groups, starts, top) = (self.groups, self.starts, self.top);
        let (sizes, group) = (groups.sizes, groups.group());
        sizes.check_starts(check, starts)?;
        let (hidden, tokens) = (sizes.hidden, starts[sizes.groups]);
        let own = starts[group + 1] - starts[group];
        check.experts([tokens, top, hidden], self.weights.len(), self.slot.len(), self.y.len())?;
        check.size("out", own * hidden, self.out.len())?;
        self.norm.check(check, [own, hidden])?;
        let ThenNorm { mut residual, weight, eps } = self.norm;
        if tokens == 0 {
            return Ok(());
        }
        let args = Args {
            inboxes: groups.parts.addresses(stream),
            epochs: stream.output(&mut groups.part_epochs.view_mut()),
            host: groups.waiting.host(),
            failed: groups.waiting.failed(stream),
            y: stream.input(&self.y),
            weight: stream.input(&self.weights),
            slot: stream.input(&self.slot),
            residual: stream.output(&mut residual),
            norm_weight: stream.input(&weight),
            out: stream.output(&mut self.out),
            starts: start_words(starts),
            groups: int(sizes.groups),
            group_ranks: int(sizes.group_ranks),
            rank: int(groups.rank),
            room: int(sizes.tokens),
            hidden: int(hidden),
            top: int(top),
            eps,
            limit_ms: Waiting::LIMIT_MS,
            padding: 0,
        };
        let threads = (hidden / 8).next_multiple_of(32) as u32;
        // Blocks wait for each other across devices, so all must be resident: 128 registers a thread allow 512.
        let blocks = (kernels.multiprocessors * (512 / threads)).min(tokens as u32);
        let kernel = &kernels.reduce_scatter.0[sizes.ranks().ilog2() as usize - 1];
        // SAFETY: one thread for 8 values of a token, tokens below the checked ones; inboxes and epochs cover the sizes on every rank,
        // and the groups, which outlive their kernels, keep the host words.
        Ok(unsafe { kernel.launch(stream, LaunchConfig::linear(blocks, threads), &args) }?)
    }
}
