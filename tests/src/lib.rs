//! End-to-end runners.
