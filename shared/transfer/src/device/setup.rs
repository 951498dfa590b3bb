//! What SETUP carries: the handle of each sender rank's staging.

use device::IpcHandle;

use crate::data::DataError;

/// Staging of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StagingHandle {
    pub(super) handle: IpcHandle,
    pub(super) bytes: u64,
}

const HANDLE_LEN: usize = 64 + 8;

pub(super) fn encode(staging: &[StagingHandle]) -> Vec<u8> {
    let mut out = Vec::with_capacity(staging.len() * HANDLE_LEN);
    for StagingHandle { handle, bytes } in staging {
        out.extend(handle);
        out.extend(bytes.to_le_bytes());
    }
    out
}

/// # Errors
/// [`DataError`] unless it is of `ranks` ranks.
pub(super) fn decode(bytes: &[u8], ranks: usize) -> Result<Vec<StagingHandle>, DataError> {
    let wanted = ranks * HANDLE_LEN;
    if bytes.len() != wanted {
        return Err(DataError(format!("setup of {} bytes, {wanted} are needed", bytes.len())));
    }
    let handle = |entry: &[u8]| {
        let (raw, len) = entry.split_at(64);
        let (mut handle, mut bytes) = ([0; 64], [0; 8]);
        handle.copy_from_slice(raw);
        bytes.copy_from_slice(len);
        StagingHandle { handle, bytes: u64::from_le_bytes(bytes) }
    };
    Ok(bytes.chunks_exact(HANDLE_LEN).map(handle).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read() {
        let staging =
            vec![StagingHandle { handle: [3; 64], bytes: 1 << 40 }, StagingHandle { handle: [4; 64], bytes: 5 }];
        let bytes = encode(&staging);
        assert_eq!(decode(&bytes, 2), Ok(staging));
        assert!(decode(&bytes, 1).is_err());
        assert!(decode(&bytes[1..], 2).is_err());
    }
}
