//! Which tokens of a step are whose.

use std::ops::Range;

/// The tokens of a step: those of all attention groups one after the other, groups ascending.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct GroupTokens {
    /// First token of each group, and the number of all.
    starts: Vec<usize>,
    /// The rank's group.
    own: usize,
}

impl GroupTokens {
    /// With `counts` tokens in the groups, of which `own` is the rank's.
    pub(crate) fn new(counts: &[usize], own: usize) -> Self {
        let ends = counts.iter().scan(0, |end, count| {
            *end += count;
            Some(*end)
        });
        Self { starts: std::iter::once(0).chain(ends).collect(), own }
    }

    /// First token of each group, and the number of all.
    pub(crate) fn starts(&self) -> &[usize] {
        &self.starts
    }

    /// Groups.
    pub(crate) const fn groups(&self) -> usize {
        self.starts.len() - 1
    }

    /// Those of the rank's group.
    pub(crate) fn own(&self) -> Range<usize> {
        self.starts[self.own]..self.starts[self.own + 1]
    }

    /// Number of all.
    pub(crate) fn all(&self) -> usize {
        self.starts[self.groups()]
    }

    /// Number of each group's.
    pub(crate) fn counts(&self) -> impl Iterator<Item = usize> {
        self.starts.windows(2).map(|pair| pair[1] - pair[0])
    }

    /// Number of those of the group that has most.
    pub(crate) fn most(&self) -> usize {
        self.counts().max().unwrap_or(0)
    }

    /// With `rows` tokens in each group.
    pub(crate) fn padded(&self, rows: usize) -> Self {
        Self::new(&vec![rows; self.groups()], self.own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_follow_each_other_group_by_group() {
        let tokens = GroupTokens::new(&[2, 0, 5], 2);
        assert_eq!((tokens.starts(), tokens.own(), tokens.all(), tokens.most()), (&[0, 2, 2, 7][..], 2..7, 7, 5));
        assert!(GroupTokens::new(&[2, 0, 5], 1).own().is_empty());
        let padded = tokens.padded(8);
        assert_eq!((padded.starts(), padded.own()), (&[0, 8, 16, 24][..], 16..24));
    }
}
