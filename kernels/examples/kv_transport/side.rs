//! One side of a transfer: a GPU, a stream, a buffer, a communicator; and the peer as a child process that obeys lines.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use device::nccl::{Communicator, CommunicatorConfig, NcclError, UniqueId};
use device::{Device, DeviceBuffer, Event, Stream};

use crate::{BOUND, MIB};

/// Bytes of each side's buffer.
pub(crate) const BUFFER: usize = 256 * MIB;
/// Transfers enqueued ahead.
const AHEAD: usize = 4;

/// What a side does over and over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Traffic {
    Send,
    Receive,
    AllReduce,
}

impl Traffic {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Receive => "receive",
            Self::AllReduce => "all-reduce",
        }
    }

    pub(crate) fn named(name: &str) -> Self {
        *[Self::Send, Self::Receive, Self::AllReduce].iter().find(|traffic| traffic.name() == name).unwrap()
    }

    pub(crate) const fn opposite(self) -> Self {
        match self {
            Self::Send => Self::Receive,
            Self::Receive => Self::Send,
            Self::AllReduce => Self::AllReduce,
        }
    }
}

pub(crate) struct Side {
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    pub(crate) buffer: DeviceBuffer<u8>,
    floats: DeviceBuffer<f32>,
    pub(crate) communicator: Option<Communicator>,
}

impl Side {
    pub(crate) fn open(ordinal: u32) -> Self {
        let device = Device::open(ordinal).unwrap();
        let stream = device.stream().unwrap();
        let (buffer, floats) = (stream.zeros(BUFFER).unwrap(), stream.zeros(BUFFER / 4).unwrap());
        stream.synchronize().unwrap();
        Self { device, stream, buffer, floats, communicator: None }
    }

    /// Joins as `rank` of 2; `max_ctas` 0 leaves the choice to NCCL. How long it took.
    pub(crate) fn join(&mut self, id: &UniqueId, rank: u32, max_ctas: u32) -> Result<Duration, NcclError> {
        let started = Instant::now();
        let max_ctas = (max_ctas > 0).then_some(max_ctas);
        let config =
            CommunicatorConfig { max_ctas, name: "experiment".into(), init_timeout: BOUND, call_timeout: BOUND / 10 };
        self.communicator = Some(Communicator::init(&self.device, id, 2, rank, &config)?);
        Ok(started.elapsed())
    }

    /// Enqueues one transfer of `bytes`, up to the buffer's size, with the other rank.
    pub(crate) fn enqueue(&mut self, traffic: Traffic, bytes: usize) -> Result<(), NcclError> {
        let communicator = self.communicator.as_ref().unwrap();
        let peer = 1 - communicator.rank();
        match traffic {
            Traffic::Send => communicator.send(&self.stream, self.buffer.slice(..bytes), peer),
            Traffic::Receive => communicator.recv(&self.stream, self.buffer.slice_mut(..bytes), peer),
            Traffic::AllReduce => communicator.all_reduce(&self.stream, self.floats.slice_mut(..bytes / 4)),
        }
    }

    /// `count` transfers; their rate in GB/s once the first, which may connect, is over.
    pub(crate) fn transfer(&mut self, traffic: Traffic, bytes: usize, count: usize) -> Result<f64, NcclError> {
        self.enqueue(traffic, bytes)?;
        let first = self.stream.record()?;
        for _ in 1..count {
            self.enqueue(traffic, bytes)?;
        }
        let last = self.stream.record()?;
        last.wait()?;
        Ok((bytes * (count - 1)) as f64 / last.elapsed_us(&first)? / 1e3)
    }

    /// Transfers until one has not moved for `patience`; `each` is called before each. How many were enqueued.
    pub(crate) fn until_stuck(
        &mut self,
        patience: Duration,
        mut enqueue: impl FnMut(&mut Self) -> Result<(), NcclError>,
    ) -> Result<usize, NcclError> {
        let mut under_way: VecDeque<Event> = VecDeque::new();
        for count in 0.. {
            if under_way.len() == AHEAD {
                let oldest = under_way.pop_front().unwrap();
                if !oldest.passes_within(patience) {
                    return Ok(count);
                }
            }
            enqueue(self)?;
            under_way.push_back(self.stream.record()?);
        }
        unreachable!("the count has no end")
    }
}

/// The peer.
pub(crate) struct Peer {
    process: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Peer {
    pub(crate) fn spawn() -> Self {
        let program = std::env::current_exe().unwrap();
        let mut process =
            Command::new(program).arg("child").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            BufReader::new(output).lines().map_while(Result::ok).all(|line| sender.send(line).is_ok())
        });
        let peer = Self { process, input, lines };
        assert_eq!(peer.answer(), "ready");
        peer
    }

    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    pub(crate) fn answer(&self) -> String {
        self.lines.recv_timeout(2 * BOUND).expect("the child answers")
    }

    pub(crate) fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.answer()
    }

    /// Makes a communicator with it. How long that took here.
    pub(crate) fn join(&mut self, side: &mut Side, max_ctas: u32) -> Duration {
        let id = UniqueId::new().unwrap();
        self.tell(&format!("join {} {max_ctas}", hex(id.as_bytes())));
        let took = side.join(&id, 0, max_ctas).unwrap();
        assert_eq!(self.answer(), "joined");
        took
    }

    /// Connects both directions, so that later transfers are enqueued at once.
    pub(crate) fn warm_up(&mut self, side: &mut Side) {
        for traffic in [Traffic::Send, Traffic::Receive, Traffic::AllReduce] {
            self.tell(&format!("transfer {} {MIB} 2", traffic.opposite().name()));
            side.transfer(traffic, MIB, 2).unwrap();
            self.answer();
        }
    }

    /// As the kernel's out-of-memory killer would: nothing of it runs any more.
    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}
