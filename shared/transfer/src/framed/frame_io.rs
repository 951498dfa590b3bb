//! Reads and writes frames on a stream, each with its bound.

use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::error::LossCause;
use crate::frame::{Decoded, Frame, FrameError};

/// Bytes asked from the stream at least: many small frames then come by one call.
const READ_SIZE: usize = 64 << 10;

pub(super) struct FrameReader<R> {
    stream: R,
    buf: BytesMut,
    max_payload: usize,
    silence: Duration,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    pub(super) fn new(stream: R, max_payload: usize, silence: Duration) -> Self {
        Self { stream, buf: BytesMut::new(), max_payload, silence }
    }

    /// What `work` comes to, unless the peer is lost meanwhile, which has nothing to say but that it is alive.
    pub(super) async fn listen_while<T>(&mut self, work: impl Future<Output = T>) -> Result<T, LossCause> {
        tokio::pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return Ok(done),
                frame = self.next() => match frame? {
                    Frame::Ping => {}
                    other => return Err(FrameError::Unexpected(other.name()).into()),
                },
            }
        }
    }

    /// The next frame. Cancellation safe: bytes read stay in the buffer.
    pub(super) async fn next(&mut self) -> Result<Frame, LossCause> {
        loop {
            let missing = match Frame::decode(&mut self.buf, self.max_payload)? {
                Decoded::Frame(frame) => return Ok(frame),
                Decoded::NeedMore(missing) => missing,
            };
            // The payload then lands in one piece and is handed on without a copy.
            self.buf.reserve(missing.max(READ_SIZE));
            match timeout(self.silence, self.stream.read_buf(&mut self.buf)).await {
                Err(_) => return Err(LossCause::Silent(self.silence)),
                Ok(Ok(0)) => return Err(LossCause::Ended),
                Ok(Ok(_)) => {}
                Ok(Err(error)) => return Err(LossCause::Io(error.to_string())),
            }
        }
    }
}

pub(super) struct FrameWriter<W> {
    stream: W,
    stall: Duration,
}

impl<W: AsyncWrite + Unpin> FrameWriter<W> {
    pub(super) fn new(stream: W, stall: Duration) -> Self {
        Self { stream, stall }
    }

    /// Writes one frame. Not cancellation safe: a frame that was cut makes the stream useless.
    pub(super) async fn write(&mut self, frame: &Frame) -> Result<(), LossCause> {
        let (head, payload) = frame.encode();
        let mut bytes = head.chain(payload);
        while bytes.has_remaining() {
            self.bounded_write(&mut bytes).await?;
        }
        Ok(())
    }

    /// What `work` comes to. Meanwhile sends `frames`, and signs of life, without which the peer would not wait.
    pub(super) async fn send_while<T>(
        &mut self,
        ping_interval: Duration,
        mut frames: mpsc::UnboundedReceiver<Frame>,
        work: impl Future<Output = T>,
    ) -> Result<T, LossCause> {
        tokio::pin!(work);
        let done = loop {
            let frame = tokio::select! {
                Some(frame) = frames.recv() => frame,
                done = &mut work => break done,
                () = tokio::time::sleep(ping_interval) => Frame::Ping,
            };
            self.write(&frame).await?;
            self.flush().await?;
        };
        // What it sent last of all.
        while let Ok(frame) = frames.try_recv() {
            self.write(&frame).await?;
        }
        Ok(done)
    }

    /// Passes buffered bytes on, for streams that buffer (TLS).
    pub(super) async fn flush(&mut self) -> Result<(), LossCause> {
        match timeout(self.stall, self.stream.flush()).await {
            Err(_) => Err(LossCause::Stalled(self.stall)),
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(LossCause::Io(error.to_string())),
        }
    }

    async fn bounded_write(&mut self, bytes: &mut (impl Buf + Unpin)) -> Result<(), LossCause> {
        match timeout(self.stall, self.stream.write_buf(bytes)).await {
            Err(_) => Err(LossCause::Stalled(self.stall)),
            Ok(Ok(0)) => Err(LossCause::Ended),
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(LossCause::Io(error.to_string())),
        }
    }
}
