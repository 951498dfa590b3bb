//! Pools of pages and the typed states that a page passes through.
//!
//! ```text
//! free ──reserve──► Reserved ──expect_writer──► Landing ──landed──► Live ──seal──► Cached
//!                      │  ▲ recycle (from Live       │ drop
//!                      │  │ and Cached)              └──► quarantined ──fence(writer)──► free
//!                      └──┴► Live                        (all others: drop ──► free)
//! ```
//! A page that a remote writer may still write to never reaches the free list: letting go of [`state::Landing`] pages, however it
//! happens, puts them into the pool's quarantine under the writer's ticket, and only [`PagePool::fence`] takes them out.

use std::collections::BTreeMap;
use std::fmt;
use std::iter::Sum;
use std::ops::Add;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use types::{Classify, ErrorClass, PageGroup, PageId, TicketId};

/// The states of pages that somebody holds. Free and quarantined pages belong to the pool and have no handle.
pub mod state {
    use types::TicketId;

    /// Set aside; nobody reads or writes it.
    #[derive(Debug, Clone, Copy)]
    pub struct Reserved;

    /// A remote writer may write to it.
    #[derive(Debug)]
    pub struct Landing {
        pub(super) writer: TicketId,
    }

    /// Its content may be read; the local engine writes to it.
    #[derive(Debug, Clone, Copy)]
    pub struct Live;

    /// Complete: nobody writes to it any more, and several may read it ([`crate::CachedPage`]).
    #[derive(Debug, Clone, Copy)]
    pub struct Cached;

    /// Implemented by the four states alone.
    pub trait PageState: super::sealed::State {}
    impl<S: super::sealed::State> PageState for S {}
}

mod sealed {
    use types::TicketId;

    use super::state::{Cached, Landing, Live, Reserved};

    /// A state's place in the books.
    #[derive(Debug, Clone, Copy)]
    pub enum Held {
        Reserved,
        Landing,
        Live,
        Cached,
    }

    pub trait State {
        const HELD: Held;

        /// Who may write behind the holder's back.
        fn writer(&self) -> Option<TicketId> {
            None
        }
    }

    impl State for Reserved {
        const HELD: Held = Held::Reserved;
    }

    impl State for Landing {
        const HELD: Held = Held::Landing;

        fn writer(&self) -> Option<TicketId> {
            Some(self.writer)
        }
    }

    impl State for Live {
        const HELD: Held = Held::Live;
    }

    impl State for Cached {
        const HELD: Held = Held::Cached;
    }
}

use sealed::Held;
use state::{Cached, Landing, Live, PageState, Reserved};

/// Pages of one pool by state; the six states add up to `total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolCounts {
    /// All pages of the pool.
    pub total: u32,
    /// Nobody's.
    pub free: u32,
    /// Set aside for a sequence.
    pub reserved: u32,
    /// Being written by a remote writer.
    pub landing: u32,
    /// In use by the engine.
    pub live: u32,
    /// Complete and read-only: kept for sequences that begin alike, or read by one.
    pub cached: u32,
    /// Given up while their writer might still write.
    pub quarantined: u32,
}

impl Add for PoolCounts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            total: self.total + other.total,
            free: self.free + other.free,
            reserved: self.reserved + other.reserved,
            landing: self.landing + other.landing,
            live: self.live + other.live,
            cached: self.cached + other.cached,
            quarantined: self.quarantined + other.quarantined,
        }
    }
}

impl Sum for PoolCounts {
    fn sum<I: Iterator<Item = Self>>(pools: I) -> Self {
        pools.fold(Self::default(), Add::add)
    }
}

/// Too few free pages; nothing was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{needed} pages of group {group} needed, {free} of {total} are free")]
pub struct NoPages {
    /// Which pool.
    pub group: PageGroup,
    /// Pages asked for.
    pub needed: u32,
    /// Pages free.
    pub free: u32,
    /// Pages of the pool.
    pub total: u32,
}

impl Classify for NoPages {
    fn class(&self) -> ErrorClass {
        ErrorClass::Overloaded
    }
}

struct Books {
    free: Vec<PageId>,
    /// By [`Held`].
    held: [u32; 4],
    quarantine: BTreeMap<TicketId, Vec<PageId>>,
}

struct Shared {
    group: PageGroup,
    total: u32,
    books: Mutex<Books>,
}

impl Shared {
    /// The books stay consistent whatever panics elsewhere: no code that can panic runs under the lock.
    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change_state(&self, num_pages: usize, from: Held, to: Held) {
        let mut books = self.books();
        books.held[from as usize] -= num_pages as u32;
        books.held[to as usize] += num_pages as u32;
    }
}

/// The pages of one group of layers on one attention group; a page number means the same on each of its ranks. Clones share the pages.
///
/// The lock is there so that handles may be dropped on any thread; the owner of a pool is one scheduler, so it is never contended.
#[derive(Clone)]
pub struct PagePool {
    shared: Arc<Shared>,
}

impl PagePool {
    /// A pool of pages `0 .. num_pages`, all free.
    #[must_use]
    pub fn new(group: PageGroup, num_pages: u32) -> Self {
        // Reversed, so that low numbers are handed out first.
        let free = (0..num_pages).rev().map(PageId).collect();
        let books = Books { free, held: [0; 4], quarantine: BTreeMap::new() };
        Self { shared: Arc::new(Shared { group, total: num_pages, books: Mutex::new(books) }) }
    }

    /// Whose layers the pages belong to.
    #[must_use]
    pub fn group(&self) -> PageGroup {
        self.shared.group
    }

    /// Takes free pages, all or none.
    ///
    /// # Errors
    /// [`NoPages`] when fewer are free.
    pub fn reserve(&self, num_pages: u32) -> Result<Pages<Reserved>, NoPages> {
        let mut books = self.shared.books();
        let free = books.free.len() as u32;
        if free < num_pages {
            return Err(NoPages { group: self.shared.group, needed: num_pages, free, total: self.shared.total });
        }
        let mut ids = books.free.split_off((free - num_pages) as usize);
        ids.reverse();
        books.held[Held::Reserved as usize] += num_pages;
        drop(books);
        Ok(Pages { ids, state: Reserved, shared: Arc::clone(&self.shared) })
    }

    /// No page, reserved: the neutral element of [`Pages::append`].
    pub(crate) fn none(&self) -> Pages<Reserved> {
        Pages { ids: Vec::new(), state: Reserved, shared: Arc::clone(&self.shared) }
    }

    /// The writer of this ticket provably cannot write any more: frees what it left in quarantine and returns the number of pages.
    /// Idempotent.
    pub fn fence(&self, writer: TicketId) -> u32 {
        let mut books = self.shared.books();
        let pages = books.quarantine.remove(&writer).unwrap_or_default();
        books.free.extend(&pages);
        pages.len() as u32
    }

    /// Pages by state, for metrics and for tests.
    #[must_use]
    pub fn counts(&self) -> PoolCounts {
        let books = self.shared.books();
        PoolCounts {
            total: self.shared.total,
            free: books.free.len() as u32,
            reserved: books.held[Held::Reserved as usize],
            landing: books.held[Held::Landing as usize],
            live: books.held[Held::Live as usize],
            cached: books.held[Held::Cached as usize],
            quarantined: books.quarantine.values().map(|pages| pages.len() as u32).sum(),
        }
    }
}

impl fmt::Debug for PagePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagePool").field("group", &self.shared.group).field("counts", &self.counts()).finish()
    }
}

/// The only handle on some pages, in one state. Dropped, it gives the pages back: to the free list, or into quarantine while a
/// remote writer may still write to them.
pub struct Pages<S: PageState> {
    ids: Vec<PageId>,
    state: S,
    shared: Arc<Shared>,
}

impl<S: PageState> Pages<S> {
    /// The pages, in the order of the positions that they hold.
    #[must_use]
    pub fn ids(&self) -> &[PageId] {
        &self.ids
    }

    /// Number of pages.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.ids.len() as u32
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    fn enter<T: PageState>(mut self, state: T) -> Pages<T> {
        let ids = std::mem::take(&mut self.ids);
        self.shared.change_state(ids.len(), S::HELD, T::HELD);
        Pages { ids, state, shared: Arc::clone(&self.shared) }
    }
}

impl Pages<Reserved> {
    /// Opens the pages to the writer that this ticket admits.
    #[must_use]
    pub fn expect_writer(self, writer: TicketId) -> Pages<Landing> {
        self.enter(Landing { writer })
    }

    /// Gives the pages to the local engine.
    #[must_use]
    pub fn into_live(self) -> Pages<Live> {
        self.enter(Live)
    }
}

impl Pages<Landing> {
    /// Everything has arrived: the pages may be read. Called by [`crate::LandingPages::commit`], which holds the proof.
    pub(crate) fn landed(self) -> Pages<Live> {
        self.enter(Live)
    }
}

impl Pages<Live> {
    /// The content is of no more use, the place is.
    #[must_use]
    pub fn recycle(self) -> Pages<Reserved> {
        self.enter(Reserved)
    }

    /// The content is complete and will not be written again. One handle a page: they have several readers each, and come free one by one.
    pub fn seal(self) -> impl Iterator<Item = Pages<Cached>> {
        let mut cached = self.enter(Cached);
        let (ids, shared) = (std::mem::take(&mut cached.ids), Arc::clone(&cached.shared));
        ids.into_iter().map(move |id| Pages { ids: vec![id], state: Cached, shared: Arc::clone(&shared) })
    }
}

impl Pages<Cached> {
    /// Nobody else reads it, and the content is of no more use.
    #[must_use]
    pub fn recycle(self) -> Pages<Reserved> {
        self.enter(Reserved)
    }
}

/// Cutting and joining, for the states that carry no writer (those are `Copy`): all their pages are alike.
impl<S: PageState + Copy> Pages<S> {
    /// Takes the first `num_pages` pages out; all of them when there are fewer.
    #[must_use]
    pub fn take_first(&mut self, num_pages: u32) -> Self {
        let ids = self.ids.drain(..self.ids.len().min(num_pages as usize)).collect();
        Self { ids, state: self.state, shared: Arc::clone(&self.shared) }
    }

    /// Puts another handle's pages behind these. Both must come from one pool.
    pub fn append(&mut self, mut other: Self) {
        assert!(Arc::ptr_eq(&self.shared, &other.shared), "pages of two pools in one handle");
        self.ids.append(&mut other.ids);
    }
}

impl<S: PageState> Drop for Pages<S> {
    fn drop(&mut self) {
        if self.ids.is_empty() {
            return;
        }
        let mut books = self.shared.books();
        books.held[S::HELD as usize] = books.held[S::HELD as usize].saturating_sub(self.ids.len() as u32);
        match self.state.writer() {
            Some(writer) => books.quarantine.entry(writer).or_default().append(&mut self.ids),
            None => books.free.append(&mut self.ids),
        }
    }
}

impl<S: PageState> fmt::Debug for Pages<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pages({} {:?}, {:?})", self.shared.group, S::HELD, self.ids)
    }
}

/// The pools of both groups of one attention group.
#[derive(Debug, Clone)]
pub struct PagePools {
    full: PagePool,
    window: PagePool,
}

impl PagePools {
    /// Pools of the given numbers of pages.
    #[must_use]
    pub fn new(full_pages: u32, window_pages: u32) -> Self {
        Self {
            full: PagePool::new(PageGroup::Full, full_pages),
            window: PagePool::new(PageGroup::Window, window_pages),
        }
    }

    /// The pool of a group.
    #[must_use]
    pub fn group(&self, group: PageGroup) -> &PagePool {
        match group {
            PageGroup::Full => &self.full,
            PageGroup::Window => &self.window,
        }
    }

    /// [`PagePool::fence`] in both groups.
    pub fn fence(&self, writer: TicketId) -> u32 {
        self.full.fence(writer) + self.window.fence(writer)
    }

    /// Whether every page of both pools is free: what must hold when no request is left.
    #[must_use]
    pub fn all_free(&self) -> bool {
        PageGroup::ALL.iter().all(|group| {
            let counts = self.group(*group).counts();
            counts.free == counts.total
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITER: TicketId = TicketId(7);

    /// Free, reserved, landing, live, quarantined, cached.
    fn counts(pool: &PagePool) -> [u32; 6] {
        let counts = pool.counts();
        [counts.free, counts.reserved, counts.landing, counts.live, counts.quarantined, counts.cached]
    }

    #[test]
    fn every_state_is_counted_and_drop_returns_to_free() {
        let pool = PagePool::new(PageGroup::Full, 10);
        let mut reserved = pool.reserve(6).unwrap();
        assert_eq!(reserved.ids(), [0, 1, 2, 3, 4, 5].map(PageId));
        let live = reserved.take_first(2).into_live();
        let landing = reserved.take_first(3).expect_writer(WRITER);
        assert_eq!(counts(&pool), [4, 1, 3, 2, 0, 0]);
        drop((live, reserved));
        assert_eq!(counts(&pool), [7, 0, 3, 0, 0, 0]);
        drop(landing.landed());
        assert_eq!(counts(&pool), [10, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn sealed_pages_come_free_one_by_one_or_are_set_aside_again() {
        let pool = PagePool::new(PageGroup::Window, 5);
        let mut cached: Vec<_> = pool.reserve(3).unwrap().into_live().seal().collect();
        assert_eq!(cached.iter().map(|page| page.ids()[0].0).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(counts(&pool), [2, 0, 0, 0, 0, 3]);
        drop(cached.remove(1));
        assert_eq!(counts(&pool), [3, 0, 0, 0, 0, 2]);
        let reserved = cached.remove(0).recycle();
        assert_eq!(counts(&pool), [3, 1, 0, 0, 0, 1]);
        drop((reserved, cached));
        assert_eq!(counts(&pool), [5, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn reserve_takes_all_or_none() {
        let pool = PagePool::new(PageGroup::Window, 3);
        let held = pool.reserve(2).unwrap();
        let refused = pool.reserve(2).unwrap_err();
        assert_eq!(refused, NoPages { group: PageGroup::Window, needed: 2, free: 1, total: 3 });
        assert_eq!(pool.reserve(1).unwrap().len(), 1);
        assert!(pool.reserve(0).unwrap().is_empty());
        drop(held);
        assert_eq!(pool.reserve(3).unwrap().len(), 3);
    }

    #[test]
    fn landing_pages_let_go_stay_in_quarantine_until_their_own_writer_is_fenced() {
        let pool = PagePool::new(PageGroup::Full, 4);
        drop(pool.reserve(3).unwrap().expect_writer(WRITER));
        assert_eq!(counts(&pool), [1, 0, 0, 0, 3, 0]);
        assert_eq!(pool.fence(TicketId(8)), 0, "another ticket's fence frees nothing");
        assert_eq!(counts(&pool), [1, 0, 0, 0, 3, 0]);
        assert_eq!(pool.fence(WRITER), 3);
        assert_eq!(pool.fence(WRITER), 0, "a repeated fence frees nothing twice");
        assert_eq!(counts(&pool), [4, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_handle_dropped_while_another_thread_panicked_still_returns_its_pages() {
        let pool = PagePool::new(PageGroup::Full, 2);
        let pages = pool.reserve(2).unwrap();
        let result = std::thread::spawn(move || {
            let _pages = pages;
            panic!("holder dies");
        })
        .join();
        assert!(result.is_err());
        assert_eq!(counts(&pool), [2, 0, 0, 0, 0, 0]);
    }
}
