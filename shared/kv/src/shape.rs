//! Which pages hold which positions: the arithmetic of page tables, for both groups.

use std::ops::Range;

use types::{KvLayout, PageGroup};

/// The two numbers that decide which pages a sequence needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageShape {
    /// Positions a page holds. At least 1.
    pub page_tokens: u32,
    /// Keys that a window layer sees, the query's own included. At least 1.
    pub window: u32,
}

impl PageShape {
    /// The shape of a layout's pages.
    #[must_use]
    pub const fn of(layout: &KvLayout) -> Self {
        Self { page_tokens: layout.page_tokens, window: layout.window }
    }

    /// Pages that hold positions `0 .. tokens`.
    #[must_use]
    pub const fn pages_for(self, tokens: u32) -> u32 {
        tokens.div_ceil(self.page_tokens)
    }

    /// The pages that hold every key which a query at `position` sees before its own: what must be in the cache, and what a transfer
    /// sends, once `position` tokens are computed. Window layers see `position - (window - 1) .. position`.
    #[must_use]
    pub fn context_pages(self, group: PageGroup, position: u32) -> Range<u32> {
        let first_key = self.first_key(group, position);
        let first_page = first_key / self.page_tokens;
        // A window of one key sees no earlier position: no page, though the query's own page may have begun.
        let end = if first_key == position { first_page } else { self.pages_for(position) };
        first_page..end
    }

    /// The pages that a row at `positions` reads or writes. `positions` must not be empty.
    #[must_use]
    pub fn row_pages(self, group: PageGroup, positions: Range<u32>) -> Range<u32> {
        self.first_key(group, positions.start) / self.page_tokens..self.pages_for(positions.end)
    }

    /// Most window pages that a sequence of at most `total_tokens` positions holds at once when a row has at most `row_tokens` tokens:
    /// a row and its window are `window - 1 + row_tokens` positions in a row, which may begin at the last position of a page.
    #[must_use]
    pub fn most_window_pages(self, total_tokens: u32, row_tokens: u32) -> u32 {
        let span = self.window - 1 + row_tokens;
        let worst = if span == 0 { 0 } else { 1 + (span - 1).div_ceil(self.page_tokens) };
        worst.min(self.pages_for(total_tokens))
    }

    fn first_key(self, group: PageGroup, position: u32) -> u32 {
        match group {
            PageGroup::Full => 0,
            PageGroup::Window => position.saturating_sub(self.window - 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use PageGroup::{Full, Window};

    const SHAPE: PageShape = PageShape { page_tokens: 16, window: 128 };

    #[test]
    fn context_pages_at_the_edges_of_window_and_page() {
        // (tokens computed, full pages, window pages)
        for (position, full, window) in [
            (0, 0..0, 0..0),
            (1, 0..1, 0..1),
            (15, 0..1, 0..1),
            (16, 0..1, 0..1),
            (17, 0..2, 0..2),
            (127, 0..8, 0..8),     // keys 0..127
            (128, 0..8, 0..8),     // keys 1..128
            (129, 0..9, 0..9),     // keys 2..129
            (142, 0..9, 0..9),     // keys 15..142: the last that needs page 0
            (143, 0..9, 1..9),     // keys 16..143
            (1127, 0..71, 62..71), // keys 1000..1127
            (1128, 0..71, 62..71),
        ] {
            assert_eq!(SHAPE.context_pages(Full, position), full, "full at {position}");
            assert_eq!(SHAPE.context_pages(Window, position), window, "window at {position}");
        }
    }

    #[test]
    fn a_window_of_one_key_needs_no_earlier_page() {
        let shape = PageShape { page_tokens: 4, window: 1 };
        assert!(shape.context_pages(Window, 6).is_empty());
        assert_eq!(shape.row_pages(Window, 6..7), 1..2);
        assert_eq!(shape.most_window_pages(100, 1), 1);
    }

    /// The definition, position by position.
    #[test]
    fn pages_are_exactly_those_of_the_keys_seen() {
        for (page_tokens, window) in [(1, 1), (1, 5), (4, 1), (4, 4), (4, 5), (16, 128), (128, 128), (64, 3)] {
            let shape = PageShape { page_tokens, window };
            for position in 0..400u32 {
                let keys = (0..position).filter(|key| position - key < window);
                let mut pages: Vec<u32> = keys.map(|key| key / page_tokens).collect();
                pages.dedup();
                let found: Vec<u32> = shape.context_pages(Window, position).collect();
                assert_eq!(found, pages, "page_tokens {page_tokens} window {window} position {position}");
            }
        }
    }

    #[test]
    fn most_window_pages_is_reached_and_never_passed() {
        for (page_tokens, window, row) in
            [(16, 128, 1), (16, 128, 4), (16, 128, 512), (4, 1, 1), (1, 3, 2), (64, 128, 1)]
        {
            let shape = PageShape { page_tokens, window };
            let held = |start: u32| shape.row_pages(Window, start..start + row).len() as u32;
            let most = (0..2_000).map(held).max().unwrap();
            assert_eq!(shape.most_window_pages(10_000, row), most, "{page_tokens} {window} {row}");
        }
        assert_eq!(SHAPE.most_window_pages(17, 1), 2, "a short sequence never fills the window");
    }
}
