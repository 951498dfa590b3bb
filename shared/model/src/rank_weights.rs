//! The weights of one rank: exactly the rows and columns that its [`ShardPlan`] names, read out of the mapped
//! checkpoint.
//!
//! What lies in one piece in the file is borrowed from the mapping ([`Buffer`]); only columns of o_proj and of down
//! matrices that are shared between ranks are copied. Other ranks' bytes are not touched.

use std::ops::Range;

use half::bf16;

use crate::buffer::Buffer;
use crate::checkpoint::{Checkpoint, CheckpointError, Tensor};
use crate::config::ModelConfig;
use crate::fp8::{self, Fp8Matrix};
use crate::mxfp4::{self, BLOCK_BYTES, BLOCK_VALUES, SCALE_NAN};
use crate::param::{LayerParam, Param};
use crate::scheme::{DenseFormat, ExpertFormat, WeightScheme};
use crate::sharding::ShardPlan;

/// Blocks, scales and FP8 values of the two matrices of an expert.
const GATE_UP: [LayerParam; 3] = [LayerParam::GateUpBlocks, LayerParam::GateUpScales, LayerParam::GateUpFp8];
const DOWN: [LayerParam; 3] = [LayerParam::DownBlocks, LayerParam::DownScales, LayerParam::DownFp8];

/// A bf16 matrix, row-major `[rows, cols]` = `[out, in]`.
#[derive(Debug, Clone)]
pub struct Matrix {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// `rows * cols` values.
    pub values: Buffer<bf16>,
}

impl Matrix {
    /// The weights of one output feature.
    ///
    /// # Panics
    /// If there is no such row.
    #[must_use]
    pub fn row(&self, row: usize) -> &[bf16] {
        &self.values[row * self.cols..][..self.cols]
    }
}

/// `y = x W^T + b`.
#[derive(Debug, Clone)]
pub struct Linear {
    /// `[out, in]`
    pub weight: Matrix,
    /// `[out]`
    pub bias: Buffer<bf16>,
}

/// An MXFP4 matrix, row-major `[rows, cols]` = `[out, in]`, with its blocks along the columns.
#[derive(Debug, Clone)]
pub struct MxMatrix {
    /// Output features.
    pub rows: usize,
    /// Input features, a multiple of 32.
    pub cols: usize,
    /// `[rows, cols / 32, 16]` nibble pairs, the low nibble first.
    pub blocks: Buffer<u8>,
    /// `[rows, cols / 32]` E8M0 exponents; none is 255.
    pub scales: Buffer<u8>,
}

impl MxMatrix {
    /// Writes the matrix as row-major bf16, exactly.
    ///
    /// # Panics
    /// If `out` is not `rows * cols` long.
    pub fn dequantize_into(&self, out: &mut [bf16]) {
        mxfp4::decode_bf16(&self.blocks, &self.scales, out);
    }

    /// The matrix as row-major bf16, exactly.
    #[must_use]
    pub fn dequantize(&self) -> Vec<bf16> {
        let mut values = vec![bf16::ZERO; self.rows * self.cols];
        self.dequantize_into(&mut values);
        values
    }

    /// Writes one row as f32, exactly.
    ///
    /// # Panics
    /// If there is no such row, or `out` is not `cols` long.
    pub fn row_f32(&self, row: usize, out: &mut [f32]) {
        let num_blocks = self.cols / BLOCK_VALUES;
        let blocks = &self.blocks[row * num_blocks * BLOCK_BYTES..][..num_blocks * BLOCK_BYTES];
        mxfp4::decode_f32(blocks, &self.scales[row * num_blocks..][..num_blocks], out);
    }
}

/// A matrix of an expert in either form that experts are loaded in.
#[derive(Debug, Clone)]
pub enum ExpertMatrix {
    /// As released.
    Mxfp4(MxMatrix),
    /// E4M3 with block scales.
    Fp8(Fp8Matrix),
}

impl ExpertMatrix {
    /// Output features.
    #[must_use]
    pub const fn rows(&self) -> usize {
        match self {
            Self::Mxfp4(matrix) => matrix.rows,
            Self::Fp8(matrix) => matrix.rows,
        }
    }

    /// Input features.
    #[must_use]
    pub const fn cols(&self) -> usize {
        match self {
            Self::Mxfp4(matrix) => matrix.cols,
            Self::Fp8(matrix) => matrix.cols,
        }
    }

    /// The matrix as row-major bf16, exactly.
    #[must_use]
    pub fn dequantize(&self) -> Vec<bf16> {
        match self {
            Self::Mxfp4(matrix) => matrix.dequantize(),
            Self::Fp8(matrix) => matrix.dequantize(),
        }
    }

    /// Writes one row as f32, exactly.
    ///
    /// # Panics
    /// If there is no such row, or `out` is not `cols` long.
    pub fn row_f32(&self, row: usize, out: &mut [f32]) {
        match self {
            Self::Mxfp4(matrix) => matrix.row_f32(row, out),
            Self::Fp8(matrix) => matrix.row_f32(row, out),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Mxfp4(matrix) => matrix.blocks.len() + matrix.scales.len(),
            Self::Fp8(matrix) => matrix.values.len() + matrix.scales.len(),
        }
    }
}

/// The rank's part of one expert. With `u` units on this rank:
#[derive(Debug, Clone)]
pub struct ExpertWeights {
    /// `[2 u, hidden]`; row `2 i` is the gate and row `2 i + 1` the up row of the rank's unit `i`.
    pub gate_up: ExpertMatrix,
    /// `[2 u]`, in the same order.
    pub gate_up_bias: Buffer<bf16>,
    /// `[hidden, u]`
    pub down: ExpertMatrix,
    /// `[hidden]`, whole on every rank: to be added once, after the sum over units and before the expert's weight is
    /// applied.
    pub down_bias: Buffer<bf16>,
}

/// The rank's part of one layer. With `h` query heads and `g` KV heads on this rank:
#[derive(Debug, Clone)]
pub struct LayerWeights {
    /// RMSNorm before attention, `[hidden]`.
    pub attn_norm: Buffer<bf16>,
    /// `[h * head_dim, hidden]`
    pub q: Linear,
    /// `[g * head_dim, hidden]`
    pub k: Linear,
    /// `[g * head_dim, hidden]`
    pub v: Linear,
    /// One logit for each of the rank's query heads, `[h]`.
    pub sinks: Buffer<bf16>,
    /// Weight `[hidden, h * head_dim]`; bias `[hidden]`, whole on every rank: to be added once, after the sum over
    /// heads.
    pub o: Linear,
    /// RMSNorm before the experts, `[hidden]`.
    pub mlp_norm: Buffer<bf16>,
    /// All experts' rows on every rank, `[experts of the model, hidden]`.
    pub router: Linear,
    /// The experts [`ShardPlan::experts`], in order.
    pub experts: Vec<ExpertWeights>,
}

/// All weights that a rank holds.
#[derive(Debug, Clone)]
pub struct RankWeights {
    /// Which part of the model this is.
    pub plan: ShardPlan,
    /// `[vocab, hidden]`, whole on every rank.
    pub embedding: Matrix,
    /// Every layer of the model.
    pub layers: Vec<LayerWeights>,
    /// `[hidden]`
    pub final_norm: Buffer<bf16>,
    /// Rows [`ShardPlan::vocab_rows`] of the head, `[vocab rows, hidden]`.
    pub head: Matrix,
}

/// Loads the rank's part of a checkpoint as it is stored; FP8 matrices of attention and the head are widened to bf16,
/// which is exact. `progress(bytes_done, bytes_total)` is called after each tensor; borrowed
/// pages are read once on the way, so that it tells the truth and the first forward pass does not wait for the disk.
///
/// # Errors
/// [`CheckpointError::NanScale`]: the scales of the rank's experts are checked here; all else was checked when the
/// checkpoint was opened.
///
/// # Panics
/// If `plan` was made for another model.
pub fn load_rank(
    checkpoint: &Checkpoint,
    plan: &ShardPlan,
    progress: &dyn Fn(u64, u64),
) -> Result<RankWeights, CheckpointError> {
    load_rank_as(checkpoint, plan, checkpoint.config().stored, progress)
}

/// The same, with matrices that `scheme` wants in FP8 and the checkpoint does not have so rounded to it on the way.
///
/// # Errors
/// As [`load_rank`].
///
/// # Panics
/// As [`load_rank`].
pub fn load_rank_as(
    checkpoint: &Checkpoint,
    plan: &ShardPlan,
    scheme: WeightScheme,
    progress: &dyn Fn(u64, u64),
) -> Result<RankWeights, CheckpointError> {
    let config = checkpoint.config();
    let bytes_total = rank_bytes(config, plan);
    let mut reader = Reader { checkpoint, plan, scheme, progress, bytes_done: 0, bytes_total };
    let weights = RankWeights {
        plan: plan.clone(),
        embedding: reader.rows(Param::Embedding, 0..config.vocab_size),
        layers: (0..config.num_layers).map(|layer| reader.layer(layer)).collect::<Result<_, _>>()?,
        final_norm: reader.vector(Param::FinalNorm, 0..config.hidden_size),
        head: reader.dense_rows(Param::Head, plan.vocab_rows.clone()),
    };
    debug_assert_eq!(reader.bytes_done, reader.bytes_total, "rank_bytes counts what load_rank reads");
    Ok(weights)
}

/// Bytes of weights that a rank holds in the form that the config says: what [`load_rank`] reads.
#[must_use]
pub fn rank_bytes(config: &ModelConfig, plan: &ShardPlan) -> u64 {
    let (hidden, units) = (0..config.hidden_size, &plan.units);
    let channels = |heads: &Range<usize>| heads.start * config.head_dim..heads.end * config.head_dim;
    let (q, kv) = (channels(&plan.heads), channels(&plan.kv_heads));
    let fp8 = |rows: &Range<usize>, cols: &Range<usize>| {
        rows.len() * cols.len() + Fp8Matrix::blocks(rows).len() * Fp8Matrix::blocks(cols).len()
    };
    let dense = |rows: &Range<usize>, cols: &Range<usize>| match config.stored.dense {
        DenseFormat::Bf16 => 2 * rows.len() * cols.len(),
        DenseFormat::Fp8 => fp8(rows, cols),
    };
    let of_expert = |rows: &Range<usize>, cols: &Range<usize>| match config.stored.experts {
        ExpertFormat::Fp8 => fp8(rows, cols),
        ExpertFormat::Bf16 => 2 * rows.len() * cols.len(),
        ExpertFormat::Mxfp4 => rows.len() * cols.len() / BLOCK_VALUES * (BLOCK_BYTES + 1),
    };
    let gate_up = 2 * units.start..2 * units.end;
    let norms = 2 * 2 * hidden.len();
    let attention = dense(&q, &hidden) + 2 * dense(&kv, &hidden) + dense(&hidden, &q) + 2 * plan.heads.len();
    let attention_bias = 2 * (q.len() + 2 * kv.len() + hidden.len());
    let router = 2 * config.num_experts * (hidden.len() + 1);
    let expert_bias = 2 * (gate_up.len() + hidden.len());
    let expert = of_expert(&gate_up, &hidden) + of_expert(&hidden, units) + expert_bias;
    let layer = norms + attention + attention_bias + router + plan.experts.len() * expert;
    let ends = 2 * config.vocab_size * hidden.len() + dense(&plan.vocab_rows, &hidden) + 2 * hidden.len();
    (config.num_layers * layer + ends) as u64
}

struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    plan: &'a ShardPlan,
    scheme: WeightScheme,
    progress: &'a dyn Fn(u64, u64),
    bytes_done: u64,
    bytes_total: u64,
}

impl Reader<'_> {
    fn layer(&mut self, layer: usize) -> Result<LayerWeights, CheckpointError> {
        let config = self.checkpoint.config();
        let head_dim = config.head_dim;
        let channels = |heads: &Range<usize>| heads.start * head_dim..heads.end * head_dim;
        let (q_rows, kv_rows) = (channels(&self.plan.heads), channels(&self.plan.kv_heads));
        let at = |param| Param::Layer(layer, param);
        let all_experts = 0..config.num_experts;
        Ok(LayerWeights {
            attn_norm: self.vector(at(LayerParam::AttnNorm), 0..config.hidden_size),
            q: self.dense_linear(at(LayerParam::QWeight), at(LayerParam::QBias), q_rows.clone()),
            k: self.dense_linear(at(LayerParam::KWeight), at(LayerParam::KBias), kv_rows.clone()),
            v: self.dense_linear(at(LayerParam::VWeight), at(LayerParam::VBias), kv_rows),
            sinks: self.vector(at(LayerParam::Sinks), self.plan.heads.clone()),
            o: Linear {
                weight: self.dense_columns(at(LayerParam::OWeight), q_rows),
                bias: self.vector(at(LayerParam::OBias), 0..config.hidden_size),
            },
            mlp_norm: self.vector(at(LayerParam::MlpNorm), 0..config.hidden_size),
            router: self.linear_rows(at(LayerParam::RouterWeight), at(LayerParam::RouterBias), all_experts),
            experts: self.plan.experts.clone().map(|expert| self.expert(layer, expert)).collect::<Result<_, _>>()?,
        })
    }

    fn expert(&mut self, layer: usize, expert: usize) -> Result<ExpertWeights, CheckpointError> {
        let config = self.checkpoint.config();
        let (hidden, units) = (config.hidden_size, self.plan.units.clone());
        let gate_up_rows = 2 * units.start..2 * units.end;
        let at = |param| Param::Layer(layer, param);
        let bias = |rows: usize, range: Range<usize>| expert * rows + range.start..expert * rows + range.end;
        Ok(ExpertWeights {
            gate_up: self.expert_matrix(layer, GATE_UP, expert, gate_up_rows.clone(), 0..hidden)?,
            gate_up_bias: self.vector(at(LayerParam::GateUpBias), bias(2 * config.intermediate_size, gate_up_rows)),
            down: self.expert_matrix(layer, DOWN, expert, 0..hidden, units)?,
            down_bias: self.vector(at(LayerParam::DownBias), bias(hidden, 0..hidden)),
        })
    }

    /// A range of the flattened tensor.
    fn vector(&mut self, param: Param, range: Range<usize>) -> Buffer<bf16> {
        let values: Buffer<bf16> = self.checkpoint.tensor(param).buffer(range);
        values.touch();
        self.advance(size_of_val(&*values));
        values
    }

    fn rows(&mut self, param: Param, rows: Range<usize>) -> Matrix {
        let cols = self.checkpoint.tensor(param).shape()[1];
        Matrix { rows: rows.len(), cols, values: self.vector(param, rows.start * cols..rows.end * cols) }
    }

    fn linear_rows(&mut self, weight: Param, bias: Param, rows: Range<usize>) -> Linear {
        Linear { weight: self.rows(weight, rows.clone()), bias: self.vector(bias, rows) }
    }

    fn dense_linear(&mut self, weight: Param, bias: Param, rows: Range<usize>) -> Linear {
        Linear { weight: self.dense_rows(weight, rows.clone()), bias: self.vector(bias, rows) }
    }

    /// Rows of a matrix that may be stored, or wanted, in FP8.
    fn dense_rows(&mut self, param: Param, rows: Range<usize>) -> Matrix {
        let cols = 0..self.checkpoint.tensor(param).shape()[1];
        match self.dense_fp8(param, &rows, &cols) {
            Some(matrix) => matrix,
            None => self.rows(param, rows),
        }
    }

    /// Columns of such a matrix.
    fn dense_columns(&mut self, param: Param, cols: Range<usize>) -> Matrix {
        let tensor = self.checkpoint.tensor(param);
        let rows = tensor.shape()[0];
        if let Some(matrix) = self.dense_fp8(param, &(0..rows), &cols) {
            return matrix;
        }
        let values = cut_columns(&tensor, 0..rows, tensor.shape()[1], cols.clone());
        self.advance(size_of_val(&*values));
        Matrix { rows, cols: cols.len(), values }
    }

    /// The values of a matrix that is stored, or wanted, in FP8.
    fn dense_fp8(&mut self, param: Param, rows: &Range<usize>, cols: &Range<usize>) -> Option<Matrix> {
        let fp8 = if self.checkpoint.config().stored.dense == DenseFormat::Fp8 {
            let fp8 = self.stored_fp8(param, 0, rows, cols);
            self.advance(fp8.values.len() + fp8.scales.len());
            fp8
        } else if self.scheme.dense == DenseFormat::Fp8 {
            let tensor = self.checkpoint.tensor(param);
            let width = tensor.shape()[1];
            let read = |row: usize, out: &mut [f32]| {
                let values: Buffer<bf16> = tensor.buffer(row * width..(row + 1) * width);
                out.iter_mut().zip(&*values).for_each(|(out, value)| *out = value.to_f32());
            };
            let fp8 = fp8::quantize_part([tensor.shape()[0], width], rows, cols, read);
            self.advance(2 * fp8.values.len());
            fp8
        } else {
            return None;
        };
        Some(Matrix { rows: fp8.rows, cols: fp8.cols, values: fp8.dequantize().into() })
    }

    /// Part of matrix `matrix` of an FP8 tensor, with the scales that it touches.
    fn stored_fp8(&self, param: Param, matrix: usize, rows: &Range<usize>, cols: &Range<usize>) -> Fp8Matrix {
        let (values, scales) = (self.checkpoint.tensor(param), self.checkpoint.tensor(param.fp8_scales()));
        let [row_blocks, col_blocks] = [rows, cols].map(Fp8Matrix::blocks);
        let cut = |tensor: &Tensor<'_>, rows: &Range<usize>, cols: &Range<usize>| {
            let [.., height, width] = tensor.shape() else { unreachable!("fp8 tensors are matrices") };
            cut_columns(tensor, matrix * height + rows.start..matrix * height + rows.end, *width, cols.clone())
        };
        Fp8Matrix {
            rows: rows.len(),
            cols: cols.len(),
            values: cut(&values, rows, cols),
            scales: cut(&scales, &row_blocks, &col_blocks),
            grid: [row_blocks.len(), col_blocks.len()],
            offset: [rows.start % fp8::BLOCK, cols.start % fp8::BLOCK],
        }
    }

    /// Rows and columns of one expert's matrix; `cols` begins and ends at multiples of 32.
    fn expert_matrix(
        &mut self,
        layer: usize,
        [blocks, scales, fp8]: [LayerParam; 3],
        expert: usize,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<ExpertMatrix, CheckpointError> {
        let at = |param| Param::Layer(layer, param);
        if self.checkpoint.config().stored.experts == ExpertFormat::Fp8 {
            let matrix = ExpertMatrix::Fp8(self.stored_fp8(at(fp8), expert, &rows, &cols));
            self.advance(matrix.bytes());
            return Ok(matrix);
        }
        let matrix = ExpertMatrix::Mxfp4(self.mx(at(blocks), at(scales), expert, rows.clone(), cols.clone())?);
        self.advance(matrix.bytes());
        if self.scheme.experts != ExpertFormat::Fp8 {
            return Ok(matrix);
        }
        let [_, total_rows, row_blocks] = *self.checkpoint.tensor(at(scales)).shape() else {
            unreachable!("scales are [experts, rows, blocks]")
        };
        let total = [total_rows, row_blocks * BLOCK_VALUES];
        let whole = self.mx(at(blocks), at(scales), expert, 0..total[0], 0..total[1])?;
        let read = |row: usize, out: &mut [f32]| whole.row_f32(row, out);
        Ok(ExpertMatrix::Fp8(fp8::quantize_part(total, &rows, &cols, read)))
    }

    fn mx(
        &self,
        blocks: Param,
        scales: Param,
        expert: usize,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<MxMatrix, CheckpointError> {
        let (blocks, scales) = (self.checkpoint.tensor(blocks), self.checkpoint.tensor(scales));
        let (expert_rows, row_blocks) = (scales.shape()[1], scales.shape()[2]);
        let (first_block, end_block) = (cols.start / BLOCK_VALUES, cols.end / BLOCK_VALUES);
        let file_rows = expert * expert_rows + rows.start..expert * expert_rows + rows.end;
        let matrix = MxMatrix {
            rows: rows.len(),
            cols: cols.len(),
            blocks: cut_columns(
                &blocks,
                file_rows.clone(),
                row_blocks * BLOCK_BYTES,
                first_block * BLOCK_BYTES..end_block * BLOCK_BYTES,
            ),
            scales: cut_columns(&scales, file_rows, row_blocks, first_block..end_block),
        };
        if let Some(at) = matrix.scales.iter().position(|&scale| scale == SCALE_NAN) {
            let num_blocks = end_block - first_block;
            return Err(CheckpointError::NanScale {
                file: scales.file_path().to_path_buf(),
                tensor: scales.stored_name().to_owned(),
                index: [expert, rows.start + at / num_blocks, first_block + at % num_blocks],
            });
        }
        Ok(matrix)
    }

    fn advance(&mut self, bytes: usize) {
        self.bytes_done += bytes as u64;
        (self.progress)(self.bytes_done, self.bytes_total);
    }
}

/// Columns `cols` of rows `rows` of a tensor seen as rows of `width` elements: borrowed when they are whole rows, else
/// copied.
fn cut_columns<T: bytemuck::Pod>(
    tensor: &Tensor<'_>,
    rows: Range<usize>,
    width: usize,
    cols: Range<usize>,
) -> Buffer<T> {
    let whole: Buffer<T> = tensor.buffer(rows.start * width..rows.end * width);
    if cols.len() == width {
        whole.touch();
        return whole;
    }
    whole.will_need();
    let mut values = Vec::with_capacity(rows.len() * cols.len());
    for row in whole.chunks_exact(width) {
        values.extend_from_slice(&row[cols.clone()]);
    }
    values.into()
}

#[cfg(test)]
mod tests;
