//! Ledger: what this replica and its peers spent from one bucket.
//!
//! For every origin the ledger knows two ever growing totals, spent and
//! returned. Applying an entry subtracts the difference to what was known, so
//! any order, repetition or loss of entries subtracts exactly what was spent,
//! once. The first entry of an origin (or of a new generation of it) is a
//! baseline: only its fresh part is subtracted, never the history.
//!
//! Slow averaging keeps the levels of replicas together: without it a replica
//! whose level is offset would starve in overload for ever. It compares the
//! peer's level with this replica's, corrected for what the peer cannot have
//! known yet, and moves a part of the way that grows with the time since the
//! last comparison.

use smallvec::SmallVec;

use super::frame::{Contribution, Entry, Incarnation, Row};
use crate::limiter::{Event, Quota, Slot, Tokens};
use crate::time::Timestamp;

/// Time constant of the averaging.
const AVERAGING_NANOS: f64 = 1e9;
/// Shortest window of the measured rate of a peer.
const RATE_WINDOW_NANOS: f64 = 3e9;
/// Own flushes remembered for the averaging.
const HISTORY: usize = 16;
/// Requests over which the mean cost is exact; afterwards its smoothing.
const COST_SAMPLES: u8 = 20;
/// Relative part of the level that may go unreported, shared by all replicas.
const THETA: f64 = 0.1;

/// An index for an origin, unique within one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OriginId(pub(super) u32);

/// How soon peers should hear of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mark {
    /// It is only asked for; peers compare levels now and then.
    Asked,
    /// Something was spent: within the sync interval.
    Quiet,
    /// What was spent matters: at once.
    Urgent,
}

/// What was last handed to the streams.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flush {
    pub(super) number: u32,
    pub(super) spent: u64,
    pub(super) returned: u64,
    pub(super) level: i64,
    pub(super) at: Timestamp,
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
    /// Smoothed rate at which it spends, in micro-tokens per nanosecond.
    rate: f64,
    at: Timestamp,
    averaged_at: Timestamp,
    /// A snapshot that contained this origin was merged: its history before the
    /// first entry is in the level too.
    merged: bool,
}

/// The replicated part of one bucket.
#[derive(Clone, Debug)]
pub struct Ledger {
    generation: u32,
    epoch: u64,
    first: Base,
    last: Flush,
    history: SmallVec<[(u32, u64); 4]>,
    marked: Option<Mark>,
    mean_cost: f32,
    samples: u8,
    peers: SmallVec<[Peer; 2]>,
}

/// How an entry is to be applied.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// Who sent it.
    pub(super) origin: OriginId,
    /// Replicas, this one included.
    pub(super) replicas: u32,
    /// Smoothed round trip to the sender, in nanoseconds.
    pub(super) round_trip: u64,
    /// Whether levels may be averaged: same quota, and the frame is not stale.
    pub(super) averaging: bool,
}

/// What applying an entry did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Applied {
    /// The entry said nothing new.
    pub(super) old: bool,
    /// Micro-tokens that the debt cap forgave.
    pub(super) forgiven: u64,
}

impl Ledger {
    pub(super) fn new(generation: u32, spent: u64, returned: u64, now: Timestamp) -> Self {
        Self {
            generation,
            epoch: 0,
            first: Base { generation, spent, returned },
            last: Flush { number: 0, spent, returned, level: 0, at: now },
            history: SmallVec::from_slice(&[(0, spent.saturating_sub(returned))]),
            marked: None,
            mean_cost: Tokens::MICRO as f32,
            samples: 0,
            peers: SmallVec::new(),
        }
    }

    /// Takes note of an event of this replica's own; says whether the bucket is
    /// to be marked, which it is at most once for each kind of mark and flush.
    pub(super) fn happened(
        &mut self,
        event: Event,
        net: u64,
        level: Tokens,
        quota: &Quota,
        replicas: u32,
    ) -> Option<Mark> {
        let mark = match event {
            Event::Refused(_) => Mark::Asked,
            Event::Spent(cost) => {
                self.samples = self.samples.saturating_add(1).min(COST_SAMPLES);
                self.mean_cost += (cost.micros() as f32 - self.mean_cost) / f32::from(self.samples);
                self.mark_for(net, level, quota, replicas)
            }
            Event::Returned(_) => self.mark_for(net, level, quota, replicas),
        };
        if self.marked >= Some(mark) {
            return None;
        }
        self.marked = Some(mark);
        Some(mark)
    }

    /// Urgent when the part that peers do not know reaches half a request, a
    /// tenth of this replica's share of the level, or a thousandth of a second's
    /// refill, whichever is most.
    fn mark_for(&self, net: u64, level: Tokens, quota: &Quota, replicas: u32) -> Mark {
        let unsent = net.abs_diff(self.last.net()) as f64;
        let floor = f64::from(self.mean_cost) * 0.5;
        let share = THETA * level.micros().max(0) as f64 / f64::from(replicas.max(1));
        let rate = 0.001 * quota.rate().per_second() * Tokens::MICRO as f64;
        if unsent >= floor.max(share).max(rate) { Mark::Urgent } else { Mark::Quiet }
    }

    /// Whether peers know everything.
    pub(super) fn is_settled(&self) -> bool {
        self.marked.is_none()
    }

    /// Whether the bucket is marked exactly so.
    pub(super) fn is_marked(&self, mark: Mark) -> bool {
        self.marked == Some(mark)
    }

    /// The newest flush.
    pub(super) const fn last(&self) -> &Flush {
        &self.last
    }

    /// What a stream that was skipped since before the newest flush starts from.
    pub(super) const fn base(&self) -> Base {
        Base { generation: self.generation, spent: self.last.spent, returned: self.last.returned }
    }

    /// Micro-tokens spent or returned since the newest flush.
    pub(super) const fn unsent(&self, spent: u64, returned: u64) -> u64 {
        spent.saturating_sub(returned).abs_diff(self.last.net())
    }

    /// Ends the present flush and begins the next: what is known now is what
    /// the streams are handed.
    pub(super) fn flush(&mut self, spent: u64, returned: u64, level: Tokens, now: Timestamp) {
        let number = self.last.number.wrapping_add(1);
        self.last = Flush { number, spent, returned, level: level.micros(), at: now };
        if self.history.len() == HISTORY {
            self.history.remove(0);
        }
        self.history.push((number, self.last.net()));
        self.marked = None;
    }

    /// The newest flush as an entry for the peer `origin`, whose stream starts
    /// from `base`. Whether the receiver may lack the key is the second value.
    pub(super) fn entry(&self, origin: OriginId, base: Base) -> (Flush, Base, u32, bool) {
        let same = base.generation == self.generation;
        let base = if same { base } else { self.first };
        let heard = self.peers.iter().find(|p| p.origin == origin).map_or(0, |p| p.heard);
        (self.last, base, heard, base == self.first)
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
        self.peers.iter().map(|p| (p.origin, p.spent.saturating_sub(p.returned)))
    }

    /// When a peer was last heard on this bucket.
    pub(super) fn heard_at(&self) -> Option<Timestamp> {
        self.peers.iter().map(|p| p.at).max()
    }

    /// Forgets the peers that `keep` does not know. What they spent stays
    /// subtracted.
    pub(super) fn forget(&mut self, keep: impl Fn(OriginId) -> bool) {
        self.peers.retain(|peer| keep(peer.origin));
    }

    /// What the level contains of each origin, this replica included.
    pub(super) fn contributions(
        &self,
        me: Contribution,
        incarnation: impl Fn(OriginId) -> Option<Incarnation>,
    ) -> Vec<Contribution> {
        let mut all = vec![Contribution { generation: self.generation, ..me }];
        all.extend(self.peers.iter().filter_map(|peer| {
            Some(Contribution {
                incarnation: incarnation(peer.origin)?,
                generation: peer.generation,
                spent: peer.spent,
                returned: peer.returned,
            })
        }));
        all
    }
}

/// Whether generation `a` is newer than `b`, by serial number arithmetic
/// (RFC 1982), since the counter may wrap.
const fn newer(a: u32, b: u32) -> bool {
    a.wrapping_sub(b) as i32 > 0
}

/// Applies what a peer spent to `slot`, whose bucket was advanced to `now` and
/// which has a ledger.
pub(super) fn apply(
    slot: &mut Slot<Ledger>,
    entry: &Entry,
    terms: Terms,
    quota: &Quota,
    now: Timestamp,
) -> Applied {
    let own_net = slot.net();
    let Some(ledger) = slot.companion.as_deref_mut() else { return Applied::default() };
    let index = ledger.peers.iter().position(|p| p.origin == terms.origin);
    let known = match index {
        Some(i) if newer(ledger.peers[i].generation, entry.generation) => {
            return Applied { old: true, forgiven: 0 };
        }
        Some(i) if ledger.peers[i].generation == entry.generation => i,
        found => {
            // A baseline: what lies before it is not ours to subtract.
            let peer = Peer {
                origin: terms.origin,
                generation: entry.generation,
                spent: entry.spent.saturating_sub(entry.fresh_spent),
                returned: entry.returned.saturating_sub(entry.fresh_returned),
                heard: 0,
                rate: 0.0,
                at: now,
                averaged_at: now,
                merged: false,
            };
            match found {
                Some(i) => {
                    ledger.peers[i] = peer;
                    i
                }
                None => {
                    ledger.peers.push(peer);
                    ledger.peers.len() - 1
                }
            }
        }
    };
    let peer = &mut ledger.peers[known];
    let news = entry.spent > peer.spent || entry.returned > peer.returned;
    let newer_flush = peer.heard == 0 || newer(entry.flush, peer.heard);
    if !news && !newer_flush {
        return Applied { old: true, forgiven: 0 };
    }
    let spent = entry.spent.saturating_sub(peer.spent);
    let returned = entry.returned.saturating_sub(peer.returned);
    peer.spent = peer.spent.max(entry.spent);
    peer.returned = peer.returned.max(entry.returned);
    peer.heard = if newer_flush { entry.flush } else { peer.heard };
    let gap = now.nanos_since(peer.at) as f64;
    let delta = signed(spent).saturating_sub(signed(returned));
    if gap > 0.0 {
        // Three seconds, or the time of twenty tokens, whichever is longer.
        let window = RATE_WINDOW_NANOS.max(20e9 / quota.rate().per_second().max(f64::MIN_POSITIVE));
        let weight = 1.0 - (-gap / window).exp();
        peer.rate += weight * (delta.max(0) as f64 / gap - peer.rate);
        peer.at = now;
    }
    let mut forgiven = slot.bucket.shift(quota, Tokens::from_micros(-delta));
    if terms.averaging && newer_flush && terms.replicas > 1 {
        if let Some(change) =
            averaging(ledger, known, entry, terms, own_net, slot_level(&slot.bucket), quota, now)
        {
            forgiven = forgiven.plus(slot.bucket.shift(quota, Tokens::from_micros(change)));
        }
        ledger.peers[known].averaged_at = now;
    }
    Applied { old: false, forgiven: forgiven.micros().unsigned_abs() }
}

const fn slot_level(bucket: &crate::limiter::TokenBucket) -> i64 {
    bucket.level().micros()
}

/// How far this replica's level moves towards the peer's.
#[allow(clippy::too_many_arguments, reason = "one formula, named once")]
fn averaging(
    ledger: &Ledger,
    known: usize,
    entry: &Entry,
    terms: Terms,
    own_net: u64,
    level: i64,
    quota: &Quota,
    now: Timestamp,
) -> Option<i64> {
    let peer = &ledger.peers[known];
    // The newest of our flushes that the peer had when it spoke.
    let (_, acked_net) =
        ledger.history.iter().rev().find(|(number, _)| !newer(*number, entry.ack))?;
    let unknown_to_peer = signed(own_net).saturating_sub(signed(*acked_net));
    // While the entry travelled the bucket refilled, less what others took.
    let others: f64 =
        ledger.peers.iter().enumerate().filter(|(i, _)| *i != known).map(|(_, p)| p.rate).sum();
    let refill = quota.rate().per_second() * Tokens::MICRO as f64 / 1e9;
    let travelled = (refill - others).max(0.0) * terms.round_trip as f64 / 2.0;
    let target = entry.level.saturating_add(travelled as i64).saturating_sub(unknown_to_peer);
    let target = target.min(quota.burst().micros());
    let gap = now.nanos_since(peer.averaged_at) as f64;
    let gain = (gap / AVERAGING_NANOS).min(0.5) / f64::from(terms.replicas - 1);
    Some((gain * target.saturating_sub(level) as f64) as i64)
}

/// Merges a row of a snapshot into `slot`, whose bucket was advanced to `now`
/// and which has a ledger.
///
/// With d the deficits, d' = max(d_own, d_row + min(d_own, x)), where x is what
/// this replica knows to be spent but the row does not contain: spending that
/// both know is counted once, spending that only one knows is added. A row that
/// says nothing new has x = 0, so that it may come any number of times.
pub(super) fn merge(
    slot: &mut Slot<Ledger>,
    row: &Row,
    from: OriginId,
    me: Incarnation,
    origin: impl Fn(Incarnation) -> Option<OriginId>,
    quota: &Quota,
    now: Timestamp,
) -> u64 {
    let own = (slot.spent, slot.returned);
    let Some(ledger) = slot.companion.as_deref_mut() else { return 0 };
    let mine = row
        .contributions
        .iter()
        .find(|c| c.incarnation == me)
        .filter(|c| c.generation == ledger.generation || c.generation == 0);
    let own_net = own.0.saturating_sub(own.1);
    let contained = match mine {
        Some(c) => c.spent.saturating_sub(c.returned),
        // A peer that we know on this bucket had our spending and forgot whose
        // it was; a stranger never had it.
        None if ledger.peers.iter().any(|p| p.origin == from) => own_net,
        None => 0,
    };
    let mut outside = own_net.saturating_sub(contained);
    for peer in &ledger.peers {
        let inside = row
            .contributions
            .iter()
            .find(|c| origin(c.incarnation) == Some(peer.origin) && c.generation == peer.generation)
            .map_or(peer.net(), |c| c.spent.saturating_sub(c.returned));
        outside = outside.saturating_add(peer.net().saturating_sub(inside));
    }
    let mut news = false;
    for c in row.contributions.iter().filter(|c| c.incarnation != me) {
        let Some(id) = origin(c.incarnation) else { continue };
        match ledger.peers.iter_mut().find(|p| p.origin == id) {
            Some(peer) if peer.generation == c.generation => {
                news |= !peer.merged || c.spent > peer.spent || c.returned > peer.returned;
                peer.merged = true;
                peer.spent = peer.spent.max(c.spent);
                peer.returned = peer.returned.max(c.returned);
            }
            Some(peer) if newer(peer.generation, c.generation) => {}
            found => {
                news = true;
                let peer = Peer {
                    origin: id,
                    generation: c.generation,
                    spent: c.spent,
                    returned: c.returned,
                    heard: 0,
                    rate: 0.0,
                    at: now,
                    averaged_at: now,
                    merged: true,
                };
                match found {
                    Some(old) => *old = peer,
                    None => ledger.peers.push(peer),
                }
            }
        }
    }
    let own_deficit = signed(u64::try_from(slot.deficit(quota).micros()).unwrap_or(0));
    let beyond = if news { own_deficit.min(signed(outside)) } else { 0 };
    let merged = own_deficit.max(signed(row.deficit).saturating_add(beyond));
    let forgiven = slot.bucket.shift(quota, Tokens::from_micros(own_deficit - merged));
    forgiven.micros().unsigned_abs()
}

impl Peer {
    const fn net(&self) -> u64 {
        self.spent.saturating_sub(self.returned)
    }
}

fn signed(micros: u64) -> i64 {
    i64::try_from(micros).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::{BucketId, LimitIndex, Store, TokenBucket};
    use proptest::prelude::*;

    const NOW: Timestamp = Timestamp::from_millis(3_600_000);
    const TOKEN: u64 = 1_000_000;
    const ME: Incarnation = Incarnation::from_bytes([1; 16]);
    const PEER: Incarnation = Incarnation::from_bytes([2; 16]);
    const ORIGIN: OriginId = OriginId(7);

    /// A bucket of 100 tokens that refills nothing during a test, `spent` of
    /// which this replica spent.
    struct Bucket {
        store: Store<Ledger>,
        quota: Quota,
    }

    impl Bucket {
        fn new(spent: u64) -> Self {
            let quota = Quota::try_new("100/40d".parse().unwrap(), 100).unwrap();
            let bucket = Self { store: Store::new(1), quota };
            bucket.with(|slot, quota| {
                slot.spent = spent * TOKEN;
                slot.bucket.shift(quota, Tokens::from_micros(-signed(spent * TOKEN)));
                slot.companion = Some(Box::new(Ledger::new(1, 0, 0, NOW)));
            });
            bucket
        }

        fn with<R>(&self, f: impl FnOnce(&mut Slot<Ledger>, &Quota) -> R) -> R {
            let id = BucketId::from_bytes([9; 16]);
            let full = || TokenBucket::full(&self.quota, NOW);
            self.store.with(id, LimitIndex(0), None, full, |slot| f(slot, &self.quota))
        }

        fn level(&self) -> u64 {
            self.with(|slot, _| slot.bucket.level().whole())
        }

        fn apply(&self, spent: u64, fresh: u64, flush: u32, generation: u32) -> Applied {
            let entry = entry(spent, fresh, flush, generation);
            let terms =
                Terms { origin: ORIGIN, replicas: 2, round_trip: 2_000_000, averaging: false };
            self.with(|slot, quota| apply(slot, &entry, terms, quota, NOW))
        }

        fn merge(&self, deficit: u64, contributions: &[(Incarnation, u64)]) {
            let contributions = contributions
                .iter()
                .map(|(incarnation, spent)| Contribution {
                    incarnation: *incarnation,
                    generation: 1,
                    spent: spent * TOKEN,
                    returned: 0,
                })
                .collect();
            let row = Row {
                bucket: BucketId::from_bytes([9; 16]),
                limit: 0,
                epoch: 0,
                deficit: deficit * TOKEN,
                contributions,
                key: None,
            };
            let find = |incarnation| (incarnation == PEER).then_some(ORIGIN);
            self.with(|slot, quota| merge(slot, &row, ORIGIN, ME, find, quota, NOW));
        }
    }

    fn entry(spent: u64, fresh: u64, flush: u32, generation: u32) -> Entry {
        Entry {
            bucket: BucketId::from_bytes([9; 16]),
            limit: 0,
            generation,
            epoch: 0,
            flush,
            ack: 0,
            spent: spent * TOKEN,
            returned: 0,
            fresh_spent: fresh * TOKEN,
            fresh_returned: 0,
            level: 0,
            key: None,
        }
    }

    #[test]
    fn the_first_sight_of_an_origin_is_a_baseline() {
        let bucket = Bucket::new(0);
        bucket.apply(5000, 3, 1, 1);
        assert_eq!(bucket.level(), 97);
        bucket.apply(5002, 2, 2, 1);
        assert_eq!(bucket.level(), 95);
    }

    #[test]
    fn a_newer_generation_is_a_new_baseline_and_an_older_one_is_ignored() {
        let bucket = Bucket::new(0);
        bucket.apply(50, 1, 9, 4);
        bucket.apply(1, 1, 1, 5);
        assert_eq!(bucket.level(), 98);
        assert!(bucket.apply(60, 10, 10, 4).old);
        assert_eq!(bucket.level(), 98);
        // The counter wraps.
        let bucket = Bucket::new(0);
        bucket.apply(50, 1, 9, u32::MAX);
        bucket.apply(1, 1, 1, 0);
        assert_eq!(bucket.level(), 98);
    }

    #[test]
    fn a_snapshot_adds_what_only_one_side_knows() {
        // Fresh: the row is taken over.
        let bucket = Bucket::new(0);
        bucket.merge(30, &[(PEER, 30)]);
        assert_eq!(bucket.level(), 70);
        // Both spent, and have not met before.
        let bucket = Bucket::new(20);
        bucket.merge(30, &[(PEER, 30)]);
        assert_eq!(bucket.level(), 50);
        // The peer already had 15 of our 20.
        let bucket = Bucket::new(20);
        bucket.merge(45, &[(PEER, 30), (ME, 15)]);
        assert_eq!(bucket.level(), 50);
        // What was spent long ago and refilled is not counted again.
        let bucket = Bucket::new(20);
        bucket.with(|slot, _| slot.spent = 5000 * TOKEN);
        bucket.merge(30, &[(PEER, 30)]);
        assert_eq!(bucket.level(), 50);
    }

    #[test]
    fn an_entry_before_the_snapshot_is_counted_once() {
        let bucket = Bucket::new(0);
        bucket.apply(33, 3, 2, 1);
        assert_eq!(bucket.level(), 97);
        bucket.merge(30, &[(PEER, 30)]);
        assert_eq!(bucket.level(), 67);
        bucket.apply(35, 5, 3, 1);
        assert_eq!(bucket.level(), 65);
    }

    #[test]
    fn the_first_sight_of_a_peer_that_knows_us_adds_nothing_of_ours() {
        // The peer lost track of whose spending it is, but has it.
        let bucket = Bucket::new(20);
        bucket.apply(10, 10, 1, 1);
        bucket.merge(30, &[(PEER, 10)]);
        assert_eq!(bucket.level(), 70);
    }

    proptest! {
        /// I1: whatever is lost, repeated or reordered, once the latest entry is
        /// there exactly the total is subtracted.
        #[test]
        fn entries_apply_exactly_once(
            amounts in prop::collection::vec(0u64..4, 1..12),
            order in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
        ) {
            let mut total = 0;
            let totals: Vec<u64> = amounts.iter().map(|a| { total += a; total }).collect();
            let bucket = Bucket::new(0);
            for index in order {
                let i = index.index(totals.len());
                bucket.apply(totals[i], totals[i], i as u32 + 1, 1);
            }
            bucket.apply(total, total, totals.len() as u32, 1);
            prop_assert_eq!(bucket.level(), 100 - total);
        }

        /// A snapshot may come any number of times.
        #[test]
        fn merging_is_idempotent(own in 0u64..60, deficit in 0u64..60, theirs in 0u64..60, ours in 0u64..60, refilled in 0u64..500, times in 2usize..5) {
            let once = Bucket::new(own);
            let many = Bucket::new(own);
            for bucket in [&once, &many] {
                bucket.with(|slot, _| slot.spent += refilled * TOKEN);
            }
            let contributions = [(PEER, theirs), (ME, ours.min(own))];
            once.merge(deficit, &contributions);
            for _ in 0..times {
                many.merge(deficit, &contributions);
            }
            prop_assert_eq!(once.level(), many.level());
            // Never less than either side knew.
            prop_assert!(once.level() <= 100 - own.max(deficit));
        }
    }
}
