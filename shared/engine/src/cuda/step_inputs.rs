//! What a step takes from the host: token numbers, positions, slots, contexts, which tokens are there, and how rows are drawn.

use device::{DeviceBuffer, Stream, View};
use kernels::SampleRow;

use super::batch::Batch;
use crate::EngineError;

/// Copies up to this size are taken from the caller's memory at once, without waiting for the stream.
const COPY_WORDS: usize = 8 << 10;

/// Device memory that each step overwrites, behind the step before.
pub(crate) struct StepInputs {
    /// Four arrays of the tokens of the rank's attention group, one after the other: tokens, positions, slots, contexts; then,
    /// where a batch of several groups is padded, which tokens of all of them are there.
    words: DeviceBuffer<i32>,
    rows: DeviceBuffer<SampleRow>,
    host: Vec<i32>,
}

impl StepInputs {
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(crate) fn new(stream: &Stream, max_tokens: usize, max_rows: usize) -> Result<Self, EngineError> {
        let (words, rows) = (stream.zeros(5 * max_tokens)?, stream.zeros(max_rows)?);
        Ok(Self { words, rows, host: Vec::with_capacity(5 * max_tokens) })
    }

    /// Enqueues the copies of what a batch's forward pass reads.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(crate) fn upload(&mut self, stream: &Stream, batch: &Batch) -> Result<(), EngineError> {
        self.host.clear();
        for part in [&batch.tokens, &batch.positions, &batch.slots, &batch.contexts, &batch.present] {
            self.host.extend_from_slice(part);
        }
        for (i, piece) in self.host.chunks(COPY_WORDS).enumerate() {
            let first = i * COPY_WORDS;
            stream.copy_from_host(self.words.slice_mut(first..first + piece.len()), piece)?;
        }
        Ok(())
    }

    /// Enqueues the copy of how rows are drawn.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(crate) fn upload_rows(&mut self, stream: &Stream, rows: &[SampleRow]) -> Result<(), EngineError> {
        Ok(stream.copy_from_host(self.rows.slice_mut(..rows.len()), rows)?)
    }

    /// Token numbers of a step of `tokens` tokens; negative ones stand for tokens of the draw before, see
    /// `kernels::Embed`.
    pub(crate) fn tokens(&self, tokens: usize) -> View<'_, i32> {
        self.words.slice(..tokens)
    }

    pub(crate) fn positions(&self, tokens: usize) -> View<'_, i32> {
        self.words.slice(tokens..2 * tokens)
    }

    pub(crate) fn slots(&self, tokens: usize) -> View<'_, i32> {
        self.words.slice(2 * tokens..3 * tokens)
    }

    /// Keys of each decode row, its own included.
    pub(crate) fn contexts(&self, tokens: usize, decode_rows: usize) -> View<'_, i32> {
        self.words.slice(3 * tokens..3 * tokens + decode_rows)
    }

    /// Which of the tokens of all groups are there; `None` if the batch is not padded.
    pub(crate) fn present(&self, batch: &Batch) -> Option<View<'_, i32>> {
        let first = 4 * batch.tokens.len();
        (!batch.present.is_empty()).then(|| self.words.slice(first..first + batch.present.len()))
    }

    pub(crate) fn sample_rows(&self, rows: usize) -> View<'_, SampleRow> {
        self.rows.slice(..rows)
    }
}
