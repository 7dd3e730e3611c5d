//! Limiter (layer 1, pure): may this request pass, and if not, when?
//!
//! Time comes in as a [`Timestamp`], a request as [`Attributes`]; nothing here
//! reads a clock, a socket or a file. Layer 2 keeps what peers spent beside each
//! bucket through [`Companion`].
//!
//! Invariants:
//! - a refused request spends nothing: either every enforcing limit is charged
//!   or none;
//! - no code path holds the guards of two buckets at once;
//! - a bucket that does not exist is a full bucket;
//! - nobody who comes later passes before one who waits for the same bucket, and
//!   one who waits owns nothing;
//! - a bucket's level stands under the quota of its slot's revision, and whoever
//!   looks at it brings both up to date first, under the same guard.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use smallvec::SmallVec;

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::time::Timestamp;

mod bucket;
pub mod config;
mod cost;
mod decision;
mod explain;
mod floor;
mod index;
pub mod key;
mod limit;
mod line;
mod path;
mod pause;
mod quota;
mod reload;
mod request;
mod rule;
mod slot;
mod store;
#[cfg(test)]
mod testing;
mod tokens;
mod wait;

pub use bucket::{Due, TokenBucket};
pub use cost::Cost;
pub use decision::{Check, Decision, Outcome, Verdict};
pub use explain::{Applicability, Explanation};
pub use key::{BucketId, KeyBuf, KeyValue};
pub use limit::{Limit, LimitIndex, LimitSet, LimitSpec, Mode, Partition, TooManyLimits, Window};
pub use line::{Calls, Ticket};
pub use path::{PathError, PathPattern, normalise};
pub use pause::PauseOrder;
pub use quota::{Quota, Rate, RateError};
pub use request::{Attributes, Client};
pub use rule::{
    Condition, Exclusion, Extracted, Field, KeyPart, KeyTextError, Missing, Rule, Source,
};
pub use slot::Slot;
pub use store::Store;
pub use tokens::Tokens;
pub use wait::{Crowding, Outlook, Turn, Waiter};

use floor::Floors;
use reload::Former;
use store::Room;
use wait::{Asking, Hall};

/// What a higher layer does with a bucket whenever its own ledger moves.
pub trait Companion: Send + Sync + 'static {
    /// What it keeps beside a bucket. Copied for questions only.
    type State: Clone + Send + Sync + 'static;

    /// Something happened to a bucket by this replica's own requests. Called
    /// under the bucket's guard: it must not touch another bucket, block or
    /// await. `quota` is the bucket's.
    fn happened(
        &self,
        event: Event,
        id: BucketId,
        slot: &mut Slot<Self::State>,
        quota: &Quota,
        now: Timestamp,
    );

    /// Brings the level of a bucket up to `now`.
    fn advance(&self, slot: &mut Slot<Self::State>, quota: &Quota, now: Timestamp);

    /// How much of the level may be spent. The bucket was advanced to `now`.
    fn room(&self, slot: &Slot<Self::State>, now: Timestamp) -> Tokens;

    /// When `cost` will be there, if other requests take `ahead` first. The bucket
    /// was advanced to `now`.
    fn due(
        &self,
        slot: &Slot<Self::State>,
        quota: &Quota,
        ahead: Tokens,
        cost: Tokens,
        now: Timestamp,
    ) -> Due;

    /// Closes or opens a bucket that was advanced to `now`; whether that changes
    /// anything. Called under the bucket's guard.
    fn pause(
        &self,
        id: BucketId,
        slot: &mut Slot<Self::State>,
        order: PauseOrder,
        now: Timestamp,
    ) -> bool;

    /// The same for all buckets of a limit, those that are still to be made included.
    fn pause_limit(&self, limit: LimitIndex, order: PauseOrder, now: Timestamp) -> bool;

    /// Nanoseconds until the bucket opens, 0 if it is open.
    fn paused_for(&self, slot: &Slot<Self::State>, now: Timestamp) -> u64;

    /// When a bucket was last used, if the higher layer knows.
    fn used_at(&self, state: &Self::State) -> Timestamp;

    /// Whether a bucket that is full and idle may be dropped.
    fn may_drop(&self, state: &Self::State, now: Timestamp) -> bool;
}

/// What a request did to a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// This much was added to `spent`.
    Spent(Tokens),
    /// This much was added to `spent`, for a request that had been
    /// [refused](Self::Refused) before and waited.
    Paced(Tokens),
    /// This much was added to `returned`.
    Returned(Tokens),
    /// A request of this cost found no room.
    Refused(Tokens),
    /// A first request waits now, or the last one that waited is gone.
    Line,
}

/// A limiter without peers, which cannot close buckets.
#[derive(Clone, Copy, Debug, Default)]
pub struct Alone;

impl Companion for Alone {
    type State = ();

    fn happened(&self, _: Event, _: BucketId, _: &mut Slot<()>, _: &Quota, _: Timestamp) {}

    fn advance(&self, slot: &mut Slot<()>, quota: &Quota, now: Timestamp) {
        slot.bucket.advance(quota, now);
    }

    fn room(&self, slot: &Slot<()>, _: Timestamp) -> Tokens {
        slot.bucket.level()
    }

    fn due(
        &self,
        slot: &Slot<()>,
        quota: &Quota,
        ahead: Tokens,
        cost: Tokens,
        _: Timestamp,
    ) -> Due {
        slot.bucket.due_after(quota, ahead, cost)
    }

    fn pause(&self, _: BucketId, _: &mut Slot<()>, _: PauseOrder, _: Timestamp) -> bool {
        false
    }

    fn pause_limit(&self, _: LimitIndex, _: PauseOrder, _: Timestamp) -> bool {
        false
    }

    fn paused_for(&self, _: &Slot<()>, _: Timestamp) -> u64 {
        0
    }

    fn used_at(&self, (): &()) -> Timestamp {
        Timestamp::ZERO
    }

    fn may_drop(&self, (): &(), _: Timestamp) -> bool {
        true
    }
}

/// All limits and all buckets of a process. Shared by every thread.
#[derive(Debug)]
pub struct Limiter<C: Companion> {
    limits: ArcSwap<LimitSet>,
    former: ArcSwap<Former>,
    /// Held by a reload, so that there is one at a time.
    reloading: Mutex<()>,
    store: Store<C::State>,
    floors: Floors,
    evicted: [AtomicU64; 2],
    hall: Hall,
    companion: C,
}

/// Where a decision finds its buckets: in the store, or in copies of them, so
/// that the same steps tell beforehand what would be decided.
trait Ground<C: Companion> {
    /// Runs `f` on the bucket of `charge`, with its quota in force.
    fn at<R>(
        &mut self,
        limiter: &Limiter<C>,
        charge: &Charge<'_>,
        now: Timestamp,
        f: impl FnOnce(&mut Slot<C::State>, &Quota) -> R,
    ) -> R;

    /// Tells the higher layer of `event`, if it is real.
    fn happened(
        limiter: &Limiter<C>,
        event: Event,
        id: BucketId,
        slot: &mut Slot<C::State>,
        quota: &Quota,
        now: Timestamp,
    );
}

/// The buckets themselves.
struct Live;

impl<C: Companion> Ground<C> for Live {
    fn at<R>(
        &mut self,
        limiter: &Limiter<C>,
        charge: &Charge<'_>,
        now: Timestamp,
        f: impl FnOnce(&mut Slot<C::State>, &Quota) -> R,
    ) -> R {
        let key = Some(charge.key.as_bytes());
        limiter.with_quota(charge.bucket, charge.index, charge.limit, key, now, f)
    }

    fn happened(
        limiter: &Limiter<C>,
        event: Event,
        id: BucketId,
        slot: &mut Slot<C::State>,
        quota: &Quota,
        now: Timestamp,
    ) {
        limiter.companion.happened(event, id, slot, quota, now);
    }
}

/// What a limit has to do with a request.
#[allow(clippy::large_enum_variant, reason = "lives for one look; a box would be an allocation")]
enum Part<'a> {
    Charged(Charge<'a>),
    Excluded(Exclusion),
    Skipped(usize),
    Denied(usize),
}

/// A limit that applies to the request at hand.
struct Charge<'a> {
    index: LimitIndex,
    limit: &'a Limit,
    bucket: BucketId,
    cost: Tokens,
    key: KeyBuf,
}

impl<C: Companion> Limiter<C> {
    /// A limiter that checks `limits` and keeps `max_buckets` buckets at most.
    pub fn new(limits: LimitSet, max_buckets: usize, companion: C) -> Self {
        Self {
            limits: ArcSwap::from_pointee(limits),
            former: ArcSwap::default(),
            reloading: Mutex::default(),
            store: Store::new(max_buckets),
            floors: Floors::default(),
            evicted: Default::default(),
            hall: Hall::default(),
            companion,
        }
    }

    /// The limits in force.
    pub fn limits(&self) -> Arc<LimitSet> {
        self.limits.load_full()
    }

    /// Whether `limits` are those in force. Unlike getting them, this writes nothing
    /// that other threads write too.
    pub fn enforces(&self, limits: &Arc<LimitSet>) -> bool {
        Arc::ptr_eq(&self.limits.load(), limits)
    }

    /// The buckets.
    pub const fn store(&self) -> &Store<C::State> {
        &self.store
    }

    /// What the higher layer shares with every check.
    pub const fn companion(&self) -> &C {
        &self.companion
    }

    /// Decides on `request` at `now`, and charges it if it may pass. Where requests
    /// wait it is refused, whatever the level: nobody overtakes them.
    ///
    /// With several enforcing limits the cost is first held in each bucket, in
    /// the order of their identities; only when all hold is it spent, and if one
    /// lacks room the rest is given back.
    pub fn decide(&self, request: &impl Attributes, now: Timestamp) -> Decision {
        self.decide_as(Asking::NEWCOMER, request, now)
    }

    /// Decides on a request that may have waited.
    fn decide_as(&self, asking: Asking<'_>, request: &impl Attributes, now: Timestamp) -> Decision {
        let limits = self.limits.load();
        let mut charges: SmallVec<[Charge<'_>; 2]> = SmallVec::new();
        for (index, limit) in limits.candidates(request) {
            match Part::of(index, limit, request) {
                Part::Charged(charge) => charges.push(charge),
                Part::Excluded(_) | Part::Skipped(_) => {}
                Part::Denied(part) => {
                    let verdict = Verdict::MissingPart { limit: index, part };
                    return Decision { verdict, checks: SmallVec::new() };
                }
            }
        }
        self.charge(&mut Live, &charges, asking, now)
    }

    fn charge<G: Ground<C>>(
        &self,
        ground: &mut G,
        charges: &[Charge<'_>],
        asking: Asking<'_>,
        now: Timestamp,
    ) -> Decision {
        let enforcing = charges.iter().filter(|c| c.limit.mode() == Mode::Enforce).count();
        let mut checks: SmallVec<[Check; 2]> =
            charges.iter().map(|charge| charge.unchecked()).collect();
        let refused = match enforcing {
            0 => false,
            1 => {
                let only = charges.iter().position(|c| c.limit.mode() == Mode::Enforce);
                only.is_some_and(|i| !self.spend(ground, &charges[i], &mut checks[i], asking, now))
            }
            _ => !self.spend_all(ground, charges, &mut checks, asking, now),
        };
        // A shadow limit is charged only for what really passes.
        for (charge, check) in charges.iter().zip(&mut checks) {
            if charge.limit.mode() == Mode::Shadow {
                if refused {
                    self.observe(ground, charge, check, asking, now);
                } else {
                    self.spend(ground, charge, check, asking, now);
                }
            }
        }
        let verdict = if refused {
            let last = checks.iter().enumerate().filter(|(_, c)| c.outcome == Outcome::Refused);
            Verdict::Refused(last.max_by_key(|(_, c)| c.due).map_or(0, |(i, _)| i))
        } else {
            Verdict::Admitted
        };
        Decision { verdict, checks }
    }

    /// Takes and spends in one step. `false` if there is no room.
    fn spend<G: Ground<C>>(
        &self,
        ground: &mut G,
        charge: &Charge<'_>,
        check: &mut Check,
        asking: Asking<'_>,
        now: Timestamp,
    ) -> bool {
        self.at_bucket(ground, charge, check, asking, now, |slot, check| {
            let taken =
                self.has_room(charge, slot, asking, now) && slot.bucket.try_take(check.cost);
            if taken {
                slot.admitted = slot.admitted.saturating_add(1);
                self.commit::<G>(charge.bucket, slot, check, asking, now);
            } else {
                self.refuse::<G>(charge, slot, check, asking, now);
            }
            taken
        })
    }

    /// All enforcing limits or none.
    fn spend_all<G: Ground<C>>(
        &self,
        ground: &mut G,
        charges: &[Charge<'_>],
        checks: &mut [Check],
        asking: Asking<'_>,
        now: Timestamp,
    ) -> bool {
        let mut order: SmallVec<[usize; 4]> =
            (0..charges.len()).filter(|i| charges[*i].limit.mode() == Mode::Enforce).collect();
        order.sort_unstable_by_key(|i| charges[*i].bucket);
        let mut refused = false;
        let mut held: SmallVec<[usize; 4]> = SmallVec::new();
        for i in order {
            let ok =
                self.at_bucket(ground, &charges[i], &mut checks[i], asking, now, |slot, check| {
                    if refused {
                        // Another limit already refuses: only say whether this one would.
                        if !self.has_room(&charges[i], slot, asking, now) {
                            self.refuse::<G>(&charges[i], slot, check, asking, now);
                        }
                        return true;
                    }
                    let taken = self.has_room(&charges[i], slot, asking, now)
                        && slot.bucket.try_take(check.cost);
                    if taken {
                        slot.hold(micros(check.cost));
                    } else {
                        self.refuse::<G>(&charges[i], slot, check, asking, now);
                    }
                    taken
                });
            if !ok {
                refused = true;
            } else if !refused {
                held.push(i);
            }
        }
        for i in held {
            self.at_bucket(ground, &charges[i], &mut checks[i], asking, now, |slot, check| {
                slot.release(micros(check.cost));
                if refused {
                    slot.bucket.shift(&check.quota, check.cost);
                } else {
                    slot.admitted = slot.admitted.saturating_add(1);
                    self.commit::<G>(charges[i].bucket, slot, check, asking, now);
                }
            });
        }
        !refused
    }

    /// Only says whether a shadow limit would have refused.
    fn observe<G: Ground<C>>(
        &self,
        ground: &mut G,
        charge: &Charge<'_>,
        check: &mut Check,
        asking: Asking<'_>,
        now: Timestamp,
    ) {
        self.at_bucket(ground, charge, check, asking, now, |slot, check| {
            if !self.has_room(charge, slot, asking, now) {
                self.refuse::<G>(charge, slot, check, asking, now);
            }
        });
    }

    /// Whether the cost is there, and nobody older waits for it. A limit that only
    /// reports makes nobody wait.
    fn has_room(
        &self,
        charge: &Charge<'_>,
        slot: &Slot<C::State>,
        asking: Asking<'_>,
        now: Timestamp,
    ) -> bool {
        (slot.is_turn_of(asking.ticket()) || charge.limit.mode() == Mode::Shadow)
            && self.companion.room(slot, now) >= charge.cost
    }

    fn commit<G: Ground<C>>(
        &self,
        id: BucketId,
        slot: &mut Slot<C::State>,
        check: &mut Check,
        asking: Asking<'_>,
        now: Timestamp,
    ) {
        slot.spent = slot.spent.saturating_add(micros(check.cost));
        check.outcome = Outcome::Admitted;
        check.life = slot.life;
        let event = if asking.has_asked(check.limit) {
            Event::Paced(check.cost)
        } else {
            Event::Spent(check.cost)
        };
        G::happened(self, event, id, slot, &check.quota, now);
    }

    fn refuse<G: Ground<C>>(
        &self,
        charge: &Charge<'_>,
        slot: &mut Slot<C::State>,
        check: &mut Check,
        asking: Asking<'_>,
        now: Timestamp,
    ) {
        check.outcome = match charge.limit.mode() {
            Mode::Enforce => Outcome::Refused,
            Mode::Shadow => Outcome::ShadowRefused,
        };
        // One that waits is counted at its end.
        if asking.is_new() {
            slot.refused = slot.refused.saturating_add(1);
        }
        if asking.has_asked(check.limit) {
            return;
        }
        let event = Event::Refused(check.cost);
        G::happened(self, event, charge.bucket, slot, &check.quota, now);
    }

    /// Runs `f` on the bucket of `charge`, advanced to `now`, and records the
    /// bucket's state afterwards.
    fn at_bucket<G: Ground<C>, R>(
        &self,
        ground: &mut G,
        charge: &Charge<'_>,
        check: &mut Check,
        asking: Asking<'_>,
        now: Timestamp,
        f: impl FnOnce(&mut Slot<C::State>, &mut Check) -> R,
    ) -> R {
        ground.at(self, charge, now, |slot, quota| {
            check.quota = *quota;
            self.companion.advance(slot, quota, now);
            let result = f(slot, check);
            check.level = slot.bucket.level();
            let ahead = slot.awaited_before(asking.ticket());
            check.due = self.companion.due(slot, quota, ahead, check.cost, now);
            check.full_in = slot.bucket.full_in(quota);
            check.paused_for = self.companion.paused_for(slot, now);
            result
        })
    }

    /// Runs `f` on a bucket, which is made first if it does not exist: full, or as
    /// full as the limit's floor. At the bound another one goes for it. A `key` must
    /// be the bucket's; without one, the bucket may turn out to be another limit's.
    pub fn with_bucket<R>(
        &self,
        id: BucketId,
        index: LimitIndex,
        limit: &Limit,
        key: Option<&[u8]>,
        now: Timestamp,
        f: impl FnOnce(&mut Slot<C::State>) -> R,
    ) -> R {
        self.with_quota(id, index, limit, key, now, |slot, _| f(slot))
    }

    /// As [`with_bucket`](Self::with_bucket), with the bucket's quota in force.
    pub fn with_quota<R>(
        &self,
        id: BucketId,
        index: LimitIndex,
        limit: &Limit,
        key: Option<&[u8]>,
        now: Timestamp,
        f: impl FnOnce(&mut Slot<C::State>, &Quota) -> R,
    ) -> R {
        let make = || self.floors.start(index, limit, limit.quota(id), now);
        let make_room = || self.evict(now);
        self.store.with_revision(id, index, limit.revision(), key, make, make_room, |slot| {
            // Only hearsay had it under another limit: whoever has the key knows.
            if slot.limit != index && key.is_some() {
                slot.limit = index;
                slot.revision = limit.revision();
                slot.bucket.adopt_quota(limit.quota(id));
            }
            // Either the caller's limits or the slot may be the older ones.
            let current = if slot.revision == limit.revision() {
                None
            } else {
                self.bring_up_to_date(&self.limits.load(), id, slot)
            };
            f(slot, &current.unwrap_or(*limit.quota(id)))
        })
    }

    /// Drops the fullest bucket of a sample; one that is not full lowers its
    /// limit's floor.
    fn evict(&self, now: Timestamp) -> Room {
        let limits = self.limits.load();
        let advanced = |id: BucketId, slot: &Slot<C::State>| {
            let (mut bucket, quota) = self.current(&limits, id, slot)?;
            bucket.advance(&quota, now);
            Some((bucket, quota))
        };
        let rank = |id: BucketId, slot: &Slot<C::State>| {
            if slot.is_needed() {
                return None;
            }
            let Some((bucket, quota)) = advanced(id, slot) else { return Some((true, true, 0)) };
            let missing = quota.burst().minus(bucket.level()).micros();
            let settled = slot.companion.as_ref().is_none_or(|c| self.companion.may_drop(c, now));
            // One that is closed would be open again: it goes if all of a sample are.
            let open = slot.companion.is_none() || self.companion.paused_for(slot, now) == 0;
            Some((open, settled, -missing))
        };
        self.store.evict(rank, |id, slot| {
            let Some((bucket, quota)) = advanced(id, slot) else { return };
            let full = bucket.level() >= quota.burst();
            self.evicted[usize::from(!full)].fetch_add(1, Ordering::Relaxed);
            if !full && let Some(limit) = limits.get(slot.limit) {
                self.floors.lower(slot.limit, limit, bucket.level(), now);
            }
        })
    }

    /// How many buckets had to go for others: full ones, and ones that were not.
    pub fn evictions(&self) -> (u64, u64) {
        let [full, spent] = &self.evicted;
        (full.load(Ordering::Relaxed), spent.load(Ordering::Relaxed))
    }

    /// Gives back what `decision` was charged, because the request never reached
    /// the upstream. To be called at most once for a decision.
    pub fn refund(&self, decision: &Decision, now: Timestamp) {
        for check in decision.checks.iter().filter(|c| c.outcome == Outcome::Admitted) {
            let calls = self.with_existing(check.bucket, |slot, quota| {
                let cost = micros(check.cost);
                // A bucket that was dropped or reset meanwhile never spent this.
                if slot.life != check.life || slot.net() < cost {
                    return Calls::default();
                }
                self.companion.advance(slot, quota, now);
                slot.give_back(cost);
                slot.bucket.shift(quota, check.cost);
                let event = Event::Returned(check.cost);
                self.companion.happened(event, check.bucket, slot, quota, now);
                slot.call_front()
            });
            calls.unwrap_or_default().call();
        }
    }

    /// Spends from a bucket so much that no more than `left` is in it, because its
    /// upstream says that it will not bear more. Peers are told as of any spending. A
    /// bucket that holds less, or does not exist, stays as it is.
    pub fn debit(&self, bucket: BucketId, left: Tokens, now: Timestamp) {
        self.with_existing(bucket, |slot, quota| {
            self.companion.advance(slot, quota, now);
            let excess = slot.bucket.level().minus(left);
            if excess > Tokens::ZERO && slot.bucket.try_take(excess) {
                slot.spent = slot.spent.saturating_add(micros(excess));
                self.companion.happened(Event::Spent(excess), bucket, slot, quota, now);
            }
        });
    }

    /// Drops the buckets that are full and were not used for `idle`, and those
    /// whose limit is gone; returns how many went. A full bucket loses nothing.
    pub fn expire(&self, idle: Duration, now: Timestamp) -> usize {
        let limits = self.limits.load();
        self.store.retain(|id, slot| {
            let advanced = slot.bucket.advanced_at();
            let used = slot.companion.as_ref().map_or(advanced, |c| self.companion.used_at(c));
            let Some(quota) = self.bring_up_to_date(&limits, id, slot) else { return false };
            if now.since(used) < idle || slot.is_needed() {
                return true;
            }
            if slot.companion.is_none() {
                // Looking must not make a bucket seem used.
                let mut bucket = slot.bucket;
                bucket.advance(&quota, now);
                return bucket.level() < quota.burst();
            }
            self.companion.advance(slot, &quota, now);
            slot.bucket.level() < quota.burst()
                || slot.companion.as_ref().is_some_and(|c| !self.companion.may_drop(c, now))
        })
    }
}

impl<'a> Part<'a> {
    #[inline]
    fn of(index: LimitIndex, limit: &'a Limit, request: &impl Attributes) -> Self {
        if let Some(exclusion) = limit.rule().exclusion(request) {
            return Self::Excluded(exclusion);
        }
        let mut key = KeyBuf::new();
        match limit.rule().extract(request, &mut key) {
            Extracted::Key => {
                let bucket = limit.bucket_id(key.as_bytes());
                let cost = limit.cost().of(request);
                Self::Charged(Charge { index, limit, bucket, cost, key })
            }
            Extracted::Skipped(part) => Self::Skipped(part),
            Extracted::Denied(part) => Self::Denied(part),
        }
    }
}

impl Charge<'_> {
    fn unchecked(&self) -> Check {
        let quota = *self.limit.quota(self.bucket);
        Check {
            limit: self.index,
            bucket: self.bucket,
            life: 0,
            cost: self.cost,
            quota,
            outcome: Outcome::NotCharged,
            level: quota.burst(),
            due: Due::Now,
            full_in: Some(0),
            paused_for: 0,
        }
    }
}

/// A cost as unsigned micro-tokens; costs are never negative.
fn micros(cost: Tokens) -> u64 {
    u64::try_from(cost.micros()).unwrap_or(0)
}

#[cfg(test)]
mod tests;
