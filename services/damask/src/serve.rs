//! One service in this process: load its config, run it, drain it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use chassis::config;
use chassis::net::{Network, TcpNetwork, inherited::Inherited};
use chassis::shutdown::{Shutdown, run_with_signals};
use clap::ValueEnum;

use crate::supervisor::SUPERVISED;

/// The four services.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Role {
    /// HTTP and text.
    Gateway,
    /// The life of requests.
    Router,
    /// Prompts.
    Prefill,
    /// Generation.
    Decode,
}

impl Role {
    /// Subcommand, config section and log name.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Gateway => "gateway",
            Self::Router => "router",
            Self::Prefill => types::Role::Prefill.name(),
            Self::Decode => types::Role::Decode.name(),
        }
    }
}

/// Runs the service until it is told to end; then running requests have `grace` to finish.
///
/// # Errors
/// A config that is refused, a port that is taken, or what ended the service.
pub(crate) async fn serve(role: Role, file: &Path, grace: Duration) -> anyhow::Result<()> {
    let network: Arc<dyn Network> = Arc::new(TcpNetwork::new(Inherited::from_env()?));
    let shutdown = Shutdown::new();
    if std::env::var_os(SUPERVISED).is_some() {
        drain_when_stdin_ends(shutdown.clone(), grace);
    }
    let name = role.name();
    let orders = shutdown.clone();
    match role {
        Role::Gateway => {
            run_with_signals(orders, grace, gateway::run(config::load(file, name)?, network, shutdown)).await??
        }
        Role::Router => {
            run_with_signals(orders, grace, router::run(config::load(file, name)?, network, shutdown)).await??
        }
        Role::Prefill => {
            run_with_signals(orders, grace, prefill::run(config::load(file, name)?, network, shutdown)).await??
        }
        Role::Decode => {
            run_with_signals(orders, grace, decode::run(config::load(file, name)?, network, shutdown)).await??
        }
    }
    Ok(())
}

/// The supervisor holds the other end: it closes it to drain this process, and its own death closes it too.
fn drain_when_stdin_ends(shutdown: Shutdown, grace: Duration) {
    when_stdin_ends(move || {
        shutdown.begin_drain();
        std::thread::sleep(grace);
        shutdown.begin_stop();
    });
}

/// Calls `then` once standard input is at its end. On a plain thread, since a read cannot be given up and must not keep the runtime from ending.
pub(crate) fn when_stdin_ends(then: impl FnOnce() + Send + 'static) {
    std::thread::spawn(move || {
        // An input that breaks has ended as well.
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        then();
    });
}
