//! Token counts as the APIs report them.

use std::collections::BTreeMap;

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
    /// Counts an answer in, but for its prompt.
    pub fn add(&mut self, end: &TurnEnd) {
        self.output_tokens += end.output_tokens;
        self.reasoning_tokens += end.reasoning_tokens;
    }
}

/// Cached tokens of the prompts of one request, each of which has so many answers. The least of a prompt's counts: its answers reuse what the first
/// of them has computed, which was not there before.
#[derive(Debug)]
pub(crate) struct CachedTokens {
    choices_per_prompt: u32,
    of_prompts: BTreeMap<u32, u32>,
}

impl CachedTokens {
    pub(crate) const fn new(choices_per_prompt: u32) -> Self {
        Self { choices_per_prompt, of_prompts: BTreeMap::new() }
    }

    /// Counts what an answer says; yields the sum over the prompts.
    pub(crate) fn count(&mut self, answer: u32, cached_tokens: u32) -> u32 {
        let of_prompt = self.of_prompts.entry(answer / self.choices_per_prompt).or_insert(cached_tokens);
        *of_prompt = cached_tokens.min(*of_prompt);
        self.of_prompts.values().sum()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_prompt_counts_once_with_what_was_there_before_the_request() {
        let mut cached = CachedTokens::new(2);
        // Answers 0 and 1 are to the first prompt, 2 and 3 to the second.
        let sums = [(1, 192), (0, 0), (3, 64), (2, 64)].map(|(answer, tokens)| cached.count(answer, tokens));
        assert_eq!(sums, [192, 0, 64, 64]);
        let mut cached = CachedTokens::new(1);
        assert_eq!([cached.count(0, 192), cached.count(1, 192)], [192, 384]);
    }
}
