//! KV lanes over the service's network.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use chassis::net::{Address, Listener, Network};
use chassis::tasks::Tasks;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use transfer::framed::{Connector, FramedReceiver, Stream};

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

/// The address by which other hosts reach what listens on `local`: itself, unless that is all interfaces; then this host by `$POD_IP`, which a
/// pod of Kubernetes is given, or by its name.
#[must_use]
pub fn advertised(local: &Address) -> Address {
    let pod_ip = std::env::var("POD_IP").ok().filter(|ip| !ip.is_empty());
    let name = || std::fs::read_to_string("/proc/sys/kernel/hostname").ok().map(|name| name.trim().to_owned());
    advertised_as(local, pod_ip.or_else(name))
}

fn advertised_as(local: &Address, host: Option<String>) -> Address {
    let is_any = local.host.parse().is_ok_and(|ip: IpAddr| ip.is_unspecified());
    match host {
        Some(host) if is_any => Address::new(&host, local.port),
        _ => local.clone(),
    }
}

/// Takes KV connections on `listener` as long as there is work: a drain must not cut transfers that it waits for.
pub fn serve_kv(tasks: &Tasks, mut listener: Listener, receiver: Arc<FramedReceiver>) {
    let lanes = tasks.clone();
    tasks.spawn_background("kv-accept", async move {
        while let Some(socket) = listener.accept().await {
            let receiver = Arc::clone(&receiver);
            let stop = lanes.shutdown().stop().clone();
            lanes.spawn_background("kv-lane", async move { receiver.serve(Box::new(socket), stop).await });
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_named_where_all_interfaces_are_listened_on() {
        for (local, advertised) in
            [("0.0.0.0:9202", "pod:9202"), ("[::]:9202", "pod:9202"), ("10.0.0.7:9202", "10.0.0.7:9202")]
        {
            let local: Address = local.parse().unwrap();
            assert_eq!(advertised_as(&local, Some("pod".into())).to_string(), advertised);
            assert_eq!(advertised_as(&local, None), local);
        }
    }
}
