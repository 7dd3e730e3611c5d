//! The buckets (layer 1): a concurrent map from identity to state.
//!
//! A bucket that is not in the map is full, or as full as its limit's floor (see
//! [`super::floor`]). Each entry is guarded by the lock of its shard; no code
//! here or above holds two guards at once.
//!
//! The number of buckets is bounded. At the bound a new one takes the place of
//! the fullest of a small sample, which loses least. The sample comes from a
//! queue of all identities that is walked round and round, like the hand of a
//! clock.

use super::bucket::TokenBucket;
use super::key::BucketId;
use super::limit::LimitIndex;
use super::line::{Calls, Line, Ticket};
use super::tokens::Tokens;
use crate::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use crate::sync::{DashMap, Entry, SegQueue, spin_loop};

/// One bucket: its level, this replica's own ledger, and what a higher layer
/// keeps beside it.
#[derive(Debug)]
pub struct Slot<S> {
    /// The level, with everything known subtracted.
    pub bucket: TokenBucket,
    /// Which limit the bucket belongs to.
    pub limit: LimitIndex,
    /// The revision of that limit under whose quota the level stands.
    pub(super) revision: u32,
    /// Which life of the bucket this is: another after it was dropped or reset.
    pub life: u32,
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
    /// The requests that wait for it; none if there are none, so that a check pays
    /// one look.
    pub(super) line: Option<Box<Line>>,
}

impl<S> Slot<S> {
    pub(super) fn new(
        limit: LimitIndex,
        revision: u32,
        bucket: TokenBucket,
        key: Option<&[u8]>,
        life: u32,
    ) -> Self {
        Self {
            bucket,
            limit,
            revision,
            life,
            refused: 0,
            admitted: 0,
            spent: 0,
            returned: 0,
            held: 0,
            key: key.map(Box::from),
            companion: None,
            line: None,
        }
    }

    /// A copy for questions, in whose line nobody waits to be woken.
    pub(super) fn copy(&self) -> Self
    where
        S: Clone,
    {
        Self {
            bucket: self.bucket,
            limit: self.limit,
            revision: self.revision,
            life: self.life,
            refused: self.refused,
            admitted: self.admitted,
            spent: self.spent,
            returned: self.returned,
            held: self.held,
            key: self.key.clone(),
            companion: self.companion.clone(),
            line: self.line.as_ref().map(|line| Box::new(line.outline())),
        }
    }

    /// How many requests wait for this bucket.
    pub fn waiting(&self) -> usize {
        self.line.as_ref().map_or(0, |line| line.len())
    }

    /// What the requests that wait for this bucket cost.
    pub fn awaited(&self) -> Tokens {
        self.line.as_ref().map_or(Tokens::ZERO, |line| line.cost())
    }

    /// Calls the request whose turn it is, because the level has risen or the
    /// bucket is open again.
    pub fn call_front(&self) -> Calls {
        self.line.as_ref().map_or_else(Calls::default, |line| line.call_front())
    }

    /// Whether nobody older waits.
    pub(super) fn is_turn_of(&self, ticket: Ticket) -> bool {
        self.line.as_ref().is_none_or(|line| line.front() >= ticket)
    }

    /// What older requests that wait cost.
    pub(super) fn awaited_before(&self, ticket: Ticket) -> Tokens {
        self.line.as_ref().map_or(Tokens::ZERO, |line| line.cost_before(ticket))
    }

    /// Spent less returned, in micro-tokens.
    pub const fn net(&self) -> u64 {
        self.spent.saturating_sub(self.returned)
    }

    /// The level with what is only held added back.
    pub fn held_level(&self) -> Tokens {
        let held = i64::try_from(self.held).unwrap_or(i64::MAX);
        self.bucket.level().plus(Tokens::from_micros(held))
    }
}

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
    map: DashMap<BucketId, Slot<S>, foldhash::quality::RandomState>,
    count: AtomicUsize,
    max: usize,
    hand: SegQueue<BucketId>,
    lives: AtomicU32,
}

impl<S> Store<S> {
    /// No buckets, and room for `max`.
    pub fn new(max: usize) -> Self {
        Self {
            map: DashMap::with_hasher(foldhash::quality::RandomState::default()),
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
        revision: u32,
        key: Option<&[u8]>,
        make: impl FnOnce() -> TokenBucket,
        make_room: impl Fn() -> Room,
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
                f(slot.get_mut())
            }
            Entry::Vacant(vacant) => {
                // Not before: a bucket of this identity may have been dropped since.
                let slot = Slot::new(limit, revision, make(), key, self.new_life());
                let mut slot = vacant.insert(slot);
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
        let mut seen = 0;
        // Identities without a bucket are skipped, but not for ever.
        for _ in 0..self.max.min(SAMPLE * 16) {
            let Some(id) = self.hand.pop() else { break };
            let Some(found) = self.map.get(&id) else { continue };
            let ranked = rank(id, found.value());
            drop(found);
            match ranked {
                Some(key) if best.as_ref().is_none_or(|(top, _)| key > *top) => {
                    if let Some((_, loser)) = best.replace((key, id)) {
                        self.hand.push(loser);
                    }
                }
                Some(_) | None => self.hand.push(id),
            }
            seen += 1;
            if seen == SAMPLE {
                break;
            }
        }
        let Some((_, id)) = best else {
            // All that are there may be in the samples of others, or about to come.
            return if seen == 0 { Room::Soon } else { Room::None };
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
