//! The sending side: one task a lane, which writes what tickets hand over and reads the receiver's answers.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::io::{ReadHalf, WriteHalf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use types::{KvLayout, PeerId, TicketId};

use super::frame_io::{FrameReader, FrameWriter};
use super::{Connector, Stream};
use crate::config::TransferConfig;
use crate::contract::{FirstToken, Part, Receipt, SendLane, SendTicket, SendTransport};
use crate::error::{AbortReason, LossCause, TransferError};
use crate::frame::{Frame, FrameError, VERSION};

/// Opens `host` lanes from one prefill worker.
pub struct HostSender {
    connector: Arc<dyn Connector>,
    local: PeerId,
    layout: KvLayout,
    config: TransferConfig,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl HostSender {
    /// Lanes run as tasks of `tasks` until they are dropped, lost, or `stop` is cancelled.
    #[must_use]
    pub fn new(
        connector: Arc<dyn Connector>,
        local: PeerId,
        layout: KvLayout,
        config: TransferConfig,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        Self { connector, local, layout, config, tasks, stop }
    }

    async fn open(&self, address: &str, peer: &PeerId) -> Result<Box<dyn SendLane>, TransferError> {
        let unreachable =
            |reason: String| TransferError::Unreachable { peer: peer.clone(), address: address.to_owned(), reason };
        let stream = self.connector.connect(address).await.map_err(|error| unreachable(error.to_string()))?;
        let (read, write) = tokio::io::split(stream);
        let mut writer = FrameWriter::new(write, self.config.stall_timeout());
        let mut reader = FrameReader::new(read, 0, self.config.peer_silence_timeout());
        let hello = Frame::Hello { sender: self.local.clone(), receiver: peer.clone(), layout: self.layout.clone() };
        let greeting = async {
            writer.write(&hello).await?;
            writer.flush().await?;
            reader.next().await
        };
        let lost = |cause| TransferError::PeerLost { peer: peer.clone(), cause };
        match greeting.await {
            Ok(welcome) => self.check_welcome(welcome, peer)?,
            Err(LossCause::Protocol(FrameError::Version(theirs))) => {
                return Err(TransferError::Version { peer: peer.clone(), ours: VERSION, theirs });
            }
            Err(cause) => return Err(lost(cause)),
        }
        let (queue, outgoing) = mpsc::unbounded_channel();
        let shared = Arc::new(LaneShared {
            peer: peer.clone(),
            config: self.config.clone(),
            queue,
            room: Arc::new(Semaphore::new(self.config.in_flight_bytes_max as usize)),
            tickets: Mutex::new(HashMap::new()),
            lost: OnceLock::new(),
            stop: self.stop.child_token(),
        });
        self.tasks.spawn(run_lane(Arc::clone(&shared), reader, writer, outgoing));
        Ok(Box::new(HostLane { shared }))
    }

    fn check_welcome(&self, welcome: Frame, peer: &PeerId) -> Result<(), TransferError> {
        let protocol = |error| TransferError::PeerLost { peer: peer.clone(), cause: LossCause::Protocol(error) };
        let Frame::Welcome { receiver, layout, accepted } = welcome else {
            return Err(protocol(FrameError::Unexpected(welcome.name())));
        };
        if receiver != *peer {
            return Err(TransferError::WrongPeer { wanted: peer.clone(), found: receiver });
        }
        let layout_error = |mismatch| TransferError::Layout { peer: peer.clone(), mismatch };
        self.layout.check_peer(&layout).map_err(layout_error)?;
        if accepted { Ok(()) } else { Err(protocol(FrameError::Unexpected("refusal"))) }
    }
}

impl SendTransport for HostSender {
    fn connect<'a>(
        &'a self,
        address: &'a str,
        peer: &'a PeerId,
    ) -> BoxFuture<'a, Result<Box<dyn SendLane>, TransferError>> {
        let limit = self.config.connect_timeout();
        let late = move |_| TransferError::Unreachable {
            peer: peer.clone(),
            address: address.to_owned(),
            reason: format!("no connection within {limit:?}"),
        };
        async move { timeout(limit, self.open(address, peer)).await.unwrap_or_else(|elapsed| Err(late(elapsed))) }
            .boxed()
    }
}

/// How far a ticket has come, as the receiver's answers tell.
#[derive(Debug, Clone, PartialEq)]
enum Answer {
    None,
    Accepted,
    Committed,
    /// We sent ABORT.
    GivenUp,
    /// The receiver acknowledged our ABORT.
    Aborted,
    Over(TransferError),
}

struct LaneShared {
    peer: PeerId,
    config: TransferConfig,
    /// Unbounded in type only: each part holds its bytes of `room` until it is written, and a ticket has at most three other frames.
    queue: mpsc::UnboundedSender<Outgoing>,
    room: Arc<Semaphore>,
    tickets: Mutex<HashMap<TicketId, watch::Sender<Answer>>>,
    lost: OnceLock<LossCause>,
    stop: CancellationToken,
}

/// A frame on its way to the stream.
struct Outgoing {
    frame: Frame,
    /// Room in the lane, given back when the frame is written or dropped.
    _room: Option<OwnedSemaphorePermit>,
    /// Of a part: it is not worth sending once its ticket is over.
    ticket: Option<watch::Receiver<Answer>>,
    /// Told when the frame is written.
    written: Option<oneshot::Sender<()>>,
}

impl Outgoing {
    fn control(frame: Frame) -> Self {
        Self { frame, _room: None, ticket: None, written: None }
    }

    fn is_stale(&self) -> bool {
        self.ticket.as_ref().is_some_and(|answer| matches!(*answer.borrow(), Answer::Over(_) | Answer::GivenUp))
    }
}

impl LaneShared {
    fn tickets(&self) -> MutexGuard<'_, HashMap<TicketId, watch::Sender<Answer>>> {
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lost_error(&self) -> Option<TransferError> {
        let cause = self.lost.get()?.clone();
        Some(TransferError::PeerLost { peer: self.peer.clone(), cause })
    }

    /// Queues a frame; on a lost lane it is dropped, and the ticket's answer says why.
    fn send(&self, frame: Frame) {
        // The writer may be in the middle of its turn: cancelling it does not keep it from taking one more frame.
        if self.lost.get().is_none() {
            let _ = self.queue.send(Outgoing::control(frame));
        }
    }

    fn answer(&self, ticket: TicketId, answer: Answer) {
        if let Some(sender) = self.tickets().get(&ticket) {
            sender.send_if_modified(|current| {
                let over = matches!(current, Answer::Over(_) | Answer::Aborted | Answer::Committed);
                if !over {
                    *current = answer;
                }
                !over
            });
        }
    }

    fn fail(&self, cause: LossCause) {
        let cause = self.lost.get_or_init(|| cause).clone();
        self.stop.cancel();
        let error = TransferError::PeerLost { peer: self.peer.clone(), cause };
        let tickets: Vec<TicketId> = self.tickets().keys().copied().collect();
        tickets.into_iter().for_each(|ticket| self.answer(ticket, Answer::Over(error.clone())));
    }

    fn on_frame(&self, frame: Frame) -> Result<(), LossCause> {
        match frame {
            Frame::Ping => {}
            Frame::Accepted(ticket) => self.answer(ticket, Answer::Accepted),
            Frame::Committed(ticket) => self.answer(ticket, Answer::Committed),
            Frame::Aborted(ticket) => self.answer(ticket, Answer::Aborted),
            Frame::Gone(ticket) => {
                self.answer(ticket, Answer::Over(TransferError::Gone { ticket, peer: self.peer.clone() }));
            }
            Frame::Abort(ticket, reason) => {
                let peer = self.peer.clone();
                self.answer(ticket, Answer::Over(TransferError::AbortedByPeer { ticket, peer, reason }));
                // Queued behind the ticket's parts: once it is read, no part of the ticket follows.
                self.send(Frame::Aborted(ticket));
            }
            other => return Err(FrameError::Unexpected(other.name()).into()),
        }
        Ok(())
    }
}

type LaneReader = FrameReader<ReadHalf<Box<dyn Stream>>>;
type LaneWriter = FrameWriter<WriteHalf<Box<dyn Stream>>>;

async fn run_lane(
    shared: Arc<LaneShared>,
    mut reader: LaneReader,
    mut writer: LaneWriter,
    outgoing: mpsc::UnboundedReceiver<Outgoing>,
) {
    let read = async {
        loop {
            match reader.next().await {
                Ok(frame) => {
                    if let Err(cause) = shared.on_frame(frame) {
                        return cause;
                    }
                }
                Err(cause) => return cause,
            }
        }
    };
    let ping_interval = shared.config.ping_interval();
    let write = async { write_frames(&mut writer, outgoing, ping_interval).await.err().unwrap_or(LossCause::Closed) };
    let stop = shared.stop.clone();
    let cause = tokio::select! {
        biased; // once closed, nothing more goes out
        () = stop.cancelled() => LossCause::Closed,
        cause = read => cause,
        cause = write => cause,
    };
    tracing::debug!(peer = %shared.peer, %cause, "kv lane closed");
    shared.fail(cause);
}

async fn write_frames(
    writer: &mut LaneWriter,
    mut outgoing: mpsc::UnboundedReceiver<Outgoing>,
    ping_interval: std::time::Duration,
) -> Result<(), LossCause> {
    loop {
        let next = match timeout(ping_interval, outgoing.recv()).await {
            Ok(Some(next)) => next,
            Ok(None) => return Ok(()),
            Err(_) => Outgoing::control(Frame::Ping),
        };
        let mut next = Some(next);
        while let Some(item) = next {
            if !item.is_stale() {
                writer.write(&item.frame).await?;
            }
            if let Some(written) = item.written {
                let _ = written.send(());
            }
            next = outgoing.try_recv().ok();
        }
        writer.flush().await?;
    }
}

struct HostLane {
    shared: Arc<LaneShared>,
}

impl SendLane for HostLane {
    fn peer(&self) -> &PeerId {
        &self.shared.peer
    }

    fn begin(&self, ticket: TicketId) -> BoxFuture<'_, Result<Box<dyn SendTicket>, TransferError>> {
        async move {
            let answers = {
                let mut tickets = self.shared.tickets();
                if tickets.contains_key(&ticket) {
                    return Err(TransferError::Duplicate { ticket });
                }
                let (sender, receiver) = watch::channel(Answer::None);
                tickets.insert(ticket, sender);
                receiver
            };
            let handle = HostTicket {
                id: ticket,
                lane: Arc::clone(&self.shared),
                answers,
                reserved: Mutex::new(None),
                parts: AtomicU64::new(0),
                kv_bytes: AtomicU64::new(0),
                is_terminal: AtomicBool::new(false),
            };
            if let Some(error) = self.shared.lost_error() {
                return Err(error);
            }
            self.shared.send(Frame::Begin(ticket));
            match handle.wait("accept", |answer| *answer != Answer::None).await? {
                Answer::Over(error) => Err(error),
                _ => Ok(Box::new(handle) as Box<dyn SendTicket>),
            }
        }
        .boxed()
    }

    fn lost(&self) -> Option<LossCause> {
        self.shared.lost.get().cloned()
    }

    fn close(&self) {
        self.shared.fail(LossCause::Closed);
    }
}

impl Drop for HostLane {
    fn drop(&mut self) {
        self.close();
    }
}

struct HostTicket {
    id: TicketId,
    lane: Arc<LaneShared>,
    answers: watch::Receiver<Answer>,
    reserved: Mutex<Option<OwnedSemaphorePermit>>,
    parts: AtomicU64,
    kv_bytes: AtomicU64,
    /// Set when ABORT is queued, or COMMIT answered: dropping the handle then has nothing to say.
    is_terminal: AtomicBool,
}

impl HostTicket {
    async fn wait(
        &self,
        waited_for: &'static str,
        is_wanted: impl Fn(&Answer) -> bool,
    ) -> Result<Answer, TransferError> {
        let limit = self.lane.config.ack_timeout();
        let mut answers = self.answers.clone();
        match timeout(limit, answers.wait_for(|answer| is_wanted(answer) || matches!(answer, Answer::Over(_)))).await {
            Ok(Ok(answer)) => Ok(answer.clone()),
            Ok(Err(_)) => unreachable!("the lane keeps the sender until this ticket drops"),
            Err(_) => Err(TransferError::Timeout { ticket: self.id, peer: self.lane.peer.clone(), waited_for, limit }),
        }
    }

    fn room_left(&self) -> usize {
        let reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        reserved.as_ref().map_or(0, OwnedSemaphorePermit::num_permits)
    }

    /// Whether the ticket may wait for `bytes` more: it is not over, and the lane could ever hold them.
    fn check_room(&self, bytes: usize) -> Result<(), TransferError> {
        if let Some(error) = self.ended() {
            return Err(error);
        }
        let room = (self.lane.config.in_flight_bytes_max as usize).saturating_sub(self.room_left());
        if bytes > room {
            return Err(TransferError::NoRoom { ticket: self.id, bytes, room });
        }
        Ok(())
    }

    fn keep_room(&self, room: OwnedSemaphorePermit) {
        let mut reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        match reserved.as_mut() {
            Some(permit) => permit.merge(room),
            None => *reserved = Some(room),
        }
    }

    /// Sets the ticket's remaining room free and stops its parts that still wait in the lane.
    fn give_up(&self, reason: AbortReason) {
        self.is_terminal.store(true, Ordering::Relaxed);
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.lane.answer(self.id, Answer::GivenUp);
        self.lane.send(Frame::Abort(self.id, reason));
    }
}

impl SendTicket for HostTicket {
    fn id(&self) -> TicketId {
        self.id
    }

    fn reserve(&self, bytes: usize) -> BoxFuture<'_, Result<(), TransferError>> {
        async move {
            self.check_room(bytes)?;
            let limit = self.lane.config.stall_timeout();
            let mut answers = self.answers.clone();
            let room = tokio::select! {
                room = timeout(limit, Arc::clone(&self.lane.room).acquire_many_owned(bytes as u32)) => room,
                _ = answers.wait_for(|answer| matches!(answer, Answer::Over(_))) => {
                    return Err(self.ended().expect("Over is what was waited for"));
                }
            };
            let Ok(room) = room else {
                let peer = self.lane.peer.clone();
                return Err(TransferError::Timeout { ticket: self.id, peer, waited_for: "room in the lane", limit });
            };
            let room = room.expect("the lane's semaphore is never closed");
            self.keep_room(room);
            Ok(())
        }
        .boxed()
    }

    fn try_reserve(&self, bytes: usize) -> Result<bool, TransferError> {
        self.check_room(bytes)?;
        let room = Arc::clone(&self.lane.room).try_acquire_many_owned(bytes as u32);
        Ok(room.map(|room| self.keep_room(room)).is_ok())
    }

    fn part(&self, part: Part) -> Result<(), TransferError> {
        if let Some(error) = self.ended() {
            return Err(error);
        }
        let bytes = part.bytes.len();
        let room = {
            let mut reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
            let left = reserved.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
            match reserved.as_mut().and_then(|permit| permit.split(bytes)) {
                Some(room) => room,
                None => return Err(TransferError::NoRoom { ticket: self.id, bytes, room: left }),
            }
        };
        self.parts.fetch_add(1, Ordering::Relaxed);
        self.kv_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        let frame = Frame::Part(self.id, part);
        let _ = self.lane.queue.send(Outgoing {
            _room: Some(room),
            ticket: Some(self.answers.clone()),
            ..Outgoing::control(frame)
        });
        Ok(())
    }

    fn ended(&self) -> Option<TransferError> {
        match &*self.answers.borrow() {
            Answer::Over(error) => Some(error.clone()),
            Answer::GivenUp | Answer::Aborted => Some(TransferError::GivenUp { ticket: self.id }),
            _ => None,
        }
    }

    fn commit(&self, first: FirstToken) -> BoxFuture<'_, Result<Receipt, TransferError>> {
        async move {
            if let Some(error) = self.ended() {
                return Err(error);
            }
            self.reserved.lock().unwrap_or_else(PoisonError::into_inner).take();
            let num_parts = self.parts.load(Ordering::Relaxed) as u32;
            let receipt = Receipt { num_parts, kv_bytes: self.kv_bytes.load(Ordering::Relaxed) };
            let (written, departed) = oneshot::channel();
            let frame = Frame::Commit { ticket: self.id, num_parts, first };
            let _ = self.lane.queue.send(Outgoing { written: Some(written), ..Outgoing::control(frame) });
            // Bounded: the lane is lost when the peer takes no bytes for `stall_timeout_ms`, and the bound on the answer begins only
            // behind the bytes. An error here means that it is lost, which the answer then says.
            let _ = departed.await;
            let answer = self.wait("commit", |answer| *answer == Answer::Committed).await?;
            self.is_terminal.store(true, Ordering::Relaxed);
            match answer {
                Answer::Over(error) => Err(error),
                _ => Ok(receipt),
            }
        }
        .boxed()
    }

    fn abort(&self, reason: AbortReason) -> BoxFuture<'_, Result<(), TransferError>> {
        async move {
            self.give_up(reason);
            match self.wait("abort", |answer| matches!(answer, Answer::Aborted | Answer::Committed)).await? {
                Answer::Over(error @ TransferError::PeerLost { .. }) => Err(error),
                _ => Ok(()),
            }
        }
        .boxed()
    }
}

impl Drop for HostTicket {
    fn drop(&mut self) {
        if !self.is_terminal.load(Ordering::Relaxed) && self.ended().is_none() {
            self.give_up(AbortReason::Cancelled);
        }
        self.lane.tickets().remove(&self.id);
    }
}
