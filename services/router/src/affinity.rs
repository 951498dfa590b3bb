//! Which prefill worker has probably computed the beginning of a prompt before, and so need not compute it again.
//!
//! A guess by what was sent where: workers do not say what they still have, and may have let it go. A wrong guess costs the time of computing
//! what was hoped to be there, so the index may be coarse and forgetful.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hasher as _};
use std::sync::Arc;

use types::{GenerateRequest, TokenId};

use crate::fleet::WorkerNo;

/// Beginnings of prompts are told apart at multiples of this many tokens.
pub const STRIDE: usize = 256;

/// Beginnings that are remembered, of all workers together; at [`STRIDE`] tokens each this is 16 million tokens, in some 6 MB.
const REMEMBERED_MAX: usize = 1 << 16;

/// The beginnings of a prompt: a hash for each [`STRIDE`] tokens, of everything up to there. Whose cached prompts the request may share is
/// part of it. Two that are equal by chance lead to a wrong guess and nothing else.
#[derive(Debug, Clone)]
pub struct Beginnings(Arc<[u64]>);

impl Beginnings {
    /// Of what prefill computes for a request: its prompt and the tokens generated so far.
    #[must_use]
    pub fn of(request: &GenerateRequest) -> Self {
        let salt = request.cache_salt.as_ref().map_or(&[][..], |salt| salt.as_bytes());
        Self::of_tokens(salt, request.prompt.iter().chain(&request.generated))
    }

    pub(crate) fn of_tokens<'a>(salt: &[u8], tokens: impl Iterator<Item = &'a TokenId>) -> Self {
        let mut hasher = DefaultHasher::new();
        hasher.write(salt);
        let mut hashes = Vec::new();
        for (idx, token) in tokens.enumerate() {
            hasher.write_u32(*token);
            if (idx + 1) % STRIDE == 0 {
                hashes.push(hasher.finish());
            }
        }
        Self(hashes.into())
    }
}

/// The beginnings of prompts that were sent to workers lately.
#[derive(Debug)]
pub struct Affinity {
    remembered_max: usize,
    /// When it was last sent, as a count of [`Self::note`].
    sent: HashMap<(u64, WorkerNo), u64>,
    /// The same, the oldest first.
    by_age: BTreeMap<u64, (u64, WorkerNo)>,
    next: u64,
}

impl Default for Affinity {
    fn default() -> Self {
        Self::new(REMEMBERED_MAX)
    }
}

impl Affinity {
    fn new(remembered_max: usize) -> Self {
        Self { remembered_max, sent: HashMap::new(), by_age: BTreeMap::new(), next: 0 }
    }

    /// A prompt with these beginnings goes to `worker`.
    pub fn note(&mut self, beginnings: &Beginnings, worker: WorkerNo) {
        // The longest is the oldest then, and the first to be forgotten: without what comes before it, it would be of no use.
        for hash in beginnings.0.iter().rev() {
            let key = (*hash, worker);
            if let Some(earlier) = self.sent.insert(key, self.next) {
                self.by_age.remove(&earlier);
            }
            self.by_age.insert(self.next, key);
            self.next += 1;
        }
        while self.sent.len() > self.remembered_max {
            let Some((_, oldest)) = self.by_age.pop_first() else { break };
            self.sent.remove(&oldest);
        }
    }

    /// Tokens at the beginning of a prompt that `worker` has computed before, as far as is remembered.
    #[must_use]
    pub fn known_tokens(&self, beginnings: &Beginnings, worker: WorkerNo) -> u64 {
        let known = beginnings.0.iter().take_while(|hash| self.sent.contains_key(&(**hash, worker)));
        (known.count() * STRIDE) as u64
    }

    /// The worker is gone, and what it had computed with it.
    pub fn forget(&mut self, worker: WorkerNo) {
        self.sent.retain(|(_, of), _| *of != worker);
        self.by_age.retain(|_, (_, of)| *of != worker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: WorkerNo = WorkerNo::for_test(1);
    const TWO: WorkerNo = WorkerNo::for_test(2);

    fn beginnings(salt: &[u8], tokens: &[TokenId]) -> Beginnings {
        Beginnings::of_tokens(salt, tokens.iter())
    }

    fn prompt(len: usize) -> Vec<TokenId> {
        (0..len as TokenId).map(|token| token % 97).collect()
    }

    #[test]
    fn the_common_beginning_is_found_in_whole_strides() {
        let mut affinity = Affinity::new(100);
        let first = prompt(4 * STRIDE + 5);
        affinity.note(&beginnings(b"", &first), ONE);
        let mut parts = first.clone();
        parts[3 * STRIDE] += 1;
        let cases = [
            ("the same again", first.clone(), 4 * STRIDE),
            ("a longer one", [first.clone(), prompt(9 * STRIDE)].concat(), 4 * STRIDE),
            ("a shorter one", first[..2 * STRIDE + 1].to_vec(), 2 * STRIDE),
            ("one that parts in the fourth stride", parts, 3 * STRIDE),
            ("one that differs from the start", first[1..].to_vec(), 0),
            ("less than a stride", first[..STRIDE - 1].to_vec(), 0),
        ];
        for (name, tokens, want) in cases {
            assert_eq!(affinity.known_tokens(&beginnings(b"", &tokens), ONE), want as u64, "{name}");
            assert_eq!(affinity.known_tokens(&beginnings(b"", &tokens), TWO), 0, "{name}: another worker");
            assert_eq!(affinity.known_tokens(&beginnings(b"salt", &tokens), ONE), 0, "{name}: another salt");
        }
    }

    #[test]
    fn a_lost_worker_is_forgotten() {
        let mut affinity = Affinity::new(100);
        let known = beginnings(b"", &prompt(2 * STRIDE));
        affinity.note(&known, ONE);
        affinity.note(&known, TWO);
        affinity.forget(ONE);
        assert_eq!((affinity.known_tokens(&known, ONE), affinity.known_tokens(&known, TWO)), (0, 2 * STRIDE as u64));
        assert_eq!((affinity.sent.len(), affinity.by_age.len()), (2, 2));
    }

    #[test]
    fn the_oldest_is_forgotten_first_and_the_end_of_a_prompt_before_its_beginning() {
        let mut affinity = Affinity::new(6);
        let [old, young] = [1, 2].map(|first| beginnings(b"", &[&[first], &prompt(4 * STRIDE)[..]].concat()));
        affinity.note(&old, ONE);
        affinity.note(&young, ONE);
        assert_eq!(affinity.known_tokens(&young, ONE), 4 * STRIDE as u64);
        assert_eq!(affinity.known_tokens(&old, ONE), 2 * STRIDE as u64, "its end had to go");
        affinity.note(&old, ONE);
        assert_eq!(affinity.known_tokens(&old, ONE), 4 * STRIDE as u64);
        assert_eq!(affinity.known_tokens(&young, ONE), 2 * STRIDE as u64, "what was sent again is young again");
        assert_eq!((affinity.sent.len(), affinity.by_age.len()), (6, 6));
    }
}
