//! What a flight is told and what it wants done.

use types::{
    DecodeEvent, ErrorClass, FinishReason, GenerateEvent, GenerateRequest, PeerId, PrefillEvent, Role, Ticket, TicketId,
};

use crate::error::{AttemptFailure, RequestError};

/// The two workers of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    /// Computes the prompt.
    pub prefill: PeerId,
    /// Generates.
    pub decode: PeerId,
}

impl Pair {
    pub(super) fn peer(&self, role: Role) -> &PeerId {
        match role {
            Role::Prefill => &self.prefill,
            Role::Decode => &self.decode,
        }
    }
}

/// What a flight is told. Events of an attempt carry its number: those of earlier attempts are ignored.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The pair that was asked for; `ticket` is a fresh random name.
    Placed {
        /// Where to go.
        pair: Pair,
        /// Name of the reservation to come.
        ticket: TicketId,
    },
    /// A message of the decode leg.
    Decode {
        /// Whose.
        attempt: u32,
        /// The message.
        event: DecodeEvent,
    },
    /// A message of the prefill leg.
    Prefill {
        /// Whose.
        attempt: u32,
        /// The message.
        event: PrefillEvent,
    },
    /// A leg's stream ended without an error.
    LegClosed {
        /// Whose.
        attempt: u32,
        /// Which leg.
        role: Role,
    },
    /// A leg's stream ended with an error.
    LegFailed {
        /// Whose.
        attempt: u32,
        /// Which leg.
        role: Role,
        /// How.
        failure: LegFailure,
    },
    /// The fleet has given a worker of the pair up.
    WorkerGone {
        /// Whose.
        attempt: u32,
        /// Which worker.
        role: Role,
    },
    /// The client hung up.
    ClientGone,
    /// The client takes events again after it had been too slow to: the stage's time begins anew.
    ClientCaughtUp,
    /// [`Flight::deadline`](super::Flight::deadline) has come.
    Tick {
        /// Whether some pair could take this request if it had room.
        has_pair: bool,
    },
}

/// How a leg ended if not well.
#[derive(Debug, Clone, PartialEq)]
pub struct LegFailure {
    /// What the flight does about it.
    pub class: ErrorClass,
    /// Whether what failed lies between the two workers: the way of KV. Either may be at fault.
    pub between: bool,
    /// In the worker's words, or the transport's.
    pub reason: String,
}

/// What a flight wants done, in order.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Find a pair, if possible without these workers.
    Place {
        /// Workers that failed this request before.
        avoid: Vec<PeerId>,
        /// Whether the last one to be asked had no room.
        was_refused: bool,
    },
    /// Open the decode leg.
    Reserve {
        /// Number of the attempt.
        attempt: u32,
        /// Name of the reservation.
        ticket: TicketId,
        /// Who will send the KV cache.
        prefill: PeerId,
        /// The request with all tokens forwarded so far.
        sequence: GenerateRequest,
    },
    /// Open the prefill leg.
    Prefill {
        /// Number of the attempt.
        attempt: u32,
        /// Decode's promise.
        ticket: Ticket,
        /// The same as decode was given.
        sequence: GenerateRequest,
    },
    /// Close a leg, if open, and give the worker's permit back.
    Release(Role),
    /// The worker has no room until it says otherwise.
    Full(PeerId),
    /// The way of KV between the two workers is to be opened anew before it is used again.
    Unlink,
    /// Another attempt begins, because of this.
    Resume(AttemptFailure),
    /// Send to the client.
    Emit(GenerateEvent),
    /// The flight is over. Always the last action, and given once.
    End(Outcome),
}

/// How a flight ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The answer is complete; `Finished` was emitted.
    Finished(FinishReason),
    /// The client hung up.
    Cancelled,
    /// The client is to be told.
    Failed(RequestError),
}

pub(super) const fn decode_event_name(event: &DecodeEvent) -> &'static str {
    match event {
        DecodeEvent::Reserved(_) => "Reserved",
        DecodeEvent::Joined { .. } => "Joined",
        DecodeEvent::Tokens(_) => "Tokens",
        DecodeEvent::Finished(_) => "Finished",
        DecodeEvent::Preempted => "Preempted",
    }
}

pub(super) const fn prefill_event_name(event: &PrefillEvent) -> &'static str {
    match event {
        PrefillEvent::FirstToken { .. } => "FirstToken",
        PrefillEvent::Committed { .. } => "Committed",
        PrefillEvent::Finished(_) => "Finished",
    }
}
