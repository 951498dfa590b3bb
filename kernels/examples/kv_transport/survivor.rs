//! A peer is killed: what the survivor sees, and what works afterwards.

use std::thread;
use std::time::{Duration, Instant};

use device::nccl::{Abort, NcclError};

use crate::ipc::{Mapped, Way};
use crate::load::Load;
use crate::side::{BUFFER, Peer, Side, Traffic};
use crate::{BOUND, MIB, milliseconds};

const BYTES: usize = 64 * MIB;
/// Traffic before the kill, and how long it must stand still afterwards to count as stuck.
const BEFORE: Duration = Duration::from_millis(200);
const PATIENCE: Duration = Duration::from_millis(400);

pub(crate) fn run() {
    let mut side = Side::open(0);
    let mut load = Load::new(&side.device);
    println!("## A peer is killed with SIGKILL\n");
    println!(
        "One process survives all of it, row after row. *Silent*: NCCL reports no error of its own within {PATIENCE:?}.\n"
    );
    println!("| what was under way | init ms | stream stuck | NCCL says | abort ms | stream done after | fresh work |");
    println!("|---|---|---|---|---|---|---|");
    for traffic in [Traffic::Receive, Traffic::Send, Traffic::AllReduce] {
        in_traffic(&mut side, &mut load, traffic);
    }
    waiting(&mut side, &mut load);
    connecting(&mut side, &mut load);
    println!(
        "\n| copy under way by a copy engine (CUDA IPC) | what the driver answers | copies after the death | fresh work |"
    );
    println!("|---|---|---|---|");
    for way in [Way::Pull, Way::Push] {
        own_copies(&mut side, &mut load, way);
    }
    others_copies(&mut side, &mut load);
    reborn(&mut side);
}

/// The peer dies while both are busy.
fn in_traffic(side: &mut Side, load: &mut Load, traffic: Traffic) {
    let mut peer = Peer::spawn();
    let init = peer.join(side, 4);
    peer.warm_up(side);
    assert_eq!(peer.ask(&format!("forever {} {BYTES}", traffic.opposite().name())), "going");
    let started = Instant::now();
    let mut dead = false;
    let stuck = side.until_stuck(PATIENCE, |side| {
        if !dead && started.elapsed() > BEFORE {
            peer.kill();
            dead = true;
        }
        side.enqueue(traffic, BYTES)
    });
    let what = format!("{} of {} MiB, over and over", traffic.name(), BYTES / MIB);
    report(side, load, &what, init, stuck.map(|_| ()));
}

/// The peer dies while a receive waits for it that it never answered.
fn waiting(side: &mut Side, load: &mut Load) {
    let mut peer = Peer::spawn();
    let init = peer.join(side, 4);
    peer.warm_up(side);
    side.enqueue(Traffic::Receive, BYTES).unwrap();
    thread::sleep(BEFORE);
    peer.kill();
    thread::sleep(PATIENCE);
    report(side, load, "a receive that waits", init, Ok(()));
}

/// The peer dies before the two were ever connected.
fn connecting(side: &mut Side, load: &mut Load) {
    let mut peer = Peer::spawn();
    let init = peer.join(side, 4);
    peer.kill();
    let outcome = side.enqueue(Traffic::Send, BYTES);
    report(side, load, "a first send, which connects", init, outcome);
}

fn report(side: &mut Side, load: &mut Load, what: &str, init: Duration, outcome: Result<(), NcclError>) {
    let communicator = side.communicator.take().unwrap();
    let stuck = !side.stream.record().unwrap().is_done();
    let says = match outcome.and_then(|()| communicator.check()) {
        Ok(()) => "silent".into(),
        Err(error) => error.to_string(),
    };
    let abort = match communicator.abort(BOUND) {
        Abort::Returned { took } => format!("{:.1}", milliseconds(took)),
        Abort::Stuck => "**stuck**".into(),
    };
    let started = Instant::now();
    let done = side.stream.record().unwrap().passes_within(BOUND);
    let done = if done { format!("{:.1} ms", milliseconds(started.elapsed())) } else { "**never**".into() };
    let fresh = fresh_work(side, load);
    println!("| {what} | {:.0} | {stuck} | {says} | {abort} | {done} | {fresh} |", milliseconds(init));
}

/// Copies and kernels on the context that has survived.
fn fresh_work(side: &mut Side, load: &mut Load) -> String {
    let stream = side.device.stream().unwrap();
    let sent: Vec<u32> = (0..100_000).collect();
    let copied = stream.upload(&sent).and_then(|buffer| stream.download(buffer.view()));
    let copied = copied.is_ok_and(|copied| copied == sent);
    let (step, _) = load.typical(20);
    format!("copy {}, step {step:.0} us", if copied { "right" } else { "**wrong**" })
}

/// This process copies from or to the memory of the peer as it dies.
fn own_copies(side: &mut Side, load: &mut Load, way: Way) {
    let mut peer = Peer::spawn();
    let mapped = Mapped::open(&side.stream, &peer.ask("export"), BUFFER);
    let started = Instant::now();
    let (mut dead, mut after, mut answer) = (false, 0, "CUDA_SUCCESS".to_owned());
    while started.elapsed() < BEFORE + 2 * PATIENCE {
        if !dead && started.elapsed() > BEFORE {
            // With copies under way.
            let _ = mapped.copy(&side.stream, &mut side.buffer, way, BYTES);
            peer.kill();
            dead = true;
        }
        let code = mapped.copy(&side.stream, &mut side.buffer, way, BYTES);
        let finished = mapped.finish(PATIENCE);
        after += usize::from(dead);
        if code as u32 != 0 || finished.is_none_or(|code| code as u32 != 0) {
            answer = format!("{code:?}, then {finished:?}");
            break;
        }
    }
    let what = if way == Way::Pull { "from the peer's memory" } else { "into the peer's memory" };
    println!("| {what} | {answer} | {after} | {} |", fresh_work(side, load));
    mapped.close();
}

/// The peer copies into the memory of this process as it dies.
fn others_copies(side: &mut Side, load: &mut Load) {
    let mut peer = Peer::spawn();
    let handle = crate::ipc::export(&side.stream, &side.buffer);
    assert_eq!(peer.ask(&format!("import {handle}")), "open");
    assert_eq!(peer.ask(&format!("push {BYTES} 0")), "going");
    thread::sleep(BEFORE);
    peer.kill();
    println!("| by the peer, into this memory | - | - | {} |", fresh_work(side, load));
}

/// A new peer after all that: how fast it is there, and that data moves.
fn reborn(side: &mut Side) {
    let started = Instant::now();
    let mut peer = Peer::spawn();
    let spawned = started.elapsed();
    let init = peer.join(side, 4);
    peer.tell(&format!("transfer send {BYTES} 8"));
    let rate = side.transfer(Traffic::Receive, BYTES, 8).unwrap();
    peer.answer();
    let total = milliseconds(started.elapsed());
    println!(
        "\nAfterwards, with a new process: it starts (context and buffers) in {:.0} ms, joins in {:.0} ms, and receives",
        milliseconds(spawned),
        milliseconds(init)
    );
    println!("8 x 64 MiB at {rate:.0} GB/s; {total:.0} ms in all.\n");
    peer.tell("close");
    side.communicator.take().unwrap().close(BOUND).unwrap();
    peer.answer();
}
