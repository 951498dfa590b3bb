//! Conversations to tokens and back: the [`chat::ChatFormat`] plug-in, and Harmony.
//!
//! Knows: what a conversation is, how a model's chat format writes it down as tokens, and how the tokens that the model
//! answers with become reasoning, text and tool calls again.
//! Must not know: HTTP, gRPC, how tokens are made (the engine knows no format, this crate knows no engine), the clock (the
//! date of a prompt is an input), or randomness (tool calls are numbered here; the gateway gives them ids).
//!
//! Start with [`chat`]: [`chat::Conversation`] goes in, [`chat::ChatFormat::render`] makes the prompt, [`chat::ChatStream`] takes
//! one generated token at a time and gives out [`chat::Delta`]s, and [`chat::Answer`] folds those into a whole answer.
//! [`harmony`] is the format of gpt-oss; `tests/chatml.rs` holds a second, small one that proves the seam.

pub mod chat;
pub mod harmony;
