//! When peers are to be told of a bucket.

use super::{Flush, Ledger, Mark};
use crate::limiter::{Event, Quota, Tokens};
use crate::replication::rate::Rate;
use crate::time::Timestamp;

/// Own flushes remembered for the averaging.
const HISTORY: usize = 16;
/// Requests over which the mean cost is exact; afterwards its smoothing.
const COST_SAMPLES: u8 = 20;
/// Relative part of the level that may go unreported, shared by all replicas.
const THETA: f64 = 0.1;

/// How closely the engine follows buckets.
#[derive(Clone, Copy, Debug)]
pub(in crate::replication) struct Pace {
    /// Replicas, this one included.
    pub(in crate::replication) replicas: u32,
    /// The sync interval, in nanoseconds.
    pub(in crate::replication) sync: u64,
    /// Shortest time between two looks, in nanoseconds.
    pub(in crate::replication) tick: u64,
}

/// What the engine does with a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::replication) struct Verdict {
    /// Peers are to be told.
    pub(in crate::replication) flush: bool,
    /// When to look again; never if nobody asks for the bucket.
    pub(in crate::replication) again: Option<Timestamp>,
}

impl Ledger {
    /// Takes note of an event of this replica's own; says whether the engine is
    /// to look at the bucket, which it is told once for each kind of mark.
    pub(in crate::replication) fn happened(
        &mut self,
        event: Event,
        net: u64,
        level: Tokens,
        quota: &Quota,
        replicas: u32,
        now: Timestamp,
    ) -> Option<Mark> {
        match event {
            Event::Spent(cost) | Event::Refused(cost) => {
                self.used_at = now;
                self.samples = self.samples.saturating_add(1).min(COST_SAMPLES);
                let cost = cost.micros() as f64;
                self.mean_cost += (cost - self.mean_cost) / f64::from(self.samples);
                self.demand.ask(cost, self.mean_cost, now);
            }
            Event::Paced(_) => self.used_at = now,
            Event::Returned(_) | Event::Line => {}
        }
        let begins = self.ask_share(
            match event {
                Event::Spent(cost) | Event::Paced(cost) => cost.micros() as f64,
                Event::Returned(cost) => -(cost.micros() as f64),
                Event::Refused(_) | Event::Line => 0.0,
            },
            now,
        );
        let off = begins || self.deviation(net, quota) >= self.threshold(level, quota, replicas);
        let mark = if off { Mark::Urgent } else { Mark::Watch };
        if self.marked >= Some(mark) {
            return None;
        }
        self.marked = Some(mark);
        // The engine schedules a look for every such mark.
        self.watched |= mark == Mark::Watch;
        Some(mark)
    }

    /// A look is to be scheduled, unless one already is.
    pub(in crate::replication) const fn watch(&mut self) -> bool {
        let first = !self.watched;
        self.watched = true;
        first
    }

    /// Marks the bucket as urgent; whether it was not.
    pub(in crate::replication) fn mark_urgent(&mut self) -> bool {
        self.marked.replace(Mark::Urgent) != Some(Mark::Urgent)
    }

    /// Whether the bucket is marked as urgent.
    pub(in crate::replication) fn is_urgent(&self) -> bool {
        self.marked == Some(Mark::Urgent)
    }

    /// How far what peers believe is off, in micro-tokens.
    pub(super) fn deviation(&self, net: u64, quota: &Quota) -> f64 {
        let spent = net as f64 - self.last.net() as f64;
        let reckoned = if self.reckons(quota) {
            self.last.demand * (self.integral - self.last.integral)
        } else {
            0.0
        };
        (spent - reckoned).abs()
    }

    /// What matters: half a request, a tenth of this replica's share of the
    /// level, or a thousandth of a second's refill, whichever is most.
    pub(super) fn threshold(&self, level: Tokens, quota: &Quota, replicas: u32) -> f64 {
        let share = THETA * level.micros().max(0) as f64 / f64::from(replicas.max(1));
        let second = quota.rate().per_second() * Tokens::MICRO as f64;
        (self.mean_cost * 0.5).max(share).max(0.001 * second)
    }

    /// Whether the engine has nothing to do for the bucket.
    pub(in crate::replication) const fn is_settled(&self) -> bool {
        self.marked.is_none() && !self.watched
    }

    /// What the engine does with a bucket at `now`, and when it looks again.
    pub(in crate::replication) fn inspect(
        &self,
        net: u64,
        level: Tokens,
        quota: &Quota,
        pace: Pace,
        now: Timestamp,
    ) -> Verdict {
        let demand = self.own_demand(quota, now);
        let deviation = self.deviation(net, quota);
        let threshold = self.threshold(level, quota, pace.replicas);
        let off = deviation >= threshold;
        let quiet = now.nanos_since(self.demand.asked_at()) >= pace.sync;
        let unsaid = net != self.last.net();
        let alive = demand > 0.0 || self.last.demand > 0.0;
        let since = now.nanos_since(self.last.at);
        let stale = alive && since >= self.keep_alive(level, quota);
        let ended = demand <= 0.0 && self.last.demand > 0.0;
        let told = Verdict { flush: off || quiet && unsaid || stale || ended, again: None };
        let remains = demand > 0.0 || (!told.flush && (unsaid || alive));
        if !remains {
            return told;
        }
        // Where much is reckoned the error grows fast when requests stop.
        let pace_of_error = 2.0 * threshold / demand.max(self.last.demand).max(f64::MIN_POSITIVE);
        let wait = (pace_of_error as u64).clamp(pace.tick.min(pace.sync), pace.sync);
        Verdict { again: Some(now.plus_nanos(wait)), ..told }
    }

    /// How long a bucket that is asked for may go without an entry.
    pub(super) fn keep_alive(&self, level: Tokens, quota: &Quota) -> u64 {
        let scarce = level.micros() < quota.burst().micros() / 2;
        match (self.reckons(quota), scarce) {
            (true, true) => 250_000_000,
            (true, false) => 2_000_000_000,
            (false, true) => 1_000_000_000,
            (false, false) => 4_000_000_000,
        }
    }

    /// Nothing is left to look at.
    pub(in crate::replication) const fn rest(&mut self) {
        self.marked = None;
        self.watched = false;
    }

    /// Ends the present flush and begins the next: what is known now is what
    /// the streams are handed.
    pub(in crate::replication) fn flush(
        &mut self,
        spent: u64,
        returned: u64,
        quota: &Quota,
        now: Timestamp,
    ) {
        let delta = spent.saturating_sub(returned) as f64 - self.last.net() as f64;
        self.rate.learn(delta, now.nanos_since(self.last.at) as f64, quota);
        self.last = Flush {
            number: self.last.number.wrapping_add(1).max(1),
            spent,
            returned,
            demand: self.own_demand(quota, now),
            at: now,
            integral: self.integral,
        };
        if self.last.demand <= 0.0 {
            self.rate = Rate::default();
        }
        if self.history.len() == HISTORY {
            self.history.remove(0);
        }
        self.history.push(self.last);
        // It stays watched; only the urgency is over.
        if self.marked == Some(Mark::Urgent) {
            self.marked = Some(Mark::Watch);
        }
    }
}
