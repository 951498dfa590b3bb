//! A checkpoint directory (or the embedded model), opened and checked: every tensor is present once, with the right
//! shape and dtype. Opening reads headers only; tensor data stays in the mapped files until somebody asks for it.

mod error;
pub(crate) mod files;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};

use bytemuck::Pod;
use types::TokenId;

use crate::buffer::Buffer;
use crate::config::{self, ModelConfig};
use crate::identity::ModelIdentity;
use crate::mapping::FileBytes;
use crate::nano;
use crate::param::{Dtype, NameLayout, Param, is_dequantised_expert};
use crate::weight_file::{StoredTensor, WeightFile};

pub use error::CheckpointError;

/// Stop tokens of o200k_harmony (`<|return|>`, `<|endoftext|>`, `<|call|>`), for released models without a
/// generation_config.json.
pub(crate) const O200K_HARMONY_STOP: [TokenId; 3] = [200_002, 199_999, 200_012];
const O200K_HARMONY_ROWS: usize = 201_088;

/// An opened model: config, stop tokens, tokenizer and tensors.
#[derive(Debug)]
pub struct Checkpoint {
    identity: ModelIdentity,
    config: ModelConfig,
    stop_token_ids: Vec<TokenId>,
    files: Vec<WeightFile>,
    tensors: HashMap<Param, Place>,
}

/// Where a [`Param`] lies: bytes of a file that are its rows, those of a fused tensor cut out.
#[derive(Debug)]
struct Place {
    file_idx: usize,
    name: String,
    range: Range<usize>,
    shape: Vec<usize>,
}

impl Checkpoint {
    /// Opens a directory with config.json and either the Hugging Face or the `original/` tensors, in one safetensors
    /// file or several. The files are mapped, so they must not be changed or cut short until the last tensor of the
    /// checkpoint is dropped: replace a model by writing another directory.
    ///
    /// generation_config.json and tokenizer.json are optional; for a directory named `original` they are also looked
    /// for beside it.
    ///
    /// # Errors
    /// The first thing found wrong, with file, tensor, and what was expected and found.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let config_path = dir.join("config.json");
        let config = ModelConfig::from_json(&files::read_text(&config_path)?, &config_path)?;
        let stop_token_ids = match files::beside(dir, "generation_config.json") {
            Some(path) => config::stop_token_ids(&files::read_text(&path)?, &path, config.vocab_size)?,
            None if config.vocab_size == O200K_HARMONY_ROWS => O200K_HARMONY_STOP.to_vec(),
            None => return Err(CheckpointError::NoStopTokens { dir: dir.to_path_buf() }),
        };
        let identity = ModelIdentity::in_directory(dir, &config)?;
        Self::assemble(identity, config, stop_token_ids, files::open_weights(dir)?)
    }

    /// gpt-oss-nano, embedded in the binary. Nothing is copied.
    ///
    /// # Panics
    /// Never: a test of this crate opens it.
    #[must_use]
    pub fn embedded_nano() -> Self {
        let open = || {
            let dir = Path::new(nano::NAME);
            let config = ModelConfig::from_json(nano::CONFIG, &dir.join("config.json"))?;
            let generation_config = dir.join("generation_config.json");
            let stop = config::stop_token_ids(nano::GENERATION_CONFIG, &generation_config, config.vocab_size)?;
            let weights = WeightFile::parse(&dir.join("model.safetensors"), FileBytes::Static(nano::weights()))?;
            Self::assemble(ModelIdentity::of_nano(&config), config, stop, vec![weights])
        };
        open().unwrap_or_else(|error: CheckpointError| panic!("the embedded model is broken: {error}"))
    }

    fn assemble(
        identity: ModelIdentity,
        config: ModelConfig,
        stop_token_ids: Vec<TokenId>,
        files: Vec<WeightFile>,
    ) -> Result<Self, CheckpointError> {
        let tensors = place_all(&config, &files)?;
        Ok(Self { identity, config, stop_token_ids, files, tensors })
    }

    /// The model's public name: that of its directory, for example `gpt-oss-20b`.
    #[must_use]
    pub fn name(&self) -> &str {
        self.identity.name()
    }

    /// Name, vocabulary size and tokenizer.
    #[must_use]
    pub fn identity(&self) -> &ModelIdentity {
        &self.identity
    }

    /// Sizes and constants.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Tokens that end an answer unless a request says otherwise.
    #[must_use]
    pub fn stop_token_ids(&self) -> &[TokenId] {
        &self.stop_token_ids
    }

    /// The bytes of tokenizer.json, if the model has one.
    #[must_use]
    pub fn tokenizer_json(&self) -> Option<&[u8]> {
        self.identity.tokenizer_json()
    }

    /// One whole tensor; every parameter of [`Param::all`] is there.
    ///
    /// # Panics
    /// If the model has no such layer.
    #[must_use]
    pub fn tensor(&self, param: Param) -> Tensor<'_> {
        let place = self.tensors.get(&param).unwrap_or_else(|| panic!("the model has no {param}"));
        Tensor { file: &self.files[place.file_idx], place, dtype: param.dtype(&self.config) }
    }
}

/// A tensor in its file, row-major. Borrowing it reads nothing.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    file: &'a WeightFile,
    place: &'a Place,
    dtype: Dtype,
}

impl<'a> Tensor<'a> {
    /// Extent of each axis.
    #[must_use]
    pub fn shape(&self) -> &'a [usize] {
        &self.place.shape
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// All bytes, little endian.
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        &self.file.bytes[self.place.range.clone()]
    }

    /// Elements `range` of the flattened tensor, without a copy where the file aligns them.
    ///
    /// # Panics
    /// If `T` has another size than the dtype, or the range goes past the end.
    #[must_use]
    pub fn buffer<T: Pod>(&self, range: Range<usize>) -> Buffer<T> {
        let size = self.dtype.bytes();
        assert_eq!(size_of::<T>(), size, "{}: read as another type", self.place.name);
        let (start, end) = (self.place.range.start + range.start * size, self.place.range.start + range.end * size);
        assert!(range.start <= range.end && end <= self.place.range.end, "{}: {range:?} is outside", self.place.name);
        Buffer::from_file(&self.file.bytes, start..end)
    }

    pub(crate) fn file_path(&self) -> &'a Path {
        &self.file.path
    }

    pub(crate) fn stored_name(&self) -> &'a str {
        &self.place.name
    }
}

/// Tensors of all files by name, with the file's index. Ordered, so that errors do not depend on hashing.
type Catalogue<'a> = BTreeMap<&'a str, (usize, &'a StoredTensor)>;

fn place_all(config: &ModelConfig, files: &[WeightFile]) -> Result<HashMap<Param, Place>, CheckpointError> {
    let catalogue = catalogue(files)?;
    let layout = catalogue
        .keys()
        .find_map(|name| NameLayout::of_name(name))
        .ok_or_else(|| CheckpointError::UnknownLayout { files: paths(files), tensors: catalogue.len() })?;
    if let Some((name, (file_idx, stored))) = catalogue.iter().find(|(name, _)| is_dequantised_expert(name)) {
        return Err(CheckpointError::Dequantised {
            file: files[*file_idx].path.clone(),
            tensor: (*name).to_owned(),
            dtype: format!("{:?}", stored.dtype),
            shape: stored.shape.clone(),
        });
    }

    let mut unknown = catalogue.clone();
    let mut missing = None;
    let mut places = HashMap::new();
    for param in Param::all(config) {
        let expected = layout.locate(param, config);
        unknown.remove(expected.name.as_str());
        let Some(&(file_idx, stored)) = catalogue.get(expected.name.as_str()) else {
            missing.get_or_insert((param, expected));
            continue;
        };
        check_tensor(&files[file_idx].path, &expected.name, stored, &expected.shape, param.dtype(config))?;
        let row_bytes = stored.range.len() / expected.shape[0];
        let start = stored.range.start + expected.rows.start * row_bytes;
        let range = start..start + expected.rows.len() * row_bytes;
        places.insert(param, Place { file_idx, name: expected.name, range, shape: param.shape(config) });
    }
    let first_unknown = unknown.iter().next();
    match (missing, first_unknown) {
        (Some((param, expected)), _) => Err(CheckpointError::MissingTensor {
            files: paths(files),
            tensor: expected.name,
            dtype: param.dtype(config),
            shape: expected.shape,
            unknown: first_unknown.map(|(name, _)| (*name).to_owned()),
        }),
        (None, Some((name, (file_idx, _)))) => Err(CheckpointError::UnknownTensors {
            file: files[*file_idx].path.clone(),
            tensor: (*name).to_owned(),
            count: unknown.len(),
        }),
        (None, None) => Ok(places),
    }
}

fn catalogue(files: &[WeightFile]) -> Result<Catalogue<'_>, CheckpointError> {
    let mut catalogue = Catalogue::new();
    for (file_idx, file) in files.iter().enumerate() {
        for (name, stored) in &file.tensors {
            if let Some((first, _)) = catalogue.insert(name, (file_idx, stored)) {
                return Err(CheckpointError::DuplicateTensor {
                    tensor: name.clone(),
                    first: files[first].path.clone(),
                    second: file.path.clone(),
                });
            }
        }
    }
    Ok(catalogue)
}

fn check_tensor(
    file: &Path,
    name: &str,
    stored: &StoredTensor,
    shape: &[usize],
    dtype: Dtype,
) -> Result<(), CheckpointError> {
    let expected_dtype = match dtype {
        Dtype::Bf16 => safetensors::Dtype::BF16,
        Dtype::U8 => safetensors::Dtype::U8,
        Dtype::F8E4M3 => safetensors::Dtype::F8_E4M3,
    };
    if stored.dtype != expected_dtype {
        return Err(CheckpointError::WrongDtype {
            file: file.to_path_buf(),
            tensor: name.to_owned(),
            expected: dtype,
            found: format!("{:?}", stored.dtype),
        });
    }
    if stored.shape != shape {
        return Err(CheckpointError::WrongShape {
            file: file.to_path_buf(),
            tensor: name.to_owned(),
            expected: shape.to_vec(),
            found: stored.shape.clone(),
        });
    }
    Ok(())
}

fn paths(files: &[WeightFile]) -> Vec<PathBuf> {
    files.iter().map(|file| file.path.clone()).collect()
}
