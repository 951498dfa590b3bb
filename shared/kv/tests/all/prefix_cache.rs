#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

use std::collections::HashMap;

use kv::{Context, NoPages, PageDemand, PagePools, PageShape, PrefixCache, SequencePages};
use proptest::prelude::*;
use proptest::sample::Index;
use types::{CacheSalt, PageGroup, PageId, TokenId};

const SHAPE: PageShape = PageShape { page_tokens: 16, window: 128 };

fn salt(name: &str) -> Option<CacheSalt> {
    (!name.is_empty()).then(|| CacheSalt::new(name.as_bytes()).unwrap())
}

/// A sequence that is computed, and the memory of its pages: each cell holds all that its position depends on.
struct Running {
    salt: Option<CacheSalt>,
    tokens: Vec<TokenId>,
    pages: SequencePages,
    computed: u32,
    boundaries: Vec<u32>,
    chunk_tokens: u32,
}

impl Running {
    fn tokens_left(&self) -> u32 {
        self.tokens.len() as u32 - self.computed
    }
}

type Cells = HashMap<(PageGroup, PageId, u32), u64>;

struct Rig {
    pools: PagePools,
    cache: PrefixCache,
    cells: Cells,
}

impl Rig {
    fn new(full_pages: u32, window_pages: u32) -> Self {
        let pools = PagePools::new(full_pages, window_pages);
        Self { cache: PrefixCache::new(SHAPE, pools.clone()), pools, cells: Cells::new() }
    }

    fn begin(&mut self, salt: Option<CacheSalt>, tokens: &[TokenId], chunk_tokens: u32) -> Result<Running, NoPages> {
        let context = Context { salt: &salt, tokens, prompt_tokens: tokens.len() as u32 };
        let start = self.cache.begin(context, |left| PageDemand {
            full: SHAPE.pages_for(left),
            window: SHAPE.most_window_pages(left, chunk_tokens.min(left)),
        })?;
        let (tokens, computed) = (tokens.to_vec(), start.reused_tokens);
        Ok(Running { salt, tokens, pages: start.pages, computed, boundaries: start.boundaries, chunk_tokens })
    }

    /// Computes the next chunk: writes its cells, reads all that it attends to, and hands the cache what is complete.
    fn step(&mut self, running: &mut Running) {
        let row = running.computed..running.computed + running.chunk_tokens.min(running.tokens_left());
        running.pages.prepare(row.clone()).expect("what the sequence set aside is enough");
        let tables = running.pages.tables();
        let written = |position: u32| {
            let seed =
                running.salt.as_ref().map_or(1, |salt| salt.as_bytes().iter().map(|byte| u64::from(*byte)).sum());
            let tokens = running.tokens[..=position as usize].iter();
            tokens.fold(seed, |state, token| (state ^ u64::from(*token)).wrapping_mul(0x0100_0000_01b3))
        };
        let at = |group, position: u32| {
            let page = tables.group(group).physical(position / SHAPE.page_tokens).expect("the row's pages are there");
            (group, page, position % SHAPE.page_tokens)
        };
        for group in PageGroup::ALL {
            for position in row.clone() {
                self.cells.insert(at(group, position), written(position));
            }
            let first = if group == PageGroup::Full { 0 } else { row.start.saturating_sub(SHAPE.window - 1) };
            for position in first..row.end {
                assert_eq!(self.cells[&at(group, position)], written(position), "{group} at {position}");
            }
        }
        running.computed = row.end;
        let goes_on = running.tokens_left() > 0;
        let Running { salt, tokens, pages, boundaries, .. } = running;
        let context = Context { salt, tokens, prompt_tokens: tokens.len() as u32 };
        self.cache.keep(context, pages, row.end);
        for at in boundaries.iter().filter(|at| row.contains(&(*at - 1))) {
            self.cache.keep_boundary(context, pages, *at, goes_on);
        }
    }

    /// A whole prompt; yields the tokens that it reused.
    fn run(&mut self, name: &str, tokens: &[TokenId]) -> u32 {
        let mut running = self.begin(salt(name), tokens, 64).expect("there is room");
        let reused = running.computed;
        while running.tokens_left() > 0 {
            self.step(&mut running);
        }
        reused
    }

    /// Every page is free or the cache's, and free without it.
    fn check_idle(self) {
        for group in PageGroup::ALL {
            let counts = self.pools.group(group).counts();
            assert_eq!(counts.free + counts.cached, counts.total, "{group}: {counts:?}");
            assert_eq!(counts.cached, self.cache.num_pages(group), "{group}");
        }
        drop(self.cache);
        assert!(self.pools.all_free());
    }
}

/// `len` tokens that differ from those of another `kind` from the first on.
fn tokens(kind: u32, len: u32) -> Vec<TokenId> {
    (0..len).map(|i| i * 7 + kind).collect()
}

fn join(parts: &[&[TokenId]]) -> Vec<TokenId> {
    parts.concat()
}

#[test]
fn a_prompt_resumes_at_the_last_page_end_of_the_one_before_it() {
    // (tokens of the first prompt, tokens of the second, which begins with them or ends early; tokens reused)
    for (first, second, reused) in [
        (1, 40, 0),
        (16, 40, 0), // its only page end is its own: something must be computed
        (17, 40, 16),
        (17, 17, 16),
        (17, 16, 0),
        (32, 33, 16),
        (127, 300, 112),
        (128, 300, 112),
        (129, 300, 128),
        (129, 129, 128),
        (129, 128, 0), // the boundary is the end of the second
        (143, 144, 128),
        (144, 145, 128),
        (145, 146, 144),
        (1000, 1300, 992),
        (1000, 993, 992),
        (1000, 992, 0),
    ] {
        let mut rig = Rig::new(200, 200);
        let long = tokens(0, first.max(second));
        assert_eq!(rig.run("", &long[..first as usize]), 0);
        assert_eq!(rig.run("", &long[..second as usize]), reused, "{first}, then {second}");
        rig.check_idle();
    }
}

#[test]
fn what_prompts_begin_with_is_found_from_the_third_on() {
    let mut rig = Rig::new(400, 100);
    let system = tokens(0, 1000);
    let prompt = |kind: u32| join(&[&system, &tokens(10_000 * kind + 3, 300)]);
    let reused: Vec<u32> = (1..=4).map(|kind| rig.run("", &prompt(kind))).collect();
    assert_eq!(reused, [0, 0, 992, 992], "62 whole pages are common");
    // The first prompt's own end is still there.
    assert_eq!(rig.run("", &join(&[&prompt(1), &tokens(5, 50)])), 1296);
    rig.check_idle();
}

#[test]
fn a_prompt_that_comes_again_and_ends_with_a_page_is_found_at_the_page_before() {
    let mut rig = Rig::new(100, 100);
    assert_eq!([0; 2].map(|_| rig.run("", &tokens(0, 160))), [0, 144]);
    rig.check_idle();
}

#[test]
fn salts_have_nothing_in_common() {
    let mut rig = Rig::new(400, 400);
    let prompt = tokens(0, 300);
    for name in ["", "a", "b"] {
        assert_eq!(rig.run(name, &prompt), 0, "the first of {name:?}");
    }
    for name in ["b", "", "a"] {
        assert_eq!(rig.run(name, &prompt), 288, "the second of {name:?}");
    }
    rig.check_idle();
}

#[test]
fn what_a_resumed_sequence_generated_is_found_as_well_as_its_prompt() {
    let mut rig = Rig::new(100, 100);
    let whole = tokens(0, 200);
    let context = Context { salt: &None, tokens: &whole, prompt_tokens: 100 };
    let demand = |left| PageDemand { full: SHAPE.pages_for(left), window: SHAPE.pages_for(left) };
    let start = rig.cache.begin(context, demand).unwrap();
    assert_eq!((start.reused_tokens, start.boundaries), (0, vec![96, 192]));
    drop(start.pages);
    rig.check_idle();
}

#[test]
fn boundaries_share_the_pages_of_their_windows() {
    let mut rig = Rig::new(100, 100);
    let prompt = tokens(0, 400);
    rig.run("", &prompt[..300]);
    assert_eq!(rig.cache.num_pages(PageGroup::Window), 8, "positions 161..288");
    assert_eq!(rig.run("", &prompt[..330]), 288);
    assert_eq!(rig.cache.num_pages(PageGroup::Window), 10, "positions 193..320 beside them");
    rig.check_idle();
}

#[test]
fn the_least_recently_used_makes_room() {
    // Each prompt sets 10 pages of the window aside and leaves a boundary of 8: beside two boundaries 9 are free.
    let mut rig = Rig::new(30, 25);
    let prompt = |kind| tokens(kind, 150);
    for kind in 1..=2 {
        assert_eq!(rig.run("", &prompt(kind)), 0);
    }
    assert_eq!(rig.run("", &prompt(1)), 144);
    assert_eq!(rig.run("", &prompt(3)), 0, "window pages are short: the boundary of 2 goes");
    let counts = rig.cache.counts();
    assert_eq!((counts.evicted_full, counts.evicted_boundaries, counts.boundaries), (0, 1, 3));
    assert_eq!(rig.run("", &prompt(1)), 144);
    assert_eq!(rig.run("", &prompt(2)), 0);
    let counts = rig.cache.counts();
    assert_eq!((counts.looked_up_tokens, counts.reused_tokens), (6 * 150, 2 * 144));
    rig.check_idle();
}

#[test]
fn a_conversation_that_goes_on_does_not_keep_the_boundaries_of_its_past() {
    // A boundary of 8 pages of another prompt, and room for those of two turns beside the 10 that a turn sets aside.
    let mut rig = Rig::new(200, 8 + 2 * 8 + 10);
    let turns = tokens(0, 1000);
    assert_eq!(rig.run("", &tokens(1, 150)), 0);
    let reused: Vec<u32> = [300, 460, 620, 780].into_iter().map(|len| rig.run("", &turns[..len])).collect();
    assert_eq!(reused, [0, 288, 448, 608]);
    assert!(rig.cache.counts().evicted_boundaries > 0);
    assert_eq!(rig.run("", &tokens(1, 150)), 144, "its only one, and older than all of theirs");
    assert_eq!(rig.run("", &turns[..780]), 768, "the end of the conversation");
    rig.check_idle();
}

#[test]
fn what_a_branch_without_readers_frees_is_known() {
    // A trunk of 9 pages, branches of 5 and 3 behind it, of which one is read.
    let mut rig = Rig::new(30, 200);
    let trunk = tokens(0, 144);
    let branch = |kind: u32, len: u32| join(&[&trunk, &tokens(1000 * kind, len)]);
    rig.run("", &branch(1, 90));
    rig.run("", &branch(2, 60));
    let reader = rig.begin(salt(""), &branch(2, 60), 64).unwrap();
    let free = rig.pools.group(PageGroup::Full).counts().free;
    let most = free + 5;
    let refused = rig.begin(salt("x"), &tokens(3, (most + 1) * 16), 64).err().unwrap();
    assert_eq!((refused.needed, rig.cache.counts().evicted_full), (most + 1, 0));
    drop(rig.begin(salt("x"), &tokens(3, most * 16), 64).unwrap());
    assert_eq!(rig.cache.counts().evicted_full, 5);
    drop(reader);
    rig.check_idle();
}

#[test]
fn what_is_read_stays() {
    let mut rig = Rig::new(30, 60);
    rig.run("", &tokens(1, 150));
    rig.run("", &tokens(2, 150));
    let reader = rig.begin(salt(""), &tokens(1, 170), 64).unwrap();
    assert_eq!(reader.computed, 144);
    // 9 pages are read and 2 set aside; 19 remain, 9 of them unread leaves of prompt 2.
    let refused = rig.begin(salt("x"), &tokens(3, 20 * 16), 64).err().unwrap();
    assert_eq!(refused, NoPages { group: PageGroup::Full, needed: 20, free: 10, total: 30 });
    assert_eq!(rig.cache.counts().evicted_full, 0, "nothing is let go of in vain");
    let other = rig.begin(salt("x"), &tokens(3, 19 * 16), 64).unwrap();
    assert_eq!(rig.cache.counts().evicted_full, 9);
    assert_eq!(rig.pools.group(PageGroup::Full).counts().free, 0);
    drop((reader, other));
    assert_eq!(rig.run("", &tokens(1, 150)), 144);
    assert_eq!(rig.run("", &tokens(2, 150)), 0);
    rig.check_idle();
}

#[test]
fn a_boundary_waits_for_nobody() {
    // Room for the 13 window pages of one sequence, and 4 others: a boundary of 8 within the prompt is not to be had.
    let mut rig = Rig::new(200, 17);
    let system = tokens(0, 200);
    let prompt = |kind: u32| join(&[&system, &tokens(1000 * kind, 400)]);
    for kind in 1..=3 {
        assert_eq!(rig.run("", &prompt(kind)), 0, "prompt {kind}");
    }
    assert_eq!(rig.cache.counts().boundaries, 3, "their ends");
    let roomy = Rig::new(200, 13 + 8);
    let reused: Vec<u32> = (1..=3).scan(roomy, |rig, kind| Some(rig.run("", &prompt(kind)))).collect();
    assert_eq!(reused, [0, 0, 192]);
    rig.check_idle();
}

#[test]
fn pools_too_small_for_a_boundary_and_a_prompt_compute_it_all() {
    // 13 window pages are what a prompt of any length sets aside; the boundary has 8 more.
    for (window_pages, reused) in [(13, 0), (20, 0), (21, 592)] {
        let mut rig = Rig::new(100, window_pages);
        let prompt = tokens(0, 1200);
        assert_eq!(rig.run("", &prompt[..600]), 0);
        assert_eq!(rig.run("", &prompt), reused, "{window_pages} pages");
        rig.check_idle();
    }
}

#[derive(Debug, Clone)]
enum Event {
    Begin { salt: bool, parts: Vec<(u32, u32)>, chunk_tokens: u32 },
    Step(Index),
    End(Index),
}

fn event() -> impl Strategy<Value = Event> {
    // Few beginnings, so that many prompts have theirs in common.
    let length = prop_oneof![Just(16u32), Just(127), Just(128), Just(129), 1..200u32];
    let parts = prop::collection::vec((0..2u32, length), 1..4);
    prop_oneof![
        2 => (any::<bool>(), parts, 1..100u32)
            .prop_map(|(salt, parts, chunk_tokens)| Event::Begin { salt, parts, chunk_tokens }),
        8 => any::<Index>().prop_map(Event::Step),
        1 => any::<Index>().prop_map(Event::End),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    /// Whatever is shared, cancelled and let go of: a row reads what its own tokens and salt put there (see `Rig::step`), pages add up, and none
    /// is lost.
    #[test]
    fn sequences_read_their_own(
        events in prop::collection::vec(event(), 1..120),
        full_pages in 40..120u32,
        window_pages in 16..60u32,
    ) {
        let mut rig = Rig::new(full_pages, window_pages);
        let mut running: Vec<Running> = Vec::new();
        for event in events {
            match event {
                Event::Begin { salt: has_salt, parts, chunk_tokens } => {
                    let parts: Vec<_> = parts.iter().map(|(kind, len)| tokens(*kind, *len)).collect();
                    // Without room it would wait.
                    running.extend(rig.begin(salt(if has_salt { "s" } else { "" }), &parts.concat(), chunk_tokens));
                }
                Event::Step(index) if !running.is_empty() => {
                    let place = index.index(running.len());
                    rig.step(&mut running[place]);
                    if running[place].tokens_left() == 0 {
                        running.remove(place);
                    }
                }
                Event::End(index) if !running.is_empty() => {
                    running.remove(index.index(running.len()));
                }
                Event::Step(_) | Event::End(_) => {}
            }
            for group in PageGroup::ALL {
                let counts = rig.pools.group(group).counts();
                prop_assert_eq!(counts.free + counts.reserved + counts.live + counts.cached, counts.total);
                prop_assert!(rig.cache.num_pages(group) <= counts.cached);
            }
        }
        drop(running);
        // One that needs all there is finds it.
        let whole = rig.begin(salt("whole"), &tokens(9, full_pages * 16), 64);
        let most_window = SHAPE.most_window_pages(full_pages * 16, 64);
        prop_assert_eq!(whole.is_ok(), most_window <= window_pages);
        drop(whole);
        rig.check_idle();
    }
}
