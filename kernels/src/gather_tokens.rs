//! The tokens of all attention groups, on every rank.

use device::{DevicePtr, DevicePtrMut, LaunchConfig, Stream, View, ViewMut};
use half::bf16;

use crate::Kernels;
use crate::all_reduce::ThenNorm;
use crate::error::{Checker, Result, int};
use crate::groups::{AttentionGroups, start_words};
use crate::inbox::{MAX_RANKS, Waiting};

/// `out[starts[g] + t, h] = row of token t of group g`, for all attention groups, on every rank: what the experts, which are everybody's,
/// need of tokens that a group keeps to itself. The ranks of a group have the same rows; each passes them to one rank of every other
/// group.
///
/// Every rank enqueues the same gather. It waits for the other groups while it runs: ranks must be on different GPUs.
#[derive(Debug)]
pub struct GatherTokens<'a> {
    /// `[own tokens, hidden]`: the group's rows; with `norm`, what is added to the residual before.
    pub values: View<'a, bf16>,
    /// What makes rows of values; `None`: they are the rows.
    pub norm: Option<ThenNorm<'a>>,
    /// `[tokens of all groups, hidden]`
    pub out: ViewMut<'a, bf16>,
    /// First token of each group, and the number of all.
    pub starts: &'a [usize],
    /// The ranks.
    pub groups: &'a mut AttentionGroups,
}

kernel_args! {
    struct Args = GatherTokensArgs in "gather_tokens/gather_tokens.cu" {
        inboxes: [u64; MAX_RANKS],
        epochs: DevicePtrMut<u32>,
        host: DevicePtrMut<u32>,
        failed: DevicePtrMut<u32>,
        values: DevicePtr<bf16>,
        residual: DevicePtrMut<bf16>,
        norm_weight: DevicePtr<bf16>,
        out: DevicePtrMut<bf16>,
        starts: [i32; MAX_RANKS + 1],
        group: i32,
        groups: i32,
        room: i32,
        hidden: i32,
        eps: f32,
        limit_ms: u32,
        padding: i32,
    }
}

const _: () = assert!(size_of::<Args>() == 184);

impl GatherTokens<'_> {
    /// Returns once enqueued.
    ///
    /// # Errors
    /// `Size` if the operands disagree, `Dimension` for more tokens than the groups have room for, `Device` if the launch fails.
    pub fn enqueue(mut self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        let check = Checker("gather_tokens");
        let (groups, starts) = (self.groups, self.starts);
        let (sizes, group) = (groups.sizes, groups.group());
        sizes.check_starts(check, starts)?;
        let (hidden, tokens) = (sizes.hidden, starts[sizes.groups]);
        let own = starts[group + 1] - starts[group];
        check.size("values", own * hidden, self.values.len())?;
        check.size("out", tokens * hidden, self.out.len())?;
        if tokens == 0 {
            return Ok(());
        }
        let (mut residual, mut norm_weight, mut eps) = (DevicePtrMut::NULL, DevicePtr::NULL, 0.0);
        if let Some(mut norm) = self.norm {
            norm.check(check, [own, hidden])?;
            (residual, norm_weight, eps) = (stream.output(&mut norm.residual), stream.input(&norm.weight), norm.eps);
        }
        let mut inboxes = [0; MAX_RANKS];
        let (place, rows) = (groups.rank % sizes.group_ranks, groups.rows.addresses(stream));
        for (inbox, rows) in inboxes.iter_mut().zip(rows.iter().skip(place).step_by(sizes.group_ranks)) {
            *inbox = *rows;
        }
        let args = Args {
            inboxes,
            epochs: stream.output(&mut groups.row_epochs.view_mut()),
            host: groups.waiting.host(),
            failed: groups.waiting.failed(stream),
            values: stream.input(&self.values),
            residual,
            norm_weight,
            out: stream.output(&mut self.out),
            starts: start_words(starts),
            group: int(group),
            groups: int(sizes.groups),
            room: int(sizes.tokens),
            hidden: int(hidden),
            eps,
            limit_ms: Waiting::LIMIT_MS,
            padding: 0,
        };
        let threads = (hidden / 8).next_multiple_of(32) as u32;
        // Blocks wait for each other across devices, so all must be resident: 64 registers a thread allow 1024.
        let blocks = (kernels.multiprocessors * (1024 / threads)).min(tokens as u32);
        // SAFETY: one thread for 8 values of a token, tokens below the checked ones; inboxes and epochs cover the sizes on every rank,
        // and the groups, which outlive their kernels, keep the host words.
        Ok(unsafe { kernels.gather_tokens.launch(stream, LaunchConfig::linear(blocks, threads), &args) }?)
    }
}
