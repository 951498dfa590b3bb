//! Frames of the `host` transport, little-endian.
//!
//! ```text
//! magic u16 | kind u8 | 0 u8 | header_len u16 | payload_len u32 | header | crc32 of all before, u32 | payload
//! ```
//! The header's own checksum keeps a flipped bit from addressing a slice wrongly: such a stream cannot be trusted any more and is closed.
//! The payload is the bytes of a part and has the part's checksum, so that damage there costs one ticket.
//!
//! The parser is total: it takes any bytes, from a peer that is broken or hostile, and answers with a frame, a need for more, or an error.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use kv::KvSlice;
use types::{Incarnation, KvDtype, KvLayout, PageGroup, PeerId, TicketId, WorkerId};

use crate::contract::{FirstToken, Part};
use crate::error::AbortReason;

/// Version of the protocol; both sides must have the same.
pub const VERSION: u16 = 1;

const MAGIC: u16 = u16::from_le_bytes(*b"KV");
const PREFIX_LEN: usize = 10;
const CRC_LEN: usize = 4;
/// Longest worker name on the wire, in bytes.
const MAX_NAME_LEN: usize = 256;
/// Most layers of one group on the wire.
const MAX_LAYERS: usize = 1024;

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
    },
    /// The receiver's answer to HELLO. The sender finds out from it what is wrong when it was not accepted.
    Welcome {
        /// The receiver.
        receiver: PeerId,
        /// The receiver's layout.
        layout: KvLayout,
        /// Whether the lane is open.
        accepted: bool,
    },
    /// Opens a ticket.
    Begin(TicketId),
    /// The ticket is open: parts may follow.
    Accepted(TicketId),
    /// A slice of KV.
    Part(TicketId, Part),
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
            Self::Hello { sender, receiver, layout } => {
                out.put_u16_le(VERSION);
                put_peer(out, sender);
                put_peer(out, receiver);
                put_layout(out, layout);
                Self::HELLO
            }
            Self::Welcome { receiver, layout, accepted } => {
                out.put_u16_le(VERSION);
                put_peer(out, receiver);
                put_layout(out, layout);
                out.put_u8(u8::from(*accepted));
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
        let max = if kind == Self::PART { max_payload } else { 0 };
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
                Self::Hello { sender: fields.peer()?, receiver: fields.peer()?, layout: fields.layout()? }
            }
            Self::WELCOME => {
                fields.version()?;
                Self::Welcome { receiver: fields.peer()?, layout: fields.layout()?, accepted: fields.flag("accepted")? }
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
            other => return Err(FrameError::Kind(other)),
        })
    }
}

fn put_peer(out: &mut BytesMut, peer: &PeerId) {
    let name = peer.worker.0.as_bytes();
    assert!(name.len() <= MAX_NAME_LEN, "worker names are checked when the config is read");
    out.put_u16_le(name.len() as u16);
    out.put_slice(name);
    out.put_u64_le(peer.incarnation.0);
}

fn put_layout(out: &mut BytesMut, layout: &KvLayout) {
    for group in PageGroup::ALL {
        let layers = layout.layers(group);
        assert!(layers.len() <= MAX_LAYERS, "no model has so many layers");
        out.put_u16_le(layers.len() as u16);
        layers.iter().for_each(|layer| out.put_u32_le(*layer));
    }
    for field in [layout.kv_heads, layout.head_dim, layout.page_tokens, layout.window, layout.tp] {
        out.put_u32_le(field);
    }
    out.put_u8(match layout.dtype {
        KvDtype::F32 => 0,
        KvDtype::Bf16 => 1,
    });
}

fn put_slice(out: &mut BytesMut, slice: &KvSlice) {
    out.put_u8(match slice.group {
        PageGroup::Full => 0,
        PageGroup::Window => 1,
    });
    for field in [slice.layer, slice.page, slice.head_start, slice.head_count] {
        out.put_u32_le(field);
    }
}

/// Reads fields off a header; every read is checked against what is left.
struct Fields<'a> {
    rest: &'a [u8],
}

impl Fields<'_> {
    fn need(&self, len: usize, field: &'static str) -> Result<(), FrameError> {
        if self.rest.len() < len { Err(FrameError::Field(field)) } else { Ok(()) }
    }

    fn u8(&mut self, field: &'static str) -> Result<u8, FrameError> {
        self.need(1, field)?;
        Ok(self.rest.get_u8())
    }

    fn u16(&mut self, field: &'static str) -> Result<u16, FrameError> {
        self.need(2, field)?;
        Ok(self.rest.get_u16_le())
    }

    fn u32(&mut self, field: &'static str) -> Result<u32, FrameError> {
        self.need(4, field)?;
        Ok(self.rest.get_u32_le())
    }

    fn flag(&mut self, field: &'static str) -> Result<bool, FrameError> {
        match self.u8(field)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(FrameError::Field(field)),
        }
    }

    fn version(&mut self) -> Result<(), FrameError> {
        match self.u16("version")? {
            VERSION => Ok(()),
            other => Err(FrameError::Version(other)),
        }
    }

    fn ticket(&mut self) -> Result<TicketId, FrameError> {
        self.need(16, "ticket")?;
        Ok(TicketId(self.rest.get_u128_le()))
    }

    fn peer(&mut self) -> Result<PeerId, FrameError> {
        let len = usize::from(self.u16("worker")?);
        if len > MAX_NAME_LEN {
            return Err(FrameError::Field("worker"));
        }
        self.need(len + 8, "worker")?;
        let (name, rest) = self.rest.split_at(len);
        self.rest = rest;
        let name = std::str::from_utf8(name).map_err(|_| FrameError::Field("worker"))?;
        Ok(PeerId { worker: WorkerId(name.into()), incarnation: Incarnation(self.rest.get_u64_le()) })
    }

    fn layers(&mut self, field: &'static str) -> Result<Vec<u32>, FrameError> {
        let len = usize::from(self.u16(field)?);
        if len > MAX_LAYERS {
            return Err(FrameError::Field(field));
        }
        (0..len).map(|_| self.u32(field)).collect()
    }

    fn layout(&mut self) -> Result<KvLayout, FrameError> {
        let full_layers = self.layers("full_layers")?;
        let window_layers = self.layers("window_layers")?;
        let (kv_heads, head_dim) = (self.u32("kv_heads")?, self.u32("head_dim")?);
        let (page_tokens, window) = (self.u32("page_tokens")?, self.u32("window")?);
        let tp = self.u32("tp")?;
        let dtype = match self.u8("dtype")? {
            0 => KvDtype::F32,
            1 => KvDtype::Bf16,
            _ => return Err(FrameError::Field("dtype")),
        };
        Ok(KvLayout { full_layers, window_layers, kv_heads, head_dim, page_tokens, window, dtype, tp })
    }

    fn slice(&mut self) -> Result<KvSlice, FrameError> {
        let group = match self.u8("group")? {
            0 => PageGroup::Full,
            1 => PageGroup::Window,
            _ => return Err(FrameError::Field("group")),
        };
        Ok(KvSlice {
            group,
            layer: self.u32("layer")?,
            page: self.u32("page")?,
            head_start: self.u32("head_start")?,
            head_count: self.u32("head_count")?,
        })
    }
}
