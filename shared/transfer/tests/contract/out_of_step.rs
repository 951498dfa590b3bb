//! What must not happen beside the frames: two sides that do not take the same batches, and lanes that cannot be opened.

use std::sync::atomic::Ordering;
use std::time::Duration;

use transfer::data::{DataError, TransportMismatch};
use transfer::{ArrivalEvent, EndCause, LossCause, ReceiveTransport, TransferConfig, TransferError};

use crate::memory::{Script, scripted};
use crate::support::{Options, World, layout, part, quick};
use crate::{FIRST, connect, posted, send_all, some_parts};

/// The sender makes batches of twice what the receiver's slots hold.
fn unequal() -> Options {
    let config = |batch_bytes_max| TransferConfig { batch_bytes_max, ..quick() };
    Options { config: config(8_192), receiver_config: Some(config(4_096)), ..Options::default() }
}

#[tokio::test]
async fn batches_larger_than_the_receivers_slots_are_refused_before_any_is_sent() {
    let (world, _) = scripted(&unequal(), Script::default());
    match world.sender.connect(&world.address, &World::decode_peer()).await.err() {
        Some(TransferError::Transport { mismatch, .. }) => {
            assert_eq!(mismatch, TransportMismatch::BatchBytes { sender: 8_192, receiver: 4_096 });
        }
        other => panic!("wanted Transport, got {other:?}"),
    }
}

/// A sender that does not keep to what it said.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_larger_than_was_agreed_ends_the_connection() {
    let (mut world, _) = scripted(&unequal(), Script { sender_claims: Some(4_096), ..Script::default() });
    let lane = connect(&world).await;
    let ticket = posted(&world, &*lane, 1).await;
    // One head has 256 bytes: 17 of one rank are more than the receiver takes at a time.
    let parts: Vec<_> = (0..17).map(|page| part(1, page, 0)).collect();
    assert!(parts.len() * layout(1).head_bytes() > 4_096);
    send_all(&world, &*ticket, &parts).await;
    let (slices, terminal) = world.until_terminal().await;
    let ArrivalEvent::Ended(EndCause::Lost(LossCause::Protocol(error))) = terminal else {
        panic!("wanted Lost, got {terminal:?}")
    };
    assert!(slices.is_empty() && error.to_string().contains("batch_bytes_max"), "{error}");
}

/// What was sent for the batch that failed would be received in place of the next one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_that_leaves_the_sides_out_of_step_ends_the_lane() {
    let (mut world, script) = scripted(&Options::default(), Script { broken_batch: Some(0), ..Script::default() });
    let lane = connect(&world).await;
    let ticket = posted(&world, &*lane, 1).await;
    send_all(&world, &*ticket, &some_parts()[..4]).await;
    let (slices, terminal) = world.until_terminal().await;
    let cause = LossCause::DataPath(DataError("out of step".into()));
    assert!(matches!(&terminal, ArrivalEvent::Ended(EndCause::Lost(lost)) if *lost == cause), "{terminal:?}");
    assert!(slices.is_empty() && script.receiver.is_closed().await);
    assert_eq!(world.receiver.num_open(), 0);
    for _ in 0..100 {
        if lane.lost().is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(lane.lost().is_some(), "at the sender, too");
}

/// There is something to clean up behind each name: of the pairs that are not joined any more none is made.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pairs_are_named_one_by_one() {
    let (world, script) = scripted(&Options::default(), Script { joins: 3, ..Script::default() });
    let error = world.sender.connect(&world.address, &World::decode_peer()).await.err().unwrap();
    let TransferError::DataPath { cause, .. } = &error else { panic!("wanted DataPath, got {error}") };
    assert_eq!(*cause, DataError("pair 1 is slow".into()));
    assert_eq!(*script.made.lock().unwrap(), [0, 1]);
    assert_eq!(*script.told.lock().unwrap(), [0, 1]);
    assert!(script.sender.is_closed().await && script.receiver.is_closed().await, "what was opened is closed");
}

/// A decode worker that dies while a lane to it is opened costs no more than this lane: what waits for it gives up at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_that_goes_while_a_lane_is_opened_ends_the_opening() {
    let (world, script) =
        scripted(&Options::default(), Script { sender_waits: true, receiver_waits: true, ..Script::default() });
    let peer = World::decode_peer();
    let (error, ()) = tokio::join!(world.sender.connect(&world.address, &peer), async {
        assert!(script.sender.is_waiting().await && script.receiver.is_waiting().await);
        world.receiver_stop.cancel();
    });
    let error = error.err().unwrap();
    assert!(matches!(error, TransferError::PeerLost { cause: LossCause::Ended, .. }), "{error}");
    assert!(script.sender.is_closed().await, "the sender waits no longer");
    assert!(script.receiver.is_closed().await, "nor does a receiver that was told to stop");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_that_goes_while_a_lane_is_opened_ends_the_opening() {
    let (world, script) = scripted(&Options::default(), Script { receiver_waits: true, ..Script::default() });
    let peer = World::decode_peer();
    tokio::select! {
        opened = world.sender.connect(&world.address, &peer) => panic!("opened: {:?}", opened.err()),
        is_waiting = script.receiver.is_waiting() => assert!(is_waiting),
    }
    assert!(script.receiver.is_closed().await, "the receiver waits no longer");
}

/// Opening may take longer than a peer may be silent: both sides say that they are alive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_opening_is_not_taken_for_silence() {
    let config = TransferConfig { peer_silence_timeout_ms: 500, setup_timeout_ms: 1_500, ..quick() };
    let script = Script { sender_waits: true, receiver_waits: true, ..Script::default() };
    let (world, _) = scripted(&Options { config, ..Options::default() }, script);
    let error = world.sender.connect(&world.address, &World::decode_peer()).await.err().unwrap();
    let TransferError::DataPath { cause, .. } = &error else { panic!("wanted DataPath, got {error}") };
    assert!(cause.0.contains("transfer.setup_timeout_ms"), "{cause}");
}

/// Whoever has something to answer later, a thread of the data path too, is not the last to let go of the lane: it would wait for itself to end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_that_is_kept_keeps_no_lane() {
    let (mut world, script) = scripted(&Options::default(), Script::default());
    let lane = connect(&world).await;
    let ticket = posted(&world, &*lane, 1).await;
    send_all(&world, &*ticket, &some_parts()[..4]).await;
    let (lost, reply) = tokio::join!(ticket.commit(FIRST), async {
        let ArrivalEvent::Commit { reply, .. } = world.until_terminal().await.1 else { panic!("wanted Commit") };
        lane.close();
        reply
    });
    assert!(matches!(lost, Err(TransferError::PeerLost { .. })), "{lost:?}");
    for _ in 0..200 {
        if script.is_receiver_dropped.load(Ordering::Acquire) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(script.is_receiver_dropped.load(Ordering::Acquire));
    drop(reply);
}
