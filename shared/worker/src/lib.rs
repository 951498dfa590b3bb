//! What prefill and decode workers share.
//!
//! Knows: how a model becomes a running engine, how a scheduler and an engine are driven step by step, and how a worker tells the truth about
//! itself. Must not know: what a step is for; that is the business of the `Turn` that each role brings.
//!
//! Start with [`step_loop`]: the thread (or, in simulations, the task) around a synchronous `turn`.

pub mod backend;
pub mod config;
mod data_path;
pub mod error;
pub mod link;
pub mod masks;
pub mod metrics;
pub mod model_load;
pub mod runtime;
pub mod service;
pub mod status;
pub mod step_loop;

pub use backend::Backend;
pub use config::{EngineConfig, ModelSource, NumericsConfig, StepLoopConfig, WeightsConfig};
pub use error::WorkerError;
pub use link::{NetworkConnector, advertised, serve_kv};
pub use masks::{MaskThreads, Opening};
pub use metrics::{TailTimes, WorkerMetrics};
pub use model_load::{LoadedModel, OpenModel, PagesWanted};
pub use runtime::Runtime;
pub use service::WorkerService;
pub use status::{LoadReport, Status};
pub use step_loop::{Clock, Driver, LoopEnded, Mailbox, Next, StepLoop, StepLoopFailure, Turn};
