//! What streams back while a request is carried out.

use crate::ids::RequestId;
use crate::token::{FinishReason, SampledToken};
use crate::worker::Ticket;

/// Tokens with consecutive output indices.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenRun {
    /// Output index of the first one.
    pub first_index: u32,
    /// At least one.
    pub tokens: Vec<SampledToken>,
}

/// The end of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finished {
    /// Why it ended.
    pub reason: FinishReason,
    /// What it took.
    pub usage: Usage,
}

/// Token counts of one request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens whose KV was reused.
    pub cached_tokens: u32,
    /// Tokens of the answer, those that the request resumed from counted in.
    pub output_tokens: u32,
    /// Attempts beyond the first one.
    pub resumptions: u32,
}

/// What the router sends to its client: one `Started`, then runs of tokens without gaps, then one `Finished`.
#[derive(Debug, Clone, PartialEq)]
pub enum GenerateEvent {
    /// The request was accepted.
    Started {
        /// Its id, drawn if the client gave none.
        request_id: RequestId,
        /// The seed of its randomness, drawn if the client gave none.
        seed: u64,
    },
    /// The next tokens.
    Tokens(TokenRun),
    /// The end.
    Finished(Finished),
}

/// What a decode worker sends to the router: `Reserved` first, `Joined` after the commit, then tokens, then an end.
#[derive(Debug, Clone, PartialEq)]
pub enum DecodeEvent {
    /// Pages and a slot are kept for the sequence as long as the stream is open.
    Reserved(Ticket),
    /// The KV cache is complete; the sequence has joined the batch.
    Joined {
        /// Bytes of KV received.
        kv_bytes: u64,
        /// Microseconds from the first of them to the last.
        landing_us: u64,
    },
    /// The next tokens, beginning behind the one that prefill sampled.
    Tokens(TokenRun),
    /// The end.
    Finished(Finished),
    /// Pages ran out and this sequence gave way; it is to be resumed from the tokens delivered so far.
    Preempted,
}

/// What a prefill worker sends to the router: `FirstToken`, then `Committed` or `Finished`.
#[derive(Debug, Clone, PartialEq)]
pub enum PrefillEvent {
    /// The prompt is computed and one token sampled.
    FirstToken {
        /// Its output index.
        index: u32,
        /// The token.
        token: SampledToken,
        /// Prompt tokens whose KV was reused.
        cached_tokens: u32,
        /// Microseconds in the worker's queue.
        queue_us: u64,
        /// Microseconds of computing.
        compute_us: u64,
    },
    /// Decode has acknowledged the KV cache and the commit.
    Committed {
        /// Bytes of KV sent.
        kv_bytes: u64,
        /// Microseconds from the first byte sent to the acknowledgement.
        transfer_us: u64,
        /// Microseconds from the end of the last layer to the acknowledgement.
        tail_us: u64,
    },
    /// The first token ended the request; nothing was sent to decode.
    Finished(Finished),
}
