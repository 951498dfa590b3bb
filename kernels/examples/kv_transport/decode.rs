//! A transfer beside a decode step: what each gets of the machine.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::ipc::{Mapped, Way, export};
use crate::load::Load;
use crate::side::{BUFFER, Peer, Side, Traffic};
use crate::{BOUND, MIB, median};

const BYTES: usize = 64 * MIB;
const STEPS: usize = 120;
const CTAS: [u32; 6] = [1, 2, 4, 8, 16, 0];

pub(crate) fn run() {
    let mut side = Side::open(0);
    let mut load = Load::new(&side.device);
    let (alone, late) = load.typical(STEPS);
    println!("## A transfer beside a decode step\n");
    println!(
        "The step: 96 skinny products, {} MB of weights, on the receiving GPU; alone {alone:.0} us (p95 {late:.0}).",
        Load::bytes() / 1_000_000
    );
    println!(
        "Messages of 64 MiB without a pause, which is far more than a server's traffic: an 8k prompt of 20b shape is 200 MB.\n"
    );
    println!(
        "| way | GB/s idle | GB/s of 1 MiB messages | step beside it, us (p95) | slower | GB/s meanwhile | step while a receive waits, us | slower |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    let mut peer = Peer::spawn();
    for max_ctas in CTAS {
        nccl(&mut side, &mut peer, &mut load, max_ctas, alone);
    }
    for (name, by_peer) in [("copy engine of the sender (push)", true), ("copy engine of the receiver (pull)", false)] {
        copies(&mut side, &mut peer, &mut load, name, by_peer, alone);
    }
    println!();
    issuing(&mut side, &mut peer);
}

fn nccl(side: &mut Side, peer: &mut Peer, load: &mut Load, max_ctas: u32, alone: f64) {
    peer.join(side, max_ctas);
    peer.warm_up(side);
    let mut idle = |bytes: usize, count: usize| {
        peer.tell(&format!("transfer send {bytes} {count}"));
        let rate = side.transfer(Traffic::Receive, bytes, count).unwrap();
        peer.answer();
        rate
    };
    let (large, small) = (idle(BYTES, 24), idle(MIB, 200));
    // As many as fill the steps at this rate and half as many again: what is left over runs out afterwards.
    let count = (alone * STEPS as f64 * large * 1e3 / BYTES as f64 * 1.5) as usize + 8;
    peer.tell(&format!("transfer send {BYTES} {count}"));
    let started = AtomicBool::new(false);
    let (busy, rate) = thread::scope(|scope| {
        let transfer = scope.spawn(|| {
            side.enqueue(Traffic::Receive, BYTES).unwrap();
            started.store(true, Ordering::Release);
            side.transfer(Traffic::Receive, BYTES, count - 1).unwrap()
        });
        while !started.load(Ordering::Acquire) {
            thread::yield_now();
        }
        thread::sleep(Duration::from_millis(2));
        (load.typical(STEPS), transfer.join().unwrap())
    });
    peer.answer();
    side.enqueue(Traffic::Receive, BYTES).unwrap();
    thread::sleep(Duration::from_millis(2));
    let (waiting, _) = load.typical(STEPS / 2);
    peer.tell(&format!("transfer send {BYTES} 1"));
    side.stream.synchronize().unwrap();
    peer.answer();
    let name = if max_ctas == 0 { "NCCL, blocks: its default".into() } else { format!("NCCL, blocks: {max_ctas}") };
    let slower = |step: f64| 100.0 * (step / alone - 1.0);
    println!(
        "| {name} | {large:.0} | {small:.0} | {:.0} ({:.0}) | {:.1} % | {rate:.0} | {waiting:.0} | {:.1} % |",
        busy.0,
        busy.1,
        slower(busy.0),
        slower(waiting)
    );
    peer.tell("close");
    side.communicator.take().unwrap().close(BOUND).unwrap();
    peer.answer();
}

fn copies(side: &mut Side, peer: &mut Peer, load: &mut Load, name: &str, by_peer: bool, alone: f64) {
    let ask = |peer: &mut Peer, bytes: usize, count: usize| peer.tell(&format!("push {bytes} {count}"));
    let mapped = if by_peer {
        assert_eq!(peer.ask(&format!("import {}", export(&side.stream, &side.buffer))), "open");
        None
    } else {
        Some(Mapped::open(&side.stream, &peer.ask("export"), BUFFER))
    };
    let mut transfer = |peer: &mut Peer, bytes: usize, count: usize| -> f64 {
        if let Some(mapped) = &mapped {
            let started = std::time::Instant::now();
            for at in 0..count {
                assert_eq!(mapped.copy(&side.stream, &mut side.buffer, Way::Pull, bytes) as u32, 0);
                if at % 16 == 15 {
                    mapped.finish(BOUND).unwrap();
                }
            }
            mapped.finish(BOUND).unwrap();
            (bytes * count) as f64 / started.elapsed().as_secs_f64() / 1e9
        } else {
            ask(peer, bytes, count);
            peer.answer().parse().unwrap()
        }
    };
    transfer(peer, MIB, 4);
    let (large, small) = (transfer(peer, BYTES, 24), transfer(peer, MIB, 200));
    let count = (alone * STEPS as f64 * large * 1e3 / BYTES as f64 * 1.5) as usize + 8;
    let ((step, late), rate) = thread::scope(|scope| {
        let transfer = scope.spawn(|| transfer(peer, BYTES, count));
        thread::sleep(Duration::from_millis(5));
        (load.typical(STEPS), transfer.join().unwrap())
    });
    let slower = 100.0 * (step / alone - 1.0);
    println!("| {name} | {large:.0} | {small:.0} | {step:.0} ({late:.0}) | {slower:.1} % | {rate:.0} | - | - |");
}

/// What a call costs the thread that makes it, and what a small sum costs the device.
fn issuing(side: &mut Side, peer: &mut Peer) {
    const BYTES: usize = 8 * 2880 * 4;
    const COUNT: usize = 200;
    peer.join(side, 0);
    peer.warm_up(side);
    peer.tell(&format!("transfer all-reduce {BYTES} {COUNT}"));
    let mut calls = Vec::new();
    for _ in 0..COUNT {
        let started = std::time::Instant::now();
        side.enqueue(Traffic::AllReduce, BYTES).unwrap();
        calls.push(started.elapsed().as_secs_f64() * 1e6);
    }
    side.stream.synchronize().unwrap();
    peer.answer();
    println!(
        "Enqueuing one all-reduce takes the calling thread {:.0} us (median), since non-blocking calls run on a thread of NCCL's.\n",
        median(calls)
    );
    peer.tell("close");
    side.communicator.take().unwrap().close(BOUND).unwrap();
    peer.answer();
}
