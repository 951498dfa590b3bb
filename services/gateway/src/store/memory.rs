//! Records in this process: gone with it.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{RecordStore, StoreError};

/// Records in memory.
#[derive(Debug)]
pub struct MemoryStore {
    bytes_max: u64,
    records: Mutex<Records>,
}

#[derive(Debug, Default)]
struct Records {
    by_id: HashMap<String, (u64, Vec<u8>)>,
    by_end: BTreeSet<(u64, String)>,
    bytes: u64,
}

impl MemoryStore {
    /// An empty store with room for `bytes_max` bytes of records.
    #[must_use]
    pub fn new(bytes_max: u64) -> Self {
        Self { bytes_max, records: Mutex::default() }
    }

    fn records(&self) -> MutexGuard<'_, Records> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Records {
    fn remove(&mut self, id: &str) {
        if let Some((expires_at, record)) = self.by_id.remove(id) {
            self.by_end.remove(&(expires_at, id.to_owned()));
            self.bytes -= record.len() as u64;
        }
    }

    fn remove_first(&mut self) {
        if let Some((_, id)) = self.by_end.first().cloned() {
            self.remove(&id);
        }
    }
}

impl RecordStore for MemoryStore {
    fn put(&self, id: &str, expires_at: u64, record: &[u8]) -> Result<(), StoreError> {
        let bytes = record.len() as u64;
        if bytes > self.bytes_max {
            return Err(StoreError::TooLarge { record_bytes: record.len(), max: self.bytes_max });
        }
        let mut records = self.records();
        while records.bytes + bytes > self.bytes_max {
            records.remove_first();
        }
        records.bytes += bytes;
        records.by_end.insert((expires_at, id.to_owned()));
        records.by_id.insert(id.to_owned(), (expires_at, record.to_vec()));
        Ok(())
    }

    fn get(&self, id: &str) -> Result<Option<Vec<u8>>, StoreError> {
        Ok(self.records().by_id.get(id).map(|(_, record)| record.clone()))
    }

    fn delete(&self, id: &str) -> Result<(), StoreError> {
        self.records().remove(id);
        Ok(())
    }

    fn expire(&self, now: u64) -> Result<usize, StoreError> {
        let mut records = self.records();
        let before = records.by_id.len();
        while records.by_end.first().is_some_and(|(expires_at, _)| *expires_at <= now) {
            records.remove_first();
        }
        Ok(before - records.by_id.len())
    }
}
