//! Conversations to tokens and back: the ChatFormat plug-in, Harmony, the vocabulary.
