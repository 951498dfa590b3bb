//! Reads server-sent events out of a byte stream, however it is cut into pieces.

/// Collects bytes and yields the `data` of each complete event.
///
/// Source: the event stream interpretation of the HTML standard, section 9.2.6, for streams that use only `data` and comments.
#[derive(Default)]
pub(crate) struct EventStream {
    line: Vec<u8>,
    data: Vec<String>,
}

impl EventStream {
    /// Takes the next bytes and appends the data of every event that they complete.
    pub(crate) fn push(&mut self, bytes: &[u8], events: &mut Vec<String>) {
        for &byte in bytes {
            if byte != b'\n' {
                self.line.push(byte);
                continue;
            }
            let line = std::mem::take(&mut self.line);
            let line = line.strip_suffix(b"\r").unwrap_or(&line);
            if line.is_empty() {
                if !self.data.is_empty() {
                    events.push(std::mem::take(&mut self.data).join("\n"));
                }
            } else if let Some(data) = line.strip_prefix(b"data:") {
                let data = data.strip_prefix(b" ").unwrap_or(data);
                self.data.push(String::from_utf8_lossy(data).into_owned());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::EventStream;

    fn events(pieces: &[&[u8]]) -> Vec<String> {
        let mut stream = EventStream::default();
        let mut events = Vec::new();
        for piece in pieces {
            stream.push(piece, &mut events);
        }
        events
    }

    #[test]
    fn events_are_the_same_however_the_bytes_are_cut() {
        let bytes = "data: {\"a\":1}\r\n\r\n: keep-alive\n\ndata:two\ndata: lines\n\ndata: naïve\n\ndata: [DONE]\n\n"
            .as_bytes();
        let whole = events(&[bytes]);
        assert_eq!(whole, ["{\"a\":1}", "two\nlines", "naïve", "[DONE]"]);
        for cut in 0..bytes.len() {
            assert_eq!(events(&[&bytes[..cut], &bytes[cut..]]), whole, "cut at {cut}");
        }
    }

    #[test]
    fn an_event_without_its_blank_line_is_not_delivered() {
        assert!(events(&[b"data: half\n"]).is_empty());
    }
}
