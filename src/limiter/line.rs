//! Lines (layer 1, pure): the requests that wait for one bucket, the oldest in
//! front.
//!
//! A request has its place by its [`Ticket`], whenever it came to the line, so
//! that one that comes from another bucket's line stands before all younger ones.
//! A line hands out nothing: it says whose turn it is, and whom to wake.
//!
//! Invariants: a line is never empty (a bucket without waiting requests has
//! none), and `cost` is the sum over all places.

use std::collections::{BTreeMap, BTreeSet};
use std::task::Waker;

use super::tokens::Tokens;
use crate::time::Timestamp;

/// When a request came, compared with all others of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub(super) u64);

impl Ticket {
    /// Of a request that has just come: whoever waits is older.
    pub(super) const NEWCOMER: Self = Self(u64::MAX);
}

/// Wakers that are to be used once the bucket's guard is gone, because waking may
/// run code that takes it.
#[derive(Debug, Default)]
#[must_use]
pub struct Calls(Vec<Waker>);

/// Who waits for a bucket.
#[derive(Debug)]
pub(super) struct Line {
    places: BTreeMap<Ticket, Place>,
    /// Of those that were not called for it yet.
    deadlines: BTreeSet<(Timestamp, Ticket)>,
    /// Tokens that all of them cost.
    cost: Tokens,
}

#[derive(Debug)]
struct Place {
    cost: Tokens,
    deadline: Timestamp,
    /// None until it was looked at for the first time.
    waker: Option<Waker>,
}

impl Calls {
    /// Wakes them.
    pub fn call(self) {
        for waker in self.0 {
            waker.wake();
        }
    }

    pub(super) fn add(&mut self, others: Self) {
        self.0.extend(others.0);
    }
}

impl Extend<Waker> for Calls {
    fn extend<T: IntoIterator<Item = Waker>>(&mut self, wakers: T) {
        self.0.extend(wakers);
    }
}

impl Line {
    /// A line with one request in it.
    pub(super) fn new(ticket: Ticket, cost: Tokens, deadline: Timestamp) -> Self {
        let mut line =
            Self { places: BTreeMap::new(), deadlines: BTreeSet::new(), cost: Tokens::ZERO };
        line.join(ticket, cost, deadline);
        line
    }

    /// A line that is as long in tokens, for questions.
    pub(super) fn outline(&self) -> Self {
        Self::new(Ticket(0), self.cost, Timestamp::ZERO)
    }

    /// Gives a request its place.
    pub(super) fn join(&mut self, ticket: Ticket, cost: Tokens, deadline: Timestamp) {
        let place = Place { cost, deadline, waker: None };
        if self.places.insert(ticket, place).is_none() {
            self.deadlines.insert((deadline, ticket));
            self.cost = self.cost.plus(cost);
        }
    }

    /// Takes a request out. The one whose turn it is then is to be called.
    pub(super) fn leave(&mut self, ticket: Ticket) -> Calls {
        let was_front = self.front() == ticket;
        if let Some(place) = self.places.remove(&ticket) {
            self.deadlines.remove(&(place.deadline, ticket));
            self.cost = self.cost.minus(place.cost);
        }
        if was_front { self.call_front() } else { Calls::default() }
    }

    /// Whom to wake when it is the turn of `ticket`; `false` if it has no place.
    pub(super) fn register(&mut self, ticket: Ticket, waker: &Waker) -> bool {
        let Some(place) = self.places.get_mut(&ticket) else { return false };
        match &mut place.waker {
            Some(known) => known.clone_from(waker),
            None => place.waker = Some(waker.clone()),
        }
        true
    }

    /// Whose turn it is.
    pub(super) fn front(&self) -> Ticket {
        self.places.first_key_value().map_or(Ticket::NEWCOMER, |(ticket, _)| *ticket)
    }

    /// Calls the one whose turn it is.
    pub(super) fn call_front(&self) -> Calls {
        let front = self.places.first_key_value();
        Calls(front.and_then(|(_, place)| place.waker.clone()).into_iter().collect())
    }

    /// Calls all.
    pub(super) fn call_all(&self) -> Calls {
        Calls(self.places.values().filter_map(|place| place.waker.clone()).collect())
    }

    /// Calls those whose time is up at `now`, each of them once.
    pub(super) fn call_overdue(&mut self, now: Timestamp) -> Calls {
        let mut calls = Calls::default();
        while let Some((deadline, ticket)) = self.deadlines.first().copied()
            && deadline <= now
        {
            self.deadlines.pop_first();
            calls.extend(self.places.get(&ticket).and_then(|place| place.waker.clone()));
        }
        calls
    }

    /// When the time of the next one is up.
    pub(super) fn next_deadline(&self) -> Option<Timestamp> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// What the older ones cost.
    pub(super) fn cost_before(&self, ticket: Ticket) -> Tokens {
        if ticket == Ticket::NEWCOMER {
            return self.cost;
        }
        let older = self.places.range(..ticket);
        older.fold(Tokens::ZERO, |sum, (_, place)| sum.plus(place.cost))
    }

    /// What all of them cost.
    pub(super) const fn cost(&self) -> Tokens {
        self.cost
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether nobody is left.
    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }
}
