//! Brings the rows of each expert's tokens together.

use device::{DevicePtr, DevicePtrMut, LaunchConfig, Stream, View, ViewMut};
use half::bf16;

use crate::error::{Checker, Result, int};
use crate::{Kernels, Routing};

/// `out[s] = x[token of slot s]` for the slots of a [`Routing`]: the input of a grouped [`TileGemm`](crate::TileGemm).
#[derive(Debug)]
pub struct GatherRows<'a> {
    /// `[tokens, hidden]`
    pub x: View<'a, bf16>,
    /// Filled by [`Dispatch`](crate::Dispatch).
    pub routing: &'a Routing,
    /// `[tokens * top, hidden]`; rows beyond the last slot stay as they are.
    pub out: ViewMut<'a, bf16>,
    /// Values of a row.
    pub hidden: usize,
}

kernel_args! {
    struct Args = GatherRowsArgs in "gather_rows/gather_rows.cu" {
        x: DevicePtr<bf16>,
        slot: DevicePtr<i32>,
        out: DevicePtrMut<bf16>,
        tokens: i32,
        top: i32,
        row_words: i32,
        parts: i32,
    }
}

const _: () = assert!(size_of::<Args>() == 40);
/// Words of 16 bytes that a warp moves: constants of gather_rows.cu.
const WARP_WORDS: usize = 4 * 32;

impl GatherRows<'_> {
    /// Returns once enqueued.
    ///
    /// # Errors
    /// `Size` if the operands disagree, `Dimension` unless hidden is a multiple of 8, `Device` if the launch fails.
    pub fn enqueue(mut self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        let check = Checker("gather_rows");
        let hidden = self.hidden;
        check.dimension("hidden", hidden, "a multiple of 8", hidden > 0 && hidden.is_multiple_of(8))?;
        let tokens = self.x.len() / hidden;
        check.size("x", tokens * hidden, self.x.len())?;
        let slots = tokens * self.routing.top;
        check.room("routing", slots, self.routing.slot.len())?;
        check.size("out", slots * hidden, self.out.len())?;
        let parts = (hidden / 8).div_ceil(WARP_WORDS);
        let args = Args {
            x: stream.input(&self.x),
            slot: stream.input(&self.routing.slot.view()),
            out: stream.output(&mut self.out),
            tokens: int(tokens),
            top: int(self.routing.top),
            row_words: int(hidden / 8),
            parts: int(parts),
        };
        let blocks = ((tokens * parts).div_ceil(8) as u32).clamp(1, kernels.multiprocessors * 8);
        // SAFETY: a dispatch of these tokens filled `slot`, with numbers below `slots`, which `out` has room for.
        Ok(unsafe { kernels.gather_rows.launch(stream, LaunchConfig::linear(blocks, 256), &args) }?)
    }
}
