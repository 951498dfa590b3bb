//! The receiving side: one task a connection, one table of posted tickets for all of them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use kv::PageTables;
use tokio::io::{ReadHalf, WriteHalf};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use types::{DpGroup, KvLayout, PeerId, TicketId};

use super::data_connection::{BatchEnd, Completions, DataConnection};
use super::frame_io::{FrameReader, FrameWriter};
use super::ticket_table::{Answers, Connection, Greeting, TicketTable};
use super::{Stream, max_part_bytes, on_thread};
use crate::config::TransferConfig;
use crate::contract::{Arrival, ArrivalEvent, ArrivalSink, ReceiveTransport, Revoked, SinkClosed};
use crate::data::{BatchOutcome, DataError, DataOffer, LaneSides, PairRate, ReceiveData, negotiate};
use crate::error::{AbortReason, LossCause, TransferError};
use crate::frame::{Frame, FrameError};

/// Frames that wait for a connection: answers only, so few. A peer that reads none of them is closed.
const ANSWERS_MAX: usize = 4096;

/// Takes lanes on one decode worker. The service accepts streams and runs [`FramedReceiver::serve`] on each.
pub struct FramedReceiver {
    local: PeerId,
    layout: KvLayout,
    config: TransferConfig,
    sink: Arc<dyn ArrivalSink>,
    tickets: TicketTable,
    next_connection: AtomicU64,
    data: OnceLock<Arc<dyn ReceiveData>>,
}

impl FramedReceiver {
    /// Nothing runs until [`FramedReceiver::serve`] is called.
    #[must_use]
    pub fn new(local: PeerId, layout: KvLayout, config: TransferConfig, sink: Arc<dyn ArrivalSink>) -> Self {
        let tickets = TicketTable::new(layout.clone(), config.clone());
        Self { local, layout, config, sink, tickets, next_connection: AtomicU64::new(0), data: OnceLock::new() }
    }

    /// Gives lanes that are opened from now on a data path beside their frames. To be called once.
    pub fn set_data(&self, data: Arc<dyn ReceiveData>) {
        let _ = self.data.set(data); // the first one counts
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
        let (completions, mut completed) = mpsc::unbounded_channel();
        let data = tokio::select! {
            data = self.set_up(&peer, completions, &mut reader, &mut writer) => data,
            () = stop.cancelled() => return,
        };
        let data = match data {
            Ok(data) => data.map(Arc::new),
            Err(cause) => return tracing::warn!(peer = %peer.sender, %cause, "kv connection without a data path"),
        };
        let (answers, outgoing) = mpsc::channel(ANSWERS_MAX);
        let id = self.next_connection.fetch_add(1, Ordering::Relaxed);
        let answers = Answers { frames: answers, stop: stop.child_token() };
        let connection = Connection { id, peer: Arc::clone(&peer), answers, data };
        let cause = tokio::select! {
            cause = self.read_frames(&mut reader, &mut completed, &connection) => cause,
            cause = self.write_answers(&mut writer, outgoing, id) => cause,
            () = connection.answers.stop.cancelled() => LossCause::Closed,
        };
        tracing::debug!(peer = %peer.sender, %cause, "kv connection closed");
        if let Some(data) = &connection.data {
            data.finish(&mut completed).await;
        }
        self.end_tickets_of(id, &cause).await;
    }

    /// The sender, or `None` if it was refused.
    async fn greet(
        &self,
        reader: &mut FrameReader<ReadHalf<Box<dyn Stream>>>,
        writer: &mut FrameWriter<WriteHalf<Box<dyn Stream>>>,
    ) -> Result<Option<Greeting>, LossCause> {
        let greeting = reader.next().await;
        let offer = self.data.get().map_or_else(|| DataOffer::host_only(self.config.transport), |data| data.offer());
        let (peer, accepted) = match greeting {
            Ok(Frame::Hello { sender, receiver, layout, offer: theirs }) => {
                let fits = self.layout.check_peer(&layout).map_err(|mismatch| mismatch.to_string());
                let paths = fits.and_then(|()| negotiate(&theirs, &offer).map_err(|mismatch| mismatch.to_string()));
                match paths {
                    Ok(paths) => (Some(Greeting { sender, layout: Arc::new(layout), paths }), receiver == self.local),
                    Err(mismatch) => {
                        tracing::warn!(peer = %sender, mismatch, "kv lane refused");
                        (None, false)
                    }
                }
            }
            Ok(other) => return Err(FrameError::Unexpected(other.name()).into()),
            // Our own version goes back, so that the peer can name both.
            Err(LossCause::Protocol(FrameError::Version(theirs))) => {
                tracing::warn!(theirs, "kv lane refused: other protocol version");
                (None, false)
            }
            Err(cause) => return Err(cause),
        };
        let welcome = Frame::Welcome { receiver: self.local.clone(), layout: self.layout.clone(), accepted, offer };
        writer.write(&welcome).await?;
        writer.flush().await?;
        Ok(peer.filter(|_| accepted))
    }

    /// Opens the data path, if there is to be one. Each side hears from the other meanwhile: neither waits for one that is gone.
    async fn set_up(
        &self,
        peer: &Greeting,
        completions: mpsc::UnboundedSender<BatchEnd>,
        reader: &mut FrameReader<ReadHalf<Box<dyn Stream>>>,
        writer: &mut FrameWriter<WriteHalf<Box<dyn Stream>>>,
    ) -> Result<Option<DataConnection>, LossCause> {
        let Some(data) = self.data.get().filter(|_| !peer.paths.is_host()).cloned() else { return Ok(None) };
        let setup = async {
            loop {
                match reader.next().await? {
                    Frame::Ping => {}
                    Frame::Setup(setup) => return Ok(setup),
                    other => return Err(FrameError::Unexpected(other.name()).into()),
                }
            }
        };
        let limit = self.config.setup_timeout();
        let setup = timeout(limit, setup).await.unwrap_or(Err(LossCause::Silent(limit)))?;
        let (joins, to_join) = mpsc::unbounded_channel();
        let opening = reader.listen_while(self.open(peer, data, completions, setup, joins));
        let opened = writer.send_while(self.config.ping_interval(), to_join, opening).await??;
        let (answer, connection) = match opened {
            Ok((connection, rates)) => (Frame::Opened(rates), Ok(Some(connection))),
            Err(cause) => (Frame::Refused(cause.to_string()), Err(LossCause::DataPath(cause))),
        };
        writer.write(&answer).await?;
        writer.flush().await?;
        connection
    }

    /// Dropped before it is over, it closes the lane, and what waits for the sender gives up.
    async fn open(
        &self,
        peer: &Greeting,
        data: Arc<dyn ReceiveData>,
        completions: mpsc::UnboundedSender<BatchEnd>,
        setup: Bytes,
        joins: mpsc::UnboundedSender<Frame>,
    ) -> Result<(DataConnection, Vec<PairRate>), DataError> {
        let (sender, theirs, ours) = (peer.sender.clone(), Arc::clone(&peer.layout), self.layout.clone());
        let paths = peer.paths.clone();
        let open =
            move || data.open(&LaneSides { peer: &sender, sender: &theirs, receiver: &ours, paths: &paths }, &setup);
        let lane = on_thread("kv-open", open).await?;
        let connection = DataConnection::new(Arc::clone(&lane), completions);
        // A name for a connection that is gone is for nobody.
        let connect = move || lane.connect(&|name| drop(joins.send(Frame::Join(name))));
        let rates = on_thread("kv-connect", connect).await?;
        Ok((connection, rates))
    }

    async fn read_frames(
        &self,
        reader: &mut FrameReader<ReadHalf<Box<dyn Stream>>>,
        completed: &mut Completions,
        connection: &Connection,
    ) -> LossCause {
        let mut last_gone = None;
        loop {
            let frame = tokio::select! {
                biased;
                Some(end) = completed.recv() => match self.on_batch_end(end, connection).await {
                    Ok(()) => continue,
                    Err(cause) => return cause,
                },
                frame = reader.next() => match frame {
                    Ok(frame) => frame,
                    Err(cause) => return cause,
                },
            };
            if self.tickets.is_late_part(&frame, connection, &mut last_gone) {
                continue;
            }
            // Room first: a ticket leaves the table and its arrival enters the sink in one step that nothing can cut in two.
            let Ok(slot) = self.sink.slot().await else {
                return LossCause::Closed;
            };
            match self.tickets.on_frame(frame, connection) {
                Ok(Some(arrival)) => slot(arrival),
                Ok(None) => {}
                Err(error) => return error.into(),
            }
        }
    }

    /// A batch has left the data path: tells of its slices, and of the ticket's end if it waited for this.
    async fn on_batch_end(&self, end: BatchEnd, connection: &Connection) -> Result<(), LossCause> {
        if let Some(data) = &connection.data {
            data.counted();
        }
        if let BatchOutcome::Broken(cause) = end.outcome {
            // Whatever is taken from now on may be another batch's bytes.
            return Err(LossCause::DataPath(cause));
        }
        let closed = |SinkClosed| LossCause::Closed;
        let ticket = end.ticket;
        let slot = self.sink.slot().await.map_err(closed)?;
        if let Some(arrival) = self.tickets.on_batch_end(end, connection) {
            slot(arrival);
        }
        let slot = self.sink.slot().await.map_err(closed)?;
        if let Some(event) = self.tickets.end_if_settled(ticket, connection) {
            slot(Arrival { ticket, event });
        }
        Ok(())
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
            if self.tickets.has_overdue_abort(connection_id, Instant::now()) {
                return LossCause::AbortUnanswered(self.config.ack_timeout());
            }
        }
    }

    async fn end_tickets_of(&self, connection_id: u64, cause: &LossCause) {
        for (ticket, cause) in self.tickets.take_tickets_of(connection_id, cause) {
            match self.sink.slot().await {
                Ok(slot) => slot(Arrival { ticket, event: ArrivalEvent::Ended(cause) }),
                Err(SinkClosed) => return,
            }
        }
    }
}

impl ReceiveTransport for FramedReceiver {
    fn post(&self, ticket: TicketId, sender: &PeerId) -> Result<(), TransferError> {
        self.tickets.post(ticket, sender)
    }

    fn land(&self, ticket: TicketId, group: DpGroup, tables: &PageTables) {
        self.tickets.land(ticket, group, tables);
    }

    fn revoke(&self, ticket: TicketId, reason: AbortReason) -> Revoked {
        self.tickets.revoke(ticket, reason, Instant::now())
    }

    fn num_open(&self) -> usize {
        self.tickets.num_open()
    }
}
