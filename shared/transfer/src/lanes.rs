//! One lane for each peer, opened when first needed and again when lost.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::timeout;
use types::{PeerId, WorkerId};

use crate::config::TransferConfig;
use crate::contract::{SendLane, SendTransport};
use crate::error::TransferError;

type Lane = Option<Arc<dyn SendLane>>;
type Place = Arc<tokio::sync::Mutex<Lane>>;

/// The lanes of one prefill worker.
pub struct Lanes {
    transport: Arc<dyn SendTransport>,
    /// How long a caller waits for another's attempt to reach the same worker.
    patience: Duration,
    /// A place for each worker, so that a slow handshake with one holds up nobody else.
    places: Mutex<HashMap<WorkerId, Place>>,
}

impl Lanes {
    /// No lane is open yet.
    #[must_use]
    pub fn new(transport: Arc<dyn SendTransport>, config: &TransferConfig) -> Self {
        // One attempt under way, and ours would be the next.
        Self { transport, patience: 2 * config.connect_timeout(), places: Mutex::new(HashMap::new()) }
    }

    /// The lane to `peer`, opened if there is none. A lane to an earlier life of the worker is closed: what it carried is void.
    ///
    /// # Errors
    /// As [`SendTransport::connect`].
    pub async fn lane(&self, address: &str, peer: &PeerId) -> Result<Arc<dyn SendLane>, TransferError> {
        let place = self.place(&peer.worker);
        let Ok(mut lane) = timeout(self.patience, place.lock()).await else {
            let reason = "earlier attempts are still under way".into();
            return Err(TransferError::Unreachable { peer: peer.clone(), address: address.into(), reason });
        };
        if let Some(open) = lane.as_ref().filter(|open| open.lost().is_none() && open.peer() == peer) {
            return Ok(Arc::clone(open));
        }
        // Opened before the old one is closed: a ticket of an earlier life must not cost the lane to the present one.
        let opened: Arc<dyn SendLane> = Arc::from(self.transport.connect(address, peer).await?);
        if let Some(old) = lane.replace(Arc::clone(&opened)) {
            old.close();
        }
        Ok(opened)
    }

    /// Lanes open now.
    #[must_use]
    pub fn num_open(&self) -> usize {
        self.places().values().filter(|place| has_open_lane(place)).count()
    }

    /// The worker's place. Places without an open lane at which nobody is are cleared away.
    fn place(&self, worker: &WorkerId) -> Place {
        let mut places = self.places();
        places.retain(|_, place| Arc::strong_count(place) > 1 || has_open_lane(place));
        Arc::clone(places.entry(worker.clone()).or_default())
    }

    fn places(&self) -> MutexGuard<'_, HashMap<WorkerId, Place>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn has_open_lane(place: &Place) -> bool {
    place.try_lock().is_ok_and(|lane| lane.as_ref().is_some_and(|lane| lane.lost().is_none()))
}
