//! The buckets (layer 1): a concurrent map from identity to state.
//!
//! A bucket that is not in the map is full, or as full as its limit's floor (see
//! [`super::floor`]). Each entry is guarded by the lock of its shard; no code
//! here or above holds two guards at once.
//!
//! The number of buckets is bounded. At the bound a new one takes the place of
//! the fullest of a small sample, which loses least. Samples are taken shard by
//! shard, and in each of them round and round, like the hand of a clock.

use std::hash::BuildHasher as _;
use std::sync::PoisonError;

use super::bucket::TokenBucket;
use super::key::BucketId;
use super::limit::LimitIndex;
use super::shard::Shard;
use super::slot::Slot;
use crate::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use crate::sync::{Mutex, MutexGuard, SHARDS, Seed, spin_loop};

/// What became of an attempt to make room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// A bucket went.
    Made,
    /// None could go, but other threads are about to bring some.
    Soon,
    /// None may go: every bucket is held by a request at this moment.
    None,
}

/// How many buckets are compared when one has to go.
const SAMPLE: usize = 8;

/// All buckets of a process.
#[derive(Debug)]
pub struct Store<S> {
    shards: Box<[Padded<Mutex<Shard<S>>>]>,
    seed: Seed,
    count: AtomicUsize,
    max: usize,
    /// How many samples were begun: each at the next shard.
    hand: AtomicUsize,
    lives: AtomicU32,
}

/// On cache lines of its own, so that a lock does not slow down its neighbours.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Padded<T>(T);

impl<S> Store<S> {
    /// No buckets, and room for `max`.
    pub fn new(max: usize) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Padded(Mutex::new(Shard::default()))).collect(),
            seed: Seed::default(),
            count: AtomicUsize::new(0),
            max: max.max(1),
            hand: AtomicUsize::new(0),
            lives: AtomicU32::new(0),
        }
    }

    /// For how many buckets memory was taken.
    pub fn capacity(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).capacity()).sum()
    }

    /// A number for the life of a bucket.
    pub fn new_life(&self) -> u32 {
        self.lives.fetch_add(1, Ordering::Relaxed)
    }

    /// How many buckets there are.
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Identities are hashes, but of what strangers choose and under a key that is no
    /// secret.
    fn hash(&self, id: BucketId) -> u64 {
        self.seed.hash_one(id)
    }

    /// The shard of the identities with this hash. Their places in it are chosen by
    /// the lowest and the highest bits.
    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard<S>> {
        lock(&self.shards[(hash >> 32) as usize % SHARDS])
    }

    /// Runs `f` on a bucket that exists.
    pub fn with_existing<R>(&self, id: BucketId, f: impl FnOnce(&mut Slot<S>) -> R) -> Option<R> {
        let hash = self.hash(id);
        self.shard(hash).find(hash, id).map(f)
    }

    /// Takes a place for a new bucket, if there is one.
    fn reserve(&self) -> bool {
        let more = |count: usize| (count < self.max).then_some(count + 1);
        self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Runs `f` on a bucket, which `make` makes first if it does not exist.
    /// `key` is kept with a new bucket, and with one that has none yet.
    pub fn with<R>(
        &self,
        id: BucketId,
        limit: LimitIndex,
        key: Option<&[u8]>,
        make: impl FnOnce() -> TokenBucket,
        f: impl FnOnce(&mut Slot<S>) -> R,
    ) -> R {
        self.with_revision(id, limit, 0, key, make, || Room::None, f)
    }

    /// As [`with`](Self::with), for a limit of this revision. `make_room` drops
    /// another bucket, and says what became of it. `make` is called under the
    /// bucket's guard.
    #[allow(clippy::too_many_arguments, reason = "one step, that must not be taken in parts")]
    pub(super) fn with_revision<R>(
        &self,
        id: BucketId,
        limit: LimitIndex,
        revision: u16,
        key: Option<&[u8]>,
        make: impl FnOnce() -> TokenBucket,
        make_room: impl Fn() -> Room,
        f: impl FnOnce(&mut Slot<S>) -> R,
    ) -> R {
        let hash = self.hash(id);
        // A hit takes this path: nothing is allocated.
        if let Some(slot) = self.shard(hash).find(hash, id) {
            slot.learn_key(key);
            return f(slot);
        }
        // A place first, so that the bound holds whoever else wants the last one;
        // and before the shard is locked, since room is made in any of them.
        while !self.reserve() {
            match make_room() {
                Room::Made => {}
                Room::Soon => spin_loop(),
                Room::None => {
                    self.count.fetch_add(1, Ordering::Relaxed);
                    break;
                }
            }
        }
        let mut shard = self.shard(hash);
        if let Some(slot) = shard.find(hash, id) {
            self.count.fetch_sub(1, Ordering::Relaxed);
            slot.learn_key(key);
            return f(slot);
        }
        // Not before: a bucket of this identity may have been dropped since.
        let mut slot = Slot::new(limit, revision, make(), key, self.new_life());
        let result = f(&mut slot);
        if shard.insert(hash, id, slot, |id| self.hash(id)).is_none() {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
        result
    }

    /// Drops the bucket of a sample for which `rank` is highest. A bucket without a
    /// rank stays. `last` sees it under its guard, before anybody can make it anew.
    pub(super) fn evict<K: Ord>(
        &self,
        rank: impl Fn(BucketId, &Slot<S>) -> Option<K>,
        last: impl FnOnce(BucketId, &Slot<S>),
    ) -> Room {
        let mut best: Option<(K, BucketId)> = None;
        let (mut ranked, mut is_empty) = (0, true);
        let first = self.hand.fetch_add(1, Ordering::Relaxed);
        for step in 0..SHARDS {
            let mut shard = lock(&self.shards[first.wrapping_add(step) % SHARDS]);
            for (id, slot) in shard.sample(SAMPLE - ranked) {
                is_empty = false;
                let Some(key) = rank(id, slot) else { continue };
                ranked += 1;
                if best.as_ref().is_none_or(|(top, _)| key > *top) {
                    best = Some((key, id));
                }
            }
            if ranked == SAMPLE {
                break;
            }
        }
        let Some((_, id)) = best else {
            // Those that were counted may be about to come.
            return if is_empty { Room::Soon } else { Room::None };
        };
        let hash = self.hash(id);
        // A request may hold it by now, or it may be gone.
        let leaves = |slot: &Slot<S>| {
            let leaves = rank(id, slot).is_some();
            if leaves {
                last(id, slot);
            }
            leaves
        };
        if self.shard(hash).remove_if(hash, id, leaves, |id| self.hash(id)) {
            self.count.fetch_sub(1, Ordering::Relaxed);
            Room::Made
        } else {
            Room::Soon
        }
    }

    /// Visits every bucket, one shard at a time. Buckets that come or go
    /// meanwhile may be missed.
    pub fn for_each(&self, mut visit: impl FnMut(BucketId, &Slot<S>)) {
        for shard in &self.shards {
            lock(shard).iter().for_each(|(id, slot)| visit(id, slot));
        }
    }

    /// Drops the buckets for which `keep` is false and returns how many went.
    /// Memory that a flood took is given back when the flood is over.
    pub fn retain(&self, mut keep: impl FnMut(BucketId, &mut Slot<S>) -> bool) -> usize {
        let mut dropped = 0;
        for shard in &self.shards {
            let went = lock(shard).retain(&mut keep, |id| self.hash(id));
            self.count.fetch_sub(went, Ordering::Relaxed);
            dropped += went;
        }
        dropped
    }
}

fn lock<S>(shard: &Padded<Mutex<Shard<S>>>) -> MutexGuard<'_, Shard<S>> {
    // Each step on a bucket leaves it valid, and a bucket that is half made is not in.
    shard.0.lock().unwrap_or_else(PoisonError::into_inner)
}
