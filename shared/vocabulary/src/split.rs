//! The pre-tokenizer of o200k: cuts text into pieces, over whose borders no token reaches.

use std::sync::LazyLock;

use regex_automata::meta::Regex;
use regex_automata::{Anchored, Input};

/// All alternatives of the pattern but the last two, as they stand in tokenizer.json.
const WORDS: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+",
);

/// The last two alternatives: a run of white space, without its last character if a word follows.
const WHITE_SPACE: &str = r"|\s+(?!\S)|\s+";

/// The number of the pattern in [`SPLIT`] whose last character belongs to the next piece.
const SPACE_BEFORE_WORD: usize = 1;

/// The same without look-ahead, which a linear-time engine does not have: `\s+(?!\S)` is a run up to the end of the text, or
/// else a run less its last character.
static SPLIT: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new_many(&[&format!(r"{WORDS}|\s+$"), r"\s+\s", r"\s+"])
        .expect("the patterns are constant, and every test encodes text")
});

/// Whether `pattern` is the split pattern that [`pieces`] carries out.
pub(super) fn is_o200k_pattern(pattern: &str) -> bool {
    pattern.strip_prefix(WORDS) == Some(WHITE_SPACE)
}

/// Calls `each` with the pieces of `text`, in order; together they are the text. Linear in its length.
pub(super) fn pieces<'t>(text: &'t str, mut each: impl FnMut(&'t str)) {
    let mut start = 0;
    while start < text.len() {
        let rest = &text[start..];
        let input = Input::new(rest).anchored(Anchored::Yes);
        let end = match SPLIT.search_half(&input) {
            Some(found) if found.pattern().as_usize() == SPACE_BEFORE_WORD => {
                let last = rest[..found.offset()].chars().next_back().map_or(0, char::len_utf8);
                found.offset() - last
            }
            Some(found) => found.offset(),
            // Every character begins some alternative, so this is not reached; if it were, no text would be lost.
            None => rest.len(),
        };
        each(&rest[..end]);
        start += end;
    }
}

#[cfg(test)]
mod tests {
    use super::pieces;

    fn split(text: &str) -> Vec<&str> {
        let mut all = Vec::new();
        pieces(text, |piece| all.push(piece));
        all
    }

    #[test]
    fn white_space_before_a_word_keeps_its_last_character_for_it() {
        assert_eq!(split("a   b"), ["a", "  ", " b"]);
        assert_eq!(split("a \t\u{3000}7"), ["a", " \t", "\u{3000}", "7"]);
        assert_eq!(split("a  "), ["a", "  "]);
        assert_eq!(split(" \n\n  x"), [" \n\n", " ", " x"]);
    }

    #[test]
    fn contractions_numbers_and_signs() {
        assert_eq!(split("It'S 12345, ok?!\n"), ["It'S", " ", "123", "45", ",", " ok", "?!\n"]);
        assert_eq!(split("camelCase HTTPServer"), ["camel", "Case", " HTTPServer"]);
    }
}
