//! Arguments.

use std::path::PathBuf;
use std::time::Duration;

use chassis::logs::LogFormat;
use chassis::traces::Collector;
use clap::{Args, Parser, Subcommand};
use tokio::runtime::Runtime;

use crate::bench::BenchArgs;
use crate::chat::ChatArgs;
use crate::config::ConfigCommand;
use crate::convert::ConvertArgs;
use crate::doctor::DoctorArgs;
use crate::health::HealthArgs;
use crate::node::NodeArgs;
use crate::plan::PlanArgs;
use crate::serve::Role;
use crate::sweep::SweepArgs;
use crate::up::UpArgs;

/// Serve gpt-oss with separate prefill and decode.
#[derive(Debug, Parser)]
#[command(name = "damask", version)]
pub(crate) struct Cli {
    /// Form of the log on standard error: text or json.
    #[arg(long, global = true, default_value = "text")]
    pub(crate) log_format: LogFormat,
    /// Level or filter of the log, such as debug or info,router=trace; wins over RUST_LOG [default: info; chat: error].
    #[arg(long, global = true)]
    pub(crate) log_level: Option<String>,
    /// Seconds that running requests may take to finish once draining began; what remains then is cut.
    #[arg(long, global = true, default_value_t = 20, env = "DAMASK_DRAIN_GRACE_S", value_parser = clap::value_parser!(u64).range(..=86_400))]
    drain_grace_s: u64,
    /// OpenTelemetry collector that the services send their spans to, over gRPC: http://host:4317 [default: none].
    #[arg(long, global = true, env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    otlp_endpoint: Option<String>,
    #[command(subcommand)]
    command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the gateway: OpenAI-compatible API in front of a router.
    Gateway(ServeArgs),
    /// Run the router: tokens in, tokens out.
    Router(ServeArgs),
    /// Run a prefill worker.
    Prefill(ServeArgs),
    /// Run a decode worker.
    Decode(ServeArgs),
    /// Run the whole stack on this machine: all four services as child processes.
    Up(UpArgs),
    /// Run the workers of one node as child processes, for one container that owns all GPUs.
    Node(NodeArgs),
    /// Ask one question.
    Chat(ChatArgs),
    /// Load a running gateway over HTTP and measure what its clients see.
    Bench(BenchArgs),
    /// Measure the engine on the GPUs: prefill by prompt length, decode steps by batch and context.
    Sweep(SweepArgs),
    /// Compute $ per million tokens of each layout from sweeps.
    Plan(PlanArgs),
    /// Check or print a service's configuration.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Write an FP8 checkpoint from a released one.
    Convert(ConvertArgs),
    /// Ask a service's admin port how it is; exit code 0 if well.
    Health(HealthArgs),
    /// Look at driver, GPUs, links, NCCL and container settings, and say what to change.
    Doctor(DoctorArgs),
}

/// Options of the four services.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// The service's YAML file; environment variables DAMASK_<SERVICE>__<FIELD> override it.
    #[arg(long)]
    config: PathBuf,
}

impl Cli {
    /// Where the spans of this process go: those of a service, if a collector is named.
    pub(crate) fn collector(&self) -> Option<Collector> {
        let role = match self.command {
            Command::Gateway(_) => Role::Gateway,
            Command::Router(_) => Role::Router,
            Command::Prefill(_) => Role::Prefill,
            Command::Decode(_) => Role::Decode,
            _ => return None,
        };
        let endpoint = self.otlp_endpoint.clone().filter(|endpoint| !endpoint.is_empty())?;
        Some(Collector { endpoint, service: format!("damask-{}", role.name()) })
    }

    /// Runs the command to its end.
    ///
    /// # Errors
    /// Whatever ends it early, to be shown to the user.
    pub(crate) fn run(self, runtime: &Runtime) -> anyhow::Result<()> {
        // The options that child processes take over.
        let format = match self.log_format {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        };
        let mut options = vec!["--log-format".to_owned(), format.to_owned()];
        options.extend(["--drain-grace-s".to_owned(), self.drain_grace_s.to_string()]);
        let grace = Duration::from_secs(self.drain_grace_s);
        if let Some(level) = &self.log_level {
            options.extend(["--log-level".to_owned(), level.clone()]);
        }
        if let Some(endpoint) = &self.otlp_endpoint {
            options.extend(["--otlp-endpoint".to_owned(), endpoint.clone()]);
        }
        let serve = |role, args: ServeArgs| runtime.block_on(crate::serve::serve(role, &args.config, grace));
        match self.command {
            Command::Gateway(args) => serve(Role::Gateway, args),
            Command::Router(args) => serve(Role::Router, args),
            Command::Prefill(args) => serve(Role::Prefill, args),
            Command::Decode(args) => serve(Role::Decode, args),
            Command::Up(args) => runtime.block_on(crate::up::up(args, options, grace)),
            Command::Node(args) => runtime.block_on(crate::node::node(args, options, grace)),
            Command::Chat(args) => runtime.block_on(crate::up::chat(args, options, grace)),
            Command::Bench(args) => runtime.block_on(args.run()),
            Command::Sweep(args) => args.run(),
            Command::Plan(args) => args.run(),
            Command::Config(command) => command.run(),
            Command::Doctor(args) => crate::doctor::doctor(&args),
            Command::Health(args) => runtime.block_on(crate::health::health(&args)),
            Command::Convert(args) => crate::convert::convert(&args),
        }
    }
}
