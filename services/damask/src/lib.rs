//! The `damask` command line: every service and tool in one binary.
//!
//! Knows: arguments, child processes, exit codes. Must not know: how any service works; each is a library with `run`.
//! Start with [`cli::Command`], then `up` for how the four services are put together.

use std::io::Write;
use std::process::ExitCode;

use chassis::logs::LogFormat;
use chassis::traces::Traces;
use clap::Parser;
use tokio::runtime::Runtime;

mod bench;
mod chat;
mod cli;
mod config;
mod convert;
mod doctor;
mod fleet;
mod health;
mod node;
mod placement;
mod plan;
mod refusal;
mod serve;
mod sse;
mod stack;
mod stack_config;
mod supervisor;
mod sweep;
mod up;

/// Exit code of wrong arguments or configuration: a restart would not help.
pub(crate) const EXIT_USAGE: i32 = 2;

/// Parses the arguments of the process and runs the command.
#[must_use]
pub fn main() -> ExitCode {
    // First of all, while there is one thread. What it could fail for, NCCL's own start refuses with the same words.
    let _ = device::nccl::forbid_multicast();
    let cli = cli::Cli::parse();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: cannot start the async runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let traces = match observe(&cli, &runtime) {
        Ok(traces) => traces,
        Err(error) => {
            eprintln!("error: {error:#}");
            return ExitCode::from(EXIT_USAGE as u8);
        }
    };
    // Each connection takes a descriptor, and the usual soft limit of 1024 would be the first to be reached. Where raising it is forbidden, it
    // stays: then too many connections are refused.
    if let Err(error) = rlimit::increase_nofile_limit(u64::MAX) {
        tracing::debug!(%error, "the limit on open files stays as it is");
    }
    let format = cli.log_format;
    let outcome = cli.run(&runtime);
    if let Some(traces) = traces {
        traces.finish();
    }
    let code = match outcome {
        Ok(()) => 0,
        // Whoever reads standard output has seen enough, as in `damask chat ... | head`.
        Err(error) if is_broken_pipe(&error) => 0,
        Err(error) => {
            match format {
                // In one piece, since the services of a stack share standard error.
                LogFormat::Text => drop(std::io::stderr().write_all(format!("error: {error:#}\n").as_bytes())),
                LogFormat::Json => tracing::error!(error = format!("{error:#}"), "failed"),
            }
            if is_usage(&error) { EXIT_USAGE as u8 } else { 1 }
        }
    };
    // Told to end while a model was loading, say. Logs are written line by line, and the last spans have been sent.
    if device::was_work_given_up() {
        device::leave(code);
    }
    ExitCode::from(code)
}

/// Starts the log; and for a service, the sending of spans where a collector is named.
fn observe(cli: &cli::Cli, runtime: &Runtime) -> anyhow::Result<Option<Traces>> {
    let _entered = runtime.enter();
    let traces = cli.collector().map(|collector| Traces::start(&collector)).transpose()?;
    chassis::logs::init(cli.log_format, cli.log_level.as_deref(), traces.as_ref())?;
    Ok(traces)
}

/// Whether the configuration is at fault: the file itself, or that it does not fit the model.
fn is_usage(error: &anyhow::Error) -> bool {
    error.is::<chassis::config::ConfigError>()
        || error.is::<supervisor::Refused>()
        || error.downcast_ref().is_some_and(|error| matches!(error, worker::WorkerError::Config(_)))
}

/// Whether writing an answer failed for want of a reader.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
