//! The life of a ticket on the decode worker: which pages it holds in each phase, and which messages it takes.
//!
//! ```text
//! Reserved ──begin_landing──► Landing ──commit──► Committed ──run──► Running ──► Finished
//!     └───────────┴──────────────────┴───────────────┴─────────────────┴──────► Aborted(reason), Preempted
//! ```
//! A phase owns its pages, so that a sequence cannot run on pages that have not landed. Messages of the sender are taken from the prefill
//! worker that the ticket names, in the life that it names, and from nobody else; whatever else comes is answered [`Gone`]. The decode
//! worker's own life needs no check: a ticket id is random and used once, so another life's tickets are unknown here.

use std::time::Instant;

use kv::{Incomplete, KvSlice, LandError, LandingPages, PageTables, SequencePages, SequenceReserve, SliceError};
use types::{Classify, ErrorClass, FinishReason, KvLayout, PeerId, TicketId};

/// Why a ticket ended without a finished sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AbortReason {
    /// Its owner gave it up: the client left, or the router lost interest.
    Cancelled,
    /// Nothing was committed before its deadline.
    Expired,
    /// The other worker is gone.
    PeerLost,
    /// The transfer failed, or sent what it should not.
    TransferFailed,
    /// The grammar of its constraint could not be followed: there was no mask to sample under.
    ConstraintFailed,
    /// Its logits are no numbers: what it was computed from is damaged. Computed anew, from other pages, they may be.
    NotANumber,
}

/// How a ticket ended on the decode worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The sequence is complete.
    Finished(FinishReason),
    /// Pages ran out and this sequence gave way to older ones: it is to be resumed from the tokens delivered.
    Preempted,
    /// Nothing more will come.
    Aborted(AbortReason),
}

/// Where a ticket is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Pages and slot are set aside; no writer has begun.
    Reserved,
    /// The prefill worker writes to the pages.
    Landing,
    /// Everything has landed and the first token is known; the next plan binds it.
    Committed,
    /// In the batch.
    Running,
    /// Over.
    Ended(Outcome),
}

/// The message comes too late, or from a stranger: the ticket is unknown, has ended, is past taking it, or names another sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("ticket {ticket} is gone (phase {phase:?})")]
pub struct Gone {
    /// The ticket named.
    pub ticket: TicketId,
    /// Its phase, if it is known here and the sender is the one that it names.
    pub phase: Option<Phase>,
}

/// Why a ticket did not take a message of its sender.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TicketError {
    /// Too late, or from a stranger.
    #[error(transparent)]
    Gone(#[from] Gone),
    /// A slice or a commit came before the sender began.
    #[error("ticket {ticket}: the sender has not begun")]
    NotBegun {
        /// The ticket.
        ticket: TicketId,
    },
    /// The sender's layout does not fit.
    #[error(transparent)]
    Land(#[from] LandError),
    /// The slice is not expected.
    #[error(transparent)]
    Slice(#[from] SliceError),
    /// A commit came before everything had arrived. The ticket stays in its phase.
    #[error(transparent)]
    Incomplete(#[from] Incomplete),
}

impl Classify for TicketError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Gone(_) => ErrorClass::Cancelled,
            Self::NotBegun { .. } => ErrorClass::Caller,
            Self::Land(error) => error.class(),
            Self::Slice(error) => error.class(),
            Self::Incomplete(error) => error.class(),
        }
    }
}

impl Classify for Gone {
    fn class(&self) -> ErrorClass {
        ErrorClass::Cancelled
    }
}

/// Whether a message changed something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// The first of its kind.
    First,
    /// A repetition; nothing changed.
    Again,
}

#[derive(Debug)]
enum State {
    Reserved(SequenceReserve),
    /// `writer_gone`: the transport has already fenced the writer.
    Landing {
        pages: Box<LandingPages>,
        writer_gone: bool,
    },
    Committed(SequencePages),
    Running(SequencePages),
    Ended(Outcome),
}

impl State {
    /// What a ticket is while a transition has its pages in hand: should one panic, it has ended.
    const MOVING: Self = Self::Ended(Outcome::Aborted(AbortReason::TransferFailed));
}

/// What a ticket held when it ended.
#[derive(Debug)]
pub(crate) struct Released {
    /// Where the end took effect.
    pub(crate) phase: Phase,
    /// Pages that a step in flight may still touch.
    pub(crate) pages: Option<SequencePages>,
    /// The landing pages are in quarantine, and the writer has yet to be fenced.
    pub(crate) fence: Fence,
}

/// What quarantined pages wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fence {
    /// There was no writer.
    NotNeeded,
    /// The transport must be asked.
    Wanted,
    /// The transport has said so already.
    Done,
}

/// One reservation and the pages that it holds.
#[derive(Debug)]
pub(crate) struct Ticket {
    id: TicketId,
    prefill: PeerId,
    deadline: Instant,
    state: State,
}

impl Ticket {
    pub(crate) fn new(id: TicketId, prefill: PeerId, deadline: Instant, reserve: SequenceReserve) -> Self {
        Self { id, prefill, deadline, state: State::Reserved(reserve) }
    }

    pub(crate) const fn id(&self) -> TicketId {
        self.id
    }

    pub(crate) fn phase(&self) -> Phase {
        match &self.state {
            State::Reserved(_) => Phase::Reserved,
            State::Landing { .. } => Phase::Landing,
            State::Committed(_) => Phase::Committed,
            State::Running(_) => Phase::Running,
            State::Ended(outcome) => Phase::Ended(*outcome),
        }
    }

    pub(crate) fn prefill(&self) -> &PeerId {
        &self.prefill
    }

    /// Whether the ticket still waits for its sender, `prefill`.
    pub(crate) fn waits_for(&self, prefill: &PeerId) -> bool {
        self.is_waiting() && self.prefill == *prefill
    }

    /// Until when the sender must have committed; `None` once it has.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.is_waiting().then_some(self.deadline)
    }

    pub(crate) fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }

    fn is_waiting(&self) -> bool {
        matches!(self.state, State::Reserved(_) | State::Landing { .. })
    }

    fn gone(&self) -> Gone {
        Gone { ticket: self.id, phase: Some(self.phase()) }
    }

    fn check_sender(&self, from: &PeerId) -> Result<(), Gone> {
        if self.prefill == *from { Ok(()) } else { Err(Gone { ticket: self.id, phase: None }) }
    }

    /// The sender is about to write: opens the pages of the context to it and says where its slices go. Idempotent.
    pub(crate) fn begin_landing(
        &mut self,
        from: &PeerId,
        sender: &KvLayout,
        receiver: &KvLayout,
        context_tokens: u32,
    ) -> Result<PageTables, TicketError> {
        self.check_sender(from)?;
        match std::mem::replace(&mut self.state, State::MOVING) {
            State::Reserved(reserve) => match reserve.land(self.id, sender, receiver, context_tokens) {
                Ok(pages) => {
                    let tables = pages.tables();
                    self.state = State::Landing { pages: Box::new(pages), writer_gone: false };
                    Ok(tables)
                }
                Err(refused) => {
                    let (reserve, error) = *refused;
                    self.state = State::Reserved(reserve);
                    Err(error.into())
                }
            },
            State::Landing { pages, writer_gone: false } => {
                let tables = pages.tables();
                self.state = State::Landing { pages, writer_gone: false };
                Ok(tables)
            }
            other => {
                self.state = other;
                Err(self.gone().into())
            }
        }
    }

    /// A slice's bytes are in their page; returns how many slices are missing.
    pub(crate) fn arrive(&mut self, from: &PeerId, slice: &KvSlice) -> Result<u32, TicketError> {
        self.check_sender(from)?;
        match &mut self.state {
            State::Landing { pages, writer_gone: false } => Ok(pages.arrive(slice)?),
            State::Reserved(_) => Err(TicketError::NotBegun { ticket: self.id }),
            _ => Err(self.gone().into()),
        }
    }

    /// The sender says that it has sent everything.
    pub(crate) fn commit(&mut self, from: &PeerId) -> Result<Taken, TicketError> {
        self.check_sender(from)?;
        match std::mem::replace(&mut self.state, State::MOVING) {
            State::Landing { pages, writer_gone } => match pages.commit() {
                Ok(pages) => {
                    self.state = State::Committed(pages);
                    Ok(Taken::First)
                }
                Err(refused) => {
                    let (pages, incomplete) = *refused;
                    self.state = State::Landing { pages: Box::new(pages), writer_gone };
                    Err(incomplete.into())
                }
            },
            State::Reserved(reserve) => {
                self.state = State::Reserved(reserve);
                Err(TicketError::NotBegun { ticket: self.id })
            }
            other @ (State::Committed(_) | State::Running(_)) => {
                self.state = other;
                Ok(Taken::Again)
            }
            ended @ State::Ended(_) => {
                self.state = ended;
                Err(self.gone().into())
            }
        }
    }

    /// The pages of a sequence that may be computed; `None` before it is committed and after it has ended.
    pub(crate) fn pages_mut(&mut self) -> Option<&mut SequencePages> {
        match &mut self.state {
            State::Committed(pages) | State::Running(pages) => Some(pages),
            _ => None,
        }
    }

    /// A plan has taken the sequence in. Tells whether it is the first.
    pub(crate) fn run(&mut self) -> Taken {
        match std::mem::replace(&mut self.state, State::MOVING) {
            State::Committed(pages) => {
                self.state = State::Running(pages);
                Taken::First
            }
            other => {
                self.state = other;
                Taken::Again
            }
        }
    }

    /// The transport has fenced the writer. Tells whether the ticket can still become complete.
    pub(crate) fn writer_fenced(&mut self) -> bool {
        match &mut self.state {
            State::Landing { pages, writer_gone } => {
                *writer_gone = true;
                pages.landing().missing() == 0
            }
            _ => true,
        }
    }

    /// Ends the ticket and lets go of what it holds; landing pages go into quarantine.
    pub(crate) fn end(&mut self, outcome: Outcome) -> Released {
        let phase = self.phase();
        let (pages, fence) = match std::mem::replace(&mut self.state, State::Ended(outcome)) {
            State::Reserved(_) => (None, Fence::NotNeeded),
            State::Landing { writer_gone: false, .. } => (None, Fence::Wanted),
            State::Landing { writer_gone: true, .. } => (None, Fence::Done),
            State::Committed(pages) | State::Running(pages) => (Some(pages), Fence::NotNeeded),
            State::Ended(earlier) => {
                self.state = State::Ended(earlier);
                (None, Fence::NotNeeded)
            }
        };
        Released { phase, pages, fence }
    }
}
