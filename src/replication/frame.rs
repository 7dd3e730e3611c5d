//! Frames: what replicas say to each other, free of any encoding.
//!
//! Amounts are micro-tokens. Totals are cumulative for one origin, bucket and
//! generation, so that loss, repetition and reordering of frames change nothing.

use std::fmt;

use crate::limiter::BucketId;

/// One life of a replica: 128 random bits drawn at every start, the origin of
/// all that it spends. Addresses and names are only labels.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation(u128);

impl Incarnation {
    /// The incarnation with these bytes (big-endian).
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(u128::from_be_bytes(bytes))
    }

    /// The bytes of the incarnation (big-endian).
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Incarnation({self})")
    }
}

/// One frame of a session.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame {
    /// Counts the frames of this session and direction from 1.
    pub seq: u64,
    /// The newest `seq` received from the other side.
    pub ack: u64,
    /// The sender's clock, in milliseconds; means nothing to others.
    pub stamp_ms: u64,
    /// The newest stamp received from the other side, 0 if none.
    pub echo_ms: u64,
    /// How long the sender held that stamp before this frame left.
    pub held_ms: u32,
    /// What is said.
    pub body: Body,
}

/// What a frame says.
#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    /// Nothing but being alive. Also what an unknown body of a newer version
    /// becomes.
    Heartbeat,
    /// Who the sender is; the first frame of each direction, and again when its
    /// limits change.
    Hello(Hello),
    /// What the sender spent.
    Update(Update),
    /// Please send a snapshot.
    SnapshotRequest {
        /// The sender did not know the receiver before this session.
        first_meeting: bool,
    },
    /// A part of a snapshot.
    Snapshot(Snapshot),
    /// The sender leaves for good.
    Goodbye(String),
}

/// Who a replica is and what its limits are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The protocol version the sender speaks.
    pub version: u32,
    /// The oldest version it still understands.
    pub oldest_version: u32,
    /// Replicas of other groups are strangers.
    pub group: String,
    /// The sender's present life.
    pub incarnation: Incarnation,
    /// A label for people.
    pub name: String,
    /// Where it believes it can be dialled; may be empty.
    pub address: String,
    /// Its limits; entries refer to them by index.
    pub limits: Vec<LimitDeclaration>,
    /// Addresses it knows, as hints.
    pub peers: Vec<String>,
    /// What it knows may be incomplete.
    pub joining: bool,
    /// Counts the Hellos of this session from 1.
    pub revision: u64,
}

/// A limit as its replica declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitDeclaration {
    /// Its identity among replicas.
    pub name: String,
    /// Hash of its key parts.
    pub parts: u64,
    /// Tokens per period.
    pub tokens: u64,
    /// The period in milliseconds.
    pub period_ms: u64,
    /// Capacity of a bucket.
    pub burst: u64,
}

/// What the sender spent, and which limits were reset or closed as a whole.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Update {
    /// One for each bucket.
    pub entries: Vec<Entry>,
    /// Limits all of whose buckets were reset.
    pub limit_epochs: Vec<LimitEpoch>,
    /// Limits all of whose buckets were closed or opened.
    pub limit_pauses: Vec<LimitPause>,
}

/// A limit all of whose buckets were reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitEpoch {
    /// Index into the sender's declared limits.
    pub limit: u32,
    /// The epoch that its buckets have reached at least.
    pub epoch: u64,
}

/// What the sender spent from one bucket.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The bucket.
    pub bucket: BucketId,
    /// Index into the sender's declared limits.
    pub limit: u32,
    /// Which life of the sender's ledger; newer replaces older.
    pub generation: u32,
    /// Raised by every reset of the bucket.
    pub epoch: u64,
    /// Number of this flush of the bucket.
    pub flush: u32,
    /// The newest flush of the bucket that the sender got from the receiver.
    pub ack: u32,
    /// Total spent.
    pub spent: u64,
    /// Total returned.
    pub returned: u64,
    /// The part of `spent` that a receiver without a baseline must apply.
    pub fresh_spent: u64,
    /// The part of `returned` that a receiver without a baseline must apply.
    pub fresh_returned: u64,
    /// The sender's level.
    pub level: i64,
    /// What the level contains of the spending of replicas other than the sender and
    /// the receiver, net; `None` for buckets whose levels are reckoned.
    pub elsewhere: Option<u64>,
    /// The sender's demand, in micro-tokens per nanosecond.
    pub demand: f64,
    /// The canonical key, if it may travel and the receiver may lack it.
    pub key: Option<Vec<u8>>,
    /// The sender closed the bucket, or opened it again.
    pub pause: Option<PauseLeft>,
}

/// A pause as it travels: clocks need not agree on when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PauseLeft {
    /// Larger replaces smaller; of equal ones the later end counts.
    pub generation: u64,
    /// Milliseconds until it ends, 0 if it has.
    pub millis: u64,
    /// Milliseconds for which the generation is to be remembered, because what it
    /// replaced may still be told.
    pub remembered_millis: u64,
}

/// A limit all of whose buckets are closed, or were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitPause {
    /// Index into the sender's declared limits.
    pub limit: u32,
    /// For how long.
    pub pause: PauseLeft,
}

/// A part of a snapshot: buckets that are not full.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// The buckets.
    pub rows: Vec<Row>,
    /// No more parts follow.
    pub last: bool,
    /// The sender was joining itself.
    pub joining: bool,
}

/// One bucket of a snapshot.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The bucket.
    pub bucket: BucketId,
    /// Index into the sender's declared limits.
    pub limit: u32,
    /// Raised by every reset of the bucket.
    pub epoch: u64,
    /// What is missing until it is full.
    pub deficit: u64,
    /// The spending that the deficit contains, by origin.
    pub contributions: Vec<Contribution>,
    /// The canonical key, if it may travel.
    pub key: Option<Vec<u8>>,
    /// The bucket is closed, or was.
    pub pause: Option<PauseLeft>,
}

/// One origin's share in a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Contribution {
    /// Who spent it.
    pub incarnation: Incarnation,
    /// Which life of its ledger.
    pub generation: u32,
    /// Total spent.
    pub spent: u64,
    /// Total returned.
    pub returned: u64,
    /// Demand as it last said, in micro-tokens per nanosecond.
    pub demand: f64,
    /// Net micro-tokens, from the beginning of the total, that the deficit does not
    /// contain: they were spent before the sender first heard of the origin.
    pub unseen: u64,
}
