//! The vocabulary as the grammar library sees it.

use std::sync::Arc;

use llguidance::toktrie::{INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};
use types::{TokenId, TokenMask};
use vocabulary::Vocabulary;

struct Environment {
    trie: TokTrie,
    vocabulary: Arc<Vocabulary>,
}

/// Tokens by their bytes, special ones by a marker and their name; and which numbers stand for a token at all.
///
/// No token is called the end of a text: which tokens end a sequence is the request's business, and a grammar names those that it means.
pub(crate) fn environment(vocabulary: Arc<Vocabulary>) -> (TokEnv, TokenMask) {
    let words: Vec<Vec<u8>> = (0..vocabulary.size()).map(|token| word(&vocabulary, token)).collect();
    let bit = |(bit, word): (usize, &Vec<u8>)| u32::from(!word.is_empty()) << bit;
    let usable = words.chunks(32).map(|words| words.iter().enumerate().map(bit).sum()).collect();
    let trie = TokTrie::from(&TokRxInfo::new(vocabulary.size(), INVALID_TOKEN), &words);
    (Arc::new(Environment { trie, vocabulary }), TokenMask::from_words(usable))
}

fn word(vocabulary: &Vocabulary, token: TokenId) -> Vec<u8> {
    if let Some(bytes) = vocabulary.token_bytes(token) {
        return bytes.to_vec();
    }
    let name = vocabulary.special_name(token).map(str::as_bytes);
    name.map(|name| [&[TokTrie::SPECIAL_TOKEN_MARKER], name].concat()).unwrap_or_default()
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| self.vocabulary.encode(text))
    }
}
