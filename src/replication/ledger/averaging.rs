//! Slow averaging of levels.
//!
//! It keeps the levels of replicas together: without it a replica whose level is
//! offset would starve in overload for ever. It compares the peer's level with
//! this replica's, corrected for what only one of the two can have known yet, and
//! moves a part of the way that grows with the time since the last comparison.

use super::apply::Terms;
use super::{Flush, Ledger, OriginId, newer, refill_rate, signed};
use crate::limiter::Quota;
use crate::replication::frame::Entry;
use crate::time::Timestamp;

/// Time constant of the averaging, in nanoseconds; and of a scarce bucket that is
/// not reckoned: there all count the same single requests, levels part only while
/// the bucket is full, and what a comparison finds is mostly what is under way.
const AVERAGING_NANOS: f64 = 1e9;
const EXACT_NANOS: f64 = 1e10;
/// News of others that may be under way, as nanoseconds of the refill beyond a
/// round trip, and as requests.
const LAG_NANOS: f64 = 1e8;
const LAG_REQUESTS: f64 = 2.0;
/// How long news can be under way; what differs for longer is how the two count.
const LAG_LIMIT_NANOS: u64 = 2_000_000_000;

/// How much more a peer's level contains of third replicas than this one's does.
///
/// What is under way to one of the two changes from entry to entry. A part stays:
/// one of them may have forgotten a replica that is gone, or have made the bucket
/// anew since.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lag {
    /// The part that stays, in micro-tokens.
    stays: i64,
    /// Since when more differs than can be under way.
    too_much_since: Option<Timestamp>,
}

impl Lag {
    /// Whether a difference of so many micro-tokens is no more than is always under
    /// way, so that levels can be compared.
    fn is_small(&mut self, differs: i64, most: f64, now: Timestamp) -> bool {
        if (differs.saturating_sub(self.stays).unsigned_abs() as f64) <= most {
            self.too_much_since = None;
            return true;
        }
        match self.too_much_since {
            Some(since) if now.nanos_since(since) > LAG_LIMIT_NANOS => {
                self.stays = differs;
                self.too_much_since = None;
            }
            Some(_) => {}
            None => self.too_much_since = Some(now),
        }
        false
    }
}

impl Ledger {
    /// Net micro-tokens that the level contains of replicas other than this one
    /// and `origin`.
    pub(super) fn contained_beside(&self, origin: OriginId) -> u64 {
        self.peers
            .iter()
            .filter(|peer| peer.origin != origin)
            .fold(0, |sum, peer| sum.saturating_add(peer.contained()))
    }

    /// The newest of our flushes that a peer had when it acknowledged `number`.
    pub(super) fn acknowledged(&self, number: u32) -> Option<&Flush> {
        self.history.iter().rev().find(|flush| !newer(flush.number, number))
    }

    /// How far this replica's level moves towards the one of the peer at `index`,
    /// in micro-tokens; `None` if the two cannot be compared. `own` is what this
    /// replica spent, net, and the newest of its flushes that the peer had.
    #[allow(clippy::too_many_arguments, reason = "one formula in one place")]
    pub(super) fn average(
        &mut self,
        index: usize,
        entry: &Entry,
        terms: &Terms,
        own: (u64, Option<Flush>),
        level: i64,
        quota: &Quota,
        now: Timestamp,
    ) -> Option<i64> {
        let gap = now.nanos_since(self.peers[index].averaged_at) as f64;
        let correction = self.correction(index, entry, terms, own, quota, now);
        let peer = &mut self.peers[index];
        // While much is under way the time counts on: the next comparison weighs more.
        if peer.lag.too_much_since.is_none() {
            peer.averaged_at = now;
        }
        let target = (entry.level as f64 + correction?).min(quota.burst().micros() as f64);
        let scarce = level < quota.burst().micros() / 2;
        let constant = if scarce && !self.reckons(quota) { EXACT_NANOS } else { AVERAGING_NANOS };
        let gain = (gap / constant).min(0.5) / f64::from(terms.replicas - 1);
        Some((gain * (target - level as f64)) as i64)
    }

    /// What the peer's level would be if it knew what this replica does, less its
    /// level.
    #[allow(clippy::too_many_arguments, reason = "one formula in one place")]
    fn correction(
        &mut self,
        index: usize,
        entry: &Entry,
        terms: &Terms,
        (own_net, acked): (u64, Option<Flush>),
        quota: &Quota,
        now: Timestamp,
    ) -> Option<f64> {
        // What a peer that never had a flush of ours knows of us is not known: it
        // may have a snapshot, which has no number.
        if entry.ack == 0 && self.last.number != 0 {
            return None;
        }
        let acked = acked?;
        let spent_since = own_net as f64 - acked.net() as f64;
        if self.reckons(quota) {
            // The peer reckoned for us; what we really spent is the truth.
            return Some(acked.demand * (self.integral - acked.integral) - spent_since);
        }
        let refill = refill_rate(quota);
        if let Some(elsewhere) = entry.elsewhere {
            let origin = self.peers[index].origin;
            let differs = signed(elsewhere).saturating_sub(signed(self.contained_beside(origin)));
            let most =
                LAG_REQUESTS * self.mean_cost + refill * (LAG_NANOS + terms.round_trip as f64);
            if !self.peers[index].lag.is_small(differs, most, now) {
                return None;
            }
        }
        // While the entry travelled the bucket refilled, less what the others took.
        let others = self.peers.iter().enumerate().filter(|(i, _)| *i != index);
        let taken: f64 = others.map(|(_, peer)| peer.rate.value()).sum();
        let travel = terms.round_trip as f64 / 2.0;
        Some((refill - taken).max(0.0) * travel - spent_since)
    }
}
