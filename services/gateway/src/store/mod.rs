//! Responses that are kept, so that clients can name them later. Off unless configured: the gateway is stateless then, and any replica can
//! answer anybody. What is kept is known to the replicas that open the same place, which for a file is one at a time.

mod file;
mod memory;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use chassis::{Problems, Tasks, Validate};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::calendar::unix_secs;
use crate::config::ResponsesStoreConfig;

pub use file::FileStore;
pub use memory::MemoryStore;

/// How often responses are looked through for expired ones.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(60);

/// A place for records. Records are bytes with an end, in seconds since 1970; a place has room for so many bytes, and gives up those records
/// first that end first. Calls may block on a disk.
pub trait RecordStore: Send + Sync {
    /// Keeps a record under a new id.
    ///
    /// # Errors
    /// [`StoreError`].
    fn put(&self, id: &str, expires_at: u64, record: &[u8]) -> Result<(), StoreError>;

    /// The record, ended or not.
    ///
    /// # Errors
    /// [`StoreError`].
    fn get(&self, id: &str) -> Result<Option<Vec<u8>>, StoreError>;

    /// Forgets the record; does nothing if there is none.
    ///
    /// # Errors
    /// [`StoreError`].
    fn delete(&self, id: &str) -> Result<(), StoreError>;

    /// Forgets all records that end before or at `now`, and says how many.
    ///
    /// # Errors
    /// [`StoreError`].
    fn expire(&self, now: u64) -> Result<usize, StoreError>;
}

/// What went wrong with a store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file cannot be used.
    #[error("{file}: {cause}", file = file.display())]
    File {
        /// Which.
        file: PathBuf,
        /// Why.
        cause: Box<redb::Error>,
    },
    /// A record is not what was written.
    #[error("record {id} is damaged: {reason}")]
    Damaged {
        /// Which.
        id: String,
        /// What is wrong.
        reason: String,
    },
    /// The record is larger than all the room there is.
    #[error("a record of {record_bytes} bytes does not fit into {max} bytes")]
    TooLarge {
        /// Its size.
        record_bytes: usize,
        /// The room.
        max: u64,
    },
}

/// A response, and all that a later request must know to go on from it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KeptResponse {
    /// Who may see it: the name of the key that it was made with.
    owner: String,
    /// Seconds since 1970.
    expires_at: u64,
    /// The response object.
    pub response: Value,
    /// Items: the input, that of earlier responses first, and the output.
    pub conversation: Vec<Value>,
}

/// The responses that this gateway keeps.
#[derive(Clone)]
pub struct KeptResponses {
    records: Arc<dyn RecordStore>,
    keep_secs: u64,
}

impl KeptResponses {
    /// Opens the place that is configured and starts to look for expired records there.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn open(tasks: &Tasks, config: &ResponsesStoreConfig) -> Result<Self, StoreError> {
        let records: Arc<dyn RecordStore> = match &config.file {
            Some(file) => Arc::new(FileStore::open(file, config.bytes_max)?),
            None => Arc::new(MemoryStore::new(config.bytes_max)),
        };
        let expiring = Arc::clone(&records);
        tasks.spawn_background("response expiry", async move {
            loop {
                let records = Arc::clone(&expiring);
                match blocking(move || records.expire(unix_secs())).await {
                    Ok(0) => {}
                    Ok(num_records) => tracing::debug!(num_records, "responses expired"),
                    Err(error) => tracing::error!(%error, "expired responses cannot be removed"),
                }
                tokio::time::sleep(EXPIRY_INTERVAL).await;
            }
        });
        Ok(Self { records, keep_secs: u64::from(config.keep_hours) * 3600 })
    }

    /// Keeps a finished response of `owner`.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn put(&self, owner: &str, response: Value, conversation: Vec<Value>) -> Result<(), StoreError> {
        let expires_at = unix_secs() + self.keep_secs;
        let id = response["id"].as_str().unwrap_or_default().to_owned();
        let kept = KeptResponse { owner: owner.to_owned(), expires_at, response, conversation };
        let records = Arc::clone(&self.records);
        blocking(move || {
            let record = serde_json::to_vec(&kept).expect("JSON values have string keys");
            records.put(&id, expires_at, &record)
        })
        .await
    }

    /// The response of that id, if it is `owner`'s and has not expired.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn get(&self, owner: &str, id: &str) -> Result<Option<KeptResponse>, StoreError> {
        let (records, id) = (Arc::clone(&self.records), id.to_owned());
        let kept = blocking(move || {
            let Some(record) = records.get(&id)? else { return Ok(None) };
            let kept: KeptResponse = serde_json::from_slice(&record)
                .map_err(|error| StoreError::Damaged { id, reason: error.to_string() })?;
            Ok(Some(kept))
        })
        .await?;
        Ok(kept.filter(|kept| kept.owner == owner && kept.expires_at > unix_secs()))
    }

    /// Forgets the response of that id; `false` if [`Self::get`] would not have found it.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn delete(&self, owner: &str, id: &str) -> Result<bool, StoreError> {
        if self.get(owner, id).await?.is_none() {
            return Ok(false);
        }
        let (records, id) = (Arc::clone(&self.records), id.to_owned());
        blocking(move || records.delete(&id)).await?;
        Ok(true)
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

impl Validate for ResponsesStoreConfig {
    fn validate(&self, problems: &mut Problems) {
        problems.range("keep_hours", self.keep_hours, 1..=24 * 366);
        problems.range("bytes_max", self.bytes_max, 1 << 20..=1 << 50);
    }
}

#[cfg(test)]
mod tests;
