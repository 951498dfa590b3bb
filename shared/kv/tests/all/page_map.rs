use std::collections::BTreeSet;

use kv::{KvSlice, PageMap, PageMapError, SliceError};
use proptest::prelude::*;
use types::{KvLayout, PageGroup};

use crate::{CONTEXTS, layout};

const DEGREES: [u32; 3] = [1, 2, 4];

/// Every (layer, page, head) that the receiver needs, by the definition of attention: one entry for each key position seen from
/// position `context`.
fn needed(layout: &KvLayout, context: u32) -> BTreeSet<(u32, u32, u32)> {
    let mut needed = BTreeSet::new();
    for group in PageGroup::ALL {
        for position in 0..context {
            if group == PageGroup::Full || context - position < layout.window {
                let page = position / layout.page_tokens;
                let heads = 0..layout.kv_heads;
                needed
                    .extend(layout.layers(group).iter().flat_map(|l| heads.clone().map(move |head| (*l, page, head))));
            }
        }
    }
    needed
}

fn parts(slice: &KvSlice) -> impl Iterator<Item = (u32, u32, u32)> + use<> {
    let (layer, page) = (slice.layer, slice.page);
    slice.heads().map(move |head| (layer, page, head))
}

#[test]
fn slices_cover_exactly_what_is_needed_for_every_pair_of_layouts_and_edge() {
    for (sender_tp, receiver_tp) in DEGREES.iter().flat_map(|s| DEGREES.map(|r| (*s, r))) {
        let (sender, receiver) = (layout(sender_tp), layout(receiver_tp));
        for context in CONTEXTS {
            let case = format!("tp {sender_tp} to {receiver_tp}, {context} tokens");
            let map = PageMap::new(&sender, &receiver, context).unwrap();
            let mut covered = BTreeSet::new();
            for slice in map.slices() {
                for part in parts(&slice) {
                    assert!(covered.insert(part), "{case}: {part:?} is sent twice");
                }
                let holds = |layout: &KvLayout, rank: u32| {
                    let heads = layout.rank_heads(rank);
                    heads.start <= slice.heads().start && slice.heads().end <= heads.end
                };
                assert!(holds(&sender, map.sender_rank(&slice).unwrap()), "{case}: {slice:?}");
                assert!(holds(&receiver, map.receiver_rank(&slice).unwrap()), "{case}: {slice:?}");
            }
            assert_eq!(covered, needed(&sender, context), "{case}");
            let bytes: usize = map.slices().map(|slice| map.slice_bytes(&slice)).sum();
            assert_eq!(bytes as u64, map.total_bytes(), "{case}");
        }
    }
}

#[test]
fn index_numbers_slices_densely_in_their_order() {
    for (sender_tp, receiver_tp) in [(1, 4), (4, 1), (2, 4), (4, 4), (1, 1)] {
        let map = PageMap::new(&layout(sender_tp), &layout(receiver_tp), 1129).unwrap();
        let numbers: Vec<u32> = map.slices().map(|slice| map.index(&slice).unwrap()).collect();
        assert_eq!(numbers, (0..map.num_slices()).collect::<Vec<_>>());
    }
}

#[test]
fn an_8k_prompt_sends_the_window_once() {
    let map = PageMap::new(&layout(2), &layout(4), 8191).unwrap();
    assert_eq!(map.pages(PageGroup::Full), 0..512);
    assert_eq!(map.pages(PageGroup::Window), 504..512);
    assert_eq!(map.num_slices(), (2 * 512 + 2 * 8) * 4);
}

#[test]
fn a_model_without_window_layers_has_no_window_slices() {
    let plain = KvLayout { full_layers: vec![0, 1, 2, 3], window_layers: vec![], ..layout(2) };
    let map = PageMap::new(&plain, &plain, 40).unwrap();
    assert_eq!(map.num_slices(), 4 * 3 * 2);
    assert!(map.slices().all(|slice| slice.group == PageGroup::Full));
}

#[test]
fn layouts_that_do_not_fit_are_refused_by_field() {
    let ours = layout(2);
    let field = |theirs: &KvLayout, context| match PageMap::new(theirs, &ours, context) {
        Err(PageMapError::Layout(mismatch)) => mismatch.field,
        Err(PageMapError::Invalid { field, .. }) => field,
        Err(PageMapError::EmptyContext) => "context",
        Ok(_) => "none",
    };
    assert_eq!(field(&KvLayout { page_tokens: 32, ..layout(1) }, 9), "page_tokens");
    assert_eq!(field(&KvLayout { window_layers: vec![0], ..layout(1) }, 9), "window_layers");
    assert_eq!(field(&layout(3), 9), "tp");
    assert_eq!(field(&layout(0), 9), "tp");
    assert_eq!(field(&layout(1), 0), "context");
    assert_eq!(field(&layout(4), 9), "none");
}

#[test]
fn strangers_are_named() {
    let map = PageMap::new(&layout(2), &layout(4), 200).unwrap();
    let good = map.slices().next().unwrap();
    let index = |slice: KvSlice| map.index(&slice).unwrap_err();
    assert_eq!(index(KvSlice { layer: 0, ..good }), SliceError::UnknownLayer { group: PageGroup::Full, layer: 0 });
    assert_eq!(index(KvSlice { layer: 4, ..good }), SliceError::UnknownLayer { group: PageGroup::Full, layer: 4 });
    let past = SliceError::PageOutOfRange { group: PageGroup::Full, page: 13, first: 0, end: 13 };
    assert_eq!(index(KvSlice { page: 13, ..good }), past);
    // 200 tokens: the window needs keys 73..200, pages 4..13.
    let before = SliceError::PageOutOfRange { group: PageGroup::Window, page: 3, first: 4, end: 13 };
    assert_eq!(index(KvSlice { group: PageGroup::Window, layer: 0, page: 3, ..good }), before);
    assert_eq!(index(KvSlice { head_count: 2, ..good }), SliceError::UnknownHeads { first: 0, end: 2 });
    assert_eq!(index(KvSlice { head_start: 4, ..good }), SliceError::UnknownHeads { first: 4, end: 5 });
    let huge = KvSlice { head_start: u32::MAX, head_count: u32::MAX, ..good };
    assert_eq!(index(huge), SliceError::UnknownHeads { first: u32::MAX, end: u32::MAX });
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    /// However a prompt is cut into chunks and layers into groups, each sender rank sends each of its slices once, and never before the
    /// page's last position is there.
    #[test]
    fn over_all_chunks_each_slice_is_ready_once(
        sender_tp in prop::sample::select(&DEGREES[..]),
        receiver_tp in prop::sample::select(&DEGREES[..]),
        context in prop_oneof![prop::sample::select(&CONTEXTS[..]), 1..600u32],
        chunks in prop::collection::vec(1..200u32, 1..40),
        layer_cut in 0..=4u32,
    ) {
        let map = PageMap::new(&layout(sender_tp), &layout(receiver_tp), context).unwrap();
        let mut sent = BTreeSet::new();
        let mut start = 0;
        for chunk in chunks.into_iter().chain([u32::MAX]) {
            let end = start + chunk.min(context - start);
            for rank in 0..sender_tp {
                for layers in [0..layer_cut, layer_cut..4] {
                    for slice in map.ready_slices(rank, layers.clone(), start..end) {
                        prop_assert!(layers.contains(&slice.layer));
                        prop_assert_eq!(map.sender_rank(&slice).unwrap(), rank);
                        prop_assert!(end >= context.min((slice.page + 1) * 16), "{:?} at {}", slice, end);
                        prop_assert!(sent.insert(slice), "{:?} twice", slice);
                    }
                }
            }
            start = end;
        }
        prop_assert_eq!(sent, map.slices().collect::<BTreeSet<_>>());
    }
}
