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
use super::members::Members;
use super::pause::Pause;
use super::rate::Rate;
use crate::limiter::{LimitIndex, Quota, Slot, TokenBucket, Tokens};
use crate::time::Timestamp;

mod apply;
mod averaging;
mod merge;
mod reporting;
mod share;
mod silence;
#[cfg(test)]
mod tests;

pub(super) use apply::{Applied, Terms, apply};
use averaging::Lag;
pub(super) use merge::merge;
pub(super) use reporting::Pace;
use share::Share;
pub(super) use share::Sharing;
use silence::{Reserve, Strict};

/// Rate in tokens per second from which reckoning pays: below, single requests
/// are too coarse for it.
const RECKONED_RATE: f64 = 50.0;
/// Requests that must fit into the burst for reckoning.
const RECKONED_BURST: f64 = 4.0;
/// Longest step of the integration, in nanoseconds, and steps at most.
const STEP_NANOS: u64 = 5_000_000;
const MAX_STEPS: u64 = 32;

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

    /// This life of a peer, after `former`: what was reckoned for that one is still to
    /// be replaced by what it really spends, and how fast it spends and when levels
    /// were last compared does not begin anew.
    const fn succeeding(self, former: &Self) -> Self {
        Self {
            demand: former.demand,
            integral: former.integral,
            rate: former.rate,
            reserve: former.reserve,
            averaged_at: former.averaged_at,
            ..self
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
    /// Of a limit that promises a window.
    share: Option<Box<Share>>,
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
    /// Who shares a limit that promises a window.
    pub(super) sharing: Sharing,
    /// Until when all buckets of the limit are closed.
    pub(super) closed_until: Timestamp,
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
            share: None,
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
        if quota.keeps_window() || self.share.is_some() {
            self.advance_share(bucket.level(), quota, climate.sharing, now);
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
        let closed = self.is_paused(now) || climate.closed_until > now;
        let share = if reckons && !closed {
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
        if !self.tells_demand(now) {
            return 0.0;
        }
        let asked = self.demand.at(self.mean_cost, now);
        if self.backlog { asked.max(refill_rate(quota)) } else { asked }
    }

    /// Whether requests wait here.
    pub(super) const fn set_backlog(&mut self, waiting: bool) {
        self.backlog = waiting;
    }

    /// Until when the bucket is closed, if it is or was.
    pub(super) const fn pause(&self) -> Option<&Pause> {
        self.pause.as_ref()
    }

    /// Whether a pause is remembered.
    pub(super) fn has_pause(&self, now: Timestamp) -> bool {
        self.pause.is_some_and(|pause| !pause.is_over(now))
    }

    /// The pause that peers are told of by this replica.
    pub(super) fn told_pause(&self, now: Timestamp) -> Option<&Pause> {
        self.pause.as_ref().filter(|pause| pause.mine && !pause.is_over(now))
    }

    /// Takes over a pause, if it holds against the one that is known.
    pub(super) fn set_pause(&mut self, pause: Pause, now: Timestamp) {
        self.pause = Some(Pause::later(self.pause, pause, now));
    }

    fn is_paused(&self, now: Timestamp) -> bool {
        self.pause.is_some_and(|pause| pause.left(now) > 0)
    }

    fn set_others(&mut self, others: f64) {
        // Sums of differences leave a trace where nothing is left.
        let any = self.peers.iter().any(|peer| peer.demand > 0.0);
        self.others = if any { others.max(0.0) } else { 0.0 };
    }

    /// Whether nobody spends from the bucket, and nobody's share is reserved.
    pub(super) fn is_idle(&self, now: Timestamp) -> bool {
        self.is_settled()
            && self.strict.is_none()
            && !self.has_pause(now)
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
