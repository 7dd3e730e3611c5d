//! Models of the map and the queue for the scheduler of `--cfg shuttle`: the same
//! methods and the same locking, a reader-writer lock for each shard and a step for
//! each push and pop.

#![allow(missing_docs, clippy::expect_used, reason = "not a part of the product")]

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, VecDeque};
use std::hash::{Hash, Hasher as _};
use std::marker::PhantomData;

use shuttle::sync::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Few, so that buckets meet in one; not one, so that they do not always.
const SHARDS: usize = 2;

type Shard<K, V> = RwLock<BTreeMap<K, V>>;

#[derive(Debug)]
pub(crate) struct DashMap<K, V, S> {
    shards: [Shard<K, V>; SHARDS],
    hasher: PhantomData<S>,
}

pub(crate) struct Ref<'a, K, V> {
    shard: RwLockReadGuard<'a, BTreeMap<K, V>>,
    key: K,
}

pub(crate) struct RefMut<'a, K, V> {
    shard: RwLockWriteGuard<'a, BTreeMap<K, V>>,
    key: K,
}

pub(crate) enum Entry<'a, K, V> {
    Occupied(OccupiedEntry<'a, K, V>),
    Vacant(VacantEntry<'a, K, V>),
}

pub(crate) struct OccupiedEntry<'a, K, V>(RefMut<'a, K, V>);

pub(crate) struct VacantEntry<'a, K, V>(RefMut<'a, K, V>);

impl<K: Ord + Copy + Hash, V, S> DashMap<K, V, S> {
    /// The hasher of the product is seeded anew by every process; here every run of
    /// one seed is the same.
    pub(crate) fn with_hasher(_: S) -> Self {
        let shards = std::array::from_fn(|_| RwLock::new(BTreeMap::new()));
        Self { shards, hasher: PhantomData }
    }

    fn shard(&self, key: &K) -> &Shard<K, V> {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        &self.shards[hasher.finish() as usize % SHARDS]
    }

    fn write(&self, key: K) -> RefMut<'_, K, V> {
        RefMut { shard: self.shard(&key).write().expect("a lock"), key }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.shards.iter().map(|shard| shard.read().expect("a lock").len()).sum()
    }

    pub(crate) fn shrink_to_fit(&self) {}

    pub(crate) fn get(&self, key: &K) -> Option<Ref<'_, K, V>> {
        let shard = self.shard(key).read().expect("a lock");
        shard.contains_key(key).then_some(Ref { shard, key: *key })
    }

    pub(crate) fn get_mut(&self, key: &K) -> Option<RefMut<'_, K, V>> {
        let found = self.write(*key);
        found.shard.contains_key(key).then_some(found)
    }

    pub(crate) fn contains_key(&self, key: &K) -> bool {
        self.get(key).is_some()
    }

    pub(crate) fn entry(&self, key: K) -> Entry<'_, K, V> {
        let place = self.write(key);
        if place.shard.contains_key(&key) {
            Entry::Occupied(OccupiedEntry(place))
        } else {
            Entry::Vacant(VacantEntry(place))
        }
    }

    pub(crate) fn remove_if(
        &self,
        key: &K,
        condition: impl FnOnce(&K, &V) -> bool,
    ) -> Option<(K, V)> {
        let mut found = self.get_mut(key)?;
        let removes = condition(key, found.value_mut());
        removes.then(|| found.shard.remove_entry(key)).flatten()
    }

    pub(crate) fn retain(&self, mut keep: impl FnMut(&K, &mut V) -> bool) {
        for shard in &self.shards {
            shard.write().expect("a lock").retain(|key, value| keep(key, value));
        }
    }
}

/// One shard after the other, as the product's map does.
impl<'a, K: Ord + Copy + Hash, V, S> IntoIterator for &'a DashMap<K, V, S> {
    type Item = Ref<'a, K, V>;
    type IntoIter = Box<dyn Iterator<Item = Self::Item> + 'a>;

    fn into_iter(self) -> Self::IntoIter {
        Box::new(self.shards.iter().flat_map(move |shard| {
            let keys: Vec<K> = shard.read().expect("a lock").keys().copied().collect();
            keys.into_iter().filter_map(move |key| self.get(&key))
        }))
    }
}

impl<K: Ord, V> Ref<'_, K, V> {
    pub(crate) fn key(&self) -> &K {
        &self.key
    }

    pub(crate) fn value(&self) -> &V {
        self.shard.get(&self.key).expect("an entry under its lock")
    }
}

impl<K: Ord, V> RefMut<'_, K, V> {
    pub(crate) fn value_mut(&mut self) -> &mut V {
        self.shard.get_mut(&self.key).expect("an entry under its lock")
    }
}

impl<K: Ord, V> OccupiedEntry<'_, K, V> {
    pub(crate) fn get_mut(&mut self) -> &mut V {
        self.0.value_mut()
    }
}

impl<'a, K: Ord + Copy, V> VacantEntry<'a, K, V> {
    pub(crate) fn insert(mut self, value: V) -> RefMut<'a, K, V> {
        let key = self.0.key;
        self.0.shard.insert(key, value);
        self.0
    }
}

#[derive(Debug)]
pub(crate) struct SegQueue<T>(Mutex<VecDeque<T>>);

impl<T> SegQueue<T> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }

    pub(crate) fn push(&self, value: T) {
        self.0.lock().expect("a lock").push_back(value);
    }

    pub(crate) fn pop(&self) -> Option<T> {
        self.0.lock().expect("a lock").pop_front()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().expect("a lock").len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
