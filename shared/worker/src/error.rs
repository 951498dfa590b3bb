//! What ends a worker.

use std::io;

use chassis::net::Address;
use chassis::tasks::TaskFailure;
use model::CheckpointError;

use crate::step_loop::StepLoopFailure;

/// Why a worker cannot start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// A socket cannot be bound.
    #[error("cannot listen on {address} for {purpose}")]
    Listen {
        /// The address.
        address: Address,
        /// What for: `grpc`, `admin`, `kv`.
        purpose: &'static str,
        /// What the system says.
        #[source]
        cause: io::Error,
    },
    /// The checkpoint is missing or damaged.
    #[error("cannot open the model")]
    Checkpoint(#[from] CheckpointError),
    /// The checkpoint's tokenizer.json cannot be used.
    #[error("cannot read the vocabulary: {0}")]
    Vocabulary(String),
    /// The engine cannot be built.
    #[error("cannot build the engine")]
    Engine(#[from] engine::EngineError),
    /// The config does not fit the model.
    #[error("config does not fit the model: {0}")]
    Config(String),
    /// A device refuses what a KV transfer needs of it.
    #[error("cannot prepare the kv data path")]
    DataPath(#[from] transfer::data::DataError),
    /// A bug.
    #[error("thread {0} panicked")]
    Panicked(&'static str),
    /// The step loop ended by itself: the engine is broken.
    #[error("step loop failed")]
    StepLoop(#[from] StepLoopFailure),
    /// A server or a background task ended by itself.
    #[error(transparent)]
    Task(#[from] TaskFailure),
}
