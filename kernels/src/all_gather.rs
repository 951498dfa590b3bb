//! All-gather of columns: every rank gets the matrix of which each holds some columns.

use device::{DevicePtr, DevicePtrMut, LaunchConfig, PeerBuffer, Stream, View};

use crate::Kernels;
use crate::error::{Checker, Result, int};
use crate::inbox::{MAX_RANKS, Waiting};
use crate::peers::{GATHER_BLOCKS, PeerGroup};

/// `out_p[t, first_col + c] = part[t, c]` on every rank `p`: logits of the whole vocabulary from those of each rank's rows of the
/// head.
///
/// Within a [`PeerGroup`] every rank enqueues the same gather and waits for the others while it runs. Without one, see
/// [`Self::enqueue_ordered`].
#[derive(Debug)]
pub struct AllGather<'a> {
    /// This rank's columns, `[rows, cols]`.
    pub part: View<'a, f32>,
    /// Rows.
    pub rows: usize,
    /// Column of the whole matrix at which this rank's begin.
    pub first_col: usize,
    /// Columns of the whole matrix.
    pub pitch: usize,
}

kernel_args! {
    struct Args = AllGatherArgs in "all_gather/all_gather.cu" {
        part: DevicePtr<f32>,
        outs: [u64; MAX_RANKS],
        flags: [u64; MAX_RANKS],
        epochs: DevicePtrMut<u32>,
        host: DevicePtrMut<u32>,
        failed: DevicePtrMut<u32>,
        rank: i32,
        ranks: i32,
        rows: i32,
        cols: i32,
        first: i32,
        pitch: i32,
        limit_ms: u32,
        padding: i32,
    }
}

const _: () = assert!(size_of::<Args>() == 192);

impl AllGather<'_> {
    /// Into each rank's `gathered`. Returns once enqueued. What lies in a rank's `gathered` is overwritten only when that rank's
    /// stream has come to this gather.
    ///
    /// # Errors
    /// `Size` if the operands disagree, `Dimension` unless columns come in fours, `Device` if the launch fails.
    pub fn enqueue(self, group: &mut PeerGroup, kernels: &Kernels, stream: &Stream) -> Result<()> {
        let mut args = self.args(group.rank, group.gathered.of_ranks(), stream)?;
        args.flags = group.gather_flags.addresses(stream);
        args.epochs = stream.output(&mut group.gather_epochs.view_mut());
        args.host = group.waiting.host();
        args.failed = group.waiting.failed(stream);
        launch(&args, kernels, stream)
    }

    /// Into `outs`, one for each rank, this one being `rank`. The caller sees to it that every rank has read what lies there, and
    /// that it waits for the parts of all. Returns once enqueued.
    ///
    /// # Errors
    /// As [`Self::enqueue`].
    pub fn enqueue_ordered(
        self,
        rank: usize,
        outs: &[PeerBuffer<f32>],
        kernels: &Kernels,
        stream: &Stream,
    ) -> Result<()> {
        launch(&self.args(rank, outs, stream)?, kernels, stream)
    }

    fn args(&self, rank: usize, gathered: &[PeerBuffer<f32>], stream: &Stream) -> Result<Args> {
        let check = Checker("all_gather");
        let (rows, pitch, first_col) = (self.rows, self.pitch, self.first_col);
        let cols = self.part.len() / rows.max(1);
        check.dimension("ranks", gathered.len(), "1 to 8", (1..=MAX_RANKS).contains(&gathered.len()))?;
        check.size("part", rows * cols, self.part.len())?;
        let in_fours = [cols, pitch, first_col].iter().all(|value| value.is_multiple_of(4));
        check.dimension(
            "columns",
            cols,
            "a multiple of 4, at a multiple of 4",
            in_fours && first_col + cols <= pitch,
        )?;
        let mut outs = [0; MAX_RANKS];
        for (out, buffer) in outs.iter_mut().zip(gathered) {
            check.room("gathered", rows * pitch, buffer.len())?;
            *out = stream.peer(buffer).address();
        }
        Ok(Args {
            part: stream.input(&self.part),
            outs,
            flags: [0; MAX_RANKS],
            epochs: DevicePtrMut::NULL,
            host: DevicePtrMut::NULL,
            failed: DevicePtrMut::NULL,
            rank: int(rank),
            ranks: int(gathered.len()),
            rows: int(rows),
            cols: int(cols),
            first: int(first_col),
            pitch: int(pitch),
            limit_ms: Waiting::LIMIT_MS,
            padding: 0,
        })
    }
}

fn launch(args: &Args, kernels: &Kernels, stream: &Stream) -> Result<()> {
    if args.rows == 0 {
        return Ok(());
    }
    // SAFETY: rows and columns lie within part and outs, as checked; flags and epochs have room for these blocks, which are few enough
    // to be resident together.
    Ok(unsafe { kernels.all_gather.launch(stream, LaunchConfig::linear(GATHER_BLOCKS as u32, 512), args) }?)
}
