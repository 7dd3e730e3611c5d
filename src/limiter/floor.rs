//! Floors (layer 1, pure): what is remembered of buckets that had to go.
//!
//! When memory is full a bucket that is not full may have to go. So that its key
//! does not come back fresh, the limit keeps a floor: the lowest level that was
//! dropped, refilled at the limit's rate ever since. A new bucket starts no
//! fuller than the floor. Honest newcomers lose what the floor lacks; nobody
//! gains.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use super::bucket::TokenBucket;
use super::limit::{Limit, LimitIndex, LimitSet};
use super::quota::Quota;
use super::tokens::Tokens;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, MutexGuard};
use crate::time::Timestamp;

/// The floors of all limits. Costs one relaxed load while there are none.
#[derive(Debug, Default)]
pub(super) struct Floors {
    any: AtomicBool,
    low: Mutex<BTreeMap<LimitIndex, Floor>>,
}

/// The floor of one limit, under the quota that its revision had.
#[derive(Debug)]
struct Floor {
    bucket: TokenBucket,
    revision: u16,
}

impl Floors {
    /// A bucket of `limit` was dropped at `level`.
    pub(super) fn lower(&self, index: LimitIndex, limit: &Limit, level: Tokens, now: Timestamp) {
        let quota = limit.default_quota();
        let mut low = self.lock();
        let floor = low.entry(index).or_insert_with(|| Floor {
            bucket: TokenBucket::full(quota, now),
            revision: limit.revision(),
        });
        // A caller that a reload has overtaken knows only the level.
        if floor.revision == limit.revision() {
            floor.bucket.advance(quota, now);
        }
        if level < floor.bucket.level() {
            floor.bucket = TokenBucket::with_level(quota, level, now);
        }
        self.any.store(true, Ordering::Release);
    }

    /// A new bucket of `limit` with this quota: as full as the floor allows.
    pub(super) fn start(
        &self,
        index: LimitIndex,
        limit: &Limit,
        quota: &Quota,
        now: Timestamp,
    ) -> TokenBucket {
        if !self.any.load(Ordering::Acquire) {
            return TokenBucket::full(quota, now);
        }
        let default = limit.default_quota();
        let mut low = self.lock();
        let Some(floor) = low.get_mut(&index) else { return TokenBucket::full(quota, now) };
        if floor.revision != limit.revision() {
            // Overtaken by a reload: the floor stands under another quota.
            return TokenBucket::with_level(quota, floor.bucket.level(), now);
        }
        floor.bucket.advance(default, now);
        let level = floor.bucket.level();
        if level < default.burst() {
            return TokenBucket::with_level(quota, level, now);
        }
        low.remove(&index);
        self.any.store(!low.is_empty(), Ordering::Release);
        TokenBucket::full(quota, now)
    }

    /// `new` takes the place of `old`: floors keep their deficits, as buckets do.
    pub(super) fn reload(&self, old: &LimitSet, new: &LimitSet, now: Timestamp) {
        let mut low = self.lock();
        low.retain(|index, floor| {
            let Some(limit) = new.get(*index) else { return false };
            let quota = limit.default_quota();
            match old.get(*index).filter(|old| old.revision() == floor.revision) {
                Some(old) => floor.bucket.change_quota(old.default_quota(), quota, now),
                None => floor.bucket.adopt_quota(quota),
            }
            floor.revision = limit.revision();
            true
        });
        self.any.store(!low.is_empty(), Ordering::Release);
    }

    /// What [`start`](Self::start) would make, without a trace.
    pub(super) fn would_start(
        &self,
        index: LimitIndex,
        limit: &Limit,
        quota: &Quota,
        now: Timestamp,
    ) -> TokenBucket {
        let low = self.lock();
        let Some(floor) = low.get(&index).filter(|floor| floor.revision == limit.revision()) else {
            return TokenBucket::full(quota, now);
        };
        let mut bucket = floor.bucket;
        bucket.advance(limit.default_quota(), now);
        if bucket.level() < limit.default_quota().burst() {
            TokenBucket::with_level(quota, bucket.level(), now)
        } else {
            TokenBucket::full(quota, now)
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<LimitIndex, Floor>> {
        // Levels are valid whatever a panicking holder did.
        self.low.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
