//! Merging a snapshot's row.

use super::{Ledger, OriginId, Peer, newer, signed, true_deficit};
use crate::limiter::{Quota, Slot, Tokens};
use crate::replication::frame::{Contribution, Incarnation, Row};
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
/// this replica's level contains but the row does not: spending that both contain
/// is counted once, spending that only one contains is added. A row that says
/// nothing new has x = 0, so that it may come any number of times.
pub(in crate::replication) fn merge(
    slot: &mut Slot<Ledger>,
    row: &Row,
    from: OriginId,
    me: Incarnation,
    origin: impl Fn(Incarnation) -> Option<OriginId>,
    quota: &Quota,
    now: Timestamp,
) -> u64 {
    let own = Span { start: 0, end: slot.net() };
    let own_deficit = true_deficit(slot, quota).micros();
    let Some(ledger) = slot.companion.as_deref_mut() else { return 0 };
    let mine = row
        .contributions
        .iter()
        .find(|c| c.incarnation == me)
        .filter(|c| c.generation == ledger.generation || c.generation == 0)
        .map(Span::of);
    // A peer that once had our spending forgot whose it was; any other never had
    // it, though it may have told us of its own.
    let knows = ledger.peers.iter().find(|p| p.origin == from).map_or(0, |p| p.knows);
    let mut sums = Sums::default();
    sums.compare(own, mine.unwrap_or(Span { start: 0, end: knows }));
    for peer in &ledger.peers {
        let named = row.contributions.iter().find(|c| {
            origin(c.incarnation) == Some(peer.origin) && c.generation == peer.generation
        });
        // Not named in the row: not heard by its sender yet, if we heard it only
        // just now, and otherwise forgotten by it.
        let unheard = now.nanos_since(peer.at) < UNHEARD_NANOS;
        let known = peer.span();
        let absent = if unheard { Span::default() } else { known };
        sums.compare(known, named.map_or(absent, Span::of));
    }
    let news = ledger.take_contributions(row, me, origin, now);
    let beyond = if news { sums.beyond(own_deficit) } else { 0 };
    let row_deficit = signed(row.deficit.saturating_sub(sums.apart));
    let merged = own_deficit.max(row_deficit.saturating_add(beyond));
    let forgiven = slot.bucket.shift(quota, Tokens::from_micros(own_deficit - merged));
    forgiven.micros().unsigned_abs()
}

/// Which part of an origin's ever growing net total a level contains: all from
/// when it was first heard of to when it last was.
#[derive(Clone, Copy, Debug, Default)]
struct Span {
    start: u64,
    end: u64,
}

impl Span {
    fn of(contribution: &Contribution) -> Self {
        let end = contribution.spent.saturating_sub(contribution.returned);
        Self { start: contribution.unseen.min(end), end }
    }

    const fn length(self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    fn common(self, other: Self) -> u64 {
        self.end.min(other.end).saturating_sub(self.start.max(other.start))
    }

    /// Begins only after the other's end: what lies between is in neither.
    const fn is_apart_after(self, other: Self) -> bool {
        self.start > other.end
    }
}

/// How what a replica's level contains compares with what a row does, in
/// micro-tokens.
#[derive(Debug, Default)]
struct Sums {
    /// In this level only, newer than anything in the row.
    newer: u64,
    /// In both.
    common: u64,
    /// In this level only, older than anything in the row.
    older: u64,
    /// In the row only, beyond a gap that is still to come: it is left to come
    /// with the gap.
    apart: u64,
}

impl Sums {
    fn compare(&mut self, here: Span, row: Span) {
        let mut row = row;
        if row.is_apart_after(here) {
            self.apart = self.apart.saturating_add(row.length());
            row = Span::default();
        }
        let later = here.end.saturating_sub(row.end.max(here.start));
        self.newer = self.newer.saturating_add(later);
        let common = here.common(row);
        self.common = self.common.saturating_add(common);
        self.older = self.older.saturating_add(here.length() - later - common);
    }

    /// What this level's deficit contains beyond the row's. A refill covers what
    /// was spent first: the deficit is made of the newest spending.
    fn beyond(&self, deficit: i64) -> i64 {
        let newer = deficit.min(signed(self.newer));
        let rest = deficit.saturating_sub(newer).saturating_sub(signed(self.common));
        newer + rest.clamp(0, signed(self.older))
    }
}

impl Peer {
    const fn span(&self) -> Span {
        Span { start: self.unseen, end: self.net() }
    }

    /// Net micro-tokens of its spending that the level contains.
    pub(super) const fn contained(&self) -> u64 {
        self.span().length()
    }
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
            let told = Span::of(c);
            let found = self.peers.iter_mut().find(|peer| peer.origin == id);
            match found {
                Some(peer) if peer.generation == c.generation => {
                    if told.is_apart_after(peer.span()) {
                        continue;
                    }
                    let begins = if peer.span().is_apart_after(told) {
                        peer.unseen
                    } else {
                        peer.unseen.min(told.start)
                    };
                    news |=
                        begins < peer.unseen || c.spent > peer.spent || c.returned > peer.returned;
                    peer.unseen = begins;
                    peer.spent = peer.spent.max(c.spent);
                    peer.returned = peer.returned.max(c.returned);
                }
                Some(peer) if newer(peer.generation, c.generation) => {}
                found => {
                    news = true;
                    let base = (c.spent, c.returned);
                    let mut peer = Peer::baseline(id, c.generation, base, integral, now);
                    peer.unseen = told.start;
                    peer.demand = c.demand.max(0.0);
                    match found {
                        Some(old) => *old = peer.succeeding(old),
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
