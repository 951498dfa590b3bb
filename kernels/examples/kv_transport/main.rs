//! The measurements behind the choice of how KV moves between two GPUs; docs/results/kv-transport-h200.md has what they gave.
//!
//! `kv_transport [survivor] [decode] [setup] [pieces]` runs these on GPU 0 of this process and GPU 1 of child processes, which are
//! this program again, and prints tables in Markdown. Without two GPUs and NCCL, or built without nvcc, it says so and ends well.
//!
//! - `survivor`: a peer is killed in the midst of a transfer. What does the survivor see, and what works afterwards?
//! - `decode`: GB/s of a transfer by the thread blocks that it may use, and how much it slows a decode step beside it.
//! - `setup`: time and memory that communicators take.
//! - `pieces`: pages gathered into one send, against many copies.

#![allow(unsafe_code)] // memory of another process: each use says why it holds
#![allow(clippy::unwrap_used)] // an error here ends the measurement, and its text is all that anyone wants

mod child;
mod decode;
mod ipc;
mod load;
mod pieces;
mod setup;
mod side;
mod survivor;

use std::time::Duration;

use device::nccl::{Nccl, forbid_multicast};
use device::{Device, probe};

/// Longer than anything here takes that is going to end.
const BOUND: Duration = Duration::from_secs(20);
const MIB: usize = 1 << 20;

type Section = (&'static str, fn());

fn main() {
    forbid_multicast().unwrap();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "child") {
        return child::serve();
    }
    let nccl = match (kernels::AVAILABLE, probe(), Nccl::load()) {
        (false, ..) => return eprintln!("skipped: built without nvcc"),
        (_, Err(reason), _) => return eprintln!("skipped: {reason}"),
        (_, Ok(gpus), _) if gpus < 2 => return eprintln!("skipped: {gpus} GPU, two are needed"),
        (.., Err(reason)) => return eprintln!("skipped: {reason}"),
        (true, Ok(_), Ok(nccl)) => nccl,
    };
    println!("Two {}, NCCL {}.\n", Device::open(0).unwrap().name().unwrap(), nccl.version_text());
    let sections: [Section; 4] =
        [("survivor", survivor::run), ("decode", decode::run), ("setup", setup::run), ("pieces", pieces::run)];
    let wanted = |name: &str| arguments.is_empty() || arguments.iter().any(|argument| argument == name);
    sections.iter().filter(|(name, _)| wanted(name)).for_each(|(_, run)| run());
}

/// The middle of some times.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
