//! Text out of bytes that arrive in pieces.

/// Decodes UTF-8 that arrives in pieces: gives out whole characters only, and for each maximal broken sequence one U+FFFD.
/// What comes out in total does not depend on the pieces.
#[derive(Debug, Default)]
pub struct Utf8Decoder {
    /// The beginning of a character, at most three bytes between calls.
    pending: Vec<u8>,
}

impl Utf8Decoder {
    /// Appends the characters that `bytes` complete.
    pub fn push(&mut self, bytes: &[u8], text: &mut String) {
        if self.pending.is_empty()
            && let Ok(valid) = std::str::from_utf8(bytes)
        {
            text.push_str(valid);
            return;
        }
        self.pending.extend_from_slice(bytes);
        let mut kept = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            kept += chunk.valid().len();
            let broken = chunk.invalid();
            if broken.is_empty() {
                continue;
            }
            let at_end = kept + broken.len() == self.pending.len();
            if at_end && std::str::from_utf8(broken).is_err_and(|error| error.error_len().is_none()) {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            kept += broken.len();
        }
        self.pending.drain(..kept);
    }

    /// The bytes end here: what is pending is broken.
    pub fn finish(&mut self, text: &mut String) {
        if !self.pending.is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
            self.pending.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Utf8Decoder;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn pieces_give_what_the_whole_gives(bytes in byte_soup(), cuts in proptest::collection::vec(1_usize..5, 1..40)) {
            let mut decoder = Utf8Decoder::default();
            let mut text = String::new();
            let mut rest = bytes.as_slice();
            for cut in cuts.iter().cycle() {
                if rest.is_empty() { break }
                let (piece, tail) = rest.split_at((*cut).min(rest.len()));
                decoder.push(piece, &mut text);
                rest = tail;
            }
            decoder.finish(&mut text);
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }

    /// Characters of every length, with single bytes of such characters strewn in.
    fn byte_soup() -> impl Strategy<Value = Vec<u8>> {
        let character = prop_oneof![any::<char>().prop_map(|c| c.to_string().into_bytes()), Just("👩‍👧".into())];
        let broken = prop_oneof![0x80_u8..=0xff, any::<u8>()].prop_map(|byte| vec![byte]);
        proptest::collection::vec(prop_oneof![character, broken], 0..30).prop_map(|parts| parts.concat())
    }
}
