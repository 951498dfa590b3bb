//! The `host` transport: frames over byte streams. For the CPU engine, and the fallback for devices that cannot reach each other.
//!
//! The receiver itself writes what arrives into its pages, so its fence is plain: no arrival, no write. It still asks the sender to
//! acknowledge an ABORT before it says so, as transports must whose peers write into our memory.

mod frame_io;
mod receiver;
mod sender;

use std::io;

use futures_util::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};
use types::KvLayout;

pub use receiver::HostReceiver;
pub use sender::HostSender;

/// A connected byte stream.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Opens byte streams. Services hand in their network, tests a pipe.
pub trait Connector: Send + Sync {
    /// Connects to `address`.
    ///
    /// # Errors
    /// What the network says.
    fn connect<'a>(&'a self, address: &'a str) -> BoxFuture<'a, io::Result<Box<dyn Stream>>>;
}

/// The largest part that a layout allows: all heads of one layer in one page.
fn max_part_bytes(layout: &KvLayout) -> usize {
    (layout.kv_heads as usize).saturating_mul(layout.head_bytes())
}
