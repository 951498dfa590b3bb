//! One safetensors file: its bytes, and a header of which every offset has been checked.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorInfo;
use serde::de::{MapAccess, Visitor};

use crate::checkpoint::CheckpointError;
use crate::mapping::FileBytes;

/// Longest header accepted, the limit of the format's reference implementation. 120b has about 60 kB.
const MAX_HEADER_BYTES: usize = 100_000_000;
const LENGTH_BYTES: usize = 8;

#[derive(Debug)]
pub(crate) struct WeightFile {
    pub(crate) path: PathBuf,
    pub(crate) bytes: FileBytes,
    pub(crate) tensors: HashMap<String, StoredTensor>,
}

/// A tensor as the header states it. `range` lies inside the file and has exactly the bytes that shape and dtype ask
/// for.
#[derive(Debug)]
pub(crate) struct StoredTensor {
    pub(crate) dtype: safetensors::Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) range: Range<usize>,
}

impl WeightFile {
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let bytes = FileBytes::map(path).map_err(|source| CheckpointError::Io { file: path.to_path_buf(), source })?;
        Self::parse(path, bytes)
    }

    pub(crate) fn parse(path: &Path, bytes: FileBytes) -> Result<Self, CheckpointError> {
        let tensors = parse_header(&bytes).map_err(|problem| problem.at(path))?;
        Ok(Self { path: path.to_path_buf(), bytes, tensors })
    }
}

#[derive(Debug)]
enum Problem {
    Header(String),
    Truncated { tensor: String, end: usize, len: usize },
}

impl Problem {
    fn at(self, file: &Path) -> CheckpointError {
        let file = file.to_path_buf();
        match self {
            Self::Header(reason) => CheckpointError::Header { file, reason },
            Self::Truncated { tensor, end, len } => {
                CheckpointError::Truncated { file, tensor, needed_bytes: end as u64, found_bytes: len as u64 }
            }
        }
    }
}

/// Parses `u64 header length, JSON header, data`. Stricter than the format's own parser: names may not repeat, and the
/// error says which tensor is at fault. Nothing is allocated by a length that the file only claims.
fn parse_header(file: &[u8]) -> Result<HashMap<String, StoredTensor>, Problem> {
    let fail = |reason: String| Err(Problem::Header(reason));
    let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
        return fail(format!("has {} bytes, a safetensors file begins with 8 bytes of length", file.len()));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES as u64 {
        return fail(format!("states a header of {length} bytes, at most {MAX_HEADER_BYTES} are accepted"));
    }
    let Some((header, data)) = rest.split_at_checked(length as usize) else {
        return fail(format!("states a header of {length} bytes, only {} follow", rest.len()));
    };
    let Header(mut entries) = match serde_json::from_slice(header) {
        Ok(entries) => entries,
        Err(error) => return fail(format!("header is not valid: {error}")),
    };
    entries.sort_by_key(|(_, info)| info.data_offsets);

    let data_start = LENGTH_BYTES + header.len();
    let mut tensors = HashMap::with_capacity(entries.len());
    let mut end_of_previous = 0;
    for (name, info) in entries {
        let (begin, end) = info.data_offsets;
        if begin != end_of_previous || end < begin {
            return fail(format!(
                "tensor {name} lies at bytes {begin}..{end}, the one before ends at {end_of_previous}: overlap or gap"
            ));
        }
        match stated_bytes(&info) {
            Some(bytes) if bytes == end - begin => {}
            Some(bytes) => {
                let (dtype, shape) = (info.dtype, &info.shape);
                return fail(format!(
                    "tensor {name} is {dtype:?} {shape:?} = {bytes} bytes, its range has {}",
                    end - begin
                ));
            }
            None => return fail(format!("tensor {name} has the impossible shape {:?}", info.shape)),
        }
        if end > data.len() {
            // No overflow: `begin` is inside the file and the tensor has at most `usize::MAX / 8` bytes.
            return Err(Problem::Truncated { tensor: name, end: data_start + end, len: file.len() });
        }
        end_of_previous = end;
        let stored = StoredTensor { dtype: info.dtype, shape: info.shape, range: data_start + begin..data_start + end };
        if tensors.insert(name.clone(), stored).is_some() {
            return fail(format!("tensor {name} is listed twice"));
        }
    }
    if end_of_previous != data.len() {
        return fail(format!("has {} bytes after the last tensor", data.len() - end_of_previous));
    }
    Ok(tensors)
}

/// Bytes that dtype and shape ask for; `None` if that overflows or is no whole number of bytes.
fn stated_bytes(info: &TensorInfo) -> Option<usize> {
    let values = info.shape.iter().try_fold(1usize, |values, &dim| values.checked_mul(dim))?;
    let bits = values.checked_mul(info.dtype.bitsize())?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// The header's entries, in file order, repeats included; `__metadata__` is skipped.
struct Header(Vec<(String, TensorInfo)>);

impl<'de> serde::Deserialize<'de> for Header {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<serde::de::IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(Header(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

#[cfg(test)]
mod tests;
