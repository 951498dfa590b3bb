//! What a worker counts.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use chassis::Metrics;
use chassis::metrics::seconds_buckets;
use kv::PrefixCounts;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use types::{PageGroup, PagePoolLoad, WorkerState};

use crate::status::Status;

/// Labels of `damask_kv_pages`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, EncodeLabelSet)]
struct PageLabels {
    state: &'static str,
    group: &'static str,
}

/// A label `state`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: &'static str,
}

/// Why something failed: counters by cause, since an alert on a sum tells nothing.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct CauseLabel {
    /// A name from a fixed set.
    pub cause: &'static str,
}

/// A label `part`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PartLabel {
    part: &'static str,
}

/// A label `group`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GroupLabel {
    group: &'static str,
}

/// What prompts that begin alike save (prefill).
#[derive(Clone)]
pub struct PrefixMetrics {
    lookup_tokens: Counter,
    reused_tokens: Counter,
    boundaries: Counter,
    evictions: Family<GroupLabel, Counter>,
}

impl PrefixMetrics {
    fn new(metrics: &Metrics) -> Self {
        Self {
            lookup_tokens: metrics.counter("prefix_lookup_tokens", "Tokens of contexts that were looked up (prefill)"),
            reused_tokens: metrics.counter("prefix_reused_tokens", "Those of them that were cached (prefill)"),
            boundaries: metrics.counter("prefix_boundaries", "Places kept at which prompts can resume (prefill)"),
            evictions: metrics.counters(
                "prefix_evictions",
                "What made room for others: pages (group full) and places to resume at (group window) (prefill)",
            ),
        }
    }

    /// Counts what has happened between two looks at the scheduler.
    pub fn advance(&self, before: &PrefixCounts, now: &PrefixCounts) {
        self.lookup_tokens.inc_by(now.looked_up_tokens - before.looked_up_tokens);
        self.reused_tokens.inc_by(now.reused_tokens - before.reused_tokens);
        self.boundaries.inc_by(now.boundaries - before.boundaries);
        for (group, evictions) in [
            (PageGroup::Full, now.evicted_full - before.evicted_full),
            (PageGroup::Window, now.evicted_boundaries - before.evicted_boundaries),
        ] {
            self.evictions.get_or_create(&GroupLabel { group: group.name() }).inc_by(evictions);
        }
    }
}

/// The end of one transfer, by prefill's clock, in this order.
#[derive(Debug, Clone, Copy)]
pub struct TailTimes {
    /// The prompt's last layer was computed.
    pub last_layer: Instant,
    /// Its last KV lay in staging and was announced.
    pub announced_at: Instant,
    /// The decode worker said that all of it lies in its pages.
    pub landed_at: Instant,
    /// The decode worker's acknowledgement of COMMIT was noted: the sequence has joined its batch.
    pub joined_at: Instant,
}

/// What a transfer takes behind a prompt's last layer, where devices move KV.
#[derive(Clone)]
pub struct TransferTail {
    complete: Histogram,
    parts: Family<PartLabel, Histogram, fn() -> Histogram>,
}

impl TransferTail {
    fn new(metrics: &Metrics) -> Self {
        Self {
            complete: metrics.histogram(
                "transfer_complete_seconds",
                "Seconds from a prompt's last layer to the decode worker's word that its KV is complete (prefill)",
                tail_buckets(),
            ),
            parts: metrics.register(
                "transfer_tail_part_seconds",
                "Seconds from a prompt's last layer to the announcement of its last KV, from there until it has landed, and from there until \
                 the sequence has joined (prefill)",
                Family::new_with_constructor(|| Histogram::new(tail_buckets())),
            ),
        }
    }

    /// Adds one transfer.
    pub fn observe(&self, times: TailTimes) {
        let TailTimes { last_layer, announced_at, landed_at, joined_at } = times;
        let seconds = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64();
        self.complete.observe(seconds(last_layer, landed_at));
        let parts =
            [("announce", last_layer, announced_at), ("land", announced_at, landed_at), ("join", landed_at, joined_at)];
        for (part, from, to) in parts {
            self.parts.get_or_create(&PartLabel { part }).observe(seconds(from, to));
        }
    }
}

/// 50 µs to 100 ms, doubling.
fn tail_buckets() -> impl Iterator<Item = f64> {
    (0..12).map(|exponent| 5e-5 * f64::from(1_u32 << exponent))
}

/// Handles to the worker's metrics. Cheap to clone.
#[derive(Clone)]
pub struct WorkerMetrics {
    /// Steps finished.
    pub steps: Counter,
    /// Seconds of a step, from its launch to its output.
    pub step_seconds: Histogram,
    /// Tokens that the rows of a step computed.
    pub step_tokens: Histogram,
    /// Rows of a step.
    pub step_rows: Histogram,
    /// KV bytes sent or received.
    pub transfer_bytes: Counter,
    /// Seconds of a transfer, from the first byte to its acknowledgement (prefill) or commit (decode).
    pub transfer_seconds: Histogram,
    /// Seconds from a prompt's first step to its token (prefill).
    pub first_token_seconds: Histogram,
    /// Seconds from a prompt's token to the acknowledgement of its KV (prefill).
    pub transfer_tail_seconds: Histogram,
    /// What of that is what (prefill).
    pub transfer_tail: TransferTail,
    /// Transfers that failed, by cause; not those that were given up with their request.
    pub transfer_failures: Family<CauseLabel, Counter>,
    /// Requests that ended without an answer, by cause.
    pub request_failures: Family<CauseLabel, Counter>,
    /// Sequences that gave way for lack of pages.
    pub preemptions: Counter,
    /// What was reused of prompts (prefill).
    pub prefix: PrefixMetrics,
    /// Seconds of one mask: taking in a token of a grammar and saying what may follow.
    pub mask_seconds: Histogram,
}

impl WorkerMetrics {
    /// Registers everything; gauges mirror `status` at each scrape.
    #[must_use]
    pub fn new(metrics: &Metrics, status: &Arc<Status>) -> Self {
        mirror_status(metrics, Arc::clone(status));
        let powers_of_two = |most: u32| (0..=most).map(|exponent| f64::from(1_u32 << exponent));
        Self {
            steps: metrics.counter("steps", "Engine steps finished"),
            step_seconds: metrics.histogram("step_seconds", "Seconds of an engine step", seconds_buckets()),
            step_tokens: metrics.histogram("step_tokens", "Tokens that a step computed", powers_of_two(13)),
            step_rows: metrics.histogram("step_rows", "Sequences in a step", powers_of_two(8)),
            transfer_bytes: metrics.counter("transfer_bytes", "KV bytes transferred by committed tickets"),
            transfer_seconds: metrics.histogram(
                "transfer_seconds",
                "Seconds of a KV transfer, from its first byte to its end",
                seconds_buckets(),
            ),
            first_token_seconds: metrics.histogram(
                "first_token_seconds",
                "Seconds from a prompt's first step to its token",
                seconds_buckets(),
            ),
            transfer_tail_seconds: metrics.histogram(
                "transfer_tail_seconds",
                "Seconds from a prompt's token to the acknowledgement of its KV",
                seconds_buckets(),
            ),
            transfer_tail: TransferTail::new(metrics),
            transfer_failures: metrics
                .counters("transfer_failures", "KV transfers that failed; not those given up with their request"),
            request_failures: metrics.counters("request_failures", "Requests that ended without an answer"),
            preemptions: metrics.counter("preemptions", "Sequences that gave way for lack of pages"),
            prefix: PrefixMetrics::new(metrics),
            mask_seconds: metrics.histogram("mask_seconds", "Seconds to compute a grammar's mask", mask_buckets()),
        }
    }

    /// Counts a transfer that failed.
    pub fn transfer_failed(&self, cause: &'static str) {
        self.transfer_failures.get_or_create(&CauseLabel { cause }).inc();
    }

    /// Counts a request that failed.
    pub fn request_failed(&self, cause: &'static str) {
        self.request_failures.get_or_create(&CauseLabel { cause }).inc();
    }
}

/// 10 µs to 40 ms, doubling.
fn mask_buckets() -> impl Iterator<Item = f64> {
    (0..13).map(|exponent| 1e-5 * f64::from(1_u32 << exponent))
}

/// Pages by state and page group, summed over attention groups.
fn pages_by_state(pools: &[PagePoolLoad]) -> BTreeMap<PageLabels, i64> {
    let mut pages = BTreeMap::new();
    for PagePoolLoad { dp_group: _, group, total: _, free, reserved, landing, live, cached, quarantined } in pools {
        for (state, count) in [
            ("free", free),
            ("reserved", reserved),
            ("landing", landing),
            ("live", live),
            ("cached", cached),
            ("quarantined", quarantined),
        ] {
            *pages.entry(PageLabels { state, group: group.name() }).or_default() += i64::from(*count);
        }
    }
    pages
}

fn mirror_status(metrics: &Metrics, status: Arc<Status>) {
    let pages: Family<PageLabels, Gauge> = metrics.gauges("kv_pages", "KV pages by state and page group");
    let sequences: Family<StateLabel, Gauge> = metrics.gauges("sequences", "Sequences waiting and running");
    let states: Family<StateLabel, Gauge> = metrics.gauges("worker_state", "1 for the worker's present state");
    let loaded: Gauge = metrics.gauge("load_done", "Weights read so far, of load_total");
    let to_load: Gauge = metrics.gauge("load_total", "Weights to read");
    metrics.before_scrape(move || {
        let load = status.report().load;
        for (labels, count) in pages_by_state(&load.pools) {
            pages.get_or_create(&labels).set(count);
        }
        for (state, count) in [("waiting", load.waiting), ("running", load.running)] {
            sequences.get_or_create(&StateLabel { state }).set(count.into());
        }
        let present = status.state();
        for state in WorkerState::ALL {
            states.get_or_create(&StateLabel { state: state.name() }).set((state == present).into());
        }
        let progress = status.loading();
        loaded.set(progress.done as i64);
        to_load.set(progress.total as i64);
    });
}
