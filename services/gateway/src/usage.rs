//! Token counts as the APIs report them.

use serde::Serialize;

use crate::turn::TurnEnd;

/// What a request cost over all its answers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    /// Tokens of the prompt, counted once.
    pub prompt_tokens: u32,
    /// Those whose KV was reused.
    pub cached_tokens: u32,
    /// Tokens generated.
    pub output_tokens: u32,
    /// Those of them in reasoning.
    pub reasoning_tokens: u32,
}

impl Cost {
    /// Counts an answer in. `cached_tokens` of the answers of one request are the same prompt: the most of them counts.
    pub fn add(&mut self, end: &TurnEnd, cached_tokens: u32) {
        self.output_tokens += end.output_tokens;
        self.reasoning_tokens += end.reasoning_tokens;
        self.cached_tokens = self.cached_tokens.max(cached_tokens);
    }
}

/// `usage` of Chat Completions and Completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ChatUsage {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: InputDetails,
    completion_tokens_details: OutputDetails,
}

/// `usage` of Responses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ResponsesUsage {
    input_tokens: u32,
    input_tokens_details: InputDetails,
    output_tokens: u32,
    output_tokens_details: OutputDetails,
    total_tokens: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct InputDetails {
    cached_tokens: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct OutputDetails {
    reasoning_tokens: u32,
}

impl From<Cost> for ChatUsage {
    fn from(cost: Cost) -> Self {
        Self {
            prompt_tokens: cost.prompt_tokens,
            completion_tokens: cost.output_tokens,
            total_tokens: cost.prompt_tokens + cost.output_tokens,
            prompt_tokens_details: InputDetails { cached_tokens: cost.cached_tokens },
            completion_tokens_details: OutputDetails { reasoning_tokens: cost.reasoning_tokens },
        }
    }
}

impl From<Cost> for ResponsesUsage {
    fn from(cost: Cost) -> Self {
        Self {
            input_tokens: cost.prompt_tokens,
            input_tokens_details: InputDetails { cached_tokens: cost.cached_tokens },
            output_tokens: cost.output_tokens,
            output_tokens_details: OutputDetails { reasoning_tokens: cost.reasoning_tokens },
            total_tokens: cost.prompt_tokens + cost.output_tokens,
        }
    }
}
