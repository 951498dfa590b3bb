//! What is particular to lanes of frames: peers that fall silent, never answer, or speak nonsense; and the lanes above it.

use std::sync::Arc;
use std::time::Duration;

use crate::support::{self, Options, World, layout, peer, quick};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use transfer::data::DataOffer;
use transfer::frame::{Decoded, Frame};
use transfer::framed::{Connector, FramedSender, Stream};
use transfer::{
    AbortReason, ArrivalEvent, EndCause, Lanes, LossCause, ReceiveTransport, Revoked, SendTransport, TransferError,
    TransportChoice,
};
use types::{DpGroup, TicketId};

/// Hands out the other end of a pipe, on which the test plays the receiver.
struct PlayedPeer(std::sync::Mutex<Option<DuplexStream>>);

impl Connector for PlayedPeer {
    fn connect<'a>(&'a self, _address: &'a str) -> BoxFuture<'a, std::io::Result<Box<dyn Stream>>> {
        let stream = self.0.lock().unwrap().take().map(|stream| Box::new(stream) as Box<dyn Stream>);
        async { stream.ok_or_else(|| std::io::Error::other("connected before")) }.boxed()
    }
}

fn sender_to_played_peer() -> (FramedSender, DuplexStream) {
    let (ours, theirs) = tokio::io::duplex(1 << 16);
    let connector = Arc::new(PlayedPeer(std::sync::Mutex::new(Some(ours))));
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    (FramedSender::new(connector, World::prefill_peer(), layout(2), quick(), tasks, stop), theirs)
}

async fn write(stream: &mut DuplexStream, frame: &Frame) {
    stream.write_all(&frame.encode().0).await.unwrap();
}

fn on_host() -> DataOffer {
    DataOffer::host_only(TransportChoice::Auto)
}

fn welcome() -> Frame {
    Frame::Welcome { receiver: World::decode_peer(), layout: layout(4), accepted: true, offer: on_host() }
}

#[tokio::test(start_paused = true)]
async fn a_stopped_peer_is_noticed_within_the_bound() {
    let (sender, mut played) = sender_to_played_peer();
    write(&mut played, &welcome()).await;
    let lane = sender.connect("", &World::decode_peer()).await.unwrap();
    let bound = Duration::from_millis(quick().peer_silence_timeout_ms);
    for _ in 0..20 {
        tokio::time::sleep(bound * 3 / 4).await;
        assert_eq!(lane.lost(), None, "its pings keep it alive");
        write(&mut played, &Frame::Ping).await;
    }
    tokio::time::sleep(bound + Duration::from_millis(10)).await;
    assert_eq!(lane.lost(), Some(LossCause::Silent(bound)));
}

#[tokio::test(start_paused = true)]
async fn an_unanswered_begin_ends_within_the_bound() {
    let (sender, mut played) = sender_to_played_peer();
    write(&mut played, &welcome()).await;
    let lane = sender.connect("", &World::decode_peer()).await.unwrap();
    let ping = async {
        loop {
            write(&mut played, &Frame::Ping).await;
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    let error = tokio::select! {
        result = lane.begin(TicketId(1), DpGroup(0)) => result.err().unwrap(),
        () = ping => unreachable!("pings go on for ever"),
    };
    assert!(matches!(error, TransferError::Timeout { waited_for: "accept", .. }), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_never_greets_is_unreachable() {
    let (sender, _played) = sender_to_played_peer();
    let error = sender.connect("somewhere:1", &World::decode_peer()).await.err().unwrap();
    assert!(matches!(error, TransferError::Unreachable { .. } | TransferError::PeerLost { .. }), "{error}");
}

/// A sender that is alive but never acknowledges an ABORT: its connection is cut, and only then the ticket is over.
#[tokio::test(start_paused = true)]
async fn an_unanswered_revocation_cuts_the_connection() {
    let mut world = support::piped(Options::default()).await;
    let (mut played, theirs) = tokio::io::duplex(1 << 16);
    let (receiver, stop) = (Arc::clone(&world.receiver), CancellationToken::new());
    let tasks = TaskTracker::new();
    tasks.spawn(async move { receiver.serve(Box::new(theirs), stop).await });
    let ticket = TicketId(1);
    world.receiver.post(ticket, &World::prefill_peer()).unwrap();
    let hello = Frame::Hello {
        sender: World::prefill_peer(),
        receiver: World::decode_peer(),
        layout: layout(1),
        offer: on_host(),
    };
    write(&mut played, &hello).await;
    write(&mut played, &Frame::Begin(ticket)).await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!(world.receiver.revoke(ticket, AbortReason::Expired), Revoked::Pending);
    let started = tokio::time::Instant::now();
    let pings = async {
        while played.write_all(&Frame::Ping.encode().0).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let ((_, terminal), ()) = tokio::join!(world.until_terminal(), pings);
    assert!(matches!(terminal, ArrivalEvent::Ended(EndCause::Revoked)), "{terminal:?}");
    let bound = quick().ack_timeout_ms + 2 * quick().ping_interval_ms;
    assert!(started.elapsed() <= Duration::from_millis(bound + 200), "{:?}", started.elapsed());
    assert_eq!(world.receiver.num_open(), 0);
}

#[tokio::test]
async fn lanes_are_shared_and_replaced() {
    let world = support::piped(Options::default()).await;
    let lanes = Lanes::new(Arc::from(world.sender), &quick());
    let decode = World::decode_peer();
    let first = lanes.lane("pipe", &decode).await.unwrap();
    assert!(Arc::ptr_eq(&first, &lanes.lane("pipe", &decode).await.unwrap()));
    assert!(lanes.lane("pipe", &peer("decode-0", 6)).await.is_err(), "an earlier life");
    assert_eq!(first.lost(), None, "which does not cost the present lane");
    first.close();
    let second = lanes.lane("pipe", &decode).await.unwrap();
    assert!(!Arc::ptr_eq(&first, &second));
    assert_eq!(lanes.num_open(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever a peer says, before or after a proper greeting, the receiver closes the connection and lives.
    #[test]
    fn the_receiver_survives_any_bytes(greet in any::<bool>(), bytes in prop::collection::vec(any::<u8>(), 0..600), kind in 0_u8..19) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let world = support::piped(Options::default()).await;
            world.receiver.post(TicketId(0), &World::prefill_peer()).unwrap();
            let (mut played, theirs) = tokio::io::duplex(1 << 16);
            if greet {
                let hello =
                    Frame::Hello { sender: World::prefill_peer(), receiver: World::decode_peer(), layout: layout(1), offer: on_host() };
                write(&mut played, &hello).await;
                // A frame with a sound envelope and random fields.
                let mut head = vec![b'K', b'V', kind, 0];
                head.extend((bytes.len() as u16).to_le_bytes());
                head.extend(0_u32.to_le_bytes());
                head.extend(&bytes);
                let crc = crc32fast::hash(&head);
                head.extend(crc.to_le_bytes());
                played.write_all(&head).await.unwrap();
            } else {
                played.write_all(&bytes).await.unwrap();
            }
            let serve = world.receiver.serve(Box::new(theirs), CancellationToken::new());
            tokio::time::timeout(Duration::from_secs(60), serve).await.expect("the connection ends by itself");
            let mut rest = Vec::new();
            played.read_to_end(&mut rest).await.unwrap();
        });
    }

    /// The parser alone: total, and it never takes more than it was given.
    #[test]
    fn the_parser_is_total(bytes in prop::collection::vec(any::<u8>(), 0..300), magic in any::<bool>()) {
        let mut buf = bytes::BytesMut::from(&bytes[..]);
        if magic && buf.len() > 1 {
            buf[..2].copy_from_slice(b"KV");
        }
        let before = buf.len();
        if let Ok(Decoded::NeedMore(missing)) = Frame::decode(&mut buf, 1 << 10) {
            prop_assert!(missing > 0 && missing <= 1 << 17, "asks for {missing} bytes");
            prop_assert_eq!(buf.len(), before);
        }
    }

    /// One flipped bit anywhere in a frame's head is found; in the payload the part's own checksum finds it.
    #[test]
    fn a_flipped_bit_is_found(layer in 0_u32..4, page in 0_u32..9, head in 0_u32..4, bit in any::<prop::sample::Index>()) {
        let frame = Frame::Part(TicketId(3), support::part(layer, page, head));
        let (first, payload) = frame.encode();
        let mut buf = bytes::BytesMut::from(&[&first[..], &payload[..]].concat()[..]);
        let mut intact = buf.clone();
        prop_assert_eq!(Frame::decode(&mut intact, 1 << 10), Ok(Decoded::Frame(frame)));
        prop_assert!(intact.is_empty());
        let bit = bit.index(8 * buf.len());
        buf[bit / 8] ^= 1 << (bit % 8);
        match Frame::decode(&mut buf, 1 << 10) {
            Ok(Decoded::Frame(Frame::Part(_, part))) => prop_assert!(!part.is_intact()),
            Ok(Decoded::Frame(other)) => prop_assert!(false, "became {other:?}"),
            Ok(Decoded::NeedMore(_)) | Err(_) => {}
        }
    }
}
