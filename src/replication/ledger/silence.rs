//! What is kept for peers that are not heard.

use super::{Ledger, refill_rate};
use crate::limiter::{LimitIndex, Partition, Quota, TokenBucket, Tokens};
use crate::replication::members::{Members, Standing};
use crate::time::Timestamp;

/// Part of the refill that must be spent for a bucket to count as scarce.
const SCARCE: f64 = 0.8;
/// How long a peer that is heard again may take to speak of a bucket before its
/// reserved share is taken as unspent, and how long one that a snapshot named may
/// take to be met before its demand is taken to have ended.
const SETTLING_NANOS: u64 = 5_000_000_000;

/// What is reserved for a silent peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reserve {
    pub(super) standing: Standing,
    /// In micro-tokens per nanosecond, while all of it is held.
    pub(super) rate: f64,
    /// Taken from the level for it so far, in micro-tokens.
    pub(super) charged: f64,
    /// What the cap had cost when it fell silent.
    pub(super) lost: f64,
}

/// How a strict limit behaves while replicas are silent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strict {
    /// Reserved for silent replicas that never used the bucket, in micro-tokens
    /// per nanosecond, and taken for them so far.
    pub(super) rate: f64,
    pub(super) charged: f64,
    /// Which part of what is there this side of the split may spend.
    pub(super) part: f64,
}

impl Ledger {
    /// Follows the members: reserves the share of peers that fell silent, and
    /// gives back what was reckoned for those that are gone.
    pub(super) fn follow(
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
    pub(super) fn follow_strict(&mut self, members: &Members, policy: Partition, even: f64) -> f64 {
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

    /// By what measured rates are multiplied to be shares. Together they can never
    /// be more than the refill, and while the bucket is scarce they are all of it:
    /// since every replica measures every origin alike, the shares that the parts
    /// of a split network reserve for each other add up.
    pub(super) fn share_scale(&self, level: Tokens, quota: &Quota) -> f64 {
        let refill = refill_rate(quota);
        let total: f64 =
            self.rate.value() + self.peers.iter().map(|peer| peer.rate.value()).sum::<f64>();
        let scarce = level.micros() < quota.burst().micros() / 4 && total >= SCARCE * refill;
        if total > refill || scarce { refill / total } else { 1.0 }
    }

    /// How much of `level` may be spent.
    pub(in crate::replication) fn room(&self, level: Tokens) -> Tokens {
        match self.strict {
            Some(strict) if level > Tokens::ZERO => {
                Tokens::from_micros((level.micros() as f64 * strict.part) as i64)
            }
            Some(_) | None => level,
        }
    }

    /// The level that gives room for `cost`, or the burst if that is less.
    pub(in crate::replication) fn level_for(&self, cost: Tokens, quota: &Quota) -> Tokens {
        let part = self.strict.map_or(1.0, |strict| strict.part);
        Tokens::from_micros((cost.micros() as f64 / part).ceil() as i64).min(quota.burst())
    }
}
