//! Finding the files of a checkpoint directory.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::CheckpointError;
use crate::mapping::FileBytes;
use crate::weight_file::WeightFile;

const INDEX: &str = "model.safetensors.index.json";
const EXTENSION: &str = "safetensors";
const ORIGINAL_DIR: &str = "original";

pub(crate) fn read_text(file: &Path) -> Result<String, CheckpointError> {
    std::fs::read_to_string(file).map_err(|source| CheckpointError::Io { file: file.to_path_buf(), source })
}

pub(crate) fn map(file: &Path) -> Result<FileBytes, CheckpointError> {
    FileBytes::map(file).map_err(|source| CheckpointError::Io { file: file.to_path_buf(), source })
}

/// `dir/name`, or, for a directory called `original`, the file of that name beside it; `None` if neither exists.
pub(crate) fn beside(dir: &Path, name: &str) -> Option<PathBuf> {
    let parent = resolved(dir).filter(|dir| dir.ends_with(ORIGINAL_DIR)).and_then(|dir| Some(dir.parent()?.join(name)));
    [Some(dir.join(name)), parent].into_iter().flatten().find(|path| path.is_file())
}

/// Opens the files that the index names, or without an index all safetensors files of the directory. File names mean
/// nothing: the released shards count from 00000 and their "-of-" number is one less than their count.
pub(super) fn open_weights(dir: &Path) -> Result<Vec<WeightFile>, CheckpointError> {
    let index_path = dir.join(INDEX);
    if index_path.is_file() {
        return open_indexed(dir, &index_path);
    }
    let names = safetensors_files(dir)?;
    if names.is_empty() {
        let original = dir.join(ORIGINAL_DIR);
        let has_original = safetensors_files(&original).is_ok_and(|names| !names.is_empty());
        let hint = if has_original { format!("; there are some in {}", original.display()) } else { String::new() };
        return Err(CheckpointError::NoWeights { dir: dir.to_path_buf(), hint });
    }
    names.iter().map(|path| WeightFile::open(path)).collect()
}

#[derive(serde::Deserialize)]
struct Index {
    /// Tensor name to file name.
    weight_map: BTreeMap<String, String>,
}

fn open_indexed(dir: &Path, index_path: &Path) -> Result<Vec<WeightFile>, CheckpointError> {
    let fail = |reason: String| CheckpointError::Index { file: index_path.to_path_buf(), reason };
    let index: Index =
        serde_json::from_str(&read_text(index_path)?).map_err(|error| fail(format!("not a weight index: {error}")))?;
    let names: BTreeSet<&String> = index.weight_map.values().collect();
    if names.is_empty() {
        return Err(fail("weight_map is empty".to_owned()));
    }
    let mut files = BTreeMap::new();
    for name in names {
        // An index from the network must not be able to name files elsewhere.
        if Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(fail(format!("weight_map names {name:?}, which is no plain file name")));
        }
        files.insert(name, WeightFile::open(&dir.join(name))?);
    }
    for (tensor, name) in &index.weight_map {
        if !files[name].tensors.contains_key(tensor) {
            return Err(fail(format!("says that tensor {tensor} is in {name}, which does not have it")));
        }
    }
    for (name, file) in &files {
        if let Some(tensor) = file.tensors.keys().find(|tensor| index.weight_map.get(*tensor) != Some(*name)) {
            return Err(fail(format!("does not list tensor {tensor} of {name}")));
        }
    }
    Ok(files.into_values().collect())
}

fn safetensors_files(dir: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let io_error = |source| CheckpointError::Io { file: dir.to_path_buf(), source };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(io_error)? {
        let path = entry.map_err(io_error)?.path();
        if path.extension().is_some_and(|extension| extension == EXTENSION) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// The model's name as its directory tells it: `gpt-oss-20b` for `models/gpt-oss-20b`, for `gpt-oss-20b/original`, and
/// for `models--openai--gpt-oss-20b/snapshots/<commit>` in the cache of Hugging Face's hub.
pub(crate) fn model_name(dir: &Path) -> String {
    let resolved = resolved(dir).unwrap_or_else(|| dir.to_path_buf());
    let names: Vec<String> = resolved.iter().rev().map(|name| name.to_string_lossy().into_owned()).collect();
    let names = match names.as_slice() {
        [first, rest @ ..] if first == ORIGINAL_DIR => rest,
        all => all,
    };
    match names {
        [_, snapshots, repo, ..] if snapshots == "snapshots" && repo.starts_with("models--") => {
            repo.rsplit("--").next().unwrap_or(repo).to_owned()
        }
        [name, ..] => name.clone(),
        [] => "model".to_owned(),
    }
}

/// The absolute path, for names; `.` or a trailing `..` would have none.
fn resolved(dir: &Path) -> Option<PathBuf> {
    std::path::absolute(dir)
        .ok()
        .map(|path| if path.ends_with("..") { path.canonicalize().unwrap_or(path) } else { path })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_usual_directories() {
        for (dir, name) in [
            ("/models/gpt-oss-20b", "gpt-oss-20b"),
            ("/models/gpt-oss-20b/", "gpt-oss-20b"),
            ("/models/gpt-oss-120b/original", "gpt-oss-120b"),
            ("/hub/models--openai--gpt-oss-20b/snapshots/6cee5e81ee83917806bbde320786a8fb61efebee", "gpt-oss-20b"),
            ("/hub/models--openai--gpt-oss-20b/snapshots/6cee5e8/original", "gpt-oss-20b"),
        ] {
            assert_eq!(model_name(Path::new(dir)), name, "{dir}");
        }
    }
}
