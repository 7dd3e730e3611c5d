//! Reload (layer 1, pure): limits that change while requests are decided.
//!
//! A decision goes by one set of limits from its first rule to its last, but
//! each bucket by the quota in force when it is touched. What a bucket lacked it
//! lacks afterwards ([`TokenBucket::change_quota`]): a slot remembers the
//! revision of its limit, the limiter the set before the present one, and a slot
//! of an older revision is brought up to date by the first who meets it, under
//! the same guard, or by the pass over all buckets that a reload ends with. The
//! revision costs a slot four bytes, and a check one comparison with that of the
//! limit at hand. A pass alone would let requests use unconverted levels until it
//! is through; without one, every quota since the start would have to be kept.

use std::sync::{Arc, PoisonError};

use super::{
    BucketId, Calls, Companion, Limit, LimitIndex, LimitSet, Limiter, Quota, Slot, TokenBucket,
    TooManyLimits,
};
use crate::time::Timestamp;

/// The limits before those in force.
#[derive(Debug, Default)]
pub(super) struct Former {
    limits: Arc<LimitSet>,
    until: Timestamp,
}

impl<C: Companion> Limiter<C> {
    /// Runs `f` on a bucket that exists, with its quota in force. `None` if there
    /// is no bucket, or its limit is gone.
    pub fn with_existing<R>(
        &self,
        id: BucketId,
        f: impl FnOnce(&mut Slot<C::State>, &Quota) -> R,
    ) -> Option<R> {
        let found = self.store.with_existing(id, |slot| {
            let quota = self.bring_up_to_date(&self.limits.load(), id, slot)?;
            Some(f(slot, &quota))
        });
        found.flatten()
    }

    /// The level of a bucket at `now` and its quota in force. `None` if its limit
    /// is gone.
    pub fn level(
        &self,
        id: BucketId,
        slot: &Slot<C::State>,
        now: Timestamp,
    ) -> Option<(TokenBucket, Quota)> {
        let (mut bucket, quota) = self.current(&self.limits.load(), id, slot)?;
        bucket.advance(&quota, now);
        Some((bucket, quota))
    }

    /// Puts `limits` in force from `now` on. Buckets of a limit of the same
    /// identity and key parts stay, and so does what was spent from them; those
    /// of limits that are gone go.
    ///
    /// # Errors
    /// If there are too many limits; nothing changed then.
    pub fn reload(&self, limits: LimitSet, now: Timestamp) -> Result<(), TooManyLimits> {
        let _one_at_a_time = self.reloading.lock().unwrap_or_else(PoisonError::into_inner);
        let former = self.limits.load_full();
        let limits = Arc::new(limits.succeeding(&former)?);
        // In this order: whoever meets a slot of the former revision under the
        // new limits finds the former ones.
        self.former.store(Arc::new(Former { limits: Arc::clone(&former), until: now }));
        self.limits.store(Arc::clone(&limits));
        self.floors.reload(&former, &limits, now);
        let mut calls = Calls::default();
        self.store.retain(|id, slot| {
            let stays = self.bring_up_to_date(&limits, id, slot).is_some();
            if stays {
                calls.add(slot.call_front());
            } else if let Some(line) = slot.take_line() {
                // There is nothing left to wait for.
                calls.add(line.call_all());
            }
            stays || slot.held() > 0
        });
        calls.call();
        Ok(())
    }

    /// Passes a slot to the quota that `limits`, those in force, give it, and
    /// returns that quota. `None`, and nothing changed, if its limit is gone.
    pub(super) fn bring_up_to_date(
        &self,
        limits: &LimitSet,
        id: BucketId,
        slot: &mut Slot<C::State>,
    ) -> Option<Quota> {
        let limit = limits.get(slot.limit)?;
        let quota = limit.quota(id);
        if slot.revision != limit.revision() {
            let former = self.former.load();
            if let Some(old) = former.of(slot.limit, slot.revision) {
                // What a higher layer reckons with stood under the old one too.
                self.companion.advance(slot, old.quota(id), former.until);
            }
            slot.bucket = former.pass_on(slot, id, quota);
            slot.revision = limit.revision();
        }
        Some(*quota)
    }

    /// The bucket and the quota that a slot has under `limits`, those in force.
    pub(super) fn current(
        &self,
        limits: &LimitSet,
        id: BucketId,
        slot: &Slot<C::State>,
    ) -> Option<(TokenBucket, Quota)> {
        let limit = limits.get(slot.limit)?;
        let quota = limit.quota(id);
        let bucket = if slot.revision == limit.revision() {
            slot.bucket
        } else {
            self.former.load().pass_on(slot, id, quota)
        };
        Some((bucket, *quota))
    }
}

impl Former {
    /// The limit at `index`, if that was its revision.
    fn of(&self, index: LimitIndex, revision: u16) -> Option<&Limit> {
        self.limits.get(index).filter(|limit| limit.revision() == revision)
    }

    /// The bucket of a slot under `quota`, which came after these limits.
    fn pass_on<S>(&self, slot: &Slot<S>, id: BucketId, quota: &Quota) -> TokenBucket {
        let mut bucket = slot.bucket;
        match self.of(slot.limit, slot.revision) {
            Some(old) => bucket.change_quota(old.quota(id), quota, self.until),
            // Made by somebody who was overtaken by two reloads at once.
            None => bucket.adopt_quota(quota),
        }
        bucket
    }
}
