//! Serves gRPC on a [`Listener`](super::Listener), and calls it over a [`Network`].

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::StreamExt;
use http::Uri;
use hyper_util::rt::TokioIo;
use tonic::transport::server::Router;
use tonic::transport::{Channel, Endpoint, Server};

use super::first_byte::expect_first_byte;
use super::{Address, FIRST_BYTE_TIMEOUT, Listener, Network};
use crate::tasks::Tasks;

/// How often a server asks a silent client whether it is still there.
pub(super) const SERVER_KEEP_ALIVE: Duration = Duration::from_secs(20);

/// A server builder with keep-alive: a client that vanished without a word is noticed, and its streams are dropped.
#[must_use]
pub fn server() -> Server {
    Server::builder()
        .http2_keepalive_interval(Some(SERVER_KEEP_ALIVE))
        .http2_keepalive_timeout(Some(Duration::from_secs(10)))
}

/// Serves `services` until the drain begins; open streams are work that the drain waits for. A stream without an end (a watch)
/// must listen to the drain itself.
pub fn serve(tasks: &Tasks, name: &'static str, listener: Listener, services: Router) {
    let drain = tasks.shutdown().drain().clone();
    tasks.spawn_critical(name, async move {
        let incoming =
            listener.map(|socket| Ok::<_, std::convert::Infallible>(expect_first_byte(socket, FIRST_BYTE_TIMEOUT)));
        services.serve_with_incoming_shutdown(incoming, drain.cancelled_owned()).await
    });
}

/// Time limits of a client's connection.
#[derive(Debug, Clone, Copy)]
pub struct ChannelLimits {
    /// For the connection to be made.
    pub connect_timeout: Duration,
    /// How often a silent server is asked whether it is still there, also while no call is open.
    pub keep_alive_interval: Duration,
    /// How long its answer may take; then all calls fail.
    pub keep_alive_timeout: Duration,
}

impl Default for ChannelLimits {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(2),
            keep_alive_interval: Duration::from_secs(10),
            keep_alive_timeout: Duration::from_secs(5),
        }
    }
}

/// Bytes of one answer that may wait to be read: thousands of tokens. One that is not read soon stops its sender, and holds little.
const STREAM_WINDOW: u32 = 64 << 10;
/// HTTP/2 counts the small messages that wait on a whole connection against half of its window, and takes too many for an attack: it would
/// close the connection under all answers because one is not read. So much room leaves the bound to [`STREAM_WINDOW`].
const CONNECTION_WINDOW: u32 = 1 << 30;

/// A channel that connects at its first call, and again after each loss. Must be called within a runtime.
pub fn channel(network: &Arc<dyn Network>, address: &Address, limits: ChannelLimits) -> Channel {
    let network = Arc::clone(network);
    let address = address.clone();
    let uri = Uri::try_from(format!("http://{address}")).expect("an Address holds only characters that a URI allows");
    Endpoint::from(uri)
        .http2_keep_alive_interval(limits.keep_alive_interval)
        .keep_alive_timeout(limits.keep_alive_timeout)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
            let (network, address) = (Arc::clone(&network), address.clone());
            async move {
                let connect = tokio::time::timeout(limits.connect_timeout, network.connect(&address));
                let socket = connect.await.map_err(|_| std::io::Error::from(std::io::ErrorKind::TimedOut))??;
                Ok::<_, std::io::Error>(TokioIo::new(socket))
            }
        }))
}
