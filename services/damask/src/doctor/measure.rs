//! Rates, measured by one child process for each GPU, as workers are: a fault of one is then a line of the report.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail, ensure};

use super::facts::{Measured, PairRates, Rate};

/// Longest that a child may take for one thing: NCCL's start is part of it.
const PATIENCE: Duration = Duration::from_secs(40);

/// Measures each GPU's memory and each pair both ways; NCCL only if `nccl` says that it is here.
pub(crate) fn measure(num_gpus: usize, nccl: bool) -> Measured {
    let mut probes: Vec<anyhow::Result<Probe>> = (0..num_gpus).map(Probe::spawn).collect();
    let memory = probes.iter_mut().map(|probe| rate(alive(probe).and_then(|probe| probe.ask("memory")))).collect();
    let mut pairs = Vec::new();
    for from in 0..num_gpus {
        for to in (0..num_gpus).filter(|to| *to != from) {
            let Ok([sender, receiver]) = probes.get_disjoint_mut([from, to]) else { continue };
            let copy = rate(copy(sender, receiver));
            let nccl = if nccl { rate(send(sender, receiver)) } else { Rate::Fault("NCCL is missing".into()) };
            pairs.push(PairRates { from, to, copy, nccl });
        }
    }
    Measured { memory, pairs }
}

fn copy(from: &mut anyhow::Result<Probe>, to: &mut anyhow::Result<Probe>) -> anyhow::Result<String> {
    let (from, to) = (alive(from)?, alive(to)?);
    let handle = from.ask("export")?;
    to.ask(&format!("pull {handle}"))
}

fn send(from: &mut anyhow::Result<Probe>, to: &mut anyhow::Result<Probe>) -> anyhow::Result<String> {
    let (from, to) = (alive(from)?, alive(to)?);
    let id = from.ask("id")?;
    from.tell(&format!("send {id}"))?;
    let received = to.ask(&format!("receive {id}"));
    // Both answers are read, so that the next question meets no old one.
    let sent = from.answer();
    received.and_then(|rate| sent.map(|_| rate))
}

fn alive(probe: &mut anyhow::Result<Probe>) -> anyhow::Result<&mut Probe> {
    probe.as_mut().map_err(|error| anyhow::anyhow!("{error:#}"))
}

fn rate(answer: anyhow::Result<String>) -> Rate {
    match answer.and_then(|answer| answer.parse().with_context(|| format!("an answer that is no rate: {answer}"))) {
        Ok(rate) => Rate::GbPerS(rate),
        Err(error) => Rate::Fault(format!("{error:#}")),
    }
}

/// A child process on one GPU. It ends with its standard input, or is killed.
struct Probe {
    process: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Probe {
    fn spawn(gpu: usize) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("this program has no path")?;
        let mut command = Command::new(program);
        command.args(["doctor", "--probe", &gpu.to_string()]);
        let mut process =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot start a probe")?;
        let (input, output) = (process.stdin.take(), process.stdout.take());
        let (input, output) = (input.context("a pipe was asked for")?, output.context("a pipe was asked for")?);
        let (sender, lines) = mpsc::channel();
        let read = move || BufReader::new(output).lines().map_while(Result::ok).all(|line| sender.send(line).is_ok());
        thread::Builder::new().name("probe".into()).spawn(read).context("cannot start a thread")?;
        let probe = Self { process, input, lines };
        probe.answer().with_context(|| format!("GPU {gpu} does not open"))?;
        Ok(probe)
    }

    fn tell(&mut self, line: &str) -> anyhow::Result<()> {
        writeln!(self.input, "{line}").context("the probe has ended")
    }

    /// What follows `ok` in its answer.
    fn answer(&self) -> anyhow::Result<String> {
        let line = self.lines.recv_timeout(PATIENCE);
        let line = line.map_err(|_| anyhow::anyhow!("no answer from the probe within {} s", PATIENCE.as_secs()))?;
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("ok", rest) => Ok(rest.to_owned()),
            (_, rest) => bail!("{rest}"),
        }
    }

    fn ask(&mut self, line: &str) -> anyhow::Result<String> {
        self.tell(line)?;
        self.answer()
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        // It may be stuck in the driver, so it is not asked; failing here means that it has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The child's part: answers each line of standard input with `ok ..` or `error ..`.
pub(crate) fn serve_probe(gpu: u32) -> anyhow::Result<()> {
    let answer = |outcome: anyhow::Result<String>| {
        let line = match outcome {
            Ok(text) => format!("ok {text}"),
            Err(error) => format!("error {}", format!("{error:#}").replace('\n', "; ")),
        };
        let mut output = std::io::stdout().lock();
        writeln!(output, "{line}").and_then(|()| output.flush())
    };
    let bench = match device::LinkBench::open(gpu) {
        Ok(bench) => bench,
        Err(error) => return Ok(answer(Err(error.into()))?),
    };
    answer(Ok("ready".into()))?;
    for line in std::io::stdin().lock().lines() {
        answer(obey(&bench, &line?))?;
    }
    Ok(())
}

fn obey(bench: &device::LinkBench, line: &str) -> anyhow::Result<String> {
    use device::nccl::UniqueId;
    let (question, argument) = line.split_once(' ').unwrap_or((line, ""));
    let id = || anyhow::Ok(UniqueId::from_bytes(&unhex(argument)?)?);
    Ok(match question {
        "memory" => bench.memory_gb_per_s()?.to_string(),
        "export" => hex(&bench.export()?),
        "pull" => {
            let handle = unhex(argument)?.try_into();
            bench.pull_gb_per_s(&handle.map_err(|_| anyhow::anyhow!("a handle has 64 bytes"))?)?.to_string()
        }
        "id" => hex(UniqueId::new()?.as_bytes()),
        "send" => bench.nccl_gb_per_s(&id()?, 0)?.to_string(),
        "receive" => bench.nccl_gb_per_s(&id()?, 1)?.to_string(),
        other => bail!("what is {other}?"),
    })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> anyhow::Result<Vec<u8>> {
    ensure!(text.is_ascii() && text.len().is_multiple_of(2), "not hexadecimal: {text}");
    let byte =
        |at: usize| u8::from_str_radix(&text[at..at + 2], 16).with_context(|| format!("not hexadecimal: {text}"));
    (0..text.len()).step_by(2).map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive_the_line() {
        assert_eq!(hex(&[0, 255, 16]), "00ff10");
        assert_eq!(unhex("00ff10").expect("hexadecimal"), [0, 255, 16]);
        assert!(unhex("0").is_err() && unhex("zz").is_err() && unhex("é").is_err());
    }

    #[test]
    fn an_answer_becomes_a_rate_or_a_fault() {
        assert_eq!(rate(Ok("12.5".into())), Rate::GbPerS(12.5));
        assert!(matches!(rate(Ok("much".into())), Rate::Fault(text) if text.contains("much")));
        assert_eq!(rate(Err(anyhow::anyhow!("gone"))), Rate::Fault("gone".into()));
    }
}
