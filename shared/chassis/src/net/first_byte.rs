//! Connections that say nothing cost memory and a descriptor, and no protocol above bounds them: HTTP servers start their clocks only once they
//! know which HTTP it is.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use super::Socket;

/// The socket, with an error of kind `TimedOut` if its peer sends no first byte within `limit`. A TLS handshake must be over by then too.
pub(super) fn expect_first_byte(socket: Socket, limit: Duration) -> Socket {
    let peer = socket.peer().to_owned();
    Socket::new(FirstByte { socket, silence_ends: Some(Box::pin(tokio::time::sleep(limit))) }, peer)
}

struct FirstByte {
    socket: Socket,
    /// `None` once something has come.
    silence_ends: Option<Pin<Box<Sleep>>>,
}

impl AsyncRead for FirstByte {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if let Poll::Ready(outcome) = Pin::new(&mut self.socket).poll_read(cx, buf) {
            self.silence_ends = None;
            return Poll::Ready(outcome);
        }
        match &mut self.silence_ends {
            None => Poll::Pending,
            Some(sleep) => {
                ready!(sleep.as_mut().poll(cx));
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer has sent nothing")))
            }
        }
    }
}

impl AsyncWrite for FirstByte {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn silence_before_the_first_byte_ends_the_connection_and_silence_after_it_does_not() {
        let (ours, _theirs) = tokio::io::duplex(64);
        let mut silent = expect_first_byte(Socket::new(ours, "test"), LIMIT);
        let started = tokio::time::Instant::now();
        assert_eq!(silent.read_u8().await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(started.elapsed().as_secs(), LIMIT.as_secs());

        let (ours, mut theirs) = tokio::io::duplex(64);
        let mut spoken = expect_first_byte(Socket::new(ours, "test"), LIMIT);
        theirs.write_all(b"a").await.unwrap();
        assert_eq!(spoken.read_u8().await.unwrap(), b'a');
        tokio::time::sleep(2 * LIMIT).await;
        theirs.write_all(b"b").await.unwrap();
        assert_eq!(spoken.read_u8().await.unwrap(), b'b');
    }
}
