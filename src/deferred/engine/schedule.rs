//! What is to be done next: the requests in memory, as little of each as is needed
//! to find its next step. Everything else is in the store.
//!
//! Invariants:
//! - a request that is not settled has a timer, is queued, or is being worked on;
//! - timers are of the monotonic clock: a step of the wall clock shifts what was
//!   dated before it, and never makes anything faster.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::super::metrics::Metrics;
use super::super::record::{Id, Record, State};
use super::lane::Lane;
use crate::time::{Timestamp, WallTime};

/// A request in memory.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// When the next step is due; of a settled one, when it is forgotten.
    when: Timestamp,
    expires: Timestamp,
    /// Its place in the queue of its lane.
    number: u64,
    lane: u16,
    state: State,
    phase: Phase,
    /// Whether a timer for `expires` is set.
    armed: bool,
}

/// What is being done about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Its time has not come.
    Waits,
    /// It is due.
    Queued,
    /// It has a worker.
    Works,
    /// Its record is being changed.
    Changes,
    /// Nothing, until it is forgotten.
    Settled,
}

/// What a timer asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fired {
    /// Its time is up.
    Expires(Id),
    /// Nobody asks for it any more.
    Forgets(Id),
}

/// All requests of the store.
#[derive(Debug)]
pub(super) struct Schedule {
    slots: HashMap<Id, Slot, foldhash::fast::RandomState>,
    timers: BinaryHeap<Reverse<(Timestamp, Id)>>,
    lanes: Vec<Lane>,
    retain: Duration,
    metrics: Metrics,
}

impl Schedule {
    pub(super) fn new(retain: Duration, metrics: Metrics) -> Self {
        Self {
            slots: HashMap::default(),
            timers: BinaryHeap::new(),
            lanes: Vec::new(),
            retain,
            metrics,
        }
    }

    /// How many requests there are.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// The state and phase of a request.
    pub(super) fn find(&self, id: Id) -> Option<(State, Phase)> {
        self.slots.get(&id).map(|slot| (slot.state, slot.phase))
    }

    /// Takes up what `record` says, at the moment that the two clocks show.
    pub(super) fn set(&mut self, record: &Record, now: Timestamp, wall: WallTime) {
        let lane = self.lane_of(&record.upstream);
        let before = self.slots.get(&record.id).copied();
        let moment = |at: WallTime| now.plus(at.since(wall));
        let expires = moment(record.expires);
        let (phase, when) = match record.forgotten_at(self.retain) {
            Some(at) => (Phase::Settled, moment(at)),
            None => (Phase::Waits, moment(record.due).min(expires)),
        };
        // The timer of an earlier reckoning may differ by a step of the wall clock;
        // it then does no harm, and another one is set.
        let armed = before.is_some_and(|slot| slot.armed && slot.expires == expires);
        let armed = armed || (phase == Phase::Waits && when == expires);
        let slot = Slot { when, expires, number: 0, lane, state: record.state, phase, armed };
        self.slots.insert(record.id, slot);
        self.timers.push(Reverse((when, record.id)));

        let was_pending = before.is_some_and(|slot| slot.state == State::Pending);
        let is_pending = record.state == State::Pending;
        if let Some(lane) = self.lanes.get_mut(usize::from(lane)) {
            lane.pending =
                (lane.pending + usize::from(is_pending)).saturating_sub(usize::from(was_pending));
            self.metrics.moved(&lane.name, before.map(|slot| slot.state), Some(record.state));
        }
    }

    /// Forgets a request.
    pub(super) fn remove(&mut self, id: Id) {
        if let Some(slot) = self.slots.remove(&id)
            && let Some(lane) = self.lanes.get(usize::from(slot.lane))
        {
            self.metrics.moved(&lane.name, Some(slot.state), None);
        }
    }

    /// Notes that a request is in another phase.
    pub(super) fn enter(&mut self, id: Id, phase: Phase) {
        if let Some(slot) = self.slots.get_mut(&id) {
            slot.phase = phase;
        }
    }

    /// When the next timer rings.
    pub(super) fn next_timer(&self) -> Option<Timestamp> {
        self.timers.peek().map(|Reverse((when, _))| *when)
    }

    /// Queues what is due by `now`, and returns what one timer asks for, if any does.
    /// To be called until it returns `None`.
    pub(super) fn fire(&mut self, now: Timestamp) -> Option<Fired> {
        while let Some(Reverse((when, id))) = self.timers.peek().copied().filter(|t| t.0.0 <= now) {
            self.timers.pop();
            let Some(slot) = self.slots.get_mut(&id) else { continue };
            match slot.phase {
                Phase::Settled if when == slot.when => return Some(Fired::Forgets(id)),
                Phase::Waits | Phase::Queued | Phase::Works if when == slot.expires => {
                    slot.armed = false;
                    return Some(Fired::Expires(id));
                }
                Phase::Waits if when == slot.when => {
                    let Some(lane) = self.lanes.get_mut(usize::from(slot.lane)) else { continue };
                    slot.phase = Phase::Queued;
                    slot.number = lane.push(id, slot.state == State::Pending);
                    if !slot.armed {
                        slot.armed = true;
                        self.timers.push(Reverse((slot.expires, id)));
                    }
                }
                // What this timer was set for has passed.
                Phase::Waits | Phase::Queued | Phase::Works | Phase::Changes | Phase::Settled => {}
            }
        }
        None
    }

    /// A request that may be worked on now, with its upstream and how many results of
    /// that have yet to be asked for. `capacity` says how many of an upstream may be
    /// worked on at once.
    pub(super) fn start(
        &mut self,
        capacity: impl Fn(&str) -> usize,
    ) -> Option<(Id, Arc<str>, usize)> {
        let slots = &mut self.slots;
        for lane in &mut self.lanes {
            if lane.working >= capacity(&lane.name) {
                continue;
            }
            let is_there = |id: Id, number: u64| {
                slots.get(&id).is_some_and(|s| s.phase == Phase::Queued && s.number == number)
            };
            let Some((id, _)) = lane.pop(is_there) else { continue };
            lane.working += 1;
            if let Some(slot) = slots.get_mut(&id) {
                slot.phase = Phase::Works;
            }
            return Some((id, Arc::clone(&lane.name), lane.pending));
        }
        None
    }

    /// A worker of this upstream has ended.
    pub(super) fn ended(&mut self, upstream: &str) {
        if let Some(lane) = self.lanes.iter_mut().find(|lane| *lane.name == *upstream) {
            lane.working = lane.working.saturating_sub(1);
        }
    }

    /// How many requests are in front of this one, if it is due.
    pub(super) fn ahead(&self, id: Id) -> Option<u64> {
        let slot = self.slots.get(&id).filter(|slot| slot.phase == Phase::Queued)?;
        let lane = self.lanes.get(usize::from(slot.lane))?;
        Some(lane.ahead(slot.number, slot.state == State::Pending))
    }

    /// How many requests to this upstream wait to be sent.
    pub(super) fn queued(&self, upstream: &str) -> u64 {
        let lane = self.lanes.iter().find(|lane| *lane.name == *upstream);
        lane.map_or(0, Lane::creates)
    }

    /// Shows how old the oldest request is that is not settled.
    pub(super) fn show_oldest(&self, wall: WallTime) {
        let waiting = self.slots.iter().filter(|(_, slot)| !slot.state.is_settled());
        // An id begins with the moment at which it was given.
        let oldest =
            waiting.map(|(id, _)| WallTime::from_millis((id.as_u128() >> 80) as u64)).min();
        let age = oldest.map_or(0, |oldest| wall.since(oldest).as_secs());
        self.metrics.oldest.set(i64::try_from(age).unwrap_or(i64::MAX));
    }

    fn lane_of(&mut self, upstream: &str) -> u16 {
        let found = self.lanes.iter().position(|lane| *lane.name == *upstream);
        let at = found.unwrap_or_else(|| {
            self.lanes.push(Lane::new(upstream));
            self.lanes.len() - 1
        });
        // More upstreams than this are not configured in one file.
        u16::try_from(at).unwrap_or(u16::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deferred::testing::{T0, at, record};

    const RETAIN: Duration = Duration::from_secs(3600);

    fn now(seconds: u64) -> Timestamp {
        Timestamp::from_millis(1_000_000 + 1000 * seconds)
    }

    fn schedule() -> Schedule {
        Schedule::new(RETAIN, Metrics::default())
    }

    #[test]
    fn a_request_is_queued_when_due_and_expires_wherever_it_is() {
        let mut schedule = schedule();
        let mut one = record(1);
        one.due = at(5);
        one.expires = at(60);
        schedule.set(&one, now(0), T0);
        assert_eq!(schedule.next_timer(), Some(now(5)));
        assert_eq!(schedule.fire(now(4)), None);
        assert_eq!(schedule.start(|_| 1), None);
        assert_eq!(schedule.fire(now(5)), None);
        assert_eq!(schedule.ahead(one.id), Some(0));
        assert_eq!(schedule.start(|_| 0), None, "the upstream bears none");
        assert_eq!(schedule.start(|_| 1).unwrap().0, one.id);
        assert_eq!(schedule.find(one.id), Some((State::Accepted, Phase::Works)));
        assert_eq!(schedule.fire(now(60)), Some(Fired::Expires(one.id)));
        assert_eq!(schedule.fire(now(600)), None);

        one.state = State::Failed;
        one.updated = at(60);
        schedule.set(&one, now(60), at(60));
        assert_eq!(schedule.fire(now(3659)), None);
        assert_eq!(schedule.fire(now(3660)), Some(Fired::Forgets(one.id)));
        schedule.remove(one.id);
        assert_eq!(schedule.len(), 0);
    }

    #[test]
    fn a_request_that_comes_back_has_one_timer_for_its_end() {
        let mut schedule = schedule();
        let mut one = record(1);
        one.expires = at(1000);
        for n in 0..100 {
            one.due = at(n);
            schedule.set(&one, now(n), at(n));
            assert_eq!(schedule.fire(now(n)), None);
            assert!(schedule.start(|_| 1).is_some(), "{n}");
            schedule.ended("bank");
        }
        assert_eq!(schedule.timers.len(), 1);
        assert_eq!(schedule.fire(now(1000)), Some(Fired::Expires(one.id)));
    }

    #[test]
    fn a_step_of_the_wall_clock_shifts_and_never_hurries() {
        let mut schedule = schedule();
        let mut one = record(1);
        one.due = at(10);
        // The wall clock was put back by an hour after the record was written.
        let wall = WallTime::from_millis(T0.as_millis() - 3_600_000);
        schedule.set(&one, now(0), wall);
        assert_eq!(schedule.next_timer(), Some(now(3610)));
        // It was put forward.
        schedule.set(&one, now(0), at(7200));
        assert_eq!(schedule.fire(now(0)), None);
        assert_eq!(schedule.start(|_| 9).unwrap().0, one.id);
        assert_eq!(schedule.fire(now(4000)), None);
        assert_eq!(schedule.start(|_| 9), None, "the older timer starts nothing");
    }

    #[test]
    fn upstreams_do_not_stand_in_each_others_way() {
        let mut schedule = schedule();
        for n in 0..6 {
            let mut one = record(n);
            one.upstream = if n < 4 { "bank" } else { "mail" }.to_owned();
            schedule.set(&one, now(0), T0);
        }
        assert_eq!(schedule.fire(now(0)), None);
        assert_eq!(schedule.queued("bank"), 4);
        let capacity = |upstream: &str| if upstream == "bank" { 1 } else { 5 };
        let mut started = Vec::new();
        while let Some((_, upstream, _)) = schedule.start(capacity) {
            started.push(upstream.to_string());
        }
        assert_eq!(started, ["bank", "mail", "mail"]);
        schedule.ended("bank");
        assert_eq!(&*schedule.start(capacity).unwrap().1, "bank");
    }
}
