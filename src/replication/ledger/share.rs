//! Shares of a bucket whose limit promises a window.
//!
//! Replicas that race for a level can each give out its last tokens once. So of a
//! limit that promises a window each replica also has a share, which nobody else can
//! spend: a part of the burst, and while it is busy a part of the refill. With n
//! members, of which k are busy,
//!
//! > burst b / n, refill r / k, and r / n for the first one and a half sync intervals
//! > of being busy
//!
//! by when all that went busy at once know of each other. The parts never sum up to
//! more than the whole, except for as long as the news that a replica went busy is
//! under way. A replica that is not busy is not refilled while others are. Counters
//! and levels go on beside it: a request needs both.

use super::{Ledger, refill_rate};
use crate::limiter::{Quota, Tokens};
use crate::time::Timestamp;

/// For how many slow starts a replica stays busy after it was asked last.
const HOLD: u64 = 2;

/// Who shares, as all ledgers see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::replication) struct Sharing {
    /// Replicas, this one and expected ones included.
    pub(in crate::replication) members: u32,
    /// Nanoseconds of the slow start.
    pub(in crate::replication) slow: u64,
}

/// What only this replica may spend.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    /// Micro-tokens; below zero if a request cost more than the share can hold.
    tokens: f64,
    /// What it can hold.
    most: f64,
    at: Timestamp,
    busy_since: Option<Timestamp>,
    /// How the replica is refilled, in micro-tokens per nanosecond: in its slow start,
    /// afterwards, and while it is not busy.
    slowly: f64,
    fully: f64,
    idly: f64,
    slow: u64,
    /// Until when it is busy if it is not asked again.
    busy_until: Timestamp,
}

impl Share {
    /// Refills up to `now`.
    fn advance(&mut self, now: Timestamp) {
        if now <= self.at {
            return;
        }
        let within =
            |from: Timestamp, to: Timestamp| to.min(now).nanos_since(from.max(self.at)) as f64;
        let added = match self.busy_since {
            None => within(self.at, now) * self.idly,
            Some(since) => {
                let started = since.plus_nanos(self.slow);
                within(self.at, started.min(self.busy_until)) * self.slowly
                    + within(started, self.busy_until) * self.fully
                    + within(self.busy_until, now) * self.idly
            }
        };
        self.tokens = (self.tokens + added).min(self.most);
        self.at = now;
    }

    /// Nanoseconds until `wanted` micro-tokens are there, if it stays busy.
    fn due(&self, wanted: f64, now: Timestamp) -> u64 {
        let missing = wanted - self.tokens;
        if missing <= 0.0 {
            return 0;
        }
        let started = self.busy_since.unwrap_or(now).plus_nanos(self.slow);
        let slow = started.nanos_since(now) as f64;
        let first = slow * self.slowly;
        let nanos = if missing <= first {
            missing / self.slowly.max(f64::MIN_POSITIVE)
        } else {
            slow + (missing - first) / self.fully.max(f64::MIN_POSITIVE)
        };
        // A float above the range of a number becomes its end.
        nanos.ceil() as u64
    }
}

impl Ledger {
    /// Brings the share up to `now`; the level was before. A bucket whose limit
    /// promises no window has none.
    pub(in crate::replication) fn advance_share(
        &mut self,
        level: Tokens,
        quota: &Quota,
        sharing: Sharing,
        now: Timestamp,
    ) {
        if !quota.keeps_window() {
            self.share = None;
            return;
        }
        let members = f64::from(sharing.members.max(1));
        let refill = refill_rate(quota);
        let most = quota.burst().micros() as f64 / members;
        let busy = self.peers.iter().filter(|peer| {
            peer.demand > 0.0 || peer.reserve.is_some_and(|r| r.rate * r.standing.kept(now) > 0.0)
        });
        let busy = busy.count() as f64;
        let hold = HOLD * sharing.slow;
        let is_busy = self.is_busy(hold, now);
        let busy_until = if self.backlog {
            Timestamp::from_nanos(u64::MAX)
        } else {
            self.demand.asked_at().plus_nanos(hold)
        };
        let share = self.share.get_or_insert_with(|| {
            let tokens = (level.micros().max(0) as f64 / members).min(most);
            Box::new(Share {
                tokens,
                most,
                at: now,
                busy_since: None,
                slowly: 0.0,
                fully: 0.0,
                idly: 0.0,
                slow: sharing.slow,
                busy_until,
            })
        });
        share.advance(now);
        // What is known now holds from now on.
        share.most = most;
        share.tokens = share.tokens.min(most);
        share.slow = sharing.slow;
        share.busy_until = busy_until;
        if !is_busy {
            share.busy_since = None;
        }
        let parts = busy + 1.0;
        share.slowly = refill / members.max(parts);
        // Behind a split a strict limit counts with everybody.
        share.fully = if self.strict.is_some() { share.slowly } else { refill / parts };
        share.idly = if busy > 0.0 { 0.0 } else { refill / members };
    }

    /// Whether this replica was asked lately, or requests wait here.
    fn is_busy(&self, hold: u64, now: Timestamp) -> bool {
        self.backlog
            || self.demand.at(self.mean_cost, now) > 0.0
                && now.nanos_since(self.demand.asked_at()) < hold
    }

    /// Whether peers are told of a demand: of a bucket with shares, while it is busy.
    pub(super) fn tells_demand(&self, now: Timestamp) -> bool {
        self.share.as_ref().is_none_or(|share| self.is_busy(HOLD * share.slow, now))
    }

    /// Takes `spent` micro-tokens from the share, or gives them back, after this
    /// replica was asked. Whether it is busy from now on, which peers must hear.
    pub(super) fn ask_share(&mut self, spent: f64, now: Timestamp) -> bool {
        let Some(share) = &self.share else { return false };
        let hold = HOLD * share.slow;
        let is_busy = self.is_busy(hold, now);
        let (backlog, asked_at) = (self.backlog, self.demand.asked_at());
        let Some(share) = &mut self.share else { return false };
        share.tokens = (share.tokens - spent).min(share.most);
        share.busy_until =
            if backlog { Timestamp::from_nanos(u64::MAX) } else { asked_at.plus_nanos(hold) };
        let begins = is_busy && share.busy_since.is_none();
        if begins {
            share.busy_since = Some(now);
        }
        begins
    }

    /// What of `level` the share allows to spend, of which `held` micro-tokens are
    /// already held. A request that costs more than a share can hold passes when it is
    /// full, and is paid for afterwards.
    pub(in crate::replication) fn shared_room(&self, level: Tokens, held: u64) -> Tokens {
        let Some(share) = &self.share else { return level };
        let left = share.tokens - held as f64;
        if left >= share.most { level } else { level.min(Tokens::from_micros(left as i64)) }
    }

    /// Nanoseconds until the share allows `cost`, after `ahead`.
    pub(in crate::replication) fn share_due(
        &self,
        ahead: Tokens,
        cost: Tokens,
        now: Timestamp,
    ) -> u64 {
        self.share.as_ref().map_or(0, |share| {
            let wanted = (cost.micros() as f64).min(share.most);
            share.due(ahead.micros() as f64 + wanted, now)
        })
    }
}
