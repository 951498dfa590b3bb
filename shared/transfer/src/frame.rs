//! The frames of which every lane is made, little-endian.
//!
//! ```text
//! magic u16 | kind u8 | 0 u8 | header_len u16 | payload_len u32 | header | crc32 of all before, u32 | payload
//! ```
//! The header's own checksum keeps a flipped bit from addressing a slice wrongly: such a stream cannot be trusted any more and is closed.
//! The payload is the bytes of a part and has the part's checksum, so that damage there costs one ticket.
//!
//! The parser is total: it takes any bytes, from a peer that is broken or hostile, and answers with a frame, a need for more, or an error.

mod fields;

use bytes::{BufMut, Bytes, BytesMut};
use types::{KvLayout, PeerId, TicketId};

use crate::contract::{FirstToken, Part};
use crate::data::{Batch, DataOffer, PairRate};
use crate::error::AbortReason;
use fields::{Fields, put_batch, put_layout, put_offer, put_peer, put_rate, put_slice};

/// Version of the protocol; both sides must have the same.
pub const VERSION: u16 = 3;

const MAGIC: u16 = u16::from_le_bytes(*b"KV");
const PREFIX_LEN: usize = 10;
const CRC_LEN: usize = 4;
/// Longest SETUP, in bytes.
const MAX_SETUP_LEN: usize = 1 << 20;
/// Longest JOIN, in bytes.
const MAX_JOIN_LEN: usize = 1024;
/// Longest reason of a refusal, in bytes.
const MAX_REASON_LEN: usize = 1024;

/// One message.
#[derive(Debug, Clone, PartialEq)]
pub enum Frame {
    /// First of the sender: who it is, whom it wants, how its KV lies.
    Hello {
        /// The sender.
        sender: PeerId,
        /// Whom it wants to reach.
        receiver: PeerId,
        /// The sender's layout.
        layout: KvLayout,
        /// What it can do beside frames.
        offer: DataOffer,
    },
    /// The receiver's answer to HELLO. The sender finds out from it what is wrong when it was not accepted.
    Welcome {
        /// The receiver.
        receiver: PeerId,
        /// The receiver's layout.
        layout: KvLayout,
        /// Whether the lane is open.
        accepted: bool,
        /// What it can do beside frames.
        offer: DataOffer,
    },
    /// What the receiver must know to open the data path; follows WELCOME where there is one.
    Setup(Bytes),
    /// The receiver joins the next pair by what this names, and waits for the sender to join it too.
    Join(Bytes),
    /// The data path is open, and so fast.
    Opened(Vec<PairRate>),
    /// The data path cannot be opened.
    Refused(String),
    /// Opens a ticket.
    Begin(TicketId),
    /// The ticket is open: parts may follow.
    Accepted(TicketId),
    /// A slice of KV.
    Part(TicketId, Part),
    /// Slices of KV that lie in the sender's staging.
    Batch(Batch),
    /// Nothing of the batch is read any more.
    Landed(u64),
    /// No part follows; carries the first token.
    Commit {
        /// The ticket.
        ticket: TicketId,
        /// Parts sent.
        num_parts: u32,
        /// What prefill sampled.
        first: FirstToken,
    },
    /// The receiver has joined the sequence.
    Committed(TicketId),
    /// Gives a ticket up, from either side.
    Abort(TicketId, AbortReason),
    /// Acknowledges ABORT: the last frame about the ticket from this side.
    Aborted(TicketId),
    /// No such ticket.
    Gone(TicketId),
    /// Sign of life.
    Ping,
}

/// Why bytes are no frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Not our protocol.
    #[error("stream does not begin with a frame")]
    Magic,
    /// The header's checksum does not match.
    #[error("frame header is damaged")]
    HeaderCrc,
    /// No such kind.
    #[error("unknown frame kind {0}")]
    Kind(u8),
    /// The peer speaks another version.
    #[error("transfer protocol version {0}, expected {VERSION}")]
    Version(u16),
    /// The payload is longer than a part can be, or stands where none may.
    #[error("payload of {len} bytes, at most {max} are allowed")]
    PayloadTooLong {
        /// Its length.
        len: usize,
        /// The bound.
        max: usize,
    },
    /// A field is missing, out of range, or followed by more than belongs there.
    #[error("bad field {0}")]
    Field(&'static str),
    /// A frame that may not come now.
    #[error("unexpected {0}")]
    Unexpected(&'static str),
}

/// What [`Frame::decode`] found.
#[derive(Debug, Clone, PartialEq)]
pub enum Decoded {
    /// A whole frame, taken off the buffer.
    Frame(Frame),
    /// The buffer must grow by at least this many bytes before a frame can be whole.
    NeedMore(usize),
}

impl Frame {
    const HELLO: u8 = 1;
    const WELCOME: u8 = 2;
    const BEGIN: u8 = 3;
    const ACCEPTED: u8 = 4;
    const PART: u8 = 5;
    const COMMIT: u8 = 6;
    const COMMITTED: u8 = 7;
    const ABORT: u8 = 8;
    const ABORTED: u8 = 9;
    const GONE: u8 = 10;
    const PING: u8 = 11;
    const SETUP: u8 = 12;
    const OPENED: u8 = 13;
    const REFUSED: u8 = 14;
    const BATCH: u8 = 15;
    const LANDED: u8 = 16;
    const JOIN: u8 = 17;

    /// The frame's name in errors.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Hello { .. } => "HELLO",
            Self::Welcome { .. } => "WELCOME",
            Self::Begin(_) => "BEGIN",
            Self::Accepted(_) => "ACCEPTED",
            Self::Part(..) => "PART",
            Self::Commit { .. } => "COMMIT",
            Self::Committed(_) => "COMMITTED",
            Self::Abort(..) => "ABORT",
            Self::Aborted(_) => "ABORTED",
            Self::Gone(_) => "GONE",
            Self::Ping => "PING",
            Self::Setup(_) => "SETUP",
            Self::Join(_) => "JOIN",
            Self::Opened(_) => "OPENED",
            Self::Refused(_) => "REFUSED",
            Self::Batch(_) => "BATCH",
            Self::Landed(_) => "LANDED",
        }
    }

    /// The frame as head and payload; the payload is the part's own bytes, not a copy.
    #[must_use]
    pub fn encode(&self) -> (Bytes, Bytes) {
        let mut header = BytesMut::with_capacity(128);
        let (kind, payload) = self.put_header(&mut header);
        let mut head = BytesMut::with_capacity(PREFIX_LEN + header.len() + CRC_LEN);
        head.put_u16_le(MAGIC);
        head.put_u8(kind);
        head.put_u8(0);
        head.put_u16_le(u16::try_from(header.len()).expect("names and layer lists are bounded"));
        head.put_u32_le(u32::try_from(payload.len()).expect("a part is smaller than 4 GiB"));
        head.put_slice(&header);
        let crc = crc32fast::hash(&head);
        head.put_u32_le(crc);
        (head.freeze(), payload)
    }

    fn put_header(&self, out: &mut BytesMut) -> (u8, Bytes) {
        let mut payload = Bytes::new();
        let ticket_only = |out: &mut BytesMut, ticket: &TicketId| out.put_u128_le(ticket.0);
        let kind = match self {
            Self::Hello { sender, receiver, layout, offer } => {
                out.put_u16_le(VERSION);
                put_peer(out, sender);
                put_peer(out, receiver);
                put_layout(out, layout);
                put_offer(out, offer);
                Self::HELLO
            }
            Self::Welcome { receiver, layout, accepted, offer } => {
                out.put_u16_le(VERSION);
                put_peer(out, receiver);
                put_layout(out, layout);
                out.put_u8(u8::from(*accepted));
                put_offer(out, offer);
                Self::WELCOME
            }
            Self::Part(ticket, part) => {
                ticket_only(out, ticket);
                put_slice(out, &part.slice);
                out.put_u32_le(part.crc32);
                payload = part.bytes.clone();
                Self::PART
            }
            Self::Commit { ticket, num_parts, first } => {
                ticket_only(out, ticket);
                out.put_u32_le(*num_parts);
                out.put_u32_le(first.index);
                out.put_u32_le(first.token);
                out.put_u8(u8::from(first.logprob.is_some()));
                out.put_f32_le(first.logprob.unwrap_or(0.0));
                Self::COMMIT
            }
            Self::Abort(ticket, reason) => {
                ticket_only(out, ticket);
                out.put_u8(reason.code());
                Self::ABORT
            }
            Self::Begin(ticket) => (ticket_only(out, ticket), Self::BEGIN).1,
            Self::Accepted(ticket) => (ticket_only(out, ticket), Self::ACCEPTED).1,
            Self::Committed(ticket) => (ticket_only(out, ticket), Self::COMMITTED).1,
            Self::Aborted(ticket) => (ticket_only(out, ticket), Self::ABORTED).1,
            Self::Gone(ticket) => (ticket_only(out, ticket), Self::GONE).1,
            Self::Ping => Self::PING,
            Self::Setup(setup) => {
                payload = setup.clone();
                Self::SETUP
            }
            Self::Join(name) => {
                payload = name.clone();
                Self::JOIN
            }
            Self::Opened(rates) => {
                out.put_u16_le(u16::try_from(rates.len()).expect("pairs are bounded by the ranks of an offer"));
                rates.iter().for_each(|rate| put_rate(out, rate));
                Self::OPENED
            }
            Self::Refused(reason) => {
                payload = Bytes::copy_from_slice(&reason.as_bytes()[..reason.floor_char_boundary(MAX_REASON_LEN)]);
                Self::REFUSED
            }
            Self::Batch(batch) => (put_batch(out, batch), Self::BATCH).1,
            Self::Landed(id) => (out.put_u64_le(*id), Self::LANDED).1,
        };
        (kind, payload)
    }

    /// Takes one frame off the front of `buf`; `max_payload` bounds a part.
    ///
    /// # Errors
    /// [`FrameError`]; the stream is then beyond use.
    pub fn decode(buf: &mut BytesMut, max_payload: usize) -> Result<Decoded, FrameError> {
        let Some(prefix) = buf.first_chunk::<PREFIX_LEN>() else {
            return Ok(Decoded::NeedMore(PREFIX_LEN - buf.len()));
        };
        if u16::from_le_bytes([prefix[0], prefix[1]]) != MAGIC {
            return Err(FrameError::Magic);
        }
        let kind = prefix[2];
        let header_len = usize::from(u16::from_le_bytes([prefix[4], prefix[5]]));
        let payload_len = u32::from_le_bytes([prefix[6], prefix[7], prefix[8], prefix[9]]) as usize;
        let head_len = PREFIX_LEN + header_len + CRC_LEN;
        if buf.len() < head_len {
            return Ok(Decoded::NeedMore(head_len - buf.len()));
        }
        let (checked, crc) = buf[..head_len].split_at(head_len - CRC_LEN);
        if crc32fast::hash(checked).to_le_bytes() != crc {
            return Err(FrameError::HeaderCrc);
        }
        let max = match kind {
            Self::PART => max_payload,
            Self::SETUP => MAX_SETUP_LEN,
            Self::JOIN => MAX_JOIN_LEN,
            Self::REFUSED => MAX_REASON_LEN,
            _ => 0,
        };
        if payload_len > max {
            return Err(FrameError::PayloadTooLong { len: payload_len, max });
        }
        if buf.len() < head_len + payload_len {
            return Ok(Decoded::NeedMore(head_len + payload_len - buf.len()));
        }
        let head = buf.split_to(head_len);
        let payload = buf.split_to(payload_len).freeze();
        let mut fields = Fields { rest: &head[PREFIX_LEN..PREFIX_LEN + header_len] };
        let frame = Self::parse(kind, &mut fields, payload)?;
        if !fields.rest.is_empty() {
            return Err(FrameError::Field("trailing bytes"));
        }
        Ok(Decoded::Frame(frame))
    }

    fn parse(kind: u8, fields: &mut Fields<'_>, payload: Bytes) -> Result<Self, FrameError> {
        Ok(match kind {
            Self::HELLO => {
                fields.version()?;
                let (sender, receiver, layout) = (fields.peer()?, fields.peer()?, fields.layout()?);
                Self::Hello { sender, receiver, layout, offer: fields.offer()? }
            }
            Self::WELCOME => {
                fields.version()?;
                let (receiver, layout) = (fields.peer()?, fields.layout()?);
                Self::Welcome { receiver, layout, accepted: fields.flag("accepted")?, offer: fields.offer()? }
            }
            Self::BEGIN => Self::Begin(fields.ticket()?),
            Self::ACCEPTED => Self::Accepted(fields.ticket()?),
            Self::PART => {
                let ticket = fields.ticket()?;
                let slice = fields.slice()?;
                Self::Part(ticket, Part { slice, crc32: fields.u32("crc32")?, bytes: payload })
            }
            Self::COMMIT => {
                let ticket = fields.ticket()?;
                let num_parts = fields.u32("num_parts")?;
                let (index, token) = (fields.u32("index")?, fields.u32("token")?);
                let has_logprob = fields.flag("has_logprob")?;
                let logprob = f32::from_bits(fields.u32("logprob")?);
                let first = FirstToken { index, token, logprob: has_logprob.then_some(logprob) };
                Self::Commit { ticket, num_parts, first }
            }
            Self::COMMITTED => Self::Committed(fields.ticket()?),
            Self::ABORT => {
                let ticket = fields.ticket()?;
                let reason = AbortReason::from_code(fields.u8("reason")?).ok_or(FrameError::Field("reason"))?;
                Self::Abort(ticket, reason)
            }
            Self::ABORTED => Self::Aborted(fields.ticket()?),
            Self::GONE => Self::Gone(fields.ticket()?),
            Self::PING => Self::Ping,
            Self::SETUP => Self::Setup(payload),
            Self::JOIN => Self::Join(payload),
            Self::OPENED => Self::Opened(fields.rates()?),
            Self::REFUSED => Self::Refused(String::from_utf8_lossy(&payload).into_owned()),
            Self::BATCH => Self::Batch(fields.batch()?),
            Self::LANDED => Self::Landed(fields.u64("batch")?),
            other => return Err(FrameError::Kind(other)),
        })
    }
}
