//! Applying what a peer says it spent.

use super::{Flush, Ledger, OriginId, Peer, newer, signed};
use crate::limiter::{Quota, Slot, Tokens};
use crate::replication::frame::Entry;
use crate::replication::rate::Rate;
use crate::time::Timestamp;

/// A gap of 2.5 seconds, or the time of twenty tokens, says nothing of the rate.
const GAP_NANOS: f64 = 2.5e9;
const GAP_TOKENS: f64 = 20.0;

/// How an entry is to be applied.
#[derive(Clone, Copy, Debug)]
pub(in crate::replication) struct Terms {
    /// Who sent it.
    pub(in crate::replication) origin: OriginId,
    /// Replicas, this one included.
    pub(in crate::replication) replicas: u32,
    /// Smoothed round trip to the sender, in nanoseconds.
    pub(in crate::replication) round_trip: u64,
    /// The frame was under way for too long to say anything of the present.
    pub(in crate::replication) stale: bool,
    /// Both sides have the same quota, so that levels can be compared.
    pub(in crate::replication) same_quota: bool,
    /// The sender's quota refills faster: until all have reloaded it rules.
    pub(in crate::replication) larger_quota: bool,
}

/// What applying an entry did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::replication) struct Applied {
    /// The entry said nothing new.
    pub(in crate::replication) old: bool,
    /// Micro-tokens of debt that were forgiven.
    pub(in crate::replication) forgiven: u64,
}

/// Applies what a peer spent to `slot`, whose bucket was advanced to `now` and
/// which has a ledger of the entry's epoch.
pub(in crate::replication) fn apply(
    slot: &mut Slot<Ledger>,
    entry: &Entry,
    terms: Terms,
    quota: &Quota,
    now: Timestamp,
) -> Applied {
    let own_net = slot.net();
    let Some(ledger) = slot.companion.as_deref_mut() else { return Applied::default() };
    let Some(index) = ledger.find_or_add(entry, terms.origin, now) else {
        return Applied { old: true, forgiven: 0 };
    };
    let (integral, lost) = (ledger.integral, ledger.lost);
    let acked = ledger.acknowledged(entry.ack).copied();
    let peer = &mut ledger.peers[index];
    if entry.ack != 0 {
        peer.knows = acked.as_ref().map_or(peer.knows, Flush::net);
    }
    let news = entry.spent > peer.spent || entry.returned > peer.returned;
    let newer_flush = peer.heard == 0 || newer(entry.flush, peer.heard);
    if !news && !newer_flush {
        return Applied { old: true, forgiven: 0 };
    }
    let spent = signed(entry.spent.saturating_sub(peer.spent));
    let returned = signed(entry.returned.saturating_sub(peer.returned));
    let delta = spent.saturating_sub(returned) as f64;
    peer.spent = peer.spent.max(entry.spent);
    peer.returned = peer.returned.max(entry.returned);
    if newer_flush {
        peer.heard = entry.flush;
    }

    // What was taken for the peer by reckoning is replaced by what it spent.
    let change = match &mut peer.reserve {
        Some(reserve) if terms.stale => {
            let used = delta.min(reserve.charged).max(0.0);
            reserve.charged -= used;
            used - delta
        }
        Some(reserve) => {
            // What was reserved beyond the cap did not really cost anything.
            let excess = (delta - reserve.charged).max(0.0);
            let change = reserve.charged - delta + excess.min(lost - reserve.lost).max(0.0);
            peer.reserve = None;
            peer.integral = integral;
            change
        }
        None => peer.demand * (integral - peer.integral) - delta,
    };
    if delta != 0.0 {
        ledger.used_at = now;
    }
    let mut forgiven = slot.bucket.shift(quota, Tokens::from_micros(change.round() as i64));
    if peer.reserve.is_none() {
        peer.learn(entry, delta, integral, newer_flush, quota, now);
        let sum = ledger.peers.iter().map(|peer| peer.demand).sum();
        ledger.set_others(sum);
    }
    let compares = terms.same_quota && !terms.stale && newer_flush && terms.replicas > 1;
    if compares {
        let level = slot.bucket.level().micros();
        let change = ledger.average(index, entry, &terms, (own_net, acked), level, quota, now);
        if let Some(change) = change {
            forgiven = forgiven.plus(slot.bucket.shift(quota, Tokens::from_micros(change)));
        }
    }
    if terms.larger_quota && slot.bucket.level() < Tokens::ZERO {
        let debt = Tokens::ZERO.minus(slot.bucket.level());
        slot.bucket.shift(quota, debt);
        forgiven = forgiven.plus(debt);
    }
    Applied { old: false, forgiven: forgiven.micros().unsigned_abs() }
}

impl Peer {
    /// Takes over what a live peer says of itself.
    fn learn(
        &mut self,
        entry: &Entry,
        delta: f64,
        integral: f64,
        newer_flush: bool,
        quota: &Quota,
        now: Timestamp,
    ) {
        let gap = now.nanos_since(self.at);
        // After a cut the gap says nothing; slow limits are spoken of rarely.
        let slow = GAP_TOKENS * 1e9 / quota.rate().per_second().max(f64::MIN_POSITIVE);
        if (gap as f64) < GAP_NANOS.max(slow) {
            self.rate.learn(delta, gap as f64, quota);
        }
        self.at = now;
        self.integral = integral;
        if newer_flush {
            self.demand = entry.demand.max(0.0);
            if self.demand <= 0.0 {
                self.rate = Rate::default();
            }
        }
    }
}

impl Ledger {
    /// The index of the origin's peer, made with a baseline if the origin or its
    /// generation is new; `None` for an older generation.
    fn find_or_add(&mut self, entry: &Entry, origin: OriginId, now: Timestamp) -> Option<usize> {
        let found = self.peers.iter().position(|peer| peer.origin == origin);
        if let Some(i) = found {
            let known = self.peers[i].generation;
            if known == entry.generation {
                return Some(i);
            }
            if newer(known, entry.generation) {
                return None;
            }
        }
        // A baseline: what lies before it is not ours to subtract.
        let base = (
            entry.spent.saturating_sub(entry.fresh_spent),
            entry.returned.saturating_sub(entry.fresh_returned),
        );
        let integral = self.integral;
        let peer = Peer::baseline(origin, entry.generation, base, integral, now);
        match found {
            Some(i) => {
                // What is fresh was spent since the last entry, not since now.
                let old = &self.peers[i];
                self.peers[i] = Peer { at: old.at, ..peer.succeeding(old) };
                Some(i)
            }
            None => {
                self.peers.push(peer);
                Some(self.peers.len() - 1)
            }
        }
    }
}
