//! The directory and files of a checkpoint while it is written.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::ConvertError;
use crate::checkpoint::Checkpoint;
use crate::config::ModelConfig;
use crate::param::Param;

const WRITE_BYTES: usize = 1 << 20;

/// A directory that gets its name when it is whole, and is removed if that never happens.
pub(super) struct Directory {
    /// Where files are written.
    temporary: PathBuf,
    target: PathBuf,
    is_finished: std::cell::Cell<bool>,
}

impl Directory {
    pub(super) fn create(target: &Path) -> Result<Self, ConvertError> {
        if target.symlink_metadata().is_ok() {
            return Err(ConvertError::Exists { dir: target.to_path_buf() });
        }
        let mut name = target.file_name().unwrap_or_default().to_owned();
        name.push(format!(".partial-{}", std::process::id()));
        let temporary = target.with_file_name(name);
        std::fs::create_dir(&temporary).map_err(|source| ConvertError::Write { file: temporary.clone(), source })?;
        Ok(Self { temporary, target: target.to_path_buf(), is_finished: false.into() })
    }

    /// Begins the file of shard `shard`, which will hold `params`.
    pub(super) fn shard(
        &self,
        shard: usize,
        params: &[Param],
        config: &ModelConfig,
    ) -> Result<ShardWriter, ConvertError> {
        ShardWriter::create(self.temporary.join(shard_name(shard, config)), params, config)
    }

    /// Writes the small files, config.json last, and gives the directory its name.
    pub(super) fn finish(&self, source: &Checkpoint, config: &ModelConfig) -> Result<(), ConvertError> {
        let weight_map: Map<String, Value> = Param::all(config)
            .map(|param| (param.to_string(), Value::from(shard_name(super::shard_of(param), config))))
            .collect();
        let bytes = |param: Param| (param.shape(config).iter().product::<usize>() * param.dtype(config).bytes()) as u64;
        let total_size: u64 = Param::all(config).map(bytes).sum();
        let index = json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map });
        self.write("model.safetensors.index.json", pretty(&index).as_bytes())?;
        let stop = json!({ "eos_token_id": source.stop_token_ids() });
        self.write("generation_config.json", pretty(&stop).as_bytes())?;
        if let Some(tokenizer) = source.tokenizer_json() {
            self.write("tokenizer.json", tokenizer)?;
        }
        self.write("config.json", pretty(&config.to_json()).as_bytes())?;
        let failed = |source| ConvertError::Write { file: self.target.clone(), source };
        sync(&self.temporary).map_err(failed)?;
        // A directory that appeared meanwhile is not replaced: renaming onto one fails unless it is empty.
        std::fs::rename(&self.temporary, &self.target).map_err(failed)?;
        self.is_finished.set(true);
        Ok(())
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), ConvertError> {
        let file = self.temporary.join(name);
        let write = || -> std::io::Result<()> {
            let mut out = File::create_new(&file)?;
            out.write_all(bytes)?;
            out.sync_all()
        };
        write().map_err(|source| ConvertError::Write { file: file.clone(), source })
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if !self.is_finished.get() {
            // What cannot be removed is left under its temporary name, which nobody takes for a checkpoint.
            let _ = std::fs::remove_dir_all(&self.temporary);
        }
    }
}

/// Makes a directory's entries durable, where the system can.
fn sync(dir: &Path) -> std::io::Result<()> {
    if cfg!(unix) { File::open(dir)?.sync_all() } else { Ok(()) }
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

fn shard_name(shard: usize, config: &ModelConfig) -> String {
    format!("model-{:05}-of-{:05}.safetensors", shard + 1, config.num_layers + 1)
}

/// One safetensors file, whose header is written first: all sizes are known.
pub(super) struct ShardWriter {
    path: PathBuf,
    out: BufWriter<File>,
    bytes_left: u64,
}

impl ShardWriter {
    fn create(path: PathBuf, params: &[Param], config: &ModelConfig) -> Result<Self, ConvertError> {
        let mut header = Map::new();
        let mut end = 0;
        for param in params {
            let (shape, dtype, start) = (param.shape(config), param.dtype(config), end);
            end += shape.iter().product::<usize>() * dtype.bytes();
            let entry = json!({ "dtype": dtype.to_string(), "shape": shape, "data_offsets": [start, end] });
            header.insert(param.to_string(), entry);
        }
        let mut header = Value::from(header).to_string().into_bytes();
        // Data begins at a multiple of 8 bytes, so that bf16 tensors can be mapped where they lie.
        header.resize(header.len().next_multiple_of(8), b' ');
        let create = || -> std::io::Result<BufWriter<File>> {
            let mut out = BufWriter::with_capacity(WRITE_BYTES, File::create_new(&path)?);
            out.write_all(&(header.len() as u64).to_le_bytes())?;
            out.write_all(&header)?;
            Ok(out)
        };
        let out = create().map_err(|source| ConvertError::Write { file: path.clone(), source })?;
        Ok(Self { path, out, bytes_left: end as u64 })
    }

    /// Appends bytes of the tensors, which come in the order of the header.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), ConvertError> {
        self.bytes_left = self.bytes_left.checked_sub(bytes.len() as u64).expect("no more than the header promises");
        self.out.write_all(bytes).map_err(|source| ConvertError::Write { file: self.path.clone(), source })
    }

    pub(super) fn finish(mut self) -> Result<(), ConvertError> {
        assert_eq!(self.bytes_left, 0, "all that the header promises");
        let finish = |out: &mut BufWriter<File>| -> std::io::Result<()> {
            out.flush()?;
            out.get_ref().sync_all()
        };
        finish(&mut self.out).map_err(|source| ConvertError::Write { file: self.path.clone(), source })
    }
}
