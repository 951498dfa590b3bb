//! The real network.

use std::io;
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream;
use tokio::net::{TcpListener, TcpStream, lookup_host};

use super::inherited::Inherited;
use super::{Address, Listener, Network, Socket};

/// TCP by the operating system, with the sockets that a supervisor may have bound for this process.
#[derive(Default)]
pub struct TcpNetwork {
    inherited: Inherited,
}

impl TcpNetwork {
    /// A network that knows the sockets of `inherited`.
    #[must_use]
    pub fn new(inherited: Inherited) -> Self {
        Self { inherited }
    }
}

impl Network for TcpNetwork {
    fn bind<'a>(&'a self, name: &'a str, address: &'a Address) -> BoxFuture<'a, io::Result<Listener>> {
        async move {
            let listener = match self.inherited.take(name) {
                Some(listener) => {
                    listener.set_nonblocking(true)?;
                    TcpListener::from_std(listener)?
                }
                None => TcpListener::bind((address.host.as_str(), address.port)).await.map_err(|error| {
                    io::Error::new(error.kind(), format!("cannot listen on {address} for {name}: {error}"))
                })?,
            };
            Ok(Listener::new(listener.local_addr()?.into(), stream::unfold(listener, accept)))
        }
        .boxed()
    }

    fn connect<'a>(&'a self, address: &'a Address) -> BoxFuture<'a, io::Result<Socket>> {
        async move {
            let stream = TcpStream::connect((address.host.as_str(), address.port)).await?;
            stream.set_nodelay(true)?;
            Ok(Socket::new(stream, address))
        }
        .boxed()
    }

    fn resolve<'a>(&'a self, address: &'a Address) -> BoxFuture<'a, io::Result<Vec<Address>>> {
        async move {
            let found = lookup_host((address.host.as_str(), address.port)).await?;
            let mut found: Vec<Address> = found.map(Address::from).collect();
            found.sort();
            found.dedup();
            Ok(found)
        }
        .boxed()
    }
}

/// Out of file descriptors, mostly: trying again at once would only burn the CPU.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

async fn accept(listener: TcpListener) -> Option<(Socket, TcpListener)> {
    loop {
        match listener.accept().await.and_then(|(stream, peer)| stream.set_nodelay(true).map(|()| (stream, peer))) {
            Ok((stream, peer)) => return Some((Socket::new(stream, peer), listener)),
            Err(error) => {
                tracing::warn!(%error, "a connection was not accepted");
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
}
