//! Everything that leaves the process goes through [`Network`], so that a whole fleet can run on a simulated one.

mod address;
mod first_byte;
pub mod grpc;
pub mod http;
pub mod inherited;
mod tcp;
pub mod tls;

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{BoxStream, Stream, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

pub use address::{Address, InvalidAddress};
pub use tcp::TcpNetwork;

/// A client that has opened a connection must begin its request, or end its TLS handshake, within this time.
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(30);

/// How a service listens and connects. [`TcpNetwork`] is the real one.
pub trait Network: Send + Sync + 'static {
    /// Listens on `address`. `name` says what for (`grpc`, `http`, `admin`, `kv`): a socket of that name that a supervisor bound
    /// beforehand takes the address's place.
    fn bind<'a>(&'a self, name: &'a str, address: &'a Address) -> BoxFuture<'a, io::Result<Listener>>;

    /// Connects to one peer.
    fn connect<'a>(&'a self, address: &'a Address) -> BoxFuture<'a, io::Result<Socket>>;

    /// The addresses that `address` stands for now: a host name may name several peers (a headless service).
    fn resolve<'a>(&'a self, address: &'a Address) -> BoxFuture<'a, io::Result<Vec<Address>>>;
}

/// A byte stream in both directions; any that tokio knows.
pub trait ByteStream: AsyncRead + AsyncWrite + Send {}

impl<T: AsyncRead + AsyncWrite + Send> ByteStream for T {}

/// One connection.
pub struct Socket {
    stream: Pin<Box<dyn ByteStream>>,
    peer: String,
}

impl Socket {
    /// Wraps a stream; `peer` is for logs.
    pub fn new(stream: impl ByteStream + 'static, peer: impl ToString) -> Self {
        Self { stream: Box::pin(stream), peer: peer.to_string() }
    }

    /// The other side, for logs.
    #[must_use]
    pub fn peer(&self) -> &str {
        &self.peer
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_read(cx, buf)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.stream.as_mut().poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream.as_mut().poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

impl Connected for Socket {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}

/// A bound socket: an endless stream of connections. Whatever makes one connection fail is logged by its implementation and does not
/// end the stream.
pub struct Listener {
    local: Address,
    connections: BoxStream<'static, Socket>,
}

impl Listener {
    /// Wraps a stream of connections; `local` is the address that peers can connect to.
    pub fn new(local: Address, connections: impl Stream<Item = Socket> + Send + 'static) -> Self {
        Self { local, connections: connections.boxed() }
    }

    /// Where this listens: the real port if port 0 was asked for.
    #[must_use]
    pub fn local(&self) -> &Address {
        &self.local
    }

    /// The next connection. Cancellation safe: a connection is never lost between two calls.
    pub async fn accept(&mut self) -> Option<Socket> {
        self.connections.next().await
    }
}

impl Stream for Listener {
    type Item = Socket;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.connections.poll_next_unpin(cx)
    }
}
