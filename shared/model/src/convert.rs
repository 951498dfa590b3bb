//! Writes an FP8 checkpoint from a released one, or only says how exact it would be.
//!
//! One file a layer and one for the rest, under Hugging Face's names (`crate::param`), config.json last. A matrix is
//! read, converted and written 128 rows at a time, a few rows of blocks on each thread, so memory stays bounded whatever
//! the model's size. Everything goes into a directory beside the target that gets the target's name in the end: what
//! bears that name is whole.

mod files;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use half::bf16;
use types::{Classify, ErrorClass};

use crate::checkpoint::{Checkpoint, CheckpointError, Tensor};
use crate::fp8::{self, BLOCK, Exactness};
use crate::mxfp4::{self, BLOCK_BYTES, BLOCK_VALUES, SCALE_NAN};
use crate::param::{LayerParam, Param};
use crate::scheme::{DenseFormat, ExpertFormat, WeightScheme};
use files::{Directory, ShardWriter};

/// Rows of blocks that a thread converts before they are written.
const BATCH: usize = 4;

/// What a conversion found.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ConvertReport {
    /// Of experts.
    pub experts: Exactness,
    /// Of attention and head; zero if they stay bf16.
    pub dense: Exactness,
}

/// Why nothing was converted.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The source is damaged.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The source is no released checkpoint.
    #[error("{model}: its weights are stored as {stored}, only mxfp4 experts beside bf16 are converted")]
    NotReleased {
        /// The model.
        model: String,
        /// How it is stored.
        stored: WeightScheme,
    },
    /// The target is there.
    #[error("{} exists already", dir.display())]
    Exists {
        /// The target.
        dir: PathBuf,
    },
    /// A file cannot be written.
    #[error("{}: cannot be written", file.display())]
    Write {
        /// The file.
        file: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A value that is no number.
    #[error("tensor {tensor} has the value {value} in row {row}")]
    NotFinite {
        /// The tensor.
        tensor: String,
        /// Row of the matrix, counted over all experts.
        row: usize,
        /// The value.
        value: f32,
    },
}

impl Classify for ConvertError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Exists { .. } | Self::NotReleased { .. } => ErrorClass::Caller,
            _ => ErrorClass::Fatal,
        }
    }
}

/// What to convert.
pub struct Convert<'a> {
    /// A released checkpoint.
    pub source: &'a Checkpoint,
    /// Whether attention and head become FP8 too.
    pub dense: DenseFormat,
    /// Threads that convert, at least 1.
    pub threads: usize,
    /// `progress(bytes read, bytes of the source)`, after each few megabytes.
    pub progress: &'a dyn Fn(u64, u64),
}

impl Convert<'_> {
    /// Reads and converts everything, writes nothing.
    ///
    /// # Errors
    /// `NotReleased`, `NotFinite`, or what is wrong with the source.
    pub fn check(&self) -> Result<ConvertReport, ConvertError> {
        let mut conversion = self.begin(None)?;
        for param in Param::all(conversion.source.config()) {
            if conversion.quantizes(param) {
                conversion.matrices(param)?;
            } else {
                conversion.advance(conversion.source.tensor(param).bytes().len());
            }
        }
        Ok(conversion.report)
    }

    /// Writes the checkpoint to `dir`, which must not exist.
    ///
    /// # Errors
    /// As [`Convert::check`]; `Exists`, `Write`.
    pub fn write(&self, dir: &Path) -> Result<ConvertReport, ConvertError> {
        let directory = Directory::create(dir)?;
        let config = self.source.config();
        let mut stored = config.clone();
        stored.stored = WeightScheme { experts: ExpertFormat::Fp8, dense: self.dense };
        let mut conversion = self.begin(Some(&directory))?;
        for shard in 0..=config.num_layers {
            let params: Vec<Param> = Param::all(&stored).filter(|param| shard_of(*param) == shard).collect();
            conversion.open(shard, &params, &stored)?;
            for param in params {
                conversion.convert(param)?;
            }
            conversion.close()?;
        }
        let report = conversion.report;
        directory.finish(self.source, &stored)?;
        Ok(report)
    }

    fn begin<'a>(&'a self, directory: Option<&'a Directory>) -> Result<Conversion<'a>, ConvertError> {
        let config = self.source.config();
        if !config.stored.is_released() {
            return Err(ConvertError::NotReleased { model: self.source.name().to_owned(), stored: config.stored });
        }
        Ok(Conversion {
            source: self.source,
            dense: self.dense,
            threads: self.threads.max(1),
            progress: self.progress,
            bytes_done: 0,
            bytes_total: Param::all(config).map(|param| self.source.tensor(param).bytes().len() as u64).sum(),
            report: ConvertReport::default(),
            directory,
            shard: None,
            scales: HashMap::new(),
        })
    }
}

/// File of a tensor: 0 for what belongs to no layer.
fn shard_of(param: Param) -> usize {
    match param {
        Param::Layer(layer, _) => layer + 1,
        _ => 0,
    }
}

/// A conversion under way.
struct Conversion<'a> {
    source: &'a Checkpoint,
    dense: DenseFormat,
    threads: usize,
    progress: &'a dyn Fn(u64, u64),
    bytes_done: u64,
    bytes_total: u64,
    report: ConvertReport,
    directory: Option<&'a Directory>,
    /// The file that is being written; none while checking.
    shard: Option<ShardWriter>,
    /// Scales of matrices that have been converted, until their own turn.
    scales: HashMap<Param, Vec<u8>>,
}

impl Conversion<'_> {
    /// Whether a stored tensor becomes FP8; scales of MXFP4 go with their blocks.
    fn quantizes(&self, param: Param) -> bool {
        use LayerParam::{DownBlocks, GateUpBlocks, KWeight, OWeight, QWeight, VWeight};
        match param {
            Param::Layer(_, GateUpBlocks | DownBlocks) => true,
            Param::Head | Param::Layer(_, QWeight | KWeight | VWeight | OWeight) => self.dense == DenseFormat::Fp8,
            _ => false,
        }
    }

    fn open(&mut self, shard: usize, params: &[Param], stored: &crate::ModelConfig) -> Result<(), ConvertError> {
        let directory = self.directory.expect("only a conversion that writes opens files");
        self.shard = Some(directory.shard(shard, params, stored)?);
        Ok(())
    }

    fn close(&mut self) -> Result<(), ConvertError> {
        self.shard.take().map_or(Ok(()), ShardWriter::finish)
    }

    /// Writes one tensor of the new checkpoint. Scales come after their values.
    fn convert(&mut self, param: Param) -> Result<(), ConvertError> {
        use LayerParam::{
            DownBlocks, DownFp8, DownFp8Scales, GateUpBlocks, GateUpFp8, GateUpFp8Scales, KScales, OScales, QScales,
            VScales,
        };
        match param {
            Param::Layer(_, GateUpFp8Scales | DownFp8Scales | QScales | KScales | VScales | OScales)
            | Param::HeadScales => {
                let scales = self.scales.remove(&param).expect("scales come after their values");
                self.put(&scales)
            }
            Param::Layer(layer, GateUpFp8) => self.with_scales(param, Param::Layer(layer, GateUpBlocks)),
            Param::Layer(layer, DownFp8) => self.with_scales(param, Param::Layer(layer, DownBlocks)),
            param if self.quantizes(param) => self.with_scales(param, param),
            param => {
                let bytes = self.source.tensor(param).bytes();
                self.put(bytes)?;
                self.advance(bytes.len());
                Ok(())
            }
        }
    }

    /// Converts tensor `source` into `param` and keeps the scales.
    fn with_scales(&mut self, param: Param, source: Param) -> Result<(), ConvertError> {
        let scales = self.matrices(source)?;
        self.scales.insert(param.fp8_scales(), scales);
        Ok(())
    }

    /// Converts all matrices of one tensor, in batches of rows of blocks. Writes values, returns scales.
    fn matrices(&mut self, param: Param) -> Result<Vec<u8>, ConvertError> {
        let matrices = Matrices::new(self.source, param);
        let block_rows = matrices.count * matrices.rows.div_ceil(BLOCK);
        let is_expert = matches!(matrices.source, Source::Mxfp4 { .. });
        let mut exactness = Exactness::default();
        let mut scales = Vec::with_capacity(block_rows * matrices.cols.div_ceil(BLOCK));
        let batch = self.threads * BATCH;
        for first in (0..block_rows).step_by(batch) {
            let end = block_rows.min(first + batch);
            let parts = convert_block_rows(&matrices, first..end, self.threads)?;
            for part in parts {
                self.put(&part.values)?;
                scales.extend(part.scales);
                exactness.add(&part.exactness);
                self.advance(part.bytes_read);
            }
        }
        if is_expert {
            self.report.experts.add(&exactness)
        } else {
            self.report.dense.add(&exactness)
        }
        Ok(scales)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), ConvertError> {
        self.shard.as_mut().map_or(Ok(()), |shard| shard.write(bytes))
    }

    fn advance(&mut self, bytes: usize) {
        self.bytes_done += bytes as u64;
        (self.progress)(self.bytes_done, self.bytes_total);
    }
}

/// The matrices of one stored tensor.
struct Matrices<'a> {
    name: String,
    source: Source<'a>,
    count: usize,
    rows: usize,
    cols: usize,
}

enum Source<'a> {
    Bf16(Tensor<'a>),
    Mxfp4 { blocks: &'a [u8], scales: Tensor<'a> },
}

impl<'a> Matrices<'a> {
    fn new(checkpoint: &'a Checkpoint, param: Param) -> Self {
        let tensor = checkpoint.tensor(param);
        let scales = match param {
            Param::Layer(layer, LayerParam::GateUpBlocks) => Some(Param::Layer(layer, LayerParam::GateUpScales)),
            Param::Layer(layer, LayerParam::DownBlocks) => Some(Param::Layer(layer, LayerParam::DownScales)),
            _ => None,
        };
        match scales {
            Some(scales) => {
                let scales = checkpoint.tensor(scales);
                let (count, rows, cols) = (scales.shape()[0], scales.shape()[1], scales.shape()[2] * BLOCK_VALUES);
                let source = Source::Mxfp4 { blocks: tensor.bytes(), scales };
                Self { name: param.to_string(), source, count, rows, cols }
            }
            None => {
                let (rows, cols) = (tensor.shape()[0], tensor.shape()[1]);
                Self { name: param.to_string(), source: Source::Bf16(tensor), count: 1, rows, cols }
            }
        }
    }

    /// Row of the stored tensor at which a row of blocks begins, and how many rows it has.
    fn place(&self, block_row: usize) -> (usize, usize) {
        let of_matrix = self.rows.div_ceil(BLOCK);
        let (matrix, block) = (block_row / of_matrix, block_row % of_matrix);
        (matrix * self.rows + block * BLOCK, BLOCK.min(self.rows - block * BLOCK))
    }

    /// Reads rows as f32. Returns the bytes that they took.
    fn read(&self, first: usize, out: &mut [f32]) -> Result<usize, ConvertError> {
        let rows = out.len() / self.cols;
        match &self.source {
            Source::Bf16(tensor) => {
                let values = tensor.buffer::<bf16>(first * self.cols..(first + rows) * self.cols);
                out.iter_mut().zip(&*values).for_each(|(out, value)| *out = value.to_f32());
                Ok(2 * out.len())
            }
            Source::Mxfp4 { blocks, scales } => {
                let row_blocks = self.cols / BLOCK_VALUES;
                let of_rows = first * row_blocks..(first + rows) * row_blocks;
                let blocks = &blocks[of_rows.start * BLOCK_BYTES..of_rows.end * BLOCK_BYTES];
                let (stored, row) = (&scales.bytes()[of_rows], scales.shape()[1]);
                if let Some(at) = stored.iter().position(|&scale| scale == SCALE_NAN) {
                    let place = first + at / row_blocks;
                    return Err(ConvertError::Checkpoint(CheckpointError::NanScale {
                        file: scales.file_path().to_path_buf(),
                        tensor: scales.stored_name().to_owned(),
                        index: [place / row, place % row, at % row_blocks],
                    }));
                }
                mxfp4::decode_f32(blocks, stored, out);
                Ok(blocks.len() + stored.len())
            }
        }
    }
}

/// One converted row of blocks.
struct Part {
    values: Vec<u8>,
    scales: Vec<u8>,
    exactness: Exactness,
    bytes_read: usize,
}

fn convert_block_row(matrices: &Matrices<'_>, block_row: usize) -> Result<Part, ConvertError> {
    let (first, rows) = matrices.place(block_row);
    let cols = matrices.cols;
    let mut numbers = vec![0.0; rows * cols];
    let bytes_read = matrices.read(first, &mut numbers)?;
    if let Some(at) = numbers.iter().position(|value| !value.is_finite()) {
        let (tensor, row, value) = (matrices.name.clone(), first + at / cols, numbers[at]);
        return Err(ConvertError::NotFinite { tensor, row, value });
    }
    let (mut values, mut scales) = (vec![0; rows * cols], vec![0; cols.div_ceil(BLOCK)]);
    let exactness = fp8::quantize_block_row(&numbers, cols, &mut values, &mut scales);
    Ok(Part { values, scales, exactness, bytes_read })
}

/// Converts rows of blocks on several threads; the result is in their order.
fn convert_block_rows(
    matrices: &Matrices<'_>,
    block_rows: std::ops::Range<usize>,
    threads: usize,
) -> Result<Vec<Part>, ConvertError> {
    let share = block_rows.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let workers: Vec<_> = block_rows
            .clone()
            .step_by(share)
            .map(|first| {
                let mine = first..block_rows.end.min(first + share);
                scope.spawn(move || mine.map(|row| convert_block_row(matrices, row)).collect::<Result<Vec<_>, _>>())
            })
            .collect();
        let mut parts = Vec::with_capacity(block_rows.len());
        for worker in workers {
            // A panic there is a bug here: it goes on.
            parts.extend(worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(parts)
    })
}
