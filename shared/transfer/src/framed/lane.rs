//! A lane of the sending side: one task, which writes what tickets hand over and reads the receiver's answers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::io::{ReadHalf, WriteHalf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use types::{DpGroup, PeerId, TicketId};

use super::Stream;
use super::frame_io::{FrameReader, FrameWriter};
use super::staging::Staging;
use super::ticket::FramedTicket;
use crate::config::TransferConfig;
use crate::contract::{SendLane, SendTicket};
use crate::error::{LossCause, TransferError};
use crate::frame::{Frame, FrameError};

/// How far a ticket has come, as the receiver's answers tell.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Answer {
    None,
    Accepted,
    Committed,
    /// We sent ABORT.
    GivenUp,
    /// The receiver acknowledged our ABORT.
    Aborted,
    Over(TransferError),
}

pub(super) struct LaneShared {
    pub(super) peer: PeerId,
    pub(super) config: TransferConfig,
    /// Unbounded in type only: each part or batch holds its bytes of `rooms` until it is written or has landed, and a ticket has at most three
    /// other frames.
    pub(super) queue: mpsc::UnboundedSender<Outgoing>,
    /// Room for bytes: of the lane, or of each rank's staging.
    pub(super) rooms: Vec<Arc<Semaphore>>,
    /// The data path beside the frames.
    pub(super) staging: Option<Staging>,
    tickets: Mutex<HashMap<TicketId, watch::Sender<Answer>>>,
    lost: OnceLock<LossCause>,
    stop: CancellationToken,
}

/// A frame on its way to the stream.
pub(super) struct Outgoing {
    pub(super) frame: Frame,
    /// Room in the lane, given back when the frame is written or dropped.
    pub(super) _room: Option<OwnedSemaphorePermit>,
    /// Of a part: it is not worth sending once its ticket is over.
    pub(super) ticket: Option<watch::Receiver<Answer>>,
    /// Told when the frame is written.
    pub(super) written: Option<oneshot::Sender<()>>,
}

impl Outgoing {
    pub(super) fn control(frame: Frame) -> Self {
        Self { frame, _room: None, ticket: None, written: None }
    }

    fn is_stale(&self) -> bool {
        self.ticket.as_ref().is_some_and(|answer| matches!(*answer.borrow(), Answer::Over(_) | Answer::GivenUp))
    }
}

impl LaneShared {
    pub(super) fn tickets(&self) -> MutexGuard<'_, HashMap<TicketId, watch::Sender<Answer>>> {
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lost_error(&self) -> Option<TransferError> {
        let cause = self.lost.get()?.clone();
        Some(TransferError::PeerLost { peer: self.peer.clone(), cause })
    }

    /// Queues a frame; on a lost lane it is dropped, and the ticket's answer says why.
    pub(super) fn send(&self, frame: Frame) {
        // The writer may be in the middle of its turn: cancelling it does not keep it from taking one more frame.
        if self.lost.get().is_none() {
            let _ = self.queue.send(Outgoing::control(frame));
        }
    }

    pub(super) fn answer(&self, ticket: TicketId, answer: Answer) {
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

    pub(super) fn fail(&self, cause: LossCause) {
        let cause = self.lost.get_or_init(|| cause).clone();
        self.stop.cancel();
        if let Some(staging) = &self.staging {
            staging.close();
        }
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
            Frame::Landed(batch) => {
                let landed = self.staging.as_ref().is_some_and(|staging| staging.landed(batch));
                return if landed { Ok(()) } else { Err(FrameError::Unexpected("LANDED").into()) };
            }
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

pub(super) type LaneReader = FrameReader<ReadHalf<Box<dyn Stream>>>;
pub(super) type LaneWriter = FrameWriter<WriteHalf<Box<dyn Stream>>>;

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

pub(super) struct FramedLane {
    shared: Arc<LaneShared>,
}

impl FramedLane {
    /// A lane, and the task that it runs in.
    pub(super) fn new(
        peer: PeerId,
        config: TransferConfig,
        staging: Option<Staging>,
        stop: CancellationToken,
        reader: LaneReader,
        writer: LaneWriter,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let (queue, outgoing) = mpsc::unbounded_channel();
        let ranks = staging.as_ref().map_or(1, Staging::ranks);
        let room = (config.in_flight_bytes_max as usize).div_ceil(ranks);
        let shared = Arc::new(LaneShared {
            peer,
            config,
            queue,
            rooms: (0..ranks).map(|_| Arc::new(Semaphore::new(room))).collect(),
            staging,
            tickets: Mutex::new(HashMap::new()),
            lost: OnceLock::new(),
            stop,
        });
        (Self { shared: Arc::clone(&shared) }, run_lane(shared, reader, writer, outgoing))
    }
}

impl SendLane for FramedLane {
    fn peer(&self) -> &PeerId {
        &self.shared.peer
    }

    fn begin(&self, ticket: TicketId, group: DpGroup) -> BoxFuture<'_, Result<Box<dyn SendTicket>, TransferError>> {
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
            let handle = FramedTicket::new(ticket, group, Arc::clone(&self.shared), answers);
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

impl Drop for FramedLane {
    fn drop(&mut self) {
        self.close();
    }
}
