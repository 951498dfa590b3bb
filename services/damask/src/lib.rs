//! The `damask` command line: every service and tool in one binary.
//!
//! Knows: arguments, child processes, exit codes. Must not know: how any service works; each is a library with `run`.
//! Start with [`cli::Command`], then `up` for how the four services are put together.

use std::process::ExitCode;

use clap::Parser;

mod chat;
mod cli;
mod config;
mod health;
mod serve;
mod sse;
mod stack;
mod supervisor;
mod up;

/// Exit code of wrong arguments or configuration: a restart would not help.
pub(crate) const EXIT_USAGE: i32 = 2;

/// Parses the arguments of the process and runs the command.
#[must_use]
pub fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    if let Err(error) = chassis::logs::init(cli.log_format, cli.log_level.as_deref()) {
        eprintln!("error: {error}");
        return ExitCode::from(EXIT_USAGE as u8);
    }
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // A progress bar may have left the cursor in its line.
            eprintln!("error: {error:#}");
            let usage = error.downcast_ref::<chassis::config::ConfigError>().is_some();
            ExitCode::from(if usage { EXIT_USAGE as u8 } else { 1 })
        }
    }
}
