//! Sum of the parts of several ranks, each where its rank left it.

use device::{DevicePtrMut, LaunchConfig, PeerBuffer, Stream, ViewMut};
use half::bf16;

use crate::Kernels;
use crate::error::{Checker, Result, int};
use crate::inbox::MAX_RANKS;

const THREADS: u32 = 256;

/// `out[i] = part_0[i] + part_1[i] + ..` in f32, rounded once: what [`AllReduce`](crate::AllReduce) computes, for ranks that share
/// GPUs and therefore must not wait for each other in kernels. The caller sees to it that the parts are there.
#[derive(Debug)]
pub struct SumRanks<'a> {
    /// Of all ranks, in order; of each the first values.
    pub parts: &'a [PeerBuffer<bf16>],
    /// First value within each part.
    pub first: usize,
    /// The sum; a multiple of 8 values.
    pub out: ViewMut<'a, bf16>,
}

kernel_args! {
    struct Args = SumRanksArgs in "sum_ranks/sum_ranks.cu" {
        parts: [u64; MAX_RANKS],
        out: DevicePtrMut<bf16>,
        values: i64,
        ranks: i32,
        padding: i32,
    }
}

const _: () = assert!(size_of::<Args>() == 88);

impl SumRanks<'_> {
    /// Returns once enqueued.
    ///
    /// # Errors
    /// `Size` if a part is too short, `Dimension` unless values come in eights, `Device` if the launch fails.
    pub fn enqueue(mut self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        let check = Checker("sum_ranks");
        let (values, ranks) = (self.out.len(), self.parts.len());
        check.dimension("ranks", ranks, "1 to 8", (1..=MAX_RANKS).contains(&ranks))?;
        let in_eights = values.is_multiple_of(8) && self.first.is_multiple_of(8);
        check.dimension("values", values, "a multiple of 8, from a multiple of 8 on", in_eights)?;
        let mut parts = [0; MAX_RANKS];
        for (address, part) in parts.iter_mut().zip(self.parts) {
            check.room("part", self.first + values, part.len())?;
            *address = stream.peer(part).address() + (self.first * size_of::<bf16>()) as u64;
        }
        if values == 0 {
            return Ok(());
        }
        let out = stream.output(&mut self.out);
        let args = Args { parts, out, values: values as i64, ranks: int(ranks), padding: 0 };
        let blocks = (values / 8).div_ceil(THREADS as usize) as u32;
        // SAFETY: a thread for 8 values, and none beyond `values`, which out and parts cover.
        Ok(unsafe { kernels.sum_ranks.launch(stream, LaunchConfig::linear(blocks, THREADS), &args) }?)
    }
}
