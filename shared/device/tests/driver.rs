//! Without a driver every entry answers with an error; with one, memory outlives its owner as promised.

#![allow(clippy::unwrap_used)] // helpers of tests fail as tests do

mod skip;

use device::{Device, DeviceError, PinnedBuffer, driver_version, probe};
use skip::skip;

fn open() -> Option<Device> {
    match Device::open(0) {
        Ok(device) => Some(device),
        Err(DeviceError::Unavailable { reason }) => {
            skip(1, reason);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_missing_gpu_is_an_error_and_never_a_panic() {
    match probe() {
        Ok(count) => assert!(matches!(Device::open(count), Err(DeviceError::Unavailable { .. }))),
        Err(error) => {
            assert!(matches!(error, DeviceError::Unavailable { .. }), "{error}");
            assert!(matches!(Device::open(0), Err(DeviceError::Unavailable { .. })));
        }
    }
}

#[test]
fn a_gpu_that_was_promised_and_is_missing_is_a_failure() {
    let this = std::env::current_exe().unwrap();
    for (promised, passes) in [("0", true), ("1", probe().is_ok())] {
        let mut test = std::process::Command::new(&this);
        let output = test.args(["copies_go_round", "--exact"]).env("DAMASK_TEST_GPUS", promised).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("running 1 test"), "{text}");
        assert_eq!(output.status.success(), passes, "DAMASK_TEST_GPUS={promised}: {text}");
    }
}

#[test]
fn the_driver_tells_its_version_or_is_missing() {
    match driver_version() {
        Ok((major, _)) => assert!(major >= 13 || probe().is_err(), "a driver that is too old is of no use"),
        Err(error) => assert!(matches!(error, DeviceError::Unavailable { .. }), "{error}"),
    }
}

#[test]
fn links_between_gpus_are_told() {
    let Some(first) = open() else { return };
    assert!(first.pci_address().unwrap().contains(':'));
    let Ok(second) = Device::open(1) else { return skip(2, "one GPU") };
    let (there, back) = (first.link_to(&second).unwrap(), second.link_to(&first).unwrap());
    assert_eq!(there, back);
    assert!(there.peer_access || !there.native_atomics, "{there:?}");
}

#[test]
fn copies_go_round() {
    let Some(device) = open() else { return };
    let stream = device.stream().unwrap();
    let host: Vec<u32> = (0..1000).collect();
    let buffer = stream.upload(&host).unwrap();
    let mut copy = stream.zeros::<u32>(1000).unwrap();
    stream.copy(copy.slice_mut(10..20), buffer.slice(500..510)).unwrap();
    let back = stream.download(copy.view()).unwrap();
    assert_eq!(back[10..20], host[500..510]);
    assert!(back[20..].iter().all(|value| *value == 0));

    let pinned = PinnedBuffer::zeros(&stream, 1000).unwrap();
    let landed = stream.download_into(buffer.view(), pinned).unwrap().wait().unwrap();
    assert_eq!(&landed[..], &host[..]);
}

#[test]
fn a_graph_keeps_its_memory_alive() {
    let Some(device) = open() else { return };
    let stream = device.stream().unwrap();
    let source = stream.upload(&[7_u32; 256]).unwrap();
    let mut sink = stream.zeros::<u32>(256).unwrap();
    let mut graph = stream.capture::<DeviceError>(|stream| stream.copy(sink.view_mut(), source.view())).unwrap();
    assert_eq!(graph.nodes(), 1);
    drop(source);
    let scribble = stream.upload(&[9_u32; 256]).unwrap();
    graph.launch(&stream).unwrap();
    assert_eq!(stream.download(sink.view()).unwrap(), [7; 256]);
    drop(scribble);
}

#[test]
fn memory_comes_back_after_its_last_use() {
    let Some(device) = open() else { return };
    let stream = device.stream().unwrap();
    const BYTES: usize = 64 << 20;
    let (before, _) = device.memory_bytes().unwrap();
    for _ in 0..64 {
        let mut buffer = stream.allocate::<u8>(BYTES).unwrap();
        stream.fill_bytes(buffer.view_mut(), 1).unwrap();
    }
    stream.synchronize().unwrap();
    drop(stream.allocate::<u8>(1).unwrap());
    let (after, _) = device.memory_bytes().unwrap();
    assert!(before.saturating_sub(after) < 4 * BYTES, "{before} bytes were free, now {after}");
}

#[test]
fn lengths_that_differ_are_refused() {
    let Some(device) = open() else { return };
    let stream = device.stream().unwrap();
    let mut buffer = stream.zeros::<u8>(4).unwrap();
    let error = stream.copy_from_host(buffer.view_mut(), &[1, 2, 3]).unwrap_err();
    assert_eq!(error, DeviceError::Length { what: "copy from host", expected: 4, found: 3 });
}
