use std::ops::Range;

use kv::{
    LandError, LandingPages, NoPages, PageDemand, PagePools, PageShape, PageTable, SequencePages, SequenceReserve,
};
use proptest::prelude::*;
use types::{KvLayout, PageGroup, PageId, TicketId};

use crate::{CONTEXTS, layout};

const SHAPE: PageShape = PageShape { page_tokens: 16, window: 128 };
const TICKET: TicketId = TicketId(1);

/// The tables as the engine knows them, from deltas alone.
#[derive(Default)]
struct EngineTables {
    full: (u32, Vec<PageId>),
    window: (u32, Vec<PageId>),
}

impl EngineTables {
    fn apply(&mut self, pages: &mut SequencePages) {
        for delta in pages.take_deltas() {
            let table = if delta.group == PageGroup::Full { &mut self.full } else { &mut self.window };
            let gone = (delta.first_page - table.0) as usize;
            table.1.drain(..gone.min(table.1.len()));
            table.0 = delta.first_page;
            table.1.extend(delta.append);
        }
    }

    fn covers(&self, row: Range<u32>) -> bool {
        let holds = |(first, pages): &(u32, Vec<PageId>), needed: Range<u32>| {
            *first <= needed.start && needed.end <= first + pages.len() as u32
        };
        holds(&self.full, SHAPE.row_pages(PageGroup::Full, row.clone()))
            && holds(&self.window, SHAPE.row_pages(PageGroup::Window, row))
    }

    fn agrees(&self, pages: &SequencePages) -> bool {
        let table =
            |(first_page, pages): &(u32, Vec<PageId>)| PageTable { first_page: *first_page, pages: pages.clone() };
        let tables = pages.tables();
        tables.full == table(&self.full) && tables.window == table(&self.window)
    }
}

fn reserve(pools: &PagePools, full: u32, window: u32) -> SequenceReserve {
    SequenceReserve::take(pools, SHAPE, PageDemand { full, window }).expect("the pools are large enough")
}

fn land(pools: &PagePools, context: u32) -> LandingPages {
    let window = SHAPE.most_window_pages(context + 100, 1);
    reserve(pools, SHAPE.pages_for(context), window)
        .land(TICKET, &layout(2), &layout(4), context)
        .expect("the layouts fit")
}

#[test]
fn landed_sequences_grow_token_by_token_at_every_edge() {
    for context in CONTEXTS {
        let pools = PagePools::new(200, 9);
        let mut landing = land(&pools, context);
        let sent: Vec<_> = landing.landing().map().slices().collect();
        for slice in &sent {
            assert!(landing.tables().physical(slice).is_some(), "{slice:?} has a page");
            landing.arrive(slice).unwrap();
        }
        let mut pages = landing.commit().unwrap();
        let mut engine = EngineTables::default();
        for position in context..context + 100 {
            pages.prepare(position..position + 1).unwrap();
            engine.apply(&mut pages);
            assert!(engine.covers(position..position + 1), "context {context}, position {position}");
            assert!(engine.agrees(&pages));
            let window = SHAPE.row_pages(PageGroup::Window, position..position + 1);
            assert_eq!(engine.window.1.len() as u32, window.len() as u32, "pages before the window are gone at once");
        }
        drop(pages);
        assert!(pools.all_free());
    }
}

#[test]
fn a_failed_growth_takes_nothing_and_may_be_tried_again() {
    let pools = PagePools::new(3, 3);
    let mut pages = reserve(&pools, 1, 3).start();
    pages.prepare(0..16).unwrap();
    let other = pools.group(PageGroup::Full).reserve(2).unwrap();
    let refused = pages.prepare(16..17).unwrap_err();
    assert_eq!(refused, NoPages { group: PageGroup::Full, needed: 1, free: 0, total: 3 });
    assert_eq!(pages.tables().full.pages.len(), 1);
    assert_eq!(pages.tables().window.pages.len(), 1);
    drop(other);
    pages.prepare(16..17).unwrap();
    assert_eq!(pages.tables().full.pages.len(), 2);
}

#[test]
fn a_reserve_too_small_is_given_back() {
    let pools = PagePools::new(10, 10);
    let refused = reserve(&pools, 1, 2).land(TICKET, &layout(1), &layout(1), 17).unwrap_err();
    assert_eq!(refused.1, LandError::ReserveTooSmall { group: PageGroup::Full, needed: 2, held: 1 });
    let other = KvLayout { head_dim: 32, ..layout(1) };
    let refused = refused.0.land(TICKET, &other, &layout(1), 1).unwrap_err();
    assert!(matches!(refused.1, LandError::Map(_)));
    assert!(refused.0.land(TICKET, &layout(1), &layout(1), 16).is_ok());
}

#[test]
fn an_early_commit_gives_the_pages_back_and_an_abort_quarantines_only_what_was_writable() {
    let pools = PagePools::new(20, 20);
    let demand = PageDemand { full: 5, window: 9 };
    let reserve = SequenceReserve::take(&pools, SHAPE, demand).unwrap();
    let landing = reserve.land(TICKET, &layout(1), &layout(1), 33).unwrap();
    let refused = landing.commit().unwrap_err();
    assert_eq!(refused.1.missing, 2 * 3 + 2 * 3);
    let counts = pools.group(PageGroup::Full).counts();
    assert_eq!((counts.landing, counts.reserved, counts.live), (3, 2, 0));
    drop(refused);
    let counts = [PageGroup::Full, PageGroup::Window].map(|group| pools.group(group).counts());
    assert_eq!(counts.map(|c| (c.quarantined, c.free)), [(3, 17), (3, 17)]);
    assert_eq!(pools.fence(TICKET), 6);
    assert!(pools.all_free());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    /// Chunks of any size, then rows whose tail may be rejected (drafts): the window's reserve always suffices, deltas tell the engine
    /// everything, and all pages come back.
    #[test]
    fn tables_cover_every_row_within_the_reserve(
        chunk_tokens in 1..200u32,
        context in 1..700u32,
        rows in prop::collection::vec((1..5u32, 0..4u32), 0..150),
    ) {
        let row_tokens = chunk_tokens.max(4);
        let window = SHAPE.most_window_pages(10_000, row_tokens);
        let pools = PagePools::new(SHAPE.pages_for(context + 600), window);
        let mut pages = reserve(&pools, 0, window).start();
        let mut engine = EngineTables::default();
        let mut position = 0;
        let chunks = std::iter::repeat_n((chunk_tokens, 0), context.div_ceil(chunk_tokens) as usize);
        for (tokens, rejected) in chunks.chain(rows) {
            let row = position..position + tokens;
            pages.prepare(row.clone()).unwrap();
            engine.apply(&mut pages);
            prop_assert!(engine.covers(row.clone()), "{:?}", row);
            prop_assert!(engine.agrees(&pages));
            position = row.end - rejected.min(tokens - 1);
        }
        drop(pages);
        prop_assert!(pools.all_free());
    }
}
