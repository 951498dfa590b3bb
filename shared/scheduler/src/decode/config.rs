//! What a decode scheduler is built with.

use std::time::Duration;

use kv::{PageDemand, PageShape};
use types::{PageGroup, SlotGroups};

use crate::config::{InvalidConfig, at_least, at_least_one};
use crate::sequence::SequenceSpec;

/// Sizes and limits of a decode worker.
#[derive(Debug, Clone)]
pub struct DecodeConfig {
    /// Slots: most sequences that are reserved, landing or running at once.
    pub max_sequences: u32,
    /// Attention groups, among which the slots are divided evenly ([`SlotGroups`]).
    pub dp: u32,
    /// Most tokens of a sequence, prompt and output together.
    pub max_context_tokens: u32,
    /// Output tokens for which pages are set aside at admission; further ones are taken page by page.
    pub growth_tokens: u32,
    /// Most tokens that a row computes: 1 without a drafter.
    pub max_row_tokens: u32,
    /// Pages for layers of full attention, in each attention group.
    pub full_pages: u32,
    /// Pages for window layers, in each attention group; [`DecodeConfig::window_pages_per_sequence`] each sequence.
    pub window_pages: u32,
    /// How long a reservation waits for its commit; [`super::DecodeScheduler::renew`] starts it anew.
    pub ticket_ttl: Duration,
    /// Plan a step while the one before it runs, its tokens unread. For engines that keep the last token on the device.
    pub lookahead: bool,
    /// Ended tickets whose outcome is remembered.
    pub remembered_tickets: u32,
}

impl DecodeConfig {
    /// Window pages that each sequence sets aside: it never needs another.
    #[must_use]
    pub fn window_pages_per_sequence(&self, shape: PageShape) -> u32 {
        shape.most_window_pages(self.max_context_tokens, self.max_row_tokens)
    }

    /// Which slots are whose.
    ///
    /// # Errors
    /// [`InvalidConfig`] when some sequence that is admitted could never finish, or the slots cannot be dealt out evenly.
    pub(super) fn validate(&self, shape: PageShape) -> Result<SlotGroups, InvalidConfig> {
        at_least_one("max_sequences", self.max_sequences)?;
        at_least_one("dp", self.dp)?;
        let slots = SlotGroups::new(self.max_sequences, self.dp).map_err(|error| InvalidConfig {
            field: "max_sequences",
            reason: format!("is {}, it must be a multiple of dp ({})", error.slots, error.dp),
        })?;
        at_least_one("max_row_tokens", self.max_row_tokens)?;
        at_least("max_context_tokens", self.max_context_tokens, 2, "a prompt token and an output token")?;
        at_least_one("page_tokens", shape.page_tokens)?;
        at_least_one("window", shape.window)?;
        // One sequence alone must be able to grow to the end, or preempting the others would not help it.
        let longest = shape.pages_for(self.max_context_tokens);
        at_least("full_pages", self.full_pages, longest, "the longest sequence must fit")?;
        let window = self.window_pages_per_sequence(shape);
        at_least("window_pages", self.window_pages, window, "the longest sequence must fit")?;
        Ok(slots)
    }

    /// Pages that admission sets aside for a sequence.
    pub(super) fn demand(&self, shape: PageShape, spec: &SequenceSpec) -> PageDemand {
        let most_cached = spec.most_cached_tokens(self.max_context_tokens);
        let first = spec.context_tokens().saturating_add(self.growth_tokens).min(most_cached);
        let context_window = shape.context_pages(PageGroup::Window, spec.context_tokens()).len() as u32;
        PageDemand {
            full: shape.pages_for(first),
            window: shape.most_window_pages(most_cached, self.max_row_tokens).max(context_window),
        }
    }
}
