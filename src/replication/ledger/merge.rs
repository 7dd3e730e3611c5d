//! Merging a snapshot's row.

use super::{Ledger, OriginId, Peer, newer, signed, true_deficit};
use crate::limiter::{Quota, Slot, Tokens};
use crate::replication::frame::{Incarnation, Row};
use crate::replication::pause::Pause;
use crate::time::Timestamp;

/// How much later than this replica another one may hear of a peer's spending:
/// replicas that meet at once may each be looked up and dialled anew, which takes
/// some seconds.
const UNHEARD_NANOS: u64 = 10_000_000_000;

/// Merges a row of a snapshot from `from` into `slot`, whose bucket was advanced
/// to `now` and which has a ledger of the row's epoch. Returns what the debt cap
/// forgave, in micro-tokens.
///
/// With d the deficits, d' = max(d_own, d_row + min(d_own, x)), where x is what
/// this replica knows to be spent but the row does not contain: spending that
/// both know is counted once, spending that only one knows is added. A row that
/// says nothing new has x = 0, so that it may come any number of times.
pub(in crate::replication) fn merge(
    slot: &mut Slot<Ledger>,
    row: &Row,
    from: OriginId,
    me: Incarnation,
    origin: impl Fn(Incarnation) -> Option<OriginId>,
    quota: &Quota,
    now: Timestamp,
) -> u64 {
    let own_net = slot.net();
    let own_deficit = true_deficit(slot, quota).micros();
    let Some(ledger) = slot.companion.as_deref_mut() else { return 0 };
    let mine = row
        .contributions
        .iter()
        .find(|c| c.incarnation == me)
        .filter(|c| c.generation == ledger.generation || c.generation == 0);
    let contained = match mine {
        Some(c) => c.spent.saturating_sub(c.returned),
        // A peer that once had our spending forgot whose it was; any other never
        // had it, though it may have told us of its own.
        None if ledger.peers.iter().any(|p| p.origin == from && p.knows_us) => own_net,
        None => 0,
    };
    let mut outside = own_net.saturating_sub(contained);
    for peer in &ledger.peers {
        let inside = row
            .contributions
            .iter()
            .find(|c| origin(c.incarnation) == Some(peer.origin) && c.generation == peer.generation)
            .map(|c| c.spent.saturating_sub(c.returned));
        // Not named in the row: not heard by its sender yet, if we heard it only
        // just now, and otherwise forgotten by it.
        let unheard = now.nanos_since(peer.at) < UNHEARD_NANOS;
        let inside = inside.unwrap_or(if unheard { 0 } else { peer.net() });
        outside = outside.saturating_add(peer.net().saturating_sub(inside));
    }
    if let Some(pause) = row.pause {
        ledger.set_pause(Pause::new(pause.generation, pause.millis, false, now));
    }
    let news = ledger.take_contributions(row, me, origin, now);
    let beyond = if news { own_deficit.min(signed(outside)) } else { 0 };
    let merged = own_deficit.max(signed(row.deficit).saturating_add(beyond));
    let forgiven = slot.bucket.shift(quota, Tokens::from_micros(own_deficit - merged));
    forgiven.micros().unsigned_abs()
}

impl Ledger {
    /// Takes over the totals of the row; whether any of them was news.
    fn take_contributions(
        &mut self,
        row: &Row,
        me: Incarnation,
        origin: impl Fn(Incarnation) -> Option<OriginId>,
        now: Timestamp,
    ) -> bool {
        let integral = self.integral;
        let mut news = false;
        for c in row.contributions.iter().filter(|c| c.incarnation != me) {
            let Some(id) = origin(c.incarnation) else { continue };
            let found = self.peers.iter_mut().find(|peer| peer.origin == id);
            match found {
                Some(peer) if peer.generation == c.generation => {
                    news |= !peer.merged || c.spent > peer.spent || c.returned > peer.returned;
                    peer.merged = true;
                    peer.spent = peer.spent.max(c.spent);
                    peer.returned = peer.returned.max(c.returned);
                }
                Some(peer) if newer(peer.generation, c.generation) => {}
                found => {
                    news = true;
                    let base = (c.spent, c.returned);
                    let mut peer = Peer::baseline(id, c.generation, base, integral, now);
                    peer.merged = true;
                    peer.demand = c.demand.max(0.0);
                    match found {
                        Some(old) => {
                            // What was reckoned for its former life stays to be
                            // replaced by its next entry.
                            peer.demand = old.demand;
                            peer.integral = old.integral;
                            peer.rate = old.rate;
                            peer.reserve = old.reserve;
                            *old = peer;
                        }
                        None => self.peers.push(peer),
                    }
                    // It may never be met; the members say so.
                    self.version = self.version.wrapping_sub(1);
                }
            }
        }
        let sum = self.peers.iter().map(|peer| peer.demand).sum();
        self.set_others(sum);
        news
    }
}
