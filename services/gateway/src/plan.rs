//! A request for answers, whichever API it came by: what the three lowerings yield and the one generation path takes.

use format::chat::Conversation;
use types::Sampling;

/// What to ask the model, and how.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatPlan {
    /// What reaches the prompt.
    pub conversation: Conversation,
    /// How to draw tokens; the same for all answers but for [`Sampling::choice`].
    pub sampling: Sampling,
    /// Most output tokens of an answer; `None` means as many as the context holds.
    pub max_tokens: Option<u32>,
    /// Number of answers.
    pub num_choices: u32,
    /// Texts that end the visible answer.
    pub stop: Vec<String>,
}

/// What the prompt says where a request does not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PromptDefaults {
    /// Replaces the format's own sentence on who the model is.
    pub model_identity: Option<String>,
    /// Replaces the format's own knowledge cutoff.
    pub knowledge_cutoff: Option<String>,
    /// `YYYY-MM-DD`.
    pub current_date: Option<String>,
}

/// What a lowering needs beside the request.
#[derive(Debug, Clone)]
pub struct LoweringContext {
    /// What the prompt says where a request does not.
    pub defaults: PromptDefaults,
    /// Seed of a request that has none.
    pub drawn_seed: u64,
    /// Most answers to one prompt.
    pub choices_max: u32,
}
