//! What SETUP carries: the handle of each sender rank's staging, and the names of communicators to be.

use device::IpcHandle;
use device::nccl::UniqueId;

use crate::data::DataError;

/// Staging of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StagingHandle {
    pub(super) handle: IpcHandle,
    pub(super) bytes: u64,
}

/// What a receiver needs to open a lane.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Setup {
    /// Of each rank of the sender.
    pub(super) staging: Vec<StagingHandle>,
    /// Of each pair that talks by NCCL, by the sender's rank, then the receiver's.
    pub(super) communicators: Vec<UniqueId>,
}

const HANDLE_LEN: usize = 64 + 8;

impl Setup {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for StagingHandle { handle, bytes } in &self.staging {
            out.extend(handle);
            out.extend(bytes.to_le_bytes());
        }
        self.communicators.iter().for_each(|id| out.extend(id.as_bytes()));
        out
    }

    /// # Errors
    /// [`DataError`] unless it is of `ranks` ranks and `communicators` communicators.
    pub(super) fn decode(bytes: &[u8], ranks: usize, communicators: usize) -> Result<Self, DataError> {
        let wanted = ranks * HANDLE_LEN + communicators * UniqueId::BYTES;
        if bytes.len() != wanted {
            return Err(DataError(format!("setup of {} bytes, {wanted} are needed", bytes.len())));
        }
        let (handles, ids) = bytes.split_at(ranks * HANDLE_LEN);
        let handle = |entry: &[u8]| {
            let (raw, len) = entry.split_at(64);
            let (mut handle, mut bytes) = ([0; 64], [0; 8]);
            handle.copy_from_slice(raw);
            bytes.copy_from_slice(len);
            StagingHandle { handle, bytes: u64::from_le_bytes(bytes) }
        };
        let ids = ids.chunks_exact(UniqueId::BYTES).map(UniqueId::from_bytes);
        Ok(Self {
            staging: handles.chunks_exact(HANDLE_LEN).map(handle).collect(),
            communicators: ids.collect::<Result<_, _>>()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read() {
        let staging =
            vec![StagingHandle { handle: [3; 64], bytes: 1 << 40 }, StagingHandle { handle: [4; 64], bytes: 5 }];
        let communicators = vec![UniqueId::from_bytes(&[7; 128]).unwrap_or_else(|error| panic!("{error}"))];
        let setup = Setup { staging, communicators };
        let bytes = setup.encode();
        assert!(Setup::decode(&bytes, 2, 1).is_ok_and(|read| read == setup));
        assert!(Setup::decode(&bytes, 1, 1).is_err());
        assert!(Setup::decode(&bytes[1..], 2, 1).is_err());
    }
}
