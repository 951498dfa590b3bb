//! Records in one file, an embedded database. One process may have it open at a time, which the database's lock sees to.

use std::path::{Path, PathBuf};

use redb::{Database, ReadableDatabase, ReadableTable, Table, TableDefinition};

use super::{RecordStore, StoreError};

/// Id to (end, record).
const RECORDS: TableDefinition<'_, &str, (u64, &[u8])> = TableDefinition::new("records");
/// (End, id) to the record's bytes: what is to go first is first.
const ENDS: TableDefinition<'_, (u64, &str), u64> = TableDefinition::new("ends");
/// Bytes of all records, under [`TOTAL`].
const BYTES: TableDefinition<'_, &str, u64> = TableDefinition::new("bytes");
const TOTAL: &str = "records";

/// Records in a file.
#[derive(Debug)]
pub struct FileStore {
    file: PathBuf,
    bytes_max: u64,
    database: Database,
}

impl FileStore {
    /// Opens the file, or makes it, with room for `bytes_max` bytes of records. The file itself may be larger: it holds indices, and space
    /// that was freed is used again, not given back.
    ///
    /// # Errors
    /// [`StoreError::File`], also if another process has it open.
    pub fn open(file: &Path, bytes_max: u64) -> Result<Self, StoreError> {
        let store = Database::create(file)
            .map(|database| Self { file: file.to_path_buf(), bytes_max, database })
            .map_err(|cause| StoreError::File { file: file.to_path_buf(), cause: Box::new(cause.into()) })?;
        // Readers find the tables from now on.
        store.change(|_| Ok(()))?;
        Ok(store)
    }

    fn failed(&self, cause: redb::Error) -> StoreError {
        StoreError::File { file: self.file.clone(), cause: Box::new(cause) }
    }

    /// Runs one transaction, durable once it returns.
    fn change<T>(&self, work: impl FnOnce(&mut Tables<'_>) -> Result<T, redb::Error>) -> Result<T, StoreError> {
        let run = || {
            let transaction = self.database.begin_write()?;
            let outcome = work(&mut Tables {
                records: transaction.open_table(RECORDS)?,
                ends: transaction.open_table(ENDS)?,
                bytes: transaction.open_table(BYTES)?,
            })?;
            transaction.commit()?;
            Ok(outcome)
        };
        run().map_err(|cause| self.failed(cause))
    }
}

struct Tables<'t> {
    records: Table<'t, &'static str, (u64, &'static [u8])>,
    ends: Table<'t, (u64, &'static str), u64>,
    bytes: Table<'t, &'static str, u64>,
}

impl Tables<'_> {
    fn total(&self) -> Result<u64, redb::Error> {
        Ok(self.bytes.get(TOTAL)?.map_or(0, |bytes| bytes.value()))
    }

    fn first(&self) -> Result<Option<(u64, String)>, redb::Error> {
        Ok(self.ends.first()?.map(|(key, _)| {
            let (expires_at, id) = key.value();
            (expires_at, id.to_owned())
        }))
    }

    fn remove(&mut self, id: &str) -> Result<(), redb::Error> {
        let Some(expires_at) = self.records.remove(id)?.map(|record| record.value().0) else { return Ok(()) };
        let bytes = self.ends.remove((expires_at, id))?.map_or(0, |bytes| bytes.value());
        let total = self.total()?;
        self.bytes.insert(TOTAL, total - bytes)?;
        Ok(())
    }
}

impl RecordStore for FileStore {
    fn put(&self, id: &str, expires_at: u64, record: &[u8]) -> Result<(), StoreError> {
        let bytes = record.len() as u64;
        if bytes > self.bytes_max {
            return Err(StoreError::TooLarge { record_bytes: record.len(), max: self.bytes_max });
        }
        self.change(|tables| {
            while tables.total()? + bytes > self.bytes_max
                && let Some((_, id)) = tables.first()?
            {
                tables.remove(&id)?;
            }
            tables.records.insert(id, (expires_at, record))?;
            tables.ends.insert((expires_at, id), bytes)?;
            let total = tables.total()?;
            tables.bytes.insert(TOTAL, total + bytes)?;
            Ok(())
        })
    }

    fn get(&self, id: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let read = || {
            let records = self.database.begin_read()?.open_table(RECORDS)?;
            Ok(records.get(id)?.map(|record| record.value().1.to_vec()))
        };
        read().map_err(|cause| self.failed(cause))
    }

    fn delete(&self, id: &str) -> Result<(), StoreError> {
        self.change(|tables| tables.remove(id))
    }

    fn expire(&self, now: u64) -> Result<usize, StoreError> {
        self.change(|tables| {
            let mut num_records = 0;
            while let Some((expires_at, id)) = tables.first()?
                && expires_at <= now
            {
                tables.remove(&id)?;
                num_records += 1;
            }
            Ok(num_records)
        })
    }
}
