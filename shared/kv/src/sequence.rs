//! The pages of one sequence in both groups, from reservation to release.
//!
//! [`SequenceReserve`] holds pages before anything is computed. It becomes [`SequencePages`] either at once (prefill computes the
//! context here, from its beginning or behind pages that are cached) or by way of [`LandingPages`] (a remote prefill writes it).

use std::collections::VecDeque;
use std::ops::Range;

use types::{KvLayout, PageGroup, PageId, TicketId};

use crate::cached_page::{CachedPage, PageReader};
use crate::landing::{Incomplete, Landing};
use crate::page_map::{PageMap, PageMapError, SliceError};
use crate::page_pool::state::{self, Live, Reserved};
use crate::page_pool::{NoPages, PagePools, Pages};
use crate::shape::PageShape;
use crate::slice::KvSlice;

/// Pages that a sequence sets aside at admission, by group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageDemand {
    /// Full-attention pages. Further ones are taken from the pool as the sequence grows.
    pub full: u32,
    /// Window pages. With [`PageShape::most_window_pages`] of them the sequence never asks for another: pages that leave the window
    /// are used again.
    pub window: u32,
}

/// The physical pages of a table at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageTable {
    /// Logical page that `pages[0]` holds.
    pub first_page: u32,
    /// Physical pages, in the order of positions.
    pub pages: Vec<PageId>,
}

impl PageTable {
    /// The physical page behind a logical one.
    #[must_use]
    pub fn physical(&self, page: u32) -> Option<PageId> {
        self.pages.get(page.checked_sub(self.first_page)? as usize).copied()
    }
}

/// Both tables of a sequence at one moment: what a transfer looks physical pages up in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageTables {
    /// Full-attention layers.
    pub full: PageTable,
    /// Window layers.
    pub window: PageTable,
}

impl PageTables {
    /// The table of a group.
    #[must_use]
    pub fn group(&self, group: PageGroup) -> &PageTable {
        match group {
            PageGroup::Full => &self.full,
            PageGroup::Window => &self.window,
        }
    }

    /// The physical page that holds a slice, on every rank of the attention group.
    #[must_use]
    pub fn physical(&self, slice: &KvSlice) -> Option<PageId> {
        self.group(slice.group).physical(slice.page)
    }
}

/// A change to one table, in the words of the step plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableDelta {
    /// Which table.
    pub group: PageGroup,
    /// Logical pages below this index are dropped; in a table that is still empty, the index of the first page.
    pub first_page: u32,
    /// Physical pages appended behind the last one.
    pub append: Vec<PageId>,
}

/// Pages set aside for one sequence; nothing is in them.
#[derive(Debug)]
pub struct SequenceReserve {
    shape: PageShape,
    pools: PagePools,
    full: Pages<Reserved>,
    window: Pages<Reserved>,
}

impl SequenceReserve {
    /// Takes pages from both pools, all or none.
    ///
    /// # Errors
    /// [`NoPages`] of the first group that has too few.
    pub fn take(pools: &PagePools, shape: PageShape, demand: PageDemand) -> Result<Self, NoPages> {
        let full = pools.group(PageGroup::Full).reserve(demand.full)?;
        let window = pools.group(PageGroup::Window).reserve(demand.window)?;
        Ok(Self { shape, pools: pools.clone(), full, window })
    }

    /// A sequence whose context is computed here, from position 0.
    #[must_use]
    pub fn start(self) -> SequencePages {
        let none = |group| self.pools.group(group).none().into_live();
        SequencePages {
            full: Table::new(PageGroup::Full, 0, none(PageGroup::Full), self.full),
            window: Table::new(PageGroup::Window, 0, none(PageGroup::Window), self.window),
            shape: self.shape,
            pools: self.pools,
        }
    }

    /// A sequence whose context is computed here from position `tokens` on, a page's first: `full` are the pages before it, `window` those
    /// of [`PageShape::context_pages`] before it.
    #[must_use]
    pub(crate) fn resume(self, tokens: u32, full: Vec<PageReader>, window: Vec<PageReader>) -> SequencePages {
        let mut pages = self.start();
        let context = |group| pages.shape.context_pages(group, tokens);
        let (full_pages, window_pages) = (context(PageGroup::Full), context(PageGroup::Window));
        assert_eq!((full.len(), window.len()), (full_pages.len(), window_pages.len()), "pages of another context");
        pages.full.begin_with(full_pages.start, full);
        pages.window.begin_with(window_pages.start, window);
        pages
    }

    /// Opens the pages of the context to the writer that `writer` admits; the rest stays set aside for growth.
    ///
    /// # Errors
    /// The reserve itself and why: the layouts do not fit, or the reserve has too few pages for the context.
    pub fn land(
        mut self,
        writer: TicketId,
        sender: &KvLayout,
        receiver: &KvLayout,
        context_tokens: u32,
    ) -> Result<LandingPages, Box<(Self, LandError)>> {
        let map = match PageMap::new(sender, receiver, context_tokens) {
            Ok(map) => map,
            Err(error) => return Err(Box::new((self, error.into()))),
        };
        for (group, held) in [(PageGroup::Full, self.full.len()), (PageGroup::Window, self.window.len())] {
            let needed = map.pages(group).len() as u32;
            if held < needed {
                return Err(Box::new((self, LandError::ReserveTooSmall { group, needed, held })));
            }
        }
        let full = self.full.take_first(map.pages(PageGroup::Full).len() as u32).expect_writer(writer);
        let window = self.window.take_first(map.pages(PageGroup::Window).len() as u32).expect_writer(writer);
        Ok(LandingPages { full, window, spare: self, landing: Landing::new(map) })
    }
}

/// Why a reserve cannot receive a context.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LandError {
    /// Nothing can be sent between the two layouts.
    #[error(transparent)]
    Map(#[from] PageMapError),
    /// The reserve was made for a shorter context.
    #[error("context needs {needed} pages of group {group}, {held} are reserved")]
    ReserveTooSmall {
        /// Which group.
        group: PageGroup,
        /// Pages of the context.
        needed: u32,
        /// Pages set aside.
        held: u32,
    },
}

impl types::Classify for LandError {
    fn class(&self) -> types::ErrorClass {
        types::ErrorClass::Caller
    }
}

/// Pages that a remote writer fills. Dropped, those it may still write to go into quarantine.
#[derive(Debug)]
pub struct LandingPages {
    full: Pages<state::Landing>,
    window: Pages<state::Landing>,
    spare: SequenceReserve,
    landing: Landing,
}

impl LandingPages {
    /// Notes that a slice's bytes are in their page; returns how many slices are still missing.
    ///
    /// # Errors
    /// [`SliceError`] when the slice is not part of the transfer or had arrived before; nothing changes then.
    pub fn arrive(&mut self, slice: &KvSlice) -> Result<u32, SliceError> {
        self.landing.arrive(slice)
    }

    /// What has arrived, and what is expected.
    #[must_use]
    pub fn landing(&self) -> &Landing {
        &self.landing
    }

    /// Where the writer's slices go.
    #[must_use]
    pub fn tables(&self) -> PageTables {
        let table = |group, pages: &Pages<state::Landing>| PageTable {
            first_page: self.landing.map().pages(group).start,
            pages: pages.ids().to_vec(),
        };
        PageTables { full: table(PageGroup::Full, &self.full), window: table(PageGroup::Window, &self.window) }
    }

    /// The only way from landing to live: every slice has arrived.
    ///
    /// # Errors
    /// The pages themselves and [`Incomplete`], naming what is missing.
    pub fn commit(self) -> Result<SequencePages, Box<(Self, Incomplete)>> {
        if let Err(incomplete) = self.landing.check_complete() {
            return Err(Box::new((self, incomplete)));
        }
        let first = |group| self.landing.map().pages(group).start;
        let (full_first, window_first) = (first(PageGroup::Full), first(PageGroup::Window));
        let SequenceReserve { shape, pools, full, window } = self.spare;
        Ok(SequencePages {
            full: Table::new(PageGroup::Full, full_first, self.full.landed(), full),
            window: Table::new(PageGroup::Window, window_first, self.window.landed(), window),
            shape,
            pools,
        })
    }
}

#[derive(Debug)]
struct Table {
    group: PageGroup,
    first_page: u32,
    /// The first pages: complete, and maybe others' as well.
    cached: VecDeque<PageReader>,
    /// The pages behind them, this sequence's alone: only these are written.
    held: Pages<Live>,
    spare: Pages<Reserved>,
    /// Pages at the end of the table that no delta has told the engine of.
    untold: u32,
    /// `first_page` as the engine knows it.
    told_first: u32,
}

impl Table {
    fn new(group: PageGroup, first_page: u32, held: Pages<Live>, spare: Pages<Reserved>) -> Self {
        let untold = held.len();
        Self { group, first_page, cached: VecDeque::new(), held, spare, untold, told_first: 0 }
    }

    /// Puts complete pages in an empty table.
    fn begin_with(&mut self, first_page: u32, cached: Vec<PageReader>) {
        assert_eq!(self.len(), 0, "complete pages come first");
        (self.first_page, self.cached) = (first_page, cached.into());
        self.untold = self.len();
    }

    /// Pages of the table.
    fn len(&self) -> u32 {
        self.cached.len() as u32 + self.held.len()
    }

    /// The page behind the last one.
    fn end(&self) -> u32 {
        self.first_page + self.len()
    }

    fn ids(&self) -> impl Iterator<Item = PageId> {
        self.cached.iter().map(|reader| reader.page().id()).chain(self.held.ids().iter().copied())
    }

    fn drop_before(&mut self, first_page: u32) {
        let gone = first_page.saturating_sub(self.first_page);
        let gone_cached = self.cached.len().min(gone as usize);
        for reader in self.cached.drain(..gone_cached) {
            if let Some(place) = reader.release() {
                self.spare.append(place);
            }
        }
        self.spare.append(self.held.take_first(gone - gone_cached as u32).recycle());
        self.first_page = self.first_page.max(first_page);
        self.untold = self.untold.min(self.len());
    }

    /// The pages before page `end` are complete.
    fn seal(&mut self, end: u32) {
        let complete = end.saturating_sub(self.first_page + self.cached.len() as u32);
        let pages = self.held.take_first(complete).seal().map(CachedPage::new);
        self.cached.extend(pages.map(|page| page.read()));
    }

    /// Complete pages of a range, which are all in the table.
    fn complete(&self, pages: Range<u32>) -> impl ExactSizeIterator<Item = &CachedPage> {
        let place = |page: u32| (page - self.first_page) as usize;
        self.cached.range(place(pages.start)..place(pages.end)).map(PageReader::page)
    }

    /// Pages wanted up to `end` that neither the table nor its reserve has.
    fn lacking(&self, end: u32) -> u32 {
        self.missing(end).saturating_sub(self.spare.len())
    }

    fn missing(&self, end: u32) -> u32 {
        end.saturating_sub(self.end())
    }

    fn extend(&mut self, end: u32, new: Pages<Reserved>) {
        self.spare.append(new);
        let fresh = self.spare.take_first(self.missing(end));
        self.untold += fresh.len();
        self.held.append(fresh.into_live());
    }

    fn take_delta(&mut self) -> Option<TableDelta> {
        if self.untold == 0 && self.told_first == self.first_page {
            return None;
        }
        let append = self.ids().skip((self.len() - self.untold) as usize).collect();
        (self.untold, self.told_first) = (0, self.first_page);
        Some(TableDelta { group: self.group, first_page: self.first_page, append })
    }

    fn snapshot(&self) -> PageTable {
        PageTable { first_page: self.first_page, pages: self.ids().collect() }
    }
}

/// The page tables of a sequence that the engine computes.
#[derive(Debug)]
pub struct SequencePages {
    shape: PageShape,
    pools: PagePools,
    full: Table,
    window: Table,
}

impl SequencePages {
    /// Makes the tables hold every page that a row at `positions` reads or writes, and lets go of the pages before its window. Rows
    /// come in ascending order of their first position; one may begin inside the row before it (rejected drafts).
    ///
    /// # Errors
    /// [`NoPages`] when a pool has too few free pages: then no page was taken, and the row must not run.
    pub fn prepare(&mut self, positions: Range<u32>) -> Result<(), NoPages> {
        let full = self.shape.row_pages(PageGroup::Full, positions.clone());
        let window = self.shape.row_pages(PageGroup::Window, positions);
        self.window.drop_before(window.start);
        let more_full = self.pools.group(PageGroup::Full).reserve(self.full.lacking(full.end))?;
        let more_window = self.pools.group(PageGroup::Window).reserve(self.window.lacking(window.end))?;
        self.full.extend(full.end, more_full);
        self.window.extend(window.end, more_window);
        Ok(())
    }

    /// What changed since the last call; all of both tables at the first.
    pub fn take_deltas(&mut self) -> impl Iterator<Item = TableDelta> + use<> {
        [self.full.take_delta(), self.window.take_delta()].into_iter().flatten()
    }

    /// Both tables as they are now.
    #[must_use]
    pub fn tables(&self) -> PageTables {
        PageTables { full: self.full.snapshot(), window: self.window.snapshot() }
    }
    /// The first `tokens` positions are computed: their whole pages are complete, and stay as they are. Yields those of full attention.
    pub(crate) fn seal_full(&mut self, tokens: u32) -> impl ExactSizeIterator<Item = &CachedPage> {
        let end = tokens / self.shape.page_tokens;
        self.full.seal(end);
        self.full.complete(0..end)
    }

    /// Window pages that a sequence must hold to go on at position `tokens`, a page's first, if this one still has them all. The positions
    /// before it are computed, so these pages are complete.
    pub(crate) fn seal_window(&mut self, tokens: u32) -> Option<impl ExactSizeIterator<Item = &CachedPage>> {
        let pages = self.shape.context_pages(PageGroup::Window, tokens);
        if pages.start < self.window.first_page || self.window.end() < pages.end {
            return None;
        }
        self.window.seal(pages.end);
        Some(self.window.complete(pages))
    }

    /// The sequence grows no more: what it set aside of the window's pages and has not used is free for others.
    pub fn release_window_spare(&mut self) {
        drop(self.window.spare.take_first(self.window.spare.len()));
    }

    /// More room for pages of the window, in the place of some that others keep.
    pub(crate) fn add_window_spare(&mut self, pages: Pages<Reserved>) {
        self.window.spare.append(pages);
    }
}
