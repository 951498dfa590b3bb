//! Grammars over tokens: which tokens may come next.
//!
//! Knows: vocabularies, and grammars in llguidance's variant of the Lark notation. Must not know: what a grammar is for
//! (channels, tools and schemas are the chat format's), requests, engines, threads.
//!
//! Start with [`Compiler`], one a vocabulary; [`Compiler::compile`] makes a [`Matcher`], one a sequence, which says the mask
//! for the next token and is told each token that came.

mod matcher;
mod trie;

use std::sync::Arc;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher as Parser, ParserFactory};
use types::{Constraint, TokenId, TokenMask};
use vocabulary::Vocabulary;

pub use matcher::{ConstraintBroken, Matcher};

/// Bounds on what one grammar may cost. A grammar beyond them is refused when it is compiled, or breaks while it is followed.
fn limits() -> ParserLimits {
    ParserLimits {
        // 2 kB each at most: 50 MB for the most intricate grammar.
        max_lexer_states: 25_000,
        // Errors go to clients: what is wrong, without a dump of the parser.
        verbose_errors: false,
        // 10 ms to compile a wide schema; a few hundred at the library's own limit.
        max_grammar_size: 50_000,
        // Work for one mask: about 10 ms at the worst. The other defaults bound compilation to some 20 ms.
        step_lexer_fuel: 140_000,
        ..ParserLimits::default()
    }
}

/// Stack of a thread that compiles grammars, follows them or drops them. The grammar library walks groups, templates and chains of rules and of
/// references by recursion, without a bound of its own: two bytes of text may cost 700 bytes of stack, and a stack that
/// overflows ends the process. This holds any grammar of [`Constraint::BYTES_MAX`] twice over; only what is used of it
/// takes memory.
pub const STACK_BYTES: usize = 512 << 20;

/// Text that stretches over any character: reasoning. Masks of such places come from a table instead of a walk over all tokens.
const ANY_TEXT: &str = r"(?s:.+)";

/// Turns grammars into matchers over one vocabulary. Immutable; shared by all sequences.
pub struct Compiler {
    factory: ParserFactory,
    /// Numbers that stand for a token.
    usable: Arc<TokenMask>,
}

/// A grammar that cannot be used: malformed, contradictory, or beyond the limits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct InvalidGrammar {
    /// What is wrong and where, as far as the grammar library tells.
    pub reason: String,
}

impl Compiler {
    /// Indexes the vocabulary. Takes a few milliseconds for 2,000 tokens and half a second for 200,000: once, off the runtime.
    ///
    /// # Panics
    /// If the built-in expressions for common text do not compile, which a test would have found.
    #[must_use]
    pub fn new(vocabulary: Arc<Vocabulary>) -> Self {
        let (environment, usable) = trie::environment(vocabulary);
        let mut slices = SlicedBiasComputer::general_slices();
        slices.push(ANY_TEXT.to_owned());
        let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)
            .expect("the expressions for common text compile over any vocabulary");
        factory.quiet();
        *factory.limits_mut() = limits();
        Self { factory, usable: Arc::new(usable) }
    }

    /// Compiles a grammar: 0.2 to 2 ms for common schemas; a long regular expression may take seconds. A grammar that may be anything needs a
    /// thread with a stack of [`STACK_BYTES`]. `stop_token_ids` end the sequence where the grammar may end.
    ///
    /// # Errors
    /// [`InvalidGrammar`].
    pub fn compile(&self, constraint: &Constraint, stop_token_ids: &[TokenId]) -> Result<Matcher, InvalidGrammar> {
        let grammar = TopLevelGrammar::from_lark(constraint.lark.as_ref().to_owned());
        let parser = Parser::new(self.factory.create_parser(grammar));
        match parser.get_error() {
            None => Ok(Matcher::new(parser, Arc::clone(&self.usable), stop_token_ids)),
            Some(error) => Err(InvalidGrammar { reason: first_words(&error) }),
        }
    }
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiler").finish_non_exhaustive()
    }
}

/// Longest message passed on.
const MESSAGE_BYTES_MAX: usize = 300;

/// The message of the grammar library without its appendices: a dump of the parser, and the line of the grammar, which may be a schema of
/// any length.
fn first_words(error: &str) -> String {
    let mut lines = error.lines();
    let mut message = lines.next().unwrap_or_default().to_owned();
    let is_appendix = |line: &str| {
        let line = line.trim_start();
        line.starts_with('<') || line.trim_start_matches(|c: char| c.is_ascii_digit()).starts_with(" | ")
    };
    for line in lines.take_while(|line| !is_appendix(line)) {
        message.push(' ');
        message.push_str(line.trim());
    }
    if message.len() > MESSAGE_BYTES_MAX {
        message.truncate(message.floor_char_boundary(MESSAGE_BYTES_MAX));
        message.push('…');
    }
    message
}
