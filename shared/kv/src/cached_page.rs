//! Complete pages with several holders: whoever keeps them, and the sequences that read them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use types::PageId;

use crate::page_pool::Pages;
use crate::page_pool::state::{Cached, Reserved};

/// A page that is complete and will not be written again. Clones are the same page; with the last holder gone it is free.
#[derive(Debug, Clone)]
pub struct CachedPage(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Exactly one.
    page: Pages<Cached>,
    readers: AtomicU32,
}

impl CachedPage {
    /// Shares a page. The handle must be on one alone.
    #[must_use]
    pub fn new(page: Pages<Cached>) -> Self {
        assert_eq!(page.len(), 1, "pages are shared one by one");
        Self(Arc::new(Shared { page, readers: AtomicU32::new(0) }))
    }

    /// Which page.
    #[must_use]
    pub fn id(&self) -> PageId {
        self.0.page.ids()[0]
    }

    /// Whether a sequence reads it: letting go of it would free nothing.
    #[must_use]
    pub fn is_read(&self) -> bool {
        self.0.readers.load(Ordering::Relaxed) > 0
    }

    /// One more reader.
    #[must_use]
    pub fn read(&self) -> PageReader {
        // Relaxed: the number only decides what is worth evicting. The page itself is counted by the `Arc`.
        self.0.readers.fetch_add(1, Ordering::Relaxed);
        PageReader { page: self.clone() }
    }

    /// Whether nobody but `self` holds it.
    #[must_use]
    pub fn is_sole(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }
}

/// A sequence's hold on a page that it reads and others may read too.
#[derive(Debug)]
pub struct PageReader {
    page: CachedPage,
}

impl PageReader {
    /// What it reads.
    #[must_use]
    pub fn page(&self) -> &CachedPage {
        &self.page
    }

    /// Lets go of the page; the place is the reader's own if nobody else holds it.
    #[must_use]
    pub fn release(self) -> Option<Pages<Reserved>> {
        let CachedPage(shared) = self.page.clone();
        drop(self);
        Arc::into_inner(shared).map(|shared| shared.page.recycle())
    }
}

impl Drop for PageReader {
    fn drop(&mut self) {
        self.page.0.readers.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use types::PageGroup;

    use super::*;
    use crate::page_pool::PagePool;

    #[test]
    fn a_page_is_free_when_its_last_holder_is_gone() {
        let pool = PagePool::new(PageGroup::Full, 1);
        let page = pool.reserve(1).unwrap().into_live().seal().map(CachedPage::new).next().unwrap();
        let readers = [page.read(), page.read()];
        assert!(page.is_read() && !page.is_sole());
        let [first, second] = readers;
        assert!(first.release().is_none(), "others hold it");
        drop(page);
        assert_eq!((pool.counts().cached, pool.counts().free), (1, 0));
        let reserved = second.release().expect("the last holder has the place to itself");
        assert_eq!((pool.counts().cached, pool.counts().reserved), (0, 1));
        drop(reserved);
        assert_eq!(pool.counts().free, 1);
    }
}
