//! Peer: another replica, and what it is still to be told.

use std::collections::{BTreeSet, VecDeque};
use std::hash::BuildHasher as _;
use std::num::NonZeroU16;

use super::catalog::Catalog;
use super::engine::SessionId;
use super::frame::{Incarnation, LimitDeclaration};
use super::ledger::{Base, OriginId};
use crate::limiter::{BucketId, LimitIndex};
use crate::time::Timestamp;

/// Buckets that one peer may still have to be told of. Beyond it the backlog is
/// dropped and the peer is sent a snapshot instead, which says as much.
pub(super) const MAX_PENDING: usize = 8_192;

/// Whether a peer is heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PeerState {
    /// It is heard.
    Live,
    /// It missed its heartbeats, or its session was lost.
    Suspect,
}

impl PeerState {
    /// The state as a metric label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Suspect => "suspect",
        }
    }
}

/// A bucket to be told of, and the totals that the peer's stream starts from.
pub(super) type Told = (BucketId, Base);

/// Buckets waiting to be sent to one peer, oldest first.
///
/// A queue with an index beside it: a hash table with linear probing that holds
/// numbers of entries and nothing else, so that the backlog of a stream that
/// stands still stays small.
#[derive(Debug, Default)]
pub(super) struct Pending {
    queue: VecDeque<Told>,
    /// Number of the oldest entry, below [`NUMBERS`]; the others follow it.
    first: u16,
    /// Numbers of entries, plus one. A power of two in length, at most half full.
    index: Vec<Option<NonZeroU16>>,
    hasher: foldhash::quality::RandomState,
}

/// Entries are numbered round and round, below this.
const NUMBERS: u16 = u16::MAX;
/// Shortest index that is not empty.
const SHORTEST_INDEX: usize = 16;

impl Pending {
    /// Adds a bucket. The oldest base of its generation is kept, since nothing
    /// after it was sent. `false` if there are too many.
    pub(super) fn add(&mut self, bucket: BucketId, base: Base) -> bool {
        if 2 * (self.queue.len() + 1) > self.index.len() {
            self.grow();
        }
        let place = self.find(bucket);
        match self.index.get(place).copied().flatten() {
            Some(number) => {
                let position = self.position(number);
                let Some((_, known)) = self.queue.get_mut(position) else { return true };
                if known.generation == base.generation {
                    known.spent = known.spent.min(base.spent);
                    known.returned = known.returned.min(base.returned);
                } else {
                    *known = base;
                }
                true
            }
            None if self.queue.len() >= MAX_PENDING => false,
            None => {
                let number = self.number(self.queue.len());
                self.queue.push_back((bucket, base));
                if let Some(free) = self.index.get_mut(place) {
                    *free = number;
                }
                true
            }
        }
    }

    pub(super) fn pop(&mut self) -> Option<Told> {
        let (bucket, _) = *self.queue.front()?;
        let place = self.find(bucket);
        self.vacate(place);
        self.first = (self.first + 1) % NUMBERS;
        self.queue.pop_front()
    }

    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Bytes of memory that the backlog takes.
    pub(super) fn bytes(&self) -> usize {
        self.queue.capacity() * size_of::<Told>()
            + self.index.capacity() * size_of::<Option<NonZeroU16>>()
    }

    /// The number of the entry at a position of the queue, plus one.
    fn number(&self, position: usize) -> Option<NonZeroU16> {
        let number = (usize::from(self.first) + position) % usize::from(NUMBERS);
        u16::try_from(number + 1).ok().and_then(NonZeroU16::new)
    }

    fn position(&self, number: NonZeroU16) -> usize {
        let numbers = usize::from(NUMBERS);
        (usize::from(number.get()) - 1 + numbers - usize::from(self.first)) % numbers
    }

    /// Where a bucket would be if nothing else were in the index.
    fn home(&self, bucket: BucketId) -> usize {
        let hash = self.hasher.hash_one(bucket) as usize;
        hash & self.index.len().wrapping_sub(1)
    }

    /// Where the bucket is in the index, or else the free place for it.
    fn find(&self, bucket: BucketId) -> usize {
        let mut place = self.home(bucket);
        while let Some(number) = self.index.get(place).copied().flatten() {
            let found = self.queue.get(self.position(number));
            if found.is_some_and(|(found, _)| *found == bucket) {
                break;
            }
            place = (place + 1) & (self.index.len() - 1);
        }
        place
    }

    /// Empties a place, and moves up whatever was put behind it for want of it.
    fn vacate(&mut self, mut free: usize) {
        let mask = self.index.len().wrapping_sub(1);
        let mut place = free;
        loop {
            place = (place + 1) & mask;
            let Some(number) = self.index.get(place).copied().flatten() else { break };
            let Some((bucket, _)) = self.queue.get(self.position(number)) else { break };
            let home = self.home(*bucket);
            // It may go to the free place if that is not before its home.
            if place.wrapping_sub(home) & mask >= place.wrapping_sub(free) & mask {
                self.index.swap(free, place);
                free = place;
            }
        }
        if let Some(slot) = self.index.get_mut(free) {
            *slot = None;
        }
    }

    fn grow(&mut self) {
        let length = (2 * self.index.len()).max(SHORTEST_INDEX);
        self.index = vec![None; length];
        for position in 0..self.queue.len() {
            let Some((bucket, _)) = self.queue.get(position) else { break };
            let mut place = self.home(*bucket);
            while self.index.get(place).copied().flatten().is_some() {
                place = (place + 1) & (length - 1);
            }
            let number = self.number(position);
            if let Some(free) = self.index.get_mut(place) {
                *free = number;
            }
        }
    }
}

/// A snapshot that is being sent. It is walked in passes, so that what is still
/// to be sent stays small: first the deepest deficits, then, if there are more,
/// all buckets in the order of their identities.
#[derive(Debug, Default)]
pub(super) struct SnapshotWalk {
    /// Buckets of the present pass that are still to be sent.
    pub(super) buckets: VecDeque<BucketId>,
    /// What the next pass begins after.
    pub(super) next: NextPass,
}

/// What follows the present pass of a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum NextPass {
    /// The first pass: the deepest deficits.
    #[default]
    Deepest,
    /// The smallest identities of all.
    Smallest,
    /// The smallest identities after this one.
    After(BucketId),
    /// Nothing.
    Nothing,
}

/// A replica that was met and is not known to be gone.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) origin: OriginId,
    pub(super) name: String,
    pub(super) address: String,
    pub(super) session: Option<SessionId>,
    pub(super) state: PeerState,
    pub(super) catalog: Catalog,
    /// Its limits as it declared them.
    pub(super) declared: Vec<LimitDeclaration>,
    /// Limits of whose resets it is still to be told.
    pub(super) limit_epochs: BTreeSet<LimitIndex>,
    /// Limits of whose pauses it is still to be told.
    pub(super) limit_pauses: BTreeSet<LimitIndex>,
    pub(super) pending: Pending,
    /// The backlog was dropped: a snapshot is due.
    pub(super) resync: bool,
    /// The snapshot that is under way.
    pub(super) snapshot: Option<SnapshotWalk>,
    /// A snapshot is wanted from the peer, and whether it was asked for.
    pub(super) wanted: Option<Wanted>,
    /// Smoothed round trip in nanoseconds.
    pub(super) round_trip: u64,
    pub(super) heard_at: Timestamp,
    pub(super) sent_at: Timestamp,
    /// Either side spoke of buckets lately, so heartbeats are frequent.
    pub(super) active_until: Timestamp,
    pub(super) active_since: Timestamp,
    pub(super) lost_at: Option<Timestamp>,
    /// Since when it is heard without a break, and since when it is not.
    pub(super) heard_since: Timestamp,
    pub(super) silent_since: Option<Timestamp>,
}

/// How far a snapshot from a peer has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// It is to be asked for.
    Ask,
    /// It was asked for.
    Asked,
}

/// A peer, for operators.
#[derive(Clone, Debug, PartialEq)]
pub struct PeerView {
    /// Its present life.
    pub incarnation: Incarnation,
    /// Its label.
    pub name: String,
    /// Where it was dialled or says it can be; may be empty.
    pub address: String,
    /// Whether it is heard.
    pub state: PeerState,
    /// Whether there is a session.
    pub connected: bool,
    /// Nanoseconds since the last frame from it.
    pub heard_nanos_ago: u64,
    /// Nanoseconds since the last frame to it.
    pub sent_nanos_ago: u64,
    /// Smoothed round trip in nanoseconds.
    pub round_trip_nanos: u64,
    /// Buckets it is still to be told of.
    pub pending: usize,
    /// Where its limits differ from ours.
    pub mismatches: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn bucket(number: u16) -> BucketId {
        BucketId::from_bytes(u128::from(number).to_le_bytes())
    }

    fn base(spent: u64) -> Base {
        Base { generation: 1, spent, returned: 0 }
    }

    #[test]
    fn a_backlog_is_bounded_in_count_and_in_bytes() {
        let mut pending = Pending::default();
        for number in 0..MAX_PENDING as u16 {
            assert!(pending.add(bucket(number), base(1)));
        }
        assert!(!pending.add(bucket(u16::MAX), base(1)), "one too many");
        assert!(pending.add(bucket(5), base(1)), "one that is there already");
        assert!(pending.bytes() <= 512 * 1024, "{} bytes", pending.bytes());
    }

    #[test]
    fn numbers_may_go_round() {
        let mut pending = Pending::default();
        for number in 0..200_000_u32 {
            let id = bucket((number % 60_000) as u16);
            assert!(pending.add(id, base(u64::from(number))));
            if pending.len() > 3 {
                let (oldest, _) = pending.pop().unwrap();
                assert_eq!(oldest, bucket(((number - 3) % 60_000) as u16));
            }
        }
    }

    proptest! {
        /// Against the plainest structure that does the same.
        #[test]
        fn a_backlog_keeps_order_and_the_oldest_base(
            steps in prop::collection::vec((0u16..40, 0u64..100, any::<bool>()), 0..400),
        ) {
            let mut pending = Pending::default();
            let (mut order, mut bases) = (VecDeque::new(), BTreeMap::new());
            for (number, spent, pops) in steps {
                if pops {
                    let expected = order.pop_front().map(|id| (id, base(bases.remove(&id).unwrap())));
                    prop_assert_eq!(pending.pop(), expected);
                } else {
                    let id = bucket(number);
                    prop_assert!(pending.add(id, base(spent)));
                    let known = bases.entry(id).or_insert_with(|| { order.push_back(id); spent });
                    *known = (*known).min(spent);
                }
                prop_assert_eq!(pending.len(), order.len());
            }
            while let Some(id) = order.pop_front() {
                prop_assert_eq!(pending.pop(), Some((id, base(bases.remove(&id).unwrap()))));
            }
            prop_assert!(pending.pop().is_none());
        }
    }
}
