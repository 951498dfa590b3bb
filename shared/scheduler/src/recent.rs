//! A bounded memory of tickets that have ended, so that late and repeated messages get a true answer.

use std::collections::{HashMap, VecDeque};

use types::TicketId;

/// How the last `capacity` tickets ended; older ones are forgotten and count as unknown.
#[derive(Debug)]
pub(crate) struct RecentTickets<O> {
    capacity: usize,
    by_age: VecDeque<TicketId>,
    outcomes: HashMap<TicketId, O>,
}

impl<O> RecentTickets<O> {
    /// Remembers `capacity` tickets.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, by_age: VecDeque::new(), outcomes: HashMap::new() }
    }

    /// Notes how a ticket ended.
    pub(crate) fn insert(&mut self, ticket: TicketId, outcome: O) {
        if self.capacity == 0 {
            return;
        }
        if self.by_age.len() == self.capacity
            && let Some(oldest) = self.by_age.pop_front()
        {
            self.outcomes.remove(&oldest);
        }
        self.by_age.push_back(ticket);
        self.outcomes.insert(ticket, outcome);
    }

    /// How a ticket ended, if that is remembered.
    pub(crate) fn get(&self, ticket: TicketId) -> Option<&O> {
        self.outcomes.get(&ticket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forgets_the_oldest() {
        let mut recent = RecentTickets::new(2);
        for id in 1..=3 {
            recent.insert(TicketId(id), id);
        }
        assert_eq!([1, 2, 3].map(|id| recent.get(TicketId(id))), [None, Some(&2), Some(&3)]);
        let mut none = RecentTickets::new(0);
        none.insert(TicketId(1), ());
        assert_eq!(none.get(TicketId(1)), None);
    }
}
