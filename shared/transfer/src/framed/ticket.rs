//! One ticket of a lane, at the sending side.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use kv::KvSlice;
use tokio::sync::{OwnedSemaphorePermit, oneshot, watch};
use tokio::time::timeout;
use types::{DpGroup, PageId, TicketId};

use super::lane::{Answer, LaneShared, Outgoing};
use super::staging::Progress;
use crate::config::HoldAt;
use crate::contract::{Carries, FirstToken, Part, Receipt, SendTicket};
use crate::data::DataError;
use crate::error::{AbortReason, LossCause, TransferError};
use crate::frame::Frame;

pub(super) struct FramedTicket {
    id: TicketId,
    /// The receiver's attention group that has its pages.
    group: DpGroup,
    lane: Arc<LaneShared>,
    answers: watch::Receiver<Answer>,
    /// Of each of the lane's rooms.
    reserved: Mutex<Vec<OwnedSemaphorePermit>>,
    parts: AtomicU64,
    kv_bytes: AtomicU64,
    /// Of its batches, if a data path moves its bytes.
    progress: Arc<Progress>,
    /// Set when ABORT is queued, or COMMIT answered: dropping the handle then has nothing to say.
    is_terminal: AtomicBool,
}

impl FramedTicket {
    pub(super) fn new(id: TicketId, group: DpGroup, lane: Arc<LaneShared>, answers: watch::Receiver<Answer>) -> Self {
        let (parts, kv_bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        let (progress, is_terminal) = (Arc::default(), AtomicBool::new(false));
        Self { id, group, lane, answers, reserved: Mutex::default(), parts, kv_bytes, progress, is_terminal }
    }

    pub(super) async fn wait(
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

    fn reserved(&self) -> MutexGuard<'_, Vec<OwnedSemaphorePermit>> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of `bytes` that each room takes. (Every rank has as many heads, so as many bytes.)
    fn share(&self, bytes: usize) -> u32 {
        bytes.div_ceil(self.lane.rooms.len()) as u32
    }

    /// Whether the ticket may wait for `bytes` more: it is not over, and the lane could ever hold them. What the ticket has set aside itself
    /// does not count: it is handed over meanwhile, and leaves.
    fn check_room(&self, bytes: usize) -> Result<(), TransferError> {
        if let Some(error) = self.ended() {
            return Err(error);
        }
        let room = self.lane.config.in_flight_bytes_max as usize;
        if bytes > room {
            return Err(TransferError::NoRoom { ticket: self.id, bytes, room });
        }
        Ok(())
    }

    fn keep_room(&self, rooms: Vec<OwnedSemaphorePermit>) {
        let mut reserved = self.reserved();
        if reserved.is_empty() {
            *reserved = rooms;
        } else {
            reserved.iter_mut().zip(rooms).for_each(|(held, room)| held.merge(room));
        }
    }

    /// Takes `bytes` out of what was set aside in the room of `rank`.
    fn take_room(&self, rank: usize, bytes: usize) -> Result<OwnedSemaphorePermit, TransferError> {
        let mut reserved = self.reserved();
        let room = reserved.get(rank).map_or(0, OwnedSemaphorePermit::num_permits);
        let taken = reserved.get_mut(rank).and_then(|permit| permit.split(bytes));
        taken.ok_or(TransferError::NoRoom { ticket: self.id, bytes, room })
    }

    fn count(&self, parts: usize, bytes: usize) {
        self.parts.fetch_add(parts as u64, Ordering::Relaxed);
        self.kv_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn data_error(&self, cause: DataError) -> TransferError {
        TransferError::DataPath { peer: self.lane.peer.clone(), cause }
    }

    /// Sets the ticket's remaining room free and stops its parts that still wait in the lane.
    fn give_up(&self, reason: AbortReason) {
        self.is_terminal.store(true, Ordering::Relaxed);
        self.reserved().clear();
        self.lane.answer(self.id, Answer::GivenUp);
        self.lane.send(Frame::Abort(self.id, reason));
    }
}

impl SendTicket for FramedTicket {
    fn id(&self) -> TicketId {
        self.id
    }

    fn reserve(&self, bytes: usize) -> BoxFuture<'_, Result<(), TransferError>> {
        async move {
            self.check_room(bytes)?;
            let limit = self.lane.config.stall_timeout();
            let mut answers = self.answers.clone();
            let share = self.share(bytes);
            // Always in this order, so that no two tickets wait for each other.
            let all = async {
                let mut taken = Vec::with_capacity(self.lane.rooms.len());
                for room in &self.lane.rooms {
                    let room = Arc::clone(room).acquire_many_owned(share).await;
                    taken.push(room.expect("the lane's semaphores are never closed"));
                }
                taken
            };
            let rooms = tokio::select! {
                rooms = timeout(limit, all) => rooms,
                _ = answers.wait_for(|answer| matches!(answer, Answer::Over(_))) => {
                    return Err(self.ended().expect("Over is what was waited for"));
                }
            };
            let Ok(rooms) = rooms else {
                let peer = self.lane.peer.clone();
                return Err(TransferError::Timeout { ticket: self.id, peer, waited_for: "room in the lane", limit });
            };
            self.keep_room(rooms);
            Ok(())
        }
        .boxed()
    }

    fn try_reserve(&self, bytes: usize) -> Result<bool, TransferError> {
        self.check_room(bytes)?;
        let share = self.share(bytes);
        let take = |room: &Arc<_>| tokio::sync::Semaphore::try_acquire_many_owned(Arc::clone(room), share);
        let taken: Result<Vec<_>, _> = self.lane.rooms.iter().map(take).collect();
        Ok(taken.map(|rooms| self.keep_room(rooms)).is_ok())
    }

    fn part(&self, part: Part) -> Result<(), TransferError> {
        if let Some(error) = self.ended() {
            return Err(error);
        }
        if self.lane.staging.is_some() {
            return Err(self.data_error(DataError("the lane carries pages".into())));
        }
        let bytes = part.bytes.len();
        let room = self.take_room(0, bytes)?;
        self.count(1, bytes);
        let frame = Frame::Part(self.id, part);
        let _ = self.lane.queue.send(Outgoing {
            _room: Some(room),
            ticket: Some(self.answers.clone()),
            ..Outgoing::control(frame)
        });
        Ok(())
    }

    fn carries(&self) -> Carries {
        if self.lane.staging.is_some() { Carries::Pages } else { Carries::Bytes }
    }

    fn pages(&self, rank: u32, slices: &[(KvSlice, PageId)]) -> Result<(), TransferError> {
        if let Some(error) = self.ended() {
            return Err(error);
        }
        let Some(staging) = &self.lane.staging else {
            return Err(self.data_error(DataError("the lane carries bytes".into())));
        };
        let mut slices = slices.to_vec();
        // By ranks of the receiver; otherwise as they come.
        slices.sort_by_key(|(slice, _)| slice.head_start);
        let fail = |cause: &DataError| self.lane.fail(LossCause::DataPath(cause.clone()));
        let announce = |waits| {
            let announced = staging.announce(rank, waits, &|frame| self.lane.send(frame), &fail);
            announced.map_err(|cause| self.data_error(cause))
        };
        let gathered =
            staging.cut(rank, self.group, &slices).map_err(|cause| self.data_error(cause)).and_then(|cuts| {
                cuts.iter().try_for_each(|cut| {
                    let room = self.take_room(rank as usize, cut.bytes())?;
                    let gathered = staging.gather(self.id, cut, room, &self.progress);
                    gathered.map_err(|cause| self.data_error(cause))?;
                    self.count(cut.len(), cut.bytes());
                    announce(false)
                })
            });
        // What was begun is waited for, and announced, whatever came after it. A batch is never left out because its ticket is over: both sides
        // count on each one.
        gathered.and(announce(true))
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
            self.reserved().clear();
            let num_parts = self.parts.load(Ordering::Relaxed) as u32;
            let kv_bytes = self.kv_bytes.load(Ordering::Relaxed);
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
                _ => {
                    if let Some(pause) = self.lane.config.hold().at(HoldAt::Commit) {
                        tokio::time::sleep(pause).await;
                    }
                    // LANDED of each batch came before COMMITTED.
                    Ok(Receipt { num_parts, kv_bytes, batches: self.progress.times() })
                }
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

impl Drop for FramedTicket {
    fn drop(&mut self) {
        if !self.is_terminal.load(Ordering::Relaxed) && self.ended().is_none() {
            self.give_up(AbortReason::Cancelled);
        }
        self.lane.tickets().remove(&self.id);
    }
}
