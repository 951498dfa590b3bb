//! The receiver's table of tickets: what each frame, and each order of this side, does to one. Has no clock and does not wait: time comes in, and what
//! is to be told of goes out.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv::{KvSlice, PageTables};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use types::{DpGroup, KvLayout, PeerId, TicketId};

use super::data_connection::{BatchEnd, DataConnection, Destination};
use crate::config::TransferConfig;
use crate::contract::{Arrival, ArrivalEvent, CommitReply, EndCause, Part, Revoked};
use crate::data::{Batch, BatchOutcome, DataError, Paths};
use crate::error::{AbortReason, LossCause, TransferError};
use crate::frame::{Frame, FrameError};

struct Posted {
    sender: PeerId,
    /// Parts taken, duplicates counted in.
    num_parts: u32,
    state: PostedState,
    /// Where slices go: pages of an attention group.
    landing: Option<(DpGroup, Arc<PageTables>)>,
    /// Batches that were announced and are not over.
    batches: u32,
    /// How the ticket ends once no batch is left.
    ending: Option<ArrivalEvent>,
}

impl Posted {
    fn is_on(&self, connection: &Connection) -> bool {
        match &self.state {
            PostedState::Bound(bound) | PostedState::Revoking { connection: bound, .. } => bound.id == connection.id,
            PostedState::Waiting => false,
        }
    }

    /// Whether what comes for it is written.
    fn is_landing(&self) -> bool {
        matches!(self.state, PostedState::Bound(_)) && matches!(self.ending, None | Some(ArrivalEvent::Commit { .. }))
    }
}

enum PostedState {
    /// No BEGIN yet.
    Waiting,
    /// Parts come over this connection.
    Bound(Connection),
    /// We sent ABORT; over when it is acknowledged or the connection ends.
    Revoking { connection: Connection, since: Instant },
}

/// One connection: who is at its other end, and the way to its task.
#[derive(Clone)]
pub(super) struct Connection {
    pub(super) id: u64,
    pub(super) peer: Arc<Greeting>,
    pub(super) answers: Answers,
    pub(super) data: Option<Arc<DataConnection>>,
}

/// The way to a connection's task, for whoever has something to answer later. It holds nothing of the connection: a thread of the data path that
/// lets go of it last must not come to end that data path.
#[derive(Clone)]
pub(super) struct Answers {
    pub(super) frames: mpsc::Sender<Frame>,
    pub(super) stop: CancellationToken,
}

/// What HELLO said, and what came of it.
pub(super) struct Greeting {
    pub(super) sender: PeerId,
    pub(super) layout: Arc<KvLayout>,
    pub(super) paths: Paths,
}

impl Connection {
    pub(super) fn answer(&self, frame: Frame) {
        self.answers.send(frame);
    }
}

impl Answers {
    /// Queues an answer without waiting; a peer that does not read its answers loses the connection.
    fn send(&self, frame: Frame) {
        if self.frames.try_send(frame).is_err() {
            self.stop.cancel();
        }
    }
}

/// The tickets of one decode worker.
pub(super) struct TicketTable {
    layout: KvLayout,
    config: TransferConfig,
    tickets: Mutex<HashMap<TicketId, Posted>>,
}

impl TicketTable {
    pub(super) fn new(layout: KvLayout, config: TransferConfig) -> Self {
        assert!(layout.tp > 0 && layout.kv_heads.is_multiple_of(layout.tp), "the engine was built with this layout");
        Self { layout, config, tickets: Mutex::default() }
    }

    pub(super) fn on_batch_end(&self, end: BatchEnd, connection: &Connection) -> Option<Arrival> {
        let mut tickets = self.tickets();
        let posted = tickets.get_mut(&end.ticket).filter(|posted| posted.is_on(connection))?;
        posted.batches -= 1;
        if !posted.is_landing() || !end.was_wanted {
            return None;
        }
        let (cause, reason) = match end.outcome {
            BatchOutcome::Whole => {
                let event = ArrivalEvent::Landed { slices: end.slices, bytes: end.bytes };
                return Some(Arrival { ticket: end.ticket, event });
            }
            BatchOutcome::Corrupt(slice) => (EndCause::Corrupt { slice }, AbortReason::Corrupt),
            BatchOutcome::Failed(cause) | BatchOutcome::Broken(cause) => {
                (EndCause::DataPath(cause), AbortReason::EngineFailed)
            }
        };
        let commit = posted.ending.replace(ArrivalEvent::Ended(cause));
        connection.answer(Frame::Abort(end.ticket, reason));
        drop(tickets);
        drop(commit); // whose verdict, should it be one, comes behind the ABORT
        None
    }

    pub(super) fn end_if_settled(&self, ticket: TicketId, connection: &Connection) -> Option<ArrivalEvent> {
        let mut tickets = self.tickets();
        let posted = tickets.get_mut(&ticket)?;
        if !posted.is_on(connection) || posted.batches > 0 || posted.ending.is_none() {
            return None;
        }
        let posted = tickets.remove(&ticket)?;
        drop(tickets);
        match (posted.ending?, posted.state) {
            // This side has given up since.
            (_, PostedState::Revoking { .. }) => Some(ArrivalEvent::Ended(EndCause::Revoked)),
            (ending, _) => Some(ending),
        }
    }

    /// Hands waiting batches on, as far as it is known where they go.
    fn pump(&self, tickets: &HashMap<TicketId, Posted>, connection: &Connection) {
        let Some(data) = &connection.data else { return };
        let answers = connection.answers.clone();
        let landed = move |batch| answers.send(Frame::Landed(batch));
        data.pump(&landed, |batch| match tickets.get(&batch.ticket) {
            Some(posted) if posted.is_on(connection) && posted.is_landing() => match &posted.landing {
                None => Destination::Unknown,
                Some((group, tables)) if batch.receiver_rank / self.layout.tp == group.0 => {
                    Destination::Pages(Arc::clone(tables))
                }
                Some((group, _)) => {
                    let rank = batch.receiver_rank;
                    let cause = format!("a batch for rank {rank}, the ticket's pages are in attention group {group}");
                    Destination::Refused(DataError(cause))
                }
            },
            _ => Destination::Nowhere,
        });
    }

    fn on_batch(&self, batch: Batch, connection: &Connection) -> Result<Option<Arrival>, FrameError> {
        let Some(data) = &connection.data else { return Err(FrameError::Unexpected("BATCH")) };
        let first = batch.slices.first().ok_or(FrameError::Field("slices"))?;
        let receivers = connection.peer.paths.receivers();
        if batch.sender_rank >= connection.peer.layout.tp || batch.receiver_rank >= receivers {
            return Err(FrameError::Field("rank"));
        }
        let slice_bytes = (first.slice.head_count as usize).saturating_mul(self.layout.head_bytes());
        let bytes = slice_bytes.checked_mul(batch.slices.len()).ok_or(FrameError::Field("head_count"))?;
        // HELLO said how large a batch may be. One that could not be taken would leave two-sided paths out of step.
        if bytes > self.config.batch_bytes_max as usize {
            return Err(FrameError::Field("batch of more than batch_bytes_max bytes"));
        }
        let per_rank = self.layout.kv_heads / self.layout.tp;
        let is_sound = |slice: &KvSlice| {
            self.fits_layout(slice, slice_bytes) && slice.head_start / per_rank == batch.receiver_rank % self.layout.tp
        };
        let malformed = batch.slices.iter().map(|staged| staged.slice).find(|slice| !is_sound(slice));
        let (ticket, num_parts) = (batch.ticket, batch.slices.len() as u32);
        let arrival = malformed.and_then(|slice| {
            let refusal = Some(Frame::Abort(ticket, AbortReason::WrongParts));
            let cause = EndCause::Malformed { slice, bytes: slice_bytes };
            self.end(ticket, connection, refusal, || ArrivalEvent::Ended(cause))
        });
        let mut tickets = self.tickets();
        if let Some(posted) = tickets.get_mut(&ticket).filter(|posted| posted.is_on(connection)) {
            // A batch that fails ends the ticket by that, so it may be counted when it is announced.
            posted.num_parts += num_parts;
            posted.batches += 1;
        }
        data.push(batch, bytes);
        self.pump(&tickets, connection);
        Ok(arrival)
    }

    /// Drops parts of tickets that are over here. The sender is told once, not for each of the thousands that may be on their way.
    pub(super) fn is_late_part(
        &self,
        frame: &Frame,
        connection: &Connection,
        last_gone: &mut Option<TicketId>,
    ) -> bool {
        let Frame::Part(ticket, _) = frame else {
            return false;
        };
        let is_open = match self.tickets().get(ticket).map(|posted| &posted.state) {
            Some(PostedState::Bound(bound)) => bound.id == connection.id,
            // On its way when we sent ABORT, whose acknowledgement will follow.
            Some(PostedState::Revoking { connection: bound, .. }) if bound.id == connection.id => return true,
            _ => false,
        };
        if !is_open && last_gone.replace(*ticket) != Some(*ticket) {
            connection.answer(Frame::Gone(*ticket));
        }
        !is_open
    }

    /// Applies a frame to the table of tickets. Synchronous: what it returns is delivered by the caller.
    pub(super) fn on_frame(&self, frame: Frame, connection: &Connection) -> Result<Option<Arrival>, FrameError> {
        match frame {
            Frame::Ping => Ok(None),
            // A late answer to our ABORT of a ticket that ended by itself meanwhile.
            Frame::Gone(_) => Ok(None),
            Frame::Begin(ticket) => Ok(self.on_begin(ticket, connection)),
            Frame::Part(ticket, part) => Ok(self.on_part(ticket, part, connection)),
            Frame::Batch(batch) => self.on_batch(batch, connection),
            Frame::Commit { ticket, num_parts, first } => {
                let received = self.tickets().get(&ticket).map_or(num_parts, |posted| posted.num_parts);
                if received != num_parts {
                    let refusal = Some(Frame::Abort(ticket, AbortReason::WrongParts));
                    let cause = EndCause::PartsMissing { sent: num_parts, received };
                    return Ok(self.end(ticket, connection, refusal, || ArrivalEvent::Ended(cause)));
                }
                let event = || {
                    let answers = connection.answers.clone();
                    let reply = CommitReply::new(move |verdict| {
                        answers.send(match verdict {
                            Ok(()) => Frame::Committed(ticket),
                            Err(reason) => Frame::Abort(ticket, reason),
                        });
                    });
                    ArrivalEvent::Commit { first, reply }
                };
                Ok(self.end(ticket, connection, Some(Frame::Gone(ticket)), event))
            }
            Frame::Abort(ticket, reason) => {
                connection.answer(Frame::Aborted(ticket));
                let cause = EndCause::Aborted(reason);
                let arrival = self.end(ticket, connection, None, || ArrivalEvent::Ended(cause));
                self.pump(&self.tickets(), connection);
                Ok(arrival)
            }
            Frame::Aborted(ticket) => {
                let is_revoking = match self.tickets().get(&ticket).map(|posted| &posted.state) {
                    Some(PostedState::Revoking { connection: bound, .. }) => bound.id == connection.id,
                    _ => false,
                };
                let arrival =
                    is_revoking.then(|| self.end(ticket, connection, None, || ArrivalEvent::Ended(EndCause::Revoked)));
                Ok(arrival.flatten())
            }
            other => Err(FrameError::Unexpected(other.name())),
        }
    }

    fn tickets(&self) -> MutexGuard<'_, HashMap<TicketId, Posted>> {
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn on_begin(&self, ticket: TicketId, connection: &Connection) -> Option<Arrival> {
        let Greeting { sender, layout, .. } = &*connection.peer;
        let mut tickets = self.tickets();
        let posted = tickets.get_mut(&ticket);
        let open = posted.filter(|posted| posted.sender == *sender && matches!(posted.state, PostedState::Waiting));
        let Some(posted) = open else {
            connection.answer(Frame::Gone(ticket));
            return None;
        };
        posted.state = PostedState::Bound(connection.clone());
        connection.answer(Frame::Accepted(ticket));
        let event = ArrivalEvent::Begin { sender: sender.clone(), layout: Arc::clone(layout) };
        Some(Arrival { ticket, event })
    }

    fn on_part(&self, ticket: TicketId, part: Part, connection: &Connection) -> Option<Arrival> {
        let (slice, bytes) = (part.slice, part.bytes.len());
        if !self.fits_layout(&slice, bytes) {
            let refusal = Some(Frame::Abort(ticket, AbortReason::WrongParts));
            return self.end(ticket, connection, refusal, || ArrivalEvent::Ended(EndCause::Malformed { slice, bytes }));
        }
        if !part.is_intact() {
            let refusal = Some(Frame::Abort(ticket, AbortReason::Corrupt));
            return self.end(ticket, connection, refusal, || ArrivalEvent::Ended(EndCause::Corrupt { slice }));
        }
        let mut tickets = self.tickets();
        let Some(posted) = tickets.get_mut(&ticket).filter(|posted| matches!(posted.state, PostedState::Bound(_)))
        else {
            return None; // Revoked since the frame was read.
        };
        posted.num_parts += 1;
        Some(Arrival { ticket, event: ArrivalEvent::Part { slice, bytes: part.bytes } })
    }

    /// Ends a ticket that is open on this connection. `answer` goes to the sender: in place of the event if the ticket is not open, with it
    /// if the answer is an ABORT.
    fn end(
        &self,
        ticket: TicketId,
        connection: &Connection,
        answer: Option<Frame>,
        event: impl FnOnce() -> ArrivalEvent,
    ) -> Option<Arrival> {
        let mut tickets = self.tickets();
        let ended = match tickets.entry(ticket) {
            Entry::Occupied(posted) if posted.get().is_on(connection) => {
                if posted.get().batches > 0 {
                    return self.end_later(posted.into_mut(), connection, answer, event);
                }
                Some(posted.remove())
            }
            _ => None,
        };
        drop(tickets);
        let is_abort = matches!(answer, Some(Frame::Abort(..)));
        match ended {
            Some(Posted { state: PostedState::Revoking { .. }, .. }) => {
                // Whatever the sender still had to say, this side has given up, and nothing follows.
                Some(Arrival { ticket, event: ArrivalEvent::Ended(EndCause::Revoked) })
            }
            Some(_) => {
                if is_abort {
                    answer.into_iter().for_each(|frame| connection.answer(frame));
                }
                Some(Arrival { ticket, event: event() })
            }
            None => {
                answer.into_iter().for_each(|frame| connection.answer(frame));
                None
            }
        }
    }

    /// Ends a ticket once its last batch is over: until then its pages may be written.
    fn end_later(
        &self,
        posted: &mut Posted,
        connection: &Connection,
        answer: Option<Frame>,
        event: impl FnOnce() -> ArrivalEvent,
    ) -> Option<Arrival> {
        if let Some(abort @ Frame::Abort(..)) = answer.filter(|_| matches!(posted.state, PostedState::Bound(_))) {
            connection.answer(abort);
        }
        // What ended it first counts, but a COMMIT that has not been told of gives way.
        if posted.ending.is_none() || posted.is_landing() {
            posted.ending = Some(event());
        }
        None
    }

    fn fits_layout(&self, slice: &KvSlice, bytes: usize) -> bool {
        let layout = &self.layout;
        let end = slice.head_start.checked_add(slice.head_count);
        layout.layers(slice.group).contains(&slice.layer)
            && slice.head_count > 0
            && end.is_some_and(|end| {
                end <= layout.kv_heads && layout.tp_rank_of(slice.head_start) == layout.tp_rank_of(end - 1)
            })
            && bytes == slice.head_count as usize * layout.head_bytes()
    }

    /// Whether a sender has not acknowledged an ABORT in time, by `now`.
    pub(super) fn has_overdue_abort(&self, connection_id: u64, now: Instant) -> bool {
        let limit = self.config.ack_timeout();
        self.tickets().values().any(|posted| match &posted.state {
            PostedState::Revoking { connection, since } => connection.id == connection_id && now - *since > limit,
            _ => false,
        })
    }

    /// Takes out the tickets of a connection that was lost, with how each one ended.
    pub(super) fn take_tickets_of(&self, connection_id: u64, cause: &LossCause) -> Vec<(TicketId, EndCause)> {
        let is_its = |posted: &Posted| match &posted.state {
            PostedState::Bound(connection) | PostedState::Revoking { connection, .. } => connection.id == connection_id,
            PostedState::Waiting => false,
        };
        let ended: Vec<_> = self.tickets().extract_if(|_, posted| is_its(posted)).collect();
        let cause = |posted: &Posted| match posted.state {
            PostedState::Revoking { .. } => EndCause::Revoked,
            _ => EndCause::Lost(cause.clone()),
        };
        ended.into_iter().map(|(ticket, posted)| (ticket, cause(&posted))).collect()
    }

    /// As [`ReceiveTransport::post`](crate::ReceiveTransport::post).
    pub(super) fn post(&self, ticket: TicketId, sender: &PeerId) -> Result<(), TransferError> {
        let mut tickets = self.tickets();
        let limit = self.config.tickets_max;
        if tickets.contains_key(&ticket) {
            return Err(TransferError::Duplicate { ticket });
        }
        if tickets.len() >= limit {
            return Err(TransferError::TooManyTickets { limit });
        }
        tickets.insert(
            ticket,
            Posted {
                sender: sender.clone(),
                num_parts: 0,
                state: PostedState::Waiting,
                landing: None,
                batches: 0,
                ending: None,
            },
        );
        Ok(())
    }

    /// As [`ReceiveTransport::land`](crate::ReceiveTransport::land).
    pub(super) fn land(&self, ticket: TicketId, group: DpGroup, tables: &PageTables) {
        let mut open = self.tickets();
        let Some(posted) = open.get_mut(&ticket) else { return };
        posted.landing = Some((group, Arc::new(tables.clone())));
        if let PostedState::Bound(connection) = &posted.state {
            let connection = connection.clone();
            self.pump(&open, &connection);
        }
    }

    /// As [`ReceiveTransport::revoke`](crate::ReceiveTransport::revoke).
    pub(super) fn revoke(&self, ticket: TicketId, reason: AbortReason, now: Instant) -> Revoked {
        let mut tickets = self.tickets();
        let Entry::Occupied(posted) = tickets.entry(ticket) else {
            return Revoked::NotOpen;
        };
        match &posted.get().state {
            PostedState::Waiting => {
                posted.remove();
                Revoked::Now
            }
            PostedState::Bound(connection) => {
                let connection = connection.clone();
                connection.answer(Frame::Abort(ticket, reason));
                let posted = posted.into_mut();
                posted.state = PostedState::Revoking { connection: connection.clone(), since: now };
                // A COMMIT that was not told of: what it answers comes behind the ABORT.
                posted.ending = None;
                self.pump(&tickets, &connection);
                Revoked::Pending
            }
            PostedState::Revoking { .. } => Revoked::Pending,
        }
    }

    /// As [`ReceiveTransport::num_open`](crate::ReceiveTransport::num_open).
    pub(super) fn num_open(&self) -> usize {
        self.tickets().len()
    }
}
