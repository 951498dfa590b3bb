//! Any bytes from a peer: the frame decoder answers with a frame, a need for more, or an error, and what it takes for a frame it would write
//! the same way.

#![no_main]

use bytes::{BufMut, BytesMut};
use libfuzzer_sys::fuzz_target;
use transfer::frame::{Decoded, Frame};

const MAX_PAYLOAD: usize = 1 << 12;

fuzz_target!(|input: &[u8]| {
    let Some((form, input)) = input.split_first() else { return };
    // The header's checksum would stop nearly everything: half of the inputs get a right one.
    let mut stream = if form & 1 == 0 { BytesMut::from(input) } else { framed(input) };
    loop {
        let before = stream.clone();
        match Frame::decode(&mut stream, MAX_PAYLOAD) {
            Ok(Decoded::Frame(frame)) => {
                let consumed = &before[..before.len() - stream.len()];
                assert!(!consumed.is_empty(), "a frame out of nothing");
                let (head, payload) = frame.encode();
                let mut written = BytesMut::from(&[head, payload].concat()[..]);
                // Not compared with what was read, nor frames with one another: reserved bytes are ignored, and a logprob may be NaN.
                let Ok(Decoded::Frame(again)) = Frame::decode(&mut written, MAX_PAYLOAD) else {
                    panic!("{frame:?} cannot be read back");
                };
                assert!(written.is_empty() && again.encode() == frame.encode(), "{frame:?} read back as {again:?}");
            }
            Ok(Decoded::NeedMore(bytes)) => {
                assert!(bytes > 0 && stream == before, "a need for more leaves the buffer as it was");
                return;
            }
            Err(_) => return,
        }
    }
});

/// kind u8 | header length u8 | header | payload, as a frame with the right lengths and checksum.
fn framed(input: &[u8]) -> BytesMut {
    let mut frame = BytesMut::new();
    let [kind, header_len, rest @ ..] = input else { return frame };
    let (header, payload) = rest.split_at(rest.len().min(usize::from(*header_len)));
    frame.put_slice(b"KV");
    frame.put_slice(&[*kind, 0]);
    frame.put_u16_le(header.len() as u16);
    frame.put_u32_le(payload.len() as u32);
    frame.put_slice(header);
    let crc = crc32fast::hash(&frame);
    frame.put_u32_le(crc);
    frame.put_slice(payload);
    frame
}
