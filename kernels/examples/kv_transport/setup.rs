//! What communicators take: time to make, memory of the GPU.

use crate::side::{Peer, Side, Traffic};
use crate::{BOUND, MIB, milliseconds};

const COMMUNICATORS: usize = 3;

pub(crate) fn run() {
    println!("## Making communicators of two ranks\n");
    println!(
        "Each row: communicators made one after the other between the same two GPUs. The first of a process also starts NCCL.\n"
    );
    println!(
        "| blocks | ms to join: first, second, third | MB each, made | MB each, after a send and a receive | ms to close |"
    );
    println!("|---|---|---|---|---|");
    for max_ctas in [1, 2, 4, 8, 16, 0] {
        row(max_ctas);
    }
    println!();
}

fn row(max_ctas: u32) {
    let mut side = Side::open(0);
    let mut peer = Peer::spawn();
    let free = |side: &Side| side.device.memory_bytes().unwrap().0 as f64;
    let (mut joins, mut made, mut connected, mut communicators) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..COMMUNICATORS {
        let before = free(&side);
        joins.push(format!("{:.0}", milliseconds(peer.join(&mut side, max_ctas))));
        made.push(format!("{:.0}", (before - free(&side)) / 1e6));
        for traffic in [Traffic::Send, Traffic::Receive] {
            peer.tell(&format!("transfer {} {MIB} 2", traffic.opposite().name()));
            side.transfer(traffic, MIB, 2).unwrap();
            peer.answer();
        }
        connected.push(format!("{:.0}", (before - free(&side)) / 1e6));
        communicators.extend(side.communicator.take());
    }
    let started = std::time::Instant::now();
    let last = communicators.pop().unwrap();
    peer.tell("close");
    last.close(BOUND).unwrap();
    peer.answer();
    let closed = milliseconds(started.elapsed());
    communicators.iter().for_each(|communicator| {
        let _ = communicator.abort(BOUND);
    });
    let name = if max_ctas == 0 { "default".into() } else { max_ctas.to_string() };
    println!("| {name} | {} | {} | {} | {closed:.0} |", joins.join(", "), made.join(", "), connected.join(", "));
}
