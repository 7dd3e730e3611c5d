//! Epochs: how often buckets and limits were reset.
//!
//! A reset raises the epoch above the highest seen; entries of an older epoch
//! are ignored everywhere, and a newer one empties the ledger. The epoch of a
//! bucket outlives the bucket for a while, so that what is still under way from
//! before the reset is recognised.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use crate::limiter::{BucketId, LimitIndex};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, MutexGuard};
use crate::time::Timestamp;

/// The epochs that are not zero. Costs one relaxed load while there are none.
#[derive(Debug, Default)]
pub(super) struct Epochs {
    any: AtomicBool,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    limits: BTreeMap<LimitIndex, u64>,
    buckets: BTreeMap<BucketId, (u64, Timestamp)>,
}

impl Epochs {
    /// The epoch of a bucket that has no ledger.
    pub(super) fn of(&self, bucket: BucketId, limit: LimitIndex) -> u64 {
        if !self.any.load(Ordering::Acquire) {
            return 0;
        }
        let known = self.lock();
        let of_bucket = known.buckets.get(&bucket).map_or(0, |(epoch, _)| *epoch);
        of_bucket.max(known.limits.get(&limit).copied().unwrap_or(0))
    }

    /// The epoch that all buckets of a limit have reached.
    pub(super) fn of_limit(&self, limit: LimitIndex) -> u64 {
        self.lock().limits.get(&limit).copied().unwrap_or(0)
    }

    /// All limits that were reset.
    pub(super) fn limits(&self) -> Vec<(LimitIndex, u64)> {
        self.lock().limits.iter().map(|(limit, epoch)| (*limit, *epoch)).collect()
    }

    /// A bucket has reached `epoch`.
    pub(super) fn raise_bucket(&self, bucket: BucketId, epoch: u64, now: Timestamp) {
        let mut known = self.lock();
        let entry = known.buckets.entry(bucket).or_insert((epoch, now));
        *entry = (entry.0.max(epoch), now);
        self.any.store(true, Ordering::Release);
    }

    /// All buckets of a limit have reached `epoch`; whether that is news.
    pub(super) fn raise_limit(&self, limit: LimitIndex, epoch: u64) -> bool {
        let mut known = self.lock();
        let entry = known.limits.entry(limit).or_insert(0);
        let news = epoch > *entry;
        *entry = (*entry).max(epoch);
        drop(known);
        self.any.store(true, Ordering::Release);
        news
    }

    /// Forgets buckets that are neither alive nor were lately.
    pub(super) fn sweep(
        &self,
        is_alive: impl Fn(BucketId) -> bool,
        outlive: std::time::Duration,
        now: Timestamp,
    ) {
        // Not under the lock: a check holds its bucket when it asks for an epoch.
        let all: Vec<BucketId> = self.lock().buckets.keys().copied().collect();
        let alive: Vec<BucketId> = all.into_iter().filter(|bucket| is_alive(*bucket)).collect();
        let mut known = self.lock();
        for bucket in alive {
            if let Some((_, seen)) = known.buckets.get_mut(&bucket) {
                *seen = now;
            }
        }
        known.buckets.retain(|_, (_, seen)| now.since(*seen) < outlive);
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        // Epochs are valid whatever a panicking holder did.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
