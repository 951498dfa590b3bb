//! One sequence's way through its grammar.

use std::sync::Arc;

use llguidance::Matcher as Parser;
use types::{TokenId, TokenMask};

use crate::first_words;

/// Follows a grammar token by token. Once it has yielded an error it yields it for ever.
pub struct Matcher {
    parser: Parser,
    usable: Arc<TokenMask>,
    stop_token_ids: Vec<TokenId>,
    /// The sequence ended with a stop token that the grammar does not name itself.
    ended: bool,
}

/// The grammar cannot be followed any further.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintBroken {
    /// A token came that the grammar forbids at this place.
    #[error("token {token} is not what the grammar allows: {reason}")]
    Token {
        /// The token.
        token: TokenId,
        /// What the grammar library says.
        reason: String,
    },
    /// Nothing may follow, not even the end; or following the grammar goes beyond the limits.
    #[error("the grammar allows no token here: {0}")]
    NoToken(String),
    /// More tokens were to be taken back than have come.
    #[error("cannot take back {tokens} tokens: {reason}")]
    Rollback {
        /// How many.
        tokens: usize,
        /// What the grammar library says.
        reason: String,
    },
}

impl Matcher {
    pub(crate) fn new(parser: Parser, usable: Arc<TokenMask>, stop_token_ids: &[TokenId]) -> Self {
        let stop_token_ids = stop_token_ids.iter().copied().filter(|token| usable.allows(*token)).collect();
        Self { parser, usable, stop_token_ids, ended: false }
    }

    /// Which tokens may come next. Where the grammar may end the stop tokens are among them, where it must end they are all.
    ///
    /// # Errors
    /// [`ConstraintBroken::NoToken`].
    pub fn mask(&mut self) -> Result<TokenMask, ConstraintBroken> {
        let no_token = |reason: &str| ConstraintBroken::NoToken(first_words(reason));
        let mut may_end = self.is_finished();
        let mut words: Box<[u32]> = if may_end {
            self.usable.words().iter().map(|_| 0).collect()
        } else {
            let allowed = self.parser.compute_mask().map_err(|error| no_token(&error.to_string()))?;
            may_end = self.parser.is_accepting().map_err(|error| no_token(&error.to_string()))?;
            self.usable.words().iter().zip(allowed.as_slice()).map(|(usable, allowed)| usable & allowed).collect()
        };
        if may_end {
            self.stop_token_ids.iter().for_each(|token| words[*token as usize / 32] |= 1 << (token % 32));
        }
        if words.iter().all(|word| *word == 0) {
            return Err(no_token("it is at its end, and the sequence has no stop token"));
        }
        Ok(TokenMask::from_words(words))
    }

    /// Takes in tokens that came. After an interruption the tokens generated so far restore the state.
    ///
    /// # Errors
    /// [`ConstraintBroken::Token`].
    pub fn consume(&mut self, tokens: &[TokenId]) -> Result<(), ConstraintBroken> {
        for token in tokens {
            let broken = |reason: &str| ConstraintBroken::Token { token: *token, reason: first_words(reason) };
            if self.ended {
                return Err(broken("the sequence has ended"));
            }
            // A stop token that the grammar names is the grammar's; any other ends the sequence where the grammar may end.
            let is_foreign_stop = self.stop_token_ids.contains(token)
                && (self.is_finished()
                    || self.parser.validate_tokens(&[*token]).map_err(|error| broken(&error.to_string()))? == 0);
            if is_foreign_stop {
                let may_end = self.is_finished() || self.parser.is_accepting().unwrap_or(false);
                if !may_end {
                    return Err(broken("it ends the sequence before the grammar does"));
                }
                self.ended = true;
            } else {
                self.parser.consume_token(*token).map_err(|error| broken(&error.to_string()))?;
            }
        }
        Ok(())
    }

    /// Takes back the last `tokens` tokens: drafts that were rejected.
    ///
    /// # Errors
    /// [`ConstraintBroken::Rollback`].
    pub fn rollback(&mut self, mut tokens: usize) -> Result<(), ConstraintBroken> {
        if tokens > 0 && std::mem::take(&mut self.ended) {
            tokens -= 1;
        }
        let taken_back = self.parser.rollback(tokens);
        taken_back.map_err(|error| ConstraintBroken::Rollback { tokens, reason: first_words(&error.to_string()) })
    }

    /// Whether nothing but the end may follow.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.ended || self.parser.is_stopped() && !self.parser.is_error()
    }
}
