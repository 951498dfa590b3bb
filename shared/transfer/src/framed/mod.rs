//! Lanes of frames over byte streams, which every transfer has. By themselves they carry the bytes too, through host memory, for the CPU engine and for
//! devices that cannot reach each other; with a [data path](crate::data) beside them the frames only announce what that one moves.
//!
//! The receiver itself writes what arrives into its pages, so its fence is plain: no arrival, no write. It still asks the sender to
//! acknowledge an ABORT before it says so, as transports must whose peers write into our memory.

mod data_connection;
mod frame_io;
mod lane;
mod receiver;
mod sender;
mod staging;
mod ticket;
mod ticket_table;

use std::io;

use futures_util::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;
use types::KvLayout;

use crate::data::DataError;

pub use receiver::FramedReceiver;
pub use sender::FramedSender;
#[cfg(feature = "cuda")]
pub(crate) use staging::staging_bytes;

/// The name of this protocol in tickets, whatever moves the bytes of its lanes.
pub const TRANSPORT: &str = "host";

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

/// Runs what blocks, inside the driver for the most part, on a thread of its own. It is left to itself when nobody waits for it any more.
async fn on_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> Result<T, DataError> + Send + 'static,
) -> Result<T, DataError> {
    let (outcome, done) = oneshot::channel();
    let thread = std::thread::Builder::new().name(name.into()).spawn(move || drop(outcome.send(work())));
    let thread = thread.map_err(|error| DataError(format!("cannot start thread {name}: {error}")))?;
    #[cfg(feature = "cuda")]
    let waited_for = device::DriverWork::begin();
    let outcome = done.await.unwrap_or_else(|_| Err(DataError(format!("thread {name} panicked"))));
    let _ = thread.join(); // at its end, which the outcome came from
    #[cfg(feature = "cuda")]
    waited_for.joined();
    outcome
}
