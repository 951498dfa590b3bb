//! Whether KV moves between devices or through host memory, and what is counted on the way.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use chassis::Metrics;
use engine::KvPort;
use engine::group::EngineGroup;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use transfer::data::{DataCounters, Stage};
use transfer::{TransferConfig, TransportChoice};

use crate::error::WorkerError;

/// The caches that a data path would move pages of; `None` where the config or the engine leaves host memory only.
///
/// # Errors
/// `Config` for a transport by name that these caches do not have.
pub(crate) fn ports(engine: &EngineGroup, config: &TransferConfig) -> Result<Option<Vec<KvPort>>, WorkerError> {
    if config.transport == TransportChoice::Host {
        return Ok(None);
    }
    let obstacle = match engine.kv_ports() {
        None => "this engine's cache is in host memory",
        Some(ports) => return Ok(Some(ports.to_vec())),
    };
    match config.transport {
        TransportChoice::Auto => {
            tracing::info!(obstacle, "kv goes through host memory");
            Ok(None)
        }
        by_name => Err(WorkerError::Config(format!("transfer.transport is {by_name}, but {obstacle}"))),
    }
}

/// A label `stage`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StageLabel {
    stage: &'static str,
}

/// Labels of `damask_transfer_pair_bytes_per_second`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PairLabels {
    peer: String,
    sender_rank: u32,
    receiver_rank: u32,
    path: &'static str,
}

/// What data paths will count, mirrored into `metrics` at each scrape. The rate of a stage is that of its bytes over that of its seconds.
pub(crate) fn counters(metrics: &Metrics) -> Arc<DataCounters> {
    let counters = Arc::new(DataCounters::default());
    let bytes: Family<StageLabel, Counter> =
        metrics.counters("transfer_stage_bytes", "KV bytes that have passed a stage on the device");
    let seconds: Family<StageLabel, Counter<f64, AtomicU64>> =
        metrics.register("transfer_stage_seconds", "Seconds that devices spent in a stage", Family::default());
    let compared = metrics.counter("transfer_checksums_compared", "Checksums of KV that the receiver compared");
    let corrupt = metrics.counter("transfer_batches_corrupt", "Batches of KV in which a checksum did not match");
    let rates: Family<PairLabels, Gauge> =
        metrics.gauges("transfer_pair_bytes_per_second", "Rate between two ranks when their lane was opened");
    let source = Arc::clone(&counters);
    metrics.before_scrape(move || {
        for stage in Stage::ALL {
            let label = StageLabel { stage: stage.name() };
            let (total, seen) = (source.bytes(stage), bytes.get_or_create(&label).get());
            bytes.get_or_create(&label).inc_by(total.saturating_sub(seen));
            let (total, seen) = (source.seconds(stage), seconds.get_or_create(&label).get());
            seconds.get_or_create(&label).inc_by((total - seen).max(0.0));
        }
        let (all, wrong) = source.checksums();
        compared.inc_by(all.saturating_sub(compared.get()));
        corrupt.inc_by(wrong.saturating_sub(corrupt.get()));
        for (peer, rate) in source.rates() {
            let (sender_rank, receiver_rank) = (rate.sender_rank, rate.receiver_rank);
            let labels = PairLabels { peer, sender_rank, receiver_rank, path: rate.path.name() };
            rates.get_or_create(&labels).set(i64::from(rate.mb_per_s) * 1_000_000);
        }
    });
    counters
}
