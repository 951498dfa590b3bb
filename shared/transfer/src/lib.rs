//! KV transfer between processes: the Transport contract and its implementations.
