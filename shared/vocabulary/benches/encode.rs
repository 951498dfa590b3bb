//! Encoding with o200k_harmony on one core, warm. Bytes of text per second; the bars are 5 MB/s of prose, and under one second
//! for a megabyte that never lets a word end.
//!
//! `cargo bench -p vocabulary`

use std::sync::Arc;

use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use vocabulary::Vocabulary;

fn main() {
    let vocabulary = Vocabulary::o200k_harmony();
    assert_eq!(vocabulary.encode("assistant"), [173_781]);
    divan::main();
}

fn encode(bencher: Bencher<'_, '_>, text: &str) {
    let vocabulary: Arc<Vocabulary> = Vocabulary::o200k_harmony();
    bencher.counter(BytesCount::of_str(text)).bench(|| vocabulary.encode(black_box(text)));
}

/// Sentences of varied words, numbers, quotes and line breaks: 400 kB.
#[divan::bench(sample_count = 20)]
fn prose_400_kb(bencher: Bencher<'_, '_>) {
    encode(bencher, &prose(400_000));
}

#[divan::bench(sample_count = 5, args = ["a", "A", "xyzzy", " ", r"\n ", "é", "!", "7", "漢", "'s"])]
fn endless_1_mb(bencher: Bencher<'_, '_>, unit: &str) {
    let unit = unit.replace(r"\n", "\n");
    encode(bencher, &unit.repeat(1_000_000 / unit.len()));
}

/// Random letters without a space: tokens have no pattern to fall into.
#[divan::bench(sample_count = 5)]
fn random_letters_1_mb(bencher: Bencher<'_, '_>) {
    let mut state = 1;
    let text: String = (0..1_000_000).map(|_| char::from(b'a' + (next(&mut state) % 26) as u8)).collect();
    encode(bencher, &text);
}

fn prose(len: usize) -> String {
    const SYLLABLES: [&str; 24] = [
        "ka", "tion", "re", "ment", "the", "of", "in", "er", "str", "ing", "ly", "an", "o", "de", "ver", "si", "pro",
        "con", "able", "un", "th", "is", "ma", "é",
    ];
    let mut state = 7;
    let mut text = String::with_capacity(len + 64);
    while text.len() < len {
        match next(&mut state) % 40 {
            0 => text.push_str(".\n\n"),
            1 => text.push_str(", \"and so\" it's "),
            2 => text.push_str(&format!(" {}", next(&mut state) % 100_000)),
            _ => {
                text.push(' ');
                for _ in 0..=next(&mut state) % 3 {
                    text.push_str(SYLLABLES[next(&mut state) as usize % SYLLABLES.len()]);
                }
            }
        }
    }
    text
}

/// A linear congruential generator: the same text in every run.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}
