//! Communicators between two GPUs of one process, each driven by a thread. Without two GPUs and NCCL they skip themselves.

#![allow(clippy::unwrap_used)] // helpers of tests fail as tests do

mod skip;

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use device::nccl::{Abort, Communicator, CommunicatorConfig, Nccl, NcclError, UniqueId};
use device::{Device, DeviceError, Stream, probe};
use half::bf16;
use skip::skip;

const BOUND: Duration = Duration::from_secs(20);

/// Whether `gpus` GPUs and NCCL are here.
fn present(gpus: u32) -> bool {
    match (probe(), Nccl::load()) {
        (Ok(count), Ok(_)) if count >= gpus => return true,
        (Ok(count), Ok(_)) => skip(gpus, format!("{count} GPUs, {gpus} are needed")),
        (Err(DeviceError::Unavailable { reason }), _) => skip(gpus, reason),
        (_, Err(error @ NcclError::LibraryMissing { .. })) => skip(gpus, error),
        (probed, loaded) => panic!("{probed:?}, {loaded:?}"),
    }
    false
}

fn config(name: &str) -> CommunicatorConfig {
    CommunicatorConfig { name: name.into(), max_ctas: Some(4), init_timeout: BOUND, call_timeout: BOUND }
}

/// Runs `part` as each of two ranks, on GPUs 0 and 1, and gives what they return.
fn as_two_ranks<R: Send + 'static>(
    name: &'static str,
    part: impl Fn(Communicator, Stream) -> R + Send + Sync + 'static,
) -> Option<[R; 2]> {
    if !present(2) {
        return None;
    }
    let id = UniqueId::new().unwrap();
    let part = Arc::new(part);
    let ranks = [0, 1].map(|rank| {
        let part = part.clone();
        thread::spawn(move || {
            let device = Device::open(rank).unwrap();
            let stream = device.stream().unwrap();
            let communicator = Communicator::init(&device, &id, 2, rank, &config(name)).unwrap();
            assert_eq!((communicator.rank(), communicator.ranks()), (rank, 2));
            part(communicator, stream)
        })
    });
    Some(ranks.map(|rank| rank.join().unwrap()))
}

/// Waits for the stream without hanging the test.
fn finished(stream: &Stream, within: Duration) -> bool {
    stream.record().unwrap().passes_within(within)
}

#[test]
fn bytes_go_to_the_peer_and_back() {
    as_two_ranks("send-recv", |communicator, stream| {
        let (rank, peer) = (communicator.rank(), 1 - communicator.rank());
        let sent: Vec<u32> = (0..100_003).map(|i| i * 3 + rank).collect();
        let source = stream.upload(&sent).unwrap();
        let mut sink = stream.zeros::<u32>(sent.len()).unwrap();
        if rank == 0 {
            communicator.send(&stream, source.view(), peer).unwrap();
            communicator.recv(&stream, sink.view_mut(), peer).unwrap();
        } else {
            communicator.recv(&stream, sink.view_mut(), peer).unwrap();
            communicator.send(&stream, source.view(), peer).unwrap();
        }
        assert!(finished(&stream, BOUND));
        let got = stream.download(sink.view()).unwrap();
        assert!(got.iter().zip(&sent).all(|(got, sent)| *got == sent - rank + peer));
        assert!(matches!(communicator.send(&stream, source.view(), rank), Err(NcclError::NoSuchPeer { .. })));
        assert_eq!(communicator.check(), Ok(()));
        communicator.close(BOUND).unwrap();
    });
}

#[test]
fn a_group_exchanges_several_pieces_both_ways() {
    as_two_ranks("group", |communicator, stream| {
        let (rank, peer) = (communicator.rank(), 1 - communicator.rank());
        let source = stream.upload(&[[rank; 1000], [rank + 10; 1000]].concat()).unwrap();
        let (mut first, mut second) = (stream.zeros::<u32>(1000).unwrap(), stream.zeros::<u32>(1000).unwrap());
        communicator
            .group(|group| {
                group.send(&stream, source.slice(..1000), peer)?;
                group.send(&stream, source.slice(1000..), peer)?;
                group.recv(&stream, first.view_mut(), peer)?;
                group.recv(&stream, second.view_mut(), peer)
            })
            .unwrap();
        assert!(finished(&stream, BOUND));
        assert_eq!(stream.download(first.view()).unwrap(), [peer; 1000]);
        assert_eq!(stream.download(second.view()).unwrap(), [peer + 10; 1000]);
        communicator.close(BOUND).unwrap();
    });
}

#[test]
fn sums_and_gathers_over_ranks() {
    as_two_ranks("collectives", |communicator, stream| {
        let rank = communicator.rank();
        let mine = [rank as f32 + 1.0; 64];
        let mut sum = stream.upload(&mine).unwrap();
        communicator.all_reduce(&stream, sum.view_mut()).unwrap();
        let mut small = stream.upload(&mine.map(bf16::from_f32)).unwrap();
        communicator.all_reduce(&stream, small.view_mut()).unwrap();
        let part = stream.upload(&mine).unwrap();
        let mut all = stream.zeros::<f32>(128).unwrap();
        communicator.all_gather(&stream, part.view(), all.view_mut()).unwrap();
        let mut scattered = stream.zeros::<f32>(64).unwrap();
        communicator.reduce_scatter(&stream, all.view(), scattered.view_mut()).unwrap();
        let mut from_one = stream.upload(&mine).unwrap();
        communicator.broadcast(&stream, from_one.view_mut(), 1).unwrap();
        assert!(finished(&stream, BOUND));
        assert_eq!(stream.download(sum.view()).unwrap(), [3.0; 64]);
        assert_eq!(stream.download(small.view()).unwrap(), [bf16::from_f32(3.0); 64]);
        assert_eq!(stream.download(all.view()).unwrap(), [[1.0; 64], [2.0; 64]].concat());
        assert_eq!(stream.download(scattered.view()).unwrap(), [(rank as f32 + 1.0) * 2.0; 64]);
        assert_eq!(stream.download(from_one.view()).unwrap(), [2.0; 64]);
        let short = stream.zeros::<f32>(100).unwrap();
        let refused = communicator.all_gather(&stream, short.view(), all.view_mut());
        assert!(matches!(refused, Err(NcclError::Device(DeviceError::Length { .. }))), "{refused:?}");
        communicator.close(BOUND).unwrap();
    });
}

#[test]
fn collectives_can_be_captured() {
    as_two_ranks("captured", |communicator, stream| {
        let mut sum = stream.upload(&[1.0_f32; 2880]).unwrap();
        communicator.all_reduce(&stream, sum.view_mut()).unwrap();
        assert!(finished(&stream, BOUND));
        let mut graph = stream.capture::<NcclError>(|stream| communicator.all_reduce(stream, sum.view_mut())).unwrap();
        for _ in 0..3 {
            graph.launch(&stream).unwrap();
        }
        assert!(finished(&stream, BOUND));
        assert_eq!(stream.download(sum.view()).unwrap(), [16.0; 2880]);
        drop(graph);
        communicator.close(BOUND).unwrap();
    });
}

#[test]
fn a_receive_without_a_sender_is_aborted_and_the_device_goes_on() {
    let both = Arc::new(Barrier::new(2));
    as_two_ranks("abort", move |communicator, stream| {
        let peer = 1 - communicator.rank();
        let mut buffer = stream.zeros::<u8>(1 << 20).unwrap();
        // Connects the two, so that the receive below is enqueued without the peer.
        if peer == 1 {
            communicator.send(&stream, buffer.view(), peer).unwrap();
        } else {
            communicator.recv(&stream, buffer.view_mut(), peer).unwrap();
            assert!(finished(&stream, BOUND));
            communicator.recv(&stream, buffer.view_mut(), peer).unwrap();
            assert!(!finished(&stream, Duration::from_millis(200)), "nobody sends");
            assert_eq!(communicator.check(), Ok(()), "NCCL notices nothing");
        }
        both.wait();
        assert!(matches!(communicator.abort(BOUND), Abort::Returned { .. }));
        assert!(finished(&stream, BOUND), "the aborted kernel has left the stream");
        assert_eq!(communicator.check(), Err(NcclError::Ended));
        assert_eq!(communicator.send(&stream, buffer.view(), peer), Err(NcclError::Ended));
        let copy = stream.upload(&[5_u32; 1000]).unwrap();
        assert_eq!(stream.download(copy.view()).unwrap(), [5; 1000], "the context is whole");
    });
}

#[test]
fn a_rank_that_nobody_joins_gives_up_in_time() {
    if !present(1) {
        return;
    }
    let device = Device::open(0).unwrap();
    let (id, started) = (UniqueId::new().unwrap(), Instant::now());
    let alone = CommunicatorConfig { init_timeout: Duration::from_secs(1), ..config("alone") };
    let outcome = Communicator::init(&device, &id, 2, 0, &alone);
    assert!(matches!(outcome, Err(NcclError::Timeout { .. })), "{outcome:?}");
    assert!(started.elapsed() < Duration::from_secs(7), "{:?}", started.elapsed());
    let stream = device.stream().unwrap();
    let copy = stream.upload(&[5_u32; 10]).unwrap();
    assert_eq!(stream.download(copy.view()).unwrap(), [5; 10]);
}
