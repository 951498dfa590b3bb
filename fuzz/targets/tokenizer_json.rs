//! Any file: a vocabulary or an error, and a vocabulary reads back what it writes.

#![no_main]

use libfuzzer_sys::fuzz_target;
use vocabulary::Vocabulary;

fuzz_target!(|input: &[u8]| {
    let Ok(vocabulary) = Vocabulary::from_tokenizer_json(input) else { return };
    let text = String::from_utf8_lossy(input);
    let tokens = vocabulary.encode(&text);
    assert!(tokens.iter().all(|token| *token < vocabulary.size()), "{tokens:?}");
    assert_eq!(vocabulary.decode(&tokens), text);
});
