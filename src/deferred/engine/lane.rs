//! What is due for one upstream, in the order in which it became due.

use std::collections::VecDeque;
use std::sync::Arc;

use super::super::record::Id;

/// The requests for one upstream.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) name: Arc<str>,
    /// Requests that are to be sent, and results that are to be asked for.
    queues: [Queue; 2],
    last_was_poll: bool,
    /// How many workers it has.
    pub(super) working: usize,
    /// How many results have yet to be asked for.
    pub(super) pending: usize,
}

#[derive(Debug, Default)]
struct Queue {
    due: VecDeque<(u64, Id)>,
    /// The next number to give out. Numbers only grow.
    next: u64,
}

impl Lane {
    pub(super) fn new(name: &str) -> Self {
        Self {
            name: Arc::from(name),
            queues: Default::default(),
            last_was_poll: false,
            working: 0,
            pending: 0,
        }
    }

    /// Takes a request to the end of its queue; its number there.
    pub(super) fn push(&mut self, id: Id, poll: bool) -> u64 {
        let queue = &mut self.queues[usize::from(poll)];
        let number = queue.next;
        queue.next += 1;
        queue.due.push_back((number, id));
        number
    }

    /// How many have been in front of the one with this number, some of which may have
    /// left their place.
    pub(super) fn ahead(&self, number: u64, poll: bool) -> u64 {
        let first = self.queues[usize::from(poll)].due.front();
        first.map_or(0, |(first, _)| number.saturating_sub(*first))
    }

    /// How many are in the queue of requests to be sent.
    pub(super) fn creates(&self) -> u64 {
        self.queues[0].due.len() as u64
    }

    /// The next one that is still there, by its number. While both queues have some,
    /// they take turns, so that neither takes more than half of what the upstream
    /// allows.
    pub(super) fn pop(&mut self, is_there: impl Fn(Id, u64) -> bool) -> Option<(Id, bool)> {
        for queue in &mut self.queues {
            while queue.due.front().is_some_and(|(number, id)| !is_there(*id, *number)) {
                queue.due.pop_front();
            }
        }
        let poll = match (self.queues[0].due.is_empty(), self.queues[1].due.is_empty()) {
            (true, true) => return None,
            (true, false) => true,
            (false, true) => false,
            (false, false) => !self.last_was_poll,
        };
        self.last_was_poll = poll;
        self.queues[usize::from(poll)].due.pop_front().map(|(_, id)| (id, poll))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_and_creates_take_turns_and_who_left_is_passed_over() {
        let mut lane = Lane::new("bank");
        let id = Id::from_u128;
        for n in 0..3 {
            assert_eq!(lane.push(id(n), false), n as u64);
            assert_eq!(lane.push(id(10 + n), true), n as u64);
        }
        assert_eq!((lane.ahead(2, false), lane.creates()), (2, 3));
        let mut order = Vec::new();
        while let Some((next, poll)) = lane.pop(|there, _| there != id(1)) {
            assert_eq!(poll, next.as_u128() >= 10);
            order.push(next.as_u128());
        }
        assert_eq!(order, [10, 0, 11, 2, 12]);
        assert_eq!(lane.ahead(2, false), 0);
    }
}
