//! Shards (layer 1): a part of the buckets, behind one lock.
//!
//! The slots lie close together in chunks, in no order; a bucket that goes leaves its
//! place to the last one. Beside them is an index, a hash table of their places: the
//! table, which is never full, holds four bytes for each of its places instead of a
//! slot.

use hashbrown::HashTable;

use super::key::BucketId;
use super::slot::Slot;

/// Slots in a chunk. All but the first chunk are made at once.
const CHUNK: usize = 256;
/// Places that are kept whatever is there.
const SLACK: usize = 16;

/// Some buckets.
#[derive(Debug)]
pub(super) struct Shard<S> {
    /// Places, found by the hash of the identity that is there.
    index: HashTable<u32>,
    chunks: Vec<Vec<Bucket<S>>>,
    /// Where the next sample begins.
    hand: u32,
}

#[derive(Debug)]
struct Bucket<S> {
    id: BucketId,
    slot: Slot<S>,
}

/// The bucket at a place.
fn at<S>(chunks: &[Vec<Bucket<S>>], place: u32) -> Option<&Bucket<S>> {
    chunks.get(place as usize / CHUNK)?.get(place as usize % CHUNK)
}

impl<S> Default for Shard<S> {
    fn default() -> Self {
        Self { index: HashTable::new(), chunks: Vec::new(), hand: 0 }
    }
}

impl<S> Shard<S> {
    /// How many buckets there are.
    pub(super) fn len(&self) -> usize {
        self.index.len()
    }

    /// For how many buckets memory was taken.
    pub(super) fn capacity(&self) -> usize {
        self.chunks.iter().map(Vec::capacity).sum()
    }

    /// The bucket of this identity, whose hash is `hash`.
    pub(super) fn find(&mut self, hash: u64, id: BucketId) -> Option<&mut Slot<S>> {
        let chunks = &self.chunks;
        let is_it = |place: &u32| at(chunks, *place).is_some_and(|bucket| bucket.id == id);
        let place = *self.index.find(hash, is_it)?;
        self.at_mut(place).map(|bucket| &mut bucket.slot)
    }

    fn at_mut(&mut self, place: u32) -> Option<&mut Bucket<S>> {
        self.chunks.get_mut(place as usize / CHUNK)?.get_mut(place as usize % CHUNK)
    }

    /// Adds a bucket that is not there. `None`, and nothing added, if there are as
    /// many as there are numbers.
    pub(super) fn insert(
        &mut self,
        hash: u64,
        id: BucketId,
        slot: Slot<S>,
        hash_of: impl Fn(BucketId) -> u64,
    ) -> Option<&mut Slot<S>> {
        let place = u32::try_from(self.len()).ok()?;
        if self.chunks.last().is_none_or(|chunk| chunk.len() == CHUNK) {
            let first = self.chunks.is_empty();
            self.chunks.push(if first { Vec::new() } else { Vec::with_capacity(CHUNK) });
        }
        let chunks = &self.chunks;
        self.index.insert_unique(hash, place, |place| {
            at(chunks, *place).map_or(0, |bucket| hash_of(bucket.id))
        });
        let chunk = self.chunks.last_mut()?;
        chunk.push(Bucket { id, slot });
        chunk.last_mut().map(|bucket| &mut bucket.slot)
    }

    /// Removes the bucket of this identity if `leaves` says so; whether it did.
    pub(super) fn remove_if(
        &mut self,
        hash: u64,
        id: BucketId,
        leaves: impl FnOnce(&Slot<S>) -> bool,
        hash_of: impl Fn(BucketId) -> u64,
    ) -> bool {
        let chunks = &self.chunks;
        let is_it = |place: &u32| at(chunks, *place).is_some_and(|bucket| bucket.id == id);
        let Some(place) = self.index.find(hash, is_it).copied() else { return false };
        let goes = at(&self.chunks, place).is_some_and(|bucket| leaves(&bucket.slot));
        if goes {
            self.remove(place, hash_of);
        }
        goes
    }

    /// Removes the bucket at a place, which the last one takes.
    fn remove(&mut self, place: u32, hash_of: impl Fn(BucketId) -> u64) {
        let Some(gone) = at(&self.chunks, place).map(|bucket| hash_of(bucket.id)) else { return };
        if let Ok(entry) = self.index.find_entry(gone, |other| *other == place) {
            entry.remove();
        }
        let Some(last) = self.chunks.last_mut().and_then(Vec::pop) else { return };
        // Places are numbered without a gap, so the last one had this number.
        let number = self.len() as u32;
        if number != place {
            if let Some(moved) = self.index.find_mut(hash_of(last.id), |other| *other == number) {
                *moved = place;
            }
            if let Some(bucket) = self.at_mut(place) {
                *bucket = last;
            }
        }
        if self.chunks.last().is_some_and(Vec::is_empty) {
            self.chunks.pop();
        }
    }

    /// The next `count` buckets of an endless round through all of them, each at
    /// most once.
    pub(super) fn sample(&mut self, count: usize) -> impl Iterator<Item = (BucketId, &Slot<S>)> {
        let all = self.len() as u32;
        let count = u32::try_from(count).unwrap_or(u32::MAX).min(all);
        let first = if self.hand < all { self.hand } else { 0 };
        self.hand = first + count;
        let chunks = &self.chunks;
        (0..count).filter_map(move |i| {
            let place = if first + i < all { first + i } else { first + i - all };
            at(chunks, place).map(|bucket| (bucket.id, &bucket.slot))
        })
    }

    /// All buckets.
    pub(super) fn iter(&self) -> impl Iterator<Item = (BucketId, &Slot<S>)> {
        self.chunks.iter().flatten().map(|bucket| (bucket.id, &bucket.slot))
    }

    /// Drops the buckets for which `keep` is false and returns how many went. If
    /// few are left, so does the memory that the others took.
    pub(super) fn retain(
        &mut self,
        mut keep: impl FnMut(BucketId, &mut Slot<S>) -> bool,
        hash_of: impl Fn(BucketId) -> u64,
    ) -> usize {
        let before = self.len();
        let mut place = 0;
        while let Some(bucket) = self.at_mut(place) {
            if keep(bucket.id, &mut bucket.slot) {
                place += 1;
            } else {
                self.remove(place, &hash_of);
            }
        }
        let left = self.len();
        if left < before && self.index.capacity() > 4 * (left + SLACK) {
            let chunks = &self.chunks;
            self.index.shrink_to(left + SLACK, |place| {
                at(chunks, *place).map_or(0, |bucket| hash_of(bucket.id))
            });
            self.chunks.shrink_to_fit();
            if let [only] = self.chunks.as_mut_slice() {
                only.shrink_to(left + SLACK);
            }
        }
        before - left
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::collections::btree_map::Entry;

    use proptest::prelude::*;

    use super::super::bucket::TokenBucket;
    use super::super::limit::LimitIndex;
    use super::super::quota::Quota;
    use super::*;
    use crate::time::Timestamp;

    fn id(number: u16) -> BucketId {
        BucketId::from_bytes(u128::from(number).to_le_bytes())
    }

    /// Many identities of one hash, and many of one tag.
    fn hash_of(id: BucketId) -> u64 {
        u64::from(id.to_bytes()[0] % 64)
    }

    fn slot(life: u32) -> Slot<()> {
        let quota = Quota::try_new("5/s".parse().unwrap(), 5).unwrap();
        Slot::new(LimitIndex(0), 0, TokenBucket::full(&quota, Timestamp::ZERO), None, life)
    }

    fn insert(shard: &mut Shard<()>, number: u16, life: u32) {
        assert!(shard.insert(hash_of(id(number)), id(number), slot(life), hash_of).is_some());
    }

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u16),
        Remove(u16),
        Retain(u16),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (0u16..1000).prop_map(Step::Insert),
            3 => (0u16..1000).prop_map(Step::Remove),
            1 => (2u16..9).prop_map(Step::Retain),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Against the plainest structure that does the same.
        #[test]
        fn a_shard_holds_what_was_put_in_and_not_taken_out(
            steps in prop::collection::vec(step(), 0..1500),
        ) {
            let mut shard = Shard::default();
            let mut known = BTreeMap::new();
            for (life, step) in (0..).zip(steps) {
                match step {
                    Step::Insert(number) => {
                        let found = shard.find(hash_of(id(number)), id(number));
                        prop_assert_eq!(found.map(|slot| slot.life), known.get(&number).copied());
                        let hash = hash_of(id(number));
                        match known.entry(number) {
                            Entry::Occupied(_) => {
                                let stays = |slot: &Slot<()>| slot.life == u32::MAX;
                                prop_assert!(!shard.remove_if(hash, id(number), stays, hash_of));
                            }
                            Entry::Vacant(vacant) => {
                                insert(&mut shard, number, life);
                                vacant.insert(life);
                            }
                        }
                    }
                    Step::Remove(number) => {
                        let went = shard.remove_if(hash_of(id(number)), id(number), |_| true, hash_of);
                        prop_assert_eq!(went, known.remove(&number).is_some());
                    }
                    Step::Retain(part) => {
                        let keep = |life: u32| !life.is_multiple_of(u32::from(part));
                        let mut seen = 0;
                        let before = known.len();
                        let went = shard.retain(|_, slot| { seen += 1; keep(slot.life) }, hash_of);
                        known.retain(|_, life| keep(*life));
                        prop_assert_eq!((seen, went), (before, before - known.len()));
                    }
                }
                prop_assert_eq!(shard.len(), known.len());
            }
            let mut all: Vec<_> = shard.iter().map(|(id, slot)| (id, slot.life)).collect();
            all.sort_unstable();
            let mut expected: Vec<_> = known.iter().map(|(n, life)| (id(*n), *life)).collect();
            expected.sort_unstable();
            prop_assert_eq!(all, expected);
        }
    }

    #[test]
    fn samples_go_round_through_all() {
        let mut shard = Shard::default();
        assert_eq!(shard.sample(8).count(), 0);
        for number in 0..600 {
            insert(&mut shard, number, 0);
        }
        let mut seen: Vec<BucketId> = Vec::new();
        for _ in 0..75 {
            seen.extend(shard.sample(8).map(|(id, _)| id));
        }
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 600);
        // Fewer than are asked for are seen once each.
        assert_eq!(shard.retain(|bucket, _| bucket < id(5), hash_of), 595);
        assert_eq!(shard.sample(8).count(), 5);
    }

    #[test]
    fn memory_that_is_not_needed_any_more_is_given_back() {
        let mut shard = Shard::default();
        for number in 0..10_000 {
            insert(&mut shard, number, 0);
        }
        assert!(shard.capacity() < 10_000 + CHUNK);
        assert_eq!(shard.retain(|bucket, _| bucket < id(3), hash_of), 9_997);
        assert!(shard.capacity() <= 3 + SLACK, "{}", shard.capacity());
        assert!(shard.index.capacity() <= 4 * (3 + SLACK), "{}", shard.index.capacity());
        for number in 0..3 {
            assert!(shard.find(hash_of(id(number)), id(number)).is_some());
        }
    }
}
