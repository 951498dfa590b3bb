//! The simulated network: `chassis::net::Network` over turmoil's hosts.

use std::io;

use chassis::net::{Address, Listener, Network, Socket};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use futures_util::stream;
use turmoil::net::{TcpListener, TcpStream};

/// The network as seen from the simulated host that uses it.
pub struct SimNetwork {
    host: String,
}

impl SimNetwork {
    /// `host` is the name by which other hosts reach this one.
    #[must_use]
    pub fn new(host: &str) -> Self {
        Self { host: host.into() }
    }
}

impl Network for SimNetwork {
    fn bind<'a>(&'a self, _name: &'a str, address: &'a Address) -> BoxFuture<'a, io::Result<Listener>> {
        async move {
            let listener = TcpListener::bind(("0.0.0.0", address.port)).await?;
            let local = Address::new(self.host.clone(), listener.local_addr()?.port());
            let connections = stream::unfold(listener, |listener| async move {
                // An accept fails only with its host, which drops this stream too.
                let (stream, peer) = listener.accept().await.ok()?;
                Some((Socket::new(stream, peer), listener))
            });
            Ok(Listener::new(local, connections))
        }
        .boxed()
    }

    fn connect<'a>(&'a self, address: &'a Address) -> BoxFuture<'a, io::Result<Socket>> {
        async move { Ok(Socket::new(TcpStream::connect((address.host.as_str(), address.port)).await?, address)) }
            .boxed()
    }

    fn resolve<'a>(&'a self, address: &'a Address) -> BoxFuture<'a, io::Result<Vec<Address>>> {
        async move { Ok(vec![address.clone()]) }.boxed()
    }
}
