//! Computes prompts one at a time, samples the first token, sends the KV cache.
