//! One suite over every implementation of the transport contract. The numbers are those of the promises in `transfer::contract`.
#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

#[cfg(feature = "cuda")]
mod cuda;
mod data;
mod framed;
mod memory;
mod out_of_step;
mod support;

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use data::hand_over;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use support::{Options, World, layout, part, peer, quick};
use transfer::fault::FaultPlan;
use transfer::{
    AbortReason, ArrivalEvent, EndCause, FirstToken, LossCause, Part, ReceiveTransport, Revoked, SendLane, SendTicket,
    TransferError,
};
use types::{DpGroup, KvDtype, KvLayout, TicketId};

/// `None`, with a printed reason, where an implementation finds no GPU.
type Factory = fn(Options) -> BoxFuture<'static, Option<World>>;

const FIRST: FirstToken = FirstToken { index: 2, token: 77, logprob: Some(-0.5) };

macro_rules! suite {
    ($($implementation:ident: $factory:expr;)*) => { $(
        mod $implementation {
            suite!(@cases $factory;
                commit_follows_all_parts, commit_can_be_rejected, an_abort_is_terminal, a_dropped_ticket_aborts,
                revoked_before_begin, revoked_while_parts_are_on_their_way, unknown_tickets_are_gone,
                another_life_is_refused, layouts_are_compared, a_corrupt_part_ends_its_ticket_only,
                a_malformed_part_ends_its_ticket_only, bytes_in_flight_are_bounded, a_closed_lane_ends_both_sides,
                a_lost_receiver_ends_the_sender, tickets_are_bounded);
        }
    )* };
    (@cases $factory:expr; $($case:ident),*) => { $(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $case() {
            super::$case($factory).await;
        }
    )* };
}

suite! {
    framed_over_pipe: super::support::over_pipe;
    framed_over_tcp: super::support::over_tcp;
    decorated: super::support::over_harmless_faults;
    announced: super::memory::over_memory;
    announced_to_a_group: super::memory::over_memory_to_a_group;
}

#[cfg(feature = "cuda")]
suite! {
    ipc_on_one_gpu: super::cuda::over_ipc;
    ipc_between_gpus: super::cuda::over_ipc_between_gpus;
    ipc_to_a_group: super::cuda::over_ipc_to_a_group;
    nccl: super::cuda::over_nccl;
}

async fn connect(world: &World) -> Box<dyn SendLane> {
    world.sender.connect(&world.address, &World::decode_peer()).await.unwrap()
}

async fn posted(world: &World, lane: &dyn SendLane, id: u128) -> Box<dyn SendTicket> {
    world.receiver.post(TicketId(id), &World::prefill_peer()).unwrap();
    lane.begin(TicketId(id), world.group).await.unwrap()
}

async fn send_all(world: &World, ticket: &dyn SendTicket, parts: &[Part]) {
    // A rank's room is its share of what is set aside, and here all parts may be of one of the two.
    let spread = if world.caches.is_some() { 2 } else { 1 };
    ticket.reserve(spread * parts.iter().map(|part| part.bytes.len()).sum::<usize>()).await.unwrap();
    world.hand_over(ticket, parts).unwrap();
}

fn some_parts() -> Vec<Part> {
    (0..4).flat_map(|layer| (0..3).flat_map(move |page| (0..4).map(move |head| part(layer, page, head)))).collect()
}

/// A sender that names another attention group than the one that took the ticket in writes nothing.
#[tokio::test]
async fn a_ticket_lands_in_no_other_group() {
    let mut world = memory::over_memory_to_a_group(Options::default()).await.unwrap();
    let lane = connect(&world).await;
    let before = world.caches.as_ref().unwrap().receiver_bytes();
    world.receiver.post(TicketId(1), &World::prefill_peer()).unwrap();
    let ticket = lane.begin(TicketId(1), DpGroup(0)).await.unwrap();
    send_all(&world, &*ticket, &some_parts()[..4]).await;
    let (slices, terminal) = world.until_terminal().await;
    let ArrivalEvent::Ended(EndCause::DataPath(cause)) = terminal else { panic!("wanted an end, got {terminal:?}") };
    assert!(slices.is_empty() && cause.0.contains("the ticket's pages are in attention group 2"), "{cause}");
    assert!(world.caches.as_ref().unwrap().receiver_bytes() == before);
}

/// Promises 1 and 2.
async fn commit_follows_all_parts(factory: Factory) {
    let Some(mut world) = factory(Options::default()).await else { return };
    let lane = connect(&world).await;
    let ticket = posted(&world, &*lane, 1).await;
    let parts = some_parts();
    send_all(&world, &*ticket, &parts).await;
    let (receipt, (slices, terminal)) = tokio::join!(ticket.commit(FIRST), async {
        let (slices, terminal) = world.until_terminal().await;
        let ArrivalEvent::Commit { first, reply } = terminal else { panic!("wanted Commit, got {terminal:?}") };
        reply.accept();
        (slices, first)
    });
    assert_eq!(terminal, FIRST);
    let receipt = receipt.unwrap();
    assert!(receipt.num_parts as usize >= parts.len());
    assert_eq!(receipt.kv_bytes, u64::from(receipt.num_parts) * layout(1).head_bytes() as u64);
    assert_eq!(receipt.batches.is_some(), world.caches.is_some());
    assert!(receipt.batches.is_none_or(|times| times.announced_at <= times.landed_at));
    let wanted: BTreeSet<_> = parts.iter().map(|part| part.slice).collect();
    assert_eq!(slices.into_iter().collect::<BTreeSet<_>>(), wanted);
    drop(ticket);
    world.nothing_more().await;
    assert_eq!(world.receiver.num_open(), 0);
}

/// The receiver has the last word.
async fn commit_can_be_rejected(factory: Factory) {
    let Some(mut world) = factory(Options::default()).await else { return };
    let lane = connect(&world).await;
    let ticket = posted(&world, &*lane, 1).await;
    let (result, ()) = tokio::join!(ticket.commit(FIRST), async {
        match world.until_terminal().await.1 {
            ArrivalEvent::Commit { reply, .. } => reply.reject(AbortReason::WrongParts),
            other => panic!("wanted Commit, got {other:?}"),
        }
    });
    let peer = World::decode_peer();
    let reason = AbortReason::WrongParts;
    assert_eq!(result.unwrap_err(), TransferError::AbortedByPeer { ticket: TicketId(1), peer, reason });
    world.nothing_more().await;
}

/// Promise 1.
async fn an_abort_is_terminal(factory: Factory) {
    let Some(mut world) = factory(Options::default()).await else { return };
    let lane = connect(&world).await;
    let ticket = posted(&world, &*lane, 1).await;
    send_all(&world, &*ticket, &some_parts()).await;
    ticket.abort(AbortReason::EngineFailed).await.unwrap();
    assert!(matches!(world.hand_over(&*ticket, &[part(1, 0, 0)]), Err(TransferError::GivenUp { .. })));
    let (_, terminal) = world.until_terminal().await;
    assert!(matches!(terminal, ArrivalEvent::Ended(EndCause::Aborted(AbortReason::EngineFailed))), "{terminal:?}");
    world.nothing_more().await;
}

/// Promise 1: nobody is left waiting by a task that just ends.
async fn a_dropped_ticket_aborts(factory: Factory) {
    let Some(mut world) = factory(Options::default()).await else { return };
    let lane = connect(&world).await;
    let ticket = posted(&world, &*lane, 1).await;
    send_all(&world, &*ticket, &some_parts()[..2]).await;
    drop(ticket);
    let (_, terminal) = world.until_terminal().await;
    assert!(matches!(terminal, ArrivalEvent::Ended(EndCause::Aborted(AbortReason::Cancelled))), "{terminal:?}");
    assert_eq!(world.receiver.num_open(), 0);
}

/// Promises 1 and 4.
async fn revoked_before_begin(factory: Factory) {
    let Some(mut world) = factory(Options::default()).await else { return };
    let lane = connect(&world).await;
    world.receiver.post(TicketId(1), &World::prefill_peer()).unwrap();
    assert_eq!(world.receiver.revoke(TicketId(1), AbortReason::Expired), Revoked::Now);
    assert_eq!(world.receiver.revoke(TicketId(1), AbortReason::Expired), Revoked::NotOpen);
    assert!(matches!(lane.begin(TicketId(1), DpGroup(0)).await, Err(TransferError::Gone { .. })));
    world.nothing_more().await;
}

/// Promise 1, the fence: a revoked ticket ends only when its sender has acknowledged, and then stays silent.
async fn revoked_while_parts_are_on_their_way(factory: Factory) {
    let Some(mut world) = factory(Options::default()).await else { return };
    let lane = connect(&world).await;
    let ticket = posted(&world, &*lane, 1).await;
    send_all(&world, &*ticket, &some_parts()[..8]).await;
    assert_eq!(world.receiver.revoke(TicketId(1), AbortReason::Cancelled), Revoked::Pending);
    let (_, terminal) = world.until_terminal().await;
    assert!(matches!(terminal, ArrivalEvent::Ended(EndCause::Revoked)), "{terminal:?}");
    assert_eq!(world.receiver.revoke(TicketId(1), AbortReason::Cancelled), Revoked::NotOpen);
    for part in some_parts() {
        assert!(matches!(world.hand_over(&*ticket, &[part]), Err(TransferError::AbortedByPeer { .. })));
    }
    assert!(matches!(ticket.reserve(1).await, Err(TransferError::AbortedByPeer { .. })));
    assert!(matches!(ticket.commit(FIRST).await, Err(TransferError::AbortedByPeer { .. })));
    world.nothing_more().await;
}

/// Promise 4, and 5 for tickets.
async fn unknown_tickets_are_gone(factory: Factory) {
    let Some(mut world) = factory(Options::default()).await else { return };
    let lane = connect(&world).await;
    assert!(matches!(lane.begin(TicketId(9), DpGroup(0)).await, Err(TransferError::Gone { .. })));
    world.receiver.post(TicketId(10), &peer("prefill-0", 2)).unwrap();
    assert!(
        matches!(lane.begin(TicketId(10), DpGroup(0)).await, Err(TransferError::Gone { .. })),
        "posted for an earlier life"
    );
    let ticket = posted(&world, &*lane, 11).await;
    assert!(matches!(lane.begin(TicketId(11), DpGroup(0)).await, Err(TransferError::Duplicate { .. })));
    let other_lane = connect(&world).await;
    assert!(
        matches!(other_lane.begin(TicketId(11), DpGroup(0)).await, Err(TransferError::Gone { .. })),
        "bound to the first lane"
    );
    ticket.abort(AbortReason::Cancelled).await.unwrap();
    world.until_terminal().await;
}

/// Promise 5.
async fn another_life_is_refused(factory: Factory) {
    let Some(world) = factory(Options::default()).await else { return };
    let earlier = peer("decode-0", 6);
    let error = world.sender.connect(&world.address, &earlier).await.err().unwrap();
    assert_eq!(error, TransferError::WrongPeer { wanted: earlier, found: World::decode_peer() });
    assert_eq!(error.is_new_incarnation(), Some(World::decode_peer().incarnation));
}

/// Promise 5, for every field that must agree.
async fn layouts_are_compared(factory: Factory) {
    type Change = fn(&mut KvLayout);
    let changes: [(&str, Change); 7] = [
        ("full_layers", |layout| layout.full_layers = vec![1]),
        ("window_layers", |layout| layout.window_layers = vec![0, 2, 4]),
        ("kv_heads", |layout| layout.kv_heads = 8),
        ("head_dim", |layout| layout.head_dim = 16),
        ("page_tokens", |layout| layout.page_tokens = 8),
        ("window", |layout| layout.window = 4),
        ("dtype", |layout| layout.dtype = KvDtype::Bf16),
    ];
    for (field, change) in changes {
        let mut options = Options::default();
        change(&mut options.sender_layout);
        let Some(world) = factory(options).await else { return };
        match world.sender.connect(&world.address, &World::decode_peer()).await.err() {
            Some(TransferError::Layout { mismatch, .. }) => assert_eq!(mismatch.field, field),
            other => panic!("{field}: wanted Layout, got {other:?}"),
        }
    }
}

/// Promise 3.
async fn a_corrupt_part_ends_its_ticket_only(factory: Factory) {
    let Some(mut world) = factory(Options::default()).await else { return };
    let lane = connect(&world).await;
    let bad = posted(&world, &*lane, 1).await;
    let mut damaged = part(1, 0, 0);
    let mut bytes = damaged.bytes.to_vec();
    bytes[5] ^= 4;
    damaged.bytes = Bytes::from(bytes);
    let slice = damaged.slice;
    bad.reserve(4 * damaged.bytes.len()).await.unwrap();
    for part in [damaged, part(1, 0, 1)] {
        // The second may come when the first has been found out.
        if let Err(error) = world.hand_over(&*bad, &[part]) {
            assert!(matches!(error, TransferError::AbortedByPeer { reason: AbortReason::Corrupt, .. }), "{error}");
        }
    }
    let commit = tokio::time::timeout(Duration::from_secs(4), bad.commit(FIRST));
    let (result, (_, terminal)) = tokio::join!(commit, world.until_terminal());
    let result = result.unwrap();
    assert!(matches!(&terminal, ArrivalEvent::Ended(cause) if *cause == EndCause::Corrupt { slice }), "{terminal:?}");
    match result {
        Err(TransferError::AbortedByPeer { reason, .. }) => assert_eq!(reason, AbortReason::Corrupt),
        other => panic!("wanted AbortedByPeer, got {other:?}"),
    }
    let good = posted(&world, &*lane, 2).await;
    send_all(&world, &*good, &[part(1, 0, 0)]).await;
    let (receipt, ()) = tokio::join!(good.commit(FIRST), async {
        match world.until_terminal().await.1 {
            ArrivalEvent::Commit { reply, .. } => reply.accept(),
            other => panic!("wanted Commit, got {other:?}"),
        }
    });
    receipt.unwrap();
}

/// Promise 3, for slices that are not in the layout.
async fn a_malformed_part_ends_its_ticket_only(factory: Factory) {
    let Some(mut world) = factory(Options::default()).await else { return };
    let lane = connect(&world).await;
    let straddling = {
        let mut slice = part(1, 0, 0).slice;
        slice.head_count = 2; // the receiver has one head a rank
        Part::new(slice, Bytes::from(vec![0; 2 * layout(1).head_bytes()]))
    };
    let wrong_group = {
        let mut slice = part(1, 0, 0).slice;
        slice.layer = 0;
        Part::new(slice, Bytes::from(vec![0; layout(1).head_bytes()]))
    };
    let short = Part::new(part(1, 0, 0).slice, Bytes::from(vec![0; layout(1).head_bytes() - 1]));
    let overflowing = {
        let mut slice = part(1, 0, 0).slice;
        slice.head_start = u32::MAX;
        Part::new(slice, Bytes::from(vec![0; layout(1).head_bytes()]))
    };
    for (id, malformed) in [straddling, wrong_group, short, overflowing].into_iter().enumerate() {
        let ticket = posted(&world, &*lane, id as u128).await;
        ticket.reserve(4 * malformed.bytes.len()).await.unwrap();
        match world.hand_over(&*ticket, std::slice::from_ref(&malformed)) {
            Ok(()) => {}
            // What the sender's own cache does not hold does not leave it.
            Err(TransferError::DataPath { .. }) if world.caches.is_some() => {
                ticket.abort(AbortReason::EngineFailed).await.unwrap();
                world.until_terminal().await;
                continue;
            }
            Err(error) => panic!("{error}"),
        }
        let (_, (slices, terminal)) = tokio::join!(ticket.commit(FIRST), world.until_terminal());
        assert!(slices.is_empty());
        let cause = EndCause::Malformed { slice: malformed.slice, bytes: malformed.bytes.len() };
        assert!(matches!(&terminal, ArrivalEvent::Ended(found) if *found == cause), "{terminal:?}");
    }
    assert!(lane.lost().is_none());
}

/// Promise 6.
async fn bytes_in_flight_are_bounded(factory: Factory) {
    let part_bytes = layout(1).head_bytes();
    let mut config = quick();
    config.in_flight_bytes_max = 8 * part_bytes as u32;
    let Some(world) = factory(Options { config, sink_capacity: 4, ..Options::default() }).await else { return };
    let lane = connect(&world).await;
    let ticket = posted(&world, &*lane, 1).await;
    assert!(matches!(ticket.reserve(9 * part_bytes).await, Err(TransferError::NoRoom { .. })));
    assert!(matches!(ticket.try_reserve(9 * part_bytes), Err(TransferError::NoRoom { .. })));
    let other = posted(&world, &*lane, 2).await;
    assert_eq!(other.try_reserve(5 * part_bytes), Ok(true));
    assert_eq!(ticket.try_reserve(4 * part_bytes), Ok(false), "the lane has room for 8 parts");
    other.abort(AbortReason::Cancelled).await.unwrap();
    assert_eq!(ticket.try_reserve(4 * part_bytes), Ok(true), "an aborted ticket gives its room back");
    assert_eq!(ticket.try_reserve(5 * part_bytes), Ok(false), "there will be room when these have left");
    (0..4).for_each(|head| world.hand_over(&*ticket, &[part(1, 0, head)]).unwrap());
    // Two, since the decorator may hold the first one back.
    let unreserved = (0..2).map(|head| world.hand_over(&*ticket, &[part(1, 0, head)])).find_map(Result::err);
    assert!(matches!(unreserved, Some(TransferError::NoRoom { .. })), "no room was set aside: {unreserved:?}");
    // Nobody takes arrivals: the pipe fills, then the lane, then reserving fails within its bound.
    let mut taken = 0_usize;
    let started = tokio::time::Instant::now();
    let error = loop {
        if let Err(error) = ticket.reserve(4 * part_bytes).await {
            break error;
        }
        for head in 0..4 {
            if let Err(error) = world.hand_over(&*ticket, &[part(1, taken as u32 % 200, head)]) {
                assert!(matches!(error, TransferError::PeerLost { .. }), "{error}");
            }
        }
        taken += 1;
        // A kernel's socket buffers take megabytes; these must end too.
        assert!(taken < 1_000_000, "the lane takes bytes without end");
    };
    match &error {
        TransferError::Timeout { .. } => {}
        TransferError::PeerLost { cause, .. } => assert!(matches!(cause, LossCause::Stalled(_)), "{error}"),
        other => panic!("wanted a bound to strike, got {other:?}"),
    }
    assert!(started.elapsed() < Duration::from_secs(30));
}

/// Promise 7, seen from the receiver.
async fn a_closed_lane_ends_both_sides(factory: Factory) {
    let Some(mut world) = factory(Options::default()).await else { return };
    let lane = connect(&world).await;
    let ticket = posted(&world, &*lane, 1).await;
    let revoked = posted(&world, &*lane, 2).await;
    lane.close();
    assert!(matches!(ticket.commit(FIRST).await, Err(TransferError::PeerLost { .. })));
    assert!(matches!(revoked.abort(AbortReason::Cancelled).await, Err(TransferError::PeerLost { .. })));
    let mut lost = BTreeSet::new();
    while lost.len() < 2 {
        let arrival = world.arrival().await;
        match arrival.event {
            ArrivalEvent::Begin { .. } => {}
            ArrivalEvent::Ended(EndCause::Lost(_)) => assert!(lost.insert(arrival.ticket)),
            other => panic!("wanted Lost, got {other:?}"),
        }
    }
    assert_eq!(world.receiver.num_open(), 0);
    assert!(lane.lost().is_some());
    assert!(matches!(lane.begin(TicketId(3), DpGroup(0)).await, Err(TransferError::PeerLost { .. })));
}

/// Promise 7, seen from the sender.
async fn a_lost_receiver_ends_the_sender(factory: Factory) {
    let Some(mut world) = factory(Options::default()).await else { return };
    let lane = connect(&world).await;
    let ticket = posted(&world, &*lane, 1).await;
    let (result, ()) = tokio::join!(ticket.commit(FIRST), async { world.receiver_stop.cancel() });
    assert!(matches!(result, Err(TransferError::PeerLost { .. } | TransferError::AbortedByPeer { .. })), "{result:?}");
    let (_, terminal) = world.until_terminal().await;
    drop((terminal, ticket));
    assert_eq!(world.receiver.num_open(), 0);
}

async fn tickets_are_bounded(factory: Factory) {
    let mut config = quick();
    config.tickets_max = 2;
    let Some(world) = factory(Options { config, ..Options::default() }).await else { return };
    let sender = World::prefill_peer();
    world.receiver.post(TicketId(1), &sender).unwrap();
    assert!(matches!(world.receiver.post(TicketId(1), &sender), Err(TransferError::Duplicate { .. })));
    world.receiver.post(TicketId(2), &sender).unwrap();
    assert!(matches!(world.receiver.post(TicketId(3), &sender), Err(TransferError::TooManyTickets { limit: 2 })));
    world.receiver.revoke(TicketId(1), AbortReason::Cancelled);
    world.receiver.post(TicketId(3), &sender).unwrap();
}

/// All faults at once: each ticket commits with every part intact, or ends; never both, never neither.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_ticket_ends_once_whatever_strikes() {
    storm(|plan| support::faulty(Options::default(), plan).map(Some).boxed()).await;
}

/// The same where frames only announce.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_announced_ticket_ends_once_whatever_strikes() {
    storm(|plan| memory::faulty(Options::default(), plan).map(Some).boxed()).await;
}

#[cfg(feature = "cuda")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_ticket_between_caches_on_a_gpu_ends_once_whatever_strikes() {
    storm(|plan| cuda::faulty(Options::default(), plan)).await;
}

#[cfg(feature = "cuda")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_ticket_between_two_gpus_ends_once_whatever_strikes() {
    storm(|plan| cuda::faulty_over_nccl(Options::default(), plan)).await;
}

async fn storm(factory: impl Fn(FaultPlan) -> BoxFuture<'static, Option<World>>) {
    let delay_max = Duration::from_millis(2);
    for seed in 0..4 {
        let plan = FaultPlan { seed, corrupt: 4, duplicate: 50, reorder: 100, disconnect: 3, delay: 100, delay_max };
        let Some(mut world) = factory(plan).await else { return };
        let mut lane = connect(&world).await;
        let (mut committed, mut ended) = (0, 0);
        for id in 0..60 {
            if lane.lost().is_some() {
                lane = connect(&world).await;
            }
            world.receiver.post(TicketId(id), &World::prefill_peer()).unwrap();
            let caches = world.caches.clone();
            let send = async {
                let ticket = lane.begin(TicketId(id), DpGroup(0)).await?;
                let parts = some_parts();
                ticket.reserve(parts.iter().map(|part| part.bytes.len()).sum()).await?;
                hand_over(caches.as_deref(), &*ticket, &parts)?;
                ticket.commit(FIRST).await
            };
            let (sent, received) = tokio::join!(send, async {
                let (slices, terminal) = world.until_terminal().await;
                match terminal {
                    ArrivalEvent::Commit { reply, .. } => {
                        assert_eq!(slices.into_iter().collect::<BTreeSet<_>>().len(), some_parts().len());
                        reply.accept();
                        true
                    }
                    _ => false,
                }
            });
            assert!(sent.is_err() || received, "seed {seed}, ticket {id}: {sent:?} at the sender only");
            if received { committed += 1 } else { ended += 1 }
        }
        let faults = world.faults.clone().unwrap();
        assert!(faults.corrupt.load(Ordering::Relaxed) + faults.disconnect.load(Ordering::Relaxed) > 0);
        assert!(committed > 0 && ended > 0, "seed {seed}: {committed} committed, {ended} ended");
        assert_eq!(world.receiver.num_open(), 0);
    }
}
