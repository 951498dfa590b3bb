//! Which slices of a transfer have arrived: a set, never a count, so that a duplicate cannot stand in for a missing slice.

use types::{Classify, ErrorClass};

use crate::page_map::{PageMap, SliceError};
use crate::slice::KvSlice;

/// A commit came before everything had arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{missing} of {total} slices are missing, the first is {first:?}")]
pub struct Incomplete {
    /// Slices that have not arrived.
    pub missing: u32,
    /// Slices of the transfer.
    pub total: u32,
    /// One that is missing: the first in the map's order.
    pub first: KvSlice,
}

impl Classify for Incomplete {
    fn class(&self) -> ErrorClass {
        ErrorClass::Caller
    }
}

/// The arrivals of one transfer.
#[derive(Debug)]
pub struct Landing {
    map: PageMap,
    /// Bit `i` of word `i / 64`: slice number `i` has arrived.
    arrived: Vec<u64>,
    missing: u32,
}

impl Landing {
    /// Nothing has arrived yet.
    #[must_use]
    pub fn new(map: PageMap) -> Self {
        let missing = map.num_slices();
        Self { arrived: vec![0; missing.div_ceil(64) as usize], map, missing }
    }

    /// What is expected.
    #[must_use]
    pub fn map(&self) -> &PageMap {
        &self.map
    }

    /// Notes that a slice's bytes are in their page; returns how many are still missing.
    ///
    /// # Errors
    /// [`SliceError`] when the slice is not part of the transfer or had arrived before; nothing changes then.
    pub fn arrive(&mut self, slice: &KvSlice) -> Result<u32, SliceError> {
        let index = self.map.index(slice)?;
        let (word, bit) = (&mut self.arrived[index as usize / 64], 1u64 << (index % 64));
        if *word & bit != 0 {
            return Err(SliceError::Duplicate { slice: *slice });
        }
        *word |= bit;
        self.missing -= 1;
        Ok(self.missing)
    }

    /// Slices that have not arrived.
    #[must_use]
    pub fn missing(&self) -> u32 {
        self.missing
    }

    /// # Errors
    /// [`Incomplete`], naming the first missing slice, unless every slice has arrived.
    pub fn check_complete(&self) -> Result<(), Incomplete> {
        let total = self.map.num_slices();
        let first_missing = |(word_idx, word): (usize, &u64)| {
            let bit = word.trailing_ones();
            let index = word_idx as u32 * 64 + bit;
            (bit < 64 && index < total).then_some(index)
        };
        match self.arrived.iter().enumerate().find_map(first_missing).and_then(|index| self.map.slice_at(index)) {
            Some(first) => Err(Incomplete { missing: self.missing, total, first }),
            None => Ok(()),
        }
    }
}
