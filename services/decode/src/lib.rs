//! Continuous batching: lands KV pages, runs steps, streams numbered tokens.
