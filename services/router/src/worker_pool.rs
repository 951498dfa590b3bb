//! Where requests meet workers: the fleet and the queue of waiting requests under one lock, and permits that give themselves back.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chassis::Address;
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use types::{PeerId, Role, WorkerReport, WorkerState};

use crate::admission::{Admission, QueueFull, WaiterId};
use crate::config::Limits;
use crate::error::RequestError;
use crate::fleet::{Assigned, Fleet, LinkOrder, ModelKey, Need, PairNo, ReportError, Served};

struct State {
    fleet: Fleet<Channel>,
    admission: Admission<Waiter>,
}

struct Waiter {
    need: Need,
    is_resumed: bool,
    reply: oneshot::Sender<Granted>,
}

/// Shared by everything in a router. No lock is held across an await.
pub(crate) struct WorkerPool {
    state: Mutex<State>,
    /// Whether a complete pair is ready.
    ready: watch::Sender<bool>,
}

/// A place at one worker; dropping it gives it back.
pub(crate) struct Permit {
    pool: Arc<WorkerPool>,
    assigned: Assigned<Channel>,
}

impl Permit {
    pub(crate) fn peer(&self) -> &PeerId {
        &self.assigned.peer
    }

    pub(crate) fn channel(&self) -> Channel {
        self.assigned.link.clone()
    }

    /// Cancelled when the worker is given up.
    pub(crate) fn gone(&self) -> &CancellationToken {
        &self.assigned.gone
    }

    /// The way of KV from this worker to `decode` has failed.
    pub(crate) fn unlink(&self, decode: &Self) {
        self.pool.lock().fleet.on_unlinked(self.assigned.worker, decode.assigned.worker);
        self.pool.fleet_changed();
    }

    /// The worker said that some tokens of the prompt were cached there.
    pub(crate) fn mark_reuses(&self) {
        self.pool.lock().fleet.mark_reuses(self.assigned.worker);
    }

    /// The worker refused the request.
    pub(crate) fn mark_full(&mut self) {
        self.pool.lock().fleet.mark_full(&mut self.assigned);
    }

    /// The worker has taken the request in.
    pub(crate) fn answered(&mut self) {
        self.pool.lock().fleet.answered(&mut self.assigned);
        self.pool.pump();
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.pool.lock().fleet.release(&mut self.assigned);
        self.pool.pump();
    }
}

/// One of the requests that may be in flight; dropping it lets the next one in.
pub(crate) struct InFlight {
    pool: Arc<WorkerPool>,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.pool.lock().admission.leave();
        self.pool.pump();
    }
}

/// What a request waited for.
pub(crate) struct Granted {
    pub(crate) prefill: Permit,
    pub(crate) decode: Permit,
    /// For a request that is new in flight.
    pub(crate) in_flight: Option<InFlight>,
}

/// A request's place in the queue; dropping it gives it up.
pub(crate) struct Waiting {
    pool: Arc<WorkerPool>,
    id: WaiterId,
    granted: oneshot::Receiver<Granted>,
}

impl Waiting {
    /// Resolves when it is this request's turn. Cancellation safe; not to be called again afterwards.
    pub(crate) async fn granted(&mut self) -> Granted {
        (&mut self.granted).await.expect("the pool answers every waiter that it takes out of the queue")
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if self.pool.lock().admission.remove(self.id) {
            // Whoever waited behind it may have room.
            self.pool.pump();
        }
    }
}

impl WorkerPool {
    pub(crate) fn new(limits: &Limits, prefix_affinity: bool) -> Arc<Self> {
        let state = State {
            fleet: Fleet::new(limits.prefills_per_worker_max, prefix_affinity),
            admission: Admission::new(limits.in_flight_max, limits.queue_max),
        };
        Arc::new(Self { state: Mutex::new(state), ready: watch::Sender::new(false) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new request takes its place in the queue.
    pub(crate) fn enter(self: &Arc<Self>, need: Need) -> Result<Waiting, RequestError> {
        let (reply, granted) = oneshot::channel();
        let entered = self.lock().admission.enqueue(Waiter { need, is_resumed: false, reply });
        let id = entered.map_err(|QueueFull { queued }| RequestError::QueueFull { queued })?;
        self.pump();
        Ok(Waiting { pool: Arc::clone(self), id, granted })
    }

    /// A request in flight needs other workers.
    pub(crate) fn enter_again(self: &Arc<Self>, need: Need) -> Waiting {
        let (reply, granted) = oneshot::channel();
        let id = self.lock().admission.enqueue_resumed(Waiter { need, is_resumed: true, reply });
        self.pump();
        Waiting { pool: Arc::clone(self), id, granted }
    }

    /// Serves waiting requests as long as there is room. To be called after everything that may make room.
    fn pump(self: &Arc<Self>) {
        loop {
            let admitted = {
                let State { fleet, admission } = &mut *self.lock();
                admission.admit_next(|waiter| fleet.place(&waiter.need))
            };
            let Some((waiter, (prefill, decode))) = admitted else { break };
            let permit = |assigned| Permit { pool: Arc::clone(self), assigned };
            let in_flight = (!waiter.is_resumed).then(|| InFlight { pool: Arc::clone(self) });
            let granted = Granted { prefill: permit(prefill), decode: permit(decode), in_flight };
            // A waiter that has gone meanwhile gives everything back by not taking it.
            drop(waiter.reply.send(granted));
        }
    }

    pub(crate) fn on_report(
        self: &Arc<Self>,
        listed: Role,
        address: &Address,
        channel: &Channel,
        report: WorkerReport,
    ) -> Result<(), ReportError> {
        let reported = self.lock().fleet.on_report(listed, address, channel, report);
        self.fleet_changed();
        reported
    }

    pub(crate) fn on_lost(self: &Arc<Self>, address: &Address, reason: &str) {
        self.lock().fleet.on_lost(address, reason);
        self.fleet_changed();
    }

    /// Pairs whose way of KV is to be opened now; each is named once.
    pub(crate) fn to_link(&self) -> Vec<LinkOrder<Channel>> {
        self.lock().fleet.to_link()
    }

    pub(crate) fn on_linked(self: &Arc<Self>, pair: PairNo) {
        self.lock().fleet.on_linked(pair);
        self.fleet_changed();
    }

    pub(crate) fn on_link_failed(&self, pair: PairNo, reason: &str) -> bool {
        self.lock().fleet.on_link_failed(pair, reason)
    }

    fn fleet_changed(self: &Arc<Self>) {
        let is_ready = self.served().is_some();
        self.ready.send_if_modified(|ready| std::mem::replace(ready, is_ready) != is_ready);
        self.pump();
    }

    /// What can be served now.
    pub(crate) fn served(&self) -> Option<Served> {
        self.lock().fleet.served()
    }

    /// Whether anything can be, or why not: see [`Fleet::why_no_pair`](crate::fleet::Fleet::why_no_pair).
    pub(crate) fn serves(&self) -> Result<(), String> {
        let state = self.lock();
        if state.fleet.served().is_some() { Ok(()) } else { Err(state.fleet.why_no_pair()) }
    }

    pub(crate) fn has_pair(&self, model: &ModelKey) -> bool {
        self.lock().fleet.ready_pairs(model) > 0
    }

    /// Follows whether a complete pair is ready.
    pub(crate) fn ready(&self) -> watch::Receiver<bool> {
        self.ready.subscribe()
    }

    /// Requests in flight, and requests that wait to be.
    pub(crate) fn num_requests(&self) -> (u32, usize) {
        let state = self.lock();
        (state.admission.in_flight(), state.admission.queued())
    }

    pub(crate) fn num_workers(&self, role: Role, worker_state: WorkerState) -> usize {
        self.lock().fleet.count(role, worker_state)
    }
}
