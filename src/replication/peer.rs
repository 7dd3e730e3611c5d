//! Peer: another replica, and what it is still to be told.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::catalog::Catalog;
use super::engine::SessionId;
use super::frame::{Incarnation, LimitDeclaration};
use super::ledger::{Base, OriginId};
use crate::limiter::{BucketId, LimitIndex};
use crate::time::Timestamp;

/// Buckets that one peer may still have to be told of. Beyond it the backlog is
/// dropped and the peer is sent a snapshot instead, which says as much.
pub(super) const MAX_PENDING: usize = 16_384;

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

/// Buckets waiting to be sent to one peer, oldest first, with the totals that
/// the peer's stream starts from.
#[derive(Debug, Default)]
pub(super) struct Pending {
    bases: BTreeMap<BucketId, Base>,
    order: VecDeque<BucketId>,
}

impl Pending {
    /// Adds a bucket. The oldest base of its generation is kept, since nothing
    /// after it was sent. `false` if there are too many.
    pub(super) fn add(&mut self, bucket: BucketId, base: Base) -> bool {
        let count = self.bases.len();
        match self.bases.get_mut(&bucket) {
            Some(known) if known.generation == base.generation => {
                known.spent = known.spent.min(base.spent);
                known.returned = known.returned.min(base.returned);
            }
            Some(known) => *known = base,
            None if count >= MAX_PENDING => return false,
            None => {
                self.bases.insert(bucket, base);
                self.order.push_back(bucket);
            }
        }
        true
    }

    pub(super) fn pop(&mut self) -> Option<(BucketId, Base)> {
        let bucket = self.order.pop_front()?;
        self.bases.remove(&bucket).map(|base| (bucket, base))
    }

    pub(super) fn len(&self) -> usize {
        self.bases.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bases.is_empty()
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
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
    pub(super) pending: Pending,
    /// The backlog was dropped: a snapshot is due.
    pub(super) resync: bool,
    /// Buckets of a snapshot still to be sent, and whether one is under way.
    pub(super) snapshot: Option<VecDeque<BucketId>>,
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
