//! Owns the life of a request: admission, placement, deadlines, resumption.
