//! Ledger: what this replica and its peers spent from one bucket, and what is
//! reckoned in between.
//!
//! For every origin the ledger knows two ever growing totals, spent and
//! returned. Applying an entry subtracts the difference to what was known, so
//! any order, repetition or loss of entries subtracts exactly what was spent,
//! once. The first entry of an origin (or of a new generation of it) is a
//! baseline: only its fresh part is subtracted, never the history.
//!
//! Between entries the level is dead-reckoned. Each peer reports its demand D,
//! and all replicas drain their levels by the same share f of every peer's
//! demand, the share that the bucket can give:
//!
//! > f = min(1, (max(r - Z, 0) + max(L - c, 0) / h) / (S + D_own))
//!
//! with the refill r, the level L, the mean cost c, the horizon h within which
//! news arrives, S the sum of the peers' demands, and Z what is reserved for
//! silent ones. F, the integral of f, makes undoing exact: what was reckoned for
//! peer j since its last entry is D_j (F - F_j), and an entry replaces it by what
//! j really spent. A replica therefore reports only what differs from what the
//! others reckon by themselves.

use smallvec::SmallVec;

use super::demand::Demand;
use super::frame::{Contribution, Incarnation};
use super::members::{Members, Standing};
use super::pause::Pause;
use super::rate::Rate;
use crate::limiter::{Event, LimitIndex, Partition, Quota, Slot, TokenBucket, Tokens};
use crate::time::Timestamp;

mod apply;
mod averaging;
mod merge;
#[cfg(test)]
mod tests;

pub(super) use apply::{Applied, Terms, apply};
use averaging::Lag;
pub(super) use merge::merge;

/// Own flushes remembered for the averaging.
const HISTORY: usize = 16;
/// Requests over which the mean cost is exact; afterwards its smoothing.
const COST_SAMPLES: u8 = 20;
/// Relative part of the level that may go unreported, shared by all replicas.
const THETA: f64 = 0.1;
/// Rate in tokens per second from which reckoning pays: below, single requests
/// are too coarse for it.
const RECKONED_RATE: f64 = 50.0;
/// Requests that must fit into the burst for reckoning.
const RECKONED_BURST: f64 = 4.0;
/// Longest step of the integration, in nanoseconds, and steps at most.
const STEP_NANOS: u64 = 5_000_000;
const MAX_STEPS: u64 = 32;
/// Part of the refill that must be spent for a bucket to count as scarce.
const SCARCE: f64 = 0.8;
/// How long a peer that is heard again may take to speak of a bucket before its
/// reserved share is taken as unspent, and how long one that a snapshot named may
/// take to be met before its demand is taken to have ended.
const SETTLING_NANOS: u64 = 5_000_000_000;

/// An index for an origin, unique within one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OriginId(pub(super) u32);

/// How soon the engine should look at a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mark {
    /// Now and then, from now on until it is idle.
    Watch,
    /// At once: what peers believe is off by something that matters.
    Urgent,
}

/// What was last handed to the streams.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flush {
    pub(super) number: u32,
    pub(super) spent: u64,
    pub(super) returned: u64,
    /// Demand told, in micro-tokens per nanosecond.
    pub(super) demand: f64,
    pub(super) at: Timestamp,
    integral: f64,
}

impl Flush {
    const fn net(&self) -> u64 {
        self.spent.saturating_sub(self.returned)
    }
}

/// Totals before something was skipped: what a stream must start from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Base {
    pub(super) generation: u32,
    pub(super) spent: u64,
    pub(super) returned: u64,
}

/// What is reserved for a silent peer.
#[derive(Clone, Copy, Debug)]
struct Reserve {
    standing: Standing,
    /// In micro-tokens per nanosecond, while all of it is held.
    rate: f64,
    /// Taken from the level for it so far, in micro-tokens.
    charged: f64,
    /// What the cap had cost when it fell silent.
    lost: f64,
}

/// How a strict limit behaves while replicas are silent.
#[derive(Clone, Copy, Debug)]
struct Strict {
    /// Reserved for silent replicas that never used the bucket, in micro-tokens
    /// per nanosecond, and taken for them so far.
    rate: f64,
    charged: f64,
    /// Which part of what is there this side of the split may spend.
    part: f64,
}

/// What one peer spent from the bucket, as far as it is known.
#[derive(Clone, Debug)]
struct Peer {
    origin: OriginId,
    generation: u32,
    spent: u64,
    returned: u64,
    /// The newest flush of the peer that arrived.
    heard: u32,
    /// Its demand as it last said, and the integral then.
    demand: f64,
    integral: f64,
    /// How fast it spends.
    rate: Rate,
    at: Timestamp,
    averaged_at: Timestamp,
    lag: Lag,
    reserve: Option<Reserve>,
    /// Net micro-tokens of this replica's spending that its level contains, by the
    /// newest flush that it acknowledged.
    knows: u64,
    /// Net micro-tokens that it had spent when it was first heard of, and that the
    /// level does not contain until a snapshot tells of them.
    unseen: u64,
}

impl Peer {
    const fn net(&self) -> u64 {
        self.spent.saturating_sub(self.returned)
    }

    fn baseline(
        origin: OriginId,
        generation: u32,
        base: (u64, u64),
        integral: f64,
        now: Timestamp,
    ) -> Self {
        Self {
            origin,
            generation,
            spent: base.0,
            returned: base.1,
            heard: 0,
            demand: 0.0,
            integral,
            rate: Rate::default(),
            at: now,
            averaged_at: now,
            lag: Lag::default(),
            reserve: None,
            knows: 0,
            unseen: base.0.saturating_sub(base.1),
        }
    }

    /// What was taken from the level for it beyond what it is known to have spent.
    fn outstanding(&self, integral: f64) -> f64 {
        match self.reserve {
            Some(reserve) => reserve.charged,
            None => self.demand * (integral - self.integral),
        }
    }
}

/// The replicated part of one bucket.
#[derive(Clone, Debug)]
pub struct Ledger {
    generation: u32,
    epoch: u64,
    first: Base,
    last: Flush,
    history: SmallVec<[Flush; 2]>,
    marked: Option<Mark>,
    /// The engine has a look at it scheduled.
    watched: bool,
    mean_cost: f64,
    samples: u8,
    demand: Demand,
    /// Requests wait here for tokens of this bucket.
    backlog: bool,
    /// How fast this replica spends, as its peers measure it.
    rate: Rate,
    /// When tokens were last spent or asked for, by anyone.
    used_at: Timestamp,
    /// F, in nanoseconds.
    integral: f64,
    /// S, the sum of the demands of peers that are heard.
    others: f64,
    /// Less than a micro-token that was reckoned but not yet taken.
    carry: f64,
    /// What the cap has cost so far, in micro-tokens.
    lost: f64,
    /// Version of the members that the peers here follow.
    version: u32,
    strict: Option<Strict>,
    pause: Option<Pause>,
    peers: SmallVec<[Peer; 2]>,
}

/// What all ledgers of a process see alike.
#[derive(Clone, Copy)]
pub(super) struct Climate<'a> {
    /// h: nanoseconds within which news arrives.
    pub(super) horizon: f64,
    /// The bucket's limit.
    pub(super) limit: LimitIndex,
    /// Version of the members.
    pub(super) version: u32,
    /// The members; looked at only when the version is another.
    pub(super) members: &'a dyn Fn() -> std::sync::Arc<Members>,
}

impl Ledger {
    pub(super) fn new(
        generation: u32,
        epoch: u64,
        spent: u64,
        returned: u64,
        now: Timestamp,
    ) -> Self {
        let last = Flush { number: 0, spent, returned, demand: 0.0, at: now, integral: 0.0 };
        Self {
            generation,
            epoch,
            first: Base { generation, spent, returned },
            last,
            history: SmallVec::from_slice(&[last]),
            marked: None,
            watched: false,
            mean_cost: Tokens::MICRO as f64,
            samples: 0,
            demand: Demand::none(now),
            backlog: false,
            rate: Rate::default(),
            used_at: now,
            integral: 0.0,
            others: 0.0,
            carry: 0.0,
            lost: 0.0,
            version: 0,
            strict: None,
            pause: None,
            peers: SmallVec::new(),
        }
    }

    /// Whether levels are reckoned between entries.
    fn reckons(&self, quota: &Quota) -> bool {
        quota.rate().per_second() >= RECKONED_RATE
            && quota.burst().micros() as f64 >= RECKONED_BURST * self.mean_cost
    }

    /// Refills and drains the bucket up to `now`.
    pub(super) fn advance(
        &mut self,
        bucket: &mut TokenBucket,
        quota: &Quota,
        climate: &Climate<'_>,
        now: Timestamp,
    ) {
        let start = bucket.advanced_at();
        let nanos = now.nanos_since(start);
        if nanos > 0 {
            let reckons = self.reckons(quota);
            let reserved =
                self.strict.is_some() || self.peers.iter().any(|peer| peer.reserve.is_some());
            if !reckons && !reserved {
                bucket.advance(quota, now);
            } else {
                let steps = nanos.div_ceil(STEP_NANOS).min(MAX_STEPS);
                for step in 1..=steps {
                    let at = start.plus_nanos(nanos / steps * step + nanos % steps * step / steps);
                    self.step(bucket, quota, climate, reckons, at);
                }
            }
        }
        if self.version != climate.version {
            self.follow(bucket, quota, &(climate.members)(), climate.limit, now);
        }
    }

    fn step(
        &mut self,
        bucket: &mut TokenBucket,
        quota: &Quota,
        climate: &Climate<'_>,
        reckons: bool,
        now: Timestamp,
    ) {
        let nanos = now.nanos_since(bucket.advanced_at()) as f64;
        let mut reserved = 0.0;
        for peer in &mut self.peers {
            if let Some(reserve) = &mut peer.reserve {
                let kept = reserve.rate * reserve.standing.kept(now);
                reserve.charged += kept * nanos;
                reserved += kept;
            }
        }
        if let Some(strict) = &mut self.strict {
            strict.charged += strict.rate * nanos;
            reserved += strict.rate;
        }
        let share = if reckons && !self.is_paused(now) {
            self.share(bucket.level(), quota, reserved, climate, now)
        } else {
            0.0
        };
        self.integral += share * nanos;
        let drained = (self.others * share + reserved) * nanos + self.carry;
        let whole = drained.floor();
        self.carry = drained - whole;
        let before = bucket.level().micros() as f64 - whole;
        bucket.drain(Tokens::from_micros(whole as i64));
        bucket.advance(quota, now);
        if bucket.level() == quota.burst() {
            let refill = refill_rate(quota) * nanos;
            self.lost += (before + refill - quota.burst().micros() as f64).max(0.0);
        }
    }

    /// f: the share of all demand that the bucket can give.
    fn share(
        &self,
        level: Tokens,
        quota: &Quota,
        reserved: f64,
        climate: &Climate<'_>,
        now: Timestamp,
    ) -> f64 {
        let demand = self.others + self.own_demand(quota, now);
        if demand <= 0.0 {
            return 1.0;
        }
        let above = (level.micros() as f64 - self.mean_cost).max(0.0);
        let supply = (refill_rate(quota) - reserved).max(0.0) + above / climate.horizon;
        (supply / demand).min(1.0)
    }

    /// How many times longer than without others a refill takes: they take their
    /// part of it, though each replica is sure of an even share.
    pub(super) fn slowdown(&self, quota: &Quota, replicas: u32) -> f64 {
        let refill = refill_rate(quota);
        let reserved: f64 =
            self.peers.iter().filter_map(|peer| peer.reserve).map(|reserve| reserve.rate).sum();
        // In scarcity peers get the part of the refill that their demand is of all.
        let own = self.own_demand(quota, self.demand.asked_at());
        let all = self.others + own;
        let taken = if all > 0.0 { self.others * (refill / all).min(1.0) } else { 0.0 };
        let left = (refill - taken - reserved).max(refill / f64::from(replicas.max(1)));
        if left > 0.0 { refill / left } else { 1.0 }
    }

    /// How fast tokens are asked for here. Requests that wait have asked once, and
    /// would take whatever comes: as long as there are any, that is all of the
    /// refill. So replicas where requests wait share it evenly.
    fn own_demand(&self, quota: &Quota, now: Timestamp) -> f64 {
        let asked = self.demand.at(self.mean_cost, now);
        if self.backlog { asked.max(refill_rate(quota)) } else { asked }
    }

    /// Whether requests wait here.
    pub(super) const fn set_backlog(&mut self, waiting: bool) {
        self.backlog = waiting;
    }

    /// Follows the members: reserves the share of peers that fell silent, and
    /// gives back what was reckoned for those that are gone.
    fn follow(
        &mut self,
        bucket: &mut TokenBucket,
        quota: &Quota,
        members: &Members,
        limit: LimitIndex,
        now: Timestamp,
    ) {
        let policy = members.policy(limit);
        let even = refill_rate(quota) / f64::from(members.counted.max(1));
        let (integral, lost) = (self.integral, self.lost);
        let scale = self.share_scale(bucket.level(), quota);
        let mut settled = true;
        let mut given_back = 0.0;
        let mut others = self.others;
        self.peers.retain(|peer| {
            match (members.standings.get(&peer.origin), peer.reserve.is_some()) {
                // Gone: what was taken for it beyond what it spent comes back, unless
                // it was silent for so long that its share was released: then it may
                // live and spend behind a split.
                (None, _) => {
                    let kept = peer.reserve.map_or(1.0, |reserve| reserve.standing.kept(now));
                    given_back += peer.outstanding(integral) * kept;
                    if peer.reserve.is_none() {
                        others -= peer.demand;
                    }
                    return false;
                }
                (Some(standing @ Standing::Silent { .. }), false) => {
                    let rate = match policy {
                        Partition::Frozen => peer.rate.value() * scale,
                        Partition::Strict => (peer.rate.value() * scale).max(even),
                        Partition::Open => 0.0,
                    };
                    let charged = rate * now.nanos_since(peer.at) as f64;
                    given_back += peer.outstanding(integral) - charged;
                    others -= peer.demand;
                    peer.demand = 0.0;
                    peer.reserve = Some(Reserve { standing: *standing, rate, charged, lost });
                }
                (Some(Standing::Heard(since)), true) => {
                    if now.nanos_since(*since) > SETTLING_NANOS {
                        given_back += peer.outstanding(integral);
                        peer.reserve = None;
                        peer.integral = integral;
                        peer.at = now;
                    } else {
                        settled = false;
                    }
                }
                (Some(standing @ Standing::Silent { .. }), true) => {
                    if let Some(reserve) = &mut peer.reserve {
                        reserve.standing = *standing;
                    }
                }
                (Some(Standing::Named(since)), _) => {
                    if now.nanos_since(*since) > SETTLING_NANOS {
                        given_back += peer.outstanding(integral);
                        if peer.reserve.take().is_none() {
                            others -= peer.demand;
                        }
                        peer.demand = 0.0;
                        peer.integral = integral;
                    } else {
                        settled &= peer.demand <= 0.0 && peer.reserve.is_none();
                    }
                }
                (Some(Standing::Heard(_)), false) => {}
            }
            true
        });
        self.set_others(others);
        given_back += self.follow_strict(members, policy, even);
        bucket.shift(quota, Tokens::from_micros(given_back.round() as i64));
        if settled {
            self.version = members.version;
        }
    }

    /// Begins, continues or ends a strict limit's caution; what was taken for
    /// replicas that never used the bucket comes back at its end.
    fn follow_strict(&mut self, members: &Members, policy: Partition, even: f64) -> f64 {
        let charged = self.strict.map_or(0.0, |strict| strict.charged);
        if policy != Partition::Strict || members.silent == 0 {
            self.strict = None;
            return charged;
        }
        let reserved = self.peers.iter().filter(|peer| peer.reserve.is_some()).count();
        let unseen = f64::from(members.silent) - reserved as f64;
        let heard = members.counted.saturating_sub(members.silent).max(1);
        self.strict = Some(Strict {
            rate: even * unseen.max(0.0),
            charged,
            part: f64::from(heard) / f64::from(members.counted.max(1)),
        });
        0.0
    }

    /// How much of `level` may be spent at `now`.
    pub(super) fn room(&self, level: Tokens, now: Timestamp) -> Tokens {
        if self.is_paused(now) {
            return Tokens::from_micros(i64::MIN);
        }
        match self.strict {
            Some(strict) if level > Tokens::ZERO => {
                Tokens::from_micros((level.micros() as f64 * strict.part) as i64)
            }
            Some(_) | None => level,
        }
    }

    /// The level that gives room for `cost`, or the burst if that is less.
    pub(super) fn level_for(&self, cost: Tokens, quota: &Quota) -> Tokens {
        let part = self.strict.map_or(1.0, |strict| strict.part);
        Tokens::from_micros((cost.micros() as f64 / part).ceil() as i64).min(quota.burst())
    }

    /// Until when the bucket is closed, if it is or was.
    pub(super) const fn pause(&self) -> Option<&Pause> {
        self.pause.as_ref()
    }

    pub(super) fn set_pause(&mut self, pause: Pause) {
        self.pause = Some(Pause::later(self.pause, pause));
    }

    fn is_paused(&self, now: Timestamp) -> bool {
        self.pause.is_some_and(|pause| pause.left(now) > 0)
    }

    /// By what measured rates are multiplied to be shares. Together they can never
    /// be more than the refill, and while the bucket is scarce they are all of it:
    /// since every replica measures every origin alike, the shares that the parts
    /// of a split network reserve for each other add up.
    fn share_scale(&self, level: Tokens, quota: &Quota) -> f64 {
        let refill = refill_rate(quota);
        let total: f64 =
            self.rate.value() + self.peers.iter().map(|peer| peer.rate.value()).sum::<f64>();
        let scarce = level.micros() < quota.burst().micros() / 4 && total >= SCARCE * refill;
        if total > refill || scarce { refill / total } else { 1.0 }
    }

    fn set_others(&mut self, others: f64) {
        // Sums of differences leave a trace where nothing is left.
        let any = self.peers.iter().any(|peer| peer.demand > 0.0);
        self.others = if any { others.max(0.0) } else { 0.0 };
    }

    /// Takes note of an event of this replica's own; says whether the engine is
    /// to look at the bucket, which it is told once for each kind of mark.
    pub(super) fn happened(
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
        let off = self.deviation(net, quota) >= self.threshold(level, quota, replicas);
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
    pub(super) const fn watch(&mut self) -> bool {
        let first = !self.watched;
        self.watched = true;
        first
    }

    /// Whether the bucket is marked as urgent.
    pub(super) fn is_urgent(&self) -> bool {
        self.marked == Some(Mark::Urgent)
    }

    /// How far what peers believe is off, in micro-tokens.
    fn deviation(&self, net: u64, quota: &Quota) -> f64 {
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
    fn threshold(&self, level: Tokens, quota: &Quota, replicas: u32) -> f64 {
        let share = THETA * level.micros().max(0) as f64 / f64::from(replicas.max(1));
        let second = quota.rate().per_second() * Tokens::MICRO as f64;
        (self.mean_cost * 0.5).max(share).max(0.001 * second)
    }

    /// Whether the engine has nothing to do for the bucket.
    pub(super) const fn is_settled(&self) -> bool {
        self.marked.is_none() && !self.watched
    }

    /// Whether nobody spends from the bucket, and nobody's share is reserved.
    pub(super) fn is_idle(&self, now: Timestamp) -> bool {
        self.is_settled()
            && self.strict.is_none()
            && self.pause.is_none_or(|pause| pause.left(now) == 0)
            && self.peers.iter().all(|peer| peer.demand <= 0.0 && peer.reserve.is_none())
    }

    /// When tokens were last spent or asked for, by anyone.
    pub(super) const fn used_at(&self) -> Timestamp {
        self.used_at
    }

    /// The newest flush.
    pub(super) const fn last(&self) -> &Flush {
        &self.last
    }

    /// What a stream that was skipped since before the newest flush starts from.
    pub(super) const fn base(&self) -> Base {
        Base { generation: self.generation, spent: self.last.spent, returned: self.last.returned }
    }

    /// Net micro-tokens spent since the newest flush.
    pub(super) const fn unsent(&self, spent: u64, returned: u64) -> i64 {
        signed(spent.saturating_sub(returned)).saturating_sub(signed(self.last.net()))
    }

    /// What the engine does with a bucket at `now`, and when it looks again.
    pub(super) fn inspect(
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
    fn keep_alive(&self, level: Tokens, quota: &Quota) -> u64 {
        let scarce = level.micros() < quota.burst().micros() / 2;
        match (self.reckons(quota), scarce) {
            (true, true) => 250_000_000,
            (true, false) => 2_000_000_000,
            (false, true) => 1_000_000_000,
            (false, false) => 4_000_000_000,
        }
    }

    /// Nothing is left to look at.
    pub(super) const fn rest(&mut self) {
        self.marked = None;
        self.watched = false;
    }

    /// Ends the present flush and begins the next: what is known now is what
    /// the streams are handed.
    pub(super) fn flush(&mut self, spent: u64, returned: u64, quota: &Quota, now: Timestamp) {
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

    /// What the stream to `origin`, which starts from `base`, is to be told
    /// beside the newest flush.
    pub(super) fn telling(&self, origin: OriginId, base: Base, quota: &Quota) -> Telling {
        let base = if base.generation == self.generation { base } else { self.first };
        let ack = self.peers.iter().find(|p| p.origin == origin).map_or(0, |p| p.heard);
        let elsewhere = (!self.reckons(quota)).then(|| self.contained_beside(origin));
        Telling { base, ack, elsewhere, is_first: base == self.first }
    }

    /// Which life of this replica's ledger this is.
    pub(super) const fn generation(&self) -> u32 {
        self.generation
    }

    /// How often the bucket was reset.
    pub(super) const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Micro-tokens that peers spent, net, as far as it is known here.
    pub fn spent_elsewhere(&self) -> u64 {
        self.spent_by_peers().fold(0, |sum, (_, net)| sum.saturating_add(net))
    }

    /// What each peer spent, net, for operators.
    pub(super) fn spent_by_peers(&self) -> impl Iterator<Item = (OriginId, u64)> {
        self.peers.iter().map(|p| (p.origin, p.net()))
    }

    /// When a peer was last heard on this bucket.
    pub(super) fn heard_at(&self) -> Option<Timestamp> {
        self.peers.iter().map(|p| p.at).max()
    }

    /// Micro-tokens that were taken from the level although nobody is known to
    /// have spent them: reckoned for peers, or reserved for silent ones.
    pub(super) fn outstanding(&self) -> f64 {
        let unseen = self.strict.map_or(0.0, |strict| strict.charged);
        self.peers.iter().map(|peer| peer.outstanding(self.integral)).sum::<f64>() + unseen
    }

    /// What the level contains of each origin, this replica included.
    pub(super) fn contributions(
        &self,
        me: Contribution,
        incarnation: impl Fn(OriginId) -> Option<Incarnation>,
        now: Timestamp,
    ) -> Vec<Contribution> {
        let demand = self.demand.at(self.mean_cost, now);
        let mut all = vec![Contribution { generation: self.generation, demand, ..me }];
        all.extend(self.peers.iter().filter_map(|peer| {
            Some(Contribution {
                incarnation: incarnation(peer.origin)?,
                generation: peer.generation,
                spent: peer.spent,
                returned: peer.returned,
                demand: peer.demand,
                unseen: peer.unseen,
            })
        }));
        all
    }
}

/// What the stream to a peer is to be told beside a flush.
#[derive(Clone, Copy, Debug)]
pub(super) struct Telling {
    /// Totals that the stream starts from.
    pub(super) base: Base,
    /// The newest flush of the peer that arrived here.
    pub(super) ack: u32,
    /// What the level contains of third replicas, unless it is reckoned.
    pub(super) elsewhere: Option<u64>,
    /// The peer may lack the key.
    pub(super) is_first: bool,
}

/// How closely the engine follows buckets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Replicas, this one included.
    pub(super) replicas: u32,
    /// The sync interval, in nanoseconds.
    pub(super) sync: u64,
    /// Shortest time between two looks, in nanoseconds.
    pub(super) tick: u64,
}

/// What the engine does with a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Verdict {
    /// Peers are to be told.
    pub(super) flush: bool,
    /// When to look again; never if nobody asks for the bucket.
    pub(super) again: Option<Timestamp>,
}

/// The refill in micro-tokens per nanosecond.
fn refill_rate(quota: &Quota) -> f64 {
    quota.rate().per_second() * Tokens::MICRO as f64 / 1e9
}

/// The deficit of a bucket with everything added back that nobody is known to
/// have spent: what others may be told.
pub(super) fn true_deficit(slot: &Slot<Ledger>, quota: &Quota) -> Tokens {
    let reckoned = slot.companion.as_deref().map_or(0.0, Ledger::outstanding);
    let missing = quota.burst().minus(slot.held_level());
    Tokens::from_micros((missing.micros() - reckoned.round() as i64).max(0))
}

/// Whether generation `a` is newer than `b`, by serial number arithmetic
/// (RFC 1982), since the counter may wrap.
const fn newer(a: u32, b: u32) -> bool {
    a.wrapping_sub(b) as i32 > 0
}

const fn signed(micros: u64) -> i64 {
    if micros > i64::MAX as u64 { i64::MAX } else { micros as i64 }
}
