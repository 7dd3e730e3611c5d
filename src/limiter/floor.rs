//! Floors (layer 1, pure): what is remembered of buckets that had to go.
//!
//! When memory is full a bucket that is not full may have to go. So that its key
//! does not come back fresh, the limit keeps a floor: the lowest level that was
//! dropped, refilled at the limit's rate ever since. A new bucket starts no
//! fuller than the floor. Honest newcomers lose what the floor lacks; nobody
//! gains.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::bucket::TokenBucket;
use super::limit::LimitIndex;
use super::quota::Quota;
use super::tokens::Tokens;
use crate::time::Timestamp;

/// The floors of all limits. Costs one relaxed load while there are none.
#[derive(Debug, Default)]
pub(super) struct Floors {
    any: AtomicBool,
    low: Mutex<BTreeMap<LimitIndex, TokenBucket>>,
}

impl Floors {
    /// A bucket of `limit` was dropped at `level`.
    pub(super) fn lower(&self, limit: LimitIndex, level: Tokens, quota: &Quota, now: Timestamp) {
        let mut low = self.lock();
        let floor = low.entry(limit).or_insert_with(|| TokenBucket::full(quota, now));
        floor.advance(quota, now);
        if level < floor.level() {
            *floor = TokenBucket::with_level(quota, level, now);
        }
        self.any.store(true, Ordering::Release);
    }

    /// A new bucket of `limit`: as full as its floor allows.
    pub(super) fn start(
        &self,
        limit: LimitIndex,
        default: &Quota,
        quota: &Quota,
        now: Timestamp,
    ) -> TokenBucket {
        if !self.any.load(Ordering::Acquire) {
            return TokenBucket::full(quota, now);
        }
        let mut low = self.lock();
        let Some(floor) = low.get_mut(&limit) else { return TokenBucket::full(quota, now) };
        floor.advance(default, now);
        let level = floor.level();
        if level < default.burst() {
            return TokenBucket::with_level(quota, level, now);
        }
        low.remove(&limit);
        self.any.store(!low.is_empty(), Ordering::Release);
        TokenBucket::full(quota, now)
    }

    /// What [`start`](Self::start) would make, without a trace.
    pub(super) fn would_start(
        &self,
        limit: LimitIndex,
        default: &Quota,
        quota: &Quota,
        now: Timestamp,
    ) -> TokenBucket {
        let low = self.lock();
        let Some(mut floor) = low.get(&limit).copied() else {
            return TokenBucket::full(quota, now);
        };
        floor.advance(default, now);
        if floor.level() < default.burst() {
            TokenBucket::with_level(quota, floor.level(), now)
        } else {
            TokenBucket::full(quota, now)
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<LimitIndex, TokenBucket>> {
        // Levels are valid whatever a panicking holder did.
        self.low.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
