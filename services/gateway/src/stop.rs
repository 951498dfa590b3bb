//! Stop strings: where visible text ends, found while it streams in pieces.

/// Watches a growing text for the first occurrence of any of several strings and gives out only what can no longer be
/// part of one.
///
/// The text is cut before the occurrence that *starts* first; the stop string itself is never given out. The outcome
/// does not depend on how the text is cut into pieces.
#[derive(Debug, Default)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// Not yet given out: it may be the beginning of a stop string.
    held: String,
    matched: bool,
}

impl StopMatcher {
    /// Watches for `stops`; empty strings match nothing.
    #[must_use]
    pub fn new(stops: &[String]) -> Self {
        Self {
            stops: stops.iter().filter(|stop| !stop.is_empty()).cloned().collect(),
            held: String::new(),
            matched: false,
        }
    }

    /// Takes the next piece; returns the text that is now certain. After a match everything is swallowed.
    pub fn push(&mut self, piece: &str) -> String {
        if self.matched {
            return String::new();
        }
        self.held.push_str(piece);
        let first = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        let certain = match first {
            // An earlier start may still be growing into a longer stop string: then wait for it.
            Some(found) => match self.growing_prefix_start() {
                Some(growing) if growing < found => growing,
                _ => {
                    self.matched = true;
                    found
                }
            },
            None => self.growing_prefix_start().unwrap_or(self.held.len()),
        };
        let rest = self.held.split_off(certain);
        let certain = std::mem::replace(&mut self.held, rest);
        if self.matched {
            self.held.clear();
        }
        certain
    }

    /// The text is over: returns what was held back.
    pub fn finish(&mut self) -> String {
        let held = std::mem::take(&mut self.held);
        // A complete stop string was held back only for the sake of an earlier one, which will not come any more.
        match self.stops.iter().filter_map(|stop| held.find(stop.as_str())).min() {
            Some(found) => {
                self.matched = true;
                held[..found].to_owned()
            }
            None => held,
        }
    }

    /// Whether a stop string was found.
    #[must_use]
    pub fn matched(&self) -> bool {
        self.matched
    }

    /// Start of the longest tail of `held` that is a proper prefix of a stop string.
    fn growing_prefix_start(&self) -> Option<usize> {
        let longest = self.stops.iter().map(String::len).max()?.saturating_sub(1);
        let from = self.held.len().saturating_sub(longest);
        (from..self.held.len()).filter(|start| self.held.is_char_boundary(*start)).find(|start| {
            let tail = &self.held[*start..];
            self.stops.iter().any(|stop| stop.len() > tail.len() && stop.starts_with(tail))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition: cut before the occurrence that starts first.
    fn reference(text: &str, stops: &[&str]) -> (String, bool) {
        match stops.iter().filter_map(|stop| text.find(stop)).min() {
            Some(found) => (text[..found].to_owned(), true),
            None => (text.to_owned(), false),
        }
    }

    #[test]
    fn every_cut_gives_what_the_definition_says() {
        let cases: &[(&str, &[&str])] = &[
            ("plain text", &[]),
            ("plain text", &["stop"]),
            ("one two three", &["two"]),
            ("two", &["two"]),
            ("ends with a prefix st", &["stop"]),
            ("aaab", &["aab"]),
            ("ababac", &["abac", "x"]),
            ("xabcy", &["abcd", "bc"]),
            ("xabcdy", &["abcd", "bc"]),
            ("Grüße, Welt", &["ß", "Welt"]),
            ("日本語\n\n続き", &["\n\n"]),
            ("a\n", &["\n\n"]),
        ];
        for (text, stops) in cases {
            let owned: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
            let (expected, matched) = reference(text, stops);
            let bounds: Vec<usize> = (0..=text.len()).filter(|at| text.is_char_boundary(*at)).collect();
            for first in &bounds {
                for second in bounds.iter().filter(|second| *second >= first) {
                    let mut matcher = StopMatcher::new(&owned);
                    let mut got = String::new();
                    for piece in [&text[..*first], &text[*first..*second], &text[*second..]] {
                        got += &matcher.push(piece);
                    }
                    got += &matcher.finish();
                    assert_eq!(
                        (got, matcher.matched()),
                        (expected.clone(), matched),
                        "{text:?} {stops:?} {first} {second}"
                    );
                }
            }
        }
    }

    #[test]
    fn holds_back_no_more_than_it_must() {
        let mut matcher = StopMatcher::new(&["END".to_owned()]);
        assert_eq!(matcher.push("text E"), "text ");
        assert_eq!(matcher.push("N"), "");
        assert_eq!(matcher.push("T"), "ENT");
        assert_eq!(matcher.push("END more"), "");
        assert!(matcher.matched());
        assert_eq!(matcher.push("swallowed"), "");
    }
}
