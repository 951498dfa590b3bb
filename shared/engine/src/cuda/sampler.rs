//! Sampling state of the slots, on the device.

use std::collections::BTreeMap;
use std::sync::Arc;

use device::{DeviceBuffer, Landing, PinnedBuffer, Stream, View};
use kernels::{MAX_TOP_LOGPROBS, Sample, SampleRow, SampleStatus};
use scheduler::plan::{RowFailure, SlotBinding};
use types::{SampledToken, Sampling, TokenId, TokenLogprob, TokenMask};

use super::pinned_ring::PinnedRing;
use super::rank::Gpu;
use crate::EngineError;

/// Draws that may be on their way to the host or being read there.
const DRAWS: usize = 3;

/// What the host knows of a bound slot.
struct SlotState {
    sampling: Arc<Sampling>,
    /// Index of the next token among the generated ones.
    output_idx: u32,
    counting: bool,
    num_biases: usize,
}

/// Draws tokens, and keeps what draws depend on by slot. Row `i` of a draw goes to entry `i` of each output.
pub(crate) struct DeviceSampler {
    slots: Vec<Option<SlotState>>,
    vocab: usize,
    /// `[slots, vocab]`, as `kernels::Sample::counts`.
    counts: DeviceBuffer<u16>,
    count_uploads: PinnedRing<u16>,
    /// `[slots, vocab]`: any list of distinct tokens fits.
    bias_tokens: DeviceBuffer<i32>,
    bias_values: DeviceBuffer<f32>,
    /// Bit mask of ids that may come out.
    assigned: DeviceBuffer<u32>,
    /// Grammar masks of a draw's rows, `[slots, ceil(vocab / 32)]`.
    masks: DeviceBuffer<u32>,
    tokens: DeviceBuffer<i32>,
    status: DeviceBuffer<u32>,
    logprobs: DeviceBuffer<f32>,
    top_tokens: DeviceBuffer<i32>,
    top_logprobs: DeviceBuffer<f32>,
    free: Vec<HostDraws>,
}

/// Page-locked copies of a draw's outputs.
struct HostDraws {
    tokens: PinnedBuffer<i32>,
    status: PinnedBuffer<u32>,
    reports: HostReports,
}

struct HostReports {
    logprobs: PinnedBuffer<f32>,
    top_tokens: PinnedBuffer<i32>,
    top_logprobs: PinnedBuffer<f32>,
}

/// A draw on its way to the host.
pub(crate) struct Drawing {
    tokens: Landing<i32>,
    status: Landing<u32>,
    reports: Reports,
    vocab: usize,
}

/// Log-probabilities are fetched for steps in which a row reports them.
enum Reports {
    Unused(HostReports),
    Landing { logprobs: Landing<f32>, top_tokens: Landing<i32>, top_logprobs: Landing<f32> },
}

/// A draw that has arrived.
pub(crate) struct Draws {
    host: HostDraws,
    vocab: usize,
}

impl DeviceSampler {
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(crate) fn new(
        stream: &Stream,
        slots: usize,
        vocab: usize,
        masked: &[std::ops::Range<TokenId>],
    ) -> Result<Self, EngineError> {
        let mut assigned = vec![u32::MAX; vocab.div_ceil(32)];
        for token in masked.iter().cloned().flatten() {
            assigned[token as usize / 32] &= !(1 << (token % 32));
        }
        Ok(Self {
            slots: (0..slots).map(|_| None).collect(),
            vocab,
            counts: stream.zeros(slots * vocab)?,
            count_uploads: PinnedRing::new(vocab, 2),
            bias_tokens: stream.zeros(slots * vocab)?,
            bias_values: stream.zeros(slots * vocab)?,
            assigned: stream.upload(&assigned)?,
            masks: stream.zeros(slots * vocab.div_ceil(32))?,
            tokens: stream.zeros(slots)?,
            status: stream.zeros(slots)?,
            logprobs: stream.zeros(slots)?,
            top_tokens: stream.zeros(slots * MAX_TOP_LOGPROBS)?,
            top_logprobs: stream.zeros(slots * MAX_TOP_LOGPROBS)?,
            free: (0..DRAWS).map(|_| HostDraws::new(stream, slots)).collect::<Result<_, _>>()?,
        })
    }

    /// Tokens of the last draw, in the order of its rows.
    pub(crate) fn tokens(&self) -> View<'_, i32> {
        self.tokens.view()
    }

    pub(crate) fn unbind(&mut self, slot: usize) {
        self.slots[slot] = None;
    }

    /// A sequence takes a slot: its counts and biases go to the device.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(crate) fn bind(&mut self, stream: &Stream, slot: usize, binding: &SlotBinding) -> Result<(), EngineError> {
        let sampling = &binding.sampling;
        let counting =
            sampling.repetition_penalty != 1.0 || sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0;
        let row = slot * self.vocab..(slot + 1) * self.vocab;
        if counting {
            let fill = |counts: &mut [u16]| {
                counts.fill(0);
                binding.prompt.iter().for_each(|token| counts[*token as usize] = 1);
                for token in &binding.generated {
                    let count = &mut counts[*token as usize];
                    *count = (*count).max(1).saturating_add(1);
                }
            };
            self.count_uploads.upload(stream, self.counts.slice_mut(row.clone()), fill)?;
        }
        let mut biases: BTreeMap<TokenId, f32> = BTreeMap::new();
        for (token, bias) in &sampling.logit_bias {
            *biases.entry(*token).or_default() += bias;
        }
        let num_biases = biases.len();
        if num_biases > 0 {
            let (tokens, values): (Vec<i32>, Vec<f32>) =
                biases.iter().map(|(token, bias)| (*token as i32, *bias)).unzip();
            let list = row.start..row.start + num_biases;
            stream.copy_from_host(self.bias_tokens.slice_mut(list.clone()), &tokens)?;
            stream.copy_from_host(self.bias_values.slice_mut(list), &values)?;
        }
        let output_idx = binding.generated.len() as u32;
        self.slots[slot] = Some(SlotState { sampling: sampling.clone(), output_idx, counting, num_biases });
        Ok(())
    }

    /// How the slot's next token is drawn; the one after it has the next index. `None` if the slot is not bound.
    pub(crate) fn next_row(&mut self, slot: usize) -> Option<SampleRow> {
        let state = self.slots[slot].as_mut()?;
        let sampling = &*state.sampling;
        let output_idx = state.output_idx;
        state.output_idx += 1;
        Some(SampleRow {
            seed: sampling.seed,
            choice: sampling.choice,
            output_idx,
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            top_k: sampling.top_k,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            repetition_penalty: sampling.repetition_penalty,
            counts_row: if state.counting { slot as i32 } else { -1 },
            mask_row: -1,
            bias_first: (slot * self.vocab) as i32,
            bias_count: state.num_biases as i32,
            logprobs: sampling.logprobs.map_or(-1, |top| top as i32),
        })
    }

    /// Puts the grammar mask of a draw's row in its place; `SampleRow::mask_row` names it.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(crate) fn set_mask(&mut self, stream: &Stream, row: usize, mask: &TokenMask) -> Result<(), EngineError> {
        let words = self.vocab.div_ceil(32);
        let mut padded = vec![0; words];
        let given = words.min(mask.words().len());
        padded[..given].copy_from_slice(&mask.words()[..given]);
        Ok(stream.copy_from_host(self.masks.slice_mut(row * words..(row + 1) * words), &padded)?)
    }

    /// Draws a token for each of `rows` from `logits`, `[rows, vocab]`.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(crate) fn draw(
        &mut self,
        gpu: &Gpu,
        logits: View<'_, f32>,
        rows: View<'_, SampleRow>,
    ) -> Result<(), EngineError> {
        let num_rows = rows.len();
        let sample = Sample {
            logits,
            rows,
            vocab: self.vocab,
            tokens: self.tokens.slice_mut(..num_rows),
            status: self.status.slice_mut(..num_rows),
            logprobs: self.logprobs.slice_mut(..num_rows),
            top_tokens: self.top_tokens.slice_mut(..num_rows * MAX_TOP_LOGPROBS),
            top_logprobs: self.top_logprobs.slice_mut(..num_rows * MAX_TOP_LOGPROBS),
            counts: self.counts.view_mut(),
            masks: self.masks.view(),
            assigned: Some(self.assigned.view()),
            bias_tokens: self.bias_tokens.view(),
            bias_values: self.bias_values.view(),
        };
        Ok(sample.enqueue(&gpu.kernels, &gpu.stream)?)
    }

    /// Starts the way of the last draw to the host.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(crate) fn fetch(&mut self, stream: &Stream, with_reports: bool) -> Result<Drawing, EngineError> {
        // Made here only if a caller runs further ahead than it should: page-locking memory may wait for kernels.
        let HostDraws { tokens, status, reports } = match self.free.pop() {
            Some(buffers) => buffers,
            None => HostDraws::new(stream, self.tokens.len())?,
        };
        Ok(Drawing {
            tokens: stream.download_into(self.tokens.view(), tokens)?,
            status: stream.download_into(self.status.view(), status)?,
            reports: if with_reports {
                Reports::Landing {
                    logprobs: stream.download_into(self.logprobs.view(), reports.logprobs)?,
                    top_tokens: stream.download_into(self.top_tokens.view(), reports.top_tokens)?,
                    top_logprobs: stream.download_into(self.top_logprobs.view(), reports.top_logprobs)?,
                }
            } else {
                Reports::Unused(reports)
            },
            vocab: self.vocab,
        })
    }

    /// Takes back the buffers of a draw that has been read.
    pub(crate) fn give_back(&mut self, draws: Draws) {
        self.free.push(draws.host);
    }
}

impl HostDraws {
    fn new(stream: &Stream, rows: usize) -> Result<Self, EngineError> {
        Ok(Self {
            tokens: PinnedBuffer::zeros(stream, rows)?,
            status: PinnedBuffer::zeros(stream, rows)?,
            reports: HostReports {
                logprobs: PinnedBuffer::zeros(stream, rows)?,
                top_tokens: PinnedBuffer::zeros(stream, rows * MAX_TOP_LOGPROBS)?,
                top_logprobs: PinnedBuffer::zeros(stream, rows * MAX_TOP_LOGPROBS)?,
            },
        })
    }
}

impl Drawing {
    /// Waits for the draw.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(crate) fn wait(self) -> Result<Draws, EngineError> {
        let reports = match self.reports {
            Reports::Unused(reports) => reports,
            Reports::Landing { logprobs, top_tokens, top_logprobs } => HostReports {
                logprobs: logprobs.wait()?,
                top_tokens: top_tokens.wait()?,
                top_logprobs: top_logprobs.wait()?,
            },
        };
        let host = HostDraws { tokens: self.tokens.wait()?, status: self.status.wait()?, reports };
        Ok(Draws { host, vocab: self.vocab })
    }
}

impl Draws {
    /// Row `row`, with log-probabilities if it was to report them (`Some(n)`: and the `n` most probable tokens).
    ///
    /// # Errors
    /// Why it has no token.
    pub(crate) fn row(&self, row: usize, logprobs: Option<u32>) -> Result<SampledToken, RowFailure> {
        let HostDraws { tokens, status, reports } = &self.host;
        let token = token_of(status[row], tokens[row], self.vocab)?;
        let first = row * MAX_TOP_LOGPROBS;
        let top = first..first + logprobs.unwrap_or(0) as usize;
        let tops = reports.top_tokens[top.clone()].iter().zip(&reports.top_logprobs[top]);
        Ok(SampledToken {
            token,
            logprob: logprobs.map(|_| reports.logprobs[row]),
            top: tops.map(|(token, logprob)| TokenLogprob { token: *token as TokenId, logprob: *logprob }).collect(),
        })
    }
}

/// What a row's status and token say. A token that does not exist is never passed on: the next step would look it up.
fn token_of(status: u32, token: i32, vocab: usize) -> Result<TokenId, RowFailure> {
    if status == SampleStatus::NothingAllowed as u32 {
        return Err(RowFailure::NothingAllowed);
    }
    let exists = TokenId::try_from(token).ok().filter(|token| (*token as usize) < vocab);
    exists.filter(|_| status == SampleStatus::Drawn as u32).ok_or(RowFailure::NotANumber)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_that_does_not_exist_is_none() {
        use SampleStatus::{Drawn, NotANumber, NothingAllowed};
        for (status, token, want) in [
            (Drawn as u32, 0, Ok(0)),
            (Drawn as u32, 99, Ok(99)),
            (Drawn as u32, 100, Err(RowFailure::NotANumber)),
            (Drawn as u32, -1, Err(RowFailure::NotANumber)),
            (NotANumber as u32, 0, Err(RowFailure::NotANumber)),
            (NothingAllowed as u32, 0, Err(RowFailure::NothingAllowed)),
            (3, 0, Err(RowFailure::NotANumber)),
        ] {
            assert_eq!(token_of(status, token, 100), want, "status {status}, token {token}");
        }
    }
}
