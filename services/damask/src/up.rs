//! `damask up`: the whole stack on this machine; and the private stack that `damask chat` starts.

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use tokio_util::sync::CancellationToken;
use worker::ModelSource;

use crate::chat::{self, ChatArgs};
use crate::placement::{Placement, PlacementArgs};
use crate::serve::when_stdin_ends;
use crate::stack::{Addresses, Loading, Stack, StackOptions, write_ready_file};
use crate::supervisor::SUPERVISED;

/// Run the whole stack on this machine.
#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// Where the OpenAI API listens; port 0 takes free ports for everything.
    #[arg(long, default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// Model directory with config.json and safetensors [default: the embedded gpt-oss-nano].
    #[arg(long)]
    model: Option<PathBuf>,
    #[command(flatten)]
    placement: PlacementArgs,
    /// Write the services' addresses and process ids to this file, as JSON, once requests can be served.
    #[arg(long)]
    ready_file: Option<PathBuf>,
}

impl UpArgs {
    fn stack(&self, options: Vec<String>, drain_grace: Duration) -> anyhow::Result<StackOptions> {
        let Placement { model, fleet, on_gpus, max_context_tokens } = self.placement.place(self.model.as_deref())?;
        Ok(StackOptions {
            listen: self.listen,
            model,
            fleet,
            on_gpus,
            max_context_tokens,
            drain_grace,
            options,
            documented_ports: self.listen.port() != 0,
        })
    }
}

/// Runs the stack until Ctrl-C, SIGTERM, or the end of standard input where a supervisor holds it.
///
/// # Errors
/// A taken port, or a service that gave up.
pub(crate) async fn up(args: UpArgs, options: Vec<String>, drain_grace: Duration) -> anyhow::Result<()> {
    let mut end = std::pin::pin!(told_to_end()?);
    let stack_options = args.stack(options, drain_grace)?;
    if stack_options.on_gpus {
        say(&format!("{}: {}\n", stack_options.model, stack_options.fleet));
    }
    let mut stack = Stack::start(&stack_options)?;
    tokio::select! {
        ready = stack.wait_ready(progress()) => ready?,
        () = &mut end => return stack.drain().await,
    }
    let addresses = stack.addresses();
    announce(&stack_options, &addresses);
    let mut published = None;
    loop {
        if let Some(path) = &args.ready_file
            && published.as_ref() != Some(&stack.addresses().pids)
        {
            let addresses = stack.addresses();
            write_ready_file(path, &addresses)?;
            published = Some(addresses.pids);
        }
        tokio::select! {
            () = &mut end => break,
            error = stack.failure() => return Err(error),
            () = tokio::time::sleep(Duration::from_millis(100)) => {}
        }
    }
    let again = signal()?;
    say("draining; Ctrl-C again to stop at once\n");
    tokio::select! {
        drained = stack.drain() => drained,
        () = again => anyhow::bail!("stopped before all requests had finished"),
    }
}

/// Answers one question, by a running gateway or by a private stack.
///
/// # Errors
/// When there is no answer.
pub(crate) async fn chat(args: ChatArgs, mut options: Vec<String>, drain_grace: Duration) -> anyhow::Result<()> {
    if let Some(url) = args.url() {
        return chat::ask(&args, url).await;
    }
    if !options.iter().any(|option| option == "--log-level") {
        // Whoever asks a question wants the answer, not four services' logs.
        options.extend(["--log-level".to_owned(), "error".to_owned()]);
    }
    let Placement { model, fleet, on_gpus, max_context_tokens } = args.place()?;
    let private = StackOptions {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        model,
        fleet,
        on_gpus,
        max_context_tokens,
        drain_grace,
        options,
        documented_ports: false,
    };
    let interrupted = signal()?;
    let mut stack = Stack::start(&private)?;
    let answered = tokio::select! {
        answered = async {
            stack.wait_ready(progress()).await?;
            chat::ask(&args, &format!("http://{}", stack.addresses().http)).await
        } => answered,
        () = interrupted => Err(anyhow::anyhow!("interrupted")),
    };
    let drained = stack.drain().await;
    answered.and(drained)
}

/// Ends with [`signal`]; or, where this process is itself supervised, with the end of standard input.
///
/// # Errors
/// When signal handlers cannot be installed.
pub(crate) fn told_to_end() -> std::io::Result<impl Future<Output = ()>> {
    let stdin_ended = CancellationToken::new();
    if std::env::var_os(SUPERVISED).is_some() {
        let ended = stdin_ended.clone();
        when_stdin_ends(move || ended.cancel());
    }
    let signal = signal()?;
    Ok(async move {
        tokio::select! {
            () = signal => {}
            () = stdin_ended.cancelled() => {}
        }
    })
}

/// Ends with the next Ctrl-C, SIGTERM, or SIGHUP, which tells that the terminal was closed. From this call on, not from the first poll, none of
/// them ends the process.
fn signal() -> std::io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let [mut interrupt, mut terminate, mut hang_up] =
        [signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?, signal(SignalKind::hangup())?];
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hang_up.recv() => {}
        }
    })
}

/// Draws the loading of the weights on a terminal, as one bar over both workers.
fn progress() -> impl Fn(Loading) {
    let style =
        ProgressStyle::with_template("{msg} [{bar:30}] {percent} %").expect("the template is a constant that parses");
    let bar = ProgressBar::new(0).with_style(style.progress_chars("=> ")).with_message("loading weights");
    move |Loading { done, total }| {
        if total > 0 && done < total {
            bar.set_length(total);
            bar.set_position(done);
        } else if done > 0 {
            bar.finish_and_clear();
        }
    }
}

/// Tells people where everything is. On standard output, since standard error is the log, each line of which may have to be JSON.
fn announce(options: &StackOptions, addresses: &Addresses) {
    let model = match &options.model {
        ModelSource::EmbeddedNano => "gpt-oss-nano (embedded)".into(),
        other => other.to_string(),
    };
    let place = if options.on_gpus { "with CUDA" } else { "on the CPU" };
    let Addresses { http, gateway, router, .. } = addresses;
    let mut text = format!(
        "damask serves {model} {place}: {}\n\
         \x20 OpenAI API    http://{http}/v1\n\
         \x20 gRPC          router {router} (damask.v1.Inference), gateway {gateway} (damask.v1.Gateway)\n",
        options.fleet,
    );
    for (name, admin) in &addresses.admin {
        text += &format!("  {name:<13} http://{admin}/metrics\n");
    }
    text += &format!("try: damask chat --url http://{http} \"What is the capital of France?\"\n");
    say(&text);
}

/// To whoever reads along; that nobody does is no reason to stop serving.
fn say(text: &str) {
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
}
