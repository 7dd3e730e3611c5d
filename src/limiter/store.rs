//! The buckets (layer 1): a concurrent map from identity to state.
//!
//! A bucket that is not in the map is full. Each entry is guarded by the lock
//! of its shard; no code here or above holds two guards at once.

use std::sync::atomic::{AtomicUsize, Ordering};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;

use super::bucket::TokenBucket;
use super::key::BucketId;
use super::limit::LimitIndex;
use super::quota::Quota;
use super::tokens::Tokens;
use crate::time::Timestamp;

/// One bucket: its level, this replica's own ledger, and what a higher layer
/// keeps beside it.
#[derive(Debug)]
pub struct Slot<S> {
    /// The level, with everything known subtracted.
    pub bucket: TokenBucket,
    /// Which limit the bucket belongs to.
    pub limit: LimitIndex,
    /// Requests refused here, for operators.
    pub refused: u32,
    /// Requests admitted here, for operators.
    pub admitted: u32,
    /// Micro-tokens this replica admitted, ever growing.
    pub spent: u64,
    /// Micro-tokens given back, ever growing and never above `spent`.
    pub returned: u64,
    /// Micro-tokens taken from the level by requests that are still being
    /// decided; they are not yet spent and never replicated.
    pub held: u64,
    /// The canonical key, unless it was too secret to keep.
    pub key: Option<Box<[u8]>>,
    /// What a higher layer keeps beside the bucket.
    pub companion: Option<Box<S>>,
}

impl<S> Slot<S> {
    fn new(limit: LimitIndex, bucket: TokenBucket, key: Option<&[u8]>) -> Self {
        Self {
            bucket,
            limit,
            refused: 0,
            admitted: 0,
            spent: 0,
            returned: 0,
            held: 0,
            key: key.map(Box::from),
            companion: None,
        }
    }

    /// Spent less returned, in micro-tokens.
    pub const fn net(&self) -> u64 {
        self.spent.saturating_sub(self.returned)
    }

    /// What is missing until the bucket is full, with what is only held added
    /// back: the deficit that others may know.
    pub fn deficit(&self, quota: &Quota) -> Tokens {
        let held = i64::try_from(self.held).unwrap_or(i64::MAX);
        let level = self.bucket.level().plus(Tokens::from_micros(held));
        Tokens::from_micros(quota.burst().minus(level).micros().max(0))
    }
}

/// All buckets of a process.
#[derive(Debug)]
pub struct Store<S> {
    map: DashMap<BucketId, Slot<S>, foldhash::quality::RandomState>,
    count: AtomicUsize,
}

impl<S> Default for Store<S> {
    fn default() -> Self {
        Self {
            map: DashMap::with_hasher(foldhash::quality::RandomState::default()),
            count: AtomicUsize::new(0),
        }
    }
}

impl<S> Store<S> {
    /// How many buckets there are.
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Runs `f` on a bucket that exists.
    pub fn with_existing<R>(&self, id: BucketId, f: impl FnOnce(&mut Slot<S>) -> R) -> Option<R> {
        self.map.get_mut(&id).map(|mut slot| f(slot.value_mut()))
    }

    /// Runs `f` on a bucket, made full first if it does not exist. `key` is kept
    /// with a new bucket, and with one that has none yet.
    pub fn with<R>(
        &self,
        id: BucketId,
        limit: LimitIndex,
        quota: &Quota,
        key: Option<&[u8]>,
        now: Timestamp,
        f: impl FnOnce(&mut Slot<S>) -> R,
    ) -> R {
        // A hit takes this path: no entry is built and nothing allocated.
        if let Some(mut slot) = self.map.get_mut(&id) {
            let slot = slot.value_mut();
            if slot.key.is_none() && key.is_some() {
                slot.key = key.map(Box::from);
            }
            return f(slot);
        }
        match self.map.entry(id) {
            Entry::Occupied(mut slot) => f(slot.get_mut()),
            Entry::Vacant(vacant) => {
                self.count.fetch_add(1, Ordering::Relaxed);
                let slot = Slot::new(limit, TokenBucket::full(quota, now), key);
                f(vacant.insert(slot).value_mut())
            }
        }
    }

    /// Visits every bucket, one shard at a time. Buckets that come or go
    /// meanwhile may be missed.
    pub fn for_each(&self, mut visit: impl FnMut(BucketId, &Slot<S>)) {
        for slot in &self.map {
            visit(*slot.key(), slot.value());
        }
    }

    /// Drops the buckets for which `keep` is false and returns how many went.
    pub fn retain(&self, mut keep: impl FnMut(BucketId, &mut Slot<S>) -> bool) -> usize {
        let mut dropped = 0;
        self.map.retain(|id, slot| {
            let kept = keep(*id, slot);
            dropped += usize::from(!kept);
            kept
        });
        self.count.fetch_sub(dropped, Ordering::Relaxed);
        dropped
    }
}
