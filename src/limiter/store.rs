//! The buckets (layer 1): a concurrent map from identity to state.
//!
//! A bucket that is not in the map is full, or as full as its limit's floor (see
//! [`super::floor`]). Each entry is guarded by the lock of its shard; no code
//! here or above holds two guards at once.
//!
//! The number of buckets is bounded. At the bound a new one takes the place of
//! the fullest of a small sample, which loses least. The sample comes from a queue
//! of identities, oldest first, like the hand of a clock.

use super::bucket::TokenBucket;
use super::key::BucketId;
use super::limit::LimitIndex;
use super::slot::Slot;
use crate::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use crate::sync::{DashMap, Entry, Seed, SegQueue, spin_loop};

/// What became of an attempt to make room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// A bucket went.
    Made,
    /// None could go, but other threads are about to bring some back.
    Soon,
    /// None may go: every bucket is held by a request at this moment.
    None,
}

/// How many buckets are compared when one has to go.
const SAMPLE: usize = 8;
/// Identities in the queue of which no bucket exists any more are dropped when
/// there are this many more of them than buckets.
const QUEUE_SLACK: usize = 4096;

/// The map keeps room for so many buckets whatever it holds.
const MAP_SLACK: usize = 1024;

/// All buckets of a process.
#[derive(Debug)]
pub struct Store<S> {
    /// Boxed, since the map keeps about as many free places as taken ones. Identities
    /// are hashes, but of what strangers choose and under a key that is no secret, so
    /// the map has a seed of its own.
    map: DashMap<BucketId, Box<Slot<S>>, Seed>,
    count: AtomicUsize,
    max: usize,
    hand: SegQueue<BucketId>,
    lives: AtomicU32,
}

impl<S> Store<S> {
    /// No buckets, and room for `max`.
    pub fn new(max: usize) -> Self {
        Self {
            map: DashMap::with_hasher(Seed::default()),
            count: AtomicUsize::new(0),
            max: max.max(1),
            hand: SegQueue::new(),
            lives: AtomicU32::new(0),
        }
    }

    /// For how many buckets the map has taken memory.
    pub fn capacity(&self) -> usize {
        self.map.capacity()
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

    /// Runs `f` on a bucket that exists.
    pub fn with_existing<R>(&self, id: BucketId, f: impl FnOnce(&mut Slot<S>) -> R) -> Option<R> {
        self.map.get_mut(&id).map(|mut slot| f(slot.value_mut()))
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
        // A hit takes this path: no entry is built and nothing allocated.
        if let Some(mut slot) = self.map.get_mut(&id) {
            let slot = slot.value_mut();
            slot.learn_key(key);
            return f(slot);
        }
        // A place first, so that the bound holds whoever else wants the last one;
        // and before the shard is locked, since room is made in other shards.
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
        match self.map.entry(id) {
            Entry::Occupied(mut slot) => {
                self.count.fetch_sub(1, Ordering::Relaxed);
                let slot = slot.get_mut();
                slot.learn_key(key);
                f(slot)
            }
            Entry::Vacant(vacant) => {
                // Not before: a bucket of this identity may have been dropped since.
                let slot = Slot::new(limit, revision, make(), key, self.new_life());
                let mut slot = vacant.insert(Box::new(slot));
                self.hand.push(id);
                f(slot.value_mut())
            }
        }
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
        // Once round at most. Identities without a bucket leave the queue, and buckets
        // that must stay are passed over: however many there are, another one goes.
        for _ in 0..self.hand.len() {
            let Some(id) = self.hand.pop() else { break };
            let Some(found) = self.map.get(&id) else { continue };
            is_empty = false;
            let key = rank(id, found.value());
            drop(found);
            let Some(key) = key else {
                self.hand.push(id);
                continue;
            };
            ranked += 1;
            if best.as_ref().is_none_or(|(top, _)| key > *top) {
                if let Some((_, loser)) = best.replace((key, id)) {
                    self.hand.push(loser);
                }
            } else {
                self.hand.push(id);
            }
            if ranked == SAMPLE {
                break;
            }
        }
        let Some((_, id)) = best else {
            // All that are there may be in the samples of others, or about to come.
            return if is_empty { Room::Soon } else { Room::None };
        };
        // A request may hold it by now.
        let evicted = self.map.remove_if(&id, |id, slot| {
            let leaves = rank(*id, slot).is_some();
            if leaves {
                last(*id, slot);
            }
            leaves
        });
        if evicted.is_some() {
            self.count.fetch_sub(1, Ordering::Relaxed);
            Room::Made
        } else {
            self.hand.push(id);
            Room::Soon
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
        // Memory that a flood took is given back when the flood is over.
        if dropped > 0 && self.map.capacity() > 4 * (self.len() + MAP_SLACK) {
            self.map.shrink_to_fit();
        }
        if self.hand.len() > 2 * self.len() + QUEUE_SLACK {
            for _ in 0..self.hand.len() {
                let Some(id) = self.hand.pop() else { break };
                if self.map.contains_key(&id) {
                    self.hand.push(id);
                }
            }
        }
        dropped
    }
}
