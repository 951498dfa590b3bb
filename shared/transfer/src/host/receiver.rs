//! The receiving side: one task a connection, one table of posted tickets for all of them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv::KvSlice;
use tokio::io::{ReadHalf, WriteHalf};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use types::{KvLayout, PeerId, TicketId};

use super::frame_io::{FrameReader, FrameWriter};
use super::{Stream, max_part_bytes};
use crate::config::TransferConfig;
use crate::contract::{
    Arrival, ArrivalEvent, ArrivalSink, CommitReply, EndCause, Part, ReceiveTransport, Revoked, SinkClosed,
};
use crate::error::{AbortReason, LossCause, TransferError};
use crate::frame::{Frame, FrameError};

/// Frames that wait for a connection: answers only, so few. A peer that reads none of them is closed.
const ANSWERS_MAX: usize = 4096;

/// Takes `host` lanes on one decode worker. The service accepts streams and runs [`HostReceiver::serve`] on each.
pub struct HostReceiver {
    local: PeerId,
    layout: KvLayout,
    config: TransferConfig,
    sink: Arc<dyn ArrivalSink>,
    tickets: Mutex<HashMap<TicketId, Posted>>,
    next_connection: AtomicU64,
}

struct Posted {
    sender: PeerId,
    /// Parts taken, duplicates counted in.
    num_parts: u32,
    state: PostedState,
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
struct Connection {
    id: u64,
    peer: Arc<Greeting>,
    answers: mpsc::Sender<Frame>,
    stop: CancellationToken,
}

/// What HELLO said.
struct Greeting {
    sender: PeerId,
    layout: Arc<KvLayout>,
}

impl Connection {
    /// Queues an answer without waiting; a peer that does not read its answers loses the connection.
    fn answer(&self, frame: Frame) {
        if self.answers.try_send(frame).is_err() {
            self.stop.cancel();
        }
    }
}

impl HostReceiver {
    /// Nothing runs until [`HostReceiver::serve`] is called.
    #[must_use]
    pub fn new(local: PeerId, layout: KvLayout, config: TransferConfig, sink: Arc<dyn ArrivalSink>) -> Self {
        assert!(layout.tp > 0 && layout.kv_heads.is_multiple_of(layout.tp), "the engine was built with this layout");
        let tickets = Mutex::new(HashMap::new());
        Self { local, layout, config, sink, tickets, next_connection: AtomicU64::new(0) }
    }

    /// Serves one lane until it ends or `stop` is cancelled, and tells every ticket on it so. Dropping the future instead leaves
    /// tickets open for ever.
    pub async fn serve(&self, stream: Box<dyn Stream>, stop: CancellationToken) {
        let (read, write) = tokio::io::split(stream);
        let max_payload = max_part_bytes(&self.layout);
        let mut reader = FrameReader::new(read, max_payload, self.config.peer_silence_timeout());
        let mut writer = FrameWriter::new(write, self.config.stall_timeout());
        let greeting = timeout(self.config.connect_timeout(), self.greet(&mut reader, &mut writer));
        let peer = match greeting.await {
            Ok(Ok(Some(peer))) => Arc::new(peer),
            Ok(Ok(None)) => return,
            Ok(Err(cause)) => return tracing::debug!(%cause, "kv connection without a greeting"),
            Err(_) => return tracing::debug!("kv connection without a greeting in time"),
        };
        let (answers, outgoing) = mpsc::channel(ANSWERS_MAX);
        let id = self.next_connection.fetch_add(1, Ordering::Relaxed);
        let connection = Connection { id, peer: Arc::clone(&peer), answers, stop: stop.child_token() };
        let cause = tokio::select! {
            cause = self.read_frames(&mut reader, &connection) => cause,
            cause = self.write_answers(&mut writer, outgoing, id) => cause,
            () = connection.stop.cancelled() => LossCause::Closed,
        };
        tracing::debug!(peer = %peer.sender, %cause, "kv connection closed");
        self.end_tickets_of(id, &cause).await;
    }

    /// The sender, or `None` if it was refused.
    async fn greet(
        &self,
        reader: &mut FrameReader<ReadHalf<Box<dyn Stream>>>,
        writer: &mut FrameWriter<WriteHalf<Box<dyn Stream>>>,
    ) -> Result<Option<Greeting>, LossCause> {
        let greeting = reader.next().await;
        let (peer, accepted) = match greeting {
            Ok(Frame::Hello { sender, receiver, layout }) => {
                let mismatch = self.layout.check_peer(&layout).err();
                if let Some(mismatch) = &mismatch {
                    tracing::warn!(peer = %sender, %mismatch, "kv lane refused");
                }
                (Some(Greeting { sender, layout: Arc::new(layout) }), receiver == self.local && mismatch.is_none())
            }
            Ok(other) => return Err(FrameError::Unexpected(other.name()).into()),
            // Our own version goes back, so that the peer can name both.
            Err(LossCause::Protocol(FrameError::Version(theirs))) => {
                tracing::warn!(theirs, "kv lane refused: other protocol version");
                (None, false)
            }
            Err(cause) => return Err(cause),
        };
        let welcome = Frame::Welcome { receiver: self.local.clone(), layout: self.layout.clone(), accepted };
        writer.write(&welcome).await?;
        writer.flush().await?;
        Ok(peer.filter(|_| accepted))
    }

    async fn read_frames(
        &self,
        reader: &mut FrameReader<ReadHalf<Box<dyn Stream>>>,
        connection: &Connection,
    ) -> LossCause {
        let mut last_gone = None;
        loop {
            let frame = match reader.next().await {
                Ok(frame) => frame,
                Err(cause) => return cause,
            };
            if self.is_late_part(&frame, connection, &mut last_gone) {
                continue;
            }
            // Room first: a ticket leaves the table and its arrival enters the sink in one step that nothing can cut in two.
            let Ok(slot) = self.sink.slot().await else {
                return LossCause::Closed;
            };
            match self.on_frame(frame, connection) {
                Ok(Some(arrival)) => slot(arrival),
                Ok(None) => {}
                Err(error) => return error.into(),
            }
        }
    }

    /// Drops parts of tickets that are over here. The sender is told once, not for each of the thousands that may be on their way.
    fn is_late_part(&self, frame: &Frame, connection: &Connection, last_gone: &mut Option<TicketId>) -> bool {
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

    async fn write_answers(
        &self,
        writer: &mut FrameWriter<WriteHalf<Box<dyn Stream>>>,
        mut outgoing: mpsc::Receiver<Frame>,
        connection_id: u64,
    ) -> LossCause {
        loop {
            let answer = match timeout(self.config.ping_interval(), outgoing.recv()).await {
                Ok(Some(frame)) => frame,
                Ok(None) => return LossCause::Closed,
                Err(_) => Frame::Ping,
            };
            let written = async {
                writer.write(&answer).await?;
                writer.flush().await
            };
            if let Err(cause) = written.await {
                return cause;
            }
            if self.has_overdue_abort(connection_id) {
                return LossCause::AbortUnanswered(self.config.ack_timeout());
            }
        }
    }

    /// Applies a frame to the table of tickets. Synchronous: what it returns is delivered by the caller.
    fn on_frame(&self, frame: Frame, connection: &Connection) -> Result<Option<Arrival>, FrameError> {
        match frame {
            Frame::Ping => Ok(None),
            // A late answer to our ABORT of a ticket that ended by itself meanwhile.
            Frame::Gone(_) => Ok(None),
            Frame::Begin(ticket) => Ok(self.on_begin(ticket, connection)),
            Frame::Part(ticket, part) => Ok(self.on_part(ticket, part, connection)),
            Frame::Commit { ticket, num_parts, first } => {
                let received = self.tickets().get(&ticket).map_or(num_parts, |posted| posted.num_parts);
                if received != num_parts {
                    let refusal = Some(Frame::Abort(ticket, AbortReason::WrongParts));
                    let cause = EndCause::PartsMissing { sent: num_parts, received };
                    return Ok(self.end(ticket, connection, refusal, || ArrivalEvent::Ended(cause)));
                }
                let event = || {
                    let answers = connection.clone();
                    let reply = CommitReply::new(move |verdict| {
                        answers.answer(match verdict {
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
                Ok(self.end(ticket, connection, None, || ArrivalEvent::Ended(EndCause::Aborted(reason))))
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
        let Greeting { sender, layout } = &*connection.peer;
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
        let ended = match self.tickets().entry(ticket) {
            Entry::Occupied(posted) => match &posted.get().state {
                PostedState::Bound(bound) if bound.id == connection.id => Some(posted.remove()),
                PostedState::Revoking { connection: bound, .. } if bound.id == connection.id => Some(posted.remove()),
                _ => None,
            },
            Entry::Vacant(_) => None,
        };
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

    fn has_overdue_abort(&self, connection_id: u64) -> bool {
        let limit = self.config.ack_timeout();
        self.tickets().values().any(|posted| match &posted.state {
            PostedState::Revoking { connection, since } => connection.id == connection_id && since.elapsed() > limit,
            _ => false,
        })
    }

    async fn end_tickets_of(&self, connection_id: u64, cause: &LossCause) {
        let ended: Vec<(TicketId, Posted)> = self
            .tickets()
            .extract_if(|_, posted| match &posted.state {
                PostedState::Bound(connection) | PostedState::Revoking { connection, .. } => {
                    connection.id == connection_id
                }
                PostedState::Waiting => false,
            })
            .collect();
        for (ticket, posted) in ended {
            let cause = match posted.state {
                PostedState::Revoking { .. } => EndCause::Revoked,
                _ => EndCause::Lost(cause.clone()),
            };
            match self.sink.slot().await {
                Ok(slot) => slot(Arrival { ticket, event: ArrivalEvent::Ended(cause) }),
                Err(SinkClosed) => return,
            }
        }
    }
}

impl ReceiveTransport for HostReceiver {
    fn post(&self, ticket: TicketId, sender: &PeerId) -> Result<(), TransferError> {
        let mut tickets = self.tickets();
        let limit = self.config.tickets_max;
        if tickets.contains_key(&ticket) {
            return Err(TransferError::Duplicate { ticket });
        }
        if tickets.len() >= limit {
            return Err(TransferError::TooManyTickets { limit });
        }
        tickets.insert(ticket, Posted { sender: sender.clone(), num_parts: 0, state: PostedState::Waiting });
        Ok(())
    }

    fn revoke(&self, ticket: TicketId, reason: AbortReason) -> Revoked {
        let mut tickets = self.tickets();
        let Entry::Occupied(mut posted) = tickets.entry(ticket) else {
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
                posted.get_mut().state = PostedState::Revoking { connection, since: Instant::now() };
                Revoked::Pending
            }
            PostedState::Revoking { .. } => Revoked::Pending,
        }
    }

    fn num_open(&self) -> usize {
        self.tickets().len()
    }
}
