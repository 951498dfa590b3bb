//! The sending side: how a lane is opened.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use types::{KvLayout, PeerId};

use super::frame_io::{FrameReader, FrameWriter};
use super::lane::{FramedLane, LaneReader, LaneWriter};
use super::staging::Staging;
use super::{Connector, on_thread};
use crate::config::TransferConfig;
use crate::contract::{SendLane, SendTransport};
use crate::data::{DataError, DataOffer, LaneSides, Paths, SendData, negotiate};
use crate::error::{LossCause, TransferError};
use crate::frame::{Frame, FrameError, VERSION};

/// Opens lanes from one prefill worker.
pub struct FramedSender {
    connector: Arc<dyn Connector>,
    local: PeerId,
    layout: KvLayout,
    config: TransferConfig,
    tasks: TaskTracker,
    stop: CancellationToken,
    data: OnceLock<Arc<dyn SendData>>,
}

impl FramedSender {
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
        Self { connector, local, layout, config, tasks, stop, data: OnceLock::new() }
    }

    /// Gives lanes that are opened from now on a data path beside their frames. To be called once.
    pub fn set_data(&self, data: Arc<dyn SendData>) {
        let _ = self.data.set(data); // the first one counts
    }

    fn offer(&self) -> DataOffer {
        self.data.get().map_or_else(|| DataOffer::host_only(self.config.transport), |data| data.offer())
    }

    /// Connects and compares: what both sides are, and the way that their bytes will go.
    async fn greet(&self, address: &str, peer: &PeerId) -> Result<Greeted, TransferError> {
        let unreachable =
            |reason: String| TransferError::Unreachable { peer: peer.clone(), address: address.to_owned(), reason };
        let stream = self.connector.connect(address).await.map_err(|error| unreachable(error.to_string()))?;
        let (read, write) = tokio::io::split(stream);
        let mut writer = FrameWriter::new(write, self.config.stall_timeout());
        let mut reader = FrameReader::new(read, 0, self.config.peer_silence_timeout());
        let (sender, receiver, layout) = (self.local.clone(), peer.clone(), self.layout.clone());
        let offer = self.offer();
        let hello = Frame::Hello { sender, receiver, layout, offer: offer.clone() };
        let greeting = async {
            writer.write(&hello).await?;
            writer.flush().await?;
            reader.next().await
        };
        let (receiver_layout, paths) = match greeting.await {
            Ok(welcome) => self.check_welcome(welcome, peer, &offer)?,
            Err(LossCause::Protocol(FrameError::Version(theirs))) => {
                return Err(TransferError::Version { peer: peer.clone(), ours: VERSION, theirs });
            }
            Err(cause) => return Err(TransferError::PeerLost { peer: peer.clone(), cause }),
        };
        Ok(Greeted { reader, writer, receiver_layout, paths })
    }

    fn check_welcome(
        &self,
        welcome: Frame,
        peer: &PeerId,
        ours: &DataOffer,
    ) -> Result<(KvLayout, Paths), TransferError> {
        let protocol = |error| TransferError::PeerLost { peer: peer.clone(), cause: LossCause::Protocol(error) };
        let Frame::Welcome { receiver, layout, accepted, offer } = welcome else {
            return Err(protocol(FrameError::Unexpected(welcome.name())));
        };
        if receiver != *peer {
            return Err(TransferError::WrongPeer { wanted: peer.clone(), found: receiver });
        }
        let layout_error = |mismatch| TransferError::Layout { peer: peer.clone(), mismatch };
        self.layout.check_peer(&layout).map_err(layout_error)?;
        let transport_error = |mismatch| TransferError::Transport { peer: peer.clone(), mismatch };
        let paths = negotiate(ours, &offer).map_err(transport_error)?;
        if accepted { Ok((layout, paths)) } else { Err(protocol(FrameError::Unexpected("refusal"))) }
    }

    /// Opens the data path, if there is to be one: both sides at the same time.
    async fn set_up(&self, greeted: &mut Greeted, peer: &PeerId) -> Result<Option<Staging>, TransferError> {
        let failed = |cause| TransferError::DataPath { peer: peer.clone(), cause };
        let lost = |cause| TransferError::PeerLost { peer: peer.clone(), cause };
        let Some(data) = self.data.get().filter(|_| !greeted.paths.is_host()).cloned() else { return Ok(None) };
        let (ours, theirs) = (self.layout.clone(), greeted.receiver_layout.clone());
        let (paths, other) = (greeted.paths.clone(), peer.clone());
        let open = move || data.open(&LaneSides { peer: &other, sender: &ours, receiver: &theirs, paths: &paths });
        let ping_interval = self.config.ping_interval();
        let nothing = || mpsc::unbounded_channel().1;
        let opening = on_thread("kv-open", open);
        let opening = greeted.writer.send_while(ping_interval, nothing(), opening).await.map_err(lost)?;
        let (lane, setup) = opening.map_err(failed)?;
        // Dropped with this future, it closes the lane, and what waits for the receiver gives up.
        let staging = Staging::new(Arc::clone(&lane), &self.layout, &greeted.receiver_layout, &self.config);
        greeted.writer.write(&Frame::Setup(Bytes::from(setup))).await.map_err(lost)?;
        greeted.writer.flush().await.map_err(lost)?;
        let (joins, to_join) = std::sync::mpsc::channel();
        let reader = &mut greeted.reader;
        let opened = async move {
            loop {
                match reader.next().await.map_err(lost)? {
                    Frame::Ping => {}
                    Frame::Join(name) => drop(joins.send(name)), // who has failed tells that by itself
                    Frame::Opened(rates) => return Ok(rates),
                    Frame::Refused(reason) => return Err(failed(DataError(reason))),
                    other => return Err(lost(FrameError::Unexpected(other.name()).into())),
                }
            }
        };
        let connected = async { on_thread("kv-connect", move || lane.connect(to_join)).await.map_err(failed) };
        let both = async { tokio::try_join!(opened, connected) };
        let (rates, ()) = greeted.writer.send_while(ping_interval, nothing(), both).await.map_err(lost)??;
        for rate in rates {
            let (sender_rank, receiver_rank, path) = (rate.sender_rank, rate.receiver_rank, rate.path.name());
            tracing::info!(%peer, sender_rank, receiver_rank, path, mb_per_s = rate.mb_per_s, "kv data path is open");
        }
        Ok(Some(staging))
    }
}

/// A connection whose two ends have agreed.
struct Greeted {
    reader: LaneReader,
    writer: LaneWriter,
    receiver_layout: KvLayout,
    paths: Paths,
}

impl SendTransport for FramedSender {
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
        async move {
            let mut greeted =
                timeout(limit, self.greet(address, peer)).await.unwrap_or_else(|elapsed| Err(late(elapsed)))?;
            let limit = self.config.setup_timeout();
            let late = |_| {
                let cause = DataError(format!("not open within {limit:?} (transfer.setup_timeout_ms)"));
                Err(TransferError::DataPath { peer: peer.clone(), cause })
            };
            let staging = timeout(limit, self.set_up(&mut greeted, peer)).await.unwrap_or_else(late)?;
            let Greeted { reader, writer, .. } = greeted;
            let (config, stop) = (self.config.clone(), self.stop.child_token());
            let (lane, run) = FramedLane::new(peer.clone(), config, staging, stop, reader, writer);
            self.tasks.spawn(run);
            Ok(Box::new(lane) as Box<dyn SendLane>)
        }
        .boxed()
    }
}
