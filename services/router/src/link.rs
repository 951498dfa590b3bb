//! Has prefill workers open the way of KV to decode workers before any request needs it.
//!
//! What would fail with every request, containers that cannot share memory or a link that is too slow, shows while the router is not ready yet,
//! and the probes of the data path cost no request its first token.

use std::sync::Arc;
use std::time::Duration;

use chassis::Tasks;
use tonic::transport::Channel;
use wire::pb;

use crate::fleet::LinkOrder;
use crate::watch::{RETRY_MAX, RETRY_MIN};
use crate::worker_pool::WorkerPool;

/// Longest wait for one answer: ranks that meet over NCCL take seconds each, and a worker bounds each of its own steps.
const ANSWER_MAX: Duration = Duration::from_secs(120);

/// Has the ways opened that are to be opened now, in the background.
pub(crate) fn open_pairs(tasks: &Tasks, pool: &Arc<WorkerPool>) {
    for order in pool.to_link() {
        tasks.spawn_background("link", open(Arc::clone(pool), order));
    }
}

/// Tries until the way is open or one of the two is gone.
async fn open(pool: Arc<WorkerPool>, order: LinkOrder<Channel>) {
    let [prefill_gone, decode_gone] = &order.gone;
    tokio::select! {
        () = prefill_gone.cancelled() => {}
        () = decode_gone.cancelled() => {}
        () = until_open(&pool, &order) => {
            tracing::info!(prefill = %order.prefill, decode = %order.decode, "workers are linked");
            pool.on_linked(order.pair);
        }
    }
}

async fn until_open(pool: &WorkerPool, order: &LinkOrder<Channel>) {
    let mut retry = RETRY_MIN;
    loop {
        let request = pb::LinkRequest {
            decode: Some(order.decode.clone().into()),
            kv_endpoint: Some(order.kv_endpoint.clone().into()),
        };
        let mut client = wire::client::prefill(order.link.clone());
        let reason = match tokio::time::timeout(ANSWER_MAX, client.link(request)).await {
            Ok(Ok(_)) => return,
            Ok(Err(status)) => status.message().to_owned(),
            Err(_) => format!("no answer for {ANSWER_MAX:?}"),
        };
        // The same words again and again would drown others.
        if pool.on_link_failed(order.pair, &reason) {
            tracing::warn!(
                prefill = %order.prefill, decode = %order.decode, reason, "no way for kv between these workers, trying on"
            );
        }
        tokio::time::sleep(retry).await;
        retry = (retry * 2).min(RETRY_MAX);
    }
}
