//! How many requests may be on their way to an upstream at the same time, over all
//! threads of this replica. The others wait in the order of their age, and have no
//! tokens meanwhile: whoever is let in asks for them then, and gives its place back if
//! there are none.
//!
//! Invariant: nobody waits while a place is free. A place that is given back belongs to
//! the oldest who waits, before anybody else can take it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use prometheus_client::metrics::gauge::Gauge;

use crate::limiter::Ticket;

/// The places of one upstream.
#[derive(Debug)]
pub(in super::super) struct Gate {
    inside: Mutex<Inside>,
    in_flight: Gauge,
}

#[derive(Debug)]
struct Inside {
    free: usize,
    waiting: BTreeMap<Ticket, Visitor>,
}

#[derive(Debug)]
struct Visitor {
    /// A place is kept for it.
    let_in: bool,
    waker: Option<Waker>,
}

/// A request that may be on its way, until this is dropped.
#[derive(Debug)]
pub(in super::super) struct Permit(Arc<Gate>);

/// In the extensions of a request that may be on its way.
#[derive(Clone, Debug)]
pub(in super::super) struct InFlight(
    #[allow(dead_code, reason = "gives its place back when dropped")] Arc<Permit>,
);

/// A request that waits for a place; dropping it gives that up.
#[derive(Debug)]
pub(in super::super) struct Queued {
    gate: Arc<Gate>,
    ticket: Ticket,
}

impl InFlight {
    pub(in super::super) fn new(permit: Permit) -> Self {
        Self(Arc::new(permit))
    }
}

impl Gate {
    /// A gate with `most` places, whose use `in_flight` tells.
    pub(in super::super) const fn new(most: usize, in_flight: Gauge) -> Self {
        let inside = Inside { free: most, waiting: BTreeMap::new() };
        Self { inside: Mutex::new(inside), in_flight }
    }

    /// Takes a place, if one is free.
    pub(in super::super) fn enter(self: &Arc<Self>) -> Option<Permit> {
        let mut inside = self.inside();
        inside.free = inside.free.checked_sub(1)?;
        drop(inside);
        Some(self.permit())
    }

    /// Waits for a place, at that of its age.
    pub(in super::super) fn queue(self: &Arc<Self>, ticket: Ticket) -> Queued {
        let mut inside = self.inside();
        let let_in = inside.free > 0;
        if let_in {
            inside.free -= 1;
        }
        inside.waiting.insert(ticket, Visitor { let_in, waker: None });
        Queued { gate: Arc::clone(self), ticket }
    }

    fn permit(self: &Arc<Self>) -> Permit {
        self.in_flight.inc();
        Permit(Arc::clone(self))
    }

    /// A place is free again.
    fn give_back(&self) {
        let mut inside = self.inside();
        let next = inside.waiting.values_mut().find(|visitor| !visitor.let_in);
        let waker = match next {
            Some(visitor) => {
                visitor.let_in = true;
                visitor.waker.take()
            }
            None => {
                inside.free += 1;
                None
            }
        };
        drop(inside);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        // Nothing in here panics halfway.
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queued {
    /// Ready with a place when it is its turn; otherwise `waker` is woken then.
    pub(in super::super) fn poll_enter(&self, waker: &Waker) -> Poll<Permit> {
        let mut inside = self.gate.inside();
        match inside.waiting.get_mut(&self.ticket) {
            Some(visitor) if visitor.let_in => {
                inside.waiting.remove(&self.ticket);
                drop(inside);
                Poll::Ready(self.gate.permit())
            }
            Some(visitor) => {
                visitor.waker = Some(waker.clone());
                Poll::Pending
            }
            // It has entered before.
            None => Poll::Pending,
        }
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        let left = self.gate.inside().waiting.remove(&self.ticket);
        if left.is_some_and(|visitor| visitor.let_in) {
            self.gate.give_back();
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.in_flight.dec();
        self.0.give_back();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;
    use crate::limiter::{Alone, LimitSet, Limiter};

    #[derive(Default)]
    struct Bell(AtomicUsize);

    impl Wake for Bell {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn tickets<const N: usize>() -> [Ticket; N] {
        let limiter = Limiter::new(LimitSet::new([]), 1, Alone);
        std::array::from_fn(|_| limiter.ticket())
    }

    fn gate(most: usize) -> Arc<Gate> {
        Arc::new(Gate::new(most, Gauge::default()))
    }

    #[test]
    fn places_go_to_the_oldest_who_waits_and_to_nobody_else() {
        let gate = gate(2);
        let [old, young, third] = tickets();
        let bell = Arc::new(Bell::default());
        let waker = Waker::from(Arc::clone(&bell));
        let (one, two) = (gate.enter().unwrap(), gate.enter().unwrap());
        assert!(gate.enter().is_none());
        // However late the older one comes.
        let late = gate.queue(young);
        let early = gate.queue(old);
        assert!(late.poll_enter(&waker).is_pending() && early.poll_enter(&waker).is_pending());
        drop(one);
        assert_eq!(bell.0.load(Ordering::Relaxed), 1);
        assert!(gate.enter().is_none(), "it is kept for who waits");
        assert!(late.poll_enter(&waker).is_pending());
        let Poll::Ready(entered) = early.poll_enter(&waker) else { panic!() };
        assert_eq!(gate.in_flight.get(), 2);
        // Who leaves before it came in hands the place on.
        let last = gate.queue(third);
        assert!(last.poll_enter(&waker).is_pending());
        drop(two);
        drop(late);
        assert!(last.poll_enter(&waker).is_ready());
        drop((entered, early));
        assert!(gate.enter().is_some() && gate.enter().is_some());
        assert_eq!(gate.in_flight.get(), 0);
    }

    #[test]
    fn who_leaves_the_queue_takes_nothing_along() {
        let gate = gate(1);
        let [a, b] = tickets();
        let permit = gate.enter().unwrap();
        let (first, second) = (gate.queue(a), gate.queue(b));
        drop(first);
        drop(permit);
        drop(second);
        let queued = gate.queue(a);
        assert!(gate.enter().is_none());
        drop(queued);
        assert!(gate.enter().is_some());
    }
}
