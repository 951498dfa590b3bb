//! What a prefill scheduler is built with.

use kv::{PageDemand, PageShape};

use crate::config::{InvalidConfig, at_least, at_least_one};

/// Sizes and limits of a prefill worker.
#[derive(Debug, Clone)]
pub struct PrefillConfig {
    /// Most prompts waiting.
    pub max_queued: u32,
    /// Slots: most prompts that hold pages at once. One computes; the others' transfers are ending.
    pub max_prompts: u32,
    /// Most tokens of a sequence, prompt and output together.
    pub max_context_tokens: u32,
    /// Most tokens that one step computes.
    pub chunk_tokens: u32,
    /// Pages of the full-attention group.
    pub full_pages: u32,
    /// Pages of the window group: [`PrefillConfig::window_pages_per_prompt`] for each prompt of the longest kind, and those of boundaries kept.
    pub window_pages: u32,
    /// Keep pages of prompts for prompts that begin alike.
    pub prefix_reuse: bool,
    /// Ended tickets whose outcome is remembered.
    pub remembered_tickets: u32,
}

impl PrefillConfig {
    /// Full-attention pages that a prompt of `context_tokens` holds.
    #[must_use]
    pub fn full_pages_per_prompt(shape: PageShape, context_tokens: u32) -> u32 {
        shape.pages_for(context_tokens)
    }

    /// Window pages that a prompt of `context_tokens` holds: those of a chunk and its window.
    #[must_use]
    pub fn window_pages_per_prompt(&self, shape: PageShape, context_tokens: u32) -> u32 {
        shape.most_window_pages(context_tokens, self.chunk_tokens.min(context_tokens))
    }

    pub(super) fn demand(&self, shape: PageShape, context_tokens: u32) -> PageDemand {
        PageDemand {
            full: Self::full_pages_per_prompt(shape, context_tokens),
            window: self.window_pages_per_prompt(shape, context_tokens),
        }
    }

    /// # Errors
    /// [`InvalidConfig`] when some prompt that is admitted could never begin.
    pub(super) fn validate(&self, shape: PageShape) -> Result<(), InvalidConfig> {
        at_least_one("max_queued", self.max_queued)?;
        at_least_one("max_prompts", self.max_prompts)?;
        at_least_one("chunk_tokens", self.chunk_tokens)?;
        at_least("max_context_tokens", self.max_context_tokens, 2, "a prompt token and an output token")?;
        at_least_one("page_tokens", shape.page_tokens)?;
        at_least_one("window", shape.window)?;
        let longest = self.demand(shape, self.max_context_tokens - 1);
        at_least("full_pages", self.full_pages, longest.full, "the longest prompt must fit")?;
        at_least("window_pages", self.window_pages, longest.window, "the longest prompt must fit")
    }
}
