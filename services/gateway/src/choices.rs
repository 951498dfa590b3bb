//! What Chat Completions and Completions have in common: a response is a list of choices, each made of the pieces of one answer.

use format::chat::ChatFinish;
use serde::Serialize;
use vocabulary::Vocabulary;

use crate::turn::Piece;
use crate::usage::Cost;

/// Makes the chunks of one stream.
pub trait StreamWriter {
    /// The body of one event.
    type Chunk: Serialize;

    /// The chunks that come before all pieces.
    fn opening(&self) -> Vec<Self::Chunk>;

    /// A piece of answer `choice`.
    fn piece(&mut self, choice: u32, piece: &Piece) -> Self::Chunk;

    /// The last chunk of answer `choice`: why it ended.
    fn last(&self, choice: u32, reason: ChatFinish) -> Self::Chunk;

    /// The chunk after all answers, if usage was asked for.
    fn usage(&self, cost: Cost) -> Option<Self::Chunk>;
}

/// One answer of a whole body, folded from its pieces.
pub trait Fold: Default {
    /// Adds a piece, in the order of generation.
    fn push(&mut self, piece: &Piece, vocabulary: &Vocabulary);

    /// Ends the answer.
    fn finish(&mut self, reason: ChatFinish);
}
