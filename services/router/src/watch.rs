//! Finds workers and listens to their heartbeats.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use chassis::net::grpc::{self, ChannelLimits};
use chassis::{Address, Network, Tasks};
use futures_util::{Stream, StreamExt};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::transport::Channel;
use types::{ErrorClass, Role, WorkerReport};
use wire::pb;

use crate::config::Workers;
use crate::link;
use crate::worker_pool::WorkerPool;

/// A worker that cannot be reached is tried again after this, then after twice as long, and so on.
pub(crate) const RETRY_MIN: Duration = Duration::from_millis(100);
pub(crate) const RETRY_MAX: Duration = Duration::from_secs(2);

/// Starts to look for the workers of `config`, and goes on until all work of `tasks` is done.
pub(crate) fn start(tasks: &Tasks, network: Arc<dyn Network>, config: Workers, pool: Arc<WorkerPool>) {
    let starter = tasks.clone();
    tasks.spawn_background("discovery", async move { discover(starter, network, config, pool).await });
}

/// Resolves the configured names again and again. An address that its name does not stand for any more is watched until its worker
/// ends: it is draining, or the resolver is wrong.
async fn discover(tasks: Tasks, network: Arc<dyn Network>, config: Workers, pool: Arc<WorkerPool>) {
    let mut listed: HashMap<(Role, Address), CancellationToken> = HashMap::new();
    loop {
        let mut found = Vec::new();
        let mut is_complete = true;
        for (role, names) in [(Role::Prefill, &config.prefill), (Role::Decode, &config.decode)] {
            for name in names {
                match network.resolve(name).await {
                    Ok(addresses) => found.extend(addresses.into_iter().map(|address| (role, address))),
                    Err(error) => {
                        is_complete = false;
                        tracing::warn!(%role, %name, %error, "the name of a worker cannot be resolved");
                    }
                }
            }
        }
        for key in &found {
            if !listed.contains_key(key) {
                let (role, address) = key.clone();
                let unlisted = CancellationToken::new();
                let watcher = Watcher {
                    tasks: tasks.clone(),
                    role,
                    channel: grpc::channel(&network, &address, channel_limits(&config)),
                    address,
                    config: config.clone(),
                    pool: Arc::clone(&pool),
                    unlisted: unlisted.clone(),
                };
                tasks.spawn_background("watch", watcher.run());
                listed.insert(key.clone(), unlisted);
            }
        }
        // What a failing resolver does not name is not gone.
        if is_complete {
            listed.retain(|key, unlisted| {
                let is_found = found.contains(key);
                if !is_found {
                    unlisted.cancel();
                }
                is_found
            });
        }
        tokio::time::sleep(Duration::from_millis(config.resolve_interval_ms)).await;
    }
}

/// A connection that a partition has cut is noticed about as fast as a missing heartbeat.
fn channel_limits(config: &Workers) -> ChannelLimits {
    let half = Duration::from_millis(config.dead_after_ms / 2);
    ChannelLimits { connect_timeout: half, keep_alive_interval: half, keep_alive_timeout: half }
}

struct Watcher {
    tasks: Tasks,
    role: Role,
    address: Address,
    channel: Channel,
    config: Workers,
    pool: Arc<WorkerPool>,
    /// Cancelled when the address is not listed any more.
    unlisted: CancellationToken,
}

impl Watcher {
    async fn run(self) {
        let mut retry = RETRY_MIN;
        let mut is_news = true;
        while !self.unlisted.is_cancelled() {
            let mut num_reports = 0u64;
            let reason = self.listen(&mut num_reports).await;
            if num_reports > 0 {
                retry = RETRY_MIN;
                is_news = true;
                self.pool.on_lost(&self.address, &reason);
            } else if std::mem::take(&mut is_news) {
                tracing::info!(role = %self.role, address = %self.address, reason, "worker does not answer, trying on");
            }
            tokio::select! {
                () = tokio::time::sleep(retry) => {}
                () = self.unlisted.cancelled() => {}
            }
            retry = (retry * 2).min(RETRY_MAX);
        }
    }

    /// Takes reports in until the stream ends or is silent for too long; says which.
    async fn listen(&self, num_reports: &mut u64) -> String {
        let dead_after = Duration::from_millis(self.config.dead_after_ms);
        let silent = || format!("no heartbeat for {} ms", dead_after.as_millis());
        let request = pb::WatchRequest { interval_ms: self.config.heartbeat_interval_ms };
        let mut client = wire::client::worker(self.channel.clone());
        let mut reports = match tokio::time::timeout(dead_after, client.watch(request)).await {
            Ok(Ok(answer)) => answer.into_inner(),
            Ok(Err(status)) => return describe(&status),
            Err(_) => return silent(),
        };
        loop {
            let report = match heard_within(dead_after, &mut reports).await {
                Some(Ok(Some(report))) => report,
                Some(Ok(None)) => return "it ended its heartbeats".to_owned(),
                Some(Err(status)) => return describe(&status),
                None => return silent(),
            };
            let report = match WorkerReport::try_from(report) {
                Ok(report) => report,
                Err(error) => return format!("its report does not follow the protocol: {error}"),
            };
            if let Err(error) = self.pool.on_report(self.role, &self.address, &self.channel, report) {
                return error.to_string();
            }
            link::open_pairs(&self.tasks, &self.pool);
            *num_reports += 1;
        }
    }
}

/// The next report, or `None` after a silence of `limit`.
///
/// The wait is cut into slices, each of which begins once this process runs: one that was stopped, or starved of its processor, spends one
/// slice on that, and then still has time to read the heartbeats that came in meanwhile, before it calls a whole fleet dead.
async fn heard_within<S>(limit: Duration, reports: &mut S) -> Option<Result<Option<pb::WorkerReport>, Status>>
where
    S: Stream<Item = Result<pb::WorkerReport, Status>> + Unpin,
{
    const SLICES: u32 = 8;
    for _ in 0..SLICES {
        if let Ok(heard) = tokio::time::timeout(limit / SLICES, reports.next()).await {
            return Some(heard.transpose());
        }
    }
    None
}

fn describe(status: &Status) -> String {
    if wire::status::reason(status).is_none() && wire::status::class(status) == ErrorClass::Retryable {
        // The transport's words, not the worker's.
        return format!("connection failed: {}", status.message());
    }
    format!("{:?}: {}", status.code(), status.message())
}

#[cfg(test)]
mod tests {
    use tokio::time::{Instant, advance};

    use super::*;

    const LIMIT: Duration = Duration::from_millis(2_000);

    /// Heartbeats every 500 ms, as a socket holds them: a timer of the test's stands for the network.
    fn heartbeats(num_reports: u64) -> impl Stream<Item = Result<pb::WorkerReport, Status>> + Unpin {
        let begin = Instant::now();
        Box::pin(futures_util::stream::unfold(0, move |n| async move {
            if n == num_reports {
                return std::future::pending().await;
            }
            tokio::time::sleep_until(begin + Duration::from_millis(500 * n)).await;
            // What has arrived must still be read by the connection's task.
            tokio::task::yield_now().await;
            Some((Ok(pb::WorkerReport::default()), n + 1))
        }))
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_told_after_the_limit() {
        let mut reports = heartbeats(3);
        for _ in 0..3 {
            assert!(matches!(heard_within(LIMIT, &mut reports).await, Some(Ok(Some(_)))));
        }
        let begin = Instant::now();
        assert!(heard_within(LIMIT, &mut reports).await.is_none());
        let waited = begin.elapsed();
        // The timer's resolution is a millisecond, once a slice.
        assert!((LIMIT..LIMIT + Duration::from_millis(10)).contains(&waited), "{waited:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_stop_of_this_process_is_no_silence_of_the_worker() {
        let mut reports = heartbeats(100);
        assert!(heard_within(LIMIT, &mut reports).await.is_some());
        let (heard, ()) = tokio::join!(heard_within(LIMIT, &mut reports), advance(Duration::from_secs(60)));
        assert!(matches!(heard, Some(Ok(Some(_)))));
    }
}
