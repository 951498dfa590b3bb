//! All-reduce over the GPUs of a group, fused with what lies before and behind it.

use device::{DevicePtr, DevicePtrMut, Kernel, LaunchConfig, Module, Stream, View, ViewMut};
use half::bf16;

use crate::Kernels;
use crate::error::{Checker, Result, int};
use crate::inbox::{MAX_RANKS, Waiting};
use crate::peers::PeerGroup;

/// A rank's part of a sum over ranks.
#[derive(Debug, Clone, Copy)]
pub enum Summand<'a> {
    /// As it is, `[tokens, hidden]`.
    Values(View<'a, bf16>),
    /// The weighted sum of the outputs of its experts, rounded once, as [`Combine`](crate::Combine) makes it.
    Experts {
        /// Outputs of experts, `[slots, hidden]`.
        y: View<'a, bf16>,
        /// `[tokens, top]`
        weights: View<'a, f32>,
        /// Row of `y` of each pair, `[tokens, top]`; negative where another rank has it.
        slot: View<'a, i32>,
        /// Experts of a token.
        top: usize,
    },
}

/// Residual add and norm behind a sum, as [`RmsNorm`](crate::RmsNorm) with the sum as its delta.
#[derive(Debug)]
pub struct ThenNorm<'a> {
    /// `[tokens, hidden]`
    pub residual: ViewMut<'a, bf16>,
    /// `[hidden]`
    pub weight: View<'a, bf16>,
    /// Added to the mean square.
    pub eps: f32,
}

impl ThenNorm<'_> {
    /// Whether the operands fit `[tokens, hidden]`.
    ///
    /// # Errors
    /// `Size`.
    pub(crate) fn check(&self, check: Checker, [tokens, hidden]: [usize; 2]) -> Result<()> {
        check.size("residual", tokens * hidden, self.residual.len())?;
        check.size("norm weight", hidden, self.weight.len())
    }
}

/// How parts travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exchange {
    /// Data and their arrival in one word: soonest there, twice the bytes.
    Packets,
    /// Data, then a flag a token.
    Bulk,
}

/// `sum[t, h] = part_0[t, h] + part_1[t, h] + ..` over the ranks of a group in f32, rounded once, the same bits on every rank;
/// then the norm of residual and sum, or the sum as it is.
///
/// Every rank enqueues the same exchange. It waits for the other ranks while it runs: ranks must be on different GPUs.
#[derive(Debug)]
pub struct AllReduce<'a> {
    /// This rank's part.
    pub part: Summand<'a>,
    /// What follows; `None`: `out` is the sum.
    pub norm: Option<ThenNorm<'a>>,
    /// `[tokens, hidden]`
    pub out: ViewMut<'a, bf16>,
    /// The ranks.
    pub group: &'a mut PeerGroup,
    /// How.
    pub exchange: Exchange,
}

kernel_args! {
    struct Args = AllReduceArgs in "all_reduce/all_reduce.cu" {
        inboxes: [u64; MAX_RANKS],
        flags: [u64; MAX_RANKS],
        epochs: DevicePtrMut<u32>,
        host: DevicePtrMut<u32>,
        failed: DevicePtrMut<u32>,
        values: DevicePtr<bf16>,
        y: DevicePtr<bf16>,
        weight: DevicePtr<f32>,
        slot: DevicePtr<i32>,
        residual: DevicePtrMut<bf16>,
        norm_weight: DevicePtr<bf16>,
        out: DevicePtrMut<bf16>,
        rank: i32,
        tokens: i32,
        room: i32,
        hidden: i32,
        top: i32,
        eps: f32,
        limit_ms: u32,
        padding: i32,
    }
}

const _: () = assert!(size_of::<Args>() == 240);

/// Kernels for 2, 4 and 8 ranks.
#[derive(Debug)]
pub(crate) struct Variants {
    packets: [Kernel; 3],
    bulk: [Kernel; 3],
}

impl Variants {
    pub(crate) fn load(module: &Module) -> Result<Self> {
        let kernel = |name| module.kernel(name, 0);
        Ok(Self {
            packets: [
                kernel("all_reduce_packets_2")?,
                kernel("all_reduce_packets_4")?,
                kernel("all_reduce_packets_8")?,
            ],
            bulk: [kernel("all_reduce_bulk_2")?, kernel("all_reduce_bulk_4")?, kernel("all_reduce_bulk_8")?],
        })
    }
}

impl AllReduce<'_> {
    /// Returns once enqueued.
    ///
    /// # Errors
    /// `Size` if the operands disagree, `Dimension` for more tokens than the group has room for or more than 8 experts a token,
    /// `Device` if the launch fails.
    pub fn enqueue(mut self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        let check = Checker("all_reduce");
        let (hidden, group) = (self.group.sizes.hidden, self.group);
        let tokens = self.out.len() / hidden;
        check.size("out", tokens * hidden, self.out.len())?;
        let mut args = Args::of(group, stream, self.exchange, tokens);
        match self.part {
            Summand::Values(values) => {
                check.size("values", tokens * hidden, values.len())?;
                args.values = stream.input(&values);
            }
            Summand::Experts { y, weights, slot, top } => {
                check.experts([tokens, top, hidden], weights.len(), slot.len(), y.len())?;
                args.y = stream.input(&y);
                args.weight = stream.input(&weights);
                args.slot = stream.input(&slot);
                args.top = int(top);
            }
        }
        if let Some(norm) = self.norm {
            norm.check(check, [tokens, hidden])?;
            let ThenNorm { mut residual, weight, eps } = norm;
            args.residual = stream.output(&mut residual);
            args.norm_weight = stream.input(&weight);
            args.eps = eps;
        }
        args.out = stream.output(&mut self.out);
        if tokens == 0 {
            return Ok(());
        }
        let threads = (hidden / 8).next_multiple_of(32) as u32;
        let variant = group.sizes.ranks.ilog2() as usize - 1;
        let (kernel, blocks) = match self.exchange {
            Exchange::Packets => {
                let room = group.sizes.packet_tokens;
                check.dimension("tokens", tokens, "at most those of an exchange in packets", tokens <= room)?;
                (&kernels.all_reduce.packets[variant], tokens as u32)
            }
            Exchange::Bulk => {
                let room = group.sizes.bulk_tokens;
                check.dimension("tokens", tokens, "at most those of an exchange in bulk", tokens <= room)?;
                // Blocks wait for each other across devices, so all must be resident: 64 registers a thread allow 1024.
                let resident = kernels.multiprocessors * (1024 / threads);
                (&kernels.all_reduce.bulk[variant], resident.min(tokens as u32))
            }
        };
        // SAFETY: one thread for 8 values of a token, tokens below the checked ones; inboxes, flags and epochs cover the group's
        // sizes on every rank, and the group, which outlives its kernels, keeps the host words.
        Ok(unsafe { kernel.launch(stream, LaunchConfig::linear(blocks, threads), &args) }?)
    }
}

impl Args {
    /// With the addresses of the group, and nothing to sum.
    fn of(group: &mut PeerGroup, stream: &Stream, exchange: Exchange, tokens: usize) -> Self {
        let (inboxes, epochs, room) = match exchange {
            Exchange::Packets => (group.packets.addresses(stream), &mut group.packet_epochs, group.sizes.packet_tokens),
            Exchange::Bulk => (group.bulk.addresses(stream), &mut group.bulk_epochs, group.sizes.bulk_tokens),
        };
        Self {
            inboxes,
            flags: group.flags.addresses(stream),
            epochs: stream.output(&mut epochs.view_mut()),
            host: group.waiting.host(),
            failed: group.waiting.failed(stream),
            values: DevicePtr::NULL,
            y: DevicePtr::NULL,
            weight: DevicePtr::NULL,
            slot: DevicePtr::NULL,
            residual: DevicePtrMut::NULL,
            norm_weight: DevicePtr::NULL,
            out: DevicePtrMut::NULL,
            rank: int(group.rank),
            tokens: int(tokens),
            room: int(room),
            hidden: int(group.sizes.hidden),
            top: 0,
            eps: 0.0,
            limit_ms: Waiting::LIMIT_MS,
            padding: 0,
        }
    }
}
