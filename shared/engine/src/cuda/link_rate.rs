//! How fast GPUs reach each other here, measured: what the bounds of several refer to.

use device::{Device, DeviceBuffer, Graph};
use half::bf16;
use kernels::{Alarm, AllReduce, Exchange, KernelError, Kernels, Mailbox, PeerGroup, PeerSizes, Summand};

use crate::EngineError;

/// Bytes of a copy.
const BYTES: usize = 256 << 20;
const REPEATS: usize = 10;
/// Sums in a graph.
const SUMS: usize = 200;

/// What lies between the GPUs of a group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkRate {
    /// A sum of one token over all, in a graph of many.
    pub all_reduce_s: f64,
    /// The first GPU writing to the second.
    pub bytes_per_s: f64,
}

/// Measures it between 2, 4 or 8 GPUs, for tokens of `hidden` values: the best of ten.
///
/// # Errors
/// [`EngineError::Gpu`] without these GPUs, or if they cannot reach each other.
pub fn link_rate(devices: &[u32], hidden: usize) -> Result<LinkRate, EngineError> {
    let sizes = PeerSizes { ranks: devices.len(), hidden, packet_tokens: 1, bulk_tokens: 1 };
    let mut own = Vec::new();
    for ordinal in devices {
        let device = Device::open(*ordinal)?;
        let stream = device.stream()?;
        let gathered: DeviceBuffer<f32> = stream.zeros(1)?;
        own.push((Kernels::load(&device)?, Mailbox::new(&stream, sizes)?, gathered, stream));
    }
    let addresses: Vec<_> = own.iter().map(|(_, mailbox, gathered, _)| mailbox.address(gathered)).collect();
    let alarm = Alarm::new(&own[0].3)?;
    let mut ranks = Vec::new();
    for (rank, (kernels, mailbox, _, stream)) in own.into_iter().enumerate() {
        let mut group = PeerGroup::new(&stream, rank, mailbox, &addresses, alarm.clone())?;
        let (values, mut out) = (stream.zeros::<bf16>(hidden)?, stream.zeros::<bf16>(hidden)?);
        let sum = |_| {
            let (part, exchange) = (Summand::Values(values.view()), Exchange::Packets);
            AllReduce { part, norm: None, out: out.view_mut(), group: &mut group, exchange }.enqueue(&kernels, &stream)
        };
        let graph = stream.capture::<KernelError>(|_| (0..SUMS).try_for_each(sum))?;
        ranks.push((graph, stream, group));
    }
    let mut best_us = f64::INFINITY;
    for _ in 0..REPEATS {
        let before = ranks[0].1.record()?;
        for (graph, stream, _) in &mut ranks {
            Graph::launch(graph, stream)?;
        }
        let after = ranks[0].1.record()?;
        after.wait()?;
        best_us = best_us.min(after.elapsed_us(&before)?);
    }
    for (_, stream, _) in &ranks {
        stream.synchronize()?;
    }
    Ok(LinkRate { all_reduce_s: best_us / SUMS as f64 / 1e6, bytes_per_s: copy_rate(devices)? })
}

fn copy_rate(devices: &[u32]) -> Result<f64, EngineError> {
    let [from, to] = [Device::open(devices[0])?.stream()?, Device::open(devices[1])?.stream()?];
    let (source, target) = (from.zeros::<u8>(BYTES)?, to.zeros::<u8>(BYTES)?);
    to.synchronize()?;
    let target = target.share();
    target.open(&from)?;
    let mut best_us = f64::INFINITY;
    for _ in 0..REPEATS {
        let before = from.record()?;
        from.copy_to_peer(&target, source.view())?;
        let after = from.record()?;
        after.wait()?;
        best_us = best_us.min(after.elapsed_us(&before)?);
    }
    Ok(BYTES as f64 / best_us * 1e6)
}
