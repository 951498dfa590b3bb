//! One lane for each peer, opened when first needed and again when lost.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use types::{PeerId, WorkerId};

use crate::contract::{SendLane, SendTransport};
use crate::error::TransferError;

type Place = Arc<tokio::sync::Mutex<Option<Arc<dyn SendLane>>>>;

/// The lanes of one prefill worker.
pub struct Lanes {
    transport: Arc<dyn SendTransport>,
    /// A place for each worker, so that a slow handshake with one holds up nobody else.
    places: Mutex<HashMap<WorkerId, Place>>,
}

impl Lanes {
    /// No lane is open yet.
    #[must_use]
    pub fn new(transport: Arc<dyn SendTransport>) -> Self {
        Self { transport, places: Mutex::new(HashMap::new()) }
    }

    /// The lane to `peer`, opened if there is none. A lane to an earlier life of the worker is closed: what it carried is void.
    ///
    /// # Errors
    /// As [`SendTransport::connect`].
    pub async fn lane(&self, address: &str, peer: &PeerId) -> Result<Arc<dyn SendLane>, TransferError> {
        let place = {
            let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
            places.retain(|_, place| {
                place.try_lock().map_or(true, |lane| lane.as_ref().is_some_and(|lane| lane.lost().is_none()))
            });
            Arc::clone(places.entry(peer.worker.clone()).or_default())
        };
        let mut lane = place.lock().await;
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
        let places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places
            .values()
            .filter(|place| place.try_lock().is_ok_and(|lane| lane.as_ref().is_some_and(|lane| lane.lost().is_none())))
            .count()
    }
}
