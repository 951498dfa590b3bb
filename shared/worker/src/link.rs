//! KV lanes over the service's network.

use std::io;
use std::sync::Arc;

use chassis::net::{Address, Listener, Network};
use chassis::tasks::Tasks;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use transfer::host::{Connector, HostReceiver, Stream};

/// Opens KV connections over a [`Network`].
pub struct NetworkConnector(pub Arc<dyn Network>);

impl Connector for NetworkConnector {
    fn connect<'a>(&'a self, address: &'a str) -> BoxFuture<'a, io::Result<Box<dyn Stream>>> {
        async move {
            let address: Address =
                address.parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, format!("{error}")))?;
            let socket = self.0.connect(&address).await?;
            Ok(Box::new(socket) as Box<dyn Stream>)
        }
        .boxed()
    }
}

/// Takes KV connections on `listener` as long as there is work: a drain must not cut transfers that it waits for.
pub fn serve_kv(tasks: &Tasks, mut listener: Listener, receiver: Arc<HostReceiver>) {
    let lanes = tasks.clone();
    tasks.spawn_background("kv-accept", async move {
        while let Some(socket) = listener.accept().await {
            let receiver = Arc::clone(&receiver);
            let stop = lanes.shutdown().stop().clone();
            lanes.spawn_background("kv-lane", async move { receiver.serve(Box::new(socket), stop).await });
        }
    });
}
