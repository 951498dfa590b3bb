//! The damask command.
fn main() {}
