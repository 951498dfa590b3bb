//! Digests by which services recognise a model, its vocabulary and its weights.

use sha2::{Digest, Sha256};
use types::ModelFingerprint;

use crate::checkpoint::Checkpoint;
use crate::param::Param;

/// Bytes hashed at each end of a tensor: enough to tell two trainings apart, little enough for 120b over a network disk
/// (6 MB in all).
const SAMPLE_BYTES: usize = 4096;

/// SHA-256 as 64 lower-case hexadecimal digits.
#[must_use]
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

impl Checkpoint {
    /// Identifies model and vocabulary; see [`ModelIdentity::fingerprint`](crate::ModelIdentity::fingerprint).
    #[must_use]
    pub fn fingerprint(&self, builtin_tokenizer_sha256: &str) -> ModelFingerprint {
        self.identity().fingerprint(builtin_tokenizer_sha256)
    }

    /// Identifies the weights, so that prefill and decode can refuse a peer that has others: SHA-256 over the parsed
    /// config and, for every tensor in model order, its name, shape, and first and last 4 KiB. The two checkpoint
    /// layouts of one model agree in it, and shards may be cut anywhere. Reads those samples from the files.
    #[must_use]
    pub fn weights_fingerprint(&self) -> String {
        let mut hasher = Sha256::new();
        let config = serde_json::to_vec(self.config()).expect("a config has only numbers and names");
        hasher.update((config.len() as u64).to_le_bytes());
        hasher.update(config);
        for param in Param::all(self.config()) {
            let tensor = self.tensor(param);
            let bytes = tensor.bytes();
            hasher.update(format!("{param} {} {:?}\n", tensor.dtype(), tensor.shape()));
            hasher.update(&bytes[..bytes.len().min(SAMPLE_BYTES)]);
            hasher.update(&bytes[bytes.len().saturating_sub(SAMPLE_BYTES)..]);
        }
        hex(&hasher.finalize())
    }
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
