//! From token numbers to the residual stream.

use device::{DevicePtr, DevicePtrMut, LaunchConfig, Stream, View, ViewMut};
use half::bf16;

use crate::Kernels;
use crate::error::{Checker, Result, int};

/// `out[t] = table[id(t)]`, where `id(t)` is `tokens[t]`, or `sampled[-1 - tokens[t]]` if that is negative: so a step can begin before the
/// host has read what the step before has drawn.
#[derive(Debug)]
pub struct Embed<'a> {
    /// `[vocab, hidden]`
    pub table: View<'a, bf16>,
    /// `[tokens]`
    pub tokens: View<'a, i32>,
    /// What [`Sample`](crate::Sample) wrote.
    pub sampled: View<'a, i32>,
    /// `[tokens, hidden]`
    pub out: ViewMut<'a, bf16>,
    /// Values of a row.
    pub hidden: usize,
}

kernel_args! {
    struct Args = EmbedArgs in "embed/embed.cu" {
        table: DevicePtr<bf16>,
        tokens: DevicePtr<i32>,
        sampled: DevicePtr<i32>,
        out: DevicePtrMut<bf16>,
        row_words: i32,
        padding: i32,
    }
}

const _: () = assert!(size_of::<Args>() == 40);

impl Embed<'_> {
    /// Returns once enqueued. Every id is below the vocabulary, and every entry of `sampled` that is named exists.
    ///
    /// # Errors
    /// `Size` if the operands disagree, `Dimension` unless hidden is a multiple of 8, `Device` if the launch fails.
    pub fn enqueue(mut self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        let check = Checker("embed");
        let (hidden, tokens) = (self.hidden, self.tokens.len());
        check.dimension("hidden", hidden, "a multiple of 8", hidden > 0 && hidden.is_multiple_of(8))?;
        check.size("table", self.table.len() / hidden * hidden, self.table.len())?;
        check.size("out", tokens * hidden, self.out.len())?;
        if tokens == 0 {
            return Ok(());
        }
        let args = Args {
            table: stream.input(&self.table),
            tokens: stream.input(&self.tokens),
            sampled: stream.input(&self.sampled),
            out: stream.output(&mut self.out),
            row_words: int(hidden / 8),
            padding: 0,
        };
        let threads = (hidden / 8).next_multiple_of(32).min(1024) as u32;
        // SAFETY: one block a token, whose row of `out` is covered as checked; that ids are rows of the table is the caller's contract.
        Ok(unsafe { kernels.embed.launch(stream, LaunchConfig::linear(tokens as u32, threads), &args) }?)
    }
}
