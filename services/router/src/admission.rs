//! Who is served next: a bound on requests in flight, and a bounded first-in first-out queue before it.

use std::collections::VecDeque;

use crate::placement::NoPlace;

/// Names a waiting request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WaiterId(u64);

/// The queue has its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueFull {
    /// That length.
    pub queued: usize,
}

/// Requests that wait for workers. `W` says what one needs.
///
/// Requests in flight that lost their workers wait in a queue of their own and go first: their clients have seen tokens already, and there
/// are never more of them than requests in flight.
#[derive(Debug)]
pub struct Admission<W> {
    in_flight_max: u32,
    queue_max: u32,
    in_flight: u32,
    next_id: u64,
    fresh: VecDeque<(WaiterId, W)>,
    resumed: VecDeque<(WaiterId, W)>,
}

impl<W> Admission<W> {
    /// Nothing in flight, nobody waiting.
    #[must_use]
    pub fn new(in_flight_max: u32, queue_max: u32) -> Self {
        Self { in_flight_max, queue_max, in_flight: 0, next_id: 0, fresh: VecDeque::new(), resumed: VecDeque::new() }
    }

    /// Requests with workers, and those that lost theirs.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// New requests that wait.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.fresh.len()
    }

    /// A new request waits behind all others. With nobody before it, it may be one more than the queue holds: it is about to be tried.
    ///
    /// # Errors
    /// When the queue is full.
    pub fn enqueue(&mut self, waiter: W) -> Result<WaiterId, QueueFull> {
        let queued = self.fresh.len();
        if queued > 0 && queued >= self.queue_max as usize {
            return Err(QueueFull { queued });
        }
        let id = self.new_id();
        self.fresh.push_back((id, waiter));
        Ok(id)
    }

    /// A request in flight waits for other workers.
    pub fn enqueue_resumed(&mut self, waiter: W) -> WaiterId {
        let id = self.new_id();
        self.resumed.push_back((id, waiter));
        id
    }

    /// Somebody gave up waiting. `false` if it was served already.
    pub fn remove(&mut self, id: WaiterId) -> bool {
        for queue in [&mut self.fresh, &mut self.resumed] {
            if let Some(idx) = queue.iter().position(|(waiting, _)| *waiting == id) {
                queue.remove(idx);
                return true;
            }
        }
        false
    }

    /// A request in flight has ended.
    pub fn leave(&mut self) {
        assert!(self.in_flight > 0, "a request left that had not entered");
        self.in_flight -= 1;
    }

    /// Serves whoever is next, if `place` finds workers for it. Nobody overtakes one that waits for room; one for whom there is no pair at
    /// all holds nobody up.
    pub fn admit_next<P>(&mut self, mut place: impl FnMut(&W) -> Result<P, NoPlace>) -> Option<(W, P)> {
        for idx in 0..self.resumed.len() {
            match place(&self.resumed[idx].1) {
                Ok(placed) => return self.resumed.remove(idx).map(|(_, waiter)| (waiter, placed)),
                Err(NoPlace::NoRoom) => return None,
                Err(NoPlace::NoPair) => {}
            }
        }
        if self.in_flight >= self.in_flight_max {
            return None;
        }
        for idx in 0..self.fresh.len() {
            match place(&self.fresh[idx].1) {
                Ok(placed) => {
                    self.in_flight += 1;
                    return self.fresh.remove(idx).map(|(_, waiter)| (waiter, placed));
                }
                Err(NoPlace::NoRoom) => return None,
                Err(NoPlace::NoPair) => {}
            }
        }
        None
    }

    fn new_id(&mut self) -> WaiterId {
        self.next_id += 1;
        WaiterId(self.next_id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission(in_flight_max: u32, queue_max: u32) -> Admission<&'static str> {
        Admission::new(in_flight_max, queue_max)
    }

    fn admit(admission: &mut Admission<&'static str>) -> Option<&'static str> {
        admission.admit_next(|_| Ok(())).map(|(waiter, ())| waiter)
    }

    #[test]
    fn the_first_to_come_is_the_first_to_be_served() {
        let mut admission = admission(8, 8);
        for waiter in ["a", "b", "c"] {
            admission.enqueue(waiter).unwrap();
        }
        assert_eq!([admit(&mut admission), admit(&mut admission)], [Some("a"), Some("b")]);
        assert_eq!((admission.in_flight(), admission.queued()), (2, 1));
    }

    #[test]
    fn no_more_are_in_flight_than_may() {
        let mut admission = admission(1, 8);
        admission.enqueue("a").unwrap();
        admission.enqueue("b").unwrap();
        assert_eq!([admit(&mut admission), admit(&mut admission)], [Some("a"), None]);
        admission.leave();
        assert_eq!(admit(&mut admission), Some("b"));
    }

    #[test]
    fn a_full_queue_refuses() {
        let mut admission = admission(1, 2);
        admission.enqueue("a").unwrap();
        admission.enqueue("b").unwrap();
        assert_eq!(admission.enqueue("c"), Err(QueueFull { queued: 2 }));
        assert_eq!(admit(&mut admission), Some("a"));
        admission.enqueue("c").unwrap();
    }

    #[test]
    fn without_a_queue_one_is_tried_at_once() {
        let mut admission = admission(1, 0);
        let id = admission.enqueue("a").unwrap();
        assert_eq!(admission.enqueue("b"), Err(QueueFull { queued: 1 }));
        assert!(admission.remove(id));
        admission.enqueue("b").unwrap();
        assert_eq!(admit(&mut admission), Some("b"));
    }

    #[test]
    fn nobody_overtakes_one_that_waits_for_room() {
        let mut admission = admission(8, 8);
        admission.enqueue("large").unwrap();
        admission.enqueue("small").unwrap();
        let place = |waiter: &&str| if *waiter == "large" { Err(NoPlace::NoRoom) } else { Ok(()) };
        assert!(admission.admit_next(place).is_none());
    }

    #[test]
    fn one_without_a_pair_holds_nobody_up() {
        let mut admission = admission(8, 8);
        admission.enqueue_resumed("old weights");
        admission.enqueue("older weights").unwrap();
        admission.enqueue("new weights").unwrap();
        let place = |waiter: &&str| if waiter.starts_with("old") { Err(NoPlace::NoPair) } else { Ok(()) };
        assert_eq!(admission.admit_next(place).map(|(waiter, ())| waiter), Some("new weights"));
    }

    #[test]
    fn resumed_requests_go_first_and_are_not_counted_twice() {
        let mut admission = admission(1, 8);
        admission.enqueue("a").unwrap();
        assert_eq!(admit(&mut admission), Some("a"));
        admission.enqueue("b").unwrap();
        admission.enqueue_resumed("a again");
        assert_eq!([admit(&mut admission), admit(&mut admission)], [Some("a again"), None]);
        assert_eq!(admission.in_flight(), 1);
    }

    #[test]
    fn one_that_gave_up_is_not_served() {
        let mut admission = admission(8, 8);
        let id = admission.enqueue("a").unwrap();
        assert!(admission.remove(id));
        assert!(!admission.remove(id));
        assert_eq!(admit(&mut admission), None);
    }
}
