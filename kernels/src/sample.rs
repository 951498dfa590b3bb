//! Sampling: from logits to a token, on the device.

use bytemuck::{Pod, Zeroable};
use device::{DevicePtr, DevicePtrMut, LaunchConfig, Stream, View, ViewMut};

use crate::Kernels;
use crate::error::{Checker, Result, int};

/// Blocks that share a row: a constant of sample.cu.
const CLUSTER: usize = 8;
/// Shared memory for a block's slice of logits; larger vocabularies than 8 such slices are refused.
pub(crate) const SHARED_BYTES: u32 = 102 * 1024;
/// Alternatives that a row can report.
pub const MAX_TOP_LOGPROBS: usize = 20;

kernel_struct! {
    /// How one row is sampled; `types::Sampling` with indices into the operands in place of lists. `Default` is greedy.
    #[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
    pub struct SampleRow = SampleRow in "sample/sample.cu" as ROW {
        /// Key of the random generator.
        pub seed: u64,
        /// Which of several answers to one prompt this is.
        pub choice: u32,
        /// Index of the token among the generated ones: with seed and choice it fixes the draw.
        pub output_idx: u32,
        /// 0 takes the greatest logit, the lowest id among equals.
        pub temperature: f32,
        /// 1 is neutral.
        pub top_p: f32,
        /// 0 is neutral.
        pub min_p: f32,
        /// 0 is neutral.
        pub top_k: u32,
        /// Subtracted once from logits of generated tokens.
        pub presence_penalty: f32,
        /// Subtracted from a logit for each time its token was generated.
        pub frequency_penalty: f32,
        /// Divides positive, multiplies negative logits of tokens that were seen.
        pub repetition_penalty: f32,
        /// Row of [`Sample::counts`]; negative: no penalties.
        pub counts_row: i32,
        /// Row of [`Sample::masks`]; negative: no mask.
        pub mask_row: i32,
        /// First entry in the bias lists.
        pub bias_first: i32,
        /// Entries in the bias lists.
        pub bias_count: i32,
        /// Alternatives to report, at most [`MAX_TOP_LOGPROBS`]; negative: report nothing.
        pub logprobs: i32,
    }
}

impl Default for SampleRow {
    fn default() -> Self {
        Self { top_p: 1.0, repetition_penalty: 1.0, counts_row: -1, mask_row: -1, logprobs: -1, ..Self::zeroed() }
    }
}

/// What became of a row: the values of [`Sample::status`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum SampleStatus {
    /// A token was drawn.
    Drawn = 0,
    /// The logits hold a NaN or plus infinity; the token is 0 and means nothing.
    NotANumber = 1,
    /// Masks and infinities leave no token; the token is 0 and means nothing.
    NothingAllowed = 2,
}

/// Draws a token a row. Penalties, bias and masks; temperature; top-k; top-p over what top-k left; min-p; the draw: by id when
/// neither top-k nor top-p is set, else in order of falling probability. A function of a row's own operands alone, whatever
/// the batch.
#[derive(Debug)]
pub struct Sample<'a> {
    /// `[rows, vocab]`
    pub logits: View<'a, f32>,
    /// `[rows]`
    pub rows: View<'a, SampleRow>,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// `[rows]`
    pub tokens: ViewMut<'a, i32>,
    /// [`SampleStatus`] of each row, `[rows]`.
    pub status: ViewMut<'a, u32>,
    /// Log-probability of each token under the logits as given, `[rows]`.
    pub logprobs: ViewMut<'a, f32>,
    /// Most probable tokens, `[rows, 20]`.
    pub top_tokens: ViewMut<'a, i32>,
    /// Their log-probabilities, `[rows, 20]`.
    pub top_logprobs: ViewMut<'a, f32>,
    /// `[count rows, vocab]`: 0 unseen, 1 in the prompt only, 1 + n generated n times. The token drawn is counted.
    pub counts: ViewMut<'a, u16>,
    /// Bit masks of allowed tokens, `[mask rows, ceil(vocab / 32)]`.
    pub masks: View<'a, u32>,
    /// Bit mask of ids that exist, `[ceil(vocab / 32)]`; `None`: all.
    pub assigned: Option<View<'a, u32>>,
    /// Tokens of all rows' bias lists.
    pub bias_tokens: View<'a, i32>,
    /// What is added to their logits.
    pub bias_values: View<'a, f32>,
}

kernel_args! {
    struct Args = SampleArgs in "sample/sample.cu" {
        logits: DevicePtr<f32>,
        rows: DevicePtr<SampleRow>,
        token: DevicePtrMut<i32>,
        status: DevicePtrMut<u32>,
        logprob: DevicePtrMut<f32>,
        top_token: DevicePtrMut<i32>,
        top_logprob: DevicePtrMut<f32>,
        counts: DevicePtrMut<u16>,
        masks: DevicePtr<u32>,
        assigned: DevicePtr<u32>,
        bias_token: DevicePtr<i32>,
        bias_value: DevicePtr<f32>,
        vocab: i32,
        slice: i32,
    }
}

const _: () = assert!(size_of::<Args>() == 104 && size_of::<SampleRow>() == 64);

impl Sample<'_> {
    /// Returns once enqueued. Rows name counts, masks and bias entries that exist.
    ///
    /// # Errors
    /// `Size` if the operands disagree, `Dimension` for an empty vocabulary or one above 208,896, `Device` if the launch fails.
    pub fn enqueue(mut self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        let check = Checker("sample");
        let (rows, vocab) = (self.rows.len(), self.vocab);
        let slice = vocab.div_ceil(CLUSTER).next_multiple_of(4);
        check.dimension("vocab", vocab, "1 to 208,896", vocab > 0 && slice * 4 <= SHARED_BYTES as usize)?;
        check.size("logits", rows * vocab, self.logits.len())?;
        check.size("tokens", rows, self.tokens.len())?;
        check.size("status", rows, self.status.len())?;
        check.size("logprobs", rows, self.logprobs.len())?;
        check.size("top tokens", rows * MAX_TOP_LOGPROBS, self.top_tokens.len())?;
        check.size("top logprobs", rows * MAX_TOP_LOGPROBS, self.top_logprobs.len())?;
        check.size("bias values", self.bias_tokens.len(), self.bias_values.len())?;
        if let Some(assigned) = &self.assigned {
            check.size("assigned", vocab.div_ceil(32), assigned.len())?;
        }
        if rows == 0 {
            return Ok(());
        }
        let args = Args {
            logits: stream.input(&self.logits),
            rows: stream.input(&self.rows),
            token: stream.output(&mut self.tokens),
            status: stream.output(&mut self.status),
            logprob: stream.output(&mut self.logprobs),
            top_token: stream.output(&mut self.top_tokens),
            top_logprob: stream.output(&mut self.top_logprobs),
            counts: stream.output(&mut self.counts),
            masks: stream.input(&self.masks),
            assigned: self.assigned.map_or(DevicePtr::NULL, |assigned| stream.input(&assigned)),
            bias_token: stream.input(&self.bias_tokens),
            bias_value: stream.input(&self.bias_values),
            vocab: int(vocab),
            slice: int(slice),
        };
        let config =
            LaunchConfig { shared_bytes: (slice * 4) as u32, ..LaunchConfig::linear((rows * CLUSTER) as u32, 512) };
        // SAFETY: every row's operands are covered as checked; that rows name existing counts, masks and biases is their contract.
        Ok(unsafe { kernels.sample.launch(stream, config, &args) }?)
    }
}
