//! What SETUP carries: the handle of each sender rank's staging.

use device::IpcHandle;

use crate::data::DataError;

/// Staging of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StagingHandle {
    pub(super) handle: IpcHandle,
    pub(super) bytes: u64,
}

const LEN: usize = 64 + 8;

pub(super) fn encode(staging: &[StagingHandle]) -> Vec<u8> {
    let mut out = Vec::with_capacity(LEN * staging.len());
    for StagingHandle { handle, bytes } in staging {
        out.extend(handle);
        out.extend(bytes.to_le_bytes());
    }
    out
}

/// # Errors
/// [`DataError`] unless there is one for each of `ranks`.
pub(super) fn decode(setup: &[u8], ranks: usize) -> Result<Vec<StagingHandle>, DataError> {
    let (handles, rest) = setup.as_chunks::<LEN>();
    if !rest.is_empty() || handles.len() != ranks {
        return Err(DataError(format!("setup of {} bytes for {ranks} ranks", setup.len())));
    }
    let parse = |entry: &[u8; LEN]| {
        let (handle, bytes) = entry.split_at(64);
        let (mut raw, mut len) = ([0; 64], [0; 8]);
        raw.copy_from_slice(handle);
        len.copy_from_slice(bytes);
        StagingHandle { handle: raw, bytes: u64::from_le_bytes(len) }
    };
    Ok(handles.iter().map(parse).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read() {
        let staging = [StagingHandle { handle: [3; 64], bytes: 1 << 40 }, StagingHandle { handle: [4; 64], bytes: 5 }];
        let bytes = encode(&staging);
        assert_eq!(decode(&bytes, 2), Ok(staging.to_vec()));
        assert!(decode(&bytes, 1).is_err());
        assert!(decode(&bytes[1..], 2).is_err());
    }
}
