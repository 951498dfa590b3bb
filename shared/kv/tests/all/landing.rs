use std::collections::BTreeSet;

use kv::{Incomplete, KvSlice, Landing, PageMap, SliceError};
use proptest::prelude::*;
use types::PageGroup;

use crate::layout;

fn landing(context: u32) -> Landing {
    Landing::new(PageMap::new(&layout(1), &layout(4), context).expect("the layouts fit"))
}

#[test]
fn a_duplicate_does_not_stand_in_for_a_missing_slice() {
    let mut landing = landing(1);
    let slices: Vec<KvSlice> = landing.map().slices().collect();
    let (last, rest) = slices.split_last().unwrap();
    for slice in rest {
        landing.arrive(slice).unwrap();
    }
    for slice in rest {
        assert_eq!(landing.arrive(slice), Err(SliceError::Duplicate { slice: *slice }));
    }
    let incomplete = Incomplete { missing: 1, total: slices.len() as u32, first: *last };
    assert_eq!(landing.check_complete(), Err(incomplete));
    assert_eq!(landing.arrive(last), Ok(0));
    assert_eq!(landing.check_complete(), Ok(()));
}

#[test]
fn a_stranger_changes_nothing() {
    let mut landing = landing(130);
    let missing = landing.missing();
    let stranger = KvSlice { group: PageGroup::Full, layer: 1, page: 9, head_start: 0, head_count: 1 };
    assert!(matches!(landing.arrive(&stranger), Err(SliceError::PageOutOfRange { page: 9, .. })));
    assert_eq!(landing.missing(), missing);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

    /// In any order, with any repetitions: complete exactly when the set is.
    #[test]
    fn complete_when_every_slice_has_arrived(context in 1..300u32, picks in prop::collection::vec(any::<prop::sample::Index>(), 0..600)) {
        let mut landing = landing(context);
        let slices: Vec<KvSlice> = landing.map().slices().collect();
        let mut seen = BTreeSet::new();
        let in_order = slices.iter().copied();
        for slice in picks.iter().map(|pick| *pick.get(&slices)).chain(in_order) {
            let result = landing.arrive(&slice);
            prop_assert_eq!(result.is_ok(), seen.insert(slice));
            prop_assert_eq!(landing.missing() as usize, slices.len() - seen.len());
            match landing.check_complete() {
                Ok(()) => prop_assert_eq!(seen.len(), slices.len()),
                Err(incomplete) => {
                    let first = slices.iter().find(|slice| !seen.contains(slice));
                    prop_assert_eq!(Some(&incomplete.first), first);
                }
            }
        }
        prop_assert!(landing.check_complete().is_ok());
    }
}
